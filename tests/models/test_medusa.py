"""Medusa heads: the batched product equals a loop, every layout comes back, drafts are exact, of the right state."""

import copy
import json
import re
from pathlib import Path

import kit
import pytest
import torch
from safetensors.torch import save_file
from scipy.stats import chisquare
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tetris_hf import FixedWindowSelector, TetrisSelector
from tetris_hf.models import MedusaConfig, MedusaDrafter, MedusaHeads


HIDDEN = kit.TINY["hidden_size"]


def heads_for(num_heads: int = 3, num_layers: int = 2, seed: int = 0, **overrides) -> MedusaHeads:
    """Random heads for the tiny target."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": HIDDEN, "vocab_size": kit.VOCABULARY, **overrides}
    heads = MedusaHeads(MedusaConfig(medusa_num_heads=num_heads, medusa_num_layers=num_layers, **sizes)).eval()
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3)
    return heads


def naive_logits(
    heads: MedusaHeads, states: torch.Tensor, lm_head: nn.Module | None, embeds: torch.Tensor | None = None
) -> torch.Tensor:
    """One head after the other, of plain modules. `(R, heads, V)`."""
    logits = []
    if embeds is not None:
        embeds = embeds / (embeds**2).mean(1, keepdim=True).sqrt()
    for head in range(heads.config.medusa_num_heads):
        x = states
        for layer in range(heads.config.medusa_num_layers):
            linear = nn.Linear(x.shape[1], x.shape[1], bias=heads.bias is not None)
            linear.weight.data = heads.weight[layer, head]
            if heads.bias is not None:
                linear.bias.data = heads.bias[layer, head]
            inner = linear(x)
            if embeds is not None:
                inner = inner + embeds @ heads.token_weight[layer, head].T
            x = x + nn.functional.silu(inner)
        logits.append(lm_head(x) if heads.output is None else x @ heads.output[head].T)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reads", [True, False])
@torch.no_grad()
def test_one_product_equals_a_loop(bias, shared, reads):
    kinds = {"medusa_fc_bias": bias, "original_lm_head": shared, "medusa_reads_next_token": reads}
    heads = heads_for(num_heads=4, num_layers=3, **kinds)
    lm_head = nn.Linear(HIDDEN, kit.VOCABULARY, bias=False) if shared else None
    states, embeds = torch.randn(6, HIDDEN), torch.randn(6, HIDDEN) if reads else None
    expected = naive_logits(heads, states, lm_head, embeds)
    assert expected.shape == (6, 4, kit.VOCABULARY)
    torch.testing.assert_close(heads(states, lm_head, next_embeds=embeds), expected)
    torch.testing.assert_close(heads(states, lm_head, num_heads=2, next_embeds=embeds), expected[:, :2])
    if reads:
        with pytest.raises(ValueError, match="pass its input embeddings as `next_embeds`"):
            heads(states, lm_head)


class LargestMade(TorchDispatchMode):
    """The most elements of a tensor that is new, not a view."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reads", [True, False])
@torch.no_grad()
def test_no_weight_is_copied(shared, reads):
    """A product over some of the heads that lie apart in memory would copy them first, which costs more than it."""
    heads = heads_for(num_heads=4, num_layers=3, original_lm_head=shared, medusa_reads_next_token=reads)
    lm_head = nn.Linear(HIDDEN, kit.VOCABULARY, bias=False) if shared else None
    state = torch.randn(1, HIDDEN)
    for num_heads in (1, 2, 3, 4):
        with LargestMade() as made:
            heads(state, lm_head, num_heads=num_heads, next_embeds=state if reads else None)
        assert made.most <= num_heads * max(HIDDEN, kit.VOCABULARY) < HIDDEN**2


