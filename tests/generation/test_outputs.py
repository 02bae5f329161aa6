"""`scores`, `logits` and `hidden_states` are those of plain `generate`: number, order, shapes and values."""

import kit
import pytest
import torch

from tetris_hf import TetrisDecoderOnlyOutput


WIDTH = 12
WANTED = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


def compare(ours, plain, live):
    """Equal where `live` (columns, N) says that a row still generates; zero elsewhere."""
    assert len(ours) == len(plain)
    for column, (mine, its) in enumerate(zip(ours, plain, strict=True)):
        assert mine.shape == its.shape
        torch.testing.assert_close(mine[live[column]], its[live[column]], atol=2e-4, rtol=1e-4)
        assert not mine[~live[column]].any()


@pytest.mark.parametrize("who", ["near", "same", "far"])
@pytest.mark.parametrize("ends_early", [False, True])
def test_values_of_live_columns(target, assistants, enabled, who, ends_early):
    batch = kit.ragged()
    eos = int(kit.plain(target, batch, repetition_penalty=1.3)[1, WIDTH + 4]) if ends_early else None
    settings = {"max_new_tokens": 15, "do_sample": False, "repetition_penalty": 1.3, "eos_token_id": eos, **WANTED}
    plain = target.generate(**batch, **settings)
    ours = target.generate(**batch, **settings, assistant_model=assistants[who], tetris_capacity=5)
    assert torch.equal(ours.sequences, plain.sequences)
    assert isinstance(ours, TetrisDecoderOnlyOutput)

    generated = plain.sequences[:, WIDTH:].T  # (columns, N)
    is_eos = generated == (-1 if eos is None else eos)
    live = is_eos.long().cumsum(0) - is_eos.long() == 0
    assert live.all() != ends_early
    compare(ours.scores, plain.scores, live)
    compare(ours.logits, plain.logits, live)
    assert len(ours.hidden_states) == len(plain.hidden_states) == len(generated)
    for column, (mine, its) in enumerate(zip(ours.hidden_states, plain.hidden_states, strict=True)):
        assert len(mine) == len(its) == target.config.num_hidden_layers + 1
        for layer_mine, layer_its in zip(mine, its, strict=True):
            if column == 0:  # the whole prompt; plain computes something for its padding, too
                layer_its = layer_its * batch["attention_mask"][:, :, None]
                torch.testing.assert_close(layer_mine, layer_its, atol=2e-4, rtol=1e-4)
            else:
                compare([layer_mine], [layer_its], live[column : column + 1])


def test_transition_scores(target, near, enabled):
    batch = kit.ragged()
    settings = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(**batch, **settings)
    ours = target.generate(**batch, **settings, assistant_model=near, tetris_capacity=5)
    expected = target.compute_transition_scores(plain.sequences, plain.scores, normalize_logits=True)
    found = target.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_only_what_was_asked_for(target, near, enabled):
    batch = kit.ragged()
    settings = {"max_new_tokens": 4, "do_sample": False, "assistant_model": near, "tetris_capacity": 5}
    out = target.generate(**batch, **settings, return_dict_in_generate=True)
    assert out.scores is None and out.logits is None and out.hidden_states is None
    assert torch.is_tensor(target.generate(**batch, **settings, output_scores=True))
    with pytest.raises(ValueError, match="`output_attentions"):
        target.generate(**batch, **settings, output_attentions=True, return_dict_in_generate=True)
