"""Defines the learner, which takes one optimizer step on a batch of micro-batches.

A learner does not know the algorithm. A micro-batch holds the inputs of the model and the labels
that the loss reads. The loss counts its denominator over all micro-batches before the first is
computed, so dividing a batch over micro-batches and ranks does not change the result.

`LocalLearner` is the learner of one process, which may be one rank of many;
`learner_group.LearnerGroup` is the learner of all ranks, which the loops use.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import (
    Any,
    Literal,
    Protocol,
    SupportsFloat,
    TypeGuard,
    TypeVar,
    cast,
    runtime_checkable,
)

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from laurel.config.policy import Milestones, NamedCall
from laurel.data.forest import Batcher, MicroBatch
from laurel.errors import ConfigError, counted
from laurel.models.checkpoint.export import save_policy, save_reward_model
from laurel.models.checkpoint.state import load_training_state, save_training_state
from laurel.models.checkpoint.store import Background
from laurel.models.forest.decoder import PASSES, Offloader
from laurel.models.forest.lockstep import BACKWARD, FORWARD, InStep, common_order, idle_pass
from laurel.models.forest.outputs import TokenOutputs
from laurel.models.forest.parts import (
    backward_in_parts,
    passes_of_backward,
    passes_of_outputs,
)
from laurel.models.forest.policy import PolicyModel, Reference
from laurel.models.parallel.mesh import AcrossRanks
from laurel.models.parallel.weights import saved_weights
from laurel.models.scoring import ScoringContract
from laurel.training.losses import LossOutput
from laurel.types import PaddedRows, TokenForest, TokenGroup, Weights
from laurel.workers.process import trim_heap

Label = TypeVar("Label")
LabelIn = TypeVar("LabelIn", contravariant=True)

Inputs = TokenForest | PaddedRows
ModelRole = Literal["model", "reference", "teacher"]

NOTHING_TO_LEARN = "no row of the batch teaches this loss anything"
ELSEWHERE = "the loss of another rank is not finite"


@runtime_checkable
class DivisibleLabel(Protocol):
    """The label of a group whose completions have losses that are independent of each other."""

    @property
    def num_completions(self) -> int:
        """The number of completions of the group."""

    def subset(self, indices: Iterable[int], /) -> Any:
        """Select the labels of some completions."""


class LossFunction(Protocol[LabelIn]):
    """A loss of the model's outputs, such as `losses.RewardLoss`."""

    def count(self, batch: Sequence[LabelIn], /) -> float:
        """Return what a batch adds to the denominator of the loss."""

    def __call__(
        self, outputs: Any, batch: Sequence[LabelIn], /, *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch, divided by the global denominator `num_groups`.

        `outputs` are scores [N, K] of a reward model, or `TokenOutputs` of a policy.
        """

    def metrics(self, sums: Mapping[str, SupportsFloat], /) -> dict[str, float]:
        """Compute metrics from the totals of `LossOutput.sums`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The outcome of an optimizer step."""

    metrics: dict[str, float]
    """The metrics of the loss, `grad_norm` and `lr`."""
    failure: str | None = None
    """The reason why the step was not applied; None if it was."""
    performance: dict[str, float] = field(default_factory=dict)
    """Metrics of how evenly the ranks were loaded, which are logged as `performance/...`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReport:
    """The report of one rank on a step."""

    sums: dict[str, Tensor]
    """The sums of metrics over the rank's own micro-batches."""
    learning_rate: float
    """The learning rate of the step."""
    grad_norm: float | None = None
    """The norm of the gradient over all ranks; None if it was not measured."""
    failure: str | None = None
    """The reason why the step was not applied, as in `Update`."""


class Learner(Protocol):
    """A model with its optimizer and schedule, in this process or sharded over ranks."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step (of the first parameter group)."""

    @property
    def dp_size(self) -> int:
        """The number of micro-batches that are computed concurrently."""

    def update(self, batch: Sequence[MicroBatch[Label]], loss: LossFunction[Label]) -> Update:
        """Take one optimizer step.

        The step is applied only if the loss and the gradient are finite. It is not applied either
        if the denominator of the loss is 0, because Adam moves even with a gradient of zero.
        """

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        role: ModelRole = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """Compute the outputs of the model for each batch, in order, without gradients and dropout.

        They are scores `[N, K]` of a reward model, or `TokenOutputs` without entropy of a policy.
        Batches whose outputs the caller does not consume need not be computed.

        Args:
            batches: Any number of inputs, as in `MicroBatch`.
            in_full_precision: Whether to compute in the dtype of the weights.
            temperature: The temperature of log-probabilities; None: that of the run.
        """

    def named_weights(self, *, changing_only: bool = False) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights by the names that `from_pretrained` knows, with adapters merged.

        No process ever holds the whole model. The values may be the tensors that the model trains:
        copy what you keep.

        Args:
            changing_only: Whether to yield only blocks that training changes, as `merged_weights`
                does.
        """

    def weights(self, version: int) -> Weights:
        """Return the weights for a generator, which reads them from `named_weights`.

        Args:
            version: The number of training steps so far.
        """

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """Write the model as a directory that Hugging Face loads.

        Args:
            directory: An existing directory.
            contract: The scoring contract of a reward model.
            in_background: Whether to return as soon as the weights have been copied to the host;
                `written` then reports on the writing.

        Raises:
            OSError: The disk reports an error.
        """

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """Write the state of optimizer, schedule and random generators, with `extra`.

        The format is that of `models.checkpoint.state`, and `in_background` is as in `export`.
        """

    def written(self, *, is_awaited: bool = False) -> float | None:
        """Report on background writing.

        Args:
            is_awaited: Whether to wait until all is written.

        Returns:
            The seconds that the slowest rank took; None while writing goes on. Further calls return
            the same value.

        Raises:
            OSError: The disk reported an error, and all writing has ended.
        """

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore the state that `save_state` wrote, and return the `extra` that it was given."""

    def resting(self) -> AbstractContextManager[None]:
        """Release device memory while the context is open; the model must not be used meanwhile."""


def weights_of(learner: Learner, version: int, *, is_partly_frozen: bool) -> Weights:
    """Return a learner's `named_weights` as `Weights`.

    `is_partly_frozen` says whether some parameters get no gradients.
    """
    return Weights(
        version=version,
        tensors=learner.named_weights,
        changing=partial(learner.named_weights, changing_only=True) if is_partly_frozen else None,
    )


def denominator_of(batch: Iterable[MicroBatch[Label]], loss: LossFunction[Label]) -> float:
    """Return the denominator of a batch's loss."""
    return sum(loss.count(micro_batch.labels) for micro_batch in batch)


def update_of(steps: Sequence[StepReport], loss: LossFunction[Any]) -> Update:
    """Combine the reports of all data-parallel ranks into the outcome of a step."""
    first = steps[0]
    failures = [step.failure for step in steps if step.failure is not None]
    # The rank on which the step failed gives the reason; the others only know that it failed.
    failure = next((f for f in failures if f != ELSEWHERE), failures[0] if failures else None)
    if first.grad_norm is None:
        return Update(metrics={}, failure=failure)
    totals: dict[str, Tensor] = {}
    for step in steps:
        add_up(totals, step.sums)
    metrics = loss.metrics(totals)
    metrics |= {"grad_norm": first.grad_norm, "lr": first.learning_rate}
    return Update(metrics=metrics, failure=failure)


def add_up(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """Add the sums of a micro-batch to those of the batch, in place.

    Of entries named `..._min` or `..._max`, the minimum or the maximum is kept.
    """
    for name, value in sums.items():
        if name not in totals:
            totals[name] = value
        elif name.endswith("_min"):
            totals[name] = torch.minimum(totals[name], value)
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value


# The learner of one process, which is the only one or one rank of many.


class LocalLearner:
    """The learner of one process, which is the only one or one rank of many.

    All ranks must call `take_step`, `outputs`, `named_weights`, `export`, `save_state` and
    `load_state` in the same order. `update` is only for a single process.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: NamedCall,
        scheduler: Sequence[NamedCall | Milestones] | None = None,
        max_grad_norm: float | None = None,
        reference: Reference | None = None,
        teacher: Reference | None = None,
        tokenizer: Any = None,
        ranks: AcrossRanks | None = None,
    ) -> None:
        """Build the optimizer over every parameter that gets gradients.

        Args:
            tokenizer: The tokenizer that is saved with a policy.
            ranks: The ranks over which the model is sharded; None for a single process.

        Raises:
            ConfigError: torch does not have the optimizer or scheduler, or refuses its arguments.
        """
        self.model = model
        self.reference = reference
        self.teacher = teacher
        self.tokenizer = tokenizer
        self.max_grad_norm = max_grad_norm
        self.ranks = ranks
        self.matmul: Callable[[nn.Module], AbstractContextManager[None]] | None = None
        """A context for forward and backward passes, such as `forest.policy.fast_matmul`."""
        _reshard(model)  # or some weights would be found whole, as a forward pass has left them
        self.named_parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizer = build_optimizer(optimizer, self.named_parameters)
        self.scheduler = build_scheduler(scheduler, self.optimizer)
        models = [model]
        if reference is not None and reference.model is not model:
            models.append(reference.model)
        if teacher is not None:
            models.append(teacher.model)
        self._resting = Offloader(models, self.optimizer)
        self._writing = Background("laurel-writing")

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step (of the first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def dp_size(self) -> int:
        """The number of micro-batches computed concurrently, which is 1 for a single process."""
        return 1

    def update(self, batch: Sequence[MicroBatch[Label]], loss: LossFunction[Label]) -> Update:
        """Take one optimizer step, as `Learner.update` describes."""
        denominator = denominator_of(batch, loss)
        if denominator == 0:
            self.optimizer.zero_grad(set_to_none=True)
            return Update(metrics={}, failure=NOTHING_TO_LEARN)
        return update_of([self.take_step(batch, loss, denominator=denominator)], loss)

    def take_step(
        self,
        batch: Sequence[MicroBatch[Label]],
        loss: LossFunction[Label],
        *,
        denominator: float,
        fillers: Collection[int] = (),
        in_step: bool = False,
    ) -> StepReport:
        """Compute this rank's part of an optimizer step.

        Args:
            batch: The micro-batches of this rank; every rank has the same number.
            denominator: The total of `loss.count` over the micro-batches of all ranks.
            fillers: The indices of micro-batches that only make the numbers equal, and count as 0.
            in_step: Whether the ranks agree on their passes first, as they must where one of them
                computes parts.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        # Read before the scheduler moves on: the rate that this step is taken with.
        rate = self.learning_rate
        sums: dict[str, Tensor] = {}
        agreed = self._agree(batch, fillers) if in_step else None
        losses_B = torch.stack(self._accumulate(batch, loss, denominator, fillers, sums, agreed))
        bad = (~losses_B.isfinite()).sum().double()
        parameters = [parameter for _, parameter in self.named_parameters]
        if self.ranks is not None:
            # All ranks decide alike: one that stepped alone would part from the others.
            bad = self.ranks.total(bad)
            norm = self.ranks.clip(parameters, self.max_grad_norm)
        else:
            limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
            norm = nn.utils.clip_grad_norm_(parameters, limit)
        # The only time that the host waits for the device, and once more for the sums.
        everything = [*losses_B, bad, norm.to(losses_B.device)]
        *values_B, num_bad, grad_norm = torch.stack(everything).tolist()
        if num_bad:
            self.optimizer.zero_grad(set_to_none=True)
            own = next((value for value in values_B if not math.isfinite(value)), None)
            failure = ELSEWHERE if own is None else f"the loss is {own}"
            return StepReport(sums={}, learning_rate=rate, failure=failure)
        sums = dict(zip(sums, torch.stack([*sums.values()]).cpu(), strict=True)) if sums else {}
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            failure = f"the norm of the gradient is {grad_norm}"
            return StepReport(sums=sums, learning_rate=rate, grad_norm=grad_norm, failure=failure)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return StepReport(sums=sums, learning_rate=rate, grad_norm=grad_norm)

    def _accumulate(
        self,
        batch: Sequence[MicroBatch[Label]],
        loss: LossFunction[Label],
        denominator: float,
        fillers: Collection[int],
        sums: dict[str, Tensor],
        in_step: InStep | None,
    ) -> list[Tensor]:
        # Continues after a loss that is not finite: to check, the host would have to wait for the
        # device in every micro-batch, and other ranks wait for this one in every pass.
        losses: list[Tensor] = []
        matmul = self.matmul(self.model) if self.matmul else nullcontext()
        with PASSES.under_way(), matmul:  # backward passes, too
            for number, micro_batch in enumerate(batch):
                if in_step is not None and number in fillers:
                    continue  # its passes are among those that are made for others
                if is_in_parts(micro_batch.inputs):
                    assert in_step is not None or self.ranks is None, "ranks agree on parts first"
                    results = self._backward_in_parts(micro_batch, loss, denominator, in_step)
                    for result in results:
                        losses.append(result.loss.detach())
                        add_up(sums, result.sums)
                    continue
                if in_step is not None:
                    in_step.before(BACKWARD)
                outputs = self.model(micro_batch.inputs)
                result = loss(outputs, micro_batch.labels, num_groups=denominator)
                losses.append(result.loss.detach())
                if number in fillers:
                    losses[-1] = torch.zeros_like(losses[-1])
                    (result.loss * 0.0).backward()  # type: ignore[no-untyped-call]
                    continue
                result.loss.backward()  # type: ignore[no-untyped-call]
                add_up(sums, result.sums)
            if in_step is not None:
                in_step.finish()
        if not losses:
            losses.append(torch.zeros((), device=cast(Any, self.model).device))
        return losses

    def _agree(self, batch: Sequence[MicroBatch[Any]], fillers: Collection[int]) -> InStep | None:
        """Agree with the other ranks on the passes of a step; None if there are no others."""
        if self.ranks is None:
            return None
        model: Any = self.model
        passes = [
            passes_of_backward(model, one.inputs, _units_of(one))
            if is_in_parts(one.inputs)
            else BACKWARD
            for number, one in enumerate(batch)
            if number not in fillers
        ]
        return InStep(model, common_order(self.ranks.gathered("".join(passes))))

    def _backward_in_parts(
        self,
        micro_batch: MicroBatch[Any],
        loss: LossFunction[Any],
        denominator: float,
        in_step: InStep | None,
    ) -> list[LossOutput]:
        model: Any = self.model
        labels, forest = micro_batch.labels, micro_batch.inputs
        assert isinstance(forest, TokenForest)

        def before(kind: str) -> None:
            if in_step is not None:
                in_step.before(kind)
            if model.device.type == "cpu":
                trim_heap()

        def loss_of(outputs: Any, some: Sequence[Any]) -> tuple[Tensor, LossOutput]:
            result = loss(outputs, some, num_groups=denominator)
            return result.loss, result

        units = _units_of(micro_batch)
        if units is None:
            return backward_in_parts(
                model, forest, None, lambda outputs, _: loss_of(outputs, labels), before=before
            )
        # A completion that has a loss of its own needs no others beside it.
        whose = [(g, i) for g, label in enumerate(labels) for i in range(label.num_completions)]

        def loss_of_units(outputs: Any, units: list[int]) -> tuple[Tensor, LossOutput]:
            chosen: dict[int, list[int]] = {}
            for group, index in (whose[unit] for unit in units):
                chosen.setdefault(group, []).append(index)
            return loss_of(outputs, [labels[g].subset(own) for g, own in chosen.items()])

        return backward_in_parts(model, forest, units, loss_of_units, before=before)

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        role: ModelRole = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
        in_step: bool = False,
    ) -> Iterator[Any]:
        """Compute the outputs of the model for each batch, as `Learner.outputs` describes.

        `in_step` says whether the ranks agree on their passes first, as in `take_step`.
        """
        model: Any = getattr(self, role)
        assert model is not None, f"this run has no {role}"
        network: Any = model.model if isinstance(model, Reference) else model
        missing = self._missing_passes(network, batches) if in_step else 0
        for batch in batches:
            # No context stays open between two batches, because other code computes then.
            with ExitStack() as stack:
                if self.matmul is not None:
                    stack.enter_context(self.matmul(network))
                if in_full_precision:
                    stack.enter_context(network.in_full_precision())
                if temperature is not None:
                    stack.enter_context(network.at_temperature(temperature))
                if isinstance(model, Reference | PolicyModel):
                    outputs = TokenOutputs(model.logprobs(batch), None)
                else:
                    stack.enter_context(evaluating(network))
                    outputs = network(batch)
            yield outputs
        for _ in range(missing):
            idle_pass(network, FORWARD)
        _reshard(network)

    def _missing_passes(self, network: Any, batches: Sequence[Inputs]) -> int:
        """Return how many passes more than this rank others need for their batches."""
        if self.ranks is None:
            return 0
        own = sum(
            len(passes_of_outputs(network, batch)) if is_in_parts(batch) else 1 for batch in batches
        )
        most: int = max(self.ranks.gathered(own))
        return most - own

    def named_weights(self, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of the weights, as `Learner.named_weights` describes."""
        model: Any = self.model
        return saved_weights(model.network, changing_only=changing_only)

    def weights(self, version: int) -> Weights:
        """Return the weights for a generator."""
        is_partly_frozen = any(not p.requires_grad for p in self.model.parameters())
        return weights_of(self, version, is_partly_frozen=is_partly_frozen)

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """Write the model as a directory that Hugging Face loads, as `Learner.export` describes."""
        model: Any = self.model
        background = self._writing if in_background else None
        if contract is not None:
            save_reward_model(directory, model, contract, card=card, background=background)
        else:
            save_policy(directory, model, self.tokenizer, card=card, background=background)

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """Write the state of optimizer, schedule and random generators."""
        save_training_state(
            directory,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra=extra,
            mesh=self._mesh,
            background=self._writing if in_background else None,
        )

    def written(self, *, is_awaited: bool = False) -> float | None:
        """Report on the background writing of this rank, as `Learner.written` describes."""
        return self._writing.outcome(is_awaited=is_awaited)

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore the state that `save_state` wrote, and return the `extra` that it was given."""
        return load_training_state(
            directory, optimizer=self.optimizer, scheduler=self.scheduler, mesh=self._mesh
        )

    def sleep(self) -> None:
        """Move model and optimizer to the host until `wake`."""
        self._resting.sleep()

    def wake(self) -> None:
        """Move model and optimizer back to the device."""
        self._resting.wake()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Release device memory while the context is open."""
        self.sleep()
        try:
            yield
        finally:
            self.wake()

    @property
    def _mesh(self) -> DeviceMesh | None:
        return None if self.ranks is None else self.ranks.mesh


def is_in_parts(inputs: Inputs) -> TypeGuard[TokenForest]:
    """Return whether the inputs take several passes of a model."""
    return isinstance(inputs, TokenForest) and inputs.is_in_parts


def _units_of(micro_batch: MicroBatch[Any]) -> Sequence[Sequence[int]] | None:
    """Return the sequences of each loss that needs no others beside it; None: there is one loss."""
    if not all(isinstance(label, DivisibleLabel) for label in micro_batch.labels):
        return None
    assert isinstance(micro_batch.inputs, TokenForest)
    singles = [range(n, n + 1) for n in range(micro_batch.inputs.num_completions)]
    return micro_batch.branches_of_N or singles


def _reshard(model: nn.Module) -> None:
    # Weights that a forward pass has gathered from other ranks are kept by FSDP until they are
    # resharded.
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients while the context is open."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def build_optimizer(
    config: NamedCall, named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    """Build the optimizer that an import path names.

    Unless the configuration decides, the fused kernel is used if torch has one: it computes the
    same in one pass over memory instead of a dozen.
    """
    make = _import("policy.optimizer.name", config.name, torch.optim.Optimizer)
    if issubclass(make, torch.optim.SparseAdam) or _needs_argument(make.step):
        raise ConfigError(
            f"policy.optimizer.name={config.name}: it needs sparse gradients, or to compute the "
            "loss several times a step, which training does not do; torch.optim.AdamW does well"
        )
    is_spread = any(isinstance(parameter, DTensor) for _, parameter in named_parameters)
    if is_spread and issubclass(make, (torch.optim.Adafactor, torch.optim.Rprop)):
        raise ConfigError(
            f"policy.optimizer.name={config.name}: torch cannot divide its steps over ranks; "
            "choose torch.optim.AdamW, or train on one rank"
        )
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in config.kwargs.items()}
    accepted = inspect.signature(make).parameters
    chosen = {"fused", "foreach", "capturable", "differentiable"} & set(kwargs)
    # Only the fused kernels of Adam support weights that are sharded over ranks.
    if "fused" in accepted and not chosen and (not is_spread or issubclass(make, torch.optim.Adam)):
        kwargs["fused"] = True
    try:
        return make(list(named_parameters), **kwargs)  # type: ignore[no-any-return]
    except _REFUSALS as error:
        raise ConfigError(
            f"policy.optimizer: {config.name} refuses these kwargs ({error}): "
            f"{_written(config)}. It takes: "
            f"{', '.join(name for name in accepted if name != 'params')}."
        ) from error


def build_scheduler(
    config: Sequence[NamedCall | Milestones] | None, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Build one scheduler, a sequence of schedulers that change at milestones, or none."""
    if config is None:
        return None
    calls = [entry for entry in config if isinstance(entry, NamedCall)]
    milestones = [entry.milestones for entry in config if isinstance(entry, Milestones)]
    if len(calls) == 1 and milestones in ([], [[]]):
        return _scheduler(calls[0], optimizer)
    if not calls or len(milestones) != 1 or len(milestones[0]) != len(calls) - 1:
        raise ConfigError(
            f"policy.scheduler: a list of {counted(len(calls), 'scheduler')} needs one entry "
            f"`milestones` with {counted(max(len(calls) - 1, 0), 'step')}"
            + ("" if calls else ", and a scheduler; null keeps the learning rate constant")
        )
    if any(a >= b for a, b in pairwise([0, *milestones[0]])):
        raise ConfigError(
            f"policy.scheduler: the milestones {milestones[0]} must be rising steps above 0"
        )
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer, [_scheduler(call, optimizer) for call in calls], milestones=milestones[0]
    )


def _scheduler(
    config: NamedCall, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler:
    make = _import("policy.scheduler.name", config.name, torch.optim.lr_scheduler.LRScheduler)
    if _needs_argument(make.step):
        raise ConfigError(
            f"policy.scheduler.name={config.name}: it needs a metric at every step, and here the "
            "learning rate follows the steps alone; choose another scheduler"
        )
    try:
        return make(optimizer, **config.kwargs)  # type: ignore[no-any-return]
    except _REFUSALS as error:
        accepted = [name for name in inspect.signature(make).parameters if name != "optimizer"]
        raise ConfigError(
            f"policy.scheduler: {config.name} refuses these kwargs ({error}): "
            f"{_written(config)}. It takes: {', '.join(accepted)}."
        ) from error


# Constructors of torch raise these errors for invalid arguments.
_REFUSALS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)


def _written(call: NamedCall) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in call.kwargs.items()) or "there are none"