def test_new_heads_are_the_target_itself_and_independent():
    heads = MedusaHeads(MedusaConfig(HIDDEN, kit.VOCABULARY, medusa_num_heads=3, medusa_num_layers=2))
    states, lm_head = torch.randn(5, HIDDEN), nn.Linear(HIDDEN, kit.VOCABULARY, bias=False)
    assert torch.equal(heads(states, lm_head), lm_head(states)[:, None].expand(-1, 3, -1))
    before = heads(states, lm_head)
    with torch.no_grad():
        heads.weight[1, 2] += 1  # one block of one head, of `[block] * n` it would be all
    changed = (heads(states, lm_head) != before).flatten(2).any(2).all(0)
    assert changed.tolist() == [False, False, True]
    assert len(list(heads.parameters())) == 2  # and of the target nothing
    with pytest.raises(ValueError, match="pass them as `lm_head`"):
        heads(states)


def test_the_heads_that_ship():
    heads = MedusaHeads.from_pretrained(Path(__file__).parents[2] / "assets" / "smollm2-135m-medusa")
    config = heads.config
    assert (config.hidden_size, config.vocab_size, config.medusa_num_heads) == (576, 49152, 4)
    assert config.original_lm_head and heads.weight.abs().sum() > 0


# Layouts. Each writer stores the same heads as others have published them.


def faster_decoding(heads: MedusaHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    tensors = {}
    for head in range(heads.config.medusa_num_heads):
        for layer in range(heads.config.medusa_num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = heads.weight[layer, head].clone()
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = heads.bias[layer, head].clone()
        if heads.output is not None:
            tensors[f"{prefix}{head}.{heads.config.medusa_num_layers}.weight"] = heads.output[head].clone()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def vllm(heads: MedusaHeads, prefix: str = "") -> dict[str, torch.Tensor]:
    tensors = {}
    for head in range(heads.config.medusa_num_heads):
        for layer in range(heads.config.medusa_num_layers):
            tensors[f"{prefix}blocks.{head}.layers.{layer}.weight"] = heads.weight[layer, head].clone()
            if heads.bias is not None:
                tensors[f"{prefix}blocks.{head}.layers.{layer}.bias"] = heads.bias[layer, head].clone()
        if heads.output is not None:
            tensors[f"{prefix}lm_heads.{head}.weight"] = heads.output[head].clone()
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_same(loaded: MedusaHeads, heads: MedusaHeads) -> None:
    expected, actual = heads.state_dict(), loaded.state_dict()
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    kinds = ("medusa_fc_bias", "original_lm_head", "medusa_reads_next_token")
    for size in ("hidden_size", "medusa_num_heads", "medusa_num_layers", *kinds):
        assert getattr(loaded.config, size) == getattr(heads.config, size)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_own_layout(tmp_path, shared, reads):
    heads = heads_for(original_lm_head=shared, medusa_reads_next_token=reads)
    heads.save_pretrained(tmp_path)
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert_same(loaded, heads)
    assert loaded.config.vocab_size == kit.VOCABULARY and not loaded.training
    half = MedusaHeads.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("shared", [True, False])
def test_faster_decoding_layout(tmp_path, shared, prefix, suffix):
    heads = heads_for(num_layers=2, original_lm_head=shared)
    tensors = faster_decoding(heads, prefix)
    file = tmp_path / f"medusa_lm_head.{suffix}"
    save_file(tensors, file) if suffix == "safetensors" else torch.save(tensors, file)
    # As published: no sizes.
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "somebody/target"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = MedusaHeads.from_pretrained(tmp_path)
    assert_same(loaded, heads)
    assert loaded.config.base_model_name_or_path == "somebody/target"
    assert loaded.config.vocab_size == (None if shared else kit.VOCABULARY)
    loaded.save_pretrained(tmp_path / "again")
    assert_same(MedusaHeads.from_pretrained(tmp_path / "again"), heads)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("shared", [True, False])
def test_vllm_layout(tmp_path, shared, prefix, bias):
    heads = heads_for(num_layers=1, original_lm_head=shared, medusa_fc_bias=bias)
    tensors = vllm(heads, prefix)
    if shared:  # some carry a copy of the target's
        tensors["lm_heads.0.weight"] = torch.randn(kit.VOCABULARY, HIDDEN)
    save_file(tensors, tmp_path / "model.safetensors")
    sizes = {"hidden_size": HIDDEN, "vocab_size": kit.VOCABULARY, "num_heads": 3, "num_hidden_layers": 1}
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "original_lm_head": shared, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = MedusaHeads.from_pretrained(tmp_path, dtype=torch.float64)
    assert_same(loaded.float(), heads)
    assert loaded.config.vocab_size == kit.VOCABULARY


def test_safetensors_come_before_pickles(tmp_path):
    heads = heads_for()
    save_file(faster_decoding(heads), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"never read")
    assert_same(MedusaHeads.from_pretrained(tmp_path), heads)


class _Harmful:
    def __reduce__(self):
        return print, ("run by the pickle",)


def test_a_pickle_runs_nothing(tmp_path, capsys):
    torch.save({"0.0.linear.weight": _Harmful()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(Exception, match="weights_only|Weights only"):
        MedusaHeads.from_pretrained(tmp_path)
    assert "run by" not in capsys.readouterr().out


def without(tensors, name):
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda t: {"model.embed_tokens.weight": t["0.0.linear.weight"]}, r"no Medusa heads: it has `model\.embed"),
        (lambda t: {**t, "0.fc.weight": t["0.0.linear.weight"]}, r"unknown meaning: `0\.fc\.weight`"),
        (lambda t: {**t, "token_map": torch.arange(9)}, "truncated vocabulary"),
        (lambda t: without(t, "1.1.linear.weight"), "weight of block 1 of head 1 is missing"),
        (lambda t: without(t, "2.0.linear.bias"), "bias of block 0 of head 2 is missing"),
        (lambda t: without(t, "0.2.weight"), "output matrix of head 0 is missing"),
        (lambda t: {**t, "1.0.linear.weight": torch.zeros(3, 3)}, r"head 1 has shape \(3, 3\), expected \(32, 32\)"),
        (lambda t: {**t, "0.5.weight": t["0.2.weight"]}, "unknown meaning"),
    ],
)
def test_other_layouts_are_refused(tmp_path, alter, message):
    tensors = alter(faster_decoding(heads_for(original_lm_head=False)))
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=message):
        MedusaHeads.from_pretrained(tmp_path)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="`medusa_num_heads` must be at least 1, got 0"):
        MedusaConfig(medusa_num_heads=0)
    with pytest.raises(ValueError, match="`vocab_size` must be given"):
        MedusaConfig(original_lm_head=False)


