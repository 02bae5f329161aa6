"""Refilled rows: every answer is that of its prompt alone, whatever the order, the neighbours and the moment."""

import random

import kit
import pytest
import torch
from huggingface_hub import constants
from scipy.stats import chisquare
from test_step_graphs import DRAFTERS, pretend_gpu

import tetris_hf
from tetris_hf import TetrisDecoding, generate_batch, iterate_batch
from tetris_hf.generation import assistant_drafter, batch_job, decoding
from tetris_hf.generation.packing import Packing
from tetris_hf.generation.slot_pool import SlotPool
from tetris_hf.generation.verifier import Verifier


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(2, kit.VOCABULARY) for _ in range(generator.randint(1, 14))] for _ in range(count)]


def alone(target, ids: list[int], **settings) -> list[int]:
    prompt = torch.tensor([ids], device=target.device)
    return target.generate(prompt, do_sample=False, **settings)[0, len(ids) :].tolist()


@pytest.fixture(params=["eager", "fixed shapes"])
def shapes(request, monkeypatch):
    """Both ways in which a step can run; prompts are fed in pieces that suit tiny ones."""
    monkeypatch.setattr(batch_job, "FEEDS", (0, 8, 32))
    if request.param == "fixed shapes":
        pretend_gpu(monkeypatch)
    yield
    tetris_hf.release_graphs()


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_answer_is_that_of_its_prompt_alone(name, batch_size, shapes):
    target = kit.tiny()
    inputs = prompts(11)
    settings = {"max_new_tokens": 12, "eos_token_id": [5, 9, 33]}
    expected = [alone(target, ids, **settings) for ids in inputs]
    drafter = DRAFTERS[name](target)
    for order in (list(range(11)), random.Random(1).sample(range(11), 11)):
        outputs = generate_batch(
            target, [inputs[i] for i in order], drafter, 2 * batch_size, batch_size, 3, progress_bar=False,
            do_sample=False, **settings,
        )  # fmt: skip
        assert [output.generated_tokens for output in outputs] == [expected[i] for i in order]
        assert [output.prompt_ids for output in outputs] == [inputs[i] for i in order]
        for output in outputs:
            stopped = output.generated_tokens[-1] in settings["eos_token_id"]
            assert output.finish_reason == ("stop" if stopped else "length") and output.error is None
            # One token comes from the prompt, every step adds what was accepted and one more at most.
            assert output.accepted + output.steps >= len(output.generated_tokens) - 1
            assert output.accepted <= output.verified


def test_lengths_of_their_own_names_and_rows_that_must_be_wider(shapes):
    target = kit.tiny(max_position_embeddings=512)
    inputs = [
        {"input_ids": ids, "max_new_tokens": new, "request_id": f"r{i}"}
        for i, (ids, new) in enumerate(zip(prompts(7), [3, 150, 1, 20, 140, 9, 2], strict=True))
    ]
    outputs = generate_batch(target, iter(inputs), kit.near(target), 6, 2, progress_bar=False, do_sample=False)
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(7)]
    for given, output in zip(inputs, outputs, strict=True):
        assert output.generated_tokens == alone(target, given["input_ids"], max_new_tokens=given["max_new_tokens"])


def test_what_cannot_be_served_is_an_error_and_the_others_go_on():
    target = kit.tiny()  # 128 positions
    good = prompts(3)
    inputs = [good[0], [], good[1], [5] * 128, [kit.VOCABULARY], {"input_ids": [4], "max_new_tokens": 0}, {}, good[2]]
    outputs = generate_batch(target, inputs, batch_size=2, progress_bar=False, do_sample=False, max_new_tokens=5)
    assert [output.error is None for output in outputs] == [True, False, True, False, False, False, False, True]
    for output, words in zip(
        (outputs[1], outputs[3], outputs[4], outputs[5], outputs[6]),
        ("is the prompt empty", "shorten it", "must be in [0, 63]", "at least 1", "input_ids"),
        strict=True,
    ):
        assert words in output.error and output.finish_reason == "error" and not output.generated_tokens
    (full,) = generate_batch(target, [[5] * 126], progress_bar=False, do_sample=False, max_new_tokens=5)
    assert len(full.generated_tokens) == 2 and full.finish_reason == "length", "the context ends"
    assert [outputs[i].generated_tokens for i in (0, 2, 7)] == [alone(target, ids, max_new_tokens=5) for ids in good]


