"""What `throughput.py` measured, as tables and as plots: ratios over stock, over C = 0 and over the best fixed window.

Knows records, as they stand in the JSON lines. Measures nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from measurement import Record
from settings import CONTENDERS, STOCK


RATIOS = ("over_stock", "over_c0", "over_fixed")
# Head, key of the record, width and digits. A step's time is that of the whole call, prompts included, over its steps;
# memory is the most that was allocated after the warm-up, above the weights; "first" are the warm-up's seconds.
COLUMNS = (
    ("K", "K", 2, 0),
    ("C", "C", 4, 0),
    ("tok/s", "tokens_per_second", 8, 1),
    ("min", "tokens_per_second_min", 8, 1),
    ("max", "tokens_per_second_max", 8, 1),
    ("ms/step", "ms_per_step", 8, 2),
    ("tok/step", "mean_accepted", 8, 2),
    ("VSR", "vsr", 5, 2),
    ("TER", "ter", 5, 2),
    ("GiB", "peak_gib_over_weights", 6, 2),
    ("first", "warm_up_seconds", 6, 1),
    ("/stock", "over_stock", 6, 2),
    ("/C=0", "over_c0", 6, 2),
    ("/fixed", "over_fixed", 6, 2),
)


def read_runs(path: Path) -> list[list[Record]]:
    """The records of a file, one list for each run of the benchmark, in the order of the file."""
    runs: dict[str, list[Record]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        runs.setdefault(json.dumps(record["run"], sort_keys=True), []).append(record)
    return list(runs.values())


def with_ratios(records: list[Record]) -> list[Record]:
    """
    Records of one batch size of one run, with three speed-ups each, `None` where there is nothing to compare with:
    `over_stock` over the fastest stock contender, `over_c0` over this library without drafts, and `over_fixed` over
    the fastest fixed window of the same drafter.
    """

    def fastest(contenders: tuple[str, ...], drafter: str | None = None) -> float | None:
        return max(
            (
                record["tokens_per_second"]
                for record in records
                if "error" not in record
                and record["contender"] in contenders
                and (drafter is None or record["drafter"] == drafter)
            ),
            default=None,
        )

    compared = []
    for record in records:
        drafter = record["drafter"]
        fixed = fastest(("fixed",), drafter) if drafter and record["contender"] not in STOCK else None
        rivals = (fastest(STOCK), fastest(("c0",)), fixed)
        speed = record.get("tokens_per_second")
        ratios = {name: speed / rival if speed and rival else None for name, rival in zip(RATIOS, rivals, strict=True)}
        compared.append({**record, **ratios})
    return compared


def table(records: list[Record]) -> str:
    """The records of one batch size of one run, a line each, with the columns of `COLUMNS`."""
    heads = [f"{head:>{width}}" for head, _, width, _ in COLUMNS]
    lines = [f"N = {records[0]['rows']}", " ".join([f"{'contender':<38} {'drafter':<8}", *heads])]
    for record in with_ratios(records):
        name = f"{CONTENDERS[record['contender']]:<38} {record['drafter'] or '-':<8}"
        columns = COLUMNS[:2] if "error" in record else COLUMNS
        cells = [_shown(record[key], width, digits) for _, key, width, digits in columns]
        cells += [f"failed: {record['error']}"] if "error" in record else []
        lines.append(" ".join([name, *cells]))
    return "\n".join(lines)


def _shown(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def by_batch_size(records: list[Record]) -> dict[int, list[Record]]:
    """The records of one run by N."""
    sizes: dict[int, list[Record]] = {}
    for record in records:
        sizes.setdefault(record["rows"], []).append(record)
    return sizes


def best_lines(records: list[Record], value: str) -> dict[str, dict[int, float]]:
    """
    For every contender and drafter of one run, `value` of its fastest setting at every N.

    Args:
        records (`list[Record]`): Of one run.
        value (`str`): `"tokens_per_second"` or one of `RATIOS`.
    """
    lines: dict[str, dict[int, float]] = {}
    for num_rows, some in by_batch_size(records).items():
        measured = [record for record in with_ratios(some) if "error" not in record]
        for record in sorted(measured, key=lambda record: record["tokens_per_second"]):  # the fastest comes last
            if record[value] is not None:
                name = ", ".join(filter(None, [CONTENDERS[record["contender"]], record["drafter"]]))
                lines.setdefault(name, {})[num_rows] = record[value]
    return lines


def plot(path: Path, folder: Path) -> list[Path]:
    """
    Draw every run of a file: tokens per second and the three ratios over the batch size.

    Args:
        path (`Path`): JSON lines of the benchmark.
        folder (`Path`): Where the PNGs go; made if it is missing.

    Returns:
        `list[Path]`: The PNGs.

    Raises:
        `SystemExit`: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib, which is missing. Run `pip install matplotlib`.") from None
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for number, records in enumerate(read_runs(path)):
        run = records[0]["run"]
        figure = Figure(figsize=(14, 9), layout="constrained")
        figure.suptitle(
            f"{run['target']}, {run['parameters'] / 1e9:.2f} B, {run['dtype']}, {run['mode']}, {run['card']}"
        )
        values = ("tokens_per_second", *RATIOS)
        titles = ("tokens per second", "over the best stock", "over ours with C = 0", "over the best fixed window")
        colors = {name: f"C{place}" for place, name in enumerate(sorted(best_lines(records, values[0])))}
        for axes, value, title in zip(figure.subplots(2, 2).flat, values, titles, strict=True):
            for name, points in best_lines(records, value).items():
                sizes = sorted(points)
                style = ":" if name.startswith("stock") else "-"
                axes.plot(sizes, [points[size] for size in sizes], style, marker="o", label=name, color=colors[name])
            axes.set(title=title, xlabel="N, rows of the batch", xscale="log")
            axes.set_xticks(sorted(by_batch_size(records)), labels=map(str, sorted(by_batch_size(records))))
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            if value == "tokens_per_second":
                axes.set_yscale("log")
            else:
                axes.axhline(1, color="black", linewidth=1)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(fontsize=7)
        target = Path(run["target"]).name
        drawn.append(folder / f"throughput-{target}-{run['mode']}-{number}.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn
