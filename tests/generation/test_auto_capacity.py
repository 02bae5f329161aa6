"""`tetris_capacity="auto"`: the same text whatever is chosen, C = 0 where drafts do not pay, nothing left behind."""

import kit
import pytest
import torch
from huggingface_hub import constants
from scipy.stats import chisquare
from test_step_graphs import DRAFTERS, RunsAgain, pretend_gpu
from transformers import LogitsProcessor, StoppingCriteria

import tetris_hf
from tetris_hf import PromptLookupDrafter, StepHistory, TetrisDecoding, generate_batch
from tetris_hf.generation import auto_capacity, batch_job
from tetris_hf.generation.cost_table import CostTable
from tetris_hf.generation.speculation import Speculation


class StopsAtOnce(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids), dtype=torch.bool)


@pytest.fixture(params=["eager", "fixed shapes"], autouse=True)
def shapes(request, monkeypatch, tmp_path):
    """Both ways in which a step can run."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    if request.param == "fixed shapes":
        RunsAgain.made = []
        pretend_gpu(monkeypatch)
    yield request.param
    tetris_hf.release_graphs()


@pytest.fixture
def costs(monkeypatch):
    """Seconds of a step by (C, K), in the place of the clock."""

    def set_to(base, per_place, per_token):
        timed = []

        def seconds(self, capacity, depth):
            timed.append((capacity, depth))
            return base + depth * per_place + capacity * per_token

        monkeypatch.setattr(auto_capacity._StepTimer, "__call__", seconds)
        monkeypatch.setattr(CostTable, "refine", lambda *args: None)
        return timed

    return set_to


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_that_of_plain_generate(name):
    """With a real clock: whatever it says."""
    target = kit.tiny()
    drafter = DRAFTERS[name](target)
    for seed in (0, 1):
        batch = kit.ragged(seed=seed)
        out = kit.speculate(target, batch, drafter, "auto", 3, max_new_tokens=30)
        assert torch.equal(out.sequences, kit.plain(target, batch, max_new_tokens=30))
        stats = out.tetris_stats
        assert sum(stats.settings.values()) >= stats.steps
        assert stats.verified.sum() <= sum(capacity * steps for (capacity, _), steps in stats.settings.items())


def test_calls_that_end_before_their_first_step():
    """One token is all that fits, or any token ends a row."""
    for lengths, settings in (
        ((1,), {"max_new_tokens": 1}),
        ((1, 1), {"max_new_tokens": 2}),
        ((5,), {"eos_token_id": list(range(kit.VOCABULARY))}),
        ((3, 9, 4), {"eos_token_id": list(range(kit.VOCABULARY))}),
        ((4, 2), {"stopping_criteria": [StopsAtOnce()]}),
    ):
        target = kit.tiny()
        batch = kit.ragged(lengths)
        out = kit.speculate(target, batch, kit.near(target), "auto", 1, **settings)
        assert torch.equal(out.sequences, kit.plain(target, batch, **settings)), settings


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 3},
        {"eos_token_id": list(range(kit.VOCABULARY))},
        {"eos_token_id": list(range(0, kit.VOCABULARY, 2))},
        {"stopping_criteria": [StopsAtOnce()]},
    ],
    ids=["a short call", "every token ends", "every second token ends", "a criterion"],
)
def test_steps_are_timed_with_all_rows_and_all_places(settings, monkeypatch):
    """Whatever ends the rows of the call itself: what is timed serves other calls too."""
    timed, plain_timer = [], auto_capacity._StepTimer.__call__

    def watched(self, capacity, depth):
        stats = self.speculation.stats
        stats.reset()  # as the call itself does before its own steps
        seconds = plain_timer(self, capacity, depth)
        timed.append((capacity, depth, int(stats.live_steps.sum()), int(stats.drafted.sum())))
        return seconds

    monkeypatch.setattr(auto_capacity._StepTimer, "__call__", watched)
    target = kit.tiny()
    out = kit.speculate(target, kit.ragged((2, 3, 1)), kit.near(target), "auto", 3, **settings)
    assert torch.equal(out.sequences, kit.plain(target, kit.ragged((2, 3, 1)), **settings))
    assert {depth for _, depth, *_ in timed} == {0, 1, 2, 3}
    row_steps = 3 * (auto_capacity._SETTLING + auto_capacity._TIMED)
    for capacity, depth, live_steps, drafted in timed:
        assert live_steps == row_steps
        # Where the budget holds less than all places, steps that are not captured leave some out.
        assert drafted == row_steps * depth or capacity < 3 * depth


def test_what_is_timed_stays_within_the_models_positions():
    """Learned ones, of which there are fewer than the texts want on which steps are timed elsewhere."""
    target = kit.tiny("gpt2", n_positions=48, max_position_embeddings=48)
    target.generation_config.disable_compile = True
    out = kit.speculate(target, kit.ragged((5, 9)), kit.near(target), "auto", 3)
    assert torch.equal(out.sequences, kit.plain(target, kit.ragged((5, 9))))


class EndsAndSees(StoppingCriteria):
    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.clone())
        return input_ids[:, -1] % 5 == 0


class BansAndSees(LogitsProcessor):
    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores):
        self.shown.append(input_ids.clone())
        return scores.masked_fill(torch.arange(kit.VOCABULARY) == 19, -torch.inf)


def test_of_what_is_timed_the_call_hears_nothing():
    """The first call times steps on texts that are nobody's. What looks at texts sees those of the call alone."""
    target, batch = kit.tiny(), kit.ragged()
    criterion, processor = EndsAndSees(), BansAndSees()
    history = StepHistory()
    settings = {
        "stopping_criteria": [criterion], "logits_processor": [processor], "eos_token_id": 60,
        "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    plain = kit.plain(target, batch, **settings)
    criterion.shown, processor.shown = [], []
    selector = [tetris_hf.TetrisSelector(), history]
    assistant, random_state = kit.near(target), torch.get_rng_state()
    out = kit.speculate(target, batch, assistant, "auto", 3, selector, **settings)
    assert torch.equal(out.sequences, plain.sequences) and len(out.scores) == len(plain.scores)
    torch.testing.assert_close(out.scores[0], plain.scores[0], rtol=1e-4, atol=1e-4)
    assert criterion.shown and processor.shown
    width = batch["input_ids"].shape[1]
    for shown in criterion.shown + processor.shown:
        assert all((row[:width] == batch["input_ids"]).all(1).any() for row in shown), "a text of somebody else"
    assert len(history.steps) == out.tetris_stats.steps
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("taught", [False, True])
def test_what_is_timed_teaches_selectors_nothing(taught):
    target = kit.tiny()
    calibration = tetris_hf.AcceptanceCalibration(3)
    if taught:
        calibration.load_state_dict({"slope": torch.tensor([0.5, 0.7, 2.0]), "shift": torch.tensor([0.1, -1.0, 0.0])})
    before, selector = calibration.state_dict(), tetris_hf.TetrisSelector(calibration=calibration)
    kit.speculate(target, kit.ragged(), kit.near(target), "auto", 3, selector, max_new_tokens=1)
    for name, value in calibration.state_dict().items():
        assert torch.equal(value, before[name]), "a call without steps"


@pytest.mark.parametrize("n", [1, 2, 9, 20])
def test_an_interrupt_while_steps_are_timed(n):
    """The drafter hears of the end, and the next call goes as if nothing had been."""

    class Interrupted(PromptLookupDrafter):
        left, ends = n, 0

        def propose(self, rows, live, depth):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().propose(rows, live, depth)

        def end(self):
            self.ends += 1

    target, drafter = kit.tiny(), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        kit.speculate(target, kit.ragged(), drafter, "auto", 3, max_new_tokens=9)
    assert drafter.ends == 1
    out = kit.speculate(target, kit.ragged(), drafter, "auto", 3, max_new_tokens=9)
    assert torch.equal(out.sequences, kit.plain(target, kit.ragged(), max_new_tokens=9))


def test_dear_drafts_are_given_up_and_good_ones_used(costs, monkeypatch, tmp_path):
    target = kit.tiny()
    expected = kit.plain(target, kit.ragged(), max_new_tokens=60)
    costs(1.0, 2.0, 1.0)
    out = kit.speculate(target, kit.ragged(), kit.near(target), "auto", 3, max_new_tokens=60)
    assert torch.equal(out.sequences, expected) and out.tetris_stats.settings.keys() == {(0, 0)}
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "other"))
    for is_new in (True, False):
        timed = costs(1.0, 0.001, 0.001)
        other = kit.tiny()
        out = kit.speculate(other, kit.ragged(), kit.near(other, noise=0.0), "auto", 3, max_new_tokens=60)
        assert torch.equal(out.sequences, expected)
        assert out.tetris_stats.mean_accepted > 2 and (0, 0) not in out.tetris_stats.settings
        assert bool(timed) == is_new, "the second time the table is on disk: same model, same machine"


