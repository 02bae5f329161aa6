"""Train Medusa heads for a target on the target's own answers.

    python examples/medusa_train.py --output out/heads                  # tiny and random, a minute on a CPU
    accelerate launch examples/medusa_train.py --target FOLDER --output out/heads --num_layers 2 --reads_next_token \\
        --mixed_precision bf16 --compile --num_prompts 100000 --num_written 40000 --generation_batch 1024 \\
        --max_new_tokens 320 --target_temperature 0.5
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from self_distillation import Batch, add_arguments, last_hidden_states, load_target, train
from self_distillation_data import add_data_arguments, load_answers
from self_distillation_loss import Distillation
from transformers import PreTrainedModel

from tetris_hf.models import MedusaConfig, MedusaHeads


def new_heads(args: argparse.Namespace, target: PreTrainedModel) -> MedusaHeads:
    """Heads that know nothing yet."""
    hidden_size = target.get_output_embeddings().weight.shape[1]
    config = MedusaConfig(
        hidden_size=hidden_size,
        vocab_size=target.config.get_text_config(decoder=True).vocab_size,
        medusa_num_heads=args.num_heads,
        medusa_num_layers=args.num_layers,
        medusa_reads_next_token=args.reads_next_token,
        base_model_name_or_path=None if args.target and Path(args.target).exists() else args.target,
    )
    heads = MedusaHeads(config).to(torch.float32)
    # From zeros alone, all blocks of a head would get one and the same first update.
    for weight in (heads.weight, heads.token_weight):
        if weight is not None:
            torch.nn.init.normal_(weight, std=0.01 * hidden_size**-0.5)
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--num_layers", type=int, default=1, help="residual blocks of each head")
    parser.add_argument(
        "--reads_next_token", action="store_true", help="heads are told the token chosen from the state"
    )
    parser.add_argument("--init", help="folder of heads to go on from, whose sizes and reading then hold")
    parser.add_argument("--head_decay", type=float, default=0.8, help="weight of a head's loss against the one before")
    add_arguments(parser)
    add_data_arguments(parser)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    target, tokenizer = load_target(args, accelerator.device)
    data = load_answers(args, accelerator, target, tokenizer)
    matrix = target.get_output_embeddings().weight
    if args.init:
        heads = MedusaHeads.from_pretrained(args.init, dtype=torch.float32).to(accelerator.device)
        heads.as_drafter().check(target)
        if not heads.config.original_lm_head:
            parser.error("--init: heads with output matrices of their own are not trained here; give heads without.")
    else:
        heads = new_heads(args, target).to(accelerator.device)
    num_heads, reads_next_token = heads.config.medusa_num_heads, heads.config.medusa_reads_next_token

    def loss_of(batch: Batch) -> tuple[torch.Tensor, int, torch.Tensor]:
        """Head k at a place against the target's distribution k + 1 states later."""
        with torch.no_grad():
            states = last_hidden_states(target, batch.input_ids)  # (B * L, hidden_size)
            chosen = batch.input_ids.flatten()[batch.places + 1] if reads_next_token else None  # (M,)
            next_embeds = None if chosen is None else target.get_input_embeddings()(chosen)  # (M, hidden_size)
        features = heads.features(states[batch.places], next_embeds=next_embeds)  # (heads, M, hidden_size)
        valid = [batch.left > head for head in range(num_heads)]
        counts = [int(mask.sum()) for mask in valid]
        students = torch.cat([features[head, mask] for head, mask in enumerate(valid)])
        truths = torch.cat([states[batch.places[mask] + head + 1] for head, mask in enumerate(valid)])
        decay = torch.tensor([args.head_decay**head for head in range(num_heads)], device=states.device)
        weights = decay.repeat_interleave(torch.tensor(counts, device=states.device))
        loss, agree = Distillation.apply(students, truths, matrix, weights, args.target_temperature)
        agreements = torch.stack([part.sum() for part in agree.split(counts)])
        return loss, len(batch.places), torch.stack([agreements, agreements.new_tensor(counts)])

    train(args, accelerator, heads, loss_of, data)
    if accelerator.is_main_process:
        heads.to(matrix.dtype if matrix.is_floating_point() else torch.bfloat16).save_pretrained(args.output)
        print(f"saved {args.output}")


if __name__ == "__main__":
    main()
