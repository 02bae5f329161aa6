"""`tetris-hf`: records equal plain `generate`, nothing is lost or served twice, wrong usage is refused."""

import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import kit
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tetris_hf
from tetris_hf.cli import main
from tetris_hf.cli.batching import Request, batches_of, left_padded
from tetris_hf.cli.loading import layers_named


ROOT = Path(__file__).parent.parent
NEW = 12
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "w9 {{ m.content }} {% endfor %}w8"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target with a tokenizer of 64 words, and every kind of stored drafter for it."""
    root = tmp_path_factory.mktemp("models")
    target = kit.tiny(seed=5)
    target.save_pretrained(root / "target")
    kit.near(target).save_pretrained(root / "near")
    words = {"<pad>": 0, "<unk>": 1, **{f"w{n}": n for n in range(2, kit.VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(root / "target")
    torch.manual_seed(0)
    config = tetris_hf.MedusaConfig(hidden_size=32, vocab_size=kit.VOCABULARY, medusa_num_heads=3)
    tetris_hf.MedusaHeads(config).save_pretrained(root / "heads")
    shallow = tetris_hf.ShallowAssistant.from_target(target, [0])
    tetris_hf.ShallowAssistant.save_pretrained(shallow, root / "shallow")
    return root


@pytest.fixture(scope="module")
def texts():
    """40 prompts of 1 to 12 words."""
    words = random.Random(2)
    return [" ".join(f"w{words.randrange(2, 64)}" for _ in range(words.randint(1, 12))) for _ in range(40)]


def tokens_of(text):
    return [int(word[1:]) for word in text.split()]


@pytest.fixture(scope="module")
def expected(folder, texts):
    """What stock `generate` adds to each prompt alone."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    return [
        target.generate(torch.tensor([tokens_of(text)]), max_new_tokens=NEW, do_sample=False)[0].tolist()[-NEW:]
        for text in texts
    ]


@pytest.fixture
def prompts(tmp_path, texts):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "id": f"p{n}"}) + "\n" for n, text in enumerate(texts)))
    return file


def arguments(folder, prompts, *more):
    fixed = ["--model", folder / "target", "--max-new-tokens", NEW, "--batch-size", 4, "--device", "cpu", "--quiet"]
    return [str(argument) for argument in ("generate", prompts, *fixed, *more)]


def records_of(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


@pytest.mark.parametrize("who", ["near", "heads", "shallow", "lookup", "layers:0", "lookup+near", None])
def test_completions_are_those_of_each_prompt_alone(folder, prompts, expected, tmp_path, who):
    given = who.split("+") if who else []
    names = [name if name == "lookup" or ":" in name else str(folder / name) for name in given]
    drafting = [part for name in names for part in ("--assistant", name)] + (["--capacity", "6"] if names else [])
    assert main(arguments(folder, prompts, *drafting, "--output", tmp_path / "out.jsonl")) == 0
    records = records_of(tmp_path / "out.jsonl")
    assert Counter(record["id"] for record in records) == Counter(f"p{n}" for n in range(40))
    for record in records:
        number = int(record["id"][1:])
        assert record["token_ids"] == expected[number]
        assert record["finish_reason"] == "length" and record["completion_tokens"] == NEW
        assert record["text"] == " ".join(f"w{token}" for token in expected[number] if token > 1)
        counts = record["counts"]
        assert 1 + sum(counts["accepted"]) + counts["bonus"] == NEW
    assert any(sum(record["counts"]["accepted"]) for record in records) == (who is not None)


def test_a_completion_ends_at_its_end_token(folder, prompts, expected, tmp_path):
    ended = tmp_path / "ended"
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    target.generation_config.eos_token_id = [expected[0][3], expected[1][NEW - 1]]
    target.save_pretrained(ended)
    for file in (folder / "target").glob("token*"):
        (ended / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out.jsonl"
    asked = [*arguments(folder, prompts, "--assistant", folder / "near", "--output", out), "--model", str(ended)]
    assert main(asked) == 0
    for record in records_of(out):
        tokens = expected[int(record["id"][1:])]
        ends = [n + 1 for n, token in enumerate(tokens) if token in target.generation_config.eos_token_id]
        assert record["token_ids"] == tokens[: ends[0] if ends else NEW]
        assert record["finish_reason"] == ("stop" if ends else "length")


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_standard_input_and_output(folder, texts, expected, monkeypatch, capfdbinary, form):
    lines = "\n\n".join(texts[:3] if form == "text" else [json.dumps({"prompt": text}) for text in texts[:3]])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + lines.encode())))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO()))
    assert main(arguments(folder, "-", "--assistant", "lookup")) == 0
    records = sorted(map(json.loads, written.getvalue().splitlines()), key=lambda record: record["id"])
    assert [record["id"] for record in records] == [1, 3, 5]  # numbers of the lines
    assert [record["token_ids"] for record in records] == expected[:3]


