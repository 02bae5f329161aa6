"""For the site only: files of the repository that pages link to become pages of their own, and references code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
# Where each file is in the repository, and what it is called on the site.
PAGES = {
    "assets/smollm2-135m-medusa/README.md": "card_medusa.md",
    "assets/smollm2-135m-shallow/README.md": "card_shallow.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Any, config: Any) -> Any:
    """Add those files to the site, without the header that the Hub reads."""
    for place, name in PAGES.items():
        if (ROOT / place).is_file():
            text = re.sub(r"\A---\n.*?\n---\n", "", (ROOT / place).read_text(encoding="utf-8"), flags=re.DOTALL)
            files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links out of `docs/` to the pages made of what they name."""
    for place, name in PAGES.items():
        markdown = markdown.replace(f"](../{place}", f"]({name}")
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Docstrings refer to names as [`name`], which is plain code on the site."""
    return re.sub(r"\[(<code>[^<]*</code>)\](?!\()", r"\1", html)