# Drafting.


@pytest.mark.parametrize("lengths", [(7,), (3, 12), (3, 7, 12, 5, 9)])
@pytest.mark.parametrize("num_heads", [3, 5])
@pytest.mark.parametrize("capacity", [1, 7, 100])
def test_text_is_that_of_plain_generate(target, enabled, lengths, num_heads, capacity):
    batch = kit.ragged(lengths)
    heads = heads_for(num_heads, original_lm_head=capacity != 7, medusa_reads_next_token=capacity != 1)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    ends = {"eos_token_id": int(kit.plain(target, batch)[0, -8])}
    for settings in ({}, ends):
        expected = kit.plain(target, batch, **settings)
        out = target.generate(
            **batch, **settings, max_new_tokens=20, do_sample=False, assistant_model=heads, tetris_capacity=capacity,
            num_assistant_tokens=num_heads, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, expected)
        stats = out.tetris_stats
        assert stats.drafted.shape[1] == num_heads and stats.drafted[:, min(capacity, num_heads) - 1].sum() > 0
        assert stats.draft_forwards == 0 and stats.target_forwards == stats.steps + 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_heads_that_know_the_future_are_always_right():
    # Token t is followed by t + 3: head k must say t + 3 (k + 2) from the state of t. A state too early or too late,
    # or one of another row, would be wrong everywhere.
    size, num_heads = 13, 4
    table = torch.zeros(size, size)
    table[torch.arange(size), (torch.arange(size) + 3) % size] = 1
    target = kit.markov(table)
    width = target.config.hidden_size
    heads = MedusaHeads(MedusaConfig(width, size, num_heads, 1, original_lm_head=False)).eval()
    with torch.no_grad():
        heads.output.zero_()
        for head in range(num_heads):
            heads.output[head, (torch.arange(size) + 3 * (head + 2)) % size, torch.arange(size)] = 1
    batch = kit.ragged((4, 1, 6), vocabulary=size)
    for selector in (FixedWindowSelector(), TetrisSelector()):
        out = kit.speculate(target, batch, heads, capacity=7, depth=num_heads, selector=selector, max_new_tokens=17)
        assert torch.equal(out.sequences, kit.plain(target, batch, max_new_tokens=17))
        assert out.tetris_stats.vsr == 1


