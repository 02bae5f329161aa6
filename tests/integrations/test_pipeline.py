"""`pipeline("text-generation")` with a batch: arguments of the call, of the pipeline, plain text and chats."""

import kit
import pytest
from transformers import pipeline

import tetris_hf


PROMPTS = ["the cat", "a", "what is two and two", "say it"]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
SETTINGS = {"max_new_tokens": 16, "do_sample": False}


@pytest.mark.parametrize("inputs", [PROMPTS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("where", ["call", "pipeline"])
def test_a_batch_gives_the_text_of_a_plain_batch(model, draft, tokenizer, enabled, inputs, where):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=4)
    expected = pipe(inputs, **SETTINGS)
    ours = {"assistant_model": draft, "tetris_capacity": 7}
    if where == "pipeline":
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=4, **ours)
    with kit.counted_tokens(model) as tokens:
        out = pipe(inputs, **SETTINGS, **(ours if where == "call" else {}))
    assert out == expected
    assert max(tokens[1:]) == 4 + 7, "one token per row and the whole budget of drafts"


def test_a_decoding_object_patches_nothing(model, draft, tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=4)
    expected = pipe(PROMPTS, **SETTINGS)
    with kit.counted_tokens(model) as tokens:
        out = pipe(PROMPTS, **SETTINGS, custom_generate=tetris_hf.TetrisDecoding(draft, capacity=7))
    assert out == expected and max(tokens[1:]) == 4 + 7
