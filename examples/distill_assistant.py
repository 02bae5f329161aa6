"""Train a shallow assistant for a target: a few decoder layers between the target's embeddings, on its own answers.

    python examples/distill_assistant.py --output out/shallow           # tiny and random, a minute on a CPU
    accelerate launch examples/distill_assistant.py --target FOLDER --output out/shallow --layers 0 1 \\
        --mixed_precision bf16 --compile --data out/heads/answers
"""

import argparse

import torch
from accelerate import Accelerator
from self_distillation import Batch, add_arguments, last_hidden_states, load_target, train
from self_distillation_data import add_data_arguments, load_answers
from self_distillation_loss import Distillation

from tetris_hf.models import ShallowAssistant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", help="layers to begin as, by default the first and the last")
    add_arguments(parser)
    add_data_arguments(parser)
    args = parser.parse_args()

    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    target, tokenizer = load_target(args, accelerator.device)
    data = load_answers(args, accelerator, target, tokenizer)
    matrix = target.get_output_embeddings().weight
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    assistant = ShallowAssistant.from_target(target, args.layers or [0, depth - 1])
    for parameter in ShallowAssistant.own_parameters(assistant).values():
        parameter.data = parameter.data.float()

    def loss_of(batch: Batch) -> tuple[torch.Tensor, int, torch.Tensor]:
        """The assistant at a place against the target at the same place."""
        with torch.no_grad():
            truths = last_hidden_states(target, batch.input_ids)[batch.places]  # (M, hidden_size)
        students = last_hidden_states(assistant, batch.input_ids)[batch.places]
        weights = students.new_ones(len(students), dtype=torch.float32)
        loss, agree = Distillation.apply(students, truths, matrix, weights, args.target_temperature)
        return loss, len(agree), torch.stack([agree.sum(), agree.new_tensor(len(agree), dtype=torch.long)])[:, None]

    train(args, accelerator, assistant, loss_of, data)
    if accelerator.is_main_process:
        for parameter in ShallowAssistant.own_parameters(assistant).values():
            parameter.data = parameter.data.to(matrix.dtype)
        ShallowAssistant.save_pretrained(assistant, args.output)
        print(f"saved {args.output}")


if __name__ == "__main__":
    main()
