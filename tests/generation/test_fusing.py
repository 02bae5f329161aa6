"""What is compiled where steps are captured says the same as where it is not."""

import kit
import pytest
import test_step_graphs
import torch
from test_step_graphs import pretend_gpu

import tetris_hf
from tetris_hf.generation.calibration import AcceptanceCalibration
from tetris_hf.generation.capacity_controller import CapacityController
from tetris_hf.generation.draft import Draft, Verification, most_probable
from tetris_hf.generation.fusing import fusing
from tetris_hf.generation.selection import TetrisSelector


pytestmark = kit.needs_compiler


def random_step(num_rows: int, depth: int, seed: int) -> Verification:
    generator = torch.Generator().manual_seed(seed)

    def counts(most: torch.Tensor) -> torch.Tensor:
        return (torch.rand(num_rows, generator=generator) * (most + 1)).long().clamp(max=most)

    probabilities, expectations = torch.rand(2, num_rows, depth, generator=generator)
    lengths = counts(torch.full((num_rows,), depth))
    draft = Draft(torch.zeros(num_rows, depth, dtype=torch.long), lengths, probabilities, expectations)
    verified = counts(lengths)
    rows = torch.arange(num_rows)
    return Verification(rows, draft, verified, counts(verified), None, rows)


@pytest.mark.parametrize("num_rows, depth, max_depth", [(4, 2, 6), (9, 3, 6), (5, 6, 4)])
def test_controller_and_selectors_compiled(num_rows, depth, max_depth):
    """Of drafts deeper than what is followed, too."""
    plain, compiled = (CapacityController(num_rows, None, max_depth=max_depth) for _ in range(2))
    selectors = [TetrisSelector(), TetrisSelector(calibration=plain.calibration), TetrisSelector(score="paper")]
    for seed in range(3):
        step = random_step(num_rows, depth, seed)
        draft = step.draft
        plain.observe(step)
        with fusing():
            compiled.observe(step)
        for name in ("gains", "_rates", "_rated", "_outcome", "_steps"):
            torch.testing.assert_close(getattr(compiled, name), getattr(plain, name))
        torch.testing.assert_close(compiled.calibration.state_dict(), plain.calibration.state_dict())
        for selector in selectors:
            for capacity in (1, num_rows, num_rows * depth - 1):
                wanted = selector(draft, draft.lengths, capacity)
                with fusing():
                    assert selector(draft, draft.lengths, capacity).equal(wanted)
                assert wanted.sum() == min(capacity, draft.lengths.sum())


def test_calibration_deeper_than_its_places():
    """Places behind the last map move that one together, as one after the other would."""
    step = random_step(40, 5, 0)
    shared, own = AcceptanceCalibration(max_depth=2), AcceptanceCalibration(max_depth=5)
    before = shared.state_dict()
    shared.observe(step)
    own.observe(step)
    for name, value in shared.state_dict().items():
        moves = own.state_dict()[name] - before[name][0]
        torch.testing.assert_close(value - before[name], torch.stack([moves[0], moves[1:].sum()]))


@pytest.mark.parametrize(
    "name, seed", [("near", None), ("lookup", None), ("heads", None), ("mixed", None), ("near", 5), ("mixed", 5)]
)
def test_whole_calls_compiled(name, seed, monkeypatch):
    """Every small function of a step of fixed shapes, the end of rows included: text and counts are the same."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(test_step_graphs, "Operations", test_step_graphs.Unwatched)
    target = kit.tiny()
    batch = kit.ragged()
    texts = kit.plain(target, batch, max_new_tokens=24)
    ends = [int(texts[0, -10]), int(texts[1, -3])]

    def call():
        drafter = test_step_graphs.DRAFTERS[name](target)
        decoding = tetris_hf.TetrisDecoding(drafter, capacity=6, num_assistant_tokens=3, seed=seed)
        tetris_hf.release_graphs()
        return target.generate(
            **batch, custom_generate=decoding, max_new_tokens=24, do_sample=seed is not None, eos_token_id=ends,
            pad_token_id=0, return_dict_in_generate=True,
        )  # fmt: skip

    wanted = call()
    with fusing():
        found = call()
    assert found.sequences.equal(wanted.sequences)
    for count in ("drafted", "verified", "accepted", "bonus", "live_steps"):
        assert getattr(found.tetris_stats, count).equal(getattr(wanted.tetris_stats, count)), count


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (5, 40), (3, 2, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_token_is_that_of_the_softmax(shape, dtype, compiled):
    scores = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)
    scores[..., 7] = -torch.inf  # what a processor has ruled out
    with fusing(compiled):
        probability, token = most_probable(scores)
    expected, place = scores.float().softmax(-1).max(-1)
    torch.testing.assert_close(probability, expected)
    assert torch.equal(token, place) and probability.dtype == torch.float32
