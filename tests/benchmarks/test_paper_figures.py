"""The paper's figures on a small made-up trace: their numbers by hand or by loops, and every command as it is run."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import kit
import pytest
import torch

import tetris_hf
from tetris_hf import Draft
from tetris_hf.generation import speculation, step_cache


SETS = ("qa", "sonnet", "conversation", "math_reasoning")
NEW, DEPTH = 25, 6
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="figures are drawn by matplotlib"
)


@pytest.fixture(scope="module")
def trace(paper):
    """Texts of random tokens, and a drafter whose drafts stand as often as it claims, more often in one set."""
    generator = torch.Generator().manual_seed(4)
    sets = [name for name in SETS for _ in range(5)]
    text = torch.randint(2, 40, (len(sets), NEW), generator=generator)
    chances = 0.3 + 0.6 * torch.rand(len(sets), NEW - 1, DEPTH, generator=generator)
    chances[[name == "sonnet" for name in sets]] = 0.95
    right = paper["traces"].coming(text, DEPTH)
    tokens = torch.where(torch.rand(chances.shape, generator=generator) < chances, right, (right + 1) % 40).int()
    lengths = (NEW - 2 - torch.arange(NEW - 1)).clamp(0, DEPTH).expand(len(sets), NEW - 1).int()
    ends = torch.randint(8, NEW + 1, (len(sets),), generator=generator)
    prompts = [torch.arange(2, 4 + place % 7) for place in range(len(sets))]
    drafted = paper["traces"].Drafted(tokens, lengths, chances)
    return paper["traces"].Trace(sets, prompts, text, ends, {"made-up": drafted}, {"card": "none"})


@pytest.fixture
def trace_file(trace, tmp_path):
    trace.save(tmp_path / "trace.safetensors")
    return str(tmp_path / "trace.safetensors")


def step_records(**verify):
    """Costs at N = 4: a step of `verify[C]` seconds, and a hundredth of a second for a place of a draft."""
    return [
        {"rows": 4, "drafter": "made-up", "K": int(size) // 4, "C": int(size), "propose": 0.01 * (int(size) // 4),
         "select": 0.0, "verify": seconds, "commit": 0.0}
        for size, seconds in verify.items()
    ]  # fmt: skip


@pytest.fixture
def costs_file(tmp_path):
    lines = [json.dumps(record) for record in step_records(**{"0": 1.0, "4": 1.1, "8": 1.2, "12": 1.4})]
    (tmp_path / "costs.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "costs.jsonl")


def test_the_sets_are_those_of_the_paper(paper, tmp_path):
    sets = paper["prompt_sets"]
    categories = ("writing", "qa", "rag", "translation", "summarization", "math_reasoning")
    lines = [json.dumps({"category": name, "turns": [f"{name} {n}"]}) for name in categories for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    found = sets.prompt_sets(tmp_path / "prompts.jsonl", 2, 100)
    assert set(found) == {*sets.SPEC_BENCH, sets.SONNET, sets.REFRAIN} == set(sets.SETS)
    assert all(len(texts) == 2 for texts in found.values())
    assert found["qa"] == ["qa 0", "qa 1"] and found["conversation"] == ["writing 0", "writing 1"]
    verses = sets.sonnet(1000)
    assert len(set(verses)) == len(verses) == len(sets.LINES) * len(sets.REQUESTS)
    assert all(6 <= sum(line in verse for line in sets.LINES) <= 10 for verse in verses)
    assert set(sets.MIXES["mix"]) == {sets.SONNET, sets.PLACES["Tough"]}
    refrains = sets.refrain(1000)
    assert len(set(refrains)) == len(refrains) == len(sets.LINES) * len(sets.COPY_REQUESTS)
    assert all(sorted(refrain.count(line) for line in sets.LINES)[-3:] == [0, 8, 8] for refrain in refrains)
    assert all(set(parts) <= set(found) for parts in sets.MIXES.values())


def test_methods_have_the_sizes_of_the_paper(paper):
    methods = paper["methods"].methods([1, 2, 3], [1, 2, 3], deepest=4, oracle=True)
    assert len(methods) == len(set(methods)) and all(method.depth <= 4 for method in methods)
    assert {method.name for method in methods} == {"none", "sd", "dsd", "tetris", "oracle"}
    three = next(method for method in methods if method.name == "tetris" and method.window == 3)
    assert (three.depth, three.capacity(64), str(three)) == (4, 192, "TETRIS (extra=1)")
    assert [str(method) for method in methods][:2] == ["no drafts", "SD"]


def test_a_load_is_constant_and_mixed_in_equal_parts(paper, trace):
    load = paper["trials"].Load(trace, "mix", ("made-up",), num_rows=4, per_row=5)
    names = [[trace.sets[index] for index in load.requests(trial)] for trial in range(3)]
    assert all(some.count("sonnet") == some.count("qa") == 10 for some in names)
    assert load.requests(0) != load.requests(1) and load.requests(0) == load.requests(0)
    assert load.deepest == DEPTH and paper["trials"].Load(trace, "qa", ("lookup", "made-up"), 4).deepest is None
    for replayed in load.run(paper["methods"].Method("tetris", 2, 1)):
        assert replayed.full[: len(replayed.full) // 2].all() and not replayed.full[-1]


def test_means_and_deviations_of_trials(paper, trace):
    load = paper["trials"].Load(trace, "all", ("made-up",), num_rows=4, per_row=4, trials=2)
    method = paper["methods"].Method("sd", 2)
    runs = [replayed.ratios()["vsr"] for replayed in load.run(method)]
    mean, deviation = load.measured(method)["vsr"]
    assert mean == pytest.approx(sum(runs) / 2) and deviation == pytest.approx(abs(runs[0] - runs[1]) / 2**0.5)


def test_costs_lie_on_straight_lines(paper):
    costs = paper["costs"].StepCosts(step_records(**{"0": 1.0, "4": 1.1, "8": 1.2, "12": 1.4}))
    assert costs.target(4, 6) == pytest.approx(1.15) and costs.target(4, 16) == pytest.approx(1.6)
    assert costs.draft(4, ["made-up"], 2) == pytest.approx(0.02)
    assert costs.draft(4, ["made-up", "made-up"], 1.5) == pytest.approx(0.03)
    slopes = costs.slopes(4, ["made-up"], 2, 8)
    assert slopes == pytest.approx({"token_cost": 0.025, "base_cost": 0.9, "draft_cost": 0.01})
    assert paper["costs"].StepCosts(costs.records, free_drafts=True).draft(4, ["made-up"], 3) == 0
    with pytest.raises(ValueError, match="no drafter 'other' at N = 4"):
        costs.draft(4, ["other"], 2)
    with pytest.raises(ValueError, match=r"no N = 5, only \[4\]"):
        costs.target(5, 0)


def test_projected_seconds_by_a_loop(paper, trace):
    costs = paper["costs"].StepCosts(step_records(**{"0": 1.0, "4": 1.1, "8": 1.2, "12": 1.4}))
    load = paper["trials"].Load(trace, "all", ("made-up",), num_rows=4, per_row=5, trials=1)
    for method in (paper["methods"].Method("tetris", 2, 1), paper["methods"].Method("dsd", 3)):
        (replayed,) = load.run(method, costs)
        found = load.projected(replayed, costs, method)
        seconds = tokens = 0.0
        clock = [0.0]
        for (rows, verified, accepted, bonus), window in zip(
            replayed.steps.tolist(), replayed.windows.tolist(), strict=True
        ):
            taken = costs.target(4, verified) + 0.01 * (window if method.name == "dsd" else method.depth)
            clock.append(clock[-1] + taken)
            if rows == 4:
                seconds, tokens, last = seconds + taken, tokens + accepted + bonus, len(clock) - 1
        waits = [clock[end] - clock[start] for start, end in replayed.took.tolist() if end <= last]
        assert found["tokens_per_second"] == pytest.approx(tokens / seconds, rel=1e-5)
        assert found["latency"] == pytest.approx(sum(waits) / len(waits), rel=1e-5)


def test_gains_by_hand(paper):
    def record(method, k, speed, ter=0.5):
        return {"method": method, "k": k, "extra": 0, "tokens_per_second": (speed, 0), "ter": (ter, 0),
                "latency": (1 / speed, 0)}  # fmt: skip

    records = [
        record("sd", 1, 100, 0.8), record("sd", 2, 110, 0.6), record("dsd", 2, 120), record("tetris", 1, 112, 0.88),
        record("tetris", 2, 126, 0.66), record("oracle", 2, 150),
    ]  # fmt: skip
    expected = {"over_best": 5.0, "over_fixed": 100 * (126 / 110 - 1), "widest": 100 * (126 / 110 - 1)}
    for value in ("tokens_per_second", "latency"):
        assert paper["comparison"].gains(records, value) == pytest.approx(expected)
    assert paper["comparison"].potential(records) == pytest.approx({1: 10.0, 2: 10.0})
    assert paper["comparison"].hidden_drafting(records) == pytest.approx(100 * (110 * 1.1 / 120 - 1))
    assert paper["comparison"].gains([record("sd", 1, 100)], "ter") == {}


def test_accepted_tokens_by_hand(paper, trace):
    walk = paper["accepted_tokens"].walk
    assert walk(torch.tensor([2, 9, 9, 0, 3, 9, 9, 9]), end=9) == [2, 0, 3]
    assert walk(torch.tensor([5, 5, 5]), end=3) == [2] and walk(torch.tensor([1]), end=1) == []
    shares = paper["accepted_tokens"].distribution(trace, "made-up", "sonnet")
    assert sum(shares) == pytest.approx(1) and len(shares) == DEPTH + 1
    # The same steps as those of a replay in which everything is verified.
    replayed = paper["replay"].replay(trace, trace.of("sonnet"), "made-up", 5, 5 * DEPTH, DEPTH, refill=False)
    steps, _, accepted, _ = replayed.steps.sum(0).tolist()
    assert sum(count * share for count, share in enumerate(shares)) == pytest.approx(accepted / steps)


def test_extra_tokens_help_where_the_score_is_right(paper, trace_file):
    records = paper["extra_tokens"].main(
        ["--trace", trace_file, "--drafter", "made-up", "--rows", "8", "--k", "2", "--mixes", "mix"]
    )
    means = [record["vsr"][0] for record in records]
    assert [record["extra"] for record in records] == [0, 1, 2, 3, 4] and means[2] > means[0] and means[-1] > means[0]


def test_the_paper_s_rule_is_biased_and_ours_is_not(paper):
    bias = paper["bias"]
    torch.manual_seed(0)
    for rule, expected in (("paper", (0.368, 0.267, 0.155, 0.210)), ("predictable", bias.P.tolist())):
        counts = bias.first_tokens(rule, [bias.Q, bias.Q], 1, 100_000)
        assert int(counts.sum()) == 200_000
        assert (counts / counts.sum()).tolist() == pytest.approx(expected, abs=0.004)
    both = [bias.distance(bias.first_tokens(rule, [bias.Q, bias.SURER] * 4, 4, 20_000)) for rule in bias.RULES]
    assert both[0] > 0.012 and both[1] < 0.005


def test_places_that_need_no_draft(paper, trace, trace_file, tmp_path):
    depth = paper["depth"]
    selector = depth.StoppingSelector()

    def some(*chances):
        tokens, lengths = torch.zeros(len(chances), len(chances[0]), dtype=torch.long), torch.tensor([3, 3])
        return Draft(tokens, lengths, torch.tensor(chances), torch.tensor(chances))

    # Behind one place a budget of two holds .9 and .4, and .9 might come; behind two .9 and .45, and .45 at best.
    selector(some([0.9, 0.5, 0.5], [0.4, 0.5, 0.9]), torch.tensor([3, 3]), 2)
    selector(some([0.5, 0.5, 0.5], [0.5, 0.9, 0.9]), torch.tensor([3, 3]), 2)
    selector(some([0.5, 0.5, 0.5], [0.4, 0.9, 0.9]), torch.tensor([3, 3]), 6)
    assert selector.places == [(3, 2), (3, 1), (3, 3)]
    # One row verifies what the budget holds, and what it drafts deeper is never asked for.
    out = tmp_path / "depth.jsonl"
    records = depth.main(
        ["--trace", trace_file, "--drafter", "made-up", "--rows", "1", "4", "--k", "1", "2", "--extras", "0", "2",
         "--out", str(out), "--trials", "2"]
    )  # fmt: skip
    assert [(one["rows"], one["k"], one["extra"]) for one in records] == [
        (rows, k, extra) for rows in (1, 4) for k in (1, 2) for extra in (0, 2)
    ]
    for one in records:
        assert one["needed"][0] <= one["possible"][0] <= one["k"] + one["extra"]
        assert one["rows"] > 1 or one["needed"][0] <= one["k"]
        assert one["extra"] or one["saved"] == 0, "every place can be selected"
    assert len(out.read_text().splitlines()) == len(records)


@pytest.mark.parametrize("name", ["accepted_tokens", "batch_sizes", "extra_tokens", "comparison"])
@needs_matplotlib
def test_every_command_writes_records_and_a_figure(paper, trace_file, costs_file, tmp_path, name):
    more = {
        "accepted_tokens": [],
        "batch_sizes": ["--rows", "2", "4", "--k", "1", "--mix", "mix", "--trials", "2"],
        "extra_tokens": ["--rows", "4", "--k", "1", "--mixes", "qa", "--most", "2", "--trials", "2"],
        "comparison": [
            "--rows", "4", "--k", "1", "2", "--extras", "1", "--mixes", "qa", "mix", "--costs", costs_file, "--value",
            "tokens_per_second", "--trials", "2",
        ],
    }[name]  # fmt: skip
    out, figure = tmp_path / "records.jsonl", tmp_path / "some" / "figure.png"
    shared = ["--trace", trace_file, "--drafter", "made-up", "--out", str(out), "--figure", str(figure)]
    records = paper[name].main([*shared, *more])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == len(records) > 0 and all(line["trace"] == {"card": "none"} for line in written)
    assert figure.stat().st_size > 5_000


def test_the_middle_of_a_held_full_run(paper):
    # Three rows of a token a second each: wherever texts end, the middle makes three tokens a second.
    lives = [
        (0, 4),
        (0, 5),
        (0, 7),
        (4, 10),
        (5, 11),
        (7, 13),
        (10, 19),
        (11, 20),
        (13, 21),
        (19, 22),
        (20, 25),
        (21, 30),
    ]
    answers = enumerate(
        SimpleNamespace(error=None, lifespan=life, generated_tokens=[0] * (life[1] - life[0])) for life in lives
    )
    middle, tokens, seconds = paper["throughput"].timed_middle(answers, num_rows=3, total=12)
    assert [answer.lifespan for answer in middle] == lives[3:9] and seconds == 21 - 7
    assert tokens == pytest.approx(3 * seconds)
    failed = enumerate([SimpleNamespace(error="no", lifespan=(0, 1))])
    with pytest.raises(RuntimeError, match="no"):
        paper["throughput"].timed_middle(failed, 1, 1)
    order = paper["throughput"].served_order([[1], [2, 3], [4]], 7, seed=1)
    assert (
        len(order) == 7 and order[0] == [2, 3] and order == paper["throughput"].served_order([[1], [2, 3], [4]], 7, 1)
    )


@needs_matplotlib
def test_the_report_of_timed_runs(paper, tmp_path, capsys):
    lines = [
        {"run": {"card": "some card"}, "mix": "mix", "drafter": "shallow", "rows": 4, "method": method, "k": k,
         "extra": extra, "speeds": speeds, "latencies": [1 / speed for speed in speeds], "vsr": vsr, "ter": 0.5,
         "tokens_per_step": 1.5}
        for method, k, extra, speeds, vsr in (
            ("none", 0, 0, [90, 91, 89], None),
            ("sd", 1, 0, [100, 104, 99], 0.5),
            ("tetris", 1, 1, [105, 111, 104], 0.6),
        )
    ]  # fmt: skip
    lines.append({**lines[1], "method": "dsd", "error": "RuntimeError: no"})
    (tmp_path / "timed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = paper["report"].main([str(tmp_path / "timed.jsonl"), "--figure", str(tmp_path / "timed.png")])
    assert found["mix", "shallow", 4, "tokens_per_second"]["over_best"] == pytest.approx(5.0)
    assert "| TETRIS (extra=1) | 1 | 2 | 105 ± 4 |" in capsys.readouterr().out
    assert (tmp_path / "timed.png").exists()


def test_a_rule_has_one_colour_though_others_were_not_timed_everywhere(paper):
    def records(*names):
        return [{"method": name, "extra": extra} for name, extra in names]

    groups = {("mix", 64): records(("none", 0), ("dsd", 0), ("sd", 0)), ("mix", 16): records(("tetris", 1), ("sd", 0))}
    found = paper["report"].colours(groups)
    assert set(found) == {("dsd", 0), ("sd", 0), ("tetris", 1)} and len(set(found.values())) == 3


@pytest.mark.parametrize("refill", [False, True])
def test_a_capacity_that_finds_itself_against_constants(paper, trace, refill):
    """Where drafts are dear, C = 0 is kept; where they are free, far less time goes than without them."""
    for place, least, most in ((0.9, 0.97, 1.01), (0.0001, 1.3, 9.0)):
        records = [record | {"propose": place * record["K"]} for record in step_records(**{"0": 1.0, "12": 1.1})]
        costs = paper["costs"].StepCosts(records)
        contest = paper["auto_capacity"].contest
        found = contest(trace, "made-up", 4, costs, calls=2, seed=1, refill=refill, sets=["sonnet", "qa"])
        assert least < found["over_c0"] < most and least < found["least_call_over_c0"]
        assert 0.8 < found["over_best"] < 1.1, "texts of 25 tokens end before much is learned"
        assert len(found["chosen"]) == 2 and ((0, 0) in found["chosen"]) == (least < 1)


def test_all_draws_together_have_one_best_constant(paper):
    """The best of each draw may differ: what a sweep over all of them finds is one setting."""
    shared = {"drafter": "heads", "rows": 4, "refill": False}
    draws = [
        shared | {"seconds": 5.0, "constant_seconds": {"0, 0": 6.0, "4, 1": 4.0}},
        shared | {"seconds": 3.0, "constant_seconds": {"0, 0": 3.0, "4, 1": 8.0}},
    ]
    found = paper["auto_capacity"].together(draws)
    assert found["best"] == "0, 0" and found["over_best"] == found["over_c0"] == 9 / 8 and found["draws"] == 2


def test_the_command_of_the_capacity_writes_records(paper, trace_file, costs_file, tmp_path):
    out = tmp_path / "some" / "records.jsonl"
    shared = ["--trace", trace_file, "--costs", costs_file, "--drafters", "made-up", "--rows", "4", "--out", str(out)]
    records = paper["auto_capacity"].main([*shared, "--calls", "1", "--draws", "2", "--sets", "qa"])
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["seed"] for line in written] == [0, 1] and len(records) == 2
    assert all(line["over_best"] > 0.5 and line["least_call_over_c0"] == line["over_c0"] for line in written)


def test_a_steered_replay_does_what_its_settings_do(paper, trace):
    """Constant steering changes nothing; other settings count from the next step on; progress is that of the rows."""
    replay = paper["replay"].replay
    requests, seen = [0, 6, 11, 17], []

    def constant(rows, verification):
        seen.append(rows.length.tolist())
        return 6, 3

    plain = replay(trace, requests, "made-up", 4, 6, 3, refill=False)
    steered = replay(trace, requests, "made-up", 4, 6, 3, refill=False, steer=constant)
    assert torch.equal(plain.steps, steered.steps) and len(seen) == len(plain.steps)
    ends = [len(trace.prompts[request]) + int(trace.ends[request]) for request in requests]
    assert seen[-1] == ends
    alternating = replay(
        trace,
        requests,
        "made-up",
        4,
        0,
        0,
        refill=False,
        steer=lambda rows, said: (0, 0) if said.draft.depth else (9, 5),
    )
    verified = alternating.steps[:, 1].tolist()
    assert not any(verified[::2]) and all(verified[1:-1:2]) and max(verified) <= 9


def test_costs_may_be_those_of_the_throughput_benchmark(paper, tmp_path):
    stages = {"propose": 0.002, "select": 0.0, "verify": 0.005, "commit": 0.001}
    lines = [{"rows": 4, "drafter": None, "K": None, "C": None, "tokens_per_second": 9.0, "step_seconds": None}]
    lines += [{"rows": 4, "drafter": "made-up", "K": 2, "C": 8, "step_seconds": stages}]
    (tmp_path / "costs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    costs = paper["costs"].StepCosts.load(tmp_path / "costs.jsonl")
    assert costs.target(4, 8) == pytest.approx(0.006) and costs.draft(4, ["made-up"], 1) == pytest.approx(0.001)


@pytest.mark.parametrize("captured", [False, True])
def test_calls_with_and_without_branches(paper, monkeypatch, enabled, captured):
    if captured:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "generation"))
        importlib.import_module("test_step_graphs").pretend_gpu(monkeypatch)
    target = kit.tiny()
    batches, before = [kit.ragged(seed=seed) for seed in range(2)], (step_cache.can_branch, speculation.sure_depth)
    found = paper["branches"].compare(
        target, kit.near(target), batches, k=1, depth=3, do_sample=False, max_new_tokens=12, eos_token_id=None
    )
    assert found["same"] == [True, True] and found["speedup"] > 0
    every, branches = (found[way] for way in paper["branches"].WAYS)
    assert every["steps"] == branches["steps"] and len(every["seconds"]) == 2
    forwards = sum(every["draft_forwards"]), sum(branches["draft_forwards"])
    assert forwards[1] < forwards[0] if captured else forwards[1] == forwards[0]
    assert (step_cache.can_branch, speculation.sure_depth) == before
    tetris_hf.release_graphs()
