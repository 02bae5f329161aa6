"""Prompts for self-distillation, made of templates and word lists and of documentation that is installed anyway.

Every family of use has its templates: chat, writing, questions of fact, lists, roles, code, arithmetic, and with a
given passage summaries, answers, extraction, rewriting and translation. Knows no tokens and no models.
"""

import ast
import importlib.util
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path


# Keys: `weights` of the families, their `templates`, the `words` that fill them, and `openings`, the first words of
# prompts that the target writes itself.
DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
NUMBERS = {"n": (2, 12), "a": (20, 400), "b": (5, 60), "c": (2, 20)}


def fill(template: str, rng: random.Random, **given: str) -> str:
    """
    Put words for the names in braces of `template`, and for those that the words bring along. A digit behind a name
    asks for another word of the same kind.

    Args:
        template (`str`): Such as `"{name} has {n} {thing}."`.
        rng (`random.Random`): Chooses.
        given (`str`): Words that are fixed; braces in them mean nothing.
    """

    def word(match: re.Match[str]) -> str:
        name = match[1]
        if name in given:
            return given[name]
        if name in NUMBERS:
            return str(rng.randint(*NUMBERS[name]))
        kind = name.rstrip("2")
        choices = DATA["words"].get(kind) or DATA["templates"][kind]
        return fill(rng.choice(choices), rng, **given)

    return re.sub(r"\{(\w+)\}", word, template)


def make_prompts(count: int, passages: Sequence[str], seed: int = 0) -> list[tuple[str, str]]:
    """
    Prompts over all families of use.

    Args:
        count (`int`): How many; a few less come back, as none comes twice.
        passages (`Sequence[str]`): Texts to ask about. Without any, families that need one are left out.
        seed (`int`, *optional*, defaults to 0): Of the choice of words.

    Returns:
        `list[tuple[str, str]]`: Family and prompt.
    """
    rng = random.Random(seed)
    weights = {
        family: weight
        for family, weight in DATA["weights"].items()
        if passages or not any("{passage" in template for template in DATA["templates"][family])
    }
    prompts: dict[str, str] = {}
    for family in rng.choices(list(weights), list(weights.values()), k=count):
        given = {}
        if passages:
            text = rng.choice(passages)
            sentences = re.split(r"(?<=[.!?]) ", text)
            first = rng.randrange(len(sentences))
            given = {
                "passage": text,
                "passage2": rng.choice(passages),
                "short": " ".join(sentences[first : first + 2]),
            }
        template = rng.choice(DATA["templates"][family])
        if passages or "{short" not in template:
            prompts.setdefault(fill(template, rng, **given), family)
    return [(family, prompt) for prompt, family in prompts.items()]


def make_openings(count: int, seed: int = 0) -> list[str]:
    """First words of `count` prompts that the target is to write itself; most often none."""
    rng = random.Random(seed)
    return [fill(rng.choice(DATA["openings"]), rng) for _ in range(count)]


def documentation(packages: Sequence[str], min_words: int = 50, max_words: int = 500) -> Iterator[str]:
    """
    Prose from the docstrings of installed packages, which are read, not run.

    Args:
        packages (`Sequence[str]`): Import names; those that are not installed are passed over.
        min_words (`int`, *optional*, defaults to 50): Of a passage.
        max_words (`int`, *optional*, defaults to 500): Of a passage.
    """
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                yield from _prose(path, min_words, max_words)


def _prose(path: Path, min_words: int, max_words: int) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        kept: list[str] = []
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            words = paragraph.split()
            # Examples, signatures, tables and headings have many signs, a sentence has few.
            signs = len(re.findall(r"[>=\-_`*:|\\/<(\[{]", paragraph))
            if len(words) > 12 and signs < len(words) / 4 and "---" not in paragraph:
                kept += words
        if len(kept) >= min_words:
            yield " ".join(kept[:max_words])