def _needs_argument(step: Callable[..., object]) -> bool:
    _self, *others = inspect.signature(step).parameters.values()
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in others)


def _import(key: str, path: str, kind: type) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        home = torch.optim if kind is torch.optim.Optimizer else torch.optim.lr_scheduler
        classes = {n: c for n, c in vars(home).items() if inspect.isclass(c) and n[0] != "_"}
        known = sorted(n for n, c in classes.items() if issubclass(c, kind) and c is not kind)
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {home.__name__}.{near[0]}?" if near else ""
        raise ConfigError(
            f"{key}={path}: no such class.{hint} In {home.__name__}: {', '.join(known)}."
        ) from error
    if not (inspect.isclass(found) and issubclass(found, kind)):
        example = "AdamW" if kind is torch.optim.Optimizer else "lr_scheduler.LinearLR"
        raise ConfigError(
            f"{key}={path} is not a {kind.__name__}; name a class of torch, such as "
            f"torch.optim.{example}"
        )
    return found


Outputs = Callable[[Sequence[TokenForest | PaddedRows]], Iterable[Tensor]]
"""A function that computes a reward model's outputs, such as `Learner.outputs`."""


def reward_values(
    outputs: Outputs,
    groups: Sequence[TokenGroup],
    batcher: Batcher,
    on_batch: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Compute every output of a reward model at every token at which completions are read.

    Args:
        groups: At least one group, as the contract encodes it.
        batcher: Divides them; lists of answers may be larger than a micro-batch.
        on_batch: Called after each micro-batch with the number of groups that it begins, and of
            its tokens.

    Returns:
        float32 `[N, K]`, in the order of the groups.
    """
    counts = [count for group in groups for count in group.num_reads_G]
    ends = np.cumsum(counts).tolist()
    spans = iter(zip([0, *ends[:-1]], ends, strict=True))
    rows = [[range(*next(spans)) for _ in group.branches_ids_G] for group in groups]
    micro_batches = batcher.cut(
        *batcher.divide(groups, rows, lambda of, some: [of[i] for i in some])
    )
    computed = outputs([one.inputs for one in micro_batches])
    begun = {some[0].start for some in rows}
    values_NK: np.ndarray | None = None
    for micro_batch, outputs_NK in zip(micro_batches, computed, strict=True):
        scores_NK = outputs_NK.float().cpu().numpy()
        if values_NK is None:
            values_NK = np.full((ends[-1], scores_NK.shape[1]), np.nan, dtype=np.float32)
        values_NK[[row for some in micro_batch.labels for own in some for row in own]] = scores_NK
        if on_batch is not None:
            num_groups = sum(some[0].start in begun for some in micro_batch.labels)
            on_batch(num_groups, micro_batch.num_tokens)
    assert values_NK is not None
    return values_NK