def test_drafts_that_turn_out_bad_are_dropped_within_the_call_and_tried_again(costs, shapes):
    """And the drafter, which saw nothing in between, catches up."""
    target, stranger = kit.tiny(), kit.tiny(seed=99)
    costs(1.0, 0.05, 0.01)
    batch = kit.ragged()
    settings = {"max_new_tokens": 100}
    expected = kit.plain(kit.tiny(max_position_embeddings=512), batch, **settings)
    target = kit.tiny(max_position_embeddings=512)
    out = kit.speculate(target, batch, stranger, "auto", 3, **settings)
    assert torch.equal(out.sequences, expected)
    steps = out.tetris_stats.settings
    assert steps[0, 0] > 60 and len(steps) > 1
    # What was learned stays: the next call begins without drafts.
    out = kit.speculate(target, batch, stranger, "auto", 3, **settings)
    assert torch.equal(out.sequences, expected) and out.tetris_stats.settings[0, 0] > 60


def test_a_catching_up_drafter_knows_the_whole_text(monkeypatch):
    """C = 0 and drafts take turns: with a perfect assistant, all drafts stand. Of the whole call every row is told."""
    target = kit.tiny()
    turns, told = [], []

    class Turns:
        max_depth, table = 3, CostTable(5, {(0, 0): 1.0, (5, 1): 1.0})
        settings = [(0, 0), (15, 3)]
        interval = 3

        def begin(self, closed, longest):
            turns.append(0)
            told.append(longest)
            return self.settings[0]

        def follow_rows(self, tokens, steps, remaining, gains):
            pass

        def end(self, tokens, steps):
            told.extend([tokens.tolist(), steps.tolist()])

        def decide(self, seconds, gains):
            turns.append(0)
            return self.settings[len(turns) % 2]

        def observe(self, verification, going):
            pass

        gains = torch.zeros(2)

    controller = Turns()
    monkeypatch.setattr("tetris_hf.generation.decoding.controller_for", lambda *args: controller)
    out = kit.speculate(target, kit.ragged(), kit.near(target, noise=0.0), "auto", 3, max_new_tokens=40)
    assert torch.equal(out.sequences, kit.plain(target, kit.ragged(), max_new_tokens=40))
    assert out.tetris_stats.vsr == 1 and len(turns) > 4
    longest, tokens, steps = told
    assert longest == 40 and steps == out.tetris_stats.live_steps.tolist()
    new = [len(texts) for texts in kit.alone(target, kit.ragged(), max_new_tokens=40)]
    assert tokens == [count - 1 for count in new], "the first token comes with the prompt"


