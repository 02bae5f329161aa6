"""`tetris-hf bench`: its estimates against a naive reference, and a report that agrees with what was measured."""

import heapq
import importlib.util
import json
import random
import sys

import kit
import pytest
import torch
from huggingface_hub import constants
from test_cli import folder, prompts, texts  # noqa: F401

from tetris_hf import Draft, TetrisStats, Verification
from tetris_hf.cli import main
from tetris_hf.cli.bench_report import verdict
from tetris_hf.cli.cost import CostModel, OutcomeRecorder, StepCost, acceptance_for, estimates


N, K = 5, 3


def recorded(steps=6):
    """A recorder that has seen `steps` random steps, fewer rows in each, and the same as plain lists."""
    recorder, naive, generator = OutcomeRecorder(), [], torch.Generator().manual_seed(3)
    for step in range(steps):
        live = torch.arange(max(1, N - step))
        lengths = torch.randint(0, K + 1, (len(live),), generator=generator)
        chances = torch.rand(len(live), K, generator=generator)
        tokens = torch.randint(2, kit.VOCABULARY, (len(live), K), generator=generator)
        draft = Draft(tokens, lengths, chances, chances)
        accepted = torch.minimum(torch.randint(0, K + 1, (len(live),), generator=generator), lengths)
        assert torch.equal(recorder(draft, lengths, 1), lengths)
        recorder.observe(Verification(live, draft, lengths, accepted, None, live))
        rows = zip(chances.tolist(), lengths.tolist(), accepted.tolist(), strict=True)
        naive.append([(scores[:length], right) for scores, length, right in rows])
    empty = torch.arange(2)
    recorder.observe(
        Verification(empty, Draft.empty(empty), empty * 0, empty * 0, None, empty)
    )  # the prompts' forward
    return recorder, naive


def walk(rows, capacity, depth):
    """Algorithm 1 of the paper: a heap of frontiers. Returns tokens taken of each row."""
    taken = [0] * len(rows)
    heap = [(-scores[0], 0, row) for row, (scores, _) in enumerate(rows) if scores]
    heapq.heapify(heap)
    while heap and sum(taken) < capacity:
        score, place, row = heapq.heappop(heap)
        taken[row] += 1
        scores = rows[row][0][:depth]
        if place + 1 < len(scores):
            heapq.heappush(heap, (score * scores[place + 1], place + 1, row))
    return taken


@pytest.mark.parametrize(("capacity", "depth"), [(1, 1), (2, 3), (4, 2), (7, 3), (15, 3)])
def test_what_selection_would_have_made_of_it(capacity, depth):
    recorder, naive = recorded()
    taken = [walk(rows, capacity, depth) for rows in naive]
    pairs = [pair for step, rows in zip(taken, naive, strict=True) for pair in zip(step, rows, strict=True)]
    kept = [min(number, right) + 1 for number, (_, right) in pairs]
    tokens, verified = recorder.expect(capacity, depth)
    assert tokens == pytest.approx(sum(kept) / len(kept))
    assert verified == pytest.approx(sum(map(sum, taken)) / len(naive))


def test_costs_and_the_best_estimate():
    stats = TetrisStats.zeros(2, K, 4)
    stats.live_steps += 10
    stats.seconds = {"prefill": 9.0, "propose": 1.0, "select": 0.5, "verify": 2.0, "commit": 0.5}
    cost = StepCost.of(stats)
    assert (cost.total, cost.propose, cost.draft_share) == pytest.approx((0.4, 0.1, 0.25))
    stats.seconds, stats.step_seconds = {"prefill": 9.0, "replay": 2.0}, {"propose": 0.05, "verify": 0.1}
    assert StepCost.of(stats) == StepCost(0.2, 0.05)

    costs = CostModel.fit(StepCost(0.2, 0.0), StepCost(0.5, 0.15), depth=3, verified=10)
    assert (costs.base, costs.per_place, costs.per_token) == pytest.approx((0.2, 0.05, 0.015))
    assert costs.seconds(3, 10) == pytest.approx(0.5)
    recorder, _ = recorded()
    free = estimates(recorder, CostModel(0.2, 0.0, 0.0), N, K)
    assert free[0].tokens_per_step == recorder.expect(N * K, K)[0]  # what is free is used
    dear = estimates(recorder, CostModel(0.2, 9.0, 9.0), N, K)
    assert (dear[0].capacity, dear[0].depth) == (1, 1) and dear[0].gain < 1
    assert len({(one.capacity, one.depth) for one in free}) == len(free)
    assert max(one.capacity for one in free) == N * K


