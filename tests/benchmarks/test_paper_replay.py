"""A replay of a recorded trace does what a real call does, count for count, and recording does not change the text."""

import copy
import heapq

import kit
import pytest
import torch

import tetris_hf


LENGTHS = (3, 7, 12, 5, 9)
NEW, DEPTH = 30, 5

SELECTORS = {
    "TETRIS": tetris_hf.TetrisSelector,
    "calibrated": lambda: tetris_hf.TetrisSelector(calibration=tetris_hf.AcceptanceCalibration()),
    "window": lambda: tetris_hf.FixedWindowSelector(2),
    "dynamic": lambda: tetris_hf.DynamicWindowSelector(0.02),
    "list": lambda: [tetris_hf.ConfidenceThresholdSelector(0.2), tetris_hf.TetrisSelector()],
}


@pytest.fixture(scope="module")
def ending(target):
    """The target with an end token that rows reach at unequal times, one of them within a few tokens."""
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = int(kit.plain(model, kit.ragged(LENGTHS), max_new_tokens=NEW)[1, 12 + 9])
    return model


@pytest.fixture(scope="module")
def poor(target):
    return kit.near(target, 0.1)


@pytest.fixture(scope="module")
def trace(paper, ending, near, poor):
    tetris_hf.enable()
    drafters = {"near": tetris_hf.AssistantDrafter(near), "poor": tetris_hf.AssistantDrafter(poor)}
    sets = ["a", "a", "b", "b", "b"]
    recorded = paper["record"].record(ending, [kit.ragged(LENGTHS)], drafters, DEPTH, NEW, sets)
    tetris_hf.disable()
    return recorded


def counts(stats):
    return [int(value.sum()) for value in (stats.live_steps, stats.verified, stats.accepted, stats.bonus)]


def test_the_trace_holds_the_text_and_what_each_drafter_says_of_it(trace, ending, near, poor):
    batch = kit.ragged(LENGTHS)
    plain = kit.plain(ending, batch, max_new_tokens=NEW, eos_token_id=None)[:, 12:]
    for index, (text, end) in enumerate(zip(trace.text, trace.ends, strict=True)):
        assert text[:end].tolist() == plain[index, :end].tolist()
        assert trace.prompts[index].tolist() == kit.row(batch, index)["input_ids"][0].tolist()
    assert len(set(trace.ends.tolist())) > 2 and trace.ends.max() == NEW
    assert ending.generation_config.eos_token_id is not None, "the recorder puts the end token back"
    for name, model in (("near", near), ("poor", poor)):
        for index, place in ((0, 0), (1, 6), (3, 11)):
            prefix = torch.cat([trace.prompts[index], trace.text[index, : place + 1]])[None]
            own = kit.plain(model, {"input_ids": prefix, "attention_mask": torch.ones_like(prefix)}, max_new_tokens=5)
            assert trace.drafts[name].tokens[index, place].tolist() == own[0, prefix.shape[1] :].tolist()
    assert 0.5 < trace.stands("near").float().mean() and trace.stands("poor").float().mean() < 1


def test_stands_by_a_loop(trace):
    for name, drafted in trace.drafts.items():
        stands = trace.stands(name)
        for index, place in ((0, 3), (2, 0), (4, 20), (1, NEW - 3)):
            expected, text = 0, trace.text[index].tolist()
            for offset in range(int(drafted.lengths[index, place])):
                if int(drafted.tokens[index, place, offset]) != text[place + 1 + offset]:
                    break
                expected += 1
            assert int(stands[index, place]) == expected


def test_a_trace_survives_its_file(paper, trace, tmp_path):
    trace.save(tmp_path / "some" / "trace.safetensors")
    loaded = paper["traces"].Trace.load(tmp_path / "some" / "trace.safetensors")
    assert loaded.sets == trace.sets and loaded.of("b") == [2, 3, 4] and loaded.of("all") == [0, 1, 2, 3, 4]
    assert torch.equal(loaded.text, trace.text) and torch.equal(loaded.ends, trace.ends)
    assert all(torch.equal(a, b) for a, b in zip(loaded.prompts, trace.prompts, strict=True))
    for name, drafted in trace.drafts.items():
        for part in ("tokens", "lengths", "probabilities"):
            assert torch.equal(getattr(loaded.drafts[name], part), getattr(drafted, part))
    with pytest.raises(ValueError, match="no prompts of 'c': choose among"):
        loaded.of("c")


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("capacity, depth", [(3, 2), (7, 4), (12, 5)])
def test_a_closed_batch_replays_a_call_of_generate(paper, trace, ending, near, poor, selector, capacity, depth):
    for name, model in (("near", near), ("poor", poor)):
        out = kit.speculate(
            ending, kit.ragged(LENGTHS), model, capacity, depth, SELECTORS[selector](), max_new_tokens=NEW
        )
        replayed = paper["replay"].replay(
            trace, range(5), name, 5, capacity, depth, SELECTORS[selector](), refill=False
        )
        assert replayed.steps.sum(0).tolist() == counts(out.tetris_stats)
        assert len(replayed.steps) == out.tetris_stats.steps
        assert (replayed.took[:, 1] - replayed.took[:, 0]).tolist() == out.tetris_stats.live_steps.tolist()
        ratios = replayed.ratios(full_only=False)
        assert ratios["vsr"] == pytest.approx(out.tetris_stats.vsr)
        assert ratios["ter"] == pytest.approx(out.tetris_stats.ter)


