"""Broadcasts weights from a rank of the learner to all engines, bucket by bucket.

Each bucket is sent as two lengths, a table of its tensors, and the values of all its tensors in one
piece; two zeros mark the end. The sender fills the next bucket while one is being sent, so it holds
two. A receiver holds the bucket that arrives and those that its engine has not read: one that is
ready, and one that is being read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laurel.errors import BroadcastError
from laurel.generation.weights.buckets import Bucket, TensorEntry, bytes_of, unpack_tensor
from laurel.workers.rendezvous import LOOPBACK, RankPlace, bind_master, store_of

ALIGNMENT = 16
"""Alignment in bytes of every tensor in a bucket, so that it can be read in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How one process joins the broadcast group of a learner rank and the engines.

    The fields are equal for all members, except for `rank`.
    """

    number: int
    """Number of the broadcast group; a process that has joined this number need not join again."""
    rank: int
    """Rank of this process in the broadcast group; the learner has rank 0."""
    size: int
    address: str
    port: int
    device: str
    """Device on which the weights arrive: `cpu` or `cuda`."""
    patience: float
    """Timeout in seconds of the rendezvous and of each broadcast."""


class WeightLink:
    """The membership of this process in the broadcast group that transfers weights."""

    def __init__(self, place: RankPlace) -> None:
        """Store the rank and address of this process; `group` joins a broadcast group later."""
        self._place = place
        self._group: BroadcastGroup | None = None
        self._number = -1
        self._store: Any = None

    @property
    def host(self) -> str:
        """The address at which other processes reach this one."""
        return self._place.host

    def invite(self, address: str, size: int, patience: float) -> int:
        """Open the rendezvous of a new broadcast group, with this process as rank 0.

        Args:
            address: An address of this machine that every rank can reach.
            patience: The timeout of the rendezvous store, in seconds.

        Returns:
            The port of the rendezvous.

        Raises:
            ConfigError: The address is not one of this machine's.
            BroadcastError: The rendezvous store cannot be opened.
        """
        port, listener = bind_master(address)
        place = self._at(address, port, rank=0, size=size)
        self._store = _store_of(replace(place, listener=listener), patience)
        return port

    def group(self, meeting: Meeting) -> BroadcastGroup:
        """Join the broadcast group of a meeting; return the current one if it is that group.

        Raises:
            BroadcastError: The other ranks did not join in time.
        """
        if self._group is not None and self._number == meeting.number:
            return self._group
        self.close()
        place = self._at(meeting.address, meeting.port, rank=meeting.rank, size=meeting.size)
        store, self._store = self._store, None
        if meeting.rank > 0:
            store = _store_of(place, meeting.patience)
        device = torch.device(meeting.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self._group = BroadcastGroup(place, store, device, patience=meeting.patience)
        self._number = meeting.number
        return self._group

    def _at(self, address: str, port: int, *, rank: int, size: int) -> RankPlace:
        return replace(
            self._place,
            rank=rank,
            world_size=size,
            master_address=address,
            master_port=port,
            listener=None,
        )

    def close(self) -> None:
        """Leave the broadcast group. Idempotent."""
        if self._group is not None:
            self._group.close()
        self._group = None


def _store_of(place: RankPlace, patience: float) -> Any:
    try:
        return store_of(place, timeout=timedelta(seconds=patience))
    except RuntimeError as error:
        raise BroadcastError(f"no place to meet: {torch_error_text(error)}") from error


def broadcast_tensors(
    group: BroadcastGroup, tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int
) -> None:
    """Send named tensors to all other ranks of a group, in order.

    Args:
        group: The broadcast group; this process must be its rank 0.
        tensors: Names and tensors, on any device. They are copied one by one as the iterator yields
            them.
        max_bytes: Size of a bucket; a larger tensor gets a bucket of its own.

    Raises:
        BroadcastError: A rank is gone. The remaining tensors are not read from the iterator.
    """
    filling, leaving = _Parcel(group, max_bytes), _Parcel(group, max_bytes)
    for name, tensor in tensors:
        if not filling.has_room(tensor):
            filling.send()
            filling, leaving = leaving, filling
            filling.clear()
        filling.add(name, tensor)
    if not filling.is_empty:
        filling.send()
    leaving.wait()
    filling.wait()
    group.start(_lengths(group)).wait()


def received(group: BroadcastGroup) -> Iterator[Bucket]:
    """Yield the buckets of weights that rank 0 broadcasts, each in memory of its own.

    Raises:
        BroadcastError: A rank is gone, rank 0 sends nothing in time, or it sends no valid bucket.
    """
    lengths = _lengths(group)
    while True:
        group.start(lengths).wait()
        num_words, num_values = map(int, lengths.tolist())
        if num_words == 0:
            return
        words = torch.empty(num_words, dtype=torch.uint8, device=group.device)
        values = torch.empty(num_values, dtype=torch.uint8, device=group.device)
        coming = [group.start(piece) for piece in (words, values) if piece.numel()]
        for piece in coming:
            piece.wait()
        table = json.loads(words.cpu().numpy().tobytes())
        yield [unpack_tensor(values, TensorEntry(*entry)) for entry in table]


def _lengths(group: BroadcastGroup, words: int = 0, values: int = 0) -> Tensor:
    return torch.tensor([words, values], dtype=torch.int64, device=group.device)


class _Parcel:
    """A reusable block of memory that is filled with a bucket and then sent."""

    def __init__(self, group: BroadcastGroup, max_bytes: int) -> None:
        self._group = group
        self._max_bytes = max_bytes
        self._memory = torch.empty(0, dtype=torch.uint8, device=group.device)
        self._filled = 0
        self._table: list[TensorEntry] = []
        self._on_its_way: list[tuple[PendingBroadcast, Tensor]] = []

    @property
    def is_empty(self) -> bool:
        return not self._table

    def has_room(self, tensor: Tensor) -> bool:
        """Return whether the tensor fits; the first tensor always does."""
        return self.is_empty or self._filled + tensor.nbytes <= self._max_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        first, end = self._filled, self._filled + tensor.nbytes
        if end > self._memory.numel():  # then it is the first one
            size = max(end, self._max_bytes)
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        self._memory[first:end].copy_(bytes_of(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._table.append(TensorEntry(name, dtype, tuple(tensor.shape), first, tensor.nbytes))
        self._filled = -(-end // ALIGNMENT) * ALIGNMENT

    def clear(self) -> None:
        """Wait until the bucket has been sent, then empty it."""
        self.wait()
        self._table, self._filled = [], 0

    def send(self) -> None:
        """Start sending the bucket without waiting; its memory is reusable only after `clear`."""
        values = self._memory[: self._table[-1].start + self._table[-1].num_bytes]
        text = bytearray(json.dumps(self._table).encode())
        words = torch.frombuffer(text, dtype=torch.uint8).to(self._group.device)
        lengths = _lengths(self._group, words.numel(), values.numel())
        pieces = [piece for piece in (lengths, words, values) if piece.numel()]
        self._on_its_way = [(self._group.start(piece), piece) for piece in pieces]

    def wait(self) -> None:
        """Wait until all ranks have received the bucket."""
        on_its_way, self._on_its_way = self._on_its_way, []
        for piece, _ in on_its_way:
            piece.wait()


# A group of processes of which the first tells and the others hear, beside all other groups.
#
# torch's own groups have every rank of a program, once and for all. This one has those that join:
# one rank of a learner and engines that come and go. It belongs to nobody's `init_process_group`.


class BroadcastGroup:
    """A broadcast group of processes that have met. After an error it is closed."""

    def __init__(
        self, place: RankPlace, store: Any, device: torch.device, *, patience: float
    ) -> None:
        """Join the group and wait for the others.

        Args:
            place: In this group; rank 0 tells.
            device: Device of the tensors: gloo broadcasts those on a CPU, NCCL those on GPUs. A
                GPU can be of one member only.
            patience: Seconds for the others to come, and for each broadcast.

        Raises:
            BroadcastError: They did not come.
        """
        self.place = place
        self.device = device
        self.limit = timedelta(seconds=patience)
        """Longest duration of one broadcast."""
        self._store = store
        self._group: Any = None
        try:
            self._group = self._nccl() if device.type == "cuda" else self._gloo()
        except RuntimeError as error:
            raise BroadcastError(
                f"the processes did not meet: {torch_error_text(error)}"
            ) from error

    def _gloo(self) -> Any:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._timeout = self.limit
        # Only who is asked can reach it: on one machine nobody from outside.
        is_near = self.place.master_address == LOOPBACK
        address = LOOPBACK if is_near else self.place.host
        options._devices = [kind.create_device(hostname=address)]
        return kind(self._store, self.place.rank, self.place.world_size, options)

    def _nccl(self) -> Any:
        # NCCL itself waits for the others without end, so those who do not come are missed here.
        ranks = [f"rank {rank} is here" for rank in range(self.place.world_size)]
        self._store.set(ranks[self.place.rank], "")
        self._store.wait(ranks, self.limit)
        kind: Any = dist.ProcessGroupNCCL
        # Its own limit, which ends the whole process, stays the long one that torch gives it.
        return kind(self._store, self.place.rank, self.place.world_size, kind.Options())

    def start(self, tensor: Tensor) -> PendingBroadcast:
        """Begin to send or receive one contiguous tensor on the group's device, without waiting.

        It may not be touched before `PendingBroadcast.wait` returns.

        Raises:
            BroadcastError: Somebody is gone.
        """
        if self._group is None:
            raise BroadcastError("its group is closed")
        options: Any = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self.limit
        try:
            return PendingBroadcast(self, self._group.broadcast([tensor], options))
        except RuntimeError as error:
            raise self.broken(error) from error

    def broken(self, error: RuntimeError) -> BroadcastError:
        """Close the group, so that no other member waits for this one, and make the error."""
        self.close()
        return BroadcastError(torch_error_text(error))

    def close(self) -> None:
        """Leave the group. Pending broadcasts of others fail. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # what hangs on the GPU hangs for ever


class PendingBroadcast:
    """A broadcast in progress."""

    def __init__(self, group: BroadcastGroup, work: Any) -> None:
        """Wrap `work`, torch's handle of a broadcast of this group."""
        self._group, self._work = group, work

    def wait(self) -> None:
        """Wait until the tensor may be read, or written, again.

        Raises:
            BroadcastError: A rank is gone or did not answer in time.
        """
        try:
            self._work.wait(self._group.limit)
        except RuntimeError as error:
            raise self._group.broken(error) from error


def torch_error_text(error: RuntimeError) -> str:
    """Shorten an error of torch to its text, without source locations."""
    line = str(error).partition("\n")[0]
    return line.rpartition("] ")[2] if line.startswith("[/") else line
