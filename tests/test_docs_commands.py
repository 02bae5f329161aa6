"""Each command that the documentation shows is understood, and run by a test; those of the command line run here."""

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import kit
import pytest
import torch
import transformers
from test_cli import folder, prompts, texts  # noqa: F401
from test_docs import PAGES, ROOT, blocks, functions_named
from transformers import LlamaConfig, LlamaForCausalLM

from tetris_hf.cli import main
from tetris_hf.cli.main import build_parser


# Which test runs what a command runs; a command of a kind that is not here fails `test_each_command_has_its_test`.
RUN_BY = {
    "make demo": "test_examples.py::test_the_demo_and_the_heads_on_real_weights",
    "accelerate launch": "test_parallel.py::test_a_job_of_two_processes_of_which_one_dies",
    "pip install": "test_packaging.py::test_installed_outside_the_checkout",
    "tetris-hf generate": "test_docs_commands.py::test_commands_of_a_page_run",
    "tetris-hf bench": "test_docs_commands.py::test_commands_of_a_page_run",
    "tetris-hf stats": "test_docs_commands.py::test_commands_of_a_page_run",
    "examples/distill_assistant.py": "test_examples.py::test_training_in_the_tiny_setting",
    "examples/medusa_generate.py": "test_examples.py::test_the_demo_and_the_heads_on_real_weights",
    "examples/medusa_train.py": "test_examples.py::test_training_in_the_tiny_setting",
    "examples/ray_batch.py": "integrations/test_ray.py::test_two_actors",
    "examples/tensor_parallel.py": "test_parallel.py::test_a_target_split_over_two_processes",
    "examples/demo.py": "test_examples.py::test_the_demo_and_the_heads_on_real_weights",
    "benchmarks/drafters.py": "test_docs_commands.py::test_benchmarks_that_count_run",
    "benchmarks/jobs.py": "benchmarks/test_jobs_benchmark.py::test_all_ways_serve_the_same_job",
    "benchmarks/estimators.py": "test_docs_commands.py::test_benchmarks_that_count_run",
    "benchmarks/paper/": "benchmarks/test_paper_figures.py::test_every_command_writes_records_and_a_figure",
    "benchmarks/parallel.py": "benchmarks/test_parallel_benchmark.py::test_every_phase_in_one_process",
    "benchmarks/selection.py": "test_docs_commands.py::test_benchmarks_that_count_run",
    "benchmarks/throughput.py": "benchmarks/test_throughput.py::test_plots_are_drawn_from_the_file",
    "hub/push.py": "test_hub.py::test_code_and_heads_work_in_a_process_without_the_package",
    "tests/sweep.py": "generation/test_sweep.py::test_equal_or_refused",
}
# What the continuous integration itself calls, or only rearranges files.
BY_CI = {"make test", "make quality", "make style"}


def shell_lines(page):
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def commands(page):
    """Lines of shell blocks, and code within text that is a command with an argument or a script of ours."""
    prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    inline = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    start = r"((make|python|pip|tetris-hf|accelerate|torchrun|mkdocs) \S|(examples|benchmarks|tests|hub)/\S+\.py)"
    return [*shell_lines(page), *(code for code in inline if re.match(start, code))]


def kind_of(words):
    """The key of a command in `RUN_BY`."""
    script = next((word for word in words if word.endswith(".py")), None)
    if script and script.startswith("tests/") and Path(script).name.startswith("test_"):
        return "make test"
    if any(word.startswith("benchmarks/paper/") for word in words):
        return "benchmarks/paper/"
    return script or (words[0] if words[0] == "python" else " ".join(words[:2]))


def test_each_command_has_its_test():
    unknown = set()
    for page in PAGES:
        for command in commands(page):
            words = shlex.split(command, comments=True)
            if words in (["python", "-m", "tetris_hf"], ["tetris-hf", "COMMAND", "--help"]):
                continue  # tests/test_cli.py: the other door, and help
            if kind_of(words) not in RUN_BY.keys() | BY_CI:
                unknown.add((page, command))
    assert not unknown, "add a test that runs it, and its name to RUN_BY"
    assert [name for name in RUN_BY.values() if not functions_named(name)] == []
    assert BY_CI - {"make style"} <= {f"make {word}" for word in (ROOT / ".ci" / "run").read_text().split()}