@pytest.mark.parametrize("job", [False, True])
def test_the_clock_counts_steps_alone(job, monkeypatch):
    """Not prompts, of whatever length and whenever they come, nor the steps of another setting."""
    now, timed = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(batch_job, "FEEDS", (0, 8))
    monkeypatch.setattr(CostTable, "refine", lambda table, *args: timed.append(args))

    def taking(name, seconds):
        method = getattr(Speculation, name)

        def slow(speculation, *args, **kwargs):
            now[0] += seconds(speculation, *args, **kwargs)
            return method(speculation, *args, **kwargs)

        monkeypatch.setattr(Speculation, name, slow)

    def step_seconds(speculation, live=None, feed=0):
        return 1 + 0.05 * speculation.depth + 0.001 * speculation.capacity + (70 if feed else 0)

    taking("prefill", lambda *args: 1000)
    taking("step", step_seconds)
    target = kit.tiny(max_position_embeddings=512)
    if job:
        inputs = [[3 + i, 4, 5 + i] for i in range(12)]
        settings = {"do_sample": False, "max_new_tokens": 120, "eos_token_id": None}
        generate_batch(target, inputs, kit.near(target), "auto", 3, 1, progress_bar=False, **settings)
    else:
        for seed in (0, 1):
            settings = {"max_new_tokens": 90, "eos_token_id": None}
            kit.speculate(target, kit.ragged(seed=seed), kit.near(target), "auto", 1, **settings)
    assert len(timed) > 3
    for capacity, depth, seconds in timed:
        assert seconds == pytest.approx(1 + 0.05 * depth + 0.001 * capacity), (capacity, depth)


