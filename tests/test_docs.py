"""What the documentation shows runs: each block of Python, each claim about names. Commands: test_docs_commands.py."""

import ast
import re
import shutil
from pathlib import Path

import kit
import pytest
import torch
import transformers
from test_cli import folder  # noqa: F401

import tetris_hf


ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
]
PAGES += [f"assets/{card.parent.name}/README.md" for card in (ROOT / "assets").glob("*/README.md")]
PAGES = sorted(PAGES)

# Blocks of Python that need a package or data that is not always here: the same call, in the test of that tool.
BLOCKS_RUN_BY = {
    "HFLM(": "integrations/test_lm_eval.py::test_results_are_those_of_plain_greedy",
    "GRPOTrainer(": "integrations/test_trl.py::test_two_steps_of_training",
    "PeftModel.": "integrations/test_peft.py::test_adapters_on_and_off",
    "BitsAndBytesConfig(": "integrations/test_bitsandbytes.py::test_a_quantized_target_and_assistant",
    "OWNER/HEADS": "test_hub.py::test_code_and_heads_work_in_a_process_without_the_package",
    "prompts.map(": "integrations/test_datasets.py::test_map_over_batches",
}


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def functions_named(name):
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]


@pytest.fixture
def scope(folder, monkeypatch, modules_cache):  # noqa: F811
    """What blocks of Python take for granted, with tiny models under the names of large ones."""
    causal, words = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    load, read = causal.from_pretrained, words.from_pretrained

    def tiny_for(name, **kwargs):
        model = load(folder / ("near" if "0.5B" in str(name) else "target"), **kwargs)
        model.config.max_position_embeddings = 1024
        return model

    monkeypatch.setattr(causal, "from_pretrained", tiny_for)
    monkeypatch.setattr(words, "from_pretrained", lambda name, **kwargs: read(folder / "target", **kwargs))
    tetris_hf.enable()
    model, draft = tiny_for("target"), tiny_for("0.5B")
    tokenizer = words.from_pretrained("target", padding_side="left")
    some = ["w3 w4", "w5 w6 w7 w8", "w9"]
    return {
        "tetris_hf": tetris_hf,
        "pipeline": transformers.pipeline,
        "model": model,
        "draft": draft,
        "tokenizer": tokenizer,
        "prompts": some,
        "texts": some,
        "batch": kit.ragged(),
    }


@pytest.mark.parametrize(
    "page", [page for page in [*PAGES, "hub/card.md"] if blocks(page, "python") and "assets" not in page]
)
def test_blocks_of_python_run(page, scope, tmp_path):
    for code in blocks(page, "python"):
        if any(sign in code for sign in BLOCKS_RUN_BY):
            continue
        if "plot(" in code:
            pytest.importorskip("matplotlib")
        if "{repository}" in code:  # the card of the decoding method
            tetris_hf.disable()
            shutil.copytree(ROOT / "tetris_hf" / "generation", tmp_path / "it" / "custom_generate")
            code = code.replace("{repository}", str(tmp_path / "it"))
        code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", code)
        exec(compile(code, page, "exec"), scope)
        vars(scope["model"]).pop("generate", None)  # what the block has bound to the model


def test_the_example_drafter_is_exact_and_drafts(target, enabled):
    scope = {}
    exec(blocks("docs/drafters.md", "python")[0], scope)
    batch = kit.ragged()
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**batch, **settings).sequences
    drafter = scope["RetrievalDrafter"](plain.tolist())
    out = target.generate(**batch, **settings, assistant_model=drafter, tetris_capacity=6)
    assert torch.equal(out.sequences, plain)
    assert out.tetris_stats.accepted.sum() > 0


def test_every_public_name_is_documented():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in tetris_hf.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_blocks_that_do_not_run_here_have_their_test():
    assert [name for name in BLOCKS_RUN_BY.values() if not functions_named(name)] == []
    shown = "".join(code for page in PAGES for code in blocks(page, "python"))
    assert [sign for sign in BLOCKS_RUN_BY if sign not in shown] == []
