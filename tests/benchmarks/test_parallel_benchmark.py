"""The benchmark of several cards: its phases in one process; the order and the failures of those that it starts."""

import importlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import kit
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import distributed
from transformers import PreTrainedTokenizerFast


ROOT = Path(__file__).parents[2]


@pytest.fixture
def parallel(monkeypatch):
    """The script. It and its neighbours are scripts beside each other, not a package."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])
    return importlib.import_module("parallel")


@pytest.fixture
def arguments(tmp_path):
    """A tiny Llama with a tokenizer of 64 words, its draft and prompts."""
    words = {"<pad>": 0, "<s>": 1, **{f"w{number}": number for number in range(2, kit.VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(tmp_path / "model")
    target = kit.tiny()
    target.save_pretrained(tmp_path / "model")
    kit.near(target).save_pretrained(tmp_path / "draft")
    lines = [json.dumps({"turns": [text]}) for text in ("w3 w9 w11", "w7 w30 w31 w32 w5 w60", "w8", "w20 w2")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    sizes = ["--num-prompts", "12", "--slots", "3", "--tensor-slots", "3", "2", "--tensor-prompts", "6"]
    sizes += ["--exact-prompts", "4", "--min-new-tokens", "4", "--max-new-tokens", "16", "--device", "cpu"]
    models_of = ["--target", str(tmp_path / "model"), "--assistant", str(tmp_path / "draft")]
    return [*models_of, "--prompts", str(tmp_path / "prompts.jsonl"), *sizes]


def test_every_phase_in_one_process(parallel, arguments, tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in address.items():
        monkeypatch.setenv(name, str(value))
    out = tmp_path / "results.jsonl"
    try:
        for phase in ("data", "tensor", "exact"):
            parallel.main([*arguments, "--worker", phase, "--folder", str(tmp_path / "stored"), "--out", str(out)])
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == records
    data = [record for record in records if record["phase"] == "data"]
    assert [record["ratio"] for record in data] == [1.0]
    assert data[0]["by_rank"][0]["prompts"] == 12 and data[0]["tokens_per_second"] > 0
    tensor = [(record["slots"], record["prompts"]) for record in records if record["phase"] == "tensor"]
    assert tensor == [(3, 6), (2, 4)] * 2
    assert [record["prompts"] for record in records if record["phase"] == "exact"] == [4, 4]
    assert all(record["tokens_per_row_and_step"] > 1 for record in records if record["phase"] == "exact")


def test_longest_limits_come_first(parallel, arguments):
    args = parallel.parse(arguments)
    worker = parallel.Worker.__new__(parallel.Worker)
    worker.args = args
    tokenizer = importlib.import_module("demo").load(args.target, "cpu", None)[1]
    job = worker.requests(tokenizer, 30, (4, 16))
    limits = [request["max_new_tokens"] for request in job]
    assert limits == sorted(limits, reverse=True) and min(limits) >= 4 and max(limits) <= 16 and len(set(limits)) > 5
    assert job == worker.requests(tokenizer, 30, (4, 16))


class Process:
    """A phase that is started: `failing` fails, `late` does not end by itself."""

    started: list[tuple[str, str]] = []
    failing, late = "tensor", "exact"

    def __init__(self, command, **_):
        processes = next(word for word in command if word.startswith("--nproc-per-node=")).split("=")[1]
        self.phase = command[command.index("--worker") + 1]
        self.ended = False
        self.started.append((self.phase, processes))

    def wait(self, timeout=None):
        if self.phase == self.late and not self.ended:
            raise subprocess.TimeoutExpired("phase", timeout)
        return int(self.phase == self.failing)

    def terminate(self):
        self.ended = True


def test_a_failed_phase_does_not_stop_the_others(parallel, arguments, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(Process, "started", [])
    with pytest.raises(SystemExit):
        parallel.main([*arguments, "--processes", "4", "--time-limit", "1"])
    assert Process.started == [("data", "4"), ("tensor", "4"), ("exact", "4")]
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["phase"], "failed or out of time" in line["error"]) for line in said] == [
        ("tensor", True),
        ("exact", True),
    ]
    monkeypatch.setattr(Process, "started", [])
    parallel.main([*arguments, "--phases", "data"])
    assert Process.started == [("data", "2")]
    for refused in (["--processes", "1"], ["--target", "7b"]):
        with pytest.raises(SystemExit):
            parallel.main([*arguments, *refused])