def test_jobs_choose_too(costs, monkeypatch):
    monkeypatch.setattr(batch_job, "FEEDS", (0, 8))
    costs(1.0, 0.01, 0.01)
    target = kit.tiny()
    inputs = [[3 + i, 4, 5 + i] for i in range(9)]
    outputs = generate_batch(
        target, inputs, kit.near(target), "auto", 3, 3, progress_bar=False, do_sample=False, max_new_tokens=20
    )
    for ids, output in zip(inputs, outputs, strict=True):
        plain = target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20)[0, 3:].tolist()
        assert output.generated_tokens == plain
    assert sum(output.verified for output in outputs) > 0


def test_the_law_is_the_targets(costs):
    """C and K follow what was accepted before, and the text does not notice: 20,000 texts of three tokens."""
    costs(1.0, 0.2, 0.0002)
    table = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.4, 0.1], [0.1, 0.6, 0.2, 0.1]])
    other = torch.tensor([[0.3, 0.3, 0.2, 0.2], [0.2, 0.2, 0.3, 0.3], [0.5, 0.1, 0.3, 0.1], [0.3, 0.3, 0.3, 0.1]])
    target, draft = kit.markov(table), kit.markov(other)
    torch.manual_seed(2)
    counts = torch.zeros(64, dtype=torch.long)
    chosen = set()
    for _ in range(10):
        ids = torch.full((2000, 1), 1)
        out = kit.speculate(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, draft, "auto", 2,
                            max_new_tokens=3, do_sample=True, eos_token_id=None)  # fmt: skip
        texts = out.sequences[:, 1:]
        counts += torch.bincount(texts[:, 0] * 16 + texts[:, 1] * 4 + texts[:, 2], minlength=64)
        chosen |= out.tetris_stats.settings.keys()
    law = (table[1][:, None, None] * table[:, :, None] * table[None]).flatten().double()
    assert chisquare(counts.numpy(), (law / law.sum() * counts.sum()).numpy()).pvalue > 1e-3 and chosen


def test_what_is_not_possible_is_refused():
    with pytest.raises(ValueError, match='`capacity="auto"` needs somebody to draft'):
        TetrisDecoding(None, "auto")
    with pytest.raises(ValueError, match="must be an integer of at least 0"):
        TetrisDecoding(kit.tiny(), "Auto")
