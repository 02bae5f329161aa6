"""Generate for a batch with Medusa heads, and see whether each head pays at this batch size.

    python examples/medusa_generate.py                          # SmolLM2-135M-Instruct with the heads shipped with it
    python examples/medusa_generate.py --target FOLDER --heads FOLDER --batch_size 16 --device cuda --dtype bfloat16

Prints every row's text, how often each head was right, and for each head whether the tokens it adds are worth the time
that it costs.
"""

import argparse
import textwrap
import time
from pathlib import Path

import torch
from demo import PROMPTS, as_chat, load
from transformers.utils import logging

import tetris_hf
from tetris_hf.models import MedusaHeads


HEADS = Path(__file__).parent.parent / "assets" / "smollm2-135m-medusa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="hub id or folder (default: bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", default=HEADS, help="hub id or folder (default: those shipped for that target)")
    parser.add_argument("--prompts", type=Path, help="text file with a prompt in each line")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    logging.set_verbosity_error()

    target, tokenizer = load(args.target, args.device, getattr(torch, args.dtype))
    heads = MedusaHeads.from_pretrained(args.heads).to(args.device)
    prompts = args.prompts.read_text(encoding="utf-8").splitlines() if args.prompts else list(PROMPTS)
    prompts = prompts[: args.batch_size]
    texts = as_chat(tokenizer, prompts)
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(args.device)
    settings = {"do_sample": False}
    if args.temperature:
        settings = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}

    tetris_hf.enable()

    def run(depth: int) -> tuple[tetris_hf.TetrisDecoderOnlyOutput, float]:
        """Output, and seconds a step, when the first `depth` heads draft and everything is verified."""
        torch.manual_seed(0)
        start = time.perf_counter()
        output = target.generate(
            **batch,
            **settings,
            max_new_tokens=args.max_new_tokens,
            return_dict_in_generate=True,
            assistant_model=heads,
            tetris_capacity=depth * len(prompts),
            num_assistant_tokens=max(1, depth),
        )
        seconds = time.perf_counter() - start - output.tetris_stats.seconds["prefill"]
        return output, seconds / max(1, output.tetris_stats.steps)

    num_heads = heads.config.medusa_num_heads
    run(num_heads)  # warm-up
    runs = [run(depth) for depth in range(num_heads + 1)]
    output = runs[-1][0]
    for row, prompt in enumerate(prompts):
        text = tokenizer.decode(output.sequences[row, batch.input_ids.shape[1] :], skip_special_tokens=True).strip()
        print(f"\n[{row}] {prompt}\n{textwrap.indent(text, '    ')}")

    print(f"\n{len(prompts)} rows: {output.tetris_stats}")
    print_verdict([(out.tetris_stats, seconds) for out, seconds in runs])


def print_verdict(runs: list[tuple[tetris_hf.TetrisStats, float]]) -> None:
    """
    What each head adds and costs. A head pays if the step with it brings enough tokens for its time: more than the
    best step with fewer heads would bring in that time.
    """
    columns = ("heads", "right", "ms a step", "tokens a step", "break-even", "tokens/s a row")
    print("\n" + " ".join(f"{column:>14}" for column in columns))
    best = 0.0
    for depth, (stats, seconds) in enumerate(runs):
        # Of the steps in which all heads before it were right, those in which the last one was too.
        right, break_even, verdict = "", "", ""
        if depth:
            reached = stats.accepted[:, depth - 2].sum() if depth > 1 else stats.verified[:, 0].sum()
            right = f"{float(stats.accepted[:, depth - 1].sum()) / max(1, int(reached)):.3f}"
            break_even = f"{best * seconds:.3f}"
            verdict = f"head {depth} {'pays' if stats.mean_accepted > best * seconds else 'does not pay'}"
        rate = stats.mean_accepted / seconds
        best = max(best, rate)
        cells = (f"{depth}", right, f"{seconds * 1000:.1f}", f"{stats.mean_accepted:.3f}", break_even, f"{rate:.1f}")
        print(" ".join(f"{cell:>14}" for cell in cells) + f"  {verdict}")
    rates = [stats.mean_accepted / seconds for stats, seconds in runs]
    print(f"\nFastest at this batch size: {rates.index(max(rates))} of {len(runs) - 1} heads.")


if __name__ == "__main__":
    main()
