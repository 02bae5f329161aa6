"""The site's pages: every message in them exists, every message that exists is in them, every page is reached."""

import ast
import re
from pathlib import Path

from tetris_hf.cli.main import build_parser


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ERRORS = ("ValueError", "NotImplementedError", "CommandError", "PromptError", "ArgumentTypeError")


def text_of(node):
    """A message as the pages write it: `…` for what is filled in. `None` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def messages():
    """Everything that the package says when it refuses or warns: those that users meet, and all others too."""
    met, others = set(), set()
    for file in sorted((ROOT / "tetris_hf").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = ast.unparse(node.exc.func).rpartition(".")[2]
                (met if name in ERRORS else others).add(text_of(node.exc.args[0]))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "logger.warning":
                met.add(text_of(node.args[0]))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "error_record":
                others.add(text_of(node.args[1]))
            elif isinstance(node, ast.keyword) and node.arg == "error":
                met.add(text_of(node.value))
    return met - {None}, others - {None}


def pieces(message):
    """What stays the same in a message, in order."""
    return [piece for piece in re.sub(r"…+", "…", message).rstrip("….").split("…")]


def begins_with(message, beginning):
    """Whether `message` begins with what a page has; both have `…` for what is filled in."""
    pattern = ".*".join(re.escape(piece) for piece in pieces(beginning))
    return re.match(pattern, message, flags=re.DOTALL) is not None


def listed():
    """The messages that the troubleshooting page lists: double-backtick spans in the first cell of a row."""
    found = []
    for line in (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ``"):
            found += re.findall(r"`` (.+?) ``", line.split(" | ")[0])
    return found


def test_each_listed_message_exists():
    met, others = messages()
    unknown = [each for each in listed() if not any(begins_with(message, each) for message in met | others)]
    assert listed() and unknown == [], "the package does not say this any more"


def test_each_message_is_listed():
    met, _ = messages()
    missing = [message for message in sorted(met) if not any(begins_with(message, each) for each in listed())]
    assert missing == [], "add them to docs/troubleshooting.md, with cause and fix"


def test_each_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\nmarkdown_")[0]
    named = set(re.findall(r"(\w+\.md)$", navigation, flags=re.MULTILINE))
    assert {page.name for page in DOCS.glob("*.md")} <= named


def test_each_option_that_the_page_names_exists():
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (DOCS / "cli.md").read_text(encoding="utf-8")))
    subparsers = next(action for action in build_parser()._actions if hasattr(action, "choices") and action.choices)
    known = {option for command in subparsers.choices.values() for option in command._option_string_actions}
    assert options <= known | {"--help"}
