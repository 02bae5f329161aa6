"""The report of `tetris-hf bench`, as text and as a plot."""

from __future__ import annotations

from typing import Any

from .errors import CommandError


def load_pyplot() -> Any:
    """
    matplotlib, without a window.

    Raises:
        `CommandError`: If it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: `pip install matplotlib`.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def print_report(report: dict[str, Any]) -> None:
    """
    Args:
        report (`dict`): What `--json` prints.
    """
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    print(
        f"{report['model']} with {', '.join(report['assistant'])}; {report['dtype']} on {report['device']}; {versions}"
    )
    print(
        f"N = {report['batch_size']} rows ({report['prompts']} prompts), up to {report['max_new_tokens']} new tokens, "
        f"median of {report['repeats']}\n"
    )
    columns = ("C", "K", "seconds", "min", "max", "tokens/s", "over plain", "over C = 0", "rows equal")
    print(f"{'':<26}" + " ".join(f"{column:>10}" for column in columns))
    for one in report["contenders"]:
        cells = (
            _cell(one["capacity"]),
            _cell(one["depth"]),
            f"{one['seconds']:.2f}",
            f"{one['seconds_min']:.2f}",
            f"{one['seconds_max']:.2f}",
            f"{one['tokens_per_second']:.1f}",
            f"{one['over_plain']:.2f}",
            f"{one['over_c0']:.2f}",
            _cell(one["rows_equal_to_plain"]),
        )
        print(f"{one['name']:<26}" + " ".join(f"{cell:>10}" for cell in cells))
    rates = "  ".join(f"{place}: {_cell(rate)}" for place, rate in enumerate(report["acceptance"], start=1))
    even = report["break_even_acceptance"]
    print(
        f"\nacceptance by draft position    {rates}\n"
        f"drafting                        {report['draft_share']:.0%} of a step ({report['fastest_with_drafts']})\n"
        f"a step costs                    {_cell(report['step_cost_over_c0'])} times one without drafts\n"
        f"and gives a row                 {_cell(report['tokens_per_step'])} tokens; the slowest row, which the batch "
        f"waits for, needed {report['step_reduction']:.3f} times fewer steps\n"
        f"break-even acceptance           {'out of reach' if even is None else _cell(even)} for every draft token, "
        f"measured {_cell(report['mean_acceptance'])}\n"
        f"\n{verdict(report)}"
    )


def verdict(report: dict[str, Any]) -> str:
    """The last lines: whether drafts pay, and what to use."""
    best = report["suggestion"]
    drafting = next(one for one in report["contenders"] if one["name"] == report["fastest_with_drafts"])
    speeds = f"{drafting['over_plain']:.2f} times plain generate, {drafting['over_c0']:.2f} times C = 0"
    noise = f" (within the noise of {best['within_noise_of']})" if best["within_noise_of"] else ""
    if best["capacity"] is None:
        return f"Drafts do not pay here: {speeds}.\nUse plain generate{noise}."
    if best["capacity"] == 0:
        return f"Drafts do not pay here: {speeds}.\nUse --capacity 0{noise}."
    sizes = f"--capacity {best['capacity']}"
    if best["num_assistant_tokens"] is not None:
        sizes += f" --num-assistant-tokens {best['num_assistant_tokens']}"
    return f"Drafts pay here: {speeds}.\nUse {sizes}{noise}."


def draw(report: dict[str, Any], file: str) -> None:
    """
    Draw speeds, acceptance by draft position, and what each C promises.

    Args:
        report (`dict`): What `--json` prints.
        file (`str`): Where the picture goes.
    """
    pyplot = load_pyplot()
    figure, (speeds, acceptance, promise) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    names = [one["name"] for one in report["contenders"]]
    speeds.barh(names, [one["tokens_per_second"] for one in report["contenders"]])
    speeds.invert_yaxis()
    speeds.set_xlabel("tokens per second")
    rates = [float("nan") if rate is None else rate for rate in report["acceptance"]]
    places = range(1, len(rates) + 1)
    acceptance.bar(places, rates)
    if (even := report["break_even_acceptance"]) is not None:
        acceptance.plot(places, [even**place for place in places], "k--", label="break-even")
        acceptance.legend()
    acceptance.set(xlabel="draft position", ylabel="it and all before it accepted", ylim=(0, 1), xticks=list(places))
    for depth in sorted({estimate["depth"] for estimate in report["estimates"]}):
        chosen = sorted((one["capacity"], one["gain"]) for one in report["estimates"] if one["depth"] == depth)
        promise.plot(*zip(*chosen, strict=True), marker="o", label=f"K = {depth}")
    promise.axhline(1.0, color="black", linestyle="--")
    promise.set(xlabel="C", ylabel="estimated speed over C = 0")
    promise.xaxis.get_major_locator().set_params(integer=True)
    promise.legend()
    figure.suptitle(f"{report['model']}, N = {report['batch_size']}, {report['dtype']} on {report['device']}")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _cell(value: float | int | str | None) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
