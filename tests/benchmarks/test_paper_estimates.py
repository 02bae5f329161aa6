"""The distributions that `benchmarks/estimators.py` judges estimates by are those that the drafts came from."""

import sys
from pathlib import Path

import kit
import pytest
import torch

import tetris_hf


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
estimators = pytest.importorskip("estimators")


def test_margin_by_a_loop():
    distributions = torch.rand(3, 2, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for row, places in enumerate(distributions.tolist()):
        for place, distribution in enumerate(places):
            first, second = sorted(distribution, reverse=True)[:2]
            assert float(estimators.margin(distributions)[row, place]) == pytest.approx(first - second, abs=1e-7)
    assert estimators.margin(torch.full((2, 4), 0.25)).tolist() == [0, 0]


class Checked(estimators.Recorder):
    """Compares what was watched with what the draft itself says, in every step."""

    steps = 0

    def observe(self, verification):
        if draft := verification.draft if verification.draft.depth else None:
            (q,) = [seen[0] if seen[0].dim() == 3 else torch.stack(seen, 1) for seen in [self.distributions.seen]]
            assert torch.allclose(q.amax(-1), draft.expectations, atol=1e-6)
            assert torch.allclose(q.gather(2, draft.tokens[..., None])[..., 0], draft.probabilities, atol=1e-6)
            if draft.q is not None:
                assert torch.allclose(q, draft.q, atol=1e-6)
            self.steps += 1
        super().observe(verification)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", ["assistant", "heads"])
def test_what_is_watched_is_what_was_drafted_from(target, near, kind, sample):
    torch.manual_seed(0)
    if kind == "heads":
        heads = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(hidden_size=32, vocab_size=64, medusa_num_heads=3))
        drafter = tetris_hf.MedusaDrafter(heads)
    else:
        drafter = tetris_hf.AssistantDrafter(near)
    recorder = Checked(estimators.Distributions(drafter))
    settings = {"do_sample": True, "top_k": 0} if sample else {}
    kit.speculate(target, kit.ragged(), drafter, 9, 3, recorder, **settings)
    seen = torch.cat(recorder.rows)
    assert recorder.steps > 5 and seen.shape[1] == len(estimators.ESTIMATES) + 3
    estimates, stood = seen[:, 1:-1], seen[:, -1]
    assert (estimates <= 1 + 1e-6).all() and set(stood.tolist()) <= {0.0, 1.0}
    if not sample:
        assert torch.allclose(estimates[:, 0], estimates[:, -1], atol=1e-6), (
            "a greedy draft is the most probable token"
        )
