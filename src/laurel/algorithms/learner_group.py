"""The learner of many ranks, as the loops see it: the batch is divided here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from laurel.algorithms.learner import (
    NOTHING_TO_LEARN,
    Asked,
    Inputs,
    Label,
    Loss,
    MicroBatch,
    Update,
    denominator_of,
    update_of,
    weights_of,
)
from laurel.algorithms.learner_worker import ModelFacts
from laurel.engines.weight_routes import SentWeights
from laurel.errors import CheckpointError, WorkerError
from laurel.models.checkpoint import is_disk_error
from laurel.models.parallel import ParallelShape
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.types import TokenForest, Weights

ROUND = 8
"""Batches that a place is asked for at a time: while one round travels, nobody computes."""
BUCKET_BYTES = 64 * 2**20
"""Weights that travel at a time."""


class LearnerGroup:
    """A `Learner` over a group of `LearnerWorker`s.

    Whatever a worker raises, or its death, is a `WorkerError` here; but a disk that refuses raises
    what it would without a group.
    """

    def __init__(self, group: WorkerGroup, shape: ParallelShape) -> None:
        """Speak for a group.

        Args:
            group: Its workers have been made with the same shape. It ends with `shutdown`.
            shape: How its ranks are arranged; those that read the same data are neighbours.
        """
        assert group.size == shape.num_ranks, f"{group.size} ranks are not {shape}"
        self.group = group
        self.shape = shape
        self.facts: ModelFacts = group.call_one(0, "describe")
        self._learning_rate = float(group.call_one(0, "learning_rate"))

    @property
    def learning_rate(self) -> float:
        """See `Learner`."""
        return self._learning_rate

    @property
    def num_places(self) -> int:
        """See `Learner`."""
        return self.shape.dp

    def held_bytes(self) -> list[int]:
        """Bytes of weights that each rank holds."""
        return self.group.call("held_bytes")

    # ------------------------------------------------------------------------ learning, being asked

    def update(self, batch: Sequence[MicroBatch[Label]], loss: Loss[Label]) -> Update:
        """See `Learner`."""
        denominator = denominator_of(batch, loss)
        if denominator == 0:
            return Update(metrics={}, failure=NOTHING_TO_LEARN)
        sizes = [micro_batch.num_tokens for micro_batch in batch]
        shares = share_out(sizes, self.shape.dp)
        smallest = min(batch, key=lambda micro_batch: micro_batch.num_tokens)
        arguments = []
        for share in shares:
            own = [smallest if i is None else batch[i] for i in share]
            fillers = [place for place, i in enumerate(share) if i is None]
            arguments.append((own, fillers, loss, denominator))
        answers = self.group.call_each("take_step", self._of_ranks(arguments))
        self._learning_rate = answers[0][1]
        update = update_of([step for step, _ in answers if step is not None], loss)
        update.performance["rank_token_imbalance"] = imbalance(sizes, shares)
        return update

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        of: Asked = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """See `Learner`; on the CPU."""
        each_time = ROUND * self.shape.dp
        for first in range(0, len(batches), each_time):
            some = batches[first : first + each_time]
            sizes = [num_tokens_of(inputs) for inputs in some]
            shares = share_out(sizes, self.shape.dp)
            filler = some[sizes.index(min(sizes))]
            arguments = [
                ([filler if i is None else some[i] for i in share], of, in_full_precision,
                 temperature)
                for share in shares
            ]  # fmt: skip
            answers = self.group.call_each("outputs", self._of_ranks(arguments))
            found: dict[int, Any] = {}
            for share, outputs in zip(shares, answers[:: self.shape.each], strict=True):
                pairs = zip(share, outputs, strict=True)
                found |= {i: output for i, output in pairs if i is not None}
            for number in range(len(some)):
                yield found.pop(number)

    def _of_ranks(self, of_places: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The arguments of each place for each of its ranks."""
        return [arguments for arguments in of_places for _ in range(self.shape.each)]

    # ------------------------------------------------------------------- weights, saving, resting

    def named_weights(self, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See `Learner`; on the CPU. While one bucket is read, the ranks gather the next."""
        self.group.call("open_weights", changing_only)
        gathering = self.group.start("next_weights", BUCKET_BYTES)
        while bucket := gathering.wait()[0]:
            gathering = self.group.start("next_weights", BUCKET_BYTES)
            yield from bucket

    def weights(self, version: int) -> Weights:
        """See `Learner`."""
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
        """See `Learner`. The directory is one that all nodes see."""
        with _disk_errors():
            self.group.call("export", directory, card, contract, in_background)

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """See `Learner`. The directory is one that all nodes see."""
        with _disk_errors():
            self.group.call("save_state", directory, extra, in_background)

    def written(self, *, is_awaited: bool = False) -> float | None:
        """See `Learner`."""
        answers = self.group.call("written", is_awaited)
        if any(answer is None for answer in answers):
            return None
        for answer in answers:
            if isinstance(answer, CheckpointError):
                raise answer
        return float(max(answers))

    def load_state(self, directory: Path) -> dict[str, Any]:
        """See `Learner`. The directory is one that all nodes see."""
        with _disk_errors():
            extra, self._learning_rate = self.group.call("load_state", directory)[0]
        return dict(extra)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """See `Learner`."""
        self.group.call("sleep")
        try:
            yield
        finally:
            self.group.call("wake")

    def shutdown(self) -> None:
        """End the group."""
        self.group.shutdown()


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A disk that refuses as what it is: a run may go on after that."""
    try:
        yield
    except WorkerError as error:
        cause = error.__cause__
        if cause is not None and is_disk_error(cause):
            raise cause from error
        raise


# -------------------------------------------------------------------------------------- dividing


def share_out(sizes: Sequence[int], places: int) -> list[list[int | None]]:
    """Divide micro-batches over places: as many to each, and about as many tokens.

    Places wait for each other in every layer, so what is computed side by side should be of one
    size: neighbours by size go to the places together, the larger ones to those that have less yet.

    Args:
        sizes: Tokens of each micro-batch; at least one.
        places: How many there are.

    Returns:
        Indices of the micro-batches of each place; None is one that only makes up the number.
        Every index comes once. One place has all of them in order.
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
    """How much more tokens the fullest place computes than the mean: 0 where all have as many.

    What only makes up the number counts as nothing.
    """
    totals = [sum(sizes[i] for i in share if i is not None) for share in shares]
    return max(totals) * len(totals) / sum(totals) - 1.0


def num_tokens_of(inputs: Inputs) -> int:
    """Tokens that a batch computes, padding included."""
    ids = inputs.ids_T if isinstance(inputs, TokenForest) else inputs.ids_NL
    return ids.numel()