class Parsed(Exception):
    """Thrown once a script has understood its arguments."""


@contextmanager
def scripts_of(place, monkeypatch):
    """Import what lies beside a script as the script does, and forget it: such names mean nothing elsewhere."""
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / place), *sys.path])
        yield
    for name in set(sys.modules) - before:
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tetris_hf"):
            del sys.modules[name]


def understand(script, arguments, monkeypatch):
    """Start a script and stop it where it has parsed its arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        parse(self, *args, **kwargs)
        raise Parsed

    with scripts_of(Path(script).parent, monkeypatch), monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_commands_are_understood(page, monkeypatch):
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the demo's loader reads GGUF")
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    for command in commands(page):
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            shown = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
            assert shown.returncode == 0, shown.stderr
            words = shlex.split(shown.stdout.splitlines()[-1]) if words[1] == "demo" else words[:1]
        if "tetris_hf" in words and words[0] == "accelerate":
            words = ["tetris-hf", *words[words.index("tetris_hf") + 1 :]]
        if words[0] == "tetris-hf" and len(words) > 2 and words[1] != "COMMAND":
            assert build_parser().parse_args(words[1:]).run
        elif words[0] == "pip":
            name, _, extra = words[2].rstrip("]").partition("[")
            assert name in {"tetris-hf", "matplotlib"} and (not extra or extra in extras)
        elif script := next((word for word in words if word.endswith(".py")), None):
            arguments = words[words.index(script) + 1 :]
            assert (ROOT / script).is_file()
            if arguments:
                understand(script, arguments, monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if any("tetris-hf " in line for line in shell_lines(page))])
def test_commands_of_a_page_run(page, folder, prompts, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    small = {"generate": ["--max-new-tokens", "4"], "bench": ["--max-new-tokens", "4", "--repeats", "1"], "stats": []}
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        if words[0] == "tetris-hf":
            places = {"Qwen/Qwen2.5-7B-Instruct": folder / "target", "Qwen/Qwen2.5-0.5B-Instruct": folder / "near"}
            arguments = [str(places.get(word, word)) for word in words[1:]] + small[words[1]]
            assert main(arguments) == 0, capsys.readouterr().err
            capsys.readouterr()


@pytest.fixture(scope="module")
def wide(folder, tmp_path_factory):  # noqa: F811
    """A target of the shipped drafters' width with a tokenizer of few words, and prompts as Spec-Bench has them."""
    place = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"vocab_size": 49152, "tie_word_embeddings": True, "initializer_range": 0.2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**kit.TINY, **sizes})).save_pretrained(place / "model")
    transformers.AutoTokenizer.from_pretrained(folder / "target").save_pretrained(place / "model")
    kinds = ("translation", "summarization", "qa", "math_reasoning", "rag", "writing")
    lines = [json.dumps({"category": kind, "turns": [f"w{n} w7"]}) for n, kind in enumerate(kinds, start=2)]
    (place / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return place


@pytest.mark.parametrize("script", ["drafters", "estimators", "selection"])
def test_benchmarks_that_count_run(script, wide, monkeypatch, capsys):
    pytest.importorskip("gguf", reason="the demo's loader reads GGUF")
    small = {
        "drafters": [
            "--depth",
            "2",
            "--window",
            "1",
            "--drafters",
            "medusa",
            "shallow",
            "--per-family",
            "1",
            "--device",
            "cpu",
        ],
        "estimators": ["--every", "1", "--rows", "3", "--batches", "2", "--depth", "2"],
        "selection": ["--every", "1", "--rows", "2", "--batches", "1", "--depth", "2", "--window", "1"],
    }[script]
    place = ["--prompts", wide / "prompts.jsonl", "--model", wide / "model", "--max-new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", [script, *map(str, [*place, *small])])
    with scripts_of("benchmarks", monkeypatch):
        runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])
