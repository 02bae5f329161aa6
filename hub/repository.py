"""What a Hub repository of this project holds: the decoding method, or trained weights with their card."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path


ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent

# Weights that ship with the project, by the name that the command line knows.
WEIGHTS = {"medusa": ROOT / "assets" / "smollm2-135m-medusa", "shallow": ROOT / "assets" / "smollm2-135m-shallow"}
KINDS = ("code", *WEIGHTS)


def build(kind: str, folder: Path, name: str) -> list[Path]:
    """
    Write a repository.

    Args:
        kind (`str`): `"code"`, or a key of `WEIGHTS`.
        folder (`Path`): Where it goes; empty, or made here.
        name (`str`): What it will be called, so that its card's examples run as they stand: a Hub id, or the folder.

    Returns:
        `list[Path]`: The files, relative to `folder`.

    Raises:
        `FileExistsError`: If there is something in the folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"`{folder}` is not an empty folder: remove it, or name another one.")
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "code":
        _build_code(folder, name)
    else:
        _build_weights(WEIGHTS[kind], folder, name)
    shutil.copy(ROOT / "LICENSE", folder)
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def version() -> str:
    """`tetris_hf.__version__`, read without importing the package."""
    tree = ast.parse((ROOT / "tetris_hf" / "__init__.py").read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__version__":
            return ast.literal_eval(statement.value)
    raise LookupError("`tetris_hf/__init__.py` has no `__version__`.")


def _build_code(folder: Path, name: str) -> None:
    """`tetris_hf/generation/` as `custom_generate/`, which transformers' loader takes as it stands."""
    code = folder / "custom_generate"
    code.mkdir()
    for file in sorted((ROOT / "tetris_hf" / "generation").glob("*.py")):
        shutil.copy(file, code)
    shutil.copy(HERE / "requirements.txt", code)
    card = (HERE / "card.md").read_text(encoding="utf-8")
    requirements = (HERE / "requirements.txt").read_text(encoding="utf-8").strip()
    for placeholder, value in (("repository", name), ("version", version()), ("requirements", requirements)):
        card = card.replace("{" + placeholder + "}", value)
    (folder / "README.md").write_text(card, encoding="utf-8")
    if notebooks := sorted((ROOT / "examples").glob("*.ipynb")):
        (folder / "notebooks").mkdir()
        for notebook in notebooks:
            shutil.copy(notebook, folder / "notebooks")


def _build_weights(source: Path, folder: Path, name: str) -> None:
    """Weights, configuration and card; what the card calls by its place in this project gets its new name."""
    for file in ("config.json", "model.safetensors"):
        shutil.copy(source / file, folder)
    card = (source / "README.md").read_text(encoding="utf-8")
    place = source.relative_to(ROOT).as_posix()
    if place not in card:
        raise LookupError(f"The card of `{place}` does not say how to load it from there.")
    card = card.replace(place, name)
    install = f"It needs the package: `pip install tetris-hf` ({version()} or newer).\n\n```python\nimport tetris_hf"
    card = card.replace("```python\nimport tetris_hf", install, 1)
    for other in WEIGHTS.values():
        card = card.replace(f"`../{other.name}`", f"`{other.name}`")
    (folder / "README.md").write_text(card, encoding="utf-8")