def test_lookup_and_mixtures_draft_for_real(paper, trace, ending, near):
    for names, assistant in (
        ("lookup", tetris_hf.PromptLookupDrafter()),
        (("lookup", "near"), [tetris_hf.PromptLookupDrafter(), near]),
    ):
        out = kit.speculate(ending, kit.ragged(LENGTHS), assistant, 7, 4, max_new_tokens=NEW)
        replayed = paper["replay"].replay(trace, range(5), names, 5, 7, 4, refill=False)
        assert replayed.steps.sum(0).tolist() == counts(out.tetris_stats)


def naive(trace, order, name, num_rows, capacity, depth):
    """TETRIS at a batch that is held full, in plain Python: the paper's heap walk over rows, one row at a time."""
    waiting, serving, steps = list(order), {}, []
    while True:
        for row in range(num_rows):
            if row not in serving and waiting:
                serving[row] = [waiting.pop(0), 1]  # the prompt's own forward gives the first token
                if int(trace.ends[serving[row][0]]) == 1:
                    del serving[row]
        if not serving:
            return steps
        scores, lengths, heap = {}, dict.fromkeys(serving, 0), []
        for row, (text, done) in serving.items():
            room = min(int(trace.drafts[name].lengths[text, done - 1]), NEW - done - 1, depth)
            scores[row] = trace.drafts[name].probabilities[text, done - 1].cumprod(0).tolist()[:room]
            if room:
                heapq.heappush(heap, (-scores[row][0], 0, row))
        while heap and sum(lengths.values()) < capacity:
            _, place, row = heapq.heappop(heap)
            lengths[row] = place + 1
            if place + 1 < len(scores[row]):
                heapq.heappush(heap, (-scores[row][place + 1], place + 1, row))
        step = [len(serving), sum(lengths.values()), 0, 0]
        for row, (text, done) in list(serving.items()):
            accepted = 0
            while accepted < lengths[row] and (
                int(trace.drafts[name].tokens[text, done - 1, accepted]) == int(trace.text[text, done + accepted])
            ):
                accepted += 1
            kept = min(accepted + 1, int(trace.ends[text]) - done)
            step[2] += min(accepted, kept)
            step[3] += kept > accepted
            serving[row][1] += kept
            if serving[row][1] == int(trace.ends[text]):
                del serving[row]
        steps.append(step)


@pytest.mark.parametrize("num_rows, capacity, depth", [(2, 3, 4), (3, 7, 5), (4, 6, 2), (5, 1, 3)])
def test_a_batch_that_is_held_full_equals_a_loop_over_a_heap(paper, trace, num_rows, capacity, depth):
    order = [3, 0, 4, 1, 2, 0, 3, 2, 1]
    for name in ("near", "poor"):
        replayed = paper["replay"].replay(trace, order, name, num_rows, capacity, depth)
        assert replayed.steps.tolist() == naive(trace, order, name, num_rows, capacity, depth)
        assert replayed.full.sum() > 0 and int(replayed.steps[:, 1].max()) <= capacity


@pytest.mark.parametrize("num_rows", [2, 3])
def test_a_window_in_a_batch_that_is_held_full_replays_generate_batch(paper, trace, ending, near, num_rows):
    # Under a window rows do not depend on each other, so not on the step in which the engine lets a request in either.
    order = [3, 0, 4, 1, 2, 0, 3]
    prompts = [trace.prompts[index].tolist() for index in order]
    selector = tetris_hf.FixedWindowSelector(2)
    answers = tetris_hf.generate_batch(
        ending, prompts, near, 2 * num_rows, num_rows, 4, selector, progress_bar=False, do_sample=False,
        max_new_tokens=NEW,
    )  # fmt: skip
    replayed = paper["replay"].replay(trace, order, "near", num_rows, 2 * num_rows, 4, selector)
    assert [len(answer.generated_tokens) for answer in answers] == trace.ends[order].tolist()
    assert int(replayed.steps[:, 1].sum()) == sum(answer.verified for answer in answers)
    assert int(replayed.steps[:, 2].sum()) == sum(answer.accepted for answer in answers)


def test_shorter_texts(paper, trace, ending, near):
    out = kit.speculate(ending, kit.ragged(LENGTHS), near, 7, 4, max_new_tokens=11)
    replayed = paper["replay"].replay(trace, range(5), "near", 5, 7, 4, refill=False, max_new_tokens=11)
    assert replayed.steps.sum(0).tolist() == counts(out.tetris_stats)


def test_foresight_verifies_what_stands_and_nothing_else(paper, trace, ending, near):
    run = kit.speculate(ending, kit.ragged(LENGTHS), None, 0, max_new_tokens=NEW)
    out = kit.speculate(ending, kit.ragged(LENGTHS), near, 7, 4, tetris_hf.OracleSelector(run), max_new_tokens=NEW)
    replayed = paper["replay"].replay(trace, range(5), "near", 5, 7, 4, paper["replay"].Foresight(), refill=False)
    assert replayed.steps.sum(0).tolist() == counts(out.tetris_stats)
    assert replayed.ratios(full_only=False)["vsr"] == 1.0


def test_a_closed_batch_needs_a_request_for_every_row(paper, trace):
    with pytest.raises(ValueError, match="got 3 requests and 2 rows"):
        paper["replay"].replay(trace, range(3), "near", 2, 4, 2, refill=False)
