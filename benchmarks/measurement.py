"""One setting of `throughput.py`, warmed up and timed: speed, counts and memory as one record.

Knows the clock and the device. Does not know what else is measured.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from typing import Any

import torch
from contenders import Bench
from settings import Setting

import tetris_hf


GIB = 2**30
PEAKS = ("peak_gib_over_weights", "peak_reserved_gib_over_weights")
Record = dict[str, Any]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def seconds_of(call: Any, device: torch.device) -> tuple[Any, float]:
    """What `call()` returned and how long it took, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    output = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return output, time.perf_counter() - start


def peaks(device: torch.device, weights: int) -> dict[str, float]:
    """
    The most memory since the last reset, above the weights: what was allocated, and what was reserved, where the
    memory of captured graphs is also counted while they do not run.
    """
    most = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return {name: (size - weights) / GIB for name, size in zip(PEAKS, most, strict=True)}


def measure(
    bench: Bench, setting: Setting, repeats: int, weights: int, reference: list[list[int]] | None
) -> tuple[Record, list[list[int]]]:
    """
    One setting, warmed up and timed.

    Args:
        bench (`Bench`): Target and prompts.
        setting (`Setting`): What to run.
        repeats (`int`): Timed calls.
        weights (`int`): Bytes on the device before anything was generated.
        reference (`list[list[int]]`, *optional*): Text of stock `generate`, to count the rows that equal it.

    Returns:
        `tuple[Record, list[list[int]]]`: What was measured, and the text of each row.
    """
    device = bench.model.device
    on_gpu = device.type == "cuda"
    ends = bench.model.generation_config.eos_token_id
    ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    tetris_hf.release_graphs()  # every setting pays for its own graphs, in its first call and in memory
    memory: Record = dict.fromkeys(("gib_held_before", *PEAKS, *(f"warm_up_{peak}" for peak in PEAKS)))
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        memory["gib_held_before"] = (torch.cuda.memory_allocated(device) - weights) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    seconds, tokens, steps, outputs = [], [], [], []
    with bench.opened(setting) as call:
        torch.manual_seed(0)
        warm_up = seconds_of(call, device)[1]
        if on_gpu:
            memory |= {f"warm_up_{name}": gib for name, gib in peaks(device, weights).items()}
            torch.cuda.reset_peak_memory_stats(device)
        for repeat in range(repeats):
            torch.manual_seed(repeat)
            output, taken = seconds_of(call, device)
            outputs.append(output)
            seconds.append(taken)
            steps.append(output.steps())
            texts = output.texts(ends)
            tokens.append(sum(map(len, texts)))
        if on_gpu:
            memory |= peaks(device, weights)
    speeds = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
    record: Record = {
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_min": min(speeds),
        "tokens_per_second_max": max(speeds),
        "seconds": seconds,
        "tokens": tokens,
        "steps": steps[0],
        "ms_per_step": statistics.median(1e3 * s / n for s, n in zip(seconds, steps, strict=True))
        if steps[0]
        else None,
        "prompts": len(texts),
        "warm_up_seconds": warm_up,
        **memory,
        "rows_equal_to_dynamic": sum(a == b for a, b in zip(texts, reference, strict=False)) if reference else None,
    }
    stats = outputs[-1].merged_stats()
    for name in ("mean_accepted", "vsr", "ter", "target_tokens", "draft_forwards"):
        value = getattr(stats, name, None)
        record[name] = None if value is None or math.isnan(value) else value
    chosen = stats.settings if stats else {}
    record["settings"] = {f"C={capacity}, K={depth}": steps for (capacity, depth), steps in chosen.items()} or None
    record["acceptance"] = [None if math.isnan(a) else a for a in stats.acceptance.tolist()] if stats else None
    record["host_seconds"] = dict(stats.seconds) if stats else None
    record["step_seconds"] = dict(stats.step_seconds) if stats else None
    return record, texts
