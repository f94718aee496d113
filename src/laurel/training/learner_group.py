"""Runs a learner on many ranks; only this module divides a batch over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laurel.config.policy import ClusterConfig, Milestones, NamedCall
from laurel.data.forest import MicroBatch
from laurel.errors import (
    BroadcastError,
    CheckpointError,
    ModelError,
    WorkerError,
    speaking,
)
from laurel.models.forest.decoder import adapted_layers
from laurel.models.forest.outputs import TokenOutputs
from laurel.models.forest.policy import Reference, fast_matmul
from laurel.models.loading.policy import LoadedPolicy, check_policy_paths
from laurel.models.loading.reward_model import LoadedRewardModel, check_paths
from laurel.models.parallel.mesh import AcrossRanks, held_bytes
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ParallelShape
from laurel.observe.console import quiet_libraries
from laurel.observe.files import is_disk_error
from laurel.protocols import WorkerGroup
from laurel.rewards.scorer import check_golden
from laurel.training.learner import (
    NOTHING_TO_LEARN,
    Inputs,
    Label,
    LocalLearner,
    LossFunction,
    ModelRole,
    StepReport,
    Update,
    denominator_of,
    is_in_parts,
    update_of,
    weights_of,
)
from laurel.types import TokenForest, Weights
from laurel.workers.process import (
    choose_device,
    give_back_freed_memory,
    prepare,
    seed_everything,
    threads_of_each,
)
from laurel.workers.rendezvous import RankPlace, join, leave

if TYPE_CHECKING:
    from laurel.generation.weights.broadcast import Meeting, WeightLink
    from laurel.generation.weights.handles import Chunk, SharedMemory
    from laurel.generation.weights.held import HeldDtype

    Loaded = LoadedPolicy | LoadedRewardModel
    Load = Callable[..., Loaded]
    """A picklable function that loads a model, given `device` and `mesh` by name: `load_policy` or
    `load_reward_model` with the remaining arguments bound by `functools.partial`.
    """

ROUND = 8
"""The number of batches sent to each data-parallel rank at a time; transfers block computing."""
BUCKET_BYTES = 64 * 2**20
"""The number of bytes of weights in one transfer."""


class LearnerGroup:
    """A `Learner` over a group of `LearnerWorker`s.

    An error or death of a worker is raised as `WorkerError`; an error of a disk keeps its class.
    """

    def __init__(self, group: WorkerGroup, shape: ParallelShape) -> None:
        """Take a group of workers and the shape of their mesh.

        Args:
            group: The workers, which were created with the same shape; `shutdown` ends them.
            shape: The arrangement of the ranks; ranks that read the same data are consecutive.
        """
        assert group.size == shape.num_ranks, f"{group.size} ranks are not {shape}"
        self.group = group
        self.shape = shape
        self.facts: ModelFacts = group.call_one(0, "describe")
        self._learning_rate = float(group.call_one(0, "learning_rate"))

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step (of the first parameter group)."""
        return self._learning_rate

    @property
    def dp_size(self) -> int:
        """The number of micro-batches that are computed concurrently."""
        return self.shape.dp

    def held_bytes(self) -> list[int]:
        """Return the number of bytes of weights that each rank holds."""
        return self.group.call("held_bytes")

    def update(self, batch: Sequence[MicroBatch[Label]], loss: LossFunction[Label]) -> Update:
        """Take one optimizer step, as `Learner.update` describes."""
        denominator = denominator_of(batch, loss)
        if denominator == 0:
            return Update(metrics={}, failure=NOTHING_TO_LEARN)
        sizes = [micro_batch.num_tokens for micro_batch in batch]
        shares = divide_micro_batches(sizes, self.shape.dp)
        smallest = min(batch, key=lambda micro_batch: micro_batch.num_tokens)
        in_step = any(is_in_parts(micro_batch.inputs) for micro_batch in batch)
        arguments = []
        for share in shares:
            own = [smallest if i is None else batch[i] for i in share]
            fillers = [place for place, i in enumerate(share) if i is None]
            arguments.append((own, fillers, loss, denominator, in_step))
        answers = self.group.call_each("take_step", self._for_ranks(arguments))
        self._learning_rate = answers[0][1]
        update = update_of([step for step, _ in answers if step is not None], loss)
        update.performance["rank_token_imbalance"] = imbalance(sizes, shares)
        return update

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        role: ModelRole = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """Compute the outputs of the model for each batch, and yield them on the CPU.

        `Learner.outputs` describes the arguments.
        """
        each_time = ROUND * self.shape.dp
        for first in range(0, len(batches), each_time):
            some = batches[first : first + each_time]
            sizes = [num_tokens_of(inputs) for inputs in some]
            shares = divide_micro_batches(sizes, self.shape.dp)
            filler = some[sizes.index(min(sizes))]
            in_step = any(map(is_in_parts, some))
            arguments = [
                (
                    [filler if i is None else some[i] for i in share],
                    role,
                    in_full_precision,
                    temperature,
                    in_step,
                )
                for share in shares
            ]
            answers = self.group.call_each("outputs", self._for_ranks(arguments))
            found: dict[int, Any] = {}
            for share, outputs in zip(shares, answers[:: self.shape.each], strict=True):
                pairs = zip(share, outputs, strict=True)
                found |= {i: output for i, output in pairs if i is not None}
            for number in range(len(some)):
                yield found.pop(number)

    def _for_ranks(self, by_share: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [arguments for arguments in by_share for _ in range(self.shape.each)]

    def named_weights(self, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by name on the CPU, while the ranks gather the next ones."""
        self.group.call("open_weights", changing_only)
        gathering = self.group.start("next_weights", BUCKET_BYTES)
        while bucket := gathering.wait()[0]:
            gathering = self.group.start("next_weights", BUCKET_BYTES)
            yield from bucket

    def weights(self, version: int) -> Weights:
        """Export the weights for a generator."""
        from laurel.generation.weights.routes import SentWeights

        is_partly_frozen = self.facts.num_trained < self.facts.num_parameters
        found = weights_of(self, version, is_partly_frozen=is_partly_frozen)
        return SentWeights(
            version=version, tensors=found.tensors, changing=found.changing, sender=self.group
        )

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """Write the model as a directory that Hugging Face loads; every node must see it."""
        with _disk_errors():
            self.group.call("export", directory, card, contract, in_background)

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """Write the state of optimizer, schedule and random generators.

        Every node must see the directory.
        """
        with _disk_errors():
            self.group.call("save_state", directory, extra, in_background)

    def written(self, *, is_awaited: bool = False) -> float | None:
        """Report on the background writing of all ranks, as `Learner.written` describes."""
        answers = self.group.call("written", is_awaited)
        if any(answer is None for answer in answers):
            return None
        for answer in answers:
            if isinstance(answer, CheckpointError):
                raise answer
        return float(max(answers))

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Restore the state that `save_state` wrote, and return its `extra`.

        Every node must see the directory.
        """
        with _disk_errors():
            extra, self._learning_rate = self.group.call("load_state", directory)[0]
        return dict(extra)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Release device memory while the context is open."""
        self.group.call("sleep")
        try:
            yield
        finally:
            self.group.call("wake")

    def shutdown(self) -> None:
        """Shut down the workers."""
        self.group.shutdown()


@contextmanager
def _disk_errors() -> Iterator[None]:
    # Errors of a disk keep their class, because a run may continue after them.
    try:
        yield
    except WorkerError as error:
        cause = error.__cause__
        if cause is not None and is_disk_error(cause):
            raise cause from error
        raise


def divide_micro_batches(sizes: Sequence[int], places: int) -> list[list[int | None]]:
    """Divide micro-batches over data-parallel ranks, evenly in number and nearly in tokens.

    Ranks wait for each other in every layer, so micro-batches that are computed at the same time
    should have equal sizes. So the ranks get micro-batches of similar sizes together, and a rank
    with fewer tokens so far gets the larger one. Forests in parts could be dealt unevenly in
    number; by tokens alone ranks wait hardly less, because they pass through parts in step, too.

    Args:
        sizes: The number of tokens of each micro-batch; there is at least one.
        places: The number of data-parallel ranks.

    Returns:
        The indices of the micro-batches of each rank. None only makes the numbers equal. Every
        index occurs once, and a single rank has all of them in order.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    rounds = [order[first : first + places] for first in range(0, len(order), places)]
    totals = [0] * places
    dealt: list[list[int | None]] = []
    for indices in rounds:
        of_places: list[int | None] = [None] * places
        by_load = sorted(range(places), key=lambda place: (totals[place], place))
        for index, place in zip(indices, by_load, strict=False):
            of_places[place] = index
            totals[place] += sizes[index]
        dealt.append(of_places)
    dealt.sort(key=lambda of_places: min(i for i in of_places if i is not None))
    return [[of_places[place] for of_places in dealt] for place in range(places)]


def imbalance(sizes: Sequence[int], shares: Sequence[Sequence[int | None]]) -> float:
    """Return by what fraction the busiest rank's token count exceeds the mean; 0 if all are equal.

    Entries of None, which only pad a share, count as 0 tokens.
    """
    totals = [sum(sizes[i] for i in share if i is not None) for share in shares]
    return max(totals) * len(totals) / sum(totals) - 1.0


def num_tokens_of(inputs: Inputs) -> int:
    """Return the number of tokens that a batch computes, including padding."""
    ids = inputs.ids_T if isinstance(inputs, TokenForest) else inputs.ids_NL
    return ids.numel()


# The part of a learner's rank that exports weights, to the driver or directly to engines.


class WeightExporter(ABC):
    """Exports weights to the driver, or directly to generation engines.

    All ranks make each call together, because every weight is gathered from all of them.
    """

    def __init__(self, place: RankPlace) -> None:
        """Take the place of this rank; no connection is opened yet."""
        self._place = place
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._chunks: Iterator[Chunk] = iter(())
        self._link: WeightLink | None = None

    @abstractmethod
    def named_weights(self, changing_only: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of the weights, as `Learner.named_weights` describes."""

    def stop_exporting(self) -> None:
        """Close the connection to the engines; further calls do nothing."""
        if self._link is not None:
            self._link.close()

    def open_weights(self, changing_only: bool) -> None:
        """Restart `next_weights` at the first weight of `Learner.named_weights`."""
        self._weights = self.named_weights(changing_only)

    def next_weights(self, num_bytes: int) -> list[tuple[str, Tensor]]:
        """Return the next weights: at least one, up to `num_bytes` in size; none after the last.

        All ranks call this together, and only the first returns weights.
        """
        bucket: list[tuple[str, Tensor]] = []
        filled = 0
        for name, weight in self._weights:
            filled += weight.nbytes
            if self._place.rank == 0:
                bucket.append((name, in_own_memory(weight)))
            if filled >= num_bytes:
                break
        return bucket

    def shared_memory(self, num_bytes: int) -> SharedMemory:
        """Return memory on this rank's GPU that engines on the same GPU can open."""
        from laurel.generation.weights.handles import SharedMemory, gpu_of

        device = torch.device("cuda", torch.cuda.current_device())
        return SharedMemory({gpu_of(device): device}, num_bytes=num_bytes)

    def open_handles(self, changing_only: bool, held: HeldDtype | None, num_bytes: int) -> None:
        """Restart `next_handles` at the first weight of `Learner.named_weights`.

        Args:
            changing_only: Whether to share only weights that training changes.
            held: The dtype in which the engines hold their weights; None: that of the learner.
            num_bytes: The size of a chunk.
        """
        from laurel.generation.weights.held import as_held

        weights = as_held(self.named_weights(changing_only), held)
        self._chunks = self.shared_memory(num_bytes).chunks(weights)

    def next_handles(self) -> Chunk | None:
        """Write the next weights into the shared memory; return None after the last.

        All ranks call this together, when every engine has copied the chunk before.
        """
        return next(self._chunks, None)

    def close_handles(self) -> None:
        """Release the shared memory."""
        self._chunks = iter(())

    @property
    def link(self) -> WeightLink:
        """Return the link to the engines, which the first call connects."""
        if self._link is None:
            from laurel.generation.weights.broadcast import WeightLink

            self._link = WeightLink(self._place)
        return self._link

    def host(self) -> str:
        """Return the name of this worker's host, as `RankPlace.host` describes."""
        return self.link.host

    def invite(self, address: str, size: int, patience: float) -> int:
        """Invite engines to a broadcast group, as `WeightLink.invite` does, on the first rank."""
        return self.link.invite(address, size, patience)

    def send_weights(
        self,
        meeting: Meeting,
        changing_only: bool,
        num_bytes: int,
        held: HeldDtype | None = None,
    ) -> str | None:
        """Send weights to engines that call `EngineWorker.receive_weights` at the same time.

        All ranks call this together, and the first sends.

        Args:
            meeting: The meeting of the engines, as `WeightLink.group` accepts it.
            held: The dtype in which the engines hold their weights; None: they are sent as they
                are.

        Returns:
            The reason why not all weights were sent; None if they were.
        """
        from laurel.generation.weights.broadcast import broadcast_tensors
        from laurel.generation.weights.held import as_held

        weights = self.named_weights(changing_only)
        reason = None
        if self._place.rank == 0:
            try:
                rounded = as_held(weights, held)
                broadcast_tensors(self.link.group(meeting), rounded, max_bytes=num_bytes)
            except BroadcastError as error:
                self.link.close()
                reason = str(error)
        for _ in weights:  # the other ranks still gather them
            pass
        return reason


def in_own_memory(value: Tensor) -> Tensor:
    """Copy a tensor to its own memory on the CPU; pickling a view would send all that it views."""
    value = value.detach().cpu()
    is_view = value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_view else value


# One rank of a learner in a worker group; it knows neither the group nor Ray.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFacts:
    """Facts about a model that another process holds."""

    class_name: str
    """The name of the Hugging Face class."""
    base_model: str
    path: Any
    """The layout of batches: `forest` or `padded`."""
    notes: tuple[str, ...]
    num_parameters: int
    num_trained: int
    weights_dtype: str
    """The dtype of the weights, e.g. `float32`, or the lower dtype in which they are gathered."""
    device: str
    """The kind of device, e.g. `cpu`."""
    tokenizer: Any
    self_check: float
    """The largest relative difference that the check at load found between results of batches and
    of single sequences.
    """
    vocab_size: int = 0
    """The number of logits of a policy."""
    generation_end_ids: Any = None
    """The end tokens in a policy's generation configuration, in the form that it has."""
    contract: ScoringContract | None = None
    """The scoring contract of a reward model."""

    @classmethod
    def of(cls, loaded: Loaded, *, self_check: float) -> ModelFacts:
        """Return the facts about a loaded model."""
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


class LearnerWorker(WeightExporter):
    """One rank of the learner; all ranks get the same calls in the same order."""

    def __init__(
        self,
        place: RankPlace,
        load: Load,
        *,
        shape: ParallelShape,
        optimizer: NamedCall,
        scheduler: Sequence[NamedCall | Milestones] | None,
        max_grad_norm: float | None,
        cluster: ClusterConfig,
        seed: int,
        load_reference: Load | None = None,
        load_teacher: Load | None = None,
        with_entropy: bool = False,
    ) -> None:
        """Load this rank's shard of the model, check it, and build its optimizer.

        Args:
            shape: The arrangement of the group's ranks; a single rank holds the whole model.
            scheduler: The classes and the arguments of the learning-rate schedule; None keeps the
                rate constant.
            max_grad_norm: The norm to which larger gradients are clipped; None clips none.
            seed: The seed of dropout.
            load_reference: Loads the reference policy if the run needs one; it is `load` itself if
                that loads the same weights. With adapters it is not called, because the policy
                without its adapters is the reference.

        Raises:
            UserError: The model cannot be used.
        """
        super().__init__(place)
        quiet_libraries()
        self._shape = shape
        threads = cluster.cpu_threads
        if threads is None and choose_device(cluster.device).type == "cpu":
            threads = threads_of_each(self._place.world_size)
        device = prepare(cluster.device, cpu_threads=threads, seed=seed)
        mesh = None
        if shape.num_ranks > 1:
            if device.type == "cpu":
                give_back_freed_memory()
            join(place, device)
            mesh = shape.mesh(device.type)
        loaded = load(device=device, mesh=mesh)
        if isinstance(loaded, LoadedPolicy):
            difference = check_policy_paths(loaded.model)
        else:
            difference = check_paths(loaded.model)
            if loaded.contract.rules.golden:  # a new model has none
                check_golden(loaded.model, loaded.contract)
        self._facts = ModelFacts.of(loaded, self_check=difference)
        if isinstance(loaded, LoadedPolicy):
            loaded.model.with_entropy = with_entropy
        reference = None
        if load_reference is not None:
            reference = _reference(loaded, load, load_reference, device=device, mesh=mesh)
        teacher = None
        if load_teacher is not None:
            teacher = _teacher(loaded, load_teacher, device=device, mesh=mesh)
        self._learner = LocalLearner(
            loaded.model,
            optimizer=optimizer,
            scheduler=scheduler,
            max_grad_norm=max_grad_norm,
            reference=reference,
            teacher=teacher,
            tokenizer=self._facts.tokenizer,
            ranks=None if mesh is None else AcrossRanks(mesh, cp=shape.cp),
        )
        if isinstance(loaded, LoadedPolicy) and shape.tp == 1:
            # With more, shares of layers are multiplied by what divided them.
            self._learner.matmul = fast_matmul
        if data_place := place.rank // shape.tp:
            # Ranks with different data use different dropout. The first rank uses the random
            # numbers of a single process.
            seed_everything(seed + data_place)

    @property
    def learner(self) -> LocalLearner:
        """The learner of this rank, which holds the whole model if there is one rank."""
        return self._learner

    def describe(self) -> ModelFacts:
        """Return the facts that the driver needs."""
        return self._facts

    def named_weights(self, changing_only: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of the weights, as `Learner.named_weights` describes."""
        return self._learner.named_weights(changing_only=changing_only)

    def held_bytes(self) -> int:
        """Return the number of bytes of weights that this rank holds."""
        return held_bytes(self._learner.model)

    def learning_rate(self) -> float:
        """Learning rate of the next step (of the first parameter group)."""
        return self._learner.learning_rate

    def take_step(
        self,
        batch: Sequence[MicroBatch[Any]],
        fillers: Sequence[int],
        loss: LossFunction[Any],
        denominator: float,
        in_step: bool,
    ) -> tuple[StepReport | None, float]:
        """Compute this rank's part of an update, as `LocalLearner.take_step` describes.

        Returns:
            The report of the step, or None except on the first of the ranks that read the same
            data, because all of them compute the same; and the learning rate of the next step.
        """
        step = self._learner.take_step(
            batch, loss, denominator=denominator, fillers=fillers, in_step=in_step
        )
        sums = {name: _for_the_way(value) for name, value in step.sums.items()}
        said = StepReport(
            sums=sums,
            learning_rate=step.learning_rate,
            grad_norm=step.grad_norm,
            failure=step.failure,
        )
        return said if self._speaks else None, self._learner.learning_rate

    def outputs(
        self,
        batches: Sequence[Inputs],
        role: ModelRole,
        in_full_precision: bool,
        temperature: float | None,
        in_step: bool,
    ) -> list[Any]:
        """Compute outputs, as `Learner.outputs` describes.

        The list is empty except on the first of the ranks that read the same data.
        """
        found = self._learner.outputs(
            batches,
            role=role,
            in_full_precision=in_full_precision,
            temperature=temperature,
            in_step=in_step,
        )
        return [_for_the_way(outputs) for outputs in found if self._speaks]

    @property
    def _speaks(self) -> bool:
        return self._place.rank % self._shape.each == 0

    def export(
        self, directory: Path, card: str, contract: ScoringContract | None, in_background: bool
    ) -> None:
        """Write the model as a directory that Hugging Face loads."""
        self._learner.export(directory, card, contract=contract, in_background=in_background)

    def save_state(self, directory: Path, extra: Mapping[str, Any], in_background: bool) -> None:
        """Write the state of optimizer, schedule and random generators."""
        self._learner.save_state(directory, extra, in_background=in_background)

    def written(self, is_awaited: bool) -> float | CheckpointError | None:
        """Report on the background writing of this rank; an error of its disk is returned.

        The error is not raised, because other ranks may still be writing.
        """
        try:
            return self._learner.written(is_awaited=is_awaited)
        except Exception as error:
            if not is_disk_error(error):
                raise
            return CheckpointError(f"rank {self._place.rank}: {type(error).__name__}: {error}")

    def load_state(self, directory: Path) -> tuple[dict[str, Any] | None, float]:
        """Restore the saved state; return `extra` (on the first rank) and the learning rate."""
        extra = self._learner.load_state(directory)
        return (extra if self._place.rank == 0 else None), self._learner.learning_rate

    def sleep(self) -> None:
        """Move model and optimizer to the host until `wake`."""
        self._learner.sleep()

    def wake(self) -> None:
        """Move model and optimizer back to the device."""
        self._learner.wake()

    def shutdown(self) -> None:
        """Leave the process group."""
        self.stop_exporting()
        leave()


def _reference(
    loaded: Loaded,
    load: Load,
    load_reference: Load,
    *,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> Reference:
    # The reference is the policy without its adapters, a copy, or a model loaded once more.
    model: Any = loaded.model
    if adapted_layers(model.network):
        return Reference(model, leaves_adapters_out=True)
    if load_reference is load and mesh is None:
        return Reference.of(model)
    return Reference(load_reference(device=device, mesh=mesh).model)  # type: ignore[arg-type]


def _teacher(
    loaded: Loaded, load: Load, *, device: torch.device, mesh: DeviceMesh | None
) -> Reference:
    where = "loss_fn.distillation.model_name"
    with speaking({"policy.model_name": where}):
        teacher: Any = load(device=device, mesh=mesh)
        check_policy_paths(teacher.model)
    policy: Any = loaded
    known = teacher.tokenizer.get_vocab()
    others = [t for t, i in policy.tokenizer.get_vocab().items() if known.get(t) != i]
    if others:
        raise ModelError(
            f"{where}: {teacher.base_model} has another vocabulary than the policy, of whose "
            f"tokens it lacks {len(others)} at their places, such as {min(others)!r}: their "
            "probabilities cannot be compared. Name a teacher of the policy's own family"
        )
    if teacher.model.path != loaded.model.path:
        raise ModelError(
            f"{where}: {teacher.base_model} is computed in {teacher.model.path} batches and the "
            f"policy in {loaded.model.path} ones; set policy.sequence_packing.enabled=false"
        )
    return Reference(teacher.model)


def _for_the_way(value: Any) -> Any:
    # Tensors are sent from the CPU, in their own memory.
    if isinstance(value, TokenOutputs):
        return TokenOutputs(*(_for_the_way(part) for part in value))
    return in_own_memory(value) if isinstance(value, Tensor) else value
