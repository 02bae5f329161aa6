"""Chat templates, and the chat loop that keeps its cache from turn to turn, which is refused."""

import inspect

import kit
import pytest
import torch
from transformers import DynamicCache, StaticCache


SETTINGS = {"max_new_tokens": 12, "do_sample": False}
# The name that transformers has given up for `cache`; the warning is about the user's call, which passes through ours.
old_name = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
CHATS = [
    [{"role": "user", "content": "the cat"}],
    [
        {"role": "user", "content": "what is two and two"},
        {"role": "assistant", "content": "two cats"},
        {"role": "user", "content": "say it again"},
    ],
    [{"role": "user", "content": "that hat"}],
]


def test_chats_of_unequal_length_in_one_batch(model, draft, tokenizer, enabled):
    batch = tokenizer.apply_chat_template(
        CHATS, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    assert not batch["attention_mask"].all()
    expected = model.generate(**batch, **SETTINGS)
    with kit.counted_tokens(model) as tokens:
        out = model.generate(**batch, **SETTINGS, assistant_model=draft, tetris_capacity=8)
    assert torch.equal(out, expected) and max(tokens[1:]) == 3 + 8


def _turn(tokenizer, chat):
    return tokenizer.apply_chat_template([chat], add_generation_prompt=True, return_dict=True, return_tensors="pt")


@old_name
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_kept_cache_is_refused(model, draft, tokenizer, enabled, name, kind):
    if name == "cache" and name not in inspect.signature(model.forward).parameters:
        pytest.skip("this transformers has the older name only")
    kept = kind(config=model.config, **({"max_cache_len": 100} if kind is StaticCache else {}))
    chat = list(CHATS[0])
    first = _turn(tokenizer, chat)
    out = model.generate(**first, **SETTINGS, **{name: kept})
    answer = tokenizer.decode(out[0, first["input_ids"].shape[1] :], skip_special_tokens=True)
    chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "say it"}]
    second = _turn(tokenizer, chat)
    with kit.counted_tokens(model) as tokens, pytest.raises(ValueError, match="tokens of an earlier call.*Leave it"):
        model.generate(**second, **SETTINGS, **{name: kept}, assistant_model=draft, tetris_capacity=8)
    assert not tokens, "refused before the first forward"
    # The fix that the message names.
    expected = model.generate(**second, **SETTINGS)
    assert torch.equal(model.generate(**second, **SETTINGS, assistant_model=draft, tetris_capacity=8), expected)


@old_name
def test_an_empty_cache_is_not_filled(model, draft, tokenizer, enabled):
    # A loop that starts with an empty cache and passes the whole text in every turn stays right: it gains nothing.
    kept, batch = DynamicCache(config=model.config), _turn(tokenizer, CHATS[1])
    expected = model.generate(**batch, **SETTINGS)
    out = model.generate(**batch, **SETTINGS, past_key_values=kept, assistant_model=draft, tetris_capacity=8)
    assert torch.equal(out, expected) and kept.get_seq_length() == 0
