"""The benchmark of jobs on a tiny model: the same answers in every way, their counts, and what fails is a record."""

import functools
import importlib
import json
import sys

import pytest
from test_throughput import BENCHMARKS, folder  # noqa: F401  (a fixture)
from transformers import ContinuousBatchingConfig


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return importlib.import_module("jobs")


def arguments(folder, *more):  # noqa: F811
    named = {"small": "model", "shallow": "shallow", "medusa": "medusa", "prompts": "prompts.jsonl"}
    folders = [text for name, path in named.items() for text in (f"--{name}", str(folder / path))]
    return [*folders, "--device", "cpu", "--num-prompts", "4", "--slots", "2", "--new-tokens", "2", "6", *more]


def test_all_ways_serve_the_same_job(jobs, folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))  # where costs are kept
    # By itself continuous batching takes most of the machine's memory for its cache.
    small = functools.partial(ContinuousBatchingConfig, num_blocks=16, max_batch_tokens=64)
    monkeypatch.setattr(sys.modules["job_contenders"], "ContinuousBatchingConfig", small)
    out = tmp_path / "jobs.jsonl"
    ways = ["--ways", "refill", "closed", "static", "batch", "--stock-batches", "2", "--drafters", "shallow"]
    records, contenders = jobs.main(arguments(folder, *ways, "--out", str(out))), sys.modules["job_contenders"]
    assert [json.loads(line) for line in out.read_text().splitlines()] == json.loads(json.dumps(records))
    assert not [record["error"] for record in records if "error" in record]
    # In float32 everybody says the same, up to each row's own limit.
    assert len({record["tokens"] for record in records}) == 1
    names = [(record["way"], record["name"], record["K"]) for record in records]
    assert names == [
        *[("refill", "C = 0", None), *(("refill", "fixed, shallow", k) for k in contenders.FIXED)],
        *[("refill", "TETRIS, shallow", k) for k, _ in contenders.TETRIS],
        *[("refill", "auto, shallow", None), ("closed", "C = 0", None)],
        *[("closed", "fixed, shallow", k) for k in (2, 3)],
        *[("static", "stock", None), ("batch", "stock", None)],
    ]
    for record in records[:-2]:
        assert record["requests"] == 4 and record["tokens_per_step"] >= 1
        assert 0 < record["latency"]["p50"] <= record["latency"]["p95"] <= max(record["seconds"])
        assert record["ter"] <= 1 and (record["vsr"] is not None or record["tokens_per_step"] == 1)


def test_what_fails_is_a_record_and_the_rest_goes_on(jobs, folder, monkeypatch):  # noqa: F811
    def fails(self, requests):
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(jobs.Jobs, "static", fails)
    records = jobs.main(arguments(folder, "--ways", "static", "refill", "--kinds", "c0", "--drafters"))
    assert records[0]["error"] == "RuntimeError: no such kernel" and "error" not in records[1]


def test_feeds_are_compared_in_one_process(jobs, folder, capsys):  # noqa: F811
    shipped = jobs.batch_job.FEEDS
    ways = ["--ways", "refill", "--kinds", "fixed", "--drafters", "shallow", "--feeds", "4,16", "2"]
    records = jobs.main(arguments(folder, *ways))
    assert [record["feeds"] for record in records] == [(0, 4, 16)] * 3 + [(0, 2)] * 3
    assert len({record["tokens"] for record in records}) == 1 and jobs.batch_job.FEEDS == shipped
    for wrong in ("16,4", "0,4", "4,4"):
        with pytest.raises(SystemExit):
            jobs.main(arguments(folder, "--feeds", wrong))
        assert "sizes must be positive and increase" in capsys.readouterr().err
