"""The learner: micro-batches in, one optimizer step out.

It knows nothing of the algorithm. A micro-batch carries what the model reads and the labels that
the loss reads; the loss counts its denominator over all micro-batches before the first of them is
computed, so how a batch is cut into micro-batches, and over how many ranks, changes nothing.

`local_learner.LocalLearner` is one process, which may be one rank of many;
`learner_group.LearnerGroup` is all the ranks, as the loops see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, SupportsFloat, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from laurel.config.policy import Milestones, NamedCall
from laurel.models.checkpoint.export import save_policy, save_reward_model
from laurel.models.checkpoint.state import load_training_state, save_training_state
from laurel.models.checkpoint.store import Background
from laurel.models.forest.decoder import Resting
from laurel.models.forest.outputs import TokenOutputs
from laurel.models.forest.policy import PolicyModel, Reference
from laurel.models.parallel.mesh import AcrossRanks
from laurel.models.parallel.weights import saved_weights
from laurel.models.scoring import ScoringContract
from laurel.training.losses import LossOutput
from laurel.training.optimizers import build_optimizer, build_scheduler
from laurel.types import PaddedRows, TokenForest, Weights

Label = TypeVar("Label")
LabelIn = TypeVar("LabelIn", contravariant=True)

Inputs = TokenForest | PaddedRows
ModelRole = Literal["model", "reference"]

NOTHING_TO_LEARN = "no row of the batch teaches this loss anything"
ELSEWHERE = "the loss of another rank is not finite"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch(Generic[Label]):
    """The input of one forward pass, and the labels its outputs are compared with."""

    inputs: Inputs
    labels: Sequence[Label]
    num_tokens: int
    """Computed tokens: distinct ones in a forest, padding included in rows."""


class LossFunction(Protocol[LabelIn]):
    """A loss of the model's outputs, such as `losses.RewardLoss`."""

    def count(self, batch: Sequence[LabelIn], /) -> float:
        """Count what the batch adds to the denominator."""

    def __call__(
        self, outputs: Any, batch: Sequence[LabelIn], /, *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch, already divided by the global denominator.

        `outputs` is what the model gives: scores [N, K], or `TokenOutputs` of a policy.
        """

    def metrics(self, sums: Mapping[str, SupportsFloat], /) -> dict[str, float]:
        """Compute metrics from the totals of `LossOutput.sums`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The outcome of one step."""

    metrics: dict[str, float]
    """Metrics of the loss, `grad_norm` and `lr`."""
    failure: str | None = None
    """Why the step was not applied; None where it was."""
    performance: dict[str, float] = field(default_factory=dict)
    """Metrics of how evenly ranks were loaded, logged as `performance/...`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReport:
    """One rank's report on a step."""

    sums: dict[str, Tensor]
    """Sums of its own micro-batches."""
    learning_rate: float
    """Learning rate of the step."""
    grad_norm: float | None = None
    """Norm over all ranks; None where it was not measured."""
    failure: str | None = None
    """Why the step was not applied, as in `Update`."""


class Learner(Protocol):
    """A model with its optimizer and schedule, in this process or spread over ranks."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step (of the first parameter group)."""

    @property
    def dp_size(self) -> int:
        """Number of micro-batches that are computed concurrently."""

    def update(self, batch: Sequence[MicroBatch[Label]], loss: LossFunction[Label]) -> Update:
        """Take one optimizer step.

        The step is applied only if the loss and the gradient are finite. A batch that teaches
        nothing skips the optimizer too: Adam moves even with a gradient of zero.
        """

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        of: ModelRole = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """Compute the outputs of the model for each batch, in order, without gradients and dropout.

        Scores `[N, K]` of a reward model; of a policy `TokenOutputs` without entropy. Any number
        of batches; those not asked for need not be computed.

        Args:
            batches: Inputs as in `MicroBatch`.
            of: The model, or the policy as it was before its training.
            in_full_precision: Compute in the dtype of the weights.
            temperature: Temperature of log-probabilities; None: that of the run.
        """

    def named_weights(self, *, changing_only: bool = False) -> Iterable[tuple[str, Tensor]]:
        """Yield names and values as `from_pretrained` knows them, adapters merged.

        No process ever holds the whole model. Copy what you keep.

        Args:
            changing_only: Leave out what training cannot change; see `merged_weights`.
        """

    def weights(self, version: int) -> Weights:
        """Export the weights for a generator, as `named_weights`.

        Args:
            version: Training steps taken so far.
        """

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """Write a directory that Hugging Face loads.

        Args:
            directory: Exists.
            card: The README.
            contract: Scoring contract of a reward model.
            in_background: Come back when all that training changes has been copied to the host;
                `written` tells the rest.

        Raises:
            OSError: The disk refuses.
        """

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """Write optimizer, schedule and random generators, as `models.checkpoint.state` does.

        `in_background` as in `export`.
        """

    def written(self, *, is_awaited: bool = False) -> float | None:
        """Return the seconds that background writing took, once it is done; None while it goes on.

        Args:
            is_awaited: Do not come back before all of it is written.

        Returns:
            Seconds that the writing took, of the slowest rank; None while it goes on. It may be
            asked again, with the same answer.

        Raises:
            OSError: The disk refused. Nobody writes any more.
        """

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore the state that `save_state` wrote, and return the `extra` that it was given."""

    def resting(self) -> AbstractContextManager[None]:
        """Release device memory for the duration; the model must not be used meanwhile."""


def weights_of(learner: Learner, version: int, *, is_partly_frozen: bool) -> Weights:
    """Wrap `named_weights` of a learner; `is_partly_frozen`: some parameters take no gradients."""
    return Weights(
        version=version,
        tensors=learner.named_weights,
        changing=partial(learner.named_weights, changing_only=True) if is_partly_frozen else None,
    )


def denominator_of(batch: Iterable[MicroBatch[Label]], loss: LossFunction[Label]) -> float:
    """Count the denominator of a batch's loss."""
    return sum(loss.count(micro_batch.labels) for micro_batch in batch)


def update_of(steps: Sequence[StepReport], loss: LossFunction[Any]) -> Update:
    """Combine the reports of all data-parallel ranks into the outcome of a step."""
    first = steps[0]
    failures = [step.failure for step in steps if step.failure is not None]
    # Who only heard of it says less than who saw it.
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
    """Add the sums of one micro-batch to those of the batch.

    Of entries named `..._min` or `..._max` the smallest, or the largest, is kept.
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


# --------------------------------------------------------------------------------------------------
# The learner of one process: all of it, or one rank of many.


class LocalLearner:
    """The learner of this process: all of it, or one rank of many.

    One rank of many takes part in `take_step`, `outputs`, `named_weights`, `export`, `save_state`
    and `load_state` together with the others, in the same order; `update` is for one alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: NamedCall,
        scheduler: NamedCall | list[NamedCall | Milestones] | None = None,
        max_grad_norm: float | None = None,
        products: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
        reference: Reference | None = None,
        tokenizer: Any = None,
        ranks: AcrossRanks | None = None,
    ) -> None:
        """Build the optimizer over every parameter that takes gradients.

        Args:
            model: Model to train.
            optimizer: Its class and arguments.
            scheduler: Likewise.
            max_grad_norm: Larger gradients are scaled down.
            products: Put around forward and backward passes; see `cpu_matmul`.
            reference: The policy before its training.
            tokenizer: Tokenizer that is saved with a policy.
            ranks: The others, where the model is spread over several processes.

        Raises:
            ConfigError: An optimizer or scheduler that torch does not have, or refuses.
        """
        self.model = model
        self.reference = reference
        self.tokenizer = tokenizer
        self.max_grad_norm = max_grad_norm
        self.ranks = ranks
        self._products = products
        _reshard(model)  # or some weights would be found whole, as a forward pass has left them
        self.named_parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizer = build_optimizer(optimizer, self.named_parameters)
        self.scheduler = build_scheduler(scheduler, self.optimizer)
        models = [model]
        if reference is not None and reference.model is not model:
            models.append(reference.model)
        self._resting = Resting(models, self.optimizer)
        self._writing = Background("laurel-writing")

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step (of the first parameter group)."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def dp_size(self) -> int:
        """One, as `update` is for a single process."""
        return 1

    # ------------------------------------------------------------------------------------- learning

    def update(self, batch: Sequence[MicroBatch[Label]], loss: LossFunction[Label]) -> Update:
        """Take one optimizer step, as `Learner.update`."""
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
    ) -> StepReport:
        """Compute this rank's part of `update`.

        Args:
            batch: Its micro-batches, as many as every other rank has.
            loss: Judges them.
            denominator: `loss.count` over the micro-batches of all ranks.
            fillers: Which of the batch only make up the number: they count for nothing.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        rate = self.learning_rate
        sums: dict[str, Tensor] = {}
        losses_B = torch.stack(self._accumulate(batch, loss, denominator, fillers, sums))
        bad = (~losses_B.isfinite()).sum().double()
        if self.ranks is not None:
            bad = self.ranks.totals({"bad": bad})["bad"]
        norm = self._clip().to(losses_B.device)
        # The only time that the host waits for the device, and once more for the sums.
        *values_B, num_bad, grad_norm = torch.stack([*losses_B, bad, norm]).tolist()
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
    ) -> list[Tensor]:
        # Continues after a loss that is not finite: to check, the host would have to wait for the
        # device in every micro-batch, and other ranks wait for this one in every pass.
        losses: list[Tensor] = []
        with self._products(self.model) if self._products else nullcontext():
            for number, micro_batch in enumerate(batch):
                outputs = self.model(micro_batch.inputs)
                result = loss(outputs, micro_batch.labels, num_groups=denominator)
                losses.append(result.loss.detach())
                if number in fillers:
                    losses[-1] = torch.zeros_like(losses[-1])
                    (result.loss * 0.0).backward()  # type: ignore[no-untyped-call]
                    continue
                result.loss.backward()  # type: ignore[no-untyped-call]
                add_up(sums, result.sums)
        return losses

    def _clip(self) -> Tensor:
        parameters = [parameter for _, parameter in self.named_parameters]
        if self.ranks is not None:
            return self.ranks.clip(parameters, self.max_grad_norm)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return nn.utils.clip_grad_norm_(parameters, limit)

    # --------------------------------------------------------------------------------- being asked

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        of: ModelRole = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """Compute the outputs of the model for each batch, as `Learner.outputs`."""
        asked: Any = self.model if of == "model" else self.reference
        assert asked is not None, "this run has no reference policy"
        network: Any = asked.model if isinstance(asked, Reference) else asked
        for batch in batches:
            # Nothing is open between two batches, when others compute.
            with ExitStack() as stack:
                if self._products is not None:
                    stack.enter_context(self._products(network))
                if in_full_precision:
                    stack.enter_context(network.in_full_precision())
                if temperature is not None:
                    stack.enter_context(network.at_temperature(temperature))
                if isinstance(asked, Reference | PolicyModel):
                    outputs = TokenOutputs(asked.logprobs(batch), None)
                else:
                    stack.enter_context(evaluating(network))
                    outputs = network(batch)
            yield outputs
        _reshard(network)

    def named_weights(self, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the weights, as `Learner.named_weights`."""
        model: Any = self.model
        return saved_weights(model.network, changing_only=changing_only)

    def weights(self, version: int) -> Weights:
        """Export the weights for a generator."""
        is_partly_frozen = any(not p.requires_grad for p in self.model.parameters())
        return weights_of(self, version, is_partly_frozen=is_partly_frozen)

    # ----------------------------------------------------------------------------- saving, resting

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """Write a directory that Hugging Face loads, as `Learner.export`."""
        model: Any = self.model
        background = self._writing if in_background else None
        if contract is not None:
            save_reward_model(directory, model, contract, card=card, background=background)
        else:
            save_policy(directory, model, self.tokenizer, card=card, background=background)

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """Write optimizer, schedule and random generators."""
        save_training_state(
            directory,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra=extra,
            mesh=self._mesh,
            background=self._writing if in_background else None,
        )

    def written(self, *, is_awaited: bool = False) -> float | None:
        """Report on the background writing of this rank alone, as `Learner.written`."""
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
        """Release device memory for the duration."""
        self.sleep()
        try:
            yield
        finally:
            self.wake()

    @property
    def _mesh(self) -> DeviceMesh | None:
        return None if self.ranks is None else self.ranks.mesh


def _reshard(model: nn.Module) -> None:
    # Weights that a forward pass has gathered from other ranks are kept by FSDP until they are
    # resharded.
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients for the duration."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