def test_acceptance_for():
    numbers = random.Random(7)
    for _ in range(20):
        chance, places = numbers.random(), numbers.randint(1, 6)
        tokens = sum(chance**place for place in range(places + 1))
        assert acceptance_for(tokens, places) == pytest.approx(chance, abs=1e-6)
    assert acceptance_for(1.25, 0.5) == pytest.approx(0.5)  # every other row verifies one
    assert acceptance_for(0.9, 2) == 0.0 and acceptance_for(3.1, 2) is None


def test_the_report(folder, prompts, tmp_path, capsys, monkeypatch):  # noqa: F811
    fixed = ["bench", prompts, "--model", folder / "target", "--device", "cpu", "--quiet", "--repeats", 2]
    sizes = ["--batch-size", N, "--max-new-tokens", 8, "--capacity", 7, "--num-assistant-tokens", K]
    asked = [str(part) for part in [*fixed, *sizes, "--assistant", folder / "near"]]
    if importlib.util.find_spec("matplotlib") is not None:
        asked += ["--plot", str(tmp_path / "plot.png")]
    assert main([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    contenders = {one["name"]: one for one in report["contenders"]}
    assert list(contenders)[:3] == ["plain generate", "ours, C = 0", "ours, as asked"]
    assert contenders["ours, all drafts verified"]["capacity"] == N * K
    for one in report["contenders"]:
        assert one["rows_equal_to_plain"] == N and one["tokens"] == N * 8
        assert one["seconds_min"] <= one["seconds"] <= one["seconds_max"]
        assert one["over_plain"] == pytest.approx(contenders["plain generate"]["seconds"] / one["seconds"])
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
    speeds = [one["tokens_per_second"] for one in report["contenders"]]
    used = contenders[report["suggestion"]["use"]]
    assert used["tokens_per_second"] == max(speeds) and used["capacity"] == report["suggestion"]["capacity"]
    assert len(report["acceptance"]) == K and 0 <= report["draft_share"] <= 1
    suggested = contenders.get("ours, as suggested", contenders["ours, as asked"])
    best = max(report["estimates"], key=lambda one: one["gain"])
    assert (suggested["capacity"], suggested["depth"]) == (best["capacity"], best["depth"])
    if "--plot" in asked:
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))  # where costs are kept
    assert main(["auto" if part == "7" else part for part in asked]) == 0
    shown = capsys.readouterr().out
    assert "plain generate" in shown and " auto " in shown and "break-even acceptance" in shown and "\nUse " in shown


@pytest.mark.parametrize(
    ("use", "capacity", "words"),
    [
        ("plain generate", None, "Drafts do not pay here: 1.50 times plain generate, 1.20 times C = 0.\nUse plain"),
        ("ours, C = 0", 0, "Use --capacity 0 (within the noise of plain generate)."),
        (
            "ours, as asked",
            "auto",
            "Drafts pay here: 1.50 times plain generate, 1.20 times C = 0.\nUse --capacity auto.",
        ),
        (
            "ours, as suggested",
            6,
            "Drafts pay here: 1.50 times plain generate, 1.20 times C = 0.\nUse --capacity 6 --",
        ),
    ],
)
def test_verdicts(use, capacity, words):
    depth = None if capacity == "auto" else 2
    suggestion = {"use": use, "capacity": capacity, "num_assistant_tokens": depth, "within_noise_of": None}
    if capacity == 0:
        suggestion["within_noise_of"] = "plain generate"
    contenders = [{"name": "ours, as suggested", "over_plain": 1.5, "over_c0": 1.2}]
    report = {"suggestion": suggestion, "contenders": contenders, "fastest_with_drafts": "ours, as suggested"}
    assert words in verdict(report)


def test_what_cannot_be_measured(folder, tmp_path, capsys, monkeypatch):  # noqa: F811
    file = tmp_path / "prompts.txt"
    file.write_text("w3 " * 126 + "\n")
    asked = ["bench", str(file), "--model", str(folder / "target"), "--device", "cpu", "--quiet"]
    assert main(asked) == 2 and "add --assistant" in capsys.readouterr().err
    assert main([*asked, "--assistant", "lookup"]) == 1
    assert "none of the 1 prompts can be served within 128 tokens" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*asked, "--assistant", "lookup", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
