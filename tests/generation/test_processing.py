"""Every logits processor, at every verified position with that row's own prefix: text is that of plain `generate`."""

import kit
import pytest
import torch
from transformers.generation.logits_process import LogitsProcessor, TemperatureLogitsWarper

from tetris_hf.generation.processing import HISTORY_FREE, ROW_WISE, LogitsProcessing
from tetris_hf.generation.rows import Rows


class ByRowNumber(LogitsProcessor):
    """A user's own: favours another token in every row, by the row's number and its whole prefix, padding included."""

    def __call__(self, input_ids, scores):
        numbers = torch.arange(len(scores))
        favoured = (input_ids.sum(1) + 7 * numbers) % scores.shape[1]
        return scores.index_put((numbers, favoured), torch.tensor(6.0), accumulate=True)


class ByNeighbour(LogitsProcessor):
    """A user's own that looks at another row: forbids what row 0 said first."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, input_ids[0, 12:13], -torch.inf) if input_ids.shape[1] > 12 else scores


def allowed(row, prefix):
    """Depends on the row's number, on the width and on the last token."""
    return [token for token in range(kit.VOCABULARY) if (token + row + len(prefix) + int(prefix[-1])) % 3]


SETTINGS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [7, 9], [30]]},
    "sequence bias": {"sequence_bias": [[[10], 5.0], [[3, 4], -5.0]]},
    "suppressed tokens": {"suppress_tokens": [4, 8, 30]},
    "suppressed at the beginning": {"begin_suppress_tokens": [52, 53, 60]},
    "forced EOS": {"forced_eos_token_id": 9},
    "forced BOS": {"forced_bos_token_id": 9},
    "minimum length": {"min_length": 20, "eos_token_id": 30},
    "minimum of new tokens": {"min_new_tokens": 10, "eos_token_id": 30},
    "prefix function": {"prefix_allowed_tokens_fn": allowed},
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.5},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 2},
    "length penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 30},
    "watermark": {"watermarking_config": {"bias": 3.0, "seeding_scheme": "selfhash", "context_width": 2}},
    "watermark by the last token": {"watermarking_config": {"bias": 3.0}},
    "invalid values": {"remove_invalid_values": True},
    "renormalisation": {"renormalize_logits": True},
    "by row number": {"logits_processor": [ByRowNumber()]},
    "by neighbour": {"logits_processor": [ByNeighbour()]},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "suppress_tokens": [7], "min_new_tokens": 5},
}


@pytest.mark.parametrize("who", ["near", "same"])
@pytest.mark.parametrize("name", SETTINGS)
def test_text_is_that_of_plain_generate(target, assistants, enabled, name, who):
    batch = kit.ragged()
    settings = {"max_new_tokens": 20, "do_sample": False, **SETTINGS[name]}
    expected = target.generate(**batch, **settings)
    out = target.generate(**batch, **settings, assistant_model=assistants[who], tetris_capacity=5)
    assert torch.equal(out, expected)


def test_the_padding_token_counts_as_in_plain_generate(target, near, enabled):
    # Plain batched generate shows processors the padding: a frequent word as padding makes the difference visible.
    batch = kit.ragged()
    word = int(target.generate(**batch, max_new_tokens=1, do_sample=False)[0, -1])
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, word)
    settings = {"max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.7, "pad_token_id": word}
    expected = target.generate(**batch, **settings)
    assert torch.equal(target.generate(**batch, **settings, assistant_model=near, tetris_capacity=5), expected)


def test_positions_are_grouped_by_width_and_history_free_ones_are_not():
    calls = []

    class Records(LogitsProcessor):
        def __call__(self, input_ids, scores):
            calls.append((tuple(input_ids.shape), input_ids.tolist()))
            return scores + input_ids.sum(1, keepdim=True)

    rows = Rows(torch.tensor([[0, 0, 1], [2, 3, 4]]), torch.tensor([2, 0]), max_length=9, pad_token_id=0)
    rows.write(torch.tensor([0, 1]), torch.tensor([[5, 6], [7, 8]]), torch.tensor([2, 2]))
    logits = torch.zeros(4, 3)
    position_rows, columns = torch.tensor([0, 0, 1, 1]), torch.tensor([3, 4, 3, 5])
    scores = LogitsProcessing([Records()], rows, False)(logits, position_rows, columns)
    # Width 3 for both rows, width 4 for row 0 (row 1 as if finished), width 5 for row 1 (row 0 as if finished).
    assert [shape for shape, _ in calls] == [(2, 3), (2, 4), (2, 5)]
    assert calls[1][1] == [[0, 0, 1, 5], [2, 3, 4, 0]]
    assert calls[2][1] == [[0, 0, 1, 0, 0], [2, 3, 4, 7, 8]]
    assert scores[:, 0].tolist() == [1, 6, 9, 24]

    warm = LogitsProcessing([TemperatureLogitsWarper(0.5)], rows, True)
    assert not warm.needs_history
    assert torch.equal(warm(torch.ones(4, 3), position_rows, columns), torch.full((4, 3), 2.0))


FREE = {
    "TemperatureLogitsWarper": (0.7,),
    "TopKLogitsWarper": (5,),
    "TopPLogitsWarper": (0.8,),
    "TopHLogitsWarper": (0.5,),
    "MinPLogitsWarper": (0.2,),
    "TypicalLogitsWarper": (0.8,),
    "EpsilonLogitsWarper": (0.01,),
    "EtaLogitsWarper": (0.01,),
    "LogitNormalization": (),
    "InfNanRemoveLogitsProcessor": (),
    "SuppressTokensLogitsProcessor": ([3, 4],),
}


@pytest.mark.parametrize("name", FREE)
def test_one_call_for_all_positions_equals_a_call_for_each(name):
    kind = next((kind for kind in HISTORY_FREE if kind.__name__ == name), None)
    if kind is None:
        pytest.skip("not in this transformers")
    processor = kind(*FREE[name])
    rows = Rows(torch.tensor([[0, 0, 1], [2, 3, 4]]), torch.tensor([2, 0]), max_length=9, pad_token_id=0)
    logits = 4 * torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    found = LogitsProcessing([processor], rows, True)(logits, torch.tensor([0, 0, 0, 1, 1, 1]), torch.full((6,), 3))
    alone = [processor(torch.tensor([[7, 8, 9]]), logits[place : place + 1].clone()) for place in range(6)]
    torch.testing.assert_close(found, torch.cat(alone))
    assert not torch.equal(found, logits) or name == "InfNanRemoveLogitsProcessor"


def test_every_history_free_kind_is_tried():
    assert {kind.__name__ for kind in HISTORY_FREE} <= set(FREE)


def test_the_kinds_are_disjoint_and_known_to_this_transformers():
    assert not HISTORY_FREE & ROW_WISE
    assert len(HISTORY_FREE) >= 10 and len(ROW_WISE) >= 10