def test_answers_come_when_they_are_there_and_inputs_are_read_as_needed():
    target = kit.tiny()
    read = []

    def source():
        for index, ids in enumerate(prompts(20)):
            read.append(index)
            yield {"input_ids": ids, "max_new_tokens": 2 if index % 2 else 30}

    answers = iterate_batch(target, source(), batch_size=4, progress_bar=False, do_sample=False)
    place, _ = next(answers)
    assert place % 2 == 1 and len(read) <= 8, "a short answer first, and no more read than a batch and its successors"
    assert {place} | {place for place, _ in answers} == set(range(20))


def test_out_of_memory_loses_nothing(monkeypatch, shapes):
    target = kit.tiny()
    inputs = prompts(9)
    calls = []

    def scarce(module, args):
        calls.append(args[0].numel())
        if calls[-1] > 5 and len(calls) > 4:  # more tokens than five rows' step
            raise torch.OutOfMemoryError("CUDA out of memory.")

    short = [ids[:2] for ids in inputs]
    expected = [alone(target, ids, max_new_tokens=6) for ids in short]
    calls.clear()
    target.get_input_embeddings().register_forward_pre_hook(scarce)
    monkeypatch.setattr(batch_job, "PREFILL_TOKENS", 4)
    monkeypatch.setattr(batch_job, "FEEDS", (0, 2))
    outputs = generate_batch(target, short, batch_size=8, progress_bar=False, do_sample=False, max_new_tokens=6)
    assert [output.generated_tokens for output in outputs] == expected


