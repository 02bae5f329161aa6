"""The top-p kernel against transformers' warper and a loop over sorted tokens, in Triton's interpreter."""

import importlib.util

import kit
import pytest
import torch
from transformers import TopPLogitsWarper

from tetris_hf.generation.top_p_kernel import keep_top_p, kernel_serves


CHECK = """
import torch
from transformers import TopPLogitsWarper
from tetris_hf.generation import top_p_kernel

def naive(scores, top_p):
    kept = scores.clone()
    for row, own in enumerate(scores):
        probabilities, mass = own.softmax(0), 0.0
        order = sorted(range(len(own)), key=lambda token: (float(own[token]), token))
        for token in order[:-1]:
            mass += float(probabilities[token])
            if mass <= 1 - top_p + 1e-9:
                kept[row, token] = -torch.inf
    return kept

top_p_kernel.BLOCK = 64  # several blocks a row
torch.manual_seed(0)
for top_p in (0.0, 0.1, 0.5, 0.9, 0.99):
    for scale in (0.1, 1, 4, 10):
        for kind in ("plain", "tied", "masked"):
            scores = torch.randn(6, 200) * scale
            if kind == "tied":
                scores = (scores * 2).round() / 2
            if kind == "masked":
                scores[torch.rand(6, 200) < 0.5] = -torch.inf
            kept = top_p_kernel.keep_top_p(scores, top_p)
            assert kept.equal(naive(scores, top_p)), (top_p, scale, kind)
            stock = TopPLogitsWarper(top_p)(None, scores)
            if kind == "tied":  # which of equal scores go is up to the sort
                kept, stock = kept.sort().values, stock.sort().values
            assert kept.equal(stock), (top_p, scale, kind)
even, alone, nothing = torch.zeros(1, 200), torch.full((1, 200), -torch.inf), torch.full((1, 200), -torch.inf)
alone[0, 7] = 1.0
assert int((top_p_kernel.keep_top_p(even, 0.25) == 0).sum()) in (50, 51)
assert top_p_kernel.keep_top_p(alone, 0.5).equal(alone)
assert top_p_kernel.keep_top_p(nothing, 0.5).equal(nothing)  # a place of filler
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this build of torch comes without Triton")
def test_equals_the_warper_and_a_loop():
    kit.interpret(CHECK)


def test_other_scores_are_left_to_the_warper():
    assert not kernel_serves(torch.zeros(2, 8), 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_equals_the_warper_on_a_gpu(scale):
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.randn(64, 49152, device="cuda", generator=generator) * scale
    assert kernel_serves(scores, 1) and not kernel_serves(scores, 2)
    kept, stock = keep_top_p(scores, 0.9), TopPLogitsWarper(0.9)(None, scores)
    # Sums of 49152 probabilities are rounded otherwise by either.
    assert int(((kept > -torch.inf) != (stock > -torch.inf)).sum()) <= 64
    assert ((kept == scores) | (kept == -torch.inf)).all()
