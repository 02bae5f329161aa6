"""`hub/push.py` writes repositories that work as they stand, and uploads what it wrote."""

import importlib
import json
import re
import shutil
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


# As long as those of a commit.
COMMIT = "7" * 40

CODE = """
import importlib.util, json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
assert importlib.util.find_spec("tetris_hf") is None
settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}


def speculated(target, repository, **arguments):
    plain = target.generate(**batch, **settings).sequences
    hub = {"custom_generate": repository, "trust_remote_code": True}
    out = target.generate(**batch, **settings, **hub, **arguments, tetris_capacity=5)
    assert torch.equal(out.sequences, plain)
    return out.tetris_stats


batch = torch.load("batch.pt")
target, near = (AutoModelForCausalLM.from_pretrained(name) for name in ("target", "near"))
assert speculated(target, "code", assistant_model=near).accepted.sum() > 0
speculated(target, "code", prompt_lookup_num_tokens=3)

torch.manual_seed(0)
settings["max_new_tokens"] = 6
wide = LlamaForCausalLM(LlamaConfig(**json.loads(sys.argv[1]))).eval()
for heads_repository, method in (("heads", "code"), ("heads", "heads"), ("owner/heads", "owner/code")):
    heads = AutoModel.from_pretrained(heads_repository, trust_remote_code=True)
    assert type(heads).__name__ == "MedusaHeads" and heads.weight.abs().sum() > 0
    assert speculated(wide, method, assistant_model=heads).verified.sum() > 0
print("fine")
"""


def wide_sizes():
    """A config for the shipped heads' width and vocabulary, with one layer."""
    sizes = {"hidden_size": 576, "intermediate_size": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 49152, "tie_word_embeddings": True}
    return {**kit.TINY, **sizes, "initializer_range": 0.2}


def as_downloaded(folder, name, home):
    """Put a repository where a download from the Hub would have put it."""
    place = home / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(folder, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)


def test_code_and_heads_work_in_a_process_without_the_package(push, tmp_path, target, near, capsys):
    assert push("--dry-run", tmp_path / "code") == 0
    shown = capsys.readouterr().out.split()
    assert {str(tmp_path / "code" / file) for file in ("custom_generate/generate.py", "LICENSE")} <= set(shown)
    assert push("--dry-run", tmp_path / "heads", "--kind", "medusa") == 0
    for name in ("code", "heads"):
        as_downloaded(tmp_path / name, f"owner/{name}", tmp_path / "home")
    target.save_pretrained(tmp_path / "target")
    near.save_pretrained(tmp_path / "near")
    torch.save(kit.ragged(), tmp_path / "batch.pt")
    # As in tests/generation/test_hub_folder.py: no folder of ours, no editable install can be found.
    site = [path for path in sys.path if path.endswith("site-packages")]
    script = f"import sys; sys.path[:0] = {site!r}\n{CODE}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, json.dumps(wide_sizes())],
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


def test_the_heads_bring_their_code(push, tmp_path):
    push("--dry-run", tmp_path / "it", "--kind", "medusa")
    code = tmp_path / "it" / "custom_generate"
    method = {file.name for file in (ROOT / "tetris_hf" / "generation").glob("*.py")}
    classes = {file.name for file in (ROOT / "tetris_hf" / "models").glob("medusa*.py")}
    assert {file.name for file in code.iterdir()} == method | classes | {"requirements.txt"}
    for name in classes:
        ours, source = (code / name).read_text(), (ROOT / "tetris_hf" / "models" / name).read_text()
        assert ours == source.replace("from ..generation.", "from .") and "from .." not in ours
        # The loader reads these lines and copies what they name; `from . import` it does not see.
        imported = re.findall(r"^ *from \.(\S*) import", ours, flags=re.MULTILINE)
        assert {f"{module}.py" for module in imported} <= method | classes
    card = ModelCard.load(tmp_path / "it" / "README.md")
    assert "custom_generate" in card.data.tags and not re.search(r"\{\w+\}", card.text), "a placeholder is left"


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


def test_weights_load_as_their_cards_say(push, tmp_path, enabled, modules_cache):
    torch.manual_seed(0)
    model, batch = LlamaForCausalLM(LlamaConfig(**{**wide_sizes(), "num_hidden_layers": 2})).eval(), kit.ragged()
    plain = kit.plain(model, batch, max_new_tokens=6)
    for kind in ("medusa", "shallow"):
        folder = tmp_path / kind
        push("--dry-run", folder, "--kind", kind)
        assert {"README.md", "LICENSE", "config.json", "model.safetensors"} <= {file.name for file in folder.iterdir()}
        card = ModelCard.load(folder / "README.md")
        assert "pip install tetris-hf" in card.text and "assets/" not in card.text and "`../" not in card.text
        blocks = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
        assert len(blocks) == {"medusa": 2, "shallow": 1}[kind]
        for code in blocks:
            assert f'"{folder}"' in code
            code = re.sub(r"model\.generate\(\s*\*\*batch,", "ours = model.generate(**batch, **short,", code)
            short = {"max_new_tokens": 6, "do_sample": False}
            exec(code, scope := {"model": model, "batch": batch, "short": short})
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
