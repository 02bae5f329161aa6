"""The audit finds the first difference of every row, and the margin that the model had there."""

import kit
import pytest
import torch

from tetris_hf.audit import first_differences


def test_finds_the_column_and_the_margin(target):
    batch = kit.ragged()
    plain = target.generate(**batch, max_new_tokens=8, do_sample=False)
    other = plain.clone()
    column = batch["input_ids"].shape[1] + 4
    other[1, column:] = (other[1, column:] + 1) % kit.VOCABULARY
    (found,) = first_differences(target, other, plain, batch["attention_mask"])
    assert (found.row, found.column) == (1, column)
    assert (found.token, found.reference_token) == (int(other[1, column]), int(plain[1, column]))

    prefix = plain[1, :column][batch["attention_mask"][1].eq(0).sum() :]
    logits = target(prefix[None]).logits[0, -1]
    best = logits.sort(descending=True).values
    assert found.margin == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    # The reference has the best token, so the gap is down to the other one.
    assert found.gap == pytest.approx(float(best[0] - logits[found.token]), abs=1e-4)
    assert found.is_near_tie(found.gap) and not found.is_near_tie(found.gap - 1e-3)


def test_equal_rows_and_unequal_widths_are_no_difference(target):
    batch = kit.ragged()
    plain = target.generate(**batch, max_new_tokens=8, do_sample=False)
    assert first_differences(target, plain, plain) == []
    assert first_differences(target, plain[:, :-2], plain) == []
    with pytest.raises(ValueError, match="`sequences` has 2 rows"):
        first_differences(target, plain[:2], plain)


def test_half_precision_differs_only_at_near_ties():
    # Four layers, vocabulary 512, bfloat16: what differs from stock there must be a matter of rounding.
    model = kit.tiny(vocab_size=512, num_hidden_layers=4, initializer_range=0.2).to(torch.bfloat16)
    batch = kit.ragged(tuple(range(3, 23)) * 2, vocabulary=512)
    settings = {"max_new_tokens": 32, "do_sample": False}
    plain = model.generate(**batch, **settings)
    ours = kit.speculate(model, batch, kit.near(model), 20, 3, **settings).sequences
    assert ours.shape == plain.shape
    for difference in first_differences(model, ours, plain, batch["attention_mask"]):
        # bfloat16 keeps 8 bits: one step at the size of these logits.
        assert difference.is_near_tie(0.25), difference
