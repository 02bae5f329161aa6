"""`tetris_hf/generation/` is a Hub `custom_generate/` as it stands, also in a process without the package."""

import shutil
import subprocess
import sys
from pathlib import Path

import kit
import pytest
import torch

import tetris_hf


FOLDER = Path(tetris_hf.__file__).parent / "generation"

SCRIPT = """
import importlib.util, sys
import torch
from transformers import AutoModelForCausalLM

assert importlib.util.find_spec("tetris_hf") is None
target, near = (AutoModelForCausalLM.from_pretrained(name) for name in ("target", "near"))
batch = torch.load("batch.pt")
settings = {"max_new_tokens": 20, "do_sample": False}
plain = target.generate(**batch, **settings)
hub = {"custom_generate": "repository", "trust_remote_code": True}
ours = target.generate(**batch, **settings, **hub, assistant_model=near, tetris_capacity=5)
assert torch.equal(ours, plain)
out = target.generate(
    batch["input_ids"], attention_mask=batch["attention_mask"], **settings, **hub, assistant_model=near,
    tetris_capacity=5, num_assistant_tokens=3, return_dict_in_generate=True,
)
assert torch.equal(out.sequences, plain) and out.tetris_stats.drafted.shape == (3, 3)
assert torch.equal(target.generate(**batch, **settings, **hub, prompt_lookup_num_tokens=3, tetris_capacity=5), plain)
assert torch.equal(target.generate(**batch, **settings, **hub), plain), "without a capacity: plain generate"
print("fine")
"""


@pytest.fixture
def repository(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "repository" / "custom_generate", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "repository"


def test_in_a_process_without_the_package(repository, target, near):
    folder = repository.parent
    target.save_pretrained(folder / "target")
    near.save_pretrained(folder / "near")
    torch.save(kit.ragged(), folder / "batch.pt")
    # -I: neither this folder nor PYTHONPATH; an editable install of the package would still be found, so -S and the
    # site packages by hand, without their .pth files.
    site = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import sys; sys.path[:0] = {site!r}\n{SCRIPT}"
    environment = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("fine"), done.stderr[-2000:]


def test_beside_the_installed_package(repository, target, near, enabled, modules_cache):
    batch, settings = kit.ragged(), {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**batch, **settings)
    ours = {"assistant_model": near, "tetris_capacity": 5}
    for _ in range(2):
        hub = {"custom_generate": str(repository), "trust_remote_code": True}
        assert torch.equal(target.generate(**batch, **settings, **hub, **ours), plain)
        assert torch.equal(target.generate(**batch, **settings, **ours), plain)
