"""What several tests of benchmarks import."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paper():
    """Modules of the benchmark by name. The scripts' folders are put on the path as the scripts themselves do."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the demo's loader reads GGUF")
    before = list(sys.path)
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "examples")]
    names = [file.stem for file in (BENCHMARKS / "paper").glob("[!_]*.py")]
    yield {name: importlib.import_module(f"paper.{name}") for name in names}
    sys.path[:] = before
