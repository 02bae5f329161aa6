"""Streamers get every committed token once, in order, cut where a row ends."""

import kit
import pytest
import torch
from transformers import TextStreamer

from tetris_hf import RowStreamer, RowTextStreamer


class Keeps(RowStreamer):
    def __init__(self):
        self.tokens, self.ended, self.ends = {}, [], 0

    def put_row(self, row, tokens):
        assert row not in self.ended, "nothing comes after a row's end"
        assert tokens.device.type == "cpu" and len(tokens)
        self.tokens.setdefault(row, []).extend(tokens.tolist())

    def end_row(self, row):
        self.ended.append(row)

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("who", ["near", "same"])
def test_rows_get_their_own_tokens(target, assistants, enabled, who):
    batch, width = kit.ragged(), 12
    # Declared EOS: the fifth new token of row 1, so that it ends inside an accepted block.
    eos = int(kit.plain(target, batch)[1, width + 4])
    streamer = Keeps()
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    out = target.generate(
        **batch,
        **settings,
        assistant_model=assistants[who],
        tetris_capacity=8,
        num_assistant_tokens=6,
        streamer=streamer,
    )
    for row in range(3):
        text = out[row, width:].tolist()
        text = text[: text.index(eos) + 1] if eos in text else text
        assert streamer.tokens[row] == text
    assert sorted(streamer.ended) == [0, 1, 2] and streamer.ends == 1


def test_a_stock_streamer_serves_one_row_as_in_stock(target, near, enabled):
    class Stock(TextStreamer):
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, value):
            self.seen.append(value.flatten().tolist())

        def end(self):
            self.ended = True

    prompt = kit.row(kit.ragged(), 1)
    settings = {"max_new_tokens": 9, "do_sample": False}
    expected, streamer = Stock(), Stock()
    target.generate(**prompt, **settings, streamer=expected)
    target.generate(**prompt, **settings, assistant_model=near, tetris_capacity=4, streamer=streamer)
    assert streamer.seen == expected.seen and streamer.ended


def test_a_stock_streamer_cannot_serve_a_batch(target, near, enabled):
    with pytest.raises(ValueError, match="`streamer`.*3 rows.*RowStreamer"):
        target.generate(**kit.ragged(), assistant_model=near, tetris_capacity=4, streamer=TextStreamer(None))


def test_text_waits_for_whole_characters():
    class Bytes:
        def decode(self, tokens):
            return bytes(tokens).decode(errors="replace")

    pieces = []
    streamer = RowTextStreamer(Bytes(), lambda row, text: pieces.append((row, text)))
    first, second = "é".encode()
    streamer.put_row(0, torch.tensor([104, first]))
    streamer.put_row(1, torch.tensor([105]))
    streamer.put_row(0, torch.tensor([second]))
    streamer.put_row(1, torch.tensor([first]))
    streamer.end_row(1)
    assert pieces == [(1, "i"), (0, "hé"), (1, "\ufffd")]
