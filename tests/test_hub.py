"""`hub/push.py` writes repositories that work as they stand, and uploads what it wrote."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import kit
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM

import tetris_hf


ROOT = Path(__file__).parent.parent


@pytest.fixture
def push(monkeypatch):
    """`hub/push.py` as a function of its arguments."""
    monkeypatch.syspath_prepend(str(ROOT / "hub"))
    module = importlib.import_module("push")

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["push.py", *map(str, argv)])
        return module.main()

    yield run
    for name in ("push", "repository"):
        sys.modules.pop(name, None)


CODE = """
import importlib.util, sys
import torch
from transformers import AutoModelForCausalLM

assert importlib.util.find_spec("tetris_hf") is None
target, near = (AutoModelForCausalLM.from_pretrained(name) for name in ("target", "near"))
batch = torch.load("batch.pt")
settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
plain = target.generate(**batch, **settings).sequences
hub = {"custom_generate": "repository", "trust_remote_code": True}
out = target.generate(**batch, **settings, **hub, assistant_model=near, tetris_capacity=5)
assert torch.equal(out.sequences, plain) and out.tetris_stats.accepted.sum() > 0
out = target.generate(**batch, **settings, **hub, prompt_lookup_num_tokens=3, tetris_capacity=5)
assert torch.equal(out.sequences, plain)
print("fine")
"""


def test_the_code_works_in_a_process_without_the_package(push, tmp_path, target, near, capsys):
    folder = tmp_path / "repository"
    assert push("--dry-run", folder) == 0
    shown = capsys.readouterr().out.split()
    assert str(folder / "custom_generate" / "generate.py") in shown and str(folder / "LICENSE") in shown
    target.save_pretrained(tmp_path / "target")
    near.save_pretrained(tmp_path / "near")
    torch.save(kit.ragged(), tmp_path / "batch.pt")
    # As in tests/generation/test_hub_folder.py: no folder of ours, no editable install can be found.
    site = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {site!r}\n{CODE}"],
        cwd=tmp_path,
        env={
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("fine"), done.stderr[-2000:]


def test_the_folder_holds_the_whole_package_folder_and_its_card(push, tmp_path):
    push("--dry-run", tmp_path / "it")
    code = tmp_path / "it" / "custom_generate"
    source = ROOT / "tetris_hf" / "generation"
    assert {file.name for file in code.iterdir()} == {file.name for file in source.glob("*.py")} | {"requirements.txt"}
    assert all(file.read_bytes() == (source / file.name).read_bytes() for file in code.glob("*.py"))
    card = ModelCard.load(tmp_path / "it" / "README.md")
    assert "custom_generate" in card.data.tags and card.data.to_dict()["library_name"] == "transformers"
    assert f'custom_generate="{tmp_path / "it"}"' in card.text and tetris_hf.__version__ in card.text
    assert not re.search(r"\{\w+\}", card.text), "a placeholder is left"
    for argument in ("tetris_capacity", "assistant_model", "num_assistant_tokens", "tetris_selector", "tetris_stats"):
        assert f"`{argument}`" in card.text


def test_requirements_are_those_of_the_package():
    stated = (ROOT / "pyproject.toml").read_text()
    by_name = {}
    for line in (ROOT / "hub" / "requirements.txt").read_text().split():
        name, bound = re.fullmatch(r"([a-z]+)([<>=].+)", line).groups()
        by_name.setdefault(name, []).append(bound)
    for name, bounds in by_name.items():
        assert f'"{name}{",".join(bounds)}"' in stated


def test_weights_load_as_their_cards_say(push, tmp_path, enabled):
    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = {**kit.TINY, **sizes, "vocab_size": 49152, "tie_word_embeddings": True, "initializer_range": 0.2}
    model, batch = LlamaForCausalLM(LlamaConfig(**config)).eval(), kit.ragged()
    plain = kit.plain(model, batch, max_new_tokens=6)
    for kind in ("medusa", "shallow"):
        folder = tmp_path / kind
        push("--dry-run", folder, "--kind", kind)
        assert {"README.md", "LICENSE", "config.json", "model.safetensors"} == {file.name for file in folder.iterdir()}
        card = ModelCard.load(folder / "README.md")
        assert "pip install tetris-hf" in card.text and "assets/" not in card.text and "`../" not in card.text
        code = re.search(r"```python\n(.*?)```", card.text, flags=re.DOTALL)[1]
        assert f'"{folder}"' in code
        code = code.replace(
            "model.generate(**batch,", "ours = model.generate(**batch, max_new_tokens=6, do_sample=False,"
        )
        exec(code, scope := {"model": model, "batch": batch})
        assert torch.equal(scope["ours"], plain)


def test_an_upload_sends_what_a_dry_run_writes(push, tmp_path, monkeypatch, capsys):
    sent = {}

    class Api:
        def create_repo(self, repo_id, private, exist_ok):
            sent["made"] = repo_id, private, exist_ok

        def upload_folder(self, repo_id, folder_path, commit_message, delete_patterns):
            sent["files"] = {str(f.relative_to(folder_path)) for f in Path(folder_path).rglob("*") if f.is_file()}
            sent["card"] = Path(folder_path, "README.md").read_text()
            return type("Commit", (), {"commit_url": "https://hub.example/commit"})

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert push("owner/tetris", "--private") == 0
    assert sent["made"] == ("owner/tetris", True, True) and 'custom_generate="owner/tetris"' in sent["card"]
    push("--dry-run", tmp_path / "it")
    assert sent["files"] == {str(f.relative_to(tmp_path / "it")) for f in (tmp_path / "it").rglob("*") if f.is_file()}
    assert "https://hub.example/commit" in capsys.readouterr().out


def test_wrong_destinations(push, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for argv, words in (
        (("--dry-run", tmp_path / "full"), "is not an empty folder"),
        (("not-an-id",), "is no Hub id: write OWNER/NAME"),
    ):
        with pytest.raises(SystemExit):
            push(*argv)
        assert words in capsys.readouterr().err
