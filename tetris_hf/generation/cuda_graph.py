"""A function on the GPU, captured once and replayed: the CPU then launches it in one go.

Knows streams and graphs. Does not know what the function computes.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Generic, TypeVar

import torch
from torch import nn


Result = TypeVar("Result")


class CannotCapture(RuntimeError):
    """The function waits for the device, or does something else that no graph can hold."""


def on_one_gpu(device: torch.device, *modules: nn.Module) -> bool:
    """Whether all that `modules` compute with lies on `device`, a GPU."""
    tensors = (tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
    return device.type == "cuda" and all(tensor.device == device for tensor in tensors)


@contextmanager
def drawing_none(device: torch.device) -> Iterator[None]:
    """Within this context, random draws are of its own: afterwards, those of the user go on as if it had not been."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class CudaGraph(Generic[Result]):
    """
    A captured function. Replays read and write the tensors that the function closed over, and the copies of its
    arguments, at the same addresses; what it returns is overwritten by the next replay.

    The function runs three times before it can be replayed: to settle lazy allocations, to see whether it waits for
    the device, and to be captured. Random numbers are fresh in every replay, and the capture draws none.

    Args:
        function (`Callable`): What to capture. Its Python side effects happen at the capture only.
        inputs (`torch.Tensor`): Its arguments, from which replays take shapes and dtypes.

    Raises:
        [`CannotCapture`]: If the function cannot be captured. Nothing is left half-captured.
    """

    RUNS = 3

    def __init__(self, function: Callable[..., Result], *inputs: torch.Tensor):
        self.inputs = [given.clone() for given in inputs]
        self.device = torch.device("cuda", torch.cuda.current_device())
        random_state = torch.cuda.get_rng_state(self.device)
        self._settle(function)
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()  # a tensor that is freed while capturing breaks the capture
        try:
            with torch.cuda.graph(self._graph, stream=_side_stream(self.device)):
                self.result = function(*self.inputs)
        finally:
            if collecting:
                gc.enable()
            torch.cuda.set_rng_state(random_state, self.device)

    def _settle(self, function: Callable[..., Result]) -> None:
        """Two runs; in the second, a wait for the device is an error, before it can break a capture."""
        stream, before = _side_stream(self.device), torch.cuda.get_sync_debug_mode()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                function(*self.inputs)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the check is a prototype
                    torch.cuda.set_sync_debug_mode("error")
                function(*self.inputs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CannotCapture(str(error).strip().split("\n")[0]) from error
        finally:
            torch.cuda.set_sync_debug_mode(before)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, *inputs: torch.Tensor) -> Result:
        """Replay with other values. Returns the same tensors every time."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self.result


@functools.cache
def can_branch(device: torch.device) -> bool:
    """
    Whether graphs on `device` can hold parts that a replay leaves out, which takes torch 2.13 and CUDA 12.4. Tried out
    once.
    """
    if device.type != "cuda" or not hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node"):
        return False
    runs = torch.zeros((), device=device)
    wanted = torch.zeros((), dtype=torch.bool, device=device)
    try:
        graph = CudaGraph(lambda: only_if(wanted, lambda: runs.add_(1)))
    except RuntimeError:
        return False
    runs.zero_()
    graph()
    left_out = float(runs) == 0
    wanted.fill_(True)
    graph()
    return left_out and float(runs) == 1


def only_if(wanted: torch.Tensor, body: Callable[[], object]) -> None:
    """
    Run `body`. Where that is captured, a replay runs it only if `wanted` is true by then, which no host waits for.

    Args:
        wanted (`torch.BoolTensor` of shape `()`): The condition.
        body (`Callable`): Leaves what is read later in tensors that were made outside of it, and draws no random
            numbers.
    """
    if not (wanted.is_cuda and torch.cuda.is_current_stream_capturing()):
        body()
        return
    graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    graph.begin_capture_to_if_node(wanted)
    try:
        body()
    finally:
        graph.end_capture_to_conditional_node()


class LateCopies:
    """
    Copies of tensors for the host, which reads each one when the next is under way already, so that neither waits for
    the other.

    Args:
        late (`bool`, *optional*, defaults to `True`): Whether to read one late; else at once.
    """

    def __init__(self, late: bool = True):
        self._lag = int(late)
        self._copies: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def put(self, value: torch.Tensor) -> None:
        """Copy `value` as it is when all work queued so far is done."""
        event = None
        if value.is_cuda:
            value, event = value.to("cpu", non_blocking=True), torch.cuda.Event()
            event.record()
        else:
            value = value.clone()
        self._copies.append((value, event))

    def get(self, rest: bool = False) -> torch.Tensor | None:
        """The next copy to be read, if there is one that is old enough, or any if `rest`. Waits for it alone."""
        if len(self._copies) <= (0 if rest else self._lag):
            return None
        value, event = self._copies.popleft()
        if event is not None:
            event.synchronize()
        return value


class Moment:
    """
    When all work queued so far is done on a device. Nobody waits for it.

    Args:
        device (`torch.device`): Whose work.
    """

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))
        self._time = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        """Waits for this moment on a GPU."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000


class StageClock:
    """Times the stages of a captured function on the device: its events are part of the graph."""

    def __init__(self) -> None:
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What is captured within this context is one stage. Outside a capture, nothing happens."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            yield
            return
        start, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events[name] = (start, end)

    def seconds(self) -> dict[str, float]:
        """Of each stage in the last replay. Waits for it."""
        for _, end in self._events.values():
            end.synchronize()
        return {name: start.elapsed_time(end) / 1000 for name, (start, end) in self._events.items()}
