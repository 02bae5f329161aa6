"""What the documentation shows runs: its example drafter is exact, its claims about names hold."""

import copy
import re
from pathlib import Path

import kit
import torch

import tetris_hf
from tetris_hf.audit import first_differences


ROOT = Path(__file__).parent.parent


def python_blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_the_example_drafter_is_exact_and_drafts(target, enabled):
    scope = {}
    exec(python_blocks("docs/drafters.md")[0], scope)
    batch = kit.ragged()
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**batch, **settings).sequences
    drafter = scope["RetrievalDrafter"](plain.tolist())
    out = target.generate(**batch, **settings, assistant_model=drafter, tetris_capacity=6)
    assert torch.equal(out.sequences, plain)
    assert out.tetris_stats.accepted.sum() > 0


def test_the_audit_example_runs(target, near, enabled):
    scope = {
        "model": copy.deepcopy(target),
        "draft": near,
        "batch": kit.ragged(),
        "first_differences": first_differences,
    }
    scope["model"].generation_config.max_new_tokens = 12
    exec(python_blocks("docs/exactness.md")[0], scope)
    assert torch.equal(scope["plain"], scope["ours"])


def test_every_public_name_is_documented():
    text = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    assert [name for name in tetris_hf.__all__ if not re.search(rf"\b{name}\b", text)] == []