def test_heads_that_read_the_next_token_read_the_right_one():
    # A target that draws its next token from a coin, whatever came before: only the token itself tells what follows.
    size, num_heads = 13, 2
    table = torch.zeros(size, size)
    table[:, 1] = table[:, 2] = 0.5  # after 1 and after 2 alike ...
    table[1], table[2] = 0, 0
    table[1, 3] = table[2, 4] = 1  # ... one token is sure
    target = kit.markov(table)
    width = target.config.hidden_size
    config = MedusaConfig(width, size, num_heads, 1, original_lm_head=False, medusa_reads_next_token=True)
    heads = MedusaHeads(config).eval()
    embedding = target.get_input_embeddings().weight
    with torch.no_grad():
        # SiLU of a large number is that number, of a large negative one nothing.
        heads.weight[:] = -100 * torch.eye(width)
        heads.token_weight[:] = 100 * torch.eye(width)
        scaled = embedding / embedding.pow(2).mean(1, keepdim=True).sqrt()
        heads.output.zero_()
        for token, follower in ((1, 3), (2, 4)):
            heads.output[:, follower] = scaled[token]
    batch = kit.ragged((4, 1, 6), vocabulary=size)
    torch.manual_seed(0)
    out = kit.speculate(target, batch, heads, capacity=9, depth=1, do_sample=True, top_k=0, max_new_tokens=40)
    told = out.sequences[:, 6:]
    followers = {(row[i], row[i + 1]) for row in told.tolist() for i in range(39) if row[i] in (1, 2)}
    assert followers == {(1, 3), (2, 4)}
    # Each draft follows such a token. Heads that are not told which would be right half the time.
    assert out.tetris_stats.vsr == 1 and out.tetris_stats.accepted.sum() > 50


def test_scores_are_the_heads_own_probabilities(target):
    heads, batch = heads_for(num_heads=3), kit.ragged()
    seen = []

    class Watcher(FixedWindowSelector):
        def __call__(self, draft, lengths, capacity):
            seen.append(draft)
            return super().__call__(draft, lengths, capacity)

    kit.speculate(target, batch, heads, capacity=9, depth=6, selector=Watcher(), max_new_tokens=4)
    first = seen[0]
    states = []
    hook = target.lm_head.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    for index in range(3):
        target(**kit.row(batch, index))
    hook.remove()
    with torch.no_grad():
        logits = naive_logits(heads, torch.cat([state[0, -1:] for state in states]), target.lm_head)  # (3, 3, V)
    probabilities, tokens = logits.softmax(-1).max(-1)
    # Of four new tokens the first is there, and the last is the target's: two may be drafted.
    assert torch.equal(first.tokens, tokens[:, :2])
    torch.testing.assert_close(first.probabilities, probabilities[:, :2])
    assert first.expectations is first.probabilities and first.q is None
    assert first.lengths.tolist() == [2, 2, 2]


