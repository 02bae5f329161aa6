"""The public names are what `__all__` says, sorted, and the version is that of the changelog."""

import re
from pathlib import Path

import tetris_hf
from tetris_hf import generation, models


ROOT = Path(__file__).parent.parent


def test_public_names():
    for module in (tetris_hf, generation, models):
        assert all(hasattr(module, name) for name in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)
    assert set(generation.__all__) - {"generate"} <= set(tetris_hf.__all__)
    assert set(models.__all__) <= set(tetris_hf.__all__)


def test_the_hub_folder_is_flat_and_imports_nothing_else_of_the_package():
    folder = Path(generation.__file__).parent
    assert not [path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"]
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(from|import) (tetris_hf|\.\.)", text, flags=re.MULTILINE), path.name
        assert not re.search(r"^\s*from \. import", text, flags=re.MULTILINE), path.name


def test_version_is_that_of_the_changelog():
    top = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert top is not None and top[1] == tetris_hf.__version__
