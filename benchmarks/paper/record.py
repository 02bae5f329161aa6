#!/usr/bin/env python3
"""Records what drafters propose at every place of the target's own greedy text, for `replay.py` and all figures.

    python benchmarks/paper/record.py --prompts spec_bench.jsonl --out out/traces/smollm2.safetensors --device cuda

One run of the real engine in which nothing is verified: every step adds one token, and every drafter proposes K tokens
at every place. All drafters see the same text. Texts go on after their end token, so that a draft that runs past it is
judged as the engine judges it. In half precision, the text is that of these batches.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402
from demo import KEPT_LAYERS, as_chat, load  # noqa: E402
from prompts import padded_batches  # noqa: E402
from shipped import ASSETS  # noqa: E402
from torch.nn.functional import pad  # noqa: E402

import tetris_hf  # noqa: E402
from paper.prompt_sets import SETS, SONNET, SPEC_BENCH, prompt_sets  # noqa: E402
from paper.traces import Drafted, Trace  # noqa: E402


class RecordingDrafter(tetris_hf.Drafter):
    """
    Lets several drafters propose at every place, keeps what they say and offers nothing of it for verification.

    Args:
        drafters (`dict[str, Drafter]`): Who proposes, by name.
    """

    def __init__(self, drafters: dict[str, tetris_hf.Drafter]):
        self.recorded = drafters
        self.kept: dict[str, list[tetris_hf.Draft]] = {name: [] for name in drafters}

    @property
    def needs_hidden_states(self) -> bool:
        return any(drafter.needs_hidden_states for drafter in self.recorded.values())

    @property
    def models(self) -> list[Any]:
        return [model for drafter in self.recorded.values() for model in drafter.models]

    @property
    def packed_models(self) -> list[Any]:
        return [packed for drafter in self.recorded.values() for packed in drafter.packed_models]

    def fingerprint(self) -> Hashable:
        return id(self), *(drafter.fingerprint() for drafter in self.recorded.values())

    def check(self, target: Any) -> None:
        for drafter in self.recorded.values():
            drafter.check(target)

    def begin(self, target: Any, rows: Any, vocab_size: int, processing: Any) -> None:
        for drafter in self.recorded.values():
            drafter.begin(target, rows, vocab_size, processing)

    def admit(self, rows: Any, live: torch.Tensor) -> None:
        for drafter in self.recorded.values():
            drafter.admit(rows, live)

    def propose(self, rows: Any, live: torch.Tensor, depth: int) -> tetris_hf.Draft:
        for name, drafter in self.recorded.items():
            self.kept[name].append(drafter.propose(rows, live, depth))
        first = self.kept[next(iter(self.kept))][-1]
        return replace(first, lengths=torch.zeros_like(first.lengths))

    def observe(self, rows: Any, verification: Any) -> None:
        for name, drafter in self.recorded.items():
            draft = self.kept[name][-1] if verification.draft.depth else verification.draft
            drafter.observe(rows, replace(verification, draft=draft))

    def end(self) -> None:
        for drafter in self.recorded.values():
            drafter.end()

    def take(self, num_places: int, depth: int) -> dict[str, Drafted]:
        """What was kept since the last time: `num_places` places of N rows, `depth` deep."""
        taken = {}
        for name, drafts in self.kept.items():

            def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
                # Near the end of the text drafts are less deep, and at the last place there are none.
                if parts[0].dim() == 2:
                    parts = [pad(part, (0, depth - part.shape[1])) for part in parts]
                missing = [torch.zeros_like(parts[0])] * (num_places - len(parts))
                return torch.stack(parts + missing, 1).cpu()

            taken[name] = Drafted(
                stacked([draft.tokens for draft in drafts]).int(),  # (N, M - 1, K)
                stacked([draft.lengths for draft in drafts]).int(),  # (N, M - 1)
                stacked([draft.probabilities for draft in drafts]).float(),  # (N, M - 1, K)
            )
            drafts.clear()
        return taken


def record(
    model: Any,
    batches: list[dict[str, torch.Tensor]],
    drafters: dict[str, tetris_hf.Drafter],
    depth: int,
    max_new_tokens: int,
    sets: list[str],
    about: dict[str, Any] | None = None,
) -> Trace:
    """
    Record the trace of some prompts.

    Args:
        model (`PreTrainedModel`): The target. `tetris_hf` is enabled for it.
        batches (`list[dict[str, torch.Tensor]]`): Left-padded prompts, equally many in each.
        drafters (`dict[str, Drafter]`): Who proposes, by name.
        depth (`int`): K.
        max_new_tokens (`int`): M.
        sets (`list[str]`): The set of each prompt. Prompts beyond them, which fill the last batch, are dropped.
        about (`dict[str, Any]`, *optional*): Kept with the trace.
    """
    recorder = RecordingDrafter(drafters)
    ends_at = model.generation_config.eos_token_id
    ends_at = torch.tensor([] if ends_at is None else [ends_at] if isinstance(ends_at, int) else ends_at)
    prompts: list[torch.Tensor] = []
    text, drafts = [], {name: [] for name in drafters}
    saved, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        for number, batch in enumerate(batches):
            start = time.perf_counter()
            sequences = model.generate(
                **batch, do_sample=False, max_new_tokens=max_new_tokens, assistant_model=recorder,
                tetris_capacity=depth, num_assistant_tokens=depth,  # no row drafts deeper than the capacity
            )  # fmt: skip
            num_rows, width = batch["input_ids"].shape
            text.append(sequences[:, width:].cpu())
            prompts += [
                ids[mask.bool()].cpu() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ]
            for name, drafted in recorder.take(max_new_tokens - 1, depth).items():
                drafts[name].append(drafted)
            seconds = time.perf_counter() - start
            print(f"batch {number + 1} of {len(batches)}: {num_rows} rows, {seconds:.1f} s", flush=True)
    finally:
        model.generation_config.eos_token_id = saved
    count, all_text = len(sets), torch.cat(text)[: len(sets)]
    is_end = torch.isin(all_text, ends_at)  # (P, M)
    ends = torch.where(is_end.any(1), is_end.long().argmax(1) + 1, max_new_tokens)
    merged = {
        name: Drafted(
            *(torch.cat([getattr(part, field) for part in parts])[:count] for field in Drafted.__annotations__)
        )
        for name, parts in drafts.items()
    }
    return Trace(sets, prompts[:count], all_text, ends, merged, about or {})


def drafters_for(names: list[str], model: Any, assistant: Any) -> dict[str, tetris_hf.Drafter]:
    """The drafters by name; all but `assistant` and `layers` are those of `assets/`, for SmolLM2-135M-Instruct."""
    made: dict[str, Any] = {
        "assistant": lambda: tetris_hf.AssistantDrafter(assistant),
        "shallow": lambda: tetris_hf.AssistantDrafter(
            tetris_hf.ShallowAssistant.from_pretrained(ASSETS / "smollm2-135m-shallow", target=model)
        ),
        "medusa": lambda: tetris_hf.MedusaDrafter(
            tetris_hf.MedusaHeads.from_pretrained(ASSETS / "smollm2-135m-medusa", dtype=model.dtype).to(model.device)
        ),
        "layers": lambda: tetris_hf.AssistantDrafter(tetris_hf.LayerSkipAssistant(model, list(KEPT_LAYERS))),
    }
    return {name: made[name]() for name in names}


def main(arguments: list[str] | None = None) -> Trace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench as JSON lines")
    parser.add_argument("--out", type=Path, required=True, help="the trace, a safetensors file")
    parser.add_argument("--model", help="hub id or folder (default: bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--assistant", help="hub id or folder of a model that drafts")
    parser.add_argument("--drafters", nargs="+", choices=("assistant", "shallow", "medusa", "layers"))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SPEC_BENCH, SONNET], help="of prompts")
    parser.add_argument("--per-set", type=int, default=80, help="prompts of each set")
    parser.add_argument("--max-characters", type=int, default=7000, help="longer prompts are left out")
    parser.add_argument("--rows", type=int, default=96, help="rows of a batch")
    parser.add_argument("--depth", type=int, default=8, help="K")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()

    model, tokenizer = load(args.model, args.device, getattr(torch, args.dtype))
    assistant = load(args.assistant, args.device, getattr(torch, args.dtype))[0] if args.assistant else None
    names = args.drafters or (["assistant"] if assistant is not None else ["shallow", "medusa"])
    if ("assistant" in names) != (assistant is not None):
        parser.error("--drafters assistant and --assistant belong together")
    known = prompt_sets(args.prompts, args.per_set, args.max_characters)
    chosen = {name: known[name] for name in args.sets}
    sets = [name for name, texts in chosen.items() for _ in texts]
    texts = as_chat(tokenizer, [text for some in chosen.values() for text in some])
    rows = min(args.rows, len(texts))
    batches = padded_batches(tokenizer, texts, rows, -(-len(texts) // rows), model.device)
    about = {
        "target": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "card": torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": args.dtype,
        "rows": rows,
    }
    print(f"{len(texts)} prompts, {about}", flush=True)
    tetris_hf.enable()
    drafters = drafters_for(names, model, assistant)
    trace = record(model, batches, drafters, args.depth, args.max_new_tokens, sets, about)
    trace.save(args.out)
    for name in drafters:
        stands = trace.stands(name)
        going = torch.arange(stands.shape[1]) < trace.ends[:, None] - 1
        print(f"{name}: {float(stands[going].float().mean()):.3f} of {args.depth} drafts stand per place")
    print(args.out)
    return trace


if __name__ == "__main__":
    main()
