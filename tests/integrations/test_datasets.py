"""`Dataset.map(batched=True)`: a function over batches that calls `generate`."""

import pytest


datasets = pytest.importorskip("datasets")

SETTINGS = {"max_new_tokens": 12, "do_sample": False}
PROMPTS = ["the cat", "a", "what is two and two", "say it", "that hat", "on", "the rat sat on a mat"]


def test_map_over_batches(model, draft, tokenizer, enabled):
    def answered(batch, **kwargs):
        encoded = tokenizer(batch["prompt"], padding=True, return_tensors="pt", return_token_type_ids=False)
        out = model.generate(**encoded, **SETTINGS, **kwargs)
        new = out[:, encoded["input_ids"].shape[1] :]
        return {"answer": tokenizer.batch_decode(new, skip_special_tokens=True)}

    prompts = datasets.Dataset.from_dict({"prompt": PROMPTS})
    every = {"batched": True, "batch_size": 3}  # the last batch is smaller: seven prompts
    expected = prompts.map(answered, **every)["answer"][:]
    # `load_from_cache_file`: the fingerprint of the function would hash models, and say nothing of their weights' use.
    ours = {"assistant_model": draft, "tetris_capacity": 5}
    out = prompts.map(answered, **every, fn_kwargs=ours, load_from_cache_file=False)["answer"][:]
    assert out == expected and len(out) == 7
