"""Seconds of a step from a few timed ones: fitted, kept on disk, corrected while decoding."""

import itertools
import json
import random

import kit
import pytest
from huggingface_hub import constants

from tetris_hf import AssistantDrafter, MixedDrafter, PromptLookupDrafter
from tetris_hf.generation.cost_key import cost_key
from tetris_hf.generation.cost_table import CostTable, _monotone


N = 5


def step(capacity, depth):
    """Drafting has a fixed cost; verifying grows faster beyond 3 N."""
    return 0.01 + (0.002 + 0.0001 * capacity + 0.0003 * max(0, capacity - 3 * N) + 0.0005 * depth) * (capacity > 0)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path


def test_what_was_timed_is_given_back_and_the_rest_lies_on_the_line():
    table = CostTable.measure(step, N)
    for capacity, depth in CostTable.settings_to_time(N):
        assert table.step_seconds(capacity, depth) == pytest.approx(step(capacity, depth))
    assert table.place_seconds == pytest.approx(0.0005)
    assert table.step_seconds(N, 6) == pytest.approx(step(N, 6))
    assert table.step_seconds(3, 1) == pytest.approx(step(3, 1)), "below N: the line goes on, not down to C = 0"
    middle = (table.step_seconds(2 * N, 2) + table.step_seconds(4 * N, 2)) / 2
    assert table.step_seconds(3 * N, 2) == pytest.approx(middle)
    slope = (table.step_seconds(4 * N, 4) - table.step_seconds(2 * N, 4)) / (2 * N)
    assert table.step_seconds(6 * N, 4) == pytest.approx(table.step_seconds(4 * N, 4) + 2 * N * slope)


def test_noise_never_makes_more_work_cheaper():
    luck = random.Random(0)
    for _ in range(50):
        table = CostTable.measure(lambda capacity, depth: 0.01 * luck.uniform(0.5, 1.5), N)
        for depth in range(1, 6):
            seconds = [
                table.step_seconds(0, 0),
                *(table.step_seconds(capacity, depth) for capacity in range(1, 6 * N)),
            ]
            assert all(one <= other + 1e-12 for one, other in itertools.pairwise(seconds))
            assert table.step_seconds(N, depth) <= table.step_seconds(N, depth + 1)


def test_pooling_is_the_nearest_monotone_line():
    """The naive reference: the minimax formula of isotonic regression."""
    luck = random.Random(1)
    for size in range(1, 8):
        values = [luck.random() for _ in range(size)]
        expected = [
            max(min(sum(values[a : b + 1]) / (b + 1 - a) for b in range(place, size)) for a in range(place + 1))
            for place in range(size)
        ]
        assert _monotone(values) == pytest.approx(expected)


@pytest.mark.parametrize("max_depth", [1, 2, 3, 6])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_few_possible_settings_are_timed(num_rows, max_depth):
    settings = CostTable.settings_to_time(num_rows, max_depth)
    assert (0, 0) in settings and 2 <= len(settings) <= 5
    for capacity, depth in settings[1:]:
        assert 1 <= capacity <= num_rows * depth and depth <= max_depth
    assert CostTable.measure(step, num_rows, settings).step_seconds(num_rows, 1) > 0


def test_own_settings_can_be_timed():
    table = CostTable.measure(step, N, [(0, 0), (2, 1), (9, 2), (9, 3), (14, 4)])
    assert table.step_seconds(14, 4) == pytest.approx(step(14, 4))
    assert table.step_seconds(12, 3) == pytest.approx(step(12, 3))


def test_a_machine_that_slows_down_moves_all_settings():
    table = CostTable.measure(step, N)
    for _ in range(20):
        table.refine(N, 1, step(N, 1))
    for _ in range(40):
        table.refine(N, 1, 2 * step(N, 1))
    assert table.step_seconds(N, 1) == pytest.approx(2 * step(N, 1), rel=0.02)
    assert table.step_seconds(0, 0) == pytest.approx(2 * step(0, 0), rel=0.25)


def test_one_setting_that_was_timed_wrong_moves_itself():
    table = CostTable.measure(step, N)
    for _ in range(10):
        table.refine(0, 0, step(0, 0))
        table.refine(N, 1, 1.3 * step(N, 1))
    assert table.step_seconds(N, 1) == pytest.approx(1.3 * step(N, 1), rel=0.1)
    assert table.step_seconds(0, 0) == pytest.approx(step(0, 0), rel=0.1)


def test_a_table_of_a_slower_day_is_off_for_one_window_only():
    """Two windows tell a machine three times as fast, and no setting is taken for much better than the others."""
    table = CostTable.measure(lambda capacity, depth: 3 * step(capacity, depth), N)
    for _ in range(2):
        table.refine(N, 1, step(N, 1))
    for setting in ((0, 0), (N, 1), (4 * N, 4)):
        assert table.step_seconds(*setting) == pytest.approx(step(*setting), rel=0.1)


