"""One rank of a learner, as a worker group holds it. It knows neither the group nor Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laurel.algorithms.learner import Asked, Inputs, Loss, MicroBatch, Step
from laurel.algorithms.local_learner import LocalLearner
from laurel.algorithms.weight_giver import WeightGiver, in_own_memory
from laurel.config.schema import ClusterConfig, PolicyConfig
from laurel.distributed.limits import available_cores
from laurel.distributed.process import (
    choose_device,
    give_back_freed_memory,
    prepare,
    seed_everything,
)
from laurel.distributed.rendezvous import Place, join, leave
from laurel.engines.cpu_products import quick_products
from laurel.errors import CheckpointError
from laurel.models.across_ranks import AcrossRanks
from laurel.models.adapters import adapted_layers
from laurel.models.checkpoint import is_disk_error
from laurel.models.load import LoadedRewardModel
from laurel.models.load_policy import LoadedPolicy, check_policy_paths
from laurel.models.outputs import TokenOutputs
from laurel.models.parallel import ParallelShape, held_bytes
from laurel.models.policy import Reference
from laurel.models.scoring import ScoringContract
from laurel.rewards.load import quiet_libraries
from laurel.rewards.local import check_golden
from laurel.rewards.self_check import check_paths

Loaded = LoadedPolicy | LoadedRewardModel
Load = Callable[..., Loaded]
"""Loads a model, given `device` and `mesh` by name: `load_policy` or `load_reward_model` with the
rest of their arguments, as `functools.partial` binds them, so that it can travel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """What a run needs to know of its model when the model itself is elsewhere."""

    class_name: str
    """Of the Hugging Face class."""
    base_model: str
    path: Any
    """`forest` or `padded`: how batches reach it."""
    notes: tuple[str, ...]
    num_parameters: int
    num_trained: int
    weights_dtype: str
    """E.g. `float32`; what they are rounded to on their way to other ranks, if they are."""
    device: str
    """Kind of device, e.g. `cpu`."""
    tokenizer: Any
    self_check: float
    """Largest relative difference that the check of its batches found."""
    vocab_size: int = 0
    """Of a policy: logits of a token."""
    generation_end_ids: Any = None
    """Of a policy: the end tokens of its generation configuration, as that has them."""
    contract: ScoringContract | None = None
    """Of a reward model."""

    @classmethod
    def of(cls, loaded: Loaded, *, self_check: float) -> ModelFacts:
        """The facts of a loaded model."""
        model = loaded.model
        parameters = list(model.parameters())
        own: dict[str, Any] = {}
        if isinstance(loaded, LoadedPolicy):
            ends = loaded.model.causal_lm.generation_config.eos_token_id
            own = {
                "tokenizer": loaded.tokenizer,
                "vocab_size": loaded.model.vocab_size,
                "generation_end_ids": ends,
            }
        else:
            own = {"tokenizer": loaded.contract.tokenizer, "contract": loaded.contract}
        return cls(
            class_name=type(model.network).__name__,
            base_model=loaded.base_model,
            path=model.path,
            notes=tuple(loaded.notes),
            num_parameters=sum(p.numel() for p in parameters),
            num_trained=sum(p.numel() for p in parameters if p.requires_grad),
            weights_dtype=str(model.exact_dtype).removeprefix("torch."),
            device=model.device.type,
            self_check=self_check,
            **own,
        )


