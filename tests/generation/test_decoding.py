"""Greedy text is that of stock `generate`, token for token, whoever drafts, whatever is verified, wherever rows end.

Float32 on a CPU: the margins of the tiny models are far above the noise of another order of summation.
"""

import copy

import kit
import pytest
import torch
from transformers import StoppingCriteria

from tetris_hf import FixedWindowSelector, TetrisDecoding


ASSISTANTS = ("near", "same", "far")


def generated(sequences: torch.Tensor, batch: dict[str, torch.Tensor]) -> list[list[int]]:
    return sequences[:, batch["input_ids"].shape[1] :].tolist()


def lonely(texts: list[list[int]], row: int, earliest: int = 0) -> int:
    """A place at or after `earliest` whose token comes here for the first time, in this row and in no other."""
    others = {token for index, text in enumerate(texts) if index != row for token in text}
    text = texts[row]
    return next(p for p in range(earliest, len(text)) if text[p] not in others and text[p] not in text[:p])


def test_the_kit_can_prove_something(target, batch):
    texts = kit.alone(target, batch)
    assert len({token for text in texts for token in text}) >= 8
    assert generated(kit.plain(target, batch), batch) == texts


@pytest.mark.parametrize("depth", [1, 4, None])
@pytest.mark.parametrize("capacity", [0, 1, 2, 5, 64])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_equals_plain_generate(target, assistants, batch, name, capacity, depth):
    expected = kit.plain(target, batch, max_new_tokens=12)
    out = kit.speculate(target, batch, assistants[name], capacity, depth, max_new_tokens=12)
    assert torch.equal(out.sequences, expected)


def test_each_row_equals_its_single_run_over_60_tokens(target, near, batch):
    # Rows of unequal text length after unequal acceptance: one shared position vector, or one shared cache length,
    # garbles the short rows.
    out = kit.speculate(target, batch, near, 5, max_new_tokens=60)
    assert generated(out.sequences, batch) == kit.alone(target, batch, max_new_tokens=60)
    assert len(set(out.tetris_stats.accepted.sum(1).tolist())) > 1


@pytest.mark.parametrize("selector", [None, FixedWindowSelector(), FixedWindowSelector(2)])
def test_equals_plain_generate_with_any_selector(target, near, batch, selector):
    out = kit.speculate(target, batch, near, 4, 3, selector)
    assert torch.equal(out.sequences, kit.plain(target, batch))


def test_output_is_a_tensor_unless_a_dict_is_asked_for(target, near, batch):
    out = target.generate(**batch, do_sample=False, max_new_tokens=9, custom_generate=TetrisDecoding(near, 4))
    assert torch.equal(out, kit.plain(target, batch, max_new_tokens=9))


def test_without_an_assistant(target, batch):
    out = kit.speculate(target, batch, None, 4)
    assert torch.equal(out.sequences, kit.plain(target, batch))
    assert out.tetris_stats.drafted.sum() == 0


def test_an_object_serves_any_number_of_calls(target, near, batch):
    decoding = TetrisDecoding(near, 5)
    for lengths in ((3, 7, 12), (2, 2), (5, 1, 1, 9)):
        other = kit.ragged(lengths)
        out = target.generate(**other, do_sample=False, max_new_tokens=10, custom_generate=decoding)
        assert torch.equal(out, kit.plain(target, other, max_new_tokens=10))


# Where rows end.


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5])
def test_max_new_tokens(target, assistants, batch, name, new_tokens):
    expected = kit.plain(target, batch, max_new_tokens=new_tokens)
    out = kit.speculate(target, batch, assistants[name], 64, 4, max_new_tokens=new_tokens)
    assert torch.equal(out.sequences, expected)


def test_max_length(target, same, batch):
    settings = {"max_new_tokens": None, "max_length": 21}
    out = kit.speculate(target, batch, same, 64, 5, **settings)
    assert out.sequences.shape == (3, 21)
    assert torch.equal(out.sequences, kit.plain(target, batch, **settings))


@pytest.mark.parametrize("name", ASSISTANTS)
def test_a_row_is_cut_at_an_eos_inside_an_accepted_block(target, assistants, batch, name):
    texts = kit.alone(target, batch)
    place = lonely(texts, row=1, earliest=3)
    eos = texts[1][place]
    out = kit.speculate(target, batch, assistants[name], 64, 19, eos_token_id=eos)
    rows = generated(out.sequences, batch)
    assert rows[0] == texts[0] and rows[2] == texts[2]
    assert rows[1] == texts[1][: place + 1] + [0] * (19 - place)
    assert torch.equal(out.sequences, kit.plain(target, batch, eos_token_id=eos))


