"""lm-evaluation-harness: `generate_until` on a small local task in batches of eight, by every way to hand over C."""

import copy
import functools
import json

import kit
import pytest

import tetris_hf


lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("datasets")

PROMPTS = ["the cat", "a", "what is two and two", "say it", "that hat", "on", "the rat sat on a mat", "two cats"]


@pytest.fixture
def task(tmp_path):
    """Sixteen prompts of unequal lengths in a local file: two batches."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p, "answer": "a"}) for p in [*PROMPTS, *PROMPTS[::-1]]))

    def stopping_at(until):
        return {
            "task": "local",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path / "cache")},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": until, "max_gen_toks": 20, "do_sample": False},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }

    return stopping_at


def answers(model, tokenizer, task, **kwargs):
    """What the harness read from the model, before it looked for stop strings in it and after: all it scores."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu"),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        **kwargs,
    )
    samples = sorted(results["samples"]["local"], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples], results["results"]["local"]["exact_match,none"]


def common(texts, tokenizer):
    """A letter that most texts have at some place: a stop string that ends rows at unequal lengths."""
    # The harness looks for stop strings in the text of padding, too.
    letters = {letter for text in texts for letter in text if letter.isascii() and letter.isalpha()}
    letters -= set(tokenizer.pad_token)
    return max(sorted(letters), key=lambda letter: sum(letter in text for text in texts))


def speculating(model, draft):
    model.generate = functools.partial(model.generate, custom_generate=tetris_hf.TetrisDecoding(draft, capacity=12))


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True])
def test_results_are_those_of_plain_greedy(model, draft, tokenizer, task, stops):
    until = ["\n"]
    expected = answers(model, tokenizer, task(until))
    if stops:
        until = ["\n", common([text for ((text,),) in expected[0]], tokenizer)]
        longer, expected = expected, answers(model, tokenizer, task(until))
        assert sum(a != b for a, b in zip(longer[0], expected[0], strict=True)) > 4
    speculating(model, draft)
    with kit.counted_tokens(model) as tokens:
        assert answers(model, tokenizer, task(until)) == expected
    assert max(tokens[1:]) == 8 + 12


@pytest.mark.slow
def test_a_tokenizer_that_pads_with_its_end_of_text(model, draft, tokenizer, task):
    # As most tokenizers do that have no padding token of their own.
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = padding.eos_token
    expected = answers(model, padding, task(["\n"]))
    speculating(model, draft)
    assert answers(model, padding, task(["\n"])) == expected


@pytest.mark.slow
def test_enabled_with_the_arguments_bound(model, draft, tokenizer, task):
    expected = answers(model, tokenizer, task(["\n"]))
    tetris_hf.enable(model)
    model.generate = functools.partial(model.generate, assistant_model=draft, tetris_capacity=12)
    with kit.counted_tokens(model) as tokens:
        assert answers(model, tokenizer, task(["\n"])) == expected
    assert max(tokens[1:]) == 8 + 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "gen_kwargs",
    [{"tetris_capacity": 12, "prompt_lookup_num_tokens": 3}, "tetris_capacity=12,prompt_lookup_num_tokens=3"],
    ids=["dict", "command line"],
)
def test_gen_kwargs_with_prompt_lookup(model, tokenizer, task, enabled, gen_kwargs):
    expected = answers(model, tokenizer, task(["\n"]))
    with kit.counted_tokens(model) as tokens:
        assert answers(model, tokenizer, task(["\n"]), gen_kwargs=gen_kwargs) == expected
    assert max(tokens[2:]) > 8


@pytest.mark.slow
def test_a_model_in_gen_kwargs_splits_the_batch(model, draft, tokenizer, task, enabled):
    # The harness copies the arguments for every request and batches those that are equal: copied models never are.
    expected = answers(model, tokenizer, task(["\n"]))
    with kit.counted_tokens(model) as tokens:
        out = answers(model, tokenizer, task(["\n"]), gen_kwargs={"tetris_capacity": 12, "assistant_model": draft})
    assert out == expected, "the text is right all the same"
    assert max(tokens) <= 1 + 12, "one row a call"
