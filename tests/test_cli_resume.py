"""`tetris-hf generate`, interrupted: by SIGKILL, by Ctrl-C, by errors. Nothing is lost, torn or served twice."""

import io
import json
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter

import pytest
import torch
from test_cli import ROOT, arguments, expected, folder, prompts, records_of, texts  # noqa: F401

from tetris_hf.cli import main
from tetris_hf.cli.records import RecordFile
from tetris_hf.generation.packed_model import PackedModel
from tetris_hf.generation.speculation import Speculation


TEXT = ("id", "text", "finish_reason", "prompt_tokens", "completion_tokens", "token_ids")


def start(argv, dies=(None, 0)):
    """The command in a process of its own, forked from one that has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_cli_resume"])
    process = context.Process(target=run_and_exit, args=(argv, dies))
    with pytest.MonkeyPatch.context() as patch:  # the server that forks finds what it is to import
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
        process.start()
    return process


def run_and_exit(argv, dies):
    """
    Run the command. `dies`: `("byte", n)`, with the n-th byte that it writes, `("forward", n)`, with its n-th forward,
    `("ctrl-c", n)`, interrupted in that forward.
    """
    torch.set_num_threads(1)
    # A shell that starts tests in its background has them ignore Ctrl-C, and processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, moment = dies
    if kind == "byte":
        opened = RecordFile.__init__

        def opening(self, path, resume):
            opened(self, path, resume)
            self._file.close()
            self._file = io.BufferedWriter(FatalFile(path, moment))

        RecordFile.__init__ = opening
    elif kind is not None:
        number = signal.SIGINT if kind == "ctrl-c" else signal.SIGKILL
        forward, calls = PackedModel.forward, []

        def computing(self, *args, **kwargs):
            calls.append(self)
            if len(calls) == moment:
                os.kill(os.getpid(), number)
            return forward(self, *args, **kwargs)

        PackedModel.forward = computing
    sys.exit(main(argv))


class FatalFile(io.FileIO):
    """A file that takes some bytes more; then its process is killed, in the middle of a write."""

    def __init__(self, path, room):
        super().__init__(path, "ab")
        self.room = room

    def write(self, data):
        written = super().write(bytes(data[: self.room]))
        self.room -= written
        if self.room == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


@pytest.mark.parametrize("sampling", [[], ["--do-sample", "--temperature", "0.9", "--top-p", "0.95", "--seed", "3"]])
def test_killed_at_twenty_moments_and_resumed(folder, prompts, tmp_path, sampling):  # noqa: F811
    undisturbed, out = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    asked = arguments(folder, prompts, "--assistant", folder / "near", *sampling, "--output")
    assert main([*asked, str(undisturbed)]) == 0
    moments, torn = random.Random(4), 0
    size = undisturbed.stat().st_size
    for number in range(20):
        # While it writes a line, and while it computes.
        dies = ("byte", moments.randrange(1, size // 8)) if number % 2 else ("forward", moments.randrange(1, 30))
        job = start([*asked, str(out), "--resume"], dies)
        job.join()
        assert job.exitcode == -signal.SIGKILL, f"{number}: {dies}"
        torn += not out.read_bytes().endswith(b"\n") and out.stat().st_size > 0
        whole = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
        assert len({record["id"] for record in whole}) == len(whole)
    assert torn >= 8 and 10 < len(whole) < 40
    assert main([*asked, str(out), "--resume"]) == 0
    assert out.read_bytes().endswith(b"\n")
    found, wanted = records_of(out), {record["id"]: record for record in records_of(undisturbed)}
    assert Counter(record["id"] for record in found) == Counter(wanted.keys())
    for record in found:
        assert [record[name] for name in TEXT] == [wanted[record["id"]][name] for name in TEXT]
    before = out.read_bytes()
    assert main([*asked, str(out), "--resume"]) == 0 and out.read_bytes() == before


def test_a_file_cut_anywhere_is_taken_up(tmp_path):
    out = tmp_path / "out.jsonl"
    lines = [b'{"id": "a\xc3\xa4", "finish_reason": "stop"}\n', b'{"id": 2, "finish_reason": "error"}\n']
    whole = b"".join(lines)
    for cut in range(len(whole) + 1):
        out.write_bytes(whole[:cut])
        output = RecordFile(str(out), resume=True)
        kept = 0 if cut < len(lines[0]) else 1 if cut < len(whole) else 2
        assert output.done == set(["aä", 2][:kept]) and out.read_bytes() == b"".join(lines[:kept])
        output.close()


def test_ctrl_c_ends_with_whole_records(folder, prompts, tmp_path):  # noqa: F811
    out = tmp_path / "out.jsonl"
    asked = arguments(folder, prompts, "--assistant", folder / "near", "--output", out, "--max-new-tokens", 100)
    job = start(asked, ("ctrl-c", 700))
    job.join()
    assert job.exitcode == 130
    assert out.read_bytes().endswith(b"\n") and 4 <= len(records_of(out)) < 40


def breaking(monkeypatch, error_for):
    """A step raises what `error_for(rows, call)` says, calls counted from 1."""
    stock, calls = Speculation.advance, []

    def advance(self, feed=0):
        calls.append(self.rows.num_rows)
        if (error := error_for(self.rows.num_rows, len(calls))) is not None:
            raise error
        stock(self, feed)

    monkeypatch.setattr(Speculation, "advance", advance)
    return calls


def test_an_interrupt_leaves_whole_records(folder, prompts, tmp_path, capsys, monkeypatch):  # noqa: F811
    out = tmp_path / "out.jsonl"
    asked = [part for part in arguments(folder, prompts, "--output", out) if part != "--quiet"]
    with monkeypatch.context() as patch:
        breaking(patch, lambda rows, call: KeyboardInterrupt() if call == 40 else None)
        assert main(asked) == 130
    done = len(records_of(out))
    assert 8 <= done < 20
    assert f"interrupted: {done} of 40 prompts have their record; --resume goes on" in capsys.readouterr().err
    assert main([*asked, "--resume"]) == 0 and len({record["id"] for record in records_of(out)}) == 40
    assert f"{40 - done} records, 0 of them errors" in capsys.readouterr().err
    assert main([*asked, "--resume"]) == 0
    assert "all 40 prompts have their record already" in capsys.readouterr().err


def test_out_of_memory_halves_the_batch(folder, prompts, expected, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "out.jsonl"
    full = torch.OutOfMemoryError("CUDA out of memory.\nMore of it.")
    calls = breaking(monkeypatch, lambda rows, call: full if rows > 1 or call == 12 else None)
    assert main(arguments(folder, prompts, "--output", out)) == 0
    records = records_of(out)
    assert calls[:3] == [4, 2, 1] and set(calls[3:]) == {1}  # it does not try the large batch again
    failed = [record for record in records if record["finish_reason"] == "error"]
    assert [record["error"] for record in failed] == ["out of memory: CUDA out of memory."] and len(records) == 40
    assert all(r["token_ids"] == expected[int(r["id"][1:])] for r in records if r not in failed)


def test_other_errors_end_the_job_and_keep_what_is_done(folder, prompts, tmp_path, monkeypatch, capsys):  # noqa: F811
    out = tmp_path / "out.jsonl"
    breaking(monkeypatch, lambda rows, call: ValueError("`x` is wrong.") if call == 30 else None)
    assert main(arguments(folder, prompts, "--output", out)) == 1
    assert capsys.readouterr().err.strip() == "tetris-hf generate: error: `x` is wrong."
    assert len(records_of(out)) >= 8
    with pytest.raises(ValueError, match="`x` is wrong"):
        breaking(monkeypatch, lambda rows, call: ValueError("`x` is wrong."))
        main(arguments(folder, prompts, "--resume", "--output", out, "--traceback"))


def test_a_foreign_line_is_not_overwritten(folder, prompts, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "notes.txt"
    out.write_text("my notes\nmore of them")
    assert main(arguments(folder, prompts, "--resume", "--output", out)) == 1
    assert "line 1 of" in capsys.readouterr().err and out.read_text() == "my notes\nmore of them"