@pytest.mark.parametrize("name", ASSISTANTS)
def test_rows_end_at_different_steps(target, assistants, batch, name):
    texts = kit.alone(target, batch)
    early, late = lonely(texts, row=0, earliest=1), lonely(texts, row=1, earliest=8)
    eos = [texts[0][early], texts[1][late]]
    out = kit.speculate(target, batch, assistants[name], 4, 4, eos_token_id=eos)
    assert torch.equal(out.sequences, kit.plain(target, batch, eos_token_id=eos))
    rows = generated(out.sequences, batch)
    assert set(rows[0][early + 1 :]) == {0} and set(rows[1][late + 1 :]) == {0} and 0 not in rows[2]


@pytest.mark.parametrize("name", ASSISTANTS)
def test_all_rows_end_before_the_limit(target, assistants, batch, name):
    texts = kit.alone(target, batch)
    eos = [texts[index][lonely(texts, index, 2 + 2 * index)] for index in range(3)]
    out = kit.speculate(target, batch, assistants[name], 6, 4, eos_token_id=eos)
    # Not longer than the longest row: nothing is generated after the last one has ended.
    assert torch.equal(out.sequences, kit.plain(target, batch, eos_token_id=eos))
    assert out.sequences.shape[1] < batch["input_ids"].shape[1] + 20


@pytest.mark.parametrize("name", ASSISTANTS)
def test_eos_as_the_very_first_token(target, assistants, batch, name):
    texts = kit.alone(target, batch)
    eos = [text[0] for text in texts]
    expected = kit.plain(target, batch, eos_token_id=eos)
    assert expected.shape[1] == batch["input_ids"].shape[1] + 1
    assert torch.equal(kit.speculate(target, batch, assistants[name], 6, eos_token_id=eos).sequences, expected)


@pytest.mark.parametrize("setting", ["min_new_tokens", "min_length"])
@pytest.mark.parametrize("name", ASSISTANTS)
def test_minimum_length(target, assistants, batch, name, setting):
    # Without the minimum, row 0 would end at its third token.
    eos = kit.alone(target, batch)[0][2]
    value = 9 if setting == "min_new_tokens" else 21
    settings = {"eos_token_id": eos, setting: value}
    expected = kit.plain(target, batch, **settings)
    assert not torch.equal(expected, kit.plain(target, batch, eos_token_id=eos))
    assert torch.equal(kit.speculate(target, batch, assistants[name], 6, 4, **settings).sequences, expected)


@pytest.mark.parametrize("name", ASSISTANTS)
def test_padding_token_is_eos_and_a_mask_tells_them_apart(target, assistants, batch, name):
    texts = kit.alone(target, batch)
    eos = texts[1][lonely(texts, 1, 4)]
    same_token = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, eos)}
    settings = {"eos_token_id": eos, "pad_token_id": eos}
    out = kit.speculate(target, same_token, assistants[name], 6, 4, **settings)
    assert torch.equal(out.sequences, kit.plain(target, same_token, **settings))


def test_no_padding_token_at_all(target, near):
    model = copy.deepcopy(target)
    model.generation_config.pad_token_id = None
    level = kit.ragged((6, 6))
    assert torch.equal(kit.speculate(model, level, near, 4).sequences, kit.plain(model, level))


@pytest.mark.parametrize("lengths", [(9,), (1,), (1, 1, 1), (1, 12), (5, 5, 5, 5)])
def test_shapes_of_batches(target, near, lengths):
    batch = kit.ragged(lengths)
    assert torch.equal(kit.speculate(target, batch, near, 5).sequences, kit.plain(target, batch))


def test_without_a_mask(target, near):
    level = {"input_ids": kit.ragged((6, 6))["input_ids"]}
    assert torch.equal(kit.speculate(target, level, near, 4).sequences, kit.plain(target, level))


class EndsWith(StoppingCriteria):
    """True for a row whose last token is `token` once `columns` columns are there."""

    def __init__(self, token: int, columns: int):
        self.token, self.columns = token, columns

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] == self.token) & (input_ids.shape[1] >= self.columns)


def test_a_stopping_criterion_is_asked_inside_an_accepted_block(target, same, batch):
    texts = kit.alone(target, batch)
    place = lonely(texts, row=2, earliest=4)
    unseen = next(token for token in range(2, kit.VOCABULARY) if all(token not in text for text in texts))
    settings = {"stopping_criteria": [EndsWith(texts[2][place], 12 + place)], "eos_token_id": unseen}
    out = kit.speculate(target, batch, same, 64, 19, **settings)
    assert torch.equal(out.sequences, kit.plain(target, batch, **settings))
    assert set(generated(out.sequences, batch)[2][place + 1 :]) == {0}
    # Stock pads an ended row only if there is an EOS id, else it goes on writing text behind the end. A row that has
    # ended is padded here in both cases.
    del settings["eos_token_id"]
    assert torch.equal(kit.speculate(target, batch, same, 64, 19, **settings).sequences, out.sequences)


def test_a_single_criterion_for_all_rows(target, near, batch):
    class AtColumn(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= 20

    criteria = [AtColumn()]
    out = kit.speculate(target, batch, near, 6, 4, stopping_criteria=criteria)
    assert torch.equal(out.sequences, kit.plain(target, batch, stopping_criteria=criteria))
