"""`tetris-hf`: records equal plain `generate`, nothing is lost or served twice, wrong usage is refused."""

import io
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import kit
import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tetris_hf
from tetris_hf.cli import job, main
from tetris_hf.cli.loading import layers_named
from tetris_hf.cli.prompts import PromptFile


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
        # A step adds the accepted drafts and one token more, but where the text ends; the first may come before it.
        assert NEW - 1 <= record["accepted"] + record["steps"] <= NEW + 1
        assert record["accepted"] <= record["verified"]
    assert any(record["accepted"] for record in records) == (who is not None)


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


def test_a_completion_ends_at_a_stop_text(folder, prompts, expected, tmp_path, capsys):
    words = {"<pad>": 0, "<unk>": 1, **{f"w{n}": n for n in range(2, 63)}, "abcdef": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    known = tmp_path / "known"  # transformers looks at what a token adds to "abcdef"
    AutoModelForCausalLM.from_pretrained(folder / "target").save_pretrained(known)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(known)
    found = {next(token for token in expected[n][place:] if 9 < token < 63) for n, place in enumerate((2, 8, 5))}
    prompts.write_text(prompts.read_text().replace("w63", "abcdef"))
    stops = [part for token in found for part in ("--stop", f"w{token}")]
    out = tmp_path / "out.jsonl"
    asked = [*arguments(folder, prompts, "--assistant", folder / "near", *stops, "--output", out), "--model"]
    assert main([*asked, str(known)]) == 0
    records = records_of(out)
    for record in records:
        tokens = expected[int(record["id"][1:])]
        ends = [n + 1 for n, token in enumerate(tokens) if token in found]
        assert record["token_ids"] == tokens[: ends[0] if ends else NEW]
        assert record["finish_reason"] == ("stop" if ends else "length")
    assert {record["finish_reason"] for record in records} == {"stop", "length"}
    out.unlink()
    assert main([*asked, str(folder / "target")]) == 2
    assert "--stop cannot be used with this tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_standard_input_and_output(folder, texts, expected, monkeypatch, capfdbinary, form):
    lines = "\n\n".join(texts[:3] if form == "text" else [json.dumps({"prompt": text}) for text in texts[:3]])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + lines.encode())))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO()))
    assert main(arguments(folder, "-", "--assistant", "lookup")) == 0
    records = sorted(map(json.loads, written.getvalue().splitlines()), key=lambda record: record["id"])
    assert [record["id"] for record in records] == [1, 3, 5]  # numbers of the lines
    assert [record["token_ids"] for record in records] == expected[:3]


def test_prompts_from_a_pipe(folder, texts, expected, tmp_path):
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("\n".join(texts[:5])))
    writer.start()
    assert main(arguments(folder, pipe, "--output", out)) == 0
    writer.join()
    assert {record["id"]: record["token_ids"] for record in records_of(out)} == dict(enumerate(expected[:5], start=1))


def test_prompts_are_read_when_there_is_room_for_them(folder, prompts, tmp_path, monkeypatch):
    read, written = [], []
    getitem, write = PromptFile.__getitem__, job.Job._write

    def reading(self, place):
        read.append(place)
        return getitem(self, place)

    def writing(self, record):
        written.append(len(read))
        write(self, record)

    monkeypatch.setattr(PromptFile, "__getitem__", reading)
    monkeypatch.setattr(job.Job, "_write", writing)
    assert main(arguments(folder, prompts, "--output", tmp_path / "out.jsonl")) == 0
    assert read == list(range(40))
    assert all(number <= done + 8 for done, number in enumerate(written)), "a batch, and what follows it"


def test_prompts_need_no_memory(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"w{n} " * 1000, "id": f"p{n}"}) for n in range(2000)]
    file.write_text("\n\n".join(lines))
    tracemalloc.start()
    with PromptFile(str(file)) as found:
        assert len(found) == 2000 and found.ids[7] == "p7" and not found.has_chats
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < file.stat().st_size / 10, f"{peak} of {file.stat().st_size} bytes"
        tracemalloc.stop()
        for place in random.Random(3).sample(range(2000), 9):
            assert found[place].content == f"w{place} " * 1000
        assert [prompt.id for prompt in found] == found.ids


