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

import tetris_hf
from tetris_hf import TetrisDecoding
from tetris_hf.generation import stopping
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


def test_equals_a_loop_over_rows_and_tokens(monkeypatch):
    monkeypatch.setattr(stopping, "_ROW_WISE", (AtToken,))
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


class SomeRowRemembers(StoppingCriteria):
    """
    As lm-evaluation-harness ends a batch: remembers which rows have shown a token in their last two, padding not told
    apart, and is true for all when every row has.
    """

    def __init__(self, rows, token):
        self.done, self.token = [False] * rows, token

    def __call__(self, input_ids, scores, **kwargs):
        for row, last in enumerate(input_ids[:, -2:].tolist()):
            self.done[row] |= self.token in last
        return all(self.done)


class EveryThirdSighting(StoppingCriteria):
    """Ends a row when small tokens were seen three times in it: a state of its own for each row."""

    def __init__(self, rows):
        self.seen = torch.zeros(rows, dtype=torch.long)

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += input_ids[:, -1] < 20
        return self.seen >= 3


@pytest.mark.parametrize("who", ["near", "same", "far"])
@pytest.mark.parametrize("streamed", [False, True])
def test_criteria_that_remember_or_look_at_other_rows(target, assistants, who, streamed):
    class Gather(tetris_hf.RowStreamer):
        def __init__(self):
            self.rows = {}

        def put_row(self, row, tokens):
            self.rows.setdefault(row, []).extend(tokens.tolist())

    cut = 0
    for seed in range(4):
        batch = kit.ragged(seed=seed)
        text = kit.plain(target, batch)[:, WIDTH:]
        # The end token is the padding token, as in tokenizers that have none.
        eos = int(text[seed % 3, 6])
        for make in (lambda eos=eos: SomeRowRemembers(3, eos), lambda: EveryThirdSighting(3)):
            settings = {"eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": 20}
            expected = kit.plain(target, batch, stopping_criteria=StoppingCriteriaList([make()]), **settings)
            gather = Gather()
            decoding = TetrisDecoding(
                assistants[who], 9, num_assistant_tokens=4, streamer=gather if streamed else None
            )
            out = target.generate(
                **batch, do_sample=False, stopping_criteria=StoppingCriteriaList([make()]), custom_generate=decoding,
                return_dict_in_generate=True, output_scores=True, **settings,
            )  # fmt: skip
            assert torch.equal(out.sequences, expected)
            assert len(out.scores) == expected.shape[1] - WIDTH
            cut += expected.shape[1] < WIDTH + 20
            for row, tokens in gather.rows.items():
                shown = expected[row, WIDTH:].tolist()
                assert tokens == shown[: len(tokens)] and set(shown[len(tokens) :]) <= {eos}
    assert cut
