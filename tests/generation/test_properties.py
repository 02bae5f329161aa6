"""Whatever batch, budget and drafter: greedy text is stock's, no step verifies more than its capacity, and an answer
of a job is that of its prompt alone.
"""

import copy
from unittest import mock

import kit
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tetris_hf import DraftSelector, FixedWindowSelector, PromptLookupDrafter, TetrisSelector, generate_batch
from tetris_hf.generation import batch_job


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


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    new_tokens=st.lists(st.integers(1, 14), min_size=8, max_size=8),
    order=st.randoms(use_true_random=False),
    batch_size=st.integers(1, 5),
    capacity=st.integers(0, 10),
    depth=st.integers(1, 4),
    feeds=st.sampled_from([(0, 1), (0, 2, 7), (0, 512)]),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    seed=st.none() | st.integers(0, 9),
)
def test_an_answer_of_a_job_is_that_of_its_prompt_alone(
    lengths, new_tokens, order, batch_size, capacity, depth, feeds, drafter, seed
):
    """Whatever the order, the batch size, the capacity, the neighbours and the moment of refill; sampled ones too."""
    requests = [
        {
            "input_ids": [2 + (5 * i + j) % 60 for j in range(length)],
            "max_new_tokens": new,
            "seed": None if seed is None else seed + i,
        }
        for i, (length, new) in enumerate(zip(lengths, new_tokens, strict=False))
    ]
    sampled = {"do_sample": seed is not None, "seed": seed, "progress_bar": False, "eos_token_id": [7, 30]}
    alone = [generate_batch(TARGET, [one], batch_size=1, **sampled)[0].generated_tokens for one in requests]
    places = order.sample(range(len(requests)), len(requests))
    with mock.patch.object(batch_job, "FEEDS", feeds):
        outputs = generate_batch(
            TARGET, [requests[place] for place in places], DRAFTERS[drafter](), capacity, batch_size, depth, **sampled
        )
    assert [output.generated_tokens for output in outputs] == [alone[place] for place in places]
