"""For the site only: files of the repository that pages link to become pages of their own, and references code."""

from __future__ import annotations

import posixpath
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
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add those files to the site, without the header that the Hub reads."""
    for place, name in PAGES.items():
        text = re.sub(r"\A---\n.*?\n---\n", "", (ROOT / place).read_text(encoding="utf-8"), flags=re.DOTALL)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links go by places in the repository; those to what is no page become plain text."""
    places = {name: place for place, name in PAGES.items()}
    folder = posixpath.dirname(places.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def on_site(link: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(folder, link[2]))
        name = PAGES.get(place, place.removeprefix("docs/"))
        if place not in PAGES and not (place.startswith("docs/") and place.endswith(".md")):
            # A link that leads nowhere stays, and fails the build.
            return link[1] if (ROOT / place).exists() else link[0]
        return f"[{link[1]}]({name}{link[3] or ''})"

    return LINK.sub(on_site, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Docstrings refer to names as [`name`] and write types in backticks and stars: plain code on the site."""
    if page.file.src_uri != "reference.md":
        return html
    html = re.sub(r"\[(<code>[^<]*</code>)\](?!\()", r"\1", html)
    html = re.sub(r"\[`([\w.]+)`\]", r"\1", html)
    html = re.sub(r"<code>[^<]*`[^<]*</code>", lambda found: found[0].replace("`", ""), html)
    return html.replace("*optional*", "optional")
