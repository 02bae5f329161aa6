"""Fixtures: the tiny kit of `kit.py`, built once, and the state of transformers put back after every test."""

import copy
import sys

import kit
import pytest
import torch
import transformers

import tetris_hf


# Models this small lose time to a second thread, and one thread makes every run add in the same order.
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()


# Files of which a few tests take long. Begun first, they do not leave one process working alone at the end.
SLOW = ("test_notebooks.py", "test_examples.py", "test_parallel.py", "test_step_graphs.py", "test_real_text.py")


def pytest_collection_modifyitems(items):
    """With `--dist loadfile --no-loadscope-reorder`, files run in this order."""
    items.sort(key=lambda item: item.path.name not in SLOW)


@pytest.fixture(autouse=True)
def plain_generate():
    """Whatever a test enables for all models is undone after it."""
    yield
    tetris_hf.disable()


@pytest.fixture
def modules_cache(monkeypatch, tmp_path):
    """Code from Hub folders is copied to and imported from a place of the test's own, as if it were the first."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def enabled():
    """`generate` of all models knows `tetris_capacity`."""
    tetris_hf.enable()
    yield
    tetris_hf.disable()


@pytest.fixture(scope="session")
def target():
    """Two-layer Llama, vocabulary 64, no EOS, pad 0. Session-wide: a test that sets something on it must copy it."""
    return kit.tiny()


@pytest.fixture(scope="session")
def near(target):
    """The target with 2 % noise: accepts some drafts and rejects others."""
    return kit.near(target)


@pytest.fixture(scope="session")
def same(target):
    """An exact copy: every draft is accepted."""
    return copy.deepcopy(target)


@pytest.fixture(scope="session")
def far():
    """Other random weights: hardly a draft is accepted."""
    return kit.tiny(seed=17)


@pytest.fixture(scope="session")
def assistants(near, same, far):
    """The three of them by name."""
    return {"near": near, "same": same, "far": far}


@pytest.fixture
def batch():
    """Prompts of 3, 7 and 12 tokens, left-padded, with their mask."""
    return kit.ragged()


@pytest.fixture
def warnings_of_transformers(caplog):
    """What transformers' loggers warn of; they do not reach pytest's handler by themselves."""
    logger = transformers.utils.logging.get_logger("transformers")
    before = logger.propagate, logger.level
    logger.propagate = True
    transformers.utils.logging.set_verbosity_warning()
    yield caplog
    logger.propagate = before[0]
    transformers.utils.logging.set_verbosity_error()