def test_the_default_capacity_is_one_per_row(folder, prompts, tmp_path, monkeypatch):
    stock, seen = tetris_hf.TetrisDecoding.__init__, []

    def watched(self, assistant, capacity, *args, **kwargs):
        seen.append((assistant is not None, capacity))
        stock(self, assistant, capacity, *args, **kwargs)

    monkeypatch.setattr(tetris_hf.TetrisDecoding, "__init__", watched)
    for more in ([], ["--assistant", "lookup"], ["--assistant", "lookup", "--capacity", "0"]):
        out = tmp_path / f"{len(seen)}.jsonl"
        assert main(arguments(folder, prompts, "--batch-size", "16", "--output", out, *more)) == 0
    batches = [seen[start : start + 3] for start in (0, 3, 6)]  # 40 prompts: 16, 16 and 8
    assert batches == [[(False, 0)] * 3, [(True, 16), (True, 16), (True, 8)], [(True, 0)] * 3]


def test_chats_and_plain_prompts_through_the_template(folder, tmp_path):
    file, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    chat = [{"role": "user", "content": "w20 w21"}, {"role": "assistant", "content": "w22"}]
    file.write_text(
        json.dumps({"messages": chat, "id": "chat"}) + "\n" + json.dumps({"prompt": "w20 w21", "id": 7}) + "\n"
    )
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    for more, plain_prompt in (([], [20, 21]), (["--chat"], [9, 20, 21, 8])):
        out.unlink(missing_ok=True)
        assert main(arguments(folder, file, "--output", out, *more)) == 0
        found = {record["id"]: record["token_ids"] for record in records_of(out)}
        for name, tokens in (("chat", [9, 20, 21, 9, 22, 8]), (7, plain_prompt)):
            plain = target.generate(torch.tensor([tokens]), max_new_tokens=NEW, do_sample=False)
            assert found[name] == plain[0, len(tokens) :].tolist()


