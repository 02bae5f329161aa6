"""Self-distillation: train a drafter to predict what the target would say, on the target's own answers.

The parts that `medusa_train.py` and `distill_assistant.py` share: target, batches, loss and loop. Does not know what
is trained; the answers come from `self_distillation_data.py`.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from self_distillation_loss import Distillation
from torch import nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of every training by self-distillation."""
    add = parser.add_argument
    add("--target", help="folder or Hub name of the target; without one, a tiny random Llama")
    add("--gguf_file", help="name of the GGUF file in that folder, if the target is one")
    add("--dtype", default="auto", help="of the target")
    add("--quantize", type=int, choices=(4, 8), help="load the target in 4 or 8 bit (needs bitsandbytes)")
    add("--output", type=Path, required=True, help="folder for the result and its checkpoints")
    add("--learning_rate", type=float, default=1e-3)
    add("--epochs", type=float, default=4)
    add("--max_minutes", type=float, default=math.inf, help="the learning rate is then scheduled over this time")
    add("--tokens_per_batch", type=int, default=65536, help="prompts, answers and padding; per process")
    add("--target_temperature", type=float, default=1.0, help="below 1: learn rather what greedy decoding says")
    add("--mixed_precision", choices=("no", "bf16", "fp16"), default="no")
    add("--compile", action="store_true", help="compile the loss: several times faster on a GPU")
    add("--checkpoint_every", type=int, default=1000, help="steps")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    add("--held_out", type=float, default=0.01, help="share of the answers to measure on")
    add("--seed", type=int, default=0)


def load_target(args: argparse.Namespace, device: torch.device) -> tuple[PreTrainedModel, AutoTokenizer | None]:
    """The target, frozen, and its tokenizer; without `--target` a tiny random one that has none."""
    if args.target is None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(args.seed)
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
        heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
        config = LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1, pad_token_id=1)
        return LlamaForCausalLM(config).to(device).eval().requires_grad_(False), None
    kwargs = {"gguf_file": args.gguf_file} if args.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(args.target, padding_side="left", **kwargs)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if args.quantize:
        bits = {"load_in_4bit": args.quantize == 4, "load_in_8bit": args.quantize == 8}
        kwargs["quantization_config"] = BitsAndBytesConfig(**bits)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=args.dtype, device_map=device, **kwargs)
    return target.eval().requires_grad_(False), tokenizer


@dataclass
class Batch:
    """
    Right-padded conversations of B rows, and the M places at which the target said something.

    Attributes:
        input_ids (`torch.LongTensor` of shape `(B, L)`): Prompts and answers.
        places (`torch.LongTensor` of shape `(M,)`): Flat indices of the states that gave the tokens of answers.
        left (`torch.LongTensor` of shape `(M,)`): How many such states come later in the same row.
    """

    input_ids: torch.Tensor
    places: torch.Tensor
    left: torch.Tensor


