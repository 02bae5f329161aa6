"""`tetris-hf bench`: does speculation pay here, with this target, this assistant, this batch and this machine?"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from typing import Any

import torch
import transformers
from tqdm import tqdm

import tetris_hf

from . import options
from .bench_report import draw, load_pyplot, print_report
from .cost import CostModel, StepCost, acceptance_for, estimates
from .errors import CommandError
from .measuring import Bench, Contender


DESCRIPTION = """\
Times plain `generate` against this library without drafts (C = 0) and with drafts, on one batch of N prompts, in one
process, taking turns; reports the median of --repeats. Prints whether drafts pay, what part of a step drafting takes,
the acceptance by draft position, the acceptance at which drafts would break even, and the C and K to use.

C and K are chosen from one recorded run: what selection would have taken of its drafts, and what such a step costs.
The choice is then measured like everything else.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "bench",
        help="measure whether drafts pay on this machine, and with which C and K",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_prompts(parser)
    options.add_models(parser)
    options.add_decoding(parser, batch_size=8, max_new_tokens=64)
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--capacity",
        type=_drafting_capacity,
        metavar="C",
        help="measure this C as well, or `auto`, which chooses as it goes",
    )
    group.add_argument(
        "--num-assistant-tokens", type=options.positive, metavar="K", help="the deepest K to consider (default: 4)"
    )
    group.add_argument("--repeats", type=options.positive, default=3, metavar="R", help="timed calls (default: 3)")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    group.add_argument("--plot", metavar="FILE", help="draw speeds and acceptance (needs matplotlib)")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    options.add_debugging(parser)
    parser.set_defaults(run=run)


def _drafting_capacity(text: str) -> int | str:
    """C: an integer of at least 1, or `auto`. C = 0 is measured anyway."""
    return text if text == "auto" else options.positive(text)


def run(args: argparse.Namespace) -> None:
    """
    Measure and report.

    Raises:
        `CommandError`: If what was asked cannot be done.
    """
    if not args.assistant:
        raise CommandError("there is nothing to compare without drafts: add --assistant NAME.")
    if args.plot:
        load_pyplot()  # better now than after the measurement
    bench = Bench(args)
    plain = Contender("plain generate", {})
    without = Contender("ours, C = 0", {"tetris_capacity": 0}, capacity=0)
    everything = bench.speculative("ours, all drafts verified", bench.depth * args.batch_size, bench.depth)
    with tqdm(total=1, unit="call", disable=args.quiet, file=sys.stderr) as bar:
        bar.total = 2 * (1 + args.repeats) + 1
        bench.measure([without, everything], bar)
        outcomes = bench.outcomes()
        bar.update()
        stats, num_steps = everything.stats, max(everything.stats.steps, 1)
        costs = CostModel.fit(
            StepCost.of(without.stats),
            StepCost.of(stats),
            bench.depth,
            verified=float(stats.verified.sum()) / num_steps,
        )
        promising = estimates(outcomes, costs, args.batch_size, bench.depth)
        best = promising[0]
        contenders = [plain, without]
        if args.capacity is not None:
            depth = args.num_assistant_tokens if args.capacity == "auto" else bench.depth
            contenders.append(bench.speculative("ours, as asked", args.capacity, depth))
        if args.capacity is None or (best.capacity, best.depth) != (args.capacity, bench.depth):
            contenders.append(bench.speculative("ours, as suggested", best.capacity, best.depth))
        bar.total += len(contenders) * (1 + args.repeats)
        bench.measure(contenders, bar)
    report = _report(bench, [*contenders, everything], promising, costs)
    if args.json:
        print(json.dumps(report))
    else:
        print_report(report)
    if args.plot:
        draw(report, args.plot)


def _report(bench: Bench, contenders: list[Contender], promising: list[Any], costs: CostModel) -> dict[str, Any]:
    """Everything as plain numbers: what `--json` prints, and what the report and the plot are made from."""
    plain, without, *drafting = contenders
    measured = [_measured(bench, contender, plain, without) for contender in contenders]
    speed_of = dict(zip((contender.name for contender in contenders), measured, strict=True))
    fastest = max(drafting, key=lambda contender: speed_of[contender.name]["tokens_per_second"])
    stats, cost = fastest.stats, StepCost.of(fastest.stats)
    needed = cost.total / costs.base if costs.base else math.nan
    verified = float(stats.verified.sum()) / max(1, int(stats.live_steps.sum()))
    every = contenders[-1].stats  # the run in which all drafts are verified says most about acceptance
    model = bench.model
    return {
        "versions": {name.__name__: name.__version__ for name in (tetris_hf, torch, transformers)},
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "model": bench.args.model,
        "assistant": bench.args.assistant,
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch_size": bench.args.batch_size,
        "prompts": bench.num_prompts,
        "max_new_tokens": bench.args.max_new_tokens,
        "repeats": bench.args.repeats,
        "contenders": measured,
        "fastest_with_drafts": fastest.name,
        "draft_share": cost.draft_share,
        "acceptance": [_finite(rate) for rate in every.acceptance.tolist()],
        "tokens_per_step": _finite(stats.mean_accepted),
        "step_cost_over_c0": _finite(needed),
        "step_reduction": without.stats.steps / max(1, stats.steps),
        "break_even_acceptance": acceptance_for(needed, verified),
        "mean_acceptance": acceptance_for(stats.mean_accepted, verified),
        "seconds_of_a_step": {"base": costs.base, "per_place": costs.per_place, "per_verified": costs.per_token},
        "estimates": [vars(estimate) for estimate in promising],
        "suggestion": _suggestion(speed_of, plain, without, fastest),
    }


def _measured(bench: Bench, contender: Contender, plain: Contender, without: Contender) -> dict[str, Any]:
    tokens = sum(bench.lengths(contender))
    middle = statistics.median(contender.seconds)
    its, reference = contender.output.sequences, plain.output.sequences
    width = max(its.shape[1], reference.shape[1])
    pad = bench.model.generation_config.pad_token_id
    its, reference = (
        torch.nn.functional.pad(sequences, (0, width - sequences.shape[1]), value=pad)
        for sequences in (its, reference)
    )
    return {
        "name": contender.name,
        "capacity": contender.capacity,
        "depth": contender.depth,
        "seconds": middle,
        "seconds_min": min(contender.seconds),
        "seconds_max": max(contender.seconds),
        "warm_up_seconds": contender.warm_up_seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / middle,
        "over_plain": statistics.median(plain.seconds) / middle * tokens / sum(bench.lengths(plain)),
        "over_c0": statistics.median(without.seconds) / middle * tokens / sum(bench.lengths(without)),
        "rows_equal_to_plain": int((its == reference).all(1).sum()) if not bench.args.do_sample else None,
    }


def _suggestion(speeds: dict[str, Any], plain: Contender, without: Contender, fastest: Contender) -> dict[str, Any]:
    """Which way to decode: the fastest one that was measured."""
    best = max((plain, without, fastest), key=lambda contender: speeds[contender.name]["tokens_per_second"])
    second = max(
        (contender for contender in (plain, without, fastest) if contender is not best),
        key=lambda contender: speeds[contender.name]["tokens_per_second"],
    )
    return {
        "use": best.name,
        "capacity": best.capacity,
        "num_assistant_tokens": best.depth,
        "within_noise_of": second.name if min(second.seconds) < max(best.seconds) else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
