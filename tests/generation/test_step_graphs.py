"""Steps of fixed shapes, kept from call to call. A stand-in for the CUDA graph runs the captured function itself, so
that everything but the capture is tested without a GPU: shapes, filler, ended rows, reuse and what invalidates it."""

import contextlib
import gc
import weakref

import kit
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import StoppingCriteria

import tetris_hf
from tetris_hf import (
    FixedWindowSelector,
    MedusaConfig,
    MedusaHeads,
    PromptLookupDrafter,
    TetrisDecoding,
    TetrisSelector,
)
from tetris_hf.generation import (
    assistant_drafter,
    captured_steps,
    compiled_layers,
    cuda_graph,
    decoding,
    packed_model,
    step_cache,
)
from tetris_hf.generation.calibration import AcceptanceCalibration
from tetris_hf.generation.packed_model import PackedModel
from tetris_hf.generation.packing import Packing
from tetris_hf.generation.speculation import sure_depth


class RunsAgain:
    """Stands in for `CudaGraph`: runs the function where the graph would replay it, on the same tensors."""

    RUNS = 3
    made: list["RunsAgain"] = []

    def __init__(self, function, *inputs):
        self.function, self.inputs, self.replays = function, [given.clone() for given in inputs], 0
        for _ in range(self.RUNS):
            with Operations() as captured:
                self.result = function(*self.inputs)
        self.captured = captured
        RunsAgain.made.append(self)

    def __call__(self, *inputs):
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        with Operations() as replayed:
            self.result = self.function(*self.inputs)
        assert replayed.shapes == self.captured.shapes, "a shape depends on values"
        assert replayed.outside == self.captured.outside, "a tensor that the graph knows by address was replaced"
        self.replays += 1
        return self.result


