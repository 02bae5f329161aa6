"""Prompts by set: Spec-Bench's six families, verse to repeat in the place of the paper's Sonnet, a refrain to copy.

Knows texts. Does not know tokenizers or models.
"""

from __future__ import annotations

from pathlib import Path

from drafters import FAMILIES, families


SONNET, REFRAIN = "sonnet", "refrain"
SPEC_BENCH = (*FAMILIES, "conversation")
SETS = (*SPEC_BENCH, SONNET, REFRAIN)
# In the place of the paper's ShareGPT, Arena and Tough.
PLACES = {"ShareGPT": "conversation", "Arena": "math_reasoning", "Tough": "qa"}
# Sets that are made of others, in equal parts: the paper's Mix is Sonnet and Tough. In `easy-hard`, half of the rows
# say what was said before, where nearly every copied token stands, and half do not.
MIXES = {
    "spec-bench": SPEC_BENCH,
    "mix": (SONNET, PLACES["Tough"]),
    "easy-hard": (REFRAIN, PLACES["Tough"]),
}

# Verse of our own, in the place of the poem that the paper's synthetic task repeats (section 5.4).
LINES = (
    "The harbour keeps the evening in its hands",
    "and counts the boats that did not come at noon;",
    "a rope lies coiled where once the captain stands,",
    "and tar and salt are all that smell of June.",
    "I walked the wall from lighthouse to the lock",
    "to hear the water talk against the stone,",
    "and every hour was given by a clock",
    "that nobody had wound and none could own.",
    "The gulls went over, white on darker grey,",
    "and said the one word that they ever said;",
    "a lamp was lit that looked across the bay,",
    "and someone laughed, and somebody made bread.",
    "What little is enough, if it is near:",
    "a wall, a lamp, a voice that you can hear.",
    "When winter writes its letters on the glass",
    "and all the lanes are quiet under snow,",
    "I watch the carts and horses as they pass",
    "and wonder where so late they mean to go.",
    "The miller brings the flour to the door,",
    "the baker pays him with a loaf of rye;",
    "the children draw a castle on the floor",
    "and give it one blue window for the sky.",
    "No bell has rung, no messenger has run,",
    "the news of kings is slow to reach this street;",
    "the day is short, and when the day is done",
    "we hang our coats and warm our frozen feet.",
    "And if they ask me what I did that year:",
    "I kept a fire, and the fire was here.",
)
REQUESTS = (
    "Repeat these lines word for word:",
    "Copy the following lines exactly, then copy them once more:",
    "Write these lines again, one after the other, without changing a word:",
    "Say these lines after me, exactly as they are:",
)
COPY_REQUESTS = (
    "Copy all of these lines, word for word:",
    "Write down every one of these lines again, in the same order:",
    "Go on like this, without an end:",
)
TIMES = 8  # that a couplet is said


def sonnet(count: int) -> list[str]:
    """`count` prompts, at most 112, that ask for 6 to 10 lines of verse to be repeated, no two alike."""
    prompts = []
    for number in range(min(count, len(LINES) * len(REQUESTS))):
        start, request = (number * 5) % len(LINES), REQUESTS[number // len(LINES)]
        lines = [LINES[(start + place) % len(LINES)] for place in range(6 + number % 5)]
        prompts.append(request + "\n\n" + "\n".join(lines))
    return prompts


def refrain(count: int) -> list[str]:
    """`count` prompts, at most 84, that ask for a couplet said eight times to be copied, no two alike."""
    prompts = []
    for number in range(min(count, len(LINES) * len(COPY_REQUESTS))):
        start = number % len(LINES)
        couplet = LINES[start] + "\n" + LINES[(start + 1) % len(LINES)]
        prompts.append(COPY_REQUESTS[number // len(LINES)] + "\n\n" + "\n\n".join([couplet] * TIMES))
    return prompts


def prompt_sets(path: Path, per_set: int, max_characters: int) -> dict[str, list[str]]:
    """
    Prompts by the name of their set.

    Args:
        path (`Path`): Spec-Bench as JSON lines with `category` and `turns`.
        per_set (`int`): Prompts of each set, at most.
        max_characters (`int`): Longer prompts are left out.

    Returns:
        `dict[str, list[str]]`: `translation`, `summarization`, `qa`, `math_reasoning`, `rag`, `conversation`,
        `sonnet` and `refrain`.
    """
    return {**families(path, per_set, max_characters), SONNET: sonnet(per_set), REFRAIN: refrain(per_set)}