def test_what_cannot_be_served_is_an_error_record(folder, texts, expected, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [
        b'{"prompt": "' + texts[0].encode() + b'", "id": "good"}',
        b"{not JSON",
        b'{"prompt": ""}',
        b'{"prompt": "   "}',
        b'{"prompt": 5}',
        b'{"id": "neither"}',
        b'{"prompt": "w2", "messages": []}',
        b'{"messages": []}',
        b'{"messages": [{"role": "system", "content": "w2"}]}',
        b'{"messages": [{"role": "user"}], "id": true}',
        b'["w2"]',
        b"\xff\xfe",
        b'{"prompt": "' + b"w3 " * 117 + b'"}',
    ]
    file.write_bytes(b"\n".join(lines))
    assert main(arguments(folder, file, "--output", out, "--assistant", "lookup")) == 0
    records = {record["id"]: record for record in records_of(out)}
    assert list(records.keys() - {"good", "neither"}) and len(records) == len(lines)
    assert records.pop("good")["token_ids"] == expected[0]
    assert {record["finish_reason"] for record in records.values()} == {"error"}
    said = {name: record["error"] for name, record in records.items()}
    assert "is not JSON" in said[2] and "is empty" in said[3] and "is empty" in said[4] and "must be a text" in said[5]
    assert "either `prompt` or `messages`" in said["neither"] and "either `prompt` or `messages`" in said[7]
    assert "list of objects" in said[8] and "no system" in said[9] and "`id` in line 10" in said[10]
    assert "not an object" in said[11] and "not UTF-8" in said[12]
    assert "117 tokens" in said[13] and "the 128 of the model" in said[13]


@pytest.mark.parametrize("sampling", [[], ["--do-sample", "--temperature", "0.9", "--top-p", "0.95", "--seed", "3"]])
def test_killed_at_any_moment_and_resumed(folder, prompts, tmp_path, sampling):
    undisturbed, out = tmp_path / "undisturbed.jsonl", tmp_path / "out.jsonl"
    asked = arguments(folder, prompts, "--assistant", folder / "near", *sampling, "--output")
    assert main([*asked, str(undisturbed)]) == 0
    kills = 0
    for moment in sorted(random.Random(4).sample(range(1, 40), 3 if sampling else 7)):
        job = start([*asked, str(out), "--resume"])
        while job.is_alive() and not (out.exists() and out.read_bytes().count(b"\n") >= moment):
            time.sleep(0.0005)
        job.kill()
        job.join()
        kills += job.exitcode == -signal.SIGKILL
    assert kills > 1
    assert main([*asked, str(out), "--resume"]) == 0
    # Every prompt once, in whole lines, with the same text.
    whole = undisturbed.read_bytes()
    assert len({record["id"] for record in records_of(out)}) == 40 and out.read_bytes() == whole
    # Within a batch, and within a line.
    for cut in (1, len(whole) // 3, whole.index(b"\n") + 1, whole.rindex(b"{"), len(whole) - 1, len(whole)):
        out.write_bytes(whole[:cut])
        assert main([*asked, str(out), "--resume"]) == 0 and out.read_bytes() == whole


def test_ctrl_c_ends_with_whole_records(folder, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    asked = arguments(folder, prompts, "--assistant", folder / "near", "--output", out, "--max-new-tokens", 100)
    job = start(asked)
    while job.is_alive() and not (out.exists() and out.read_bytes().count(b"\n") >= 4):
        time.sleep(0.0005)
    os.kill(job.pid, signal.SIGINT)
    job.join()
    assert job.exitcode == 130
    assert out.read_bytes().endswith(b"\n") and 4 <= len(records_of(out)) < 40


def start(argv):
    """The command in a process of its own, forked from one that has imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tetris_hf.cli"])
    process = context.Process(target=run_and_exit, args=(argv,))
    process.start()
    return process


def run_and_exit(argv):
    torch.set_num_threads(1)
    sys.exit(main(argv))


def test_an_interrupt_leaves_whole_records(folder, prompts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    asked = [part for part in arguments(folder, prompts, "--output", out) if part != "--quiet"]
    calls = breaking(monkeypatch, lambda rows, call: KeyboardInterrupt() if call == 4 else None)
    assert main(asked) == 130
    assert "interrupted: 12 of 40 prompts have their record; --resume goes on" in capsys.readouterr().err
    assert len(records_of(out)) == 12
    calls.clear()
    monkeypatch.undo()
    assert main([*asked, "--resume"]) == 0 and len({record["id"] for record in records_of(out)}) == 40
    assert "28 records, 0 of them errors" in capsys.readouterr().err


def breaking(monkeypatch, error_for):
    """`generate` raises what `error_for(rows, call)` says, calls counted from 1."""
    stock, calls = tetris_hf.TetrisDecoding.__call__, []

    def call(self, model, input_ids, *args, **kwargs):
        calls.append(len(input_ids))
        if (error := error_for(len(input_ids), len(calls))) is not None:
            raise error
        return stock(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(tetris_hf.TetrisDecoding, "__call__", call)
    return calls


def test_out_of_memory_halves_the_batch(folder, prompts, expected, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    full = torch.OutOfMemoryError("CUDA out of memory.")
    calls = breaking(monkeypatch, lambda rows, call: full if rows > 1 or call == 12 else None)
    assert main(arguments(folder, prompts, "--output", out)) == 0
    records = records_of(out)
    assert calls[:4] == [4, 2, 1, 1] and set(calls[4:]) == {1}  # it does not try the large batch again
    failed = [record for record in records if record["finish_reason"] == "error"]
    assert [record["error"] for record in failed] == ["out of memory: CUDA out of memory."] and len(records) == 40
    assert all(r["token_ids"] == expected[int(r["id"][1:])] for r in records if r not in failed)


def test_other_errors_end_the_job_and_keep_what_is_done(folder, prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.jsonl"
    breaking(monkeypatch, lambda rows, call: ValueError("`x` is wrong.") if call == 3 else None)
    assert main(arguments(folder, prompts, "--output", out)) == 1
    assert capsys.readouterr().err.strip() == "tetris-hf generate: error: `x` is wrong."
    assert len(records_of(out)) == 8
    with pytest.raises(ValueError, match="`x` is wrong"):
        breaking(monkeypatch, lambda rows, call: ValueError("`x` is wrong."))
        main(arguments(folder, prompts, "--resume", "--output", out, "--traceback"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--capacity", "4"], "--capacity 4 needs somebody to draft"),
        (["--temperature", "0.5"], "--temperature says how to sample: add --do-sample"),
        (["--resume"], "--resume needs a file"),
        (["--assistant", "layers:1-"], "layers:1- must list layers"),
        (["--chat-template", "nowhere.jinja"], "nowhere.jinja cannot be read"),
        (["--top-p", "1.5"], "must be above 0 and at most 1, got 1.5"),
        (["--batch-size", "0"], "must be at least 1, got 0"),
        (["--seed", "-1"], "must be at least 0, got -1"),
        (["--temperature", "0"], "must be above 0, got 0"),
        (["--device", "cuda:77"], "--device cuda:77 cannot be used"),
        (["--output", "{used}"], "has records already: add --resume"),
        (["--output", "{used}", "--resume"], "belongs to another job"),
        (["--output", "nowhere/out.jsonl"], "cannot be written"),
    ],
)
def test_wrong_usage(folder, prompts, tmp_path, capsys, more, message):
    used = tmp_path / "used.jsonl"
    used.write_text('{"id": "other", "finish_reason": "length"}\n')
    assert main(arguments(folder, prompts, *(part.replace("{used}", str(used)) for part in more))) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b" \n\n", "holds no prompts"),
        (b'{"prompt": "w2", "id": 2}\n{"prompt": "w3"}', "lines 1 and 2 both have the id 2"),
    ],
)
def test_prompts_that_are_no_job(folder, tmp_path, capsys, content, message):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert main(arguments(folder, file)) == 2 and message in capsys.readouterr().err


def test_a_foreign_line_is_not_overwritten(folder, prompts, tmp_path, capsys):
    out = tmp_path / "notes.txt"
    out.write_text("my notes\nmore of them")
    assert main(arguments(folder, prompts, "--resume", "--output", out)) == 1
    assert "line 1 of" in capsys.readouterr().err and out.read_text() == "my notes\nmore of them"


def test_a_missing_model_and_a_missing_template(folder, prompts, tmp_path, capsys):
    assert main([*arguments(folder, prompts), "--model", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(folder / "target").save_pretrained(bare)
    (bare / "tokenizer.json").write_bytes((folder / "target" / "tokenizer.json").read_bytes())
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert main([*arguments(folder, prompts, "--chat"), "--model", str(bare)]) == 2
    assert "no chat template" in capsys.readouterr().err
    (tmp_path / "mine.jinja").write_text("w5 {{ messages[0].content }}")
    out = tmp_path / "out.jsonl"
    asked = arguments(folder, prompts, "--chat", "--chat-template", tmp_path / "mine.jinja", "--output", out)
    assert main([*asked, "--model", str(bare)]) == 0 and len(records_of(out)) == 40


def test_stats_sums_up(tmp_path, capsys):
    counts = [
        {"drafted": [4, 4], "verified": [4, 1], "accepted": [3, 1], "bonus": 4, "steps": 4},
        {"drafted": [2, 2, 2], "verified": [1, 1, 1], "accepted": [0, 0, 0], "bonus": 2, "steps": 2},
    ]
    records = [
        {"id": n, "finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 7 + n, "counts": count}
        for n, count in enumerate(counts)
    ]
    records.append({"id": 2, "finish_reason": "error", "error": "no"})
    for n, record in enumerate(records):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(record) + '\n{"torn')
    files = [str(tmp_path / f"{n}.jsonl") for n in range(3)]
    assert main(["stats", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["records"] == 3 and found["finish_reasons"] == {"stop": 2, "error": 1}
    assert (found["prompt_tokens"], found["completion_tokens"], found["steps"]) == (10, 15, 6)
    assert found["verified"] == [5, 2, 1] and found["accepted"] == [3, 1, 0]
    assert found["acceptance"] == [3 / 5, 1 / 2, 0.0]
    assert found["vsr"] == 4 / 8 and found["ter"] == (4 + 6) / (8 + 6) and found["mean_accepted"] == 10 / 6
    assert main(["stats", *files]) == 0
    shown = capsys.readouterr().out
    assert "3 (1 error, 2 stop)" in shown and "0.500" in shown and len(shown.splitlines()) == 12


def test_batches_are_sorted_within_windows():
    lengths = [random.Random(n).randint(1, 9) for n in range(23)]
    requests = [Request(n, [2] * length) for n, length in enumerate(lengths)]
    batches = list(batches_of(iter(requests), batch_size=4, window=2))
    assert [len(batch) for batch in batches] == [4] * 5 + [3]
    for window in range(3):  # the naive one: each window by itself
        wanted = sorted(requests[8 * window : 8 * window + 8], key=lambda request: len(request.tokens), reverse=True)
        assert [request for batch in batches[2 * window : 2 * window + 2] for request in batch] == wanted
    padded = left_padded([[5, 6, 7], [8]], pad_token_id=0)
    assert padded["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_layers_named():
    assert layers_named("0,2-4, 9") == [0, 2, 3, 4, 9]


def test_as_a_program(folder, prompts, texts, expected):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tetris_hf"]
    done = subprocess.run(
        [*command, *arguments(folder, "-", "--assistant", "lookup")],
        input="\n".join(texts[:2]),
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = {record["id"]: record["token_ids"] for record in map(json.loads, done.stdout.splitlines())}
    assert found == {1: expected[0], 2: expected[1]}


def test_help_and_version(capsys):
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"tetris-hf {tetris_hf.__version__}\n"
    for command in ([], ["generate"], ["bench"], ["stats"]):
        assert main([*command, "--help"]) == 0
        assert "%(" not in capsys.readouterr().out
    assert main([]) == 2 and main(["generate", "prompts.jsonl"]) == 2  # --model is missing
