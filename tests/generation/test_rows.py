"""Rows: what is written, committed and shown, against lists of tokens."""

import kit
import torch

from tetris_hf.generation.rows import Rows


def make(max_length=20):
    batch = kit.ragged((3, 7, 12, 1))
    return Rows(batch["input_ids"], (batch["attention_mask"] == 0).sum(1), max_length, pad_token_id=0), batch


def test_write_and_commit_equal_lists():
    rows, batch = make()
    texts = [batch["input_ids"][row].tolist() for row in range(4)]
    generator = torch.Generator().manual_seed(1)
    while len(live := rows.live()):
        block = torch.randint(2, 64, (len(live), 5), generator=generator)
        counts = torch.randint(1, 6, (len(live),), generator=generator)
        rows.write(live, block, counts)
        kept = torch.minimum(counts, rows.max_length[live] - rows.length[live])
        ends = torch.rand(len(live), generator=generator) < 0.2
        rows.commit(live, kept, ends)
        for index, row in enumerate(live.tolist()):
            texts[row] += block[index, : kept[index]].tolist()
            assert rows.tokens[row, : rows.length[row]].tolist() == texts[row]
            assert bool(rows.finished[row]) == (bool(ends[index]) or len(texts[row]) == rows.max_length[row])
    width = max(len(text) for text in texts)
    assert rows.sequences().tolist() == [text + [0] * (width - len(text)) for text in texts]


def test_positions_are_without_padding():
    rows, batch = make()
    assert rows.text_length(torch.tensor([0, 3])).tolist() == [3, 1]
    every = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 2, 6, 0])
    assert rows.read(*every).tolist() == [
        batch["input_ids"][row, -n].item() for row, n in ((0, 3), (0, 1), (1, 1), (3, 1))
    ]
    rows.read(torch.tensor([0, 0]), torch.tensor([-9, 99]))  # outside: some token, no error


def test_room_and_the_column_that_swallows():
    rows, batch = make(max_length=14)
    everyone = torch.arange(4)
    assert rows.room(everyone).tolist() == [1, 1, 1, 1]
    rows.write(everyone, torch.full((4, 6), 9), torch.tensor([6, 1, 0, 2]))
    assert rows.tokens[:, 12:14].tolist() == [[9, 9], [9, 0], [0, 0], [9, 9]]
    assert torch.equal(rows.tokens[:, :12], batch["input_ids"])
    assert rows.prefix(13, torch.tensor([1])).tolist() == [[*batch["input_ids"][1].tolist(), 9]]


def test_a_feed_goes_to_lower_rows_first():
    rows, _ = make(max_length=40)
    live = torch.tensor([0, 1, 3])
    prompts = [list(range(2, 2 + length)) for length in (9, 1, 14)]
    padded = torch.tensor([ids + [0] * (14 - len(ids)) for ids in prompts])
    lengths = torch.tensor([len(ids) for ids in prompts])
    rows.admit(live, padded, lengths, torch.full_like(lengths, 40), torch.zeros_like(lengths))
    computed = {row: 0 for row in live.tolist()}
    for budget in (3, 1, 8, 2, 30, 5):
        first, taken = rows.next_feed(budget)
        left = budget
        for row, ids in zip(live.tolist(), prompts, strict=True):
            many = min(left, len(ids) - 1 - computed[row])  # the last token is for the first step
            assert int(taken[row]) == many and (many == 0 or int(first[row]) == computed[row])
            computed[row], left = computed[row] + many, left - many
        assert int(taken[2]) == 0 and all(map(torch.equal, rows.feed(budget), (first, taken)))
        assert rows.unfed[live].tolist() == [
            len(prompts[place]) - 1 - done for place, done in enumerate(computed.values())
        ]
    assert not rows.unfed.any()
