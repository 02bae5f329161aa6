#!/usr/bin/env python3
"""How often drafts stand, by drafter, and what selection makes of it: VSR, TER and tokens per step at equal capacity.

    python benchmarks/drafters.py --prompts spec_bench.jsonl --device cuda --dtype bfloat16

Prompts are Spec-Bench's (JSON lines with `category` and `turns`), the first `--per-family` of each of its six
families, greedy, in one batch. Counts do not depend on the machine. Tokens per second are those of the eager engine
with its host waits, of one run each, and only for comparison within one call. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import transformers  # noqa: E402
from demo import as_chat, load  # noqa: E402

import tetris_hf  # noqa: E402
from tetris_hf.audit import first_differences  # noqa: E402


FAMILIES = ("translation", "summarization", "qa", "math_reasoning", "rag")  # all other categories: conversation


def families(path: Path, per_family: int, max_characters: int) -> dict[str, list[str]]:
    """First turns by family, in the order of the file; of the eight conversation categories equally many each."""
    by_category: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if len(record["turns"][0]) <= max_characters:
            by_category.setdefault(record["category"], []).append(record["turns"][0])
    chosen = {name: by_category.pop(name, [])[:per_family] for name in FAMILIES}
    talks = list(by_category.values())
    chosen["conversation"] = [text for talk in talks for text in talk[: -(-per_family // len(talks))]][:per_family]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", help="hub id or folder (default: bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--per-family", type=int, default=16)
    parser.add_argument("--max-characters", type=int, default=4000, help="longer prompts are left out")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--depth", type=int, nargs="+", default=[4], help="K")
    parser.add_argument("--window", type=int, nargs="+", default=[1, 2, 3], help="C / N")
    parser.add_argument("--drafters", nargs="+", default=["medusa", "shallow", "lookup", "lookup + shallow"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()

    model, tokenizer = load(args.model, args.device, getattr(torch, args.dtype))
    chosen = families(args.prompts, args.per_family, args.max_characters)
    family_of = [name for name, texts in chosen.items() for _ in texts]
    texts = as_chat(tokenizer, [text for some in chosen.values() for text in some])
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(args.device)
    rows = len(texts)
    drafters = {
        "medusa": tetris_hf.MedusaHeads.from_pretrained(ROOT / "assets" / "smollm2-135m-medusa").to(model.device),
        "shallow": tetris_hf.ShallowAssistant.from_pretrained(ROOT / "assets" / "smollm2-135m-shallow", target=model),
        "lookup": tetris_hf.PromptLookupDrafter(),
    }
    drafters["lookup + shallow"] = [tetris_hf.PromptLookupDrafter(), drafters["shallow"]]
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    card = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{card}, {args.dtype}, torch {torch.__version__}, transformers {transformers.__version__}, {rows} rows")

    def run(**kwargs):
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        start = time.perf_counter()
        out = model.generate(**batch, **settings, **kwargs)
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()
        return out, time.perf_counter() - start

    tetris_hf.enable()
    run(tetris_capacity=0)
    plain, plain_seconds = run()
    base, base_seconds = run(tetris_capacity=0)
    tokens = int(base.tetris_stats.bonus.sum()) + rows
    results = [{"drafter": "none", "tokens_per_second": tokens / base_seconds}]
    print(f"plain generate {tokens / plain_seconds:.0f} tok/s, C = 0 {tokens / base_seconds:.0f} tok/s", flush=True)
    print("          drafter  K C/N selector    VSR    TER tok/step   tok/s acceptance")
    for name, drafter in ((name, drafters[name]) for name in args.drafters):
        for depth in args.depth:
            for window in args.window:
                for selector in ("fixed", "tetris"):
                    chosen_selector = (
                        tetris_hf.FixedWindowSelector(window) if selector == "fixed" else tetris_hf.TetrisSelector()
                    )
                    out, seconds = run(
                        assistant_model=drafter,
                        tetris_capacity=window * rows,
                        num_assistant_tokens=depth,
                        tetris_selector=chosen_selector,
                    )
                    stats = out.tetris_stats
                    per_family = {
                        family: float((stats.accepted.sum(1) + stats.bonus)[here].sum() / stats.live_steps[here].sum())
                        for family in chosen
                        for here in [torch.tensor([f == family for f in family_of], device=stats.bonus.device)]
                    }
                    differences = first_differences(model, out.sequences, plain.sequences, batch["attention_mask"])
                    results.append(
                        {
                            "drafter": name, "depth": depth, "window": window, "selector": selector, "vsr": stats.vsr,
                            "ter": stats.ter, "tokens_per_step": stats.mean_accepted, "by_family": per_family,
                            "acceptance": stats.acceptance.tolist(), "tokens_per_second": tokens / seconds,
                            "rows_differing": len(differences),
                            "largest_gap": max((d.gap for d in differences), default=0),
                            "steps": stats.steps, "target_tokens": stats.target_tokens,
                        }
                    )  # fmt: skip
                    print(
                        f"{name:>17} {depth:>2} {window:>3} {selector:>8} {stats.vsr:>6.3f} {stats.ter:>6.3f} "
                        f"{stats.mean_accepted:>8.3f} {tokens / seconds:>7.0f} "
                        f"{[round(a, 3) for a in stats.acceptance.tolist()]} "
                        f"differs {len(differences)} gap {results[-1]['largest_gap']:.3f}",
                        flush=True,
                    )
    print(json.dumps({"card": card, "dtype": args.dtype, "rows": rows, "tokens": tokens, "results": results}))


if __name__ == "__main__":
    main()
