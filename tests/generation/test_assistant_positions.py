"""Where an assistant reads and writes, against loops over rows."""

import kit
import torch

from tetris_hf.generation.assistant_positions import places, remember, stopped, within_context
from tetris_hf.generation.fusing import fusing


@kit.compiled_or_not
def test_equals_a_loop_over_rows_and_places(compiled):
    generator = torch.Generator().manual_seed(2)

    def some(most: int) -> torch.Tensor:
        return torch.randint(0, most, (4,), generator=generator)

    for depth in (1, 2, 4):
        room, text_length, length, max_length = some(5), 1 + some(12), some(20), some(20)
        live, cached, context, width = torch.tensor([0, 1, 2, 3]), some(9), 10, 30
        before = cached.clone()
        with fusing(compiled):
            lengths = within_context(room, text_length, context, depth)
            remember(cached, text_length, lengths, live)
            columns, written, first, counts = places(length, max_length, text_length, lengths, live, depth, width)
        for row in range(4):
            drafts = max(0, min(int(room[row]), context + 1 - int(text_length[row]), depth))
            assert int(lengths[row]) == drafts
            # The last draft is fed to nobody.
            assert int(cached[row]) == (int(text_length[row]) + drafts - 1 if drafts else int(before[row]))
            for place in range(depth):
                column = int(length[row]) + place
                assert int(columns[place, row]) == min(column, int(max_length[row]))
                assert int(written[place, row]) == (column if place < drafts else width)
                assert int(first[place, row]) == int(text_length[row]) + place - 1, "of the draft before"
                assert int(counts[place, row]) == (place < drafts)


@kit.compiled_or_not
def test_a_place_that_is_left_out_ends_all_drafts(compiled):
    lengths, skipped = torch.tensor([4, 0, 2, 3]), torch.zeros((), dtype=torch.long)
    with fusing(compiled):
        for place, wanted, expected in ((1, True, [4, 0, 2, 3]), (2, False, [2, 0, 2, 2]), (3, False, [2, 0, 2, 2])):
            lengths = stopped(lengths, torch.tensor(wanted), place, skipped)
            assert lengths.tolist() == expected
    assert int(skipped) == 2
