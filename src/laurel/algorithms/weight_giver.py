"""What of one rank of a learner gives its weights away: to the driver, or straight to engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from laurel.distributed.rendezvous import Place
from laurel.engines.weight_broadcast import Meeting, WeightLink, send
from laurel.engines.weight_sharing import Lender, Reach, SharedBucket, reach_of
from laurel.errors import BroadcastError


class WeightGiver(ABC):
    """Every rank is asked for the same, as all gather every weight; see `weight_routes`."""

    def __init__(self, place: Place) -> None:
        """Give nothing yet."""
        self._place = place
        self._weights: Iterator[tuple[str, Tensor]] = iter(())
        self._lender: Lender | None = None
        self._link = WeightLink(place)

    @abstractmethod
    def named_weights(self, changing_only: bool) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.named_weights`."""

    def give_no_more(self) -> None:
        """Let go of everybody and of everything lent. Idempotent."""
        self.end_lending()
        self._link.close()

    # ------------------------------------------------------------------- weights, bucket by bucket

    def open_weights(self, changing_only: bool) -> None:
        """Begin with `next_weights` at the first weight. See `Learner.named_weights`."""
        self._weights = self.named_weights(changing_only)

    def next_weights(self, num_bytes: int) -> list[tuple[str, Tensor]]:
        """The next weights, at least one and up to a size; none after the last.

        Every rank takes part, and the first has them.
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

    # ----------------------------------------------------------------- weights, straight to engines

    def host(self) -> str:
        """See `Place.host`."""
        return self._link.host

    def invite(self, address: str, size: int, patience: float) -> int:
        """See `WeightLink.invite`; asked of the first rank alone."""
        return self._link.invite(address, size, patience)

    def send_weights(self, meeting: Meeting, changing_only: bool, num_bytes: int) -> str | None:
        """Give weights to engines that call `EngineWorker.receive_weights` at the same time.

        Every rank takes part, and the first sends.

        Args:
            meeting: See `WeightLink.group`.
            changing_only: See `Learner.named_weights`.
            num_bytes: Size of a bucket.

        Returns:
            Why they have not all gone; None: they have.
        """
        weights = self.named_weights(changing_only)
        reason = None
        if self._place.rank == 0:
            try:
                send(self._link.group(meeting), weights, max_bytes=num_bytes)
            except BroadcastError as error:
                self._link.close()
                reason = str(error)
        for _ in weights:  # the other ranks still gather them
            pass
        return reason

    def weight_reach(self, device: str) -> Reach:
        """Who can read this rank's memory."""
        return reach_of(device)

    def lend_weights(
        self, ranks: Sequence[int], device: str, changing_only: bool, num_bytes: int
    ) -> None:
        """Begin with `next_lent` at the first weight.

        Args:
            ranks: Those whose memory engines read.
            device: `cpu` or `cuda`: of that memory.
            changing_only: See `Learner.named_weights`.
            num_bytes: Size of a bucket.
        """
        self.end_lending()
        weights = self.named_weights(changing_only)
        lends = self._place.rank in ranks
        self._lender = Lender(weights, max_bytes=num_bytes, device=device if lends else None)

    def next_lent(self) -> SharedBucket | str | None:
        """See `Lender.next`. Every rank takes part."""
        assert self._lender is not None, "nothing is lent"
        return self._lender.next()

    def end_lending(self) -> None:
        """Let go of what was lent. Idempotent."""
        if self._lender is not None:
            self._lender.close()
        self._lender = None


def in_own_memory(value: Tensor) -> Tensor:
    """The tensor on the CPU, in no more memory than it needs: a view travels with all it views."""
    value = value.detach().cpu()
    is_view = value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_view else value
