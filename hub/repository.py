"""What a Hub repository of this project holds: the decoding method, or trained weights with their card.

The repository of the Medusa heads brings its code along: the heads' classes lie beside the decoding method in
`custom_generate/`, so that transformers alone loads and runs both.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path


ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent

# Weights that ship with the project, by the name that the command line knows.
WEIGHTS = {"medusa": ROOT / "assets" / "smollm2-135m-medusa", "shallow": ROOT / "assets" / "smollm2-135m-shallow"}
KINDS = ("code", *WEIGHTS)

# Modules of `tetris_hf/models/` with which a repository loads its weights by itself, and what `AutoModel` finds there.
CLASSES = {"medusa": ("medusa.py", "medusa_drafter.py", "medusa_layouts.py")}
AUTO_MAP = {
    "medusa": {"AutoConfig": "custom_generate/medusa.MedusaConfig", "AutoModel": "custom_generate/medusa.MedusaHeads"}
}


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
        _build_weights(kind, folder, name)
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
    """The decoding method and its card."""
    _copy_method(folder / "custom_generate")
    (folder / "README.md").write_text(_filled(HERE / "card.md", name), encoding="utf-8")
    if notebooks := sorted((ROOT / "examples").glob("*.ipynb")):
        (folder / "notebooks").mkdir()
        for notebook in notebooks:
            shutil.copy(notebook, folder / "notebooks")


def _build_weights(kind: str, folder: Path, name: str) -> None:
    """Weights, configuration and card; what the card calls by its place in this project gets its new name."""
    source = WEIGHTS[kind]
    shutil.copy(source / "model.safetensors", folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    card = (source / "README.md").read_text(encoding="utf-8")
    place = source.relative_to(ROOT).as_posix()
    if place not in card:
        raise LookupError(f"The card of `{place}` does not say how to load it from there.")
    card = card.replace(place, name)
    needs = "With the package:" if kind in CLASSES else "It needs the package:"
    install = f"{needs} `pip install tetris-hf` ({version()} or newer).\n\n```python\nimport tetris_hf"
    card = card.replace("```python\nimport tetris_hf", install, 1)
    for other in WEIGHTS.values():
        card = card.replace(f"`../{other.name}`", f"`{other.name}`")
    if kind in CLASSES:
        _copy_method(folder / "custom_generate")
        _copy_classes(CLASSES[kind], folder / "custom_generate")
        config["auto_map"] = AUTO_MAP[kind]
        card = card.replace("\ntags: [", "\ntags: [custom_generate, ", 1)
        by_itself = _filled(HERE / f"card_{kind}.md", name)
        card = re.sub(
            r"(```python\n.*?```\n)", lambda first: f"{first[1]}\n{by_itself}", card, count=1, flags=re.DOTALL
        )
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def _copy_method(folder: Path) -> None:
    """`tetris_hf/generation/`, which transformers' loader takes as it stands."""
    folder.mkdir()
    for file in sorted((ROOT / "tetris_hf" / "generation").glob("*.py")):
        shutil.copy(file, folder)
    shutil.copy(HERE / "requirements.txt", folder)


def _copy_classes(files: tuple[str, ...], folder: Path) -> None:
    """Modules of `tetris_hf/models/` beside those of the method: what they import from there becomes a neighbour."""
    for name in files:
        code = (ROOT / "tetris_hf" / "models" / name).read_text(encoding="utf-8")
        code = re.sub(r"^from \.\.generation\.", "from .", code, flags=re.MULTILINE)
        imported = re.findall(r"^ *from \.(\S*) import", code, flags=re.MULTILINE)
        unknown = [
            module for module in imported if not (folder / f"{module}.py").exists() and f"{module}.py" not in files
        ]
        if unknown or (folder / name).exists():
            raise LookupError(f"`{name}` cannot lie in `custom_generate/`: {unknown or 'the method has one'}.")
        (folder / name).write_text(code, encoding="utf-8")


def _filled(template: Path, name: str) -> str:
    """A text of this folder with its placeholders replaced."""
    text = template.read_text(encoding="utf-8")
    requirements = (HERE / "requirements.txt").read_text(encoding="utf-8").strip()
    for placeholder, value in (("repository", name), ("version", version()), ("requirements", requirements)):
        text = text.replace("{" + placeholder + "}", value)
    return text
