"""The throughput benchmark on a tiny model: its settings, counts, records, ratios, and what it says of failures."""

import copy
import functools
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import kit
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ContinuousBatchingConfig, PreTrainedTokenizerFast

import tetris_hf


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROMPTS = ["w3 w9 w11", "w7 w30 w31 w32 w5 w60", "w20 w21 w2 w40", "w8", "w50 w9 w9"]
WIDE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 80,
}
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="plots are drawn by matplotlib"
)


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark, by name. They are scripts beside each other, not a package."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    names = ("throughput", "contenders", "settings", "prompts", "scaled_target", "throughput_report")
    return {name: importlib.import_module(name) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama with a tokenizer of 64 words, a shallow assistant, Medusa heads and prompts."""
    root = tmp_path_factory.mktemp("tiny")
    model = kit.tiny(eos_token_id=5)
    model.generation_config.eos_token_id = 5
    model.save_pretrained(root / "model")
    words = {"<pad>": 0, "<s>": 1, **{f"w{index}": index for index in range(2, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(root / "model")
    assistant = tetris_hf.ShallowAssistant.from_target(model, [1])
    tetris_hf.ShallowAssistant.save_pretrained(assistant, root / "shallow")
    heads = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(hidden_size=32, vocab_size=64, medusa_num_heads=2))
    heads.save_pretrained(root / "medusa")
    lines = [json.dumps({"category": "qa", "turns": [text, "w4"]}) for text in PROMPTS]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return root


def arguments(folder, out, *more):
    named = {"small": "model", "shallow": "shallow", "medusa": "medusa", "prompts": "prompts.jsonl"}
    folders = [text for name, path in named.items() for text in (f"--{name}", str(folder / path))]
    sizes = ["--every", "1", "--max-new-tokens", "6", "--repeats", "2", "--batch-sizes", "2", "3"]
    sweep = ["--windows", "1", "2", "3", "--depths", "3", "--ratios", "1", "--device", "cpu"]
    return [*folders, *sizes, *sweep, "--out", str(out), *more]


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_setting_of_a_scaled_target_is_measured_and_exact(bench, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench["scaled_target"].SIZES, "wide", WIDE)
    bench["throughput"].main(arguments(folder, tmp_path / "out.jsonl", "--target", "wide"))
    records = read(tmp_path / "out.jsonl")
    shown = capsys.readouterr().out
    assert not any("error" in record for record in records), shown
    for num_rows in (2, 3):
        some = [record for record in records if record["rows"] == num_rows]
        keys = [(record["contender"], record["drafter"], record["K"], record["C"]) for record in some]
        expected = [("dynamic", None, None, None), ("static", None, None, None)]
        if num_rows == 2:  # row by row, N says nothing: once is enough
            expected += [("assisted", "shallow", None, None), ("assisted", "lookup", 3, None)]
        expected += [("c0", None, None, 0)]
        for drafter, deepest in (("shallow", 3), ("medusa", 2), ("lookup", 3)):
            expected += [("fixed", drafter, window, window * num_rows) for window in range(1, deepest + 1)]
        expected += [("tetris", "shallow", 3, num_rows), ("tetris", "medusa", 2, num_rows)]
        expected += [("tetris", "lookup", 3, num_rows)]
        expected += [("slowest", *rest) for name, *rest in expected if name == "tetris"]
        expected += [("auto", drafter, None, None) for drafter in ("shallow", "medusa", "lookup")]
        assert keys == expected
        for record in some:
            # In float32 everybody's greedy text is the same, so everybody counts the same tokens.
            assert record["rows_equal_to_dynamic"] in (None, num_rows)
            assert (record["rows_equal_to_dynamic"] is None) == (record["contender"] == "dynamic")
            assert record["tokens"] == some[0]["tokens"] and record["prompts"] == num_rows
            speeds = [tokens / s for tokens, s in zip(record["tokens"], record["seconds"], strict=True)]
            assert record["tokens_per_second_min"] == min(speeds) and record["tokens_per_second_max"] == max(speeds)
            assert record["tokens_per_second"] == pytest.approx(sum(speeds) / 2)
            assert (record["contender"] == "auto") == bool(record.get("settings"))
            if record["contender"] in ("c0", "fixed", "tetris", "slowest"):
                assert record["mean_accepted"] >= 1 and record["steps"] <= 5
                assert record["vsr"] is None if record["contender"] == "c0" else 0 <= record["vsr"] <= 1
    run = records[0]["run"]
    assert all(record["run"] == run for record in records)
    assert run["target"] == "wide" and run["dtype"] == "float32" and run["card"] == "CPU" and run["mode"] == "greedy"
    small = kit.tiny()
    assert run["parameters"] > 2 * sum(parameter.numel() for parameter in small.parameters())
    assert shown.count("/stock") == 2 and "ours, TETRIS" in shown


def test_what_fails_is_reported_and_the_rest_goes_on(bench, folder, tmp_path, monkeypatch, capsys):
    def fails(self, setting):
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setattr(bench["contenders"].Bench, "_static", fails)
    more = ["--contenders", "dynamic", "static", "c0", "--batch-sizes", "2", "--repeats", "1", "--drafters"]
    bench["throughput"].main(arguments(folder, tmp_path / "out.jsonl", *more))
    dynamic, static, c0 = read(tmp_path / "out.jsonl")
    assert static["error"] == "RuntimeError: no such kernel"
    assert "error" not in dynamic and "error" not in c0
    shown = capsys.readouterr().out
    assert shown.count("failed: RuntimeError: no such kernel") == 2 and "second line" not in shown  # as it goes, table
    for record in bench["throughput_report"].with_ratios([dynamic, static, c0])[::2]:
        assert record["over_stock"] == record["tokens_per_second"] / dynamic["tokens_per_second"]


def test_a_drafter_that_does_not_fit_is_left_out(bench, folder, tmp_path, capsys):
    other = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(hidden_size=24, vocab_size=64))
    other.save_pretrained(tmp_path / "heads")
    more = ["--target", str(folder / "model"), "--medusa", str(tmp_path / "heads"), "--drafters", "medusa", "lookup"]
    more += ["--contenders", "fixed", "--windows", "1", "--batch-sizes", "2", "--repeats", "1"]
    bench["throughput"].main(arguments(folder, tmp_path / "out.jsonl", *more))
    assert [record["drafter"] for record in read(tmp_path / "out.jsonl")] == ["lookup"]
    assert "drafter medusa is left out: ValueError: `assistant_model` has Medusa heads" in capsys.readouterr().out


def test_after_the_time_limit_nothing_is_started_and_all_is_named(bench, folder, tmp_path, capsys):
    more = ["--time-limit", "0", "--drafters", "lookup", "--contenders", "c0", "tetris"]
    bench["throughput"].main(arguments(folder, tmp_path / "out.jsonl", *more))
    shown = capsys.readouterr().out
    assert not (tmp_path / "out.jsonl").exists()
    for line in ("N = 2: ours, C = 0", "N = 3: ours, TETRIS, lookup, K = 3, C = 3"):
        assert f"left out, the time limit was reached: {line}" in shown


def test_sampling_and_several_batches_a_call(bench, folder, tmp_path):
    more = ["--sample", "--min-prompts", "5", "--batch-sizes", "2", "--drafters", "shallow", "--windows", "2"]
    more += ["--contenders", "dynamic", "fixed"]
    bench["throughput"].main(arguments(folder, tmp_path / "out.jsonl", *more))
    dynamic, fixed = read(tmp_path / "out.jsonl")
    assert dynamic["prompts"] == fixed["prompts"] == 6  # three batches
    assert fixed["run"]["mode"] == "sampling" and fixed["rows_equal_to_dynamic"] is None
    assert fixed["mean_accepted"] >= 1


def test_continuous_batching_gives_the_text_of_generate(bench, target, monkeypatch):
    # By itself it takes most of the machine's memory for its cache.
    small = functools.partial(ContinuousBatchingConfig, num_blocks=16, max_batch_tokens=64)
    monkeypatch.setattr(bench["contenders"], "ContinuousBatchingConfig", small)
    target = copy.deepcopy(target)
    batches = [kit.ragged(), kit.ragged(seed=2)]
    runner = bench["contenders"].Bench(target, batches, {}, max_new_tokens=5, sample=False)
    texts = []
    for name in ("dynamic", "batch"):
        with runner.opened(bench["settings"].Setting(name)) as call:
            texts.append(call().texts(set()))
    assert texts[0] == texts[1] and len(texts[0]) == 6
    assert target.config._attn_implementation == "sdpa"


def test_texts_end_with_their_end_token_and_stats_add_up(bench, target, near):
    output = bench["contenders"].Output(rows=[torch.tensor(row) for row in ([4, 9, 0, 9], [9], [4, 4], [])])
    assert output.texts({9, 8}) == [[4, 9], [9], [4, 4], []]
    assert output.texts(set()) == [[4, 9, 0, 9], [9], [4, 4], []]
    assert output.merged_stats() is None
    parts = [kit.speculate(target, kit.ragged(seed=seed), near, depth=3).tetris_stats for seed in (1, 2)]
    output = bench["contenders"].Output(stats=parts)
    merged = output.merged_stats()
    assert output.steps() == parts[0].steps + parts[1].steps
    assert bench["contenders"].Output(stock_steps=7).steps() == 7
    assert merged.target_tokens == parts[0].target_tokens + parts[1].target_tokens
    assert merged.seconds["verify"] == pytest.approx(sum(part.seconds["verify"] for part in parts))
    accepted, verified = (sum(int(getattr(p, name).sum()) for p in parts) for name in ("accepted", "verified"))
    assert merged.vsr == pytest.approx(accepted / verified)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_settings_are_all_there_once(bench, num_rows):
    Setting = bench["settings"].Setting
    drafters = {"medusa": 4, "lookup": None}
    windows, depths, ratios = [1, 3, 5], [4, 6], [0.25, 1, 4]
    contenders = ["auto", "tetris", "fixed", "c0", "dynamic", "assisted"]
    found = bench["settings"].settings_for(contenders, drafters, num_rows, windows, depths, ratios)
    expected = {Setting("dynamic"), Setting("c0", capacity=0), Setting("assisted", "lookup", 6)}
    for drafter, deepest in (("medusa", 4), ("lookup", 100)):
        expected |= {Setting("fixed", drafter, w, w * num_rows) for w in windows if w <= deepest}
        expected.add(Setting("auto", drafter))
        for depth in depths:
            for ratio in ratios:
                depth, capacity = min(depth, deepest), max(1, round(ratio * num_rows))
                if capacity < depth * num_rows:
                    expected.add(Setting("tetris", drafter, depth, capacity))
    assert len(found) == len(expected) and set(found) == expected
    order = [list(bench["settings"].CONTENDERS).index(setting.contender) for setting in found]
    assert order == sorted(order)


def test_prompts(bench, tmp_path):
    lines = [json.dumps({"turns": ["x" * length, "y"]}) for length in (5, 1200, 6, 7, 1199, 8)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n\n")
    chosen = bench["prompts"].first_turns(tmp_path / "p.jsonl", every=2)
    assert [len(text) for text in chosen] == [5, 7, 8]
    with pytest.raises(ValueError, match="no first turn under 3 characters: raise `--max-characters`"):
        bench["prompts"].first_turns(tmp_path / "p.jsonl", max_characters=3)


def test_ratios_are_over_the_fastest_rival(bench):
    speeds = [
        ("dynamic", None, 10.0),
        ("static", None, 20.0),
        ("c0", None, 40.0),
        ("fixed", "shallow", 50.0),
        ("fixed", "shallow", 80.0),
        ("fixed", "lookup", 30.0),
        ("tetris", "shallow", 100.0),
        ("tetris", "medusa", 60.0),
    ]
    records = [{"contender": c, "drafter": d, "tokens_per_second": s} for c, d, s in speeds]
    records.append({"contender": "batch", "drafter": None, "error": "ValueError: no"})
    ratios = [
        tuple(record[name] for name in bench["throughput_report"].RATIOS)
        for record in bench["throughput_report"].with_ratios(records)
    ]
    assert ratios == [
        (0.5, 0.25, None),
        (1.0, 0.5, None),
        (2.0, 1.0, None),
        (2.5, 1.25, 0.625),
        (4.0, 2.0, 1.0),
        (1.5, 0.75, 1.0),
        (5.0, 2.5, 1.25),
        (3.0, 1.5, None),
        (None, None, None),
    ]


@pytest.fixture
def two_runs(bench, folder, tmp_path):
    """A file with two runs, one of which has a failure."""
    out = tmp_path / "out.jsonl"
    more = ["--contenders", "dynamic", "c0", "fixed", "--drafters", "lookup", "--windows", "1", "--repeats", "1"]
    bench["throughput"].main(arguments(folder, out, *more))
    records = read(out)
    failed = {key: records[0][key] for key in ("rows", "contender", "drafter", "K", "C")}
    failed |= {"run": {**records[0]["run"], "started": "later"}, "error": "RuntimeError: none"}
    with out.open("a") as file:
        file.writelines(json.dumps({**record, "run": failed["run"]}) + "\n" for record in records[1:])
        file.write(json.dumps(failed) + "\n")
    return out


@needs_matplotlib
def test_plots_are_drawn_from_the_file(bench, two_runs, tmp_path, capsys):
    capsys.readouterr()
    bench["throughput"].main(["--out", str(two_runs), "--plot", str(tmp_path / "figures")])
    shown = capsys.readouterr().out
    drawn = sorted((tmp_path / "figures").glob("*.png"))
    assert len(drawn) == 2 and all(str(path) in shown for path in drawn)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert "failed: RuntimeError: none" in shown and shown.count("N = 3") == 2


def test_without_matplotlib_plots_are_refused_with_the_fix(bench, two_runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        bench["throughput"].main(["--out", str(two_runs), "--plot", str(tmp_path)])


def test_bad_arguments_are_refused(bench, capsys):
    for argv, message in (
        (["--plot", "figures"], "name it with --out"),
        (["--repeats", "0"], "must be at least 1"),
        (["--contenders", "magic"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            bench["throughput"].main(argv)
        assert message in capsys.readouterr().err