class Operations(TorchDispatchMode):
    """Records the shape of every result and every tensor from outside, and refuses what would wait for a device."""

    WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal")

    def __enter__(self):
        self.shapes: list = []
        self.outside: list = []  # storages by address, in the order of their use
        self._inside: dict = {}  # by address, and kept alive, so that no address comes twice
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        assert not any(name.startswith(wait) or name == f"_{wait}2" for wait in self.WAITS), f"{name} waits"
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        assert not any(index is not None and index.dtype == torch.bool for index in indices), "a mask as index waits"
        result = function(*args, **(kwargs or {}))
        given = [leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        self.outside += [address for address in given if address not in self._inside]
        for leaf in tree_leaves(result):
            if torch.is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given:
                self._inside[leaf.untyped_storage().data_ptr()] = leaf
        self.shapes.append((name, getattr(result, "shape", None)))
        return result


class Unwatched(contextlib.nullcontext):
    """In the place of [`Operations`]: the compiler does not work under it."""

    shapes = outside = ()

    def __enter__(self):
        return self


def only_if(wanted, body):
    """What a replay does with a part of a graph that has a condition."""
    with _disable_current_modes():  # what runs depends on values, which nothing else may
        if wanted:
            body()


def pretend_gpu(monkeypatch):
    """Everything lies on a GPU, as it were."""
    RunsAgain.made = []
    monkeypatch.setattr(step_cache, "can_branch", lambda device: True)
    monkeypatch.setattr(assistant_drafter, "only_if", only_if)
    monkeypatch.setattr(decoding, "on_one_gpu", lambda *args: True)
    monkeypatch.setattr(captured_steps, "CudaGraph", RunsAgain)
    monkeypatch.setattr(packed_model, "CudaGraph", RunsAgain)
    # Compilation has its own test; its result is the same for any layer.
    monkeypatch.setattr(step_cache, "_uncompiled", AnyModel())
    lay_out = Packing.of.__func__

    def checked(cls, counts, first_positions, num_tokens, max_count, max_length):
        with _disable_current_modes():
            assert int(counts.sum()) <= num_tokens and int(counts.max()) <= max_count, "tokens without a place"
        return lay_out(cls, counts, first_positions, num_tokens, max_count, max_length)

    monkeypatch.setattr(Packing, "of", classmethod(checked))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    pretend_gpu(monkeypatch)
    tetris_hf.release_graphs()
    yield
    tetris_hf.release_graphs()


class Calibrated(TetrisSelector):
    def __init__(self):
        super().__init__(calibration=AcceptanceCalibration(6))


class AnyModel(weakref.WeakSet):
    def __contains__(self, model):
        return True


def heads(target):
    torch.manual_seed(0)
    return MedusaHeads(MedusaConfig(hidden_size=32, vocab_size=kit.VOCABULARY, medusa_num_heads=3)).eval()


DRAFTERS = {
    "near": lambda target: kit.near(target),
    "same": lambda target: kit.tiny(),
    "heads": heads,
    "lookup": lambda target: PromptLookupDrafter(),
    "mixed": lambda target: [PromptLookupDrafter(), kit.near(target)],
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("capacity", [0, 4, 100])
def test_greedy_text_is_that_of_plain_generate(name, capacity):
    target = kit.tiny()
    drafter = DRAFTERS[name](target)
    for seed, eos in ((0, None), (2, [7, 30, 41])):
        batch = kit.ragged(seed=seed)
        expected = kit.plain(target, batch, eos_token_id=eos)
        out = kit.speculate(target, batch, drafter, capacity, 3, eos_token_id=eos)
        assert torch.equal(out.sequences, expected)
        stats = out.tetris_stats
        assert (stats.verified.sum() <= stats.steps * capacity) and stats.target_forwards >= stats.steps + 1
    assert all(graph.replays > 0 for graph in RunsAgain.made) and RunsAgain.made


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("capacity", [2, 4])
def test_slow_rows_first_selects_in_a_captured_step_what_it_selects_in_an_eager_one(name, capacity, monkeypatch):
    target, batch = kit.tiny(), kit.ragged()
    stats = []
    for _ in range(2):
        drafter, selector = DRAFTERS[name](target), TetrisSelector(slowest_first=True)
        out = kit.speculate(target, batch, drafter, capacity, 3, selector, max_new_tokens=30)
        assert torch.equal(out.sequences, kit.plain(target, batch, max_new_tokens=30))
        stats.append(out.tetris_stats)
        assert out.tetris_stats.verified.sum() <= out.tetris_stats.steps * capacity
        captured = len(RunsAgain.made)
        monkeypatch.setattr(decoding, "on_one_gpu", lambda *args: False)
    assert captured and torch.equal(stats[0].verified, stats[1].verified)
    assert torch.equal(stats[0].accepted, stats[1].accepted)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("captured", [True, False])
def test_no_step_drafts_deeper_than_the_budget_reaches(name, captured, monkeypatch):
    target, capacity = kit.tiny(), 2
    monkeypatch.setattr(decoding, "on_one_gpu", lambda *args: captured)
    out = kit.speculate(target, kit.ragged(), DRAFTERS[name](target), capacity, 5, TetrisSelector(), max_new_tokens=30)
    assert torch.equal(out.sequences, kit.plain(target, kit.ragged(), max_new_tokens=30))
    stats = out.tetris_stats
    assert stats.drafted.shape == stats.verified.shape == (3, 5), "as deep as was asked for, in the statistics"
    assert stats.drafted[:, :capacity].any() and not stats.drafted[:, capacity:].any()
    if name in ("near", "same") and not captured:  # whose stand-in counts what it runs again
        assert stats.draft_forwards <= 1 + capacity * stats.steps, "one for each place, after that of the prompts"


@pytest.mark.parametrize(
    "selector, seed, runs_all",
    [
        (TetrisSelector, None, False),
        (TetrisSelector, None, True),
        (TetrisSelector, 3, False),
        (FixedWindowSelector, None, False),
        (Calibrated, None, False),
    ],
)
def test_places_that_cannot_be_selected_are_left_out(selector, seed, runs_all, monkeypatch):
    """A captured step selects, verifies and says the same as an eager one, whether or not such places are computed."""
    target, runs = kit.tiny(), []
    if runs_all:  # as in a graph that cannot leave parts out
        monkeypatch.setattr(assistant_drafter, "only_if", cuda_graph.only_if)
    forward = PackedModel.forward
    monkeypatch.setattr(
        PackedModel, "forward", lambda packed, *args, **given: runs.append(packed) or forward(packed, *args, **given)
    )
    for capacity, depth, lengths in ((3, 3, (3, 7)), (6, 6, (5, 1, 2))):
        stats, texts, computed = [], [], []
        for captured in (False, True):
            monkeypatch.setattr(decoding, "on_one_gpu", lambda *args, captured=captured: captured)
            batch, assistant, own = kit.ragged(lengths), kit.near(target), selector()
            for _ in range(2):  # the second time nothing is captured any more
                runs.clear()
                given = {"max_new_tokens": 16, "do_sample": seed is not None, "return_dict_in_generate": True}
                ours = TetrisDecoding(assistant, capacity, depth, own, seed=seed)
                out = target.generate(**batch, **given, custom_generate=ours)
            stats.append(out.tetris_stats)
            texts.append(out.sequences)
            computed.append(sum(packed.model is assistant for packed in runs) - 1)  # the prompts'
        assert torch.equal(*texts)
        for name in ("verified", "accepted", "bonus", "live_steps"):
            assert torch.equal(*(getattr(its, name) for its in stats)), name
        eager, captured = stats
        sure = sure_depth(capacity, len(lengths))
        assert torch.equal(eager.drafted[:, sure:], captured.drafted[:, sure:])
        # One step more is run, in which nobody is left.
        most, least = depth * (captured.steps + 1), computed[0]
        assert (computed[1] == most) if runs_all else (least <= computed[1] < most)


@pytest.mark.parametrize(
    "capacity, num_rows, expected", [(4, 4, 2), (7, 4, 2), (3, 1, 4), (2, 2, 2), (8, 8, 3), (32, 16, 5), (64, 64, 6)]
)
def test_places_that_are_nearly_always_wanted_are_not_asked_about(capacity, num_rows, expected):
    assert sure_depth(capacity, num_rows) == expected


def test_drafters_catch_up_with_what_others_drafted():
    # Tied embeddings and small weights: the text repeats itself, so that lookups stand, many in a row.
    target = kit.tiny(tie_word_embeddings=True, initializer_range=0.02)
    for drafters in ([PromptLookupDrafter(), kit.near(target)], [kit.near(kit.tiny()), PromptLookupDrafter()]):
        out = kit.speculate(target, kit.ragged(), drafters, 12, 5, max_new_tokens=40)
        assert torch.equal(out.sequences, kit.plain(target, kit.ragged(), max_new_tokens=40))
        assert out.tetris_stats.mean_accepted > 3


def test_the_second_call_captures_nothing():
    target = kit.tiny()
    assistant = kit.near(target)
    first = kit.speculate(target, kit.ragged(seed=1), assistant, 9, 3, max_new_tokens=20)
    assert len(RunsAgain.made) == 1
    before = {name: value.clone() for name, value in vars(first.tetris_stats).items() if torch.is_tensor(value)}
    sequences = first.sequences.clone()
    # Other prompts, other length, a longer answer: the same step.
    batch = kit.ragged((5, 2, 4), seed=2)
    second = kit.speculate(target, batch, assistant, 9, 3, max_new_tokens=30)
    assert len(RunsAgain.made) == 1
    assert torch.equal(second.sequences, kit.plain(target, batch, max_new_tokens=30))
    # What the user holds of the first call is the user's.
    assert torch.equal(first.sequences, sequences)
    assert all(torch.equal(getattr(first.tetris_stats, name), value) for name, value in before.items())
    third = kit.speculate(target, kit.ragged(seed=1), assistant, 9, 3, max_new_tokens=20)
    assert torch.equal(third.sequences, first.sequences) and len(RunsAgain.made) == 1


def test_what_makes_another_step():
    target, other = kit.tiny(), kit.tiny(seed=4)
    assistant = kit.near(target)

    def graphs(drafter=assistant, capacity=9, depth=3, lengths=kit.LENGTHS, **settings):
        before = len(RunsAgain.made)
        batch, settings = kit.ragged(lengths), {"max_new_tokens": 6, **settings}
        out = kit.speculate(target, batch, drafter, capacity, depth, **settings)
        if not settings.get("do_sample"):
            assert torch.equal(out.sequences, kit.plain(target, batch, **settings))
        return len(RunsAgain.made) - before

    assert graphs() == 1 and graphs() == 0
    assert graphs(capacity=5) == 1
    assert graphs(depth=2) == 1
    assert graphs(lengths=(3, 7)) == 1
    assert graphs(eos_token_id=9) == 1
    assert graphs(do_sample=True) == 1
    assert graphs(do_sample=True, temperature=0.5) == 1 and graphs(do_sample=True, temperature=0.5) == 0
    assert graphs(drafter=other) == 1
    assert graphs() == 1 and graphs() == 0
    with torch.no_grad():  # weights that change in place are followed
        target.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    assert graphs() == 0
    target.model.layers[0].mlp.down_proj.weight.data = target.model.layers[0].mlp.down_proj.weight.data * 0.5
    assert graphs() == 1, "a weight has moved"
    target.model.layers[0].mlp = other.model.layers[0].mlp
    assert graphs() == 1, "a module was replaced"
    target.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    assert graphs() == 1, "a hook was added"
    target.generation_config.disable_compile = True
    assert graphs() == 0
    target.generation_config.disable_compile = False


def test_compiled_layers_and_functions_change_nothing(monkeypatch):
    monkeypatch.setattr(step_cache, "_uncompiled", weakref.WeakSet())
    monkeypatch.setitem(globals(), "Operations", Unwatched)
    target = kit.tiny(num_hidden_layers=3)
    assistant = kit.near(target)
    before = [sorted(vars(layer)) for layer in target.model.layers]
    for lengths, capacity in (((3, 7, 12), 9), ((4, 9), 4), ((5, 1, 2, 4), 12)):
        batch = kit.ragged(lengths)
        out = kit.speculate(target, batch, assistant, capacity, 3)
        assert torch.equal(out.sequences, kit.plain(target, batch))
    assert target not in step_cache._uncompiled and len(RunsAgain.made) == 3
    # Few compilations serve all layers of target and assistant and any number of tokens: one for each of the numbers
    # that the compiler thinks special.
    for function, kinds in ((type(target.model.layers[0]).forward, 1), (compiled_layers._own_forward, 2)):
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__)
        assert kinds <= len(entries) <= 3 * kinds, function
    assert not compiled_layers._refused
    assert [sorted(vars(layer)) for layer in target.model.layers] == before


class EndsAfter(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 5 == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 4, "eos_token_id": 7},
        {"stopping_criteria": [EndsAfter()], "eos_token_id": 60},
        {"output_scores": True, "output_hidden_states": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_forwards_are_captured_where_a_step_cannot_be(name, settings):
    target = kit.tiny()
    drafter = DRAFTERS[name](target)
    for seed in range(2):
        batch = kit.ragged(seed=seed)
        expected = kit.plain(target, batch, **{k: v for k, v in settings.items() if not k.startswith("output")})
        out = kit.speculate(target, batch, drafter, 7, 3, **settings)
        assert torch.equal(out.sequences, expected)
    of_target = [graph for graph in RunsAgain.made if graph.replays]
    assert of_target and all("tetris" not in name for name in settings)
    if "output_scores" in settings:
        plain = target.generate(
            **batch, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_scores=True,
            eos_token_id=None,
        )  # fmt: skip
        for ours, theirs in zip(out.scores, plain.scores, strict=False):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_models_are_not_kept_alive():
    target = kit.tiny()
    assistant = kit.near(target)
    kit.speculate(target, kit.ragged(), assistant, 9, 3)
    kit.speculate(target, kit.ragged(), target, 9, 3)
    alive = weakref.ref(target)
    RunsAgain.made = []  # a real graph does not know what it was captured from
    del target
    gc.collect()
    assert alive() is None and not len(step_cache._kept)


def test_an_interrupted_step_is_not_kept(monkeypatch):
    target = kit.tiny()
    assistant = kit.near(target)
    kit.speculate(target, kit.ragged(), assistant, 9, 3)
    broken = RunsAgain.made[0]
    monkeypatch.setattr(broken, "function", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        kit.speculate(target, kit.ragged(), assistant, 9, 3)
    out = kit.speculate(target, kit.ragged(), assistant, 9, 3)
    assert len(RunsAgain.made) == 2 and torch.equal(out.sequences, kit.plain(target, kit.ragged()))


def test_a_drafter_of_the_users_serves_one_step_at_a_time():
    target = kit.tiny()
    lookup = PromptLookupDrafter()
    for capacity, depth in ((9, 3), (5, 4), (9, 3), (9, 6)):
        out = kit.speculate(target, kit.ragged(), lookup, capacity, depth)
        assert torch.equal(out.sequences, kit.plain(target, kit.ragged()))
        assert sum(len(steps) for steps in step_cache._kept.values()) == 1


def test_a_model_that_waits_runs_without_graphs(monkeypatch):
    def refuse(*args):
        raise cuda_graph.CannotCapture("it waits")

    monkeypatch.setattr(captured_steps, "CudaGraph", refuse)
    monkeypatch.setattr(packed_model, "CudaGraph", refuse)
    target = kit.tiny()
    for settings in ({}, {}, {"repetition_penalty": 1.3}):
        out = kit.speculate(target, kit.ragged(), kit.near(target), 9, 3, **settings)
        assert torch.equal(out.sequences, kit.plain(target, kit.ragged(), **settings))


def test_streamed_tokens_are_those_of_the_text():
    class Gather(tetris_hf.RowStreamer):
        def __init__(self):
            self.rows, self.ended = {}, []

        def put_row(self, row, tokens):
            self.rows.setdefault(row, []).extend(tokens.tolist())

        def end_row(self, row):
            self.ended.append(row)

    target = kit.tiny()
    batch = kit.ragged()
    gather = Gather()
    out = target.generate(
        **batch,
        max_new_tokens=12,
        do_sample=False,
        custom_generate=TetrisDecoding(kit.near(target), 9, num_assistant_tokens=3, streamer=gather),
    )
    width = batch["input_ids"].shape[1]
    assert [gather.rows[row] for row in range(3)] == out[:, width:].tolist() and sorted(gather.ended) == [0, 1, 2]