def test_sizes_of_the_batch(folder, prompts, texts, tmp_path, monkeypatch):
    seen = []

    def watched(model, inputs, assistant_model, tetris_capacity, batch_size, **settings):
        seen.append((assistant_model is not None, tetris_capacity, batch_size))
        return iter(())

    monkeypatch.setattr(job, "iterate_batch", watched)
    few = tmp_path / "few.txt"
    few.write_text("\n".join(texts[:3]))
    with_drafts = ["--batch-size", "16", "--assistant", "lookup"]
    for file, more in (
        (prompts, ["--batch-size", "16"]),
        (prompts, with_drafts),
        (few, with_drafts),
        (prompts, [*with_drafts, "--capacity", "0"]),
        (prompts, [*with_drafts, "--capacity", "auto"]),
    ):
        assert main(arguments(folder, file, "--output", tmp_path / f"{len(seen)}.jsonl", *more)) == 0
    # By default as much as there are rows, and no more rows than prompts. Twice each: it asks first.
    assert seen[1::2] == seen[::2]
    assert seen[::2] == [(False, 0, 16), (True, 16, 16), (True, 3, 3), (True, 0, 16), (True, "auto", 16)]


def test_capacity_auto(folder, prompts, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))  # where costs are kept
    out = tmp_path / "out.jsonl"
    auto = ["--assistant", folder / "near", "--capacity", "auto", "--num-assistant-tokens", "2"]
    assert main(arguments(folder, prompts, *auto, "--output", out)) == 0
    assert {record["id"]: record["token_ids"] for record in records_of(out)} == {
        f"p{n}": tokens for n, tokens in enumerate(expected)
    }


def test_sampled_text_is_that_of_the_seed_and_the_place(folder, prompts, tmp_path):
    found = []
    drafting = ["--assistant", folder / "near", "--capacity", "5"]
    for more in (["--batch-size", "9"], drafting, [*drafting, "--seed", "1"]):
        out = tmp_path / f"{len(found)}.jsonl"
        assert main(arguments(folder, prompts, "--do-sample", "--output", out, *more)) == 0
        found.append({record["id"]: record["token_ids"] for record in records_of(out)})
    assert found[0] == found[1] != found[2]
    # The last prompt again, at the place of the first.
    lines = prompts.read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[::-1]))
    assert main(arguments(folder, prompts, "--do-sample", "--output", tmp_path / "back.jsonl")) == 0
    back = {record["id"]: record["token_ids"] for record in records_of(tmp_path / "back.jsonl")}
    assert sum(back[name] == tokens for name, tokens in found[0].items()) < 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_new_tokens": 3}, "LengthLogitsProcessor is not supported"),
        ({"num_beams": 2}, "`num_beams=2` is not supported"),
    ],
)
def test_settings_that_a_job_cannot_have(folder, prompts, tmp_path, capsys, settings, message):
    refused, out = tmp_path / "refused", tmp_path / "out.jsonl"
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    target.generation_config.update(eos_token_id=1, **settings)
    target.save_pretrained(refused)
    for file in (folder / "target").glob("token*"):
        (refused / file.name).write_bytes(file.read_bytes())
    prompts.write_text("{malformed\n" + prompts.read_text())
    assert main([*arguments(folder, prompts, "--output", out), "--model", str(refused)]) == 2
    said = capsys.readouterr().err
    assert message in said and "the target with its generation config" in said and not out.read_bytes()


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
        b'{"prompt": "' + b"w3 " * 128 + b'"}',
        b'{"prompt": "' + b"w3 " * 117 + b'", "id": "long"}',
        b'{"prompt": "w2", "max_new_tokens": 0, "id": "none"}',
        b'{"prompt": "w2", "max_new_tokens": true, "id": "no number"}',
    ]
    file.write_bytes(b"\n".join(lines))
    assert main(arguments(folder, file, "--output", out, "--assistant", "lookup")) == 0
    records = {record["id"]: record for record in records_of(out)}
    assert records.keys() == {"good", "neither", "long", "none", "no number", *range(2, 14)} - {6} and len(
        records
    ) == len(lines)
    assert records.pop("good")["token_ids"] == expected[0]
    # Its completion ends where the context does.
    assert (long := records.pop("long"))["completion_tokens"] == 128 - 117 and long["finish_reason"] == "length"
    assert {record["finish_reason"] for record in records.values()} == {"error"}
    said = {name: record["error"] for name, record in records.items()}
    assert "is not JSON" in said[2] and "is empty" in said[3] and "is empty" in said[4] and "must be a text" in said[5]
    assert "either `prompt` or `messages`" in said["neither"] and "either `prompt` or `messages`" in said[7]
    assert "list of objects" in said[8] and "no system" in said[9] and "`id` in line 10" in said[10]
    assert "not an object" in said[11] and "not UTF-8" in said[12]
    assert "128 tokens, and the context of the model 128: shorten it" in said[13]
    assert "at least 1, got 0" in said["none"] and "at least 1, got true" in said["no number"]


