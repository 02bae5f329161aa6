"""Whatever batch, budget and drafter: greedy text is stock's, and no step verifies more than its capacity."""

import copy

import kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetris_hf import DraftSelector, FixedWindowSelector, PromptLookupDrafter, TetrisSelector


TARGET = kit.tiny()
ASSISTANTS = {"near": kit.near(TARGET), "same": copy.deepcopy(TARGET), "far": kit.tiny(seed=17)}


class Threshold(DraftSelector):
    def __call__(self, draft, lengths, capacity):
        return torch.minimum(lengths, (draft.prefix_scores() > 0.2).sum(1))


class Watch(DraftSelector):
    """Last in every list: sees what was verified in the end."""

    def __init__(self):
        self.verified = []

    def __call__(self, draft, lengths, capacity):
        return lengths

    def observe(self, verification):
        self.verified.append(int(verification.lengths.sum()))


SELECTORS = {
    "tetris": lambda: [TetrisSelector()],
    "paper": lambda: [TetrisSelector(score="paper")],
    "window": lambda: [FixedWindowSelector(2)],
    "threshold": lambda: [Threshold(), TetrisSelector()],
    "threshold alone": lambda: [Threshold()],
    "nothing": lambda: [],
}
DRAFTERS = {
    **{name: lambda name=name: ASSISTANTS[name] for name in ASSISTANTS},
    "lookup": lambda: PromptLookupDrafter(2),
    "mixed": lambda: [PromptLookupDrafter(2), ASSISTANTS["near"]],
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 50),
    capacity=st.integers(0, 12),
    depth=st.integers(1, 6),
    new_tokens=st.integers(1, 16),
    ends_at=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 15)),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    selector=st.sampled_from(sorted(SELECTORS)),
    penalty=st.sampled_from([None, 1.3]),
)
def test_greedy_text_and_capacity(lengths, seed, capacity, depth, new_tokens, ends_at, drafter, selector, penalty):
    batch = kit.ragged(tuple(lengths), seed=seed)
    wanted = {"max_new_tokens": new_tokens, "repetition_penalty": penalty, "pad_token_id": 0}
    if ends_at is not None:
        row, place = ends_at[0] % len(lengths), ends_at[1] % new_tokens
        wanted["eos_token_id"] = int(kit.plain(TARGET, batch, **wanted)[row, max(lengths) + place])
    expected = kit.plain(TARGET, batch, **wanted)
    watch = Watch()
    out = kit.speculate(TARGET, batch, DRAFTERS[drafter](), capacity, depth, [*SELECTORS[selector](), watch], **wanted)
    assert torch.equal(out.sequences, expected)
    assert all(verified <= capacity for verified in watch.verified)
    stats = out.tetris_stats
    assert sum(watch.verified) == stats.verified.sum() <= stats.drafted.sum()
    generated = (out.sequences[:, max(lengths) :] != 0).sum()
    if ends_at is None and not (expected[:, max(lengths) :] == 0).any():
        assert len(lengths) + stats.accepted.sum() + stats.bonus.sum() == generated