def test_one_bad_window_moves_little():
    table = CostTable.measure(step, N)
    for _ in range(5):
        table.refine(N, 1, step(N, 1))
    for seconds in (100.0, float("nan"), float("inf"), 0.0, -1.0):
        table.refine(N, 1, seconds)
    assert step(N, 1) < table.step_seconds(N, 1) < 1.15 * step(N, 1)


def test_a_table_is_measured_once_per_key(home):
    timed = []

    def time_step(capacity, depth):
        timed.append((capacity, depth))
        return step(capacity, depth)

    first = CostTable.cached({"model": "a"}, time_step, N)
    assert timed == CostTable.settings_to_time(N)
    again = CostTable.cached({"model": "a"}, time_step, N)
    assert len(timed) == len(first.points) and again.points == first.points and again.num_rows == N
    CostTable.cached({"model": "b"}, time_step, N)
    assert len(timed) == 2 * len(first.points)
    assert len(list(home.rglob("*.json"))) == 2 and not list(home.rglob("*.part"))


@pytest.mark.parametrize("damage", ["torn", "old", "foreign", "empty", "negative", "folder", "list"])
def test_a_file_that_is_no_such_table_is_measured_anew(home, damage):
    key = {"model": "a"}
    CostTable.measure(step, N).save(key)
    path = next(home.rglob("*.json"))
    content = json.loads(path.read_text())
    if damage == "torn":
        path.write_text(path.read_text()[:-30])
    elif damage == "empty":
        path.write_text("")
    elif damage == "list":
        path.write_text("[1, 2]")
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        change = {
            "old": {"version": 0},
            "foreign": {"key": {"model": "b"}},
            "negative": {"points": [[0, 0, -1.0], [N, 1, 0.1]]},
        }
        path.write_text(json.dumps({**content, **change[damage]}))
    assert CostTable.load(key) is None
    table = CostTable.cached(key, step, N)
    assert table.step_seconds(0, 0) == step(0, 0)
    assert damage == "folder" or CostTable.load(key).points == table.points


def test_a_disk_that_cannot_be_written_to_is_no_error(home):
    (home / "tetris_hf").write_text("a file in the place of the folder")
    assert CostTable.cached({"model": "a"}, step, N).points


def test_keys_are_the_same_in_every_process_and_tell_what_costs():
    """Built twice, equal models and drafters have equal keys; what changes the cost changes the key."""
    one, other = (
        cost_key(
            kit.tiny(seed=seed),
            MixedDrafter([PromptLookupDrafter(), AssistantDrafter(kit.tiny(seed=seed))]),
            N,
            "eager",
        )
        for seed in (1, 2)
    )
    assert one == other and json.loads(json.dumps(one)) == one
    model, drafter = kit.tiny(), AssistantDrafter(kit.tiny())
    keys = [
        cost_key(model, drafter, N, "eager"),
        cost_key(model, drafter, N, "captured"),
        cost_key(model, drafter, N + 1, "eager"),
        cost_key(model, PromptLookupDrafter(), N, "eager"),
        cost_key(model, None, N, "eager"),
        cost_key(model, AssistantDrafter(kit.tiny(num_hidden_layers=1)), N, "eager"),
        cost_key(kit.tiny("mistral"), drafter, N, "eager"),
        cost_key(kit.tiny(sliding_window=4, model_type="mistral"), drafter, N, "eager"),
        cost_key(kit.tiny().double(), drafter, N, "eager"),
    ]
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == len(keys)
    assert not any(hex(id(model))[2:] in text or str(id(model)) in text for text in texts)


def test_a_call_does_not_change_the_key(near):
    """The attention's name is another within a call, and drafters hold more."""
    target = kit.tiny()
    drafter = AssistantDrafter(near)
    before = cost_key(target, drafter, 3, "eager")
    kit.speculate(target, kit.ragged(), drafter)
    assert cost_key(target, drafter, 3, "eager") == before
    target.config._attn_implementation = "eager"
    assert cost_key(target, drafter, 3, "eager") == before


@pytest.mark.parametrize("points", [{}, {(0, 0): 1.0}, {(1, 1): 1.0, (2, 2): 2.0}])
def test_points_must_hold_both_kinds(points):
    with pytest.raises(ValueError, match=r"must hold \(0, 0\) and one setting with drafts"):
        CostTable(N, points)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_must_be_times(seconds):
    with pytest.raises(ValueError, match="must hold positive seconds"):
        CostTable(N, {(0, 0): seconds, (N, 1): 1.0})
