"""Ray Data: the example with two actors, in processes of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import kit
import pytest
from transformers import AutoTokenizer

import tetris_hf


pytest.importorskip("ray.data", reason="needs `pip install ray[data]`", exc_type=ImportError)
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_two_actors(model, draft, tokenizer, tmp_path):
    for name, stored in (("model", model), ("draft", draft)):
        stored.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "model")
    texts = ["the cat", "a", "what is two and two", "say it", "that hat", "on", "the rat sat on a mat", "two cats"]
    lines = [json.dumps({"id": f"p{place}", "prompt": text}) for place, text in enumerate(texts)]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": ""})]), encoding="utf-8")
    arguments = ["--model", "model", "--assistant", "draft", "--output", "out.jsonl", "--actors", "2"]
    arguments += ["--batch-size", "2", "--block-size", "3", "--max-new-tokens", "6", "--dtype", "float32"]
    arguments += ["--do-sample", "--seed", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(ROOT / "examples" / "ray_batch.py"), "prompts.jsonl", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["id"] for one in out] == [*(f"p{place}" for place in range(8)), 8]
    assert out[8]["finish_reason"] == "error" and "is the prompt empty?" in out[8]["error"]

    # The same in one process and one batch: no text depends on the actor or on its neighbours.
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompts = [{"input_ids": ids, "seed": (3 << 32) + place} for place, ids in enumerate(loaded(texts)["input_ids"])]
    settings = {"tetris_capacity": 4, "max_new_tokens": 6, "do_sample": True, "seed": 3}
    alone = tetris_hf.generate_batch(model, prompts, kit.near(model), batch_size=8, progress_bar=False, **settings)
    expected = loaded.batch_decode([one.generated_tokens for one in alone], skip_special_tokens=True)
    assert [one["text"] for one in out[:8]] == expected