@pytest.mark.parametrize("feeds", [(0, 1), (0, 3, 5)])
def test_long_prompts_are_fed_beside_running_rows(monkeypatch, shapes, feeds):
    target = kit.tiny()
    inputs = [[2 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate([3, 4, 1, 40, 25, 33, 1, 4])]
    new = [5, 30, 9, 12, 6, 9, 20, 3]
    given = [{"input_ids": ids, "max_new_tokens": many} for ids, many in zip(inputs, new, strict=True)]
    monkeypatch.setattr(batch_job, "FEEDS", feeds)
    sizes = []
    expected = [alone(target, ids, max_new_tokens=many) for ids, many in zip(inputs, new, strict=True)]
    drafters = ((None, 0), (kit.near(target), 5), (DRAFTERS["heads"](target), 5))
    target.get_input_embeddings().register_forward_pre_hook(lambda module, args: sizes.append(args[0].numel()))
    for drafter, capacity in drafters:
        sizes.clear()
        outputs = generate_batch(target, given, drafter, capacity, 3, 3, progress_bar=False, do_sample=False)
        assert [output.generated_tokens for output in outputs] == expected
        # The first prompts, 8 tokens, are computed by themselves, later ones in pieces.
        assert max(size for size in sizes if size != 8) <= 3 + capacity + feeds[-1]


def test_an_assistant_reads_each_prompt_once(shapes):
    """Also where nothing else runs and a prompt is computed at once, in a row that served another before."""
    target = kit.tiny()
    near, inputs = kit.near(target), [[3] * 11, [4] * 17, [5] * 23]
    with kit.counted_tokens(near) as tokens:
        generate_batch(target, inputs, near, 2, 1, 2, progress_bar=False, do_sample=False, max_new_tokens=4)
    captured = 2 + max(batch_job.FEEDS)  # a captured step has room for two tokens and a feed
    assert [number for number in tokens if 10 < number != captured] == [11, 17, 23]


@pytest.mark.parametrize("name, feeds", [("same", (0, 1)), ("mixed", (0, 3, 5)), ("same", (0, 32))])
def test_an_assistant_takes_in_the_prompts_that_rows_wait_for(monkeypatch, shapes, name, feeds):
    """The target as its own assistant is always right, in refilled rows from their first draft on."""
    monkeypatch.setattr(batch_job, "FEEDS", feeds)
    target, same = kit.tiny(), kit.tiny()
    inputs = [[2 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate([3, 4, 1, 14, 9, 11, 1, 4])]
    new = [5, 14, 9, 12, 6, 9, 10, 3]
    given = [{"input_ids": ids, "max_new_tokens": many} for ids, many in zip(inputs, new, strict=True)]
    drafter = [same, kit.tiny()] if name == "mixed" else same
    outputs = generate_batch(target, given, drafter, 100, 3, 3, progress_bar=False, do_sample=False)
    for output, ids, many in zip(outputs, inputs, new, strict=True):
        assert output.generated_tokens == alone(target, ids, max_new_tokens=many)
        assert output.accepted == output.verified > 0
        at_once = -(-(many - 1) // 4)  # three drafts and one token more a step; the prompt's own may be another
        assert at_once <= output.steps <= at_once + 1


def test_prompts_longer_than_the_assistants_context(monkeypatch, shapes):
    """It takes in as much as it has room for and drafts nothing there; in other rows it is as right as ever."""
    monkeypatch.setattr(assistant_drafter, "text_limit", lambda model: 24)
    target, same = kit.tiny(), kit.tiny()
    given = [
        [2 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate([3, 30, 5, 40, 23, 9, 24, 1, 12])
    ]
    outputs = generate_batch(target, given, same, 100, 3, 3, progress_bar=False, do_sample=False, max_new_tokens=20)
    for ids, output in zip(given, outputs, strict=True):
        assert output.generated_tokens == alone(target, ids, max_new_tokens=20)
        assert output.accepted == output.verified and (output.verified > 0) == (len(ids) < 24)


def test_a_refill_makes_the_host_wait_for_nothing(monkeypatch):
    """With fixed shapes, only prompts that come while nothing runs are computed outside of captured steps."""
    pretend_gpu(monkeypatch)
    target, waits, prefills = kit.tiny(), [], []
    fitting, prefill = Packing.fitting.__func__, Verifier.prompts
    monkeypatch.setattr(Packing, "fitting", classmethod(lambda *args: waits.append(1) or fitting(*args)))
    monkeypatch.setattr(Verifier, "prompts", lambda *args: prefills.append(1) or prefill(*args))
    given = [{"input_ids": ids, "max_new_tokens": 3 + 5 * i % 7} for i, ids in enumerate(prompts(12))]
    for name, models in (("near", 2), ("mixed", 2), ("heads", 1)):
        waits.clear(), prefills.clear()
        generate_batch(target, given, DRAFTERS[name](target), 4, 3, 2, progress_bar=False, do_sample=False)
        assert len(waits) == models * len(prefills) and len(prefills) < 6
    tetris_hf.release_graphs()


def test_steps_of_as_many_tokens_are_not_taken_for_each_other(monkeypatch, tmp_path):
    """A forward captured for itself serves another step only if no row may have more tokens there."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(batch_job, "FEEDS", (0, 4))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    target = kit.tiny()

    def looks(input_ids, scores):  # of which nobody knows what it depends on: no whole step is captured
        return scores

    given = [[2 + (7 * i + j) % 60 for j in range(length)] for i, length in enumerate([3, 4, 1, 40, 25, 33, 1, 4] * 2)]
    settings = {"progress_bar": False, "do_sample": False, "max_new_tokens": 24}
    for capacity in (4, "auto"):
        outputs = generate_batch(target, given, kit.near(target), capacity, 4, 2, logits_processor=[looks], **settings)
        for ids, output in zip(given, outputs, strict=True):
            assert output.generated_tokens == alone(target, ids, max_new_tokens=24)
    tetris_hf.release_graphs()


@pytest.mark.parametrize("name", ["near", "heads"])
@pytest.mark.parametrize("room", [256, 520, 10**6])
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_rows_share_what_memory_there_is(monkeypatch, name, room, device):
    """Rows lie anywhere in a pool, wait until enough of it is free, and say what they say alone."""
    if device == "cpu":
        pretend_gpu(monkeypatch)
    monkeypatch.setattr(batch_job, "FEEDS", (0, 8))
    monkeypatch.setattr(decoding, "room_for_tokens", lambda model: room)
    taken = []
    take = SlotPool.take
    monkeypatch.setattr(SlotPool, "take", lambda pool, length: taken.append(take(pool, length)) or taken[-1])
    target = kit.tiny(max_position_embeddings=512, head_dim=16).to(device)  # 16 is the least that our kernel takes
    given = [
        {"input_ids": ids, "max_new_tokens": new}
        for ids, new in zip(prompts(12), [150, 3, 9, 20, 130, 5, 9, 170, 2, 8, 140, 4], strict=True)
    ]
    drafter = DRAFTERS[name](target).to(device)
    outputs = generate_batch(target, given, drafter, 6, 4, 3, progress_bar=False, do_sample=False)
    for one, output in zip(given, outputs, strict=True):
        assert output.generated_tokens == alone(target, one["input_ids"], max_new_tokens=one["max_new_tokens"])
    if room < 10**6:
        assert None in taken and max(first for first in taken if first is not None) > 0
    else:
        assert not taken
    tetris_hf.release_graphs()


@pytest.mark.parametrize("name", ["near", "heads", "mixed"])
def test_with_a_seed_an_answer_does_not_depend_on_what_runs_beside_it(name, shapes):
    target = kit.tiny()
    inputs = prompts(9)
    settings = {"max_new_tokens": 10, "do_sample": True, "eos_token_id": [5], "progress_bar": False, "seed": 7}
    expected = [output.generated_tokens for output in generate_batch(target, inputs, batch_size=1, **settings)]
    drafter = DRAFTERS[name](target)
    for batch_size, capacity, score in ((4, 5, "predictable"), (3, 9, "paper")):
        selector = tetris_hf.TetrisSelector(score=score)
        outputs = generate_batch(target, inputs, drafter, capacity, batch_size, 3, selector, **settings)
        assert [output.generated_tokens for output in outputs] == expected
    given = [{"input_ids": ids, "seed": 100 + i} for i, ids in enumerate(inputs)]
    forward = generate_batch(target, given, drafter, 6, 4, 3, num_return_sequences=2, **settings)
    back = generate_batch(target, given[::-1], drafter, 4, 2, 3, num_return_sequences=2, **settings)
    pairs = [[output.generated_tokens for output in outputs] for outputs in (forward, back)]
    assert [pairs[0][i : i + 2] for i in range(0, 18, 2)] == [pairs[1][i : i + 2] for i in range(16, -1, -2)]
    assert len({tuple(tokens) for tokens in pairs[0]}) > 9
    (refused,) = generate_batch(target, given[:1], **{**settings, "seed": None})
    assert "pass `seed` to the job" in refused.error


def test_answers_of_one_prompt_differ_when_sampling():
    target = kit.tiny()
    outputs = generate_batch(
        target, prompts(2), kit.near(target), 6, 3, progress_bar=False, do_sample=True, num_return_sequences=4,
        max_new_tokens=8,
    )  # fmt: skip
    assert len(outputs) == 8 and [output.request_id for output in outputs] == ["0"] * 4 + ["1"] * 4
    assert len({tuple(output.generated_tokens) for output in outputs}) > 2
    with pytest.raises(ValueError, match="`num_return_sequences` .4. needs `do_sample=True`"):
        generate_batch(target, prompts(2), num_return_sequences=4, do_sample=False, max_new_tokens=2)


@pytest.mark.parametrize("seed, score", [(None, "predictable"), (3, "paper")])
def test_the_law_of_refilled_rows(seed, score):
    """50,000 answers of two prompts, of unequal length, with selection on: the chain's own law; seeded: any score."""
    table = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.4, 0.1], [0.1, 0.6, 0.2, 0.1]])
    other = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.2, 0.2, 0.3, 0.3], [0.5, 0.1, 0.3, 0.1], [0.3, 0.3, 0.3, 0.1]])
    torch.manual_seed(11)
    inputs = [{"input_ids": [1 + i % 2], "max_new_tokens": 2 + i % 3} for i in range(50_000)]
    outputs = generate_batch(
        kit.markov(table), inputs, kit.markov(other), 1000, 2000, 2, tetris_hf.TetrisSelector(score=score),
        progress_bar=False, do_sample=True, top_k=0, seed=seed,
    )  # fmt: skip
    assert sum(output.accepted for output in outputs) > 10_000
    for prompt in (1, 2):
        counts = torch.zeros(4, 4)
        for output in outputs:
            if output.prompt_ids == [prompt]:
                first, second = output.generated_tokens[:2]
                counts[first, second] += 1
        expected = table[prompt][:, None] * table * counts.sum()
        assert chisquare(counts.flatten(), expected.flatten()).pvalue > 1e-3


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"batch_size": 0}, "`batch_size` must be an integer of at least 1, got 0"),
        ({"tetris_capacity": -1}, "`capacity` must be an integer of at least 0"),
        ({"min_new_tokens": 3}, "Min.*LogitsProcessor is not supported by `generate_batch`"),
        ({"num_beams": 2}, "`num_beams=2` is not supported"),
    ],
)
def test_bad_settings_are_refused_before_any_forward(arguments, words):
    target = kit.tiny()
    with kit.counted_tokens(target) as tokens, pytest.raises(ValueError, match=words):
        generate_batch(target, prompts(2), **{"max_new_tokens": 4, "do_sample": False, "eos_token_id": 3, **arguments})
    assert not tokens


