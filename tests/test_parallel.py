"""Several processes: a job that they share, and a target that is split over them. On CPU, as launchers start them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kit
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed import HashStore
from transformers import PreTrainedTokenizerFast

from tetris_hf.cli import main
from tetris_hf.cli.errors import CommandError
from tetris_hf.cli.sharding import Ranks
from tetris_hf.generation.tensor_parallel import Lead


WORKERS = Path(__file__).parent / "parallel_workers.py"
NAMES = [f"p{number}" for number in range(7)]


def record(name, text="x"):
    return {"id": name, "finish_reason": "stop", "text": text}


def written(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def opened(path, world_size, resume=False, store=None):
    """All ranks of a job and their files; they meet in `open`, so each is a thread."""
    store = store or HashStore()
    ranks = [Ranks(rank, world_size, store if world_size > 1 else None) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        return ranks, list(pool.map(lambda one: one.open(str(path), resume), ranks))


def finished(ranks):
    """All ranks end, in this order, but the first one waits for the last: which of them was it that merged?"""
    with ThreadPoolExecutor(len(ranks)) as pool:
        ending = []
        for one in ranks:
            ending.append(pool.submit(one.finish, NAMES))
            while one is not ranks[-1] and one._store.add("finished", 0) < len(ending):
                pass
        return [one.result() for one in ending]


def launched(launcher, *arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(WORKERS.parent.parent)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(WORKERS), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    """A small model, a draft of it, and their tokenizer of 64 words."""
    words = {"<pad>": 0, "<end>": 1, **{f"w{number}": number for number in range(2, kit.VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    wrapped.save_pretrained(tmp_path / "model")
    target = kit.tiny(eos_token_id=1)
    target.save_pretrained(tmp_path / "model")
    kit.near(target).save_pretrained(tmp_path / "draft")
    return tmp_path


@pytest.mark.slow
def test_a_job_of_two_processes_of_which_one_dies(folder):
    lines = [
        json.dumps({"id": f"p{place}", "prompt": f"w{2 + place} " + "w7 w9 " * (place % 4)}) for place in range(24)
    ]
    (folder / "prompts.jsonl").write_text("\n".join([*lines[:9], '{"id": "bad"', *lines[9:]]), encoding="utf-8")
    arguments = ["prompts.jsonl", "--model", "model", "--assistant", "draft", "--max-new-tokens", "12"]
    arguments += ["--batch-size", "2", "--dtype", "float32", "--quiet", "--do-sample", "--seed", "3"]
    launcher = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    launcher += ["--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--max_restarts", "1", "--monitor_interval", "0.2"]
    launched(launcher, "job", *arguments, "--output", "two.jsonl", folder=folder)
    assert (folder / "died").exists()
    assert not list(folder.glob("two.jsonl.*"))
    two = written(folder / "two.jsonl")
    assert [one["id"] for one in two] == [*(f"p{place}" for place in range(9)), 10, *(f"p{n}" for n in range(9, 24))]

    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["generate", *arguments, "--output", "one.jsonl"]) == 0
    finally:
        os.chdir(before)
    one = {one["id"]: one.get("text") for one in written(folder / "one.jsonl")}
    assert one == {one["id"]: one.get("text") for one in two}


@pytest.mark.slow
def test_a_target_split_over_two_processes(folder):
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = launched(launcher, "split", str(folder / "model"), folder=folder)
    holds = [line.removeprefix("holds: ") for line in said.splitlines() if line.startswith("holds: ")]
    assert holds == ["greedy", "leads", "batches", "refused", "shallow", "medusa", "out_of_memory"]
    assert "4 of 4 equal to the whole target's" in said
    assert sorted(one["id"] for one in written(folder / "out.jsonl")) == [0, 1, 2, 3]


def test_each_item_is_taken_once(tmp_path):
    ranks, files = opened(tmp_path / "out.jsonl", 3)
    sources = [one.take(NAMES) for one in ranks]
    # Whoever asks gets the next one, in whatever order they ask.
    asked = [next(sources[rank], None) for rank in (0, 0, 2, 1, 0, 2, 1, 0, 1, 2)]
    assert asked == [*NAMES, None, None, None]
    assert [one.count(2) for one in ranks] == [2, 4, 6] and ranks[0].count() == 6
    assert list(Ranks().take(NAMES)) == NAMES and Ranks().count(2) == 2


@pytest.mark.parametrize("ends", [(0, 1, 2), (2, 0, 1)])
def test_the_last_rank_merges_in_the_order_of_the_prompts(tmp_path, ends):
    out = tmp_path / "out.jsonl"
    ranks, files = opened(out, 3)
    for place, name in enumerate(reversed(NAMES)):
        files[place % 3].write(record(name))
    assert finished([ranks[rank] for rank in ends]) == [False, False, True]
    assert [one["id"] for one in written(out)] == NAMES
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_any_rank_has_written_is_done(tmp_path, world_size):
    out = tmp_path / "out.jsonl"
    _, files = opened(out, 3)
    for place, name in enumerate(NAMES[:5]):
        files[place % 3].write(record(name))
    for file in files:
        file.close()
    with open(tmp_path / "out.jsonl.part1", "ab") as torn:
        torn.write(b'{"id": "p6", "fini')
    with pytest.raises(CommandError, match="part0` has records already: add --resume"):
        Ranks().open(str(out), resume=False)

    ranks, files = opened(out, world_size, resume=True)
    assert all(file.done == set(NAMES[:5]) for file in files)
    for one, file in zip(ranks, files, strict=True):
        for name in one.take([name for name in NAMES if name not in file.done]):
            file.write(record(name))
    finished(ranks)
    assert [one["id"] for one in written(out)] == NAMES
    assert list(tmp_path.iterdir()) == [out]
    assert opened(out, world_size, resume=True)[1][0].done == set(NAMES)


def test_a_merge_that_was_interrupted(tmp_path):
    out = tmp_path / "out.jsonl"
    ranks, files = opened(out, 2)
    for name in NAMES:
        files[0].write(record(name))
    parts = (tmp_path / "out.jsonl.part0").read_bytes()
    assert finished(ranks[::-1]) == [False, True]
    (tmp_path / "out.jsonl.part0").write_bytes(parts)  # killed before it was removed
    (tmp_path / "out.jsonl.merging").write_bytes(parts[:30])  # and another time before the merge ended
    ranks, files = opened(out, 2, resume=True)
    assert files[0].done == set(NAMES)
    assert finished(ranks) == [False, True]
    assert [one["id"] for one in written(out)] == NAMES
    assert list(tmp_path.iterdir()) == [out]


def test_a_merge_without_all_records_keeps_the_parts(tmp_path):
    ranks, files = opened(tmp_path / "out.jsonl", 2)
    files[1].write(record(NAMES[1]))
    with pytest.raises(CommandError, match='6 of 7 prompts have no record, the first is "p0": run the same command'):
        finished(ranks)
    assert [one["id"] for one in written(tmp_path / "out.jsonl.part1")] == [NAMES[1]]


def test_ranks_that_were_started_again_go_on(tmp_path):
    (tmp_path / "out.jsonl.part0").write_text(json.dumps(record(NAMES[0])) + "\n")
    alone = Ranks()
    alone.restarted = True
    assert alone.open(str(tmp_path / "out.jsonl"), resume=False).done == {NAMES[0]}


def test_what_several_processes_cannot_do(tmp_path, monkeypatch):
    with pytest.raises(CommandError, match="2 processes cannot share standard output: add --output FILE"):
        Ranks(1, 2, HashStore()).open("-", resume=False)
    assert Ranks.of_environment("cuda:1").world_size == 1  # alone, any device
    monkeypatch.setenv("WORLD_SIZE", "2")
    for device in ("cuda:1", "auto"):
        with pytest.raises(CommandError, match=f"--device {device} would be the same for all processes"):
            Ranks.of_environment(device)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(CommandError, match="this host has 1 GPUs for 2 processes or more: start 1"):
        Ranks.of_environment()


def test_a_whole_target_has_nothing_to_agree_on(target):
    lead, tokens = Lead(target), torch.arange(4)
    lead(tokens)
    lead.check_same(tokens, "prompts")
    assert lead.group is None and tokens.tolist() == [0, 1, 2, 3]
    assert lead.all_agree(True, tokens.device) and not lead.all_agree(False, tokens.device)