class Batches:
    """
    Batches of rows of about equal length, in an order that depends on the seed and the epoch alone.

    Args:
        data (`Dataset`): With columns `input_ids` and `prompt_length`.
        tokens_per_batch (`int`): B * L at most.
        device (`torch.device`): Where batches go.
        seed (`int`): Of the order.
    """

    def __init__(self, data: Dataset, tokens_per_batch: int, device: torch.device, seed: int = 0):
        table = data.with_format("arrow")[:]
        rows = table["input_ids"].combine_chunks()
        self.lengths = torch.tensor(rows.value_lengths().to_numpy(), dtype=torch.long)
        self.tokens = torch.tensor(rows.flatten().to_numpy())
        self.prompts = torch.tensor(table["prompt_length"].to_numpy(), dtype=torch.long)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.tokens_per_batch, self.device, self.seed = tokens_per_batch, device, seed
        self.per_epoch = len(self._order(0))

    def _order(self, epoch: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1000 + epoch)
        noise = 1 + 0.05 * torch.rand(len(self.lengths), generator=generator)
        groups, first = [], 0
        order = (self.lengths * noise).argsort()
        while first < len(order):
            # The rows ascend, nearly: look ahead for how many fit, then take the longest of them at its word.
            size = max(1, self.tokens_per_batch // int(self.lengths[order[first]]))
            while size > 1 and size * int(self.lengths[order[first : first + size]].max()) > self.tokens_per_batch:
                size = size * 9 // 10
            groups.append(order[first : first + size])
            first += size
        return [groups[index] for index in torch.randperm(len(groups), generator=generator)]

    def stream(self, first: int = 0) -> Iterator[Batch]:
        """Batches of one epoch after the other, from number `first` of all on."""
        for epoch in itertools.count():
            groups = self._order(epoch)
            yield from map(self._batch, groups[first:])
            first = max(0, first - len(groups))

    def once(self) -> Iterator[Batch]:
        """Batches of one epoch."""
        return map(self._batch, self._order(0))

    def _batch(self, rows: torch.Tensor) -> Batch:
        lengths, prompts = self.lengths[rows], self.prompts[rows]
        columns = torch.arange(int(lengths.max()))
        inside = columns < lengths[:, None]  # (B, L)
        spoken = (columns >= prompts[:, None] - 1) & (columns < lengths[:, None] - 1)  # (B, L)
        input_ids = self.tokens[(self.starts[rows, None] + columns).where(inside, 0)].where(inside, 0)
        places = spoken.flatten().nonzero()[:, 0]
        left = (lengths[:, None] - 2 - columns)[spoken]
        return Batch(*(tensor.long().to(self.device) for tensor in (input_ids, places, left)))


def last_hidden_states(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Inputs of the output embeddings, `(B * L, hidden_size)`. Right padding needs no mask: nothing looks ahead."""
    return model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)


# What a training must say about a batch: the summed loss, how many places it is a sum over, and for each thing that is
# measured (a head, say) the number of agreements and of places, `(2, things)`.
LossOf = Callable[[Batch], tuple[torch.Tensor, int, torch.Tensor]]


def train(
    args: argparse.Namespace, accelerator: Accelerator, module: nn.Module, loss_of: LossOf, data: Dataset
) -> None:
    """
    Train what of `module` requires gradients, with checkpoints, and print what is right on answers held out.

    Args:
        args (`argparse.Namespace`): Of [`add_arguments`].
        accelerator (`Accelerator`): Device, processes and precision.
        module (`nn.Module`): Has the parameters.
        loss_of (`LossOf`): The loss of a batch.
        data (`Dataset`): All answers.
    """
    if args.compile:
        Distillation.compile()
    torch.manual_seed(args.seed)
    data = data.shuffle(seed=args.seed)
    held_out = max(1, int(len(data) * args.held_out))
    rest = data.select(range(held_out, len(data)))
    rest = rest.shard(accelerator.num_processes, accelerator.process_index)
    batches = Batches(rest, args.tokens_per_batch, accelerator.device, args.seed)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    total = max(1, int(args.epochs * min(gather_object([batches.per_epoch]))))
    step, checkpoint = 0, args.output / "checkpoint.pt"
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint, map_location=accelerator.device, weights_only=True)
        step = state["step"]
        optimizer.load_state_dict(state["optimizer"])
        for parameter, value in zip(parameters, state["parameters"], strict=True):
            parameter.data.copy_(value)
    optimizer = accelerator.prepare(optimizer)
    args.output.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=total, initial=step, unit="step", disable=not accelerator.is_main_process, mininterval=2)
    start, progress, seen = time.monotonic(), step / total, None
    stream = batches.stream(step)
    while progress < 1:
        batch = next(stream)
        rate = args.learning_rate * min(1, (step + 1) / 100) * (1 + math.cos(math.pi * progress)) / 2
        optimizer.param_groups[0]["lr"] = rate
        with accelerator.autocast():
            loss, count, agreement = loss_of(batch)
        accelerator.backward(loss / max(1, count))
        for parameter in parameters:  # by hand, so that other methods than `forward` can be trained
            if accelerator.num_processes > 1 and parameter.grad is not None:
                parameter.grad = accelerator.reduce(parameter.grad, "mean")
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        minutes = (time.monotonic() - start) / 60
        progress = max(step / total, minutes / args.max_minutes)
        if accelerator.num_processes > 1:  # all stop at the same step
            progress = float(accelerator.reduce(torch.tensor(progress, device=accelerator.device), "mean"))
        seen = agreement if seen is None else 0.98 * seen + agreement
        bar.update()
        if step % 20 == 0:
            bar.set_postfix_str(f"loss {loss.detach().item() / max(1, count):.3f}, top-1 {shares(seen)}")
        if step % args.checkpoint_every == 0 and accelerator.is_main_process:
            values = [parameter.data for parameter in parameters]
            torch.save({"step": step, "optimizer": optimizer.state_dict(), "parameters": values}, checkpoint)
    bar.close()
    totals = torch.zeros(2, 1)
    with torch.no_grad(), accelerator.autocast():
        for batch in Batches(data.select(range(held_out)), args.tokens_per_batch, accelerator.device).once():
            totals = totals + loss_of(batch)[2].cpu()
    accelerator.print(f"{step} steps of {total}; top-1 on {held_out} answers held out: {shares(totals)}")


def shares(agreement: torch.Tensor) -> str:
    """Agreements over places, for people."""
    return " ".join(f"{share:.3f}" for share in (agreement[0] / agreement[1].clamp(min=1)).tolist())
