"""Every stopping criterion is asked at every committed column, in order: rows are cut where plain `generate` ends."""

import time

import kit
import pytest
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tetris_hf.generation.rows import Rows
from tetris_hf.generation.stopping import RowStopping


WIDTH = 12


class AtToken(StoppingCriteria):
    """True for rows whose newest token is one of these, one id per row of the batch; remembers every column it saw."""

    def __init__(self, tokens):
        self.tokens, self.columns = torch.as_tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.columns.append(input_ids.shape[1])
        return input_ids[:, -1] == self.tokens


class AtColumn(StoppingCriteria):
    """One answer for the whole batch, as the documentation of transformers allows."""

    def __init__(self, column):
        self.column = column

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.column


def naive_cut(tokens, stopping_tokens):
    """Commit token by token until the first that stops."""
    for place, token in enumerate(tokens):
        if token in stopping_tokens:
            return place + 1, True
    return len(tokens), False


def test_equals_a_loop_over_rows_and_tokens():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        lengths = torch.randint(0, 4, (4,), generator=generator)
        rows = Rows(torch.randint(1, 6, (4, 3), generator=generator), torch.zeros(4, dtype=torch.long), 20, 0)
        rows.length += lengths
        live = torch.tensor([0, 1, 3])
        block = torch.randint(1, 6, (3, 5), generator=generator)
        counts = torch.randint(1, 6, (3,), generator=generator)
        rows.write(live, block, counts)
        own, eos = torch.randint(1, 6, (4,), generator=generator).tolist(), [2, 4]
        criteria = [MaxLengthCriteria(20), EosTokenCriteria(eos), AtToken(own)]
        kept, finished = RowStopping(criteria, block.device)(rows, live, block, counts)
        for index, row in enumerate(live.tolist()):
            expected = naive_cut(block[index, : counts[index]].tolist(), [*eos, own[row]])
            assert (int(kept[index]), bool(finished[index])) == expected


@pytest.mark.parametrize("who", ["near", "same", "far"])
def test_a_list_of_eos_ids(target, assistants, who):
    text = kit.plain(target, kit.ragged())[:, WIDTH:]
    eos = [int(text[0, 3]), int(text[1, 6]), int(text[2, 9])]
    expected = kit.plain(target, kit.ragged(), eos_token_id=eos, pad_token_id=0)
    out = kit.speculate(target, kit.ragged(), assistants[who], 9, 6, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("who", ["near", "same"])
def test_a_users_criterion_inside_an_accepted_block(target, assistants, who):
    text = kit.plain(target, kit.ragged())[:, WIDTH:]
    tokens = [int(text[0, 8]), int(text[1, 4]), int(text[2, 6])]
    # An EOS id that never comes lets stock pad the rows that ended, too.
    never = next(t for t in range(2, kit.VOCABULARY) if t not in text)
    settings = {"eos_token_id": never, "pad_token_id": 0}
    expected = kit.plain(target, kit.ragged(), stopping_criteria=StoppingCriteriaList([AtToken(tokens)]), **settings)
    criterion = AtToken(tokens)
    out = kit.speculate(
        target, kit.ragged(), assistants[who], 12, 6, stopping_criteria=StoppingCriteriaList([criterion]), **settings
    )
    assert torch.equal(out.sequences, expected)
    assert set(range(WIDTH + 1, out.sequences.shape[1] + 1)) <= set(criterion.columns), "asked at every column"


def test_a_rows_end_spends_nothing_more(target, same):
    text = kit.plain(target, kit.ragged())[:, WIDTH:]
    eos = int(text[1, 4])
    seen = []

    class Watch:
        def __call__(self, draft, lengths, capacity):
            return lengths

        def check_sampling(self):
            pass

        def observe(self, verification):
            seen.append((verification.live.tolist(), verification.lengths.tolist()))

    out = kit.speculate(target, kit.ragged(), same, 3, 4, Watch(), eos_token_id=eos, pad_token_id=0)
    ended = int(out.tetris_stats.live_steps[1])
    assert all(1 in live for live, _ in seen[:ended]) and all(1 not in live for live, _ in seen[ended:])
    # Its share goes to the others.
    assert all(sum(lengths) == 3 for live, lengths in seen[ended:-2])


def test_one_answer_for_the_whole_batch(target, near):
    settings = {"stopping_criteria": StoppingCriteriaList([AtColumn(WIDTH + 7)])}
    expected = kit.plain(target, kit.ragged(), **settings)
    assert torch.equal(kit.speculate(target, kit.ragged(), near, 9, 6, **settings).sequences, expected)


def test_max_time_ends_all_rows(target, near, monkeypatch):
    # The clock jumps at the 5th look: no test of ours waits.
    looks = iter(range(10_000))
    start = time.time()
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: start + 10 * (next(looks) // 5))
    out = kit.speculate(target, kit.ragged(), near, 4, 2, max_time=5.0, max_new_tokens=40)
    assert WIDTH + 1 <= out.sequences.shape[1] < WIDTH + 12


def test_the_first_token_may_be_the_last(target, near):
    text = kit.plain(target, kit.ragged())[:, WIDTH:]
    for eos in ([int(text[0, 0])], text[:, 0].tolist()):
        expected = kit.plain(target, kit.ragged(), eos_token_id=eos, pad_token_id=0)
        out = kit.speculate(target, kit.ragged(), near, 4, 2, eos_token_id=eos, pad_token_id=0)
        assert torch.equal(out.sequences, expected)