def test_a_line_may_have_a_limit_of_its_own(folder, texts, expected, tmp_path):
    limits = [1, None, 3, NEW + 2, None, 2]
    lines = [{"prompt": text, "max_new_tokens": limit} for text, limit in zip(texts, limits, strict=False)]
    file, out = tmp_path / "limits.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(arguments(folder, file, "--assistant", "lookup", "--output", out)) == 0
    for record in records_of(out):
        place = record["id"] - 1
        tokens = record["token_ids"]
        assert len(tokens) == (limits[place] or NEW) and record["finish_reason"] == "length"
        assert tokens[:NEW] == expected[place][: len(tokens)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--capacity", "auto"], "--capacity auto needs somebody to draft"),
        (["--capacity", "many"], "must be an integer of at least 0, or `auto`, got 'many'"),
        (["--capacity", "-1"], "must be at least 0, got -1"),
        (["--seed", str(2**31)], "must be below 2147483648, got 2147483648"),
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
        {
            "prompt_tokens": 5,
            "completion_tokens": 8,
            "steps": 3,
            "verified": 6,
            "accepted": 4,
        },  # 3 + 4 and a first one
        {"prompt_tokens": 3, "completion_tokens": 4, "steps": 4, "verified": 4, "accepted": 1},  # ends within drafts
        {"prompt_tokens": 2, "completion_tokens": 1, "steps": 0, "verified": 0, "accepted": 0},
    ]
    records = [{"id": n, "finish_reason": "stop", **count} for n, count in enumerate(counts)]
    records.append({"id": 3, "finish_reason": "error", "error": "no"})
    for n, record in enumerate(records):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(record) + '\n{"torn')
    files = [str(tmp_path / f"{n}.jsonl") for n in range(4)]
    assert main(["stats", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["records"] == 4 and found["finish_reasons"] == {"stop": 3, "error": 1}
    assert (found["prompt_tokens"], found["completion_tokens"], found["steps"]) == (10, 13, 7)
    assert (found["verified"], found["accepted"]) == (10, 5)
    assert found["vsr"] == 5 / 10 and found["ter"] == (7 + 4) / (10 + 7) and found["mean_accepted"] == (7 + 4) / 7
    assert main(["stats", *files]) == 0
    shown = capsys.readouterr().out
    assert "4 (1 error, 3 stop)" in shown and "0.500" in shown and len(shown.splitlines()) == 9
    (tmp_path / "old.jsonl").write_text('{"id": "x", "finish_reason": "stop", "prompt_tokens": 1}\n')
    assert main(["stats", str(tmp_path / "old.jsonl")]) == 1
    assert "the record of 'x' has no `completion_tokens`" in capsys.readouterr().err


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
