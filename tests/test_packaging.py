"""The wheel and the sdist install and work outside the checkout; what is stated twice agrees."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import tetris_hf


ROOT = Path(__file__).parent.parent
BUILD = "import setuptools.build_meta as backend; print(backend.build_{}('dist'))"

SMOKE = """
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import tetris_hf, tetris_hf.audit, tetris_hf.cli

place = Path(sys.argv[1])
assert Path(tetris_hf.__file__).is_relative_to(place), tetris_hf.__file__
assert version("tetris-hf") == tetris_hf.__version__
assert (Path(tetris_hf.__file__).parent / "py.typed").is_file()
(script,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "tetris-hf"]
assert script.load() is tetris_hf.cli.main

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.5,
)
model = LlamaForCausalLM(config).eval()
batch = {"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
plain = model.generate(**batch, max_new_tokens=8, do_sample=False)
tetris_hf.enable()
settings = {"max_new_tokens": 8, "do_sample": False, "tetris_capacity": 4}
for assistant in (model, tetris_hf.PromptLookupDrafter(), tetris_hf.LayerSkipAssistant(model, [0])):
    assert torch.equal(model.generate(**batch, **settings, assistant_model=assistant), plain)
print("fine")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and an sdist, built offline from a copy of what a checkout holds."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77 or newer")
    checkout = tmp_path_factory.mktemp("build") / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    shutil.copytree(ROOT / "tetris_hf", checkout / "tetris_hf", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "tests").mkdir()
    (checkout / "tests" / "stray.py").write_text("")
    files = {}
    for kind in ("sdist", "wheel"):
        done = subprocess.run(
            [sys.executable, "-c", BUILD.format(kind)], cwd=checkout, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        files[kind] = checkout / "dist" / done.stdout.split()[-1]
    return files


def sources():
    return {str(path.relative_to(ROOT)) for path in (ROOT / "tetris_hf").rglob("*.py")} | {"tetris_hf/py.typed"}


def test_what_the_wheel_holds(built):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = set(wheel.namelist())
        assert {name for name in names if ".dist-info/" not in name} == sources()
        entry = configparser.ConfigParser()
        entry.read_string(wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode())
        assert dict(entry["console_scripts"]) == {"tetris-hf": "tetris_hf.cli:main"}
        assert any(name.endswith("LICENSE") for name in names)


def test_what_the_sdist_holds(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() | {"pyproject.toml", "README.md", "LICENSE"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_outside_the_checkout(built, tmp_path, kind):
    place = tmp_path / "site"
    # Dependencies are those of this environment; nothing is downloaded.
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", place, built[kind]]
    environment = {**os.environ, "PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, install)], capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stderr[-2000:]
    if kind == "sdist":  # the same files; running them once is enough
        assert {str(f.relative_to(place)) for f in (place / "tetris_hf").rglob("*.py")} == sources() - {
            "tetris_hf/py.typed"
        }
        return
    smoke = tmp_path / "smoke.py"
    smoke.write_text(SMOKE)
    done = subprocess.run(
        [sys.executable, str(smoke), str(place)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("fine"), done.stderr[-2000:]
    done = subprocess.run([place / "bin" / "tetris-hf", "--version"], env=environment, capture_output=True, text=True)
    assert done.stdout == f"tetris-hf {tetris_hf.__version__}\n", done.stderr[-2000:]


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == tetris_hf.__version__
    assert sorted(versions, key=Version, reverse=True) == versions


def test_pins_are_within_the_ranges_of_the_package():
    stated = (ROOT / "pyproject.toml").read_text()
    pins = (ROOT / "constraints.txt").read_text()
    for name, oldest in re.findall(r'^    "(torch|transformers)>=([\d.]+)', stated, flags=re.MULTILINE):
        found = re.findall(rf"^{name}==([\d.]+)", pins, flags=re.MULTILINE)
        assert found and all(Version(pin) >= Version(oldest) for pin in found)
