"""Repeats decoding steps of one shape, on a GPU as a CUDA graph.

The first steps of a shape run as they are. If it recurs, the next one is captured, and all further
ones are replayed: one launch instead of a thousand or more. Graphs last as long as the engine has
requests, because they hold the addresses of the weights that were rounded for them. Rows are
sampled in the graph, unless `top_k` or `top_p` of one of them needs to look at values on the host;
then the graph ends with the logits.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from laurel.generation.transformers.batch import SamplingRows, sample_tokens
from laurel.models.forest.decoder import PASSES, uncompiled
from laurel.models.forest.decoding import DecodePlan
from laurel.models.forest.policy import PolicyModel
from laurel.models.forest.static_step import StepShape

_log = logging.getLogger(__name__)

RUNS_BEFORE_CAPTURE = 2
"""Steps of a shape that run as they are. Capturing costs about as much as one of them."""

Replay = Callable[[], object]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Captures a program; returns what repeats it, and the tensor that holds its result every time."""


class _Key(NamedTuple):
    shape: StepShape
    is_filtered: bool
    has_greedy: bool


@dataclass(slots=True, eq=False)
class _Step:
    numbers: Tensor
    """The step's numbers on the device, where a graph finds them."""
    num_runs: int = 0
    replay: Replay | None = None
    result: Tensor | None = None
    """What a replay writes."""


class StaticSteps:
    """The decoding steps of a model, by shape."""

    def __init__(self, model: PolicyModel, *, capture: Capture | None = None) -> None:
        """Start without any graph.

        Args:
            capture: Captures a step; None: as a CUDA graph on a GPU, and never on a CPU.
        """
        self._model = model
        self._steps: dict[_Key, _Step] = {}
        self.capture = capture
        """Captures a step; None: no step is captured."""
        if capture is None and model.device.type == "cuda":
            self.capture = CudaGraphs(model.device)
        self._is_tried = False

    def sample(
        self, plan: DecodePlan, ids_N: Tensor, rows: SamplingRows, uniform_N: Tensor
    ) -> Tensor:
        """Sample the next token of each row.

        Args:
            plan: The plan of the step, of a store with static shapes.
            rows: The sampling parameters, on the host.

        Returns:
            `Sampled.joined` of the rows.
        """
        key = _Key(StepShape.of(plan), bool(rows.filtered), rows.has_greedy)
        columns = (ids_N, rows.top_k_N, rows.top_p_N.double(), rows.temperature_N.double())
        numbers = key.shape.pack(plan, [*columns, uniform_N])
        result = self._run(key, numbers)
        if not key.is_filtered:
            return result[:, : len(ids_N)]
        device = result.device
        return sample_tokens(result[: len(ids_N)], rows.to(device), uniform_N.to(device)).joined()

    def clear(self) -> None:
        """Forget all graphs."""
        self._steps.clear()

    def _run(self, key: _Key, numbers: Tensor) -> Tensor:
        step = self._steps.get(key)
        if step is None:
            # Graphs of memory that is gone are never replayed again.
            memory = key.shape.memory
            self._steps = {k: step for k, step in self._steps.items() if k.shape.memory == memory}
            step = self._steps[key] = _Step(torch.empty_like(numbers, device=self._model.device))
        step.numbers.copy_(numbers)
        if step.replay is None and step.num_runs >= RUNS_BEFORE_CAPTURE:
            self._try_capture(key, step)
        if step.replay is not None:
            step.replay()
            assert step.result is not None
            return step.result
        step.num_runs += 1
        if self.capture is None or self._is_tried:
            return self._compute(key, step.numbers)
        self._is_tried = True
        with HostReads() as reads, uncompiled(self._model):
            result = self._compute(key, step.numbers)
        if reads.names:
            self._give_up(f"the model needs values on the host ({', '.join(sorted(reads.names))})")
        return result

    def _try_capture(self, key: _Key, step: _Step) -> None:
        if self.capture is None:
            return
        try:
            with PASSES.kept_out() as is_alone:
                if is_alone:  # otherwise the next step of this shape may be
                    compute = partial(self._compute, key, step.numbers)
                    step.replay, step.result = self.capture(compute)
        except RuntimeError as error:  # torch's errors of CUDA and of memory
            # The end of a failed capture raises its own error, which does not say what failed.
            errors = [one for one in (error.__context__, error) if one is not None]
            self._give_up("; then ".join(f"{type(one).__name__}: {one}" for one in errors))

    def _give_up(self, reason: str) -> None:
        self.capture = None
        _log.warning("decoding steps are sampled without CUDA graphs: %s", reason)

    def _compute(self, key: _Key, numbers: Tensor) -> Tensor:
        plan, (ids_N, top_k_N, top_p_N, temperature_N, uniform_N) = key.shape.unpack(numbers, 5)
        hidden_ND = self._model.hidden_of_row(ids_N, plan.positions_N, plan)
        logits_NV = self._model.logits(hidden_ND).float()
        if key.is_filtered:
            return logits_NV
        rows = SamplingRows(
            temperature_N.view(torch.float64).float(),
            top_p_N.view(torch.float64).float(),
            top_k_N,
            filtered=(),
            has_greedy=key.has_greedy,
        )
        return sample_tokens(logits_NV, rows, uniform_N.view(torch.float64)).joined()


COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations for which the host must wait: they need values, or copy between devices.

    No graph can be captured with them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode, operations come before they are taken apart
            made = function.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        waits &= set(function.tags)
        if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            # Indices that are numbers need not be known, masks are counted.
            waits = {one for one in args[1] if one is not None and one.dtype == torch.bool}
        made = function(*args, **kwargs)
        devices = {one.device.type for one in (*args, made) if isinstance(one, Tensor)}
        if waits or (function.overloadpacket in COPIES and len(devices) > 1):
            self.names.add(function._schema.name)
        return made


class CudaGraphs:
    """Captures programs of one device as CUDA graphs that share their memory.

    They are replayed one after the other, and each result is read before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Capture a program that has run before, so that it allocates and loads nothing more.

        Only one capture may be under way in a process.
        """
        before = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        # The memory ends with the last graph that has it.
        pools = (other.pool() for other in self._graphs)
        pool = next(pools, None) or torch.cuda.graph_pool_handle()
        try:
            # Other threads may use the GPU meanwhile, and passes of models wait (`Passes`).
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(
                    graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = compute()
        except RuntimeError:
            # Otherwise torch takes the capture to go on: the allocator would free no cached memory
            # any more, not even where it runs out, and in releases before 2.13 dropout would fail.
            index = self._device.index
            with contextlib.suppress(RuntimeError):  # the capture had not begun, or has ended
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
                generator = torch.cuda.default_generators[index]
                generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own
        self._graphs.add(graph)
        return graph.replay, result