def test_the_same_decoding_serves_calls_and_jobs():
    target = kit.tiny()
    assistant = kit.near(target)
    generate_batch(target, prompts(3), assistant, 6, 2, progress_bar=False, do_sample=False, max_new_tokens=4)
    decoding = TetrisDecoding(assistant, 6)
    out = target.generate(**kit.ragged(), custom_generate=decoding, max_new_tokens=6, do_sample=False)
    assert torch.equal(out, kit.plain(target, kit.ragged(), max_new_tokens=6))


@pytest.mark.parametrize("feeds", [batch_job.FEEDS, (0, 8), (0, 2, 7, 30)])
def test_a_padded_feed_is_full_but_for_the_least(monkeypatch, feeds):
    """All that waits is taken in, in steps of the sizes there are; without padding at once, as far as the largest."""
    monkeypatch.setattr(batch_job, "FEEDS", feeds)
    for waiting in (0, 1, feeds[1] - 1, feeds[1], feeds[1] + 1, feeds[-1] - 1, feeds[-1], 2 * feeds[-1] + 3):
        left, taken = waiting, []
        while left > 0:
            taken.append(batch_job.feed_for(left, padded=True))
            assert taken[-1] in feeds[1:] and (taken[-1] <= left or taken[-1] == feeds[1])
            assert all(size > left for size in feeds if size > taken[-1])
            left -= taken[-1]
        assert sum(taken) - waiting < feeds[1]
        assert batch_job.feed_for(0, padded=True) == batch_job.feed_for(0, padded=False) == 0
        assert batch_job.feed_for(waiting, padded=False) == (feeds[-1] if waiting else 0)
