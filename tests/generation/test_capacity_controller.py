"""C and K that find themselves: against naive references, and in simulated decoding against every constant setting.

The simulation scripts the chance of every draft token, draws what stands, and prices steps like those measured on an
H100 (`benchmarks/README.md`) or like a CPU's. Tokens are counted by their chances: luck does not decide a test.
"""

import random

import pytest
import torch

from tetris_hf import Draft, TetrisSelector, Verification
from tetris_hf.generation.capacity_controller import CapacityController, best_sums, learn_rates
from tetris_hf.generation.capacity_settings import candidates, promised
from tetris_hf.generation.cost_table import CostTable


DEPTH = 6


def h100(place):
    """Seconds of a step at N = 64, `place` of them for each place: 7.1 ms at C = 0, 8.6 at K = 2, C = 128 with .27."""

    def cost(num_rows, capacity, depth):
        extra = 0.007 * capacity + (0.006 * max(0, capacity - 128) if capacity > 128 else 0.0)
        return (7.1 + (extra + 0.05 + depth * place * 1e3 if capacity else 0.0)) / 1e3

    return cost


def few_rows(num_rows, capacity, depth):
    """The same card with up to 16 rows, where verifying is nearly free."""
    return (6.3 + 0.028 * num_rows + (0.012 * capacity + 0.27 * depth + 0.3 if capacity else 0.0)) / 1e3


def many_rows(num_rows, capacity, depth):
    """An H200 at N = 128, where every verified token costs: 6.2 ms at C = 0, 8.6 at K = 2 with C = 128."""
    return (6.2 + (0.3 + 0.0145 * capacity + 0.12 * depth if capacity else 0.0)) / 1e3


def cpu(num_rows, capacity, depth):
    """Every token costs, whoever computes it."""
    return 0.005 * (num_rows + capacity) + 0.0005 * depth * num_rows