def test_tokens_stay_below_the_width_of_the_logits():
    # A target whose output embeddings are narrower than its vocabulary: the heads' own matrices reach further.
    heads = heads_for(original_lm_head=False)
    with torch.no_grad():
        heads.output[:, 50:] *= 100
    drafter = heads.as_drafter()
    target, batch = kit.tiny(), kit.ragged()
    target.lm_head = nn.Linear(HIDDEN, 50, bias=False)
    seen = []
    propose = drafter.propose
    drafter.propose = lambda *args: seen.append(propose(*args)) or seen[-1]
    out = kit.speculate(target, batch, drafter, capacity=9, depth=3)
    assert torch.equal(out.sequences, kit.plain(target, batch))
    assert max(int(draft.tokens.max()) for draft in seen) < 50


@pytest.mark.parametrize("selector", [TetrisSelector(), FixedWindowSelector()])
def test_sampled_text_has_the_law_of_the_target(selector):
    # 100,000 draws and more. Scores differ between rows and the budget is short, so a score that looked at what it
    # decides about would be seen.
    torch.manual_seed(0)
    size, rows, new_tokens = 5, 500, 51
    table = torch.rand(size, size).pow(2).softmax(-1)
    target = kit.markov(table)
    torch.manual_seed(1)
    heads = MedusaHeads(MedusaConfig(target.config.hidden_size, size, medusa_num_heads=3)).eval()
    nn.init.normal_(heads.weight, std=0.5)
    batch = {"input_ids": torch.arange(rows)[:, None] % size, "attention_mask": torch.ones(rows, 1, dtype=torch.long)}
    counts = torch.zeros(size, size)
    accepted = 0
    for seed in range(4):
        torch.manual_seed(seed)
        out = kit.speculate(
            target, batch, heads, capacity=rows // 2, depth=3, selector=selector, do_sample=True, top_k=0,
            max_new_tokens=new_tokens,
        )  # fmt: skip
        accepted += int(out.tetris_stats.accepted.sum())
        pairs = out.sequences[:, :-1] * size + out.sequences[:, 1:]
        counts += torch.bincount(pairs.flatten(), minlength=size * size).view(size, size)
    assert counts.sum() == 4 * rows * new_tokens >= 100_000 and accepted > 10_000
    for count, law in zip(counts, table, strict=True):
        assert chisquare(count.double(), law.double() / law.double().sum() * count.sum()).pvalue > 1e-3


def test_drafts_are_exact_on_targets_of_another_kind():
    for model_type in ("gpt2", "gemma3_text"):
        target, batch = kit.tiny(model_type), kit.ragged()
        heads = heads_for(medusa_reads_next_token=model_type == "gemma3_text")
        out = kit.speculate(target, batch, heads, capacity=5, depth=3)
        assert torch.equal(out.sequences, kit.plain(target, batch))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 16}, "hidden states of width 16, and those of the model (LlamaForCausalLM) are 32 wide"),
        ({"vocab_size": 65}, "vocabulary of 65 tokens, and the model (LlamaForCausalLM) has 64"),
    ],
)
def test_heads_of_another_model_are_refused(target, enabled, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        target.generate(**kit.ragged(), assistant_model=heads_for(**sizes), tetris_capacity=4, max_new_tokens=4)


def test_heads_without_a_vocabulary_fit_any_and_leave_nothing_behind(target):
    heads = heads_for(vocab_size=None)
    drafter = heads.as_drafter()
    assert isinstance(drafter, MedusaDrafter) and drafter.needs_hidden_states
    hooks = copy.copy(target.lm_head._forward_pre_hooks)
    kit.speculate(target, kit.ragged(), drafter)
    assert target.lm_head._forward_pre_hooks == hooks
    assert drafter._states is None and drafter._lm_head is None and drafter._embeddings is None