class LearnerWorker(WeightGiver):
    """One rank. All ranks are given the same calls in the same order, each with its own share."""

    def __init__(
        self,
        place: Place,
        load: Load,
        *,
        shape: ParallelShape,
        policy: PolicyConfig,
        cluster: ClusterConfig,
        seed: int,
        load_reference: Load | None = None,
        with_entropy: bool = False,
    ) -> None:
        """Load this rank's share of the model, check it, and build its optimizer.

        Args:
            place: In the group.
            load: Loads the model.
            shape: How the group's ranks are arranged; of one rank the model is not spread.
            policy: Optimizer, schedule and limit of the gradient.
            cluster: Device and threads.
            seed: Seeds dropout.
            load_reference: Loads the policy as it was before any training, where log-probabilities
                under it are needed; `load` itself where that is what it loads. With adapters it is
                not called: they are left out instead.
            with_entropy: Of a policy: measure the entropy in updates.

        Raises:
            UserError: The model cannot be used.
        """
        super().__init__(place)
        quiet_libraries()
        self._shape = shape
        device = self._prepare(cluster, seed)
        if shape.num_ranks > 1 and device.type == "cpu":
            give_back_freed_memory()
        mesh = _meet(place, shape, device)
        loaded = load(device=device, mesh=mesh)
        self._facts = ModelFacts.of(loaded, self_check=_checked(loaded))
        is_policy = isinstance(loaded, LoadedPolicy)
        if isinstance(loaded, LoadedPolicy):
            loaded.model.with_entropy = with_entropy
        reference = None
        if load_reference is not None:
            reference = _reference(loaded, load, load_reference, device=device, mesh=mesh)
        self._learner = LocalLearner(
            loaded.model,
            optimizer=policy.optimizer,
            scheduler=policy.scheduler,
            max_grad_norm=policy.max_grad_norm,
            # Shares of layers are multiplied by what divided them.
            products=quick_products if is_policy and shape.tp == 1 else None,
            reference=reference,
            tokenizer=self._facts.tokenizer,
            ranks=None if mesh is None else AcrossRanks(mesh, cp=shape.cp),
        )
        if data_place := place.rank // shape.tp:
            # Other data, other dropout. The first place draws what a process alone would.
            seed_everything(seed + data_place)

    @property
    def learner(self) -> LocalLearner:
        """This rank's: all there is, where there is one rank."""
        return self._learner

    def _prepare(self, cluster: ClusterConfig, seed: int) -> torch.device:
        if cluster.cpu_threads is None and choose_device(cluster.device).type == "cpu":
            threads = max(1, available_cores() // self._place.world_size)
            cluster = cluster.model_copy(update={"cpu_threads": threads})
        return prepare(cluster, seed=seed)

    def describe(self) -> ModelFacts:
        """What the driver must know of the model."""
        return self._facts

    def named_weights(self, changing_only: bool) -> Iterator[tuple[str, Tensor]]:
        """See `Learner`."""
        return self._learner.named_weights(changing_only=changing_only)

    def held_bytes(self) -> int:
        """See `models.parallel.held_bytes`."""
        return held_bytes(self._learner.model)

    def learning_rate(self) -> float:
        """See `Learner`."""
        return self._learner.learning_rate

    # ------------------------------------------------------------------------ learning, being asked

    def take_step(
        self,
        batch: Sequence[MicroBatch[Any]],
        fillers: Sequence[int],
        loss: Loss[Any],
        denominator: float,
    ) -> tuple[Step | None, float]:
        """See `LocalLearner.take_step`.

        Returns:
            What came of it, from the first rank of each place alone: the others compute the same;
            the learning rate of the next step.
        """
        step = self._learner.take_step(batch, loss, denominator=denominator, fillers=fillers)
        sums = {name: _for_the_way(value) for name, value in step.sums.items()}
        said = Step(
            sums=sums, learning_rate=step.learning_rate, grad_norm=step.grad_norm,
            failure=step.failure,
        )  # fmt: skip
        return said if self._speaks else None, self._learner.learning_rate

    def outputs(
        self,
        batches: Sequence[Inputs],
        of: Asked,
        in_full_precision: bool,
        temperature: float | None,
    ) -> list[Any]:
        """See `Learner`; from the first rank of each place alone."""
        found = self._learner.outputs(
            batches, of=of, in_full_precision=in_full_precision, temperature=temperature
        )
        return [_for_the_way(outputs) for outputs in found if self._speaks]

    @property
    def _speaks(self) -> bool:
        return self._place.rank % self._shape.each == 0

    # --------------------------------------------------------------------------------------- saving

    def export(
        self, directory: Path, card: str, contract: ScoringContract | None, in_background: bool
    ) -> None:
        """See `Learner`."""
        self._learner.export(directory, card, contract=contract, in_background=in_background)

    def save_state(self, directory: Path, extra: Mapping[str, Any], in_background: bool) -> None:
        """See `Learner`."""
        self._learner.save_state(directory, extra, in_background=in_background)

    def written(self, is_awaited: bool) -> float | CheckpointError | None:
        """See `Learner`; what the disk of this rank has refused is given, not raised.

        For the others may go on writing much longer than a group lets who is left end its call.
        """
        try:
            return self._learner.written(is_awaited=is_awaited)
        except Exception as error:
            if not is_disk_error(error):
                raise
            return CheckpointError(f"rank {self._place.rank}: {type(error).__name__}: {error}")

    def load_state(self, directory: Path) -> tuple[dict[str, Any] | None, float]:
        """See `Learner`; `extra` from the first rank alone, and the learning rate."""
        extra = self._learner.load_state(directory)
        return (extra if self._place.rank == 0 else None), self._learner.learning_rate

    # -------------------------------------------------------------------------------------- resting

    def sleep(self) -> None:
        """See `LocalLearner`."""
        self._learner.sleep()

    def wake(self) -> None:
        """See `LocalLearner`."""
        self._learner.wake()

    def shutdown(self) -> None:
        """Leave the others."""
        self.give_no_more()
        leave()


def _meet(place: Place, shape: ParallelShape, device: torch.device) -> DeviceMesh | None:
    """The mesh of all ranks; None where there are no others."""
    if shape.num_ranks == 1:
        return None
    join(place, device)
    return shape.mesh(device.type)


def _checked(loaded: Loaded) -> float:
    """The largest difference that the checks of a loaded model found in its batches.

    Raises:
        ModelError: The model does not pass.
    """
    if isinstance(loaded, LoadedPolicy):
        return check_policy_paths(loaded.model)
    difference = check_paths(loaded.model)
    check_golden(loaded.model, loaded.contract)
    return difference


def _reference(
    loaded: Loaded,
    load: Load,
    load_reference: Load,
    *,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> Reference:
    """The policy before any training: without its adapters, as a copy, or loaded once more."""
    model: Any = loaded.model
    if adapted_layers(model.network):
        return Reference(model, leaves_adapters_out=True)
    if load_reference is load and mesh is None:
        return Reference.of(model)
    return Reference(load_reference(device=device, mesh=mesh).model)  # type: ignore[arg-type]


def _for_the_way(value: Any) -> Any:
    """Tensors on the CPU; see `in_own_memory`."""
    if isinstance(value, TokenOutputs):
        return TokenOutputs(*(_for_the_way(part) for part in value))
    return in_own_memory(value) if isinstance(value, Tensor) else value
