"""What the processes of `test_parallel.py` run: a job in which one of two dies, and a target split over two.

torchrun --nproc-per-node 2 tests/parallel_workers.py job|split ...
"""

import importlib
import os
import signal
import sys
from pathlib import Path


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

import kit  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import distributed  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.distributed import DistributedConfig  # noqa: E402

import tetris_hf  # noqa: E402
from tetris_hf.cli import main, records  # noqa: E402


DIES_AFTER = 4  # records


def job(*arguments: str) -> None:
    """`tetris-hf generate`, whose second process is killed once, in the middle of a line."""
    write, written = records.RecordFile.write, []

    def fatal(self: records.RecordFile, record: records.Record) -> None:
        write(self, record)
        written.append(record)
        first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first_try and os.environ["RANK"] == "1" and len(written) == DIES_AFTER:
            self._file.write(b'{"id": "torn')
            self._file.flush()
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    records.RecordFile.write = fatal
    sys.exit(main(["generate", *arguments]))


def split(folder: str) -> None:
    """All that is asked of a split target, on a folder with a small model; each check says its name when it holds."""
    distributed.init_process_group("gloo")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rank = distributed.get_rank()
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    target = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2)).eval()
    for check in (greedy, leads, batches, refused, shallow, medusa, out_of_memory):
        check(whole, target, rank)
        distributed.barrier()
        if rank == 0:
            print(f"holds: {check.__name__}", flush=True)
    # The example in these processes, which saves the start of two more.
    example = importlib.import_module("tensor_parallel")
    Path(f"prompts{rank}.txt").write_text("w3 w4\nw5\nw6 w7 w8\nw9 w2\n", encoding="utf-8")
    settings = ["--batch-size", "2", "--max-new-tokens", "8", "--dtype", "float32", "--check"]
    example.main([f"prompts{rank}.txt", "--model", folder, "--assistant", folder, "--output", "out.jsonl", *settings])
    distributed.destroy_process_group()


def same_everywhere(tokens: torch.Tensor) -> bool:
    """Whether all ranks have the same tokens."""
    everybody = [torch.empty_like(tokens) for _ in range(2)]
    distributed.all_gather(everybody, tokens)
    return torch.equal(*everybody)


def greedy(whole, target, rank):
    batch = kit.ragged()
    expected = kit.plain(whole, batch)
    for assistant, capacity in ((kit.near(whole), 6), (tetris_hf.PromptLookupDrafter(), 4), (None, 0)):
        out = kit.speculate(target, batch, assistant, capacity)
        assert torch.equal(out.sequences, expected)
        alone = kit.speculate(whole, batch, assistant, capacity).tetris_stats
        assert torch.equal(out.tetris_stats.accepted, alone.accepted)
    layers = next(iter(target.model.layers))
    assert (
        layers.self_attn.q_proj.weight.to_local().shape[0] == whole.model.layers[0].self_attn.q_proj.out_features / 2
    )


def leads(whole, target, rank):
    """Another assistant and another random state on each rank: the first rank's drafts and draws are everybody's."""
    batch, assistant = kit.ragged(), kit.near(whole, noise=0.04, seed=rank)
    assert torch.equal(kit.speculate(target, batch, assistant).sequences, kit.plain(whole, batch))
    torch.manual_seed(rank)
    assert same_everywhere(kit.speculate(target, batch, assistant, do_sample=True).sequences)


def batches(whole, target, rank):
    prompts = [list(range(2, 2 + length)) for length in (3, 7, 1, 5, 4)]
    for settings in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        both = [
            tetris_hf.generate_batch(
                model, prompts, kit.near(whole), tetris_capacity=4, batch_size=2, max_new_tokens=9, progress_bar=False,
                **settings,
            )
            for model in (whole, target)
        ]  # fmt: skip
        assert [one.generated_tokens for one in both[0]] == [one.generated_tokens for one in both[1]]


def refused(whole, target, rank):
    """What would make ranks wait for each other for ever is an error on all of them."""
    assistant = kit.near(whole)
    for call in (
        lambda: kit.speculate(target, kit.ragged(seed=rank), assistant),
        lambda: kit.speculate(target, kit.ragged(), assistant, capacity=4 + rank),
        lambda: kit.speculate(target, kit.ragged((3, 7 + rank)), assistant),
        lambda: tetris_hf.generate_batch(target, [[5, 6 + rank]], max_new_tokens=4, progress_bar=False),
    ):
        try:
            call()
        except ValueError as error:
            assert "split over 2 processes, which were given different" in str(error), error
        else:
            raise AssertionError("was not refused")
    try:
        tetris_hf.ShallowAssistant.from_target(target, [0])
    except ValueError as error:
        assert "train the assistant with a whole target" in str(error), error
    else:
        raise AssertionError("was not refused")


def shallow(whole, target, rank):
    """A trained assistant, which has the embeddings of a split target and layers of its own."""
    trained = tetris_hf.ShallowAssistant.from_target(whole, [0])
    with torch.no_grad():
        for weight in tetris_hf.ShallowAssistant.own_parameters(trained).values():
            weight.mul_(1.2)
    if rank == 0:
        tetris_hf.ShallowAssistant.save_pretrained(trained, "shallow")
    distributed.barrier()
    loaded = tetris_hf.ShallowAssistant.from_pretrained("shallow", target=target)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-4)
    batch = kit.ragged()
    assert torch.equal(kit.speculate(target, batch, loaded).sequences, kit.plain(whole, batch))
    skipping = tetris_hf.LayerSkipAssistant(target, [1])
    assert torch.equal(kit.speculate(target, batch, skipping).sequences, kit.plain(whole, batch))


def medusa(whole, target, rank):
    sizes = {"hidden_size": whole.config.hidden_size, "vocab_size": whole.config.vocab_size, "medusa_num_heads": 2}
    heads, batch = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(**sizes)), kit.ragged()
    assert torch.equal(kit.speculate(target, batch, heads).sequences, kit.plain(whole, batch))


def out_of_memory(whole, target, rank):
    """One rank cannot go on with half of the rows while the others have all of them."""
    batch_job = importlib.import_module("tetris_hf.generation.batch_job")
    advance = batch_job.Speculation.advance

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    batch_job.Speculation.advance = fails
    try:
        tetris_hf.generate_batch(target, [[5, 6], [7]], max_new_tokens=4, batch_size=2, progress_bar=False)
    except torch.OutOfMemoryError:
        return
    finally:
        batch_job.Speculation.advance = advance
    raise AssertionError("went on")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"job": job, "split": split}[sys.argv[1]](*sys.argv[2:])