class World:
    """Draft tokens with a chance each, the drafter's estimate of it (too sure or too modest), and what would stand."""

    def __init__(self, num_rows, mean, steps=300, decay=1.0, spread=0.15, later=None, turn=150, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.num_rows = num_rows
        rows = (torch.rand(num_rows, generator=generator) * 2 - 1)[:, None] * spread
        shape = (num_rows, DEPTH)
        self.steps = []
        for step in range(steps):
            level = mean if later is None or step < turn else later
            level = ((level + rows) * decay ** torch.arange(DEPTH)).clamp(0.02, 0.98)
            chances = torch.sigmoid(1.35 * level.logit() + 1.8 * torch.randn(shape, generator=generator))
            seen = chances.clamp(1e-4, 1 - 1e-4).logit() + 0.5 * torch.randn(shape, generator=generator)
            self.steps.append(
                (chances, torch.sigmoid(0.6 * seen - 0.3), torch.rand(shape, generator=generator) < chances)
            )

    def step(self, number, capacity, depth, live, remaining=None):
        """What a step with C and K does: a `Verification`, and the expected tokens of each row, bonus included."""
        chances, estimates, stands = (tensor[:, :depth] for tensor in self.steps[number])
        lengths = torch.where(live, depth, 0)
        tokens = torch.zeros(chances.shape, dtype=torch.long)
        draft = Draft(tokens, lengths, estimates, estimates, remaining=remaining)
        lengths = TetrisSelector(slowest_first=True)(draft, lengths, capacity) if depth else lengths
        verified = torch.arange(depth) < lengths[:, None]
        accepted = (stands & verified).long().cumprod(1).sum(1)
        rows = torch.arange(self.num_rows)
        expected = ((chances.cumprod(1) * verified).sum(1) + 1) * live
        return Verification(rows, draft, lengths, accepted, None, rows), expected


def decode(world, cost, policy, texts=None, noise=0.01, seed=0):
    """Tokens per second under a constant setting or a controller, and the setting of every step."""
    luck, everyone = random.Random(seed), torch.ones(world.num_rows, dtype=torch.bool)
    left = None if texts is None else texts.clone()
    automatic = isinstance(policy, CapacityController)
    longest = 1 if left is None else int(left.max())
    setting, live = policy.begin(texts is not None, longest) if automatic else policy, everyone
    tokens = seconds = window = since = 0
    gone, total = torch.zeros(2, 2, world.num_rows)  # tokens and steps of each row, in the window and in all
    settings = []
    for number in range(len(world.steps)):
        if not live.any():
            break
        verification, expected = world.step(number, *setting, live, left)
        settings.append(setting)
        tokens += float(expected.sum()) if left is None else 0.0
        window += cost(world.num_rows, *setting)
        since += 1
        if automatic:
            policy.observe(verification, live)
        if left is not None:
            kept = torch.minimum(verification.num_accepted + 1, left) * live
            tokens, left = tokens + int(kept.sum()), left - kept
            gone += torch.stack([kept, live])
            live = left > 0
        if not automatic or since >= policy.interval:
            if automatic:
                if left is not None:
                    policy.follow_rows(*gone, left)
                total += gone
                gone.zero_()
                setting = policy.decide(window / since * luck.gauss(1, noise))
            seconds, window, since = seconds + window, 0.0, 0
    if automatic:
        policy.end(*(total + gone))
    return tokens / (seconds + window), settings


def table(cost, num_rows, noise=0.01, seed=0):
    luck = random.Random(seed)
    return CostTable.measure(lambda *setting: cost(num_rows, *setting) * luck.gauss(1, noise), num_rows)


def constants(world, cost, settings):
    """Tokens per second of every setting, kept all the time: `decode` with constants, all steps in one sort."""
    speeds = {}
    chances, estimates = (
        torch.stack([step[i] for step in world.steps]).cumprod(2) for i in (0, 1)
    )  # (steps, N, DEPTH)
    for capacity, depth in settings:
        order = estimates[:, :, :depth].flatten(1).sort(1, descending=True).indices[:, :capacity]
        gained = chances[:, :, :depth].flatten(1).gather(1, order).sum()
        tokens = world.num_rows * len(world.steps) + float(gained)
        speeds[capacity, depth] = tokens / len(world.steps) / cost(world.num_rows, capacity, depth)
    return speeds


def contest(cost, num_rows, seed=0, **world):
    """The controller's speed over that of C = 0 and over that of the best constant setting, and what it chose."""
    world = World(num_rows, seed=seed, **world)
    controller = CapacityController(num_rows, table(cost, num_rows, seed=seed), DEPTH)
    fixed = constants(world, cost, controller.settings)
    speed, settings = decode(world, cost, controller, seed=seed)
    return speed / fixed[0, 0], speed / max(fixed.values()), settings


def test_the_simulation_counts_constant_settings_alike():
    world = World(5, 0.6, steps=20)
    for setting, speed in constants(world, few_rows, [(0, 0), (3, 1), (10, 2), (20, 6)]).items():
        assert decode(world, few_rows, setting)[0] == pytest.approx(speed, rel=1e-4)


@pytest.mark.parametrize(
    "cost, num_rows, mean, decay",
    [
        (h100(0.00027), 64, 0.15, 1),
        (h100(0.00027), 64, 0.7, 0.75),
        (h100(0.00027), 64, 0.9, 1),
        (h100(0.00055), 64, 0.1, 1),
        (h100(0.00055), 64, 0.5, 1),
        (few_rows, 16, 0.12, 1),
        (few_rows, 16, 0.75, 1),
        (few_rows, 1, 0.2, 1),
        (few_rows, 1, 0.7, 0.9),
    ],
)
def test_it_is_as_fast_as_the_best_constant_setting(cost, num_rows, mean, decay):
    over_none, over_best, _ = contest(cost, num_rows, mean=mean, decay=decay)
    assert over_none > 0.98
    assert over_best > 0.97


@pytest.mark.parametrize("mean", [0.3, 0.9])
@pytest.mark.parametrize("num_rows", [3, 16])
def test_where_every_token_costs_nothing_is_ever_drafted(num_rows, mean):
    over_none, over_best, settings = contest(cpu, num_rows, mean=mean, steps=100)
    assert over_none == pytest.approx(1) and over_best == pytest.approx(1)
    assert set(settings) == {(0, 0)}


@pytest.mark.parametrize("place", [0.00027, 0.00055])
@pytest.mark.parametrize("mean, later", [(0.75, 0.1), (0.1, 0.75)])
def test_it_follows_a_drafter_that_changes(place, mean, later):
    over_none, over_best, settings = contest(h100(place), 64, mean=mean, later=later)
    assert over_none > 1.2
    assert over_best > 0.97
    # Deep drafts while they are good, none or one place while they are not.
    deepest = max(settings[40:150]), max(settings[-40:])
    assert max(deepest)[1] >= 3 and min(deepest)[1] <= 2


def test_a_bad_drafter_costs_next_to_nothing():
    """With 1 ms a place and drafts that never stand, C = 0 is found, and trials stay rare."""
    over_none, _, settings = contest(h100(0.001), 64, mean=0.02, spread=0.0, steps=400)
    assert over_none > 0.985
    assert settings.count((0, 0)) > 370


@pytest.mark.parametrize(
    "cost, num_rows, mean, spread, texts, over_none",
    [
        (h100(0.00027), 64, 0.6, 0.15, (40, 250), 1.3),
        (h100(0.00027), 64, 0.55, 0.15, (128, 129), 1.05),
        (h100(0.00027), 64, 0.4, 0.3, (40, 250), 1.1),
        (many_rows, 128, 0.55, 0.15, (128, 129), 0.98),
        (many_rows, 128, 0.55, 0.3, (40, 250), 0.98),
        (few_rows, 16, 0.5, 0.15, (40, 250), 1.3),
        (few_rows, 16, 0.3, 0.15, (128, 129), 0.98),
        (few_rows, 1, 0.4, 0.15, (128, 129), 1.2),
    ],
)
def test_a_batch_that_empties(cost, num_rows, mean, spread, texts, over_none):
    """Rows that end are not replaced and a step costs the same: whole batches, one call after the other."""
    controller = CapacityController(num_rows, table(cost, num_rows), DEPTH)
    lengths = torch.randint(*texts, (4, num_rows), generator=torch.Generator().manual_seed(5))
    ratios = [(num_rows, 1), (3 * num_rows // 2, 2), (2 * num_rows, 2), (3 * num_rows, 3), (4 * num_rows, 4)]
    ours, fixed = 0.0, dict.fromkeys([(0, 0), *ratios], 0.0)
    for call, left in enumerate(lengths):
        world = World(num_rows, mean, steps=250, spread=spread, seed=call)
        ours += float(left.sum()) / decode(world, cost, controller, left, seed=call)[0]
        for setting in fixed:
            fixed[setting] += float(left.sum()) / decode(world, cost, setting, left)[0]
    assert fixed[0, 0] / ours > over_none
    assert min(fixed.values()) / ours > 0.97


def test_a_table_that_is_wrong_is_corrected_by_what_steps_take():
    """The setting that it begins with takes 1.3 times what was timed: it is left for another."""
    world = World(16, 0.75)

    def true(num_rows, capacity, depth):
        return few_rows(num_rows, capacity, depth) * (1.3 if (capacity, depth) == (48, 3) else 1.0)

    controller = CapacityController(16, table(few_rows, 16), DEPTH)
    fixed = constants(world, true, controller.settings)
    speed, settings = decode(world, true, controller)
    assert settings[0] == (48, 3) != settings[-1]
    assert speed / max(fixed.values()) > 0.95


def test_what_was_learned_is_there_in_the_next_call():
    controller = CapacityController(64, table(h100(0.00027), 64), DEPTH)
    decode(World(64, 0.75, steps=60), h100(0.00027), controller)
    learned = controller.setting
    assert learned[1] >= 3
    assert controller.begin() == learned
    controller.reset()
    fresh = CapacityController(64, controller.table, DEPTH)
    assert controller.begin() == fresh.begin()
    assert torch.equal(controller.gains, fresh.gains)


def test_a_call_begins_with_a_trial_once_it_has_been_earned():
    controller = CapacityController(64, table(h100(0.0005), 64), DEPTH)
    world, everyone = World(64, 0.02, spread=0.0, steps=40), torch.ones(64, dtype=torch.bool)
    setting, number = controller.begin(), 0
    while setting != (0, 0):
        controller.observe(world.step(number, *setting, everyone)[0])
        setting, number = controller.decide(), number + 1
    assert controller.begin() == (0, 0), "nothing has been earned yet"
    for _ in range(3):  # of 16 steps each, fewer than it takes within a call
        assert controller.decide() == (0, 0)
    assert controller.begin() != (0, 0), "48 steps have paid for a trial"
    controller.observe(world.step(number, *controller.setting, everyone)[0])
    assert controller.decide() == (0, 0)
    assert controller.begin() == (0, 0), "the next trial has to be earned"


def test_steps_of_ended_rows_and_steps_without_drafts_teach_nothing():
    """A capture runs on ended rows; it must leave no trace."""
    world, none = World(7, 0.6, steps=4), torch.zeros(7, dtype=torch.bool)
    controller = CapacityController(7, table(few_rows, 7), DEPTH)
    for learns in (False, True):
        state = [value.clone() for value in vars(controller).values() if isinstance(value, torch.Tensor)]
        state += [controller.calibration.slope.clone(), controller.calibration.shift.clone()]
        for depth in (0, 1, 3, 6):
            controller.observe(world.step(0, 5, depth, none)[0], none)
        after = [value for value in vars(controller).values() if isinstance(value, torch.Tensor)]
        after += [controller.calibration.slope, controller.calibration.shift]
        assert all(map(torch.equal, state, after))
        controller.observe(world.step(1, 5, 3, ~none)[0], ~none)
        assert not torch.equal(state[2], controller.gains) or learns


def test_state_stays_in_the_same_tensors():
    """A captured step holds their addresses."""
    world, controller = World(7, 0.6, steps=40), CapacityController(7, table(few_rows, 7), DEPTH)
    tensors = {name: value for name, value in vars(controller).items() if isinstance(value, torch.Tensor)}
    addresses = {name: value.data_ptr() for name, value in tensors.items()}
    slope, shift = controller.calibration.slope.data_ptr(), controller.calibration.shift.data_ptr()
    decode(world, few_rows, controller)
    controller.begin()
    controller.reset()
    assert {name: getattr(controller, name).data_ptr() for name in addresses} == addresses
    assert (controller.calibration.slope.data_ptr(), controller.calibration.shift.data_ptr()) == (slope, shift)


def test_thebest_sums_are_those_of_a_sorted_list():
    generator = torch.Generator().manual_seed(2)
    settings = [(0, 0), (1, 1), (4, 1), (3, 2), (9, 3), (40, 4)]
    for rows in (1, 5, 8):
        scores = torch.rand(rows, 4, generator=generator).cumprod(1).round(decimals=1)  # ties
        found = best_sums(
            scores, *(torch.tensor(column) for column in ([k for _, k in settings], [c for c, _ in settings]))
        )
        for (capacity, depth), total in zip(settings, found.tolist(), strict=True):
            ranked = sorted((float(one) for row in scores for one in row[:depth]), reverse=True)
            assert total == pytest.approx(sum(ranked[:capacity]), abs=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_chances_of_places_are_means_over_rows_and_go_on_behind_the_deepest(depth):
    generator = torch.Generator().manual_seed(depth)
    rates, rated, memory = torch.full((4,), 0.7), torch.tensor([3.0, 3, 0, 0]), 0.125
    scores = torch.rand(5, depth, generator=generator).cumprod(1)
    scores[3] = 0  # a row that has ended
    before = rates.tolist()
    deep = learn_rates(scores, rates, rated, memory)
    expected = []
    for place in range(depth):
        reached = sum(float(row[place]) for row in scores)
        tried = sum(float(row[place - 1]) if place else float(row[0] > 0) for row in scores)
        weight = max(1 / ((3, 3, 0, 0)[place] + 1), memory)
        expected.append(before[place] + weight * (reached / tried - before[place]))
    for place in range(depth, 4):
        moved = before[place] * expected[depth - 1] / before[depth - 1]
        known = place < 2
        expected.append(moved + 0.002 * (expected[depth - 1] - moved) if known else expected[depth - 1])
    assert rates.tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(deep[:, :depth], scores)
    for place in range(depth, 4):
        own = [float(row[depth - 1] / (row[depth - 2] if depth > 1 else 1)) if row[0] > 0 else 0.0 for row in scores]
        last = deep[:, place - 1].tolist()
        share = expected[place] * sum(last) / sum(a * b for a, b in zip(last, own, strict=True))
        assert deep[:, place].tolist() == pytest.approx(
            [a * min(1, b * share) for a, b in zip(last, own, strict=True)], abs=1e-5
        )


def test_gains_are_what_calibrated_drafts_promise():
    """Drafts that claim .5 and stand at .8: after a while, the gain of every setting is that of .8."""
    controller = CapacityController(6, table(few_rows, 6), DEPTH)
    generator, estimates = torch.Generator().manual_seed(0), torch.full((6, 3), 0.5)
    for _ in range(250):
        draft = Draft(torch.zeros(6, 3, dtype=torch.long), torch.full((6,), 3), estimates, estimates)
        accepted = (torch.rand(6, 3, generator=generator) < 0.8).long().cumprod(1).sum(1)
        controller.observe(Verification(torch.arange(6), draft, draft.lengths, accepted, None, torch.arange(6)))
    for setting, gain in zip(controller.settings, controller.gains.tolist(), strict=True):
        assert gain == pytest.approx(promised(*setting, 6, 0.8), rel=0.15)


def test_in_a_closed_batch_rows_count_by_their_urgency():
    """What a setting would have gained, by hand: the mean over rows, each as heavy as it is urgent."""
    settings = [(2, 1), (4, 1), (3, 2), (8, 2)]
    estimates = torch.rand(4, 2, generator=torch.Generator().manual_seed(1))
    rows, accepted = torch.arange(4), torch.tensor([1, 0, 2, 1])
    for remaining in ([9, 9, 9, 9], [9, 5, 8, 1], [500, 20, 20, 20]):
        controller = CapacityController(4, table(few_rows, 4), 2, settings)
        known = torch.tensor(remaining)
        draft = Draft(torch.zeros(4, 2, dtype=torch.long), torch.full((4,), 2), estimates, estimates, remaining=known)
        scores = controller.calibration.prefix_scores(draft).tolist()
        controller.observe(Verification(rows, draft, draft.lengths, accepted, None, rows))
        urgency = [max(2.718281828 ** ((one - max(remaining)) / 2), 1e-20) for one in remaining]
        trust = (4 + 2) / (sum(map(sum, scores)) + 2)
        for setting, gain in zip(controller.settings, controller.gains.tolist(), strict=True):
            capacity, depth = setting
            ranked = sorted((score * u for row, u in zip(scores, urgency, strict=True) for score in row[:depth]))
            promised = sum(ranked[::-1][:capacity]) * trust / sum(urgency)
            assert gain == pytest.approx(min(promised, capacity / sum(urgency), depth), rel=1e-4), setting


def test_what_a_closed_batch_ends_with_does_not_decide_how_the_next_one_begins():
    """Its last rows are its slowest: what was seen while most rows lived counts, good or bad."""
    good, bad = [promised(*one, 64, 0.8) for one in candidates(64, 4)], [0.0] * len(candidates(64, 4))
    for early, late in ((good, bad), (bad, good)):
        controller = CapacityController(64, table(h100(0.00027), 64), 4)
        controller.begin(closed=True)
        for live, gains in ((64, early), (60, early), (4, late), (3, late)):
            known = torch.tensor([0.0, *gains])
            remaining = torch.tensor([50] * live + [0] * (64 - live))
            controller.follow_rows(torch.full((64,), 24), torch.full((64,), 16), remaining, known)
            setting = controller.decide(None, known)
        if early is good:
            assert setting == (0, 0)
        begun = controller.begin(closed=True)
        if early is bad:
            assert begun == (0, 0) or controller._trying
        else:
            assert begun != (0, 0) and not controller._trying
            assert controller.gains.tolist() == pytest.approx([0.0, *good])


def test_the_less_is_left_of_a_closed_batch_the_less_drafts_are_worth():
    """Gains that are worth it over a whole batch are not over the rest of one whose rows stand side by side."""
    known = torch.tensor([0.0, *(promised(*one, 64, 0.45) for one in candidates(64, 4))])
    chosen = []
    for left in (2000, 1000, 200, 40, 20):
        controller = CapacityController(64, table(h100(0.00027), 64), 4)
        controller.begin(closed=True, longest=2000)
        controller.setting = (0, 0)
        controller.follow_rows(torch.full((64,), 16), torch.full((64,), 16), torch.full((64,), left))
        controller.setting = controller.settings[1]
        chosen.append(controller._best(known.tolist()) != (0, 0))
    assert chosen[0] and not chosen[-1] and chosen == sorted(chosen, reverse=True)


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"num_rows": 0}, "`num_rows` must be at least 1, got 0"),
        ({"max_depth": 0}, "`max_depth` must be at least 1, got 0"),
        ({"settings": [(4, 7)]}, r"K from 1 to 6, got \(4, 7\)"),
        ({"settings": [(0, 2)]}, r"C at least 1.*got \(0, 2\)"),
    ],
)
def test_bad_arguments_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        CapacityController(**{"num_rows": 4, "table": table(few_rows, 4), **bad})
