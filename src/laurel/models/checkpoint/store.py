"""Writes checkpoints that survive a kill, a full disk and a power failure at any moment.

::

    root/step_16/     a checkpoint: the caller's files, training_info.json and MANIFEST.json
    root/best         a link to the best of them
    root/.lock        the lock that allows one writer at a time

A checkpoint is written under a name that begins with a dot, synced to the disk, given its manifest,
and only then renamed. So `step_<N>` is complete or absent. A checkpoint is also renamed before it
is deleted. A killed writer leaves only names that begin with a dot, which the next writer removes.

This module knows nothing of models, and does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from laurel.errors import CheckpointError, counted
from laurel.models.checkpoint.manifest import (
    INFO_NAME,
    MANIFEST_NAME,
    STEP_NAME,
    Manifest,
    is_whole,
    seal_files,
    software_versions,
    verify_directory,
    write_manifest,
)
from laurel.observe.files import delete_directory, is_disk_error, put_in_place, sync_directory
from laurel.observe.json_output import json_text

BEST_NAME = "best"

_FREE_SPACE_FACTOR = 1.2

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, in one directory.

    Reading (`steps`, `newest_whole`, `best`) needs no lock, but writing does. Use the store as a
    context manager, which takes the lock and removes the files that a killed writer left.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_top_k: int | None = None,
        metric_name: str | None = None,
        higher_is_better: bool = False,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """Set the options of the store; nothing is read or written yet.

        Args:
            root: The directory of the `step_<N>` directories; entering the store creates it.
            keep_top_k: The number of best checkpoints that are kept (`steps_to_keep`); None: all.
            metric_name: The name of the value in `begin(metric=...)`. Checkpoints that were saved
                with another name rank as if they had no metric.
            higher_is_better: Whether a higher value of the metric is better.
            on_phase: Called with the name of each phase of a save, in the thread of the phase, so
                that tests can interrupt it: begin, written, file:<name>, fsynced, manifest,
                renamed-old, renamed, best, prune:step_<N>, deleting:step_<N>, pruned.
        """
        self.root = Path(root)
        self._keep_top_k = keep_top_k
        self._metric_name = metric_name
        self._higher_is_better = higher_is_better
        self._on_phase = on_phase
        self._lock = DirectoryLock(self.root)
        self._under_way: SaveUnderWay | None = None
        self._pinned: set[int] = set()
        self._expected_bytes = 0

    def __enter__(self) -> CheckpointStore:
        try:
            missing = [path for path in (self.root, *self.root.parents) if not path.exists()]
            self.root.mkdir(parents=True, exist_ok=True)
            for made in missing:
                sync_directory(made.parent)
            self._lock.acquire()
            clear_up(self.root)
        except OSError as error:
            self._lock.release()
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"cannot write checkpoints to '{self.root}': {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._end_of_saving(is_orderly=kind is None)
        finally:
            self._lock.release()

    def pin(self, checkpoint: Path) -> None:
        """Keep a checkpoint as long as this store is open, whatever `keep_top_k` is.

        Args:
            checkpoint: A checkpoint of this store, such as one that restarted workers load. Other
                paths have no effect.
        """
        for step in self.steps():
            if self.path_of(step).resolve() == checkpoint.resolve():
                self._pinned.add(step)

    def require_room(self, num_saves: int, *, estimated_bytes: int) -> str | None:
        """Check before a run whether the disk has room for its checkpoints.

        An old checkpoint is deleted only when the new one is complete, so there must be room for
        two checkpoints, of which one may exist already.

        Args:
            estimated_bytes: The size of a checkpoint, used while none exists.

        Returns:
            A warning if two checkpoints fit, but not as many as `keep_top_k` keeps; otherwise None.

        Raises:
            CheckpointError: The disk has no room for the checkpoints that must exist at a time.
        """
        self._expected_bytes = estimated_bytes
        sound = self._sound()
        each = math.ceil(_FREE_SPACE_FACTOR * self._bytes_of_one(sound))
        free = shutil.disk_usage(self.root).free
        needed = min(num_saves, max(1, 2 - len(sound)))
        if free < needed * each:
            raise CheckpointError(
                f"'{self.root}' is on a disk with {free / 1e6:,.1f} MB free, and "
                f"{counted(needed, 'checkpoint')} of this run "
                f"{'takes' if needed == 1 else 'take'} about {needed * each / 1e6:,.1f} MB"
                + (" (each is whole before an older one is deleted)" if num_saves > 1 else "")
                + ". Free some, choose another checkpointing.checkpoint_dir, or set "
                "checkpointing.save_optimizer=false for smaller ones that cannot be resumed"
            )
        kept = len(sound) + num_saves
        if self._keep_top_k is not None:  # the best, the latest, and the one that is being written
            kept = min(kept, self._keep_top_k + 2)
        if not each or (fit := free // each) >= kept - len(sound):
            return None
        return (
            f"'{self.root}' has room for {counted(fit, 'more checkpoint')} of about "
            f"{each / 1e6:,.1f} MB, and this run keeps up to {kept} at a time: lower "
            "checkpointing.keep_top_k, or raise checkpointing.save_period"
        )

    def _bytes_of_one(self, sound: Mapping[int, Manifest]) -> int:
        return sound[max(sound)].num_bytes if sound else self._expected_bytes

    def path_of(self, step: int) -> Path:
        """Return the path of the directory of a step, which need not exist."""
        return self.root / f"step_{step}"

    def steps(self) -> list[int]:
        """List the steps that have a directory, complete or not, in rising order."""
        return steps_in(self.root)

    def newest_whole(self) -> NewestCheckpoint:
        """Find the newest complete checkpoint, and the newer ones that fail `verify`."""
        return find_newest(self.root, self.steps())

    def best(self) -> Path | None:
        """Return the path of the checkpoint with the best metric; of equal ones, the newer.

        None if no checkpoint has a metric.
        """
        metrics = {step: value for step, value in self._metrics().items() if value is not None}
        ranked = best_first(metrics, self._higher_is_better)
        return self.path_of(ranked[0]) if ranked else None

    def begin(
        self,
        step: int,
        write: Callable[[Path], Written],
        *,
        metric: float | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> SaveUnderWay:
        """Begin to write the checkpoint of a step, one checkpoint at a time.

        A save that is complete also deletes the checkpoints that are not kept.

        When the store's `with` block ends, the store waits for the save. If the block ends by an
        exception, the save is abandoned, unless its files are already being synced to the disk.

        Args:
            step: The number of the step. A checkpoint of that step is replaced; a directory of that
                name that is not a checkpoint is moved to `step_<N>.foreign-...`.
            write: Begins to fill the empty directory that it is given, and returns a function
                (`Written`) that is polled for the end. Called with False, this function returns the
                seconds that writing took, or None if files are still being written; called with
                True, it waits. It raises the error if writing failed.
            metric: The value that ranks the checkpoint; a value that is not finite counts as None.
            info: The content of `training_info.json`; numbers that are not finite become null.

        Returns:
            The save in progress, whose `finish` raises the errors that occur later.

        Raises:
            CheckpointError: The save cannot begin: the disk is full or reports an error. Earlier
                checkpoints are unchanged, and the run can continue and save at a later step.
        """
        if not self._lock.held:
            raise RuntimeError("enter the store first: `with CheckpointStore(...) as store:`")
        if step < 0:
            raise ValueError(f"step must be 0 or more, not {step}")
        if self._under_way is not None and not self._under_way.is_over:
            raise RuntimeError("one save at a time: finish the one that is under way first")
        started = time.monotonic()
        identity = uuid4().hex
        temporary = self.root / f".tmp-step_{step}-{identity}"
        with self._whole_or_absent(step, temporary):
            self._require_space()
            temporary.mkdir()
            self._on_phase("begin")
            written = write(temporary)

        def ask(is_awaited: bool) -> float | None:
            with self._whole_or_absent(step, temporary):
                return written(is_awaited)

        def seal() -> Path:
            with self._whole_or_absent(step, temporary):
                self._finish(temporary, step=step, metric=metric, info=info or {})
                self._put_in_place(temporary, self.path_of(step), identity)
            self._point_to_best()
            self._prune(step)
            return self.path_of(step)

        self._under_way = SaveUnderWay(ask, seal, seconds=time.monotonic() - started)
        return self._under_way

    @contextmanager
    def _whole_or_absent(self, step: int, temporary: Path) -> Iterator[None]:
        # A stage that fails leaves nothing of the checkpoint.
        try:
            yield
        except BaseException as error:
            delete_directory(temporary)
            if is_disk_error(error):
                raise CheckpointError(
                    f"the checkpoint of step {step} could not be saved in '{self.root}': "
                    f"{str(error).rstrip('.')}. Earlier checkpoints are as they were."
                ) from error
            raise

    def _end_of_saving(self, *, is_orderly: bool) -> None:
        # A save that is given up leaves files that the next start clears up.
        save, self._under_way = self._under_way, None
        if save is None or save.is_over:
            return
        if is_orderly:
            save.finish()
        elif save.is_sealing:
            with suppress(Exception):
                save.finish()

    def _require_space(self) -> None:
        needed = math.ceil(_FREE_SPACE_FACTOR * self._bytes_of_one(self._sound()))
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise CheckpointError(
                f"the disk has {free / 1e6:,.1f} MB free and {needed / 1e6:,.1f} MB are needed; "
                "free some, or lower checkpointing.keep_top_k"
            )

    def _finish(
        self, temporary: Path, *, step: int, metric: float | None, info: Mapping[str, Any]
    ) -> None:
        text = json_text(info)
        (temporary / INFO_NAME).write_text(text + "\n", encoding="utf-8")
        self._on_phase("written")
        records = seal_files(temporary, on_file=lambda name: self._on_phase(f"file:{name}"))
        self._on_phase("fsynced")
        manifest = Manifest(
            step=step,
            metric_name=self._metric_name,
            metric=float(metric) if metric is not None and math.isfinite(metric) else None,
            created_by=software_versions(),
            files=records,
        )
        write_manifest(temporary, manifest)
        self._on_phase("manifest")

    def _put_in_place(self, temporary: Path, target: Path, identity: str) -> None:
        aside = self.root / f".old-{target.name}-{identity}"
        if os.path.lexists(target) and not (target / MANIFEST_NAME).is_file():
            aside = self.root / f"{target.name}.foreign-{identity[:8]}"
            _log.warning("'%s' is not a checkpoint of Laurel; moved to '%s'", target, aside)
        put_in_place(temporary, target, aside, on_phase=self._on_phase)
        if aside.name.startswith("."):
            delete_directory(aside)

    def _point_to_best(self) -> None:
        link, fresh = self.root / BEST_NAME, self.root / f".best-{uuid4().hex}"
        try:
            self._on_phase("best")
            best = self.best()
            if best is not None:
                fresh.symlink_to(best.name, target_is_directory=True)
                fresh.replace(link)
            elif link.is_symlink():
                link.unlink()
        except OSError as error:
            fresh.unlink(missing_ok=True)
            _log.warning("the link '%s' could not be set: %s", link, error)

    def _prune(self, just_saved: int) -> None:
        kept = steps_to_keep(
            metrics := self._metrics(),
            keep_top_k=self._keep_top_k,
            higher_is_better=self._higher_is_better,
            just_saved=just_saved,
        )
        for step in sorted(metrics.keys() - kept - self._pinned):
            doomed = self.root / f".del-step_{step}-{uuid4().hex}"
            try:
                self._on_phase(f"prune:step_{step}")
                self.path_of(step).rename(doomed)
                self._on_phase(f"deleting:step_{step}")
            except OSError as error:
                _log.warning("'%s' could not be deleted: %s", self.path_of(step), error)
            delete_directory(doomed)
        self._on_phase("pruned")

    def _sound(self) -> dict[int, Manifest]:
        # Checkpoints whose files have the right sizes; others are neither ranked nor deleted.
        sound = {}
        for step in self.steps():
            try:
                sound[step] = verify_directory(self.path_of(step), hashes=False)
            except CheckpointError:
                continue
        return sound

    def _metrics(self) -> dict[int, float | None]:
        return {
            step: manifest.metric if manifest.metric_name == self._metric_name else None
            for step, manifest in self._sound().items()
        }


# Finding the checkpoints in a directory, which needs no lock.


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """The checkpoint from which a run resumes, and newer ones that are incomplete or damaged."""

    path: Path | None
    """The newest complete checkpoint; None if there is none."""
    skipped: tuple[str, ...]
    """The newer directories that cannot be used, newest first, each with the reason."""


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Check the sizes and contents of a checkpoint directory against its manifest.

    Raises:
        CheckpointError: The directory is incomplete, altered or no checkpoint. The message names
            the bad files and, if there is one, the newest earlier checkpoint that is complete.
    """
    directory = Path(os.path.realpath(path))
    try:
        return verify_directory(directory, hashes=True)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_hint(directory)}") from None


def steps_to_keep(
    metrics: Mapping[int, float | None],
    *,
    keep_top_k: int | None,
    higher_is_better: bool,
    just_saved: int,
) -> set[int]:
    """Return the steps in `metrics` whose checkpoints are kept; with `keep_top_k` None, all are.

    Otherwise the best `keep_top_k`, the one just saved and the latest are kept. Of equal metrics
    the newer step is better, and a step without a metric is worse than any other; so without
    metrics the most recent steps are kept. At least two are kept, in case one is damaged.
    """
    if keep_top_k is None:
        return set(metrics)
    latest_first = sorted(metrics, reverse=True)
    kept = {*best_first(metrics, higher_is_better)[:keep_top_k], *latest_first[:1]}
    if just_saved in metrics:
        kept.add(just_saved)
    return kept if len(kept) > 1 else {*kept, *latest_first[:2]}


def find_newest(root: Path, steps: Iterable[int]) -> NewestCheckpoint:
    """Find the newest complete checkpoint among `steps`, and the newer ones that are not."""
    skipped: list[str] = []
    for step in sorted(steps, reverse=True):
        path = root / f"step_{step}"
        try:
            verify_directory(path, hashes=True)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return NewestCheckpoint(path=path, skipped=tuple(skipped))
    return NewestCheckpoint(path=None, skipped=tuple(skipped))


def steps_in(root: Path) -> list[int]:
    """List the steps that have a directory in `root`, in rising order; other names are ignored.

    Raises:
        CheckpointError: `root` exists and cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            found = [
                int(match[1])
                for entry in entries
                if (match := STEP_NAME.fullmatch(entry.name))
                and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"'{root}' cannot be read: {error.strerror}.") from error
    return sorted(found)


def best_first(metrics: Mapping[int, float | None], higher_is_better: bool) -> list[int]:
    """Sort steps by metric, best first: newer first if equal, steps without a metric last."""
    sign = -1.0 if higher_is_better else 1.0

    def rank(step: int) -> tuple[bool, float, int]:
        metric = metrics[step]
        return (metric is None, 0.0 if metric is None else sign * metric, -step)

    return sorted(metrics, key=rank)


def _hint(directory: Path) -> str:
    try:
        if directory.is_dir() and (inside := steps_in(directory)):
            return f" It holds checkpoints: name one of them, e.g. '{directory}/step_{inside[-1]}'."
        match = STEP_NAME.fullmatch(directory.name)
        if match is None:
            return ""
        earlier = [step for step in steps_in(directory.parent) if step < int(match[1])]
    except OSError:
        return ""
    previous = find_newest(directory.parent, earlier).path
    return f" The newest whole checkpoint before it is '{previous}'." if previous else ""


# Cleaning up after a writer that was killed: it left names that begin with a dot.

_LEFTOVER = re.compile(
    r"\.(?P<kind>tmp|old|del)-(?P<step>step_(?:0|[1-9][0-9]*))-(?P<id>[0-9a-f]{32})"
)
# Initial weights of generation replicas.
_LEFTOVER_START = re.compile(r"\.start-[0-9a-f]{32}")
_LEFTOVER_LINK = re.compile(r"\.best-[0-9a-f]{32}")


def clear_up(root: Path) -> None:
    """Finish or undo interrupted saves in a directory of checkpoints, and delete other leftovers.

    The caller must hold the directory's lock.
    """
    names = os.listdir(root)
    leftovers = [match for name in names if (match := _LEFTOVER.fullmatch(name))]
    for match in leftovers:
        target = root / match["step"]
        if match["kind"] == "old" and not os.path.lexists(target):
            # Killed between the two renames of a replacement: finish it, or else undo it.
            fresh = root / f".tmp-{match['step']}-{match['id']}"
            source = fresh if is_whole(fresh) else root / match[0]
            source.rename(target)
            sync_directory(root)
            _log.warning("'%s' was restored after an interrupted save", target)
    for match in leftovers:
        delete_directory(root / match[0])
    for name in filter(_LEFTOVER_START.fullmatch, names):
        delete_directory(root / name)
    for name in filter(_LEFTOVER_LINK.fullmatch, names):
        (root / name).unlink(missing_ok=True)


# One writer per directory: a lock that the kernel frees when its holder dies, however it dies.

LOCK_NAME = ".lock"

_held: set[int] = set()


def _close_in_child() -> None:
    # A forked child (a data-loading worker) shares the lock through its copy of the descriptor and
    # would keep it after the death of its parent.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class DirectoryLock:
    """A lock by which only one process at a time writes to a directory.

    It uses a file `.lock` in the directory, which is never deleted.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._descriptor: int | None = None

    @property
    def held(self) -> bool:
        """Whether this process holds the lock; a forked child does not inherit it."""
        return self._descriptor in _held

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: Another process has the lock (the message names it), or the file system
                has no locks.
            OSError: The file of the lock cannot be opened.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise CheckpointError(
                f"'{self._path.parent}' is being written by {holder or 'another process'}. "
                "Wait for it to end or stop it, or give this run another directory."
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise CheckpointError(
                f"'{self._path}' cannot be locked ({error.strerror}): the file system has no "
                "locks, so nothing would keep two runs apart. Use a directory on another one."
            ) from error
        # Only informs: on a full disk the lock holds all the same.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor is not None and self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


# A checkpoint that is being saved: its owner checks on it now and then, or waits.

Written = Callable[[bool], float | None]
"""A function that returns the seconds that writing a checkpoint's files took.

None means that writing has not ended; with the argument True the function waits for the end. An
error of a writer is raised after all writers have ended. The function is called only in the thread
that began the save.
"""


class SaveUnderWay:
    """A save in progress: files are written, then synced and renamed in the background.

    The checkpoint ends up complete or absent.
    """

    def __init__(self, written: Written, seal: Callable[[], Path], *, seconds: float) -> None:
        """Wrap a save whose files are being written; nothing is polled or synced yet.

        Args:
            written: Returns the seconds that writing the files took (`Written`). With the argument
                False it returns None if writing has not ended; with True it waits for the end.
            seal: Syncs the files to the disk, and renames their directory. If this fails, it
                deletes them.
            seconds: The seconds that the beginning of the save took.
        """
        self._written = written
        self._seal = seal
        self._seconds = seconds
        self._sealing: Background | None = None
        self._path: Path | None = None
        self._failure: Exception | None = None

    @property
    def seconds(self) -> float:
        """The seconds of work so far: to begin the save, write its files, and put them in place.

        Time in which a finished stage waits for the next call of `ready` or `finish` is not
        counted.
        """
        return self._seconds

    @property
    def is_over(self) -> bool:
        """Whether the save has ended: with a complete checkpoint, or with an error."""
        return self._path is not None or self._failure is not None

    @property
    def is_sealing(self) -> bool:
        """Whether all files have been written, and a thread is syncing and renaming them."""
        return self._sealing is not None

    def ready(self) -> bool:
        """Advance the save without waiting, and report whether `finish` would return at once."""
        if self.is_over:
            return True
        if self._sealing is None:
            seconds = self._ask(is_awaited=False)
            if seconds is not None:
                self._sealing = Background("laurel-sealing")
                self._sealing.start(self._sealed)
            return self.is_over
        return self._sealing.outcome(is_awaited=False) is not None

    def finish(self) -> Path:
        """Wait for the end of the save, and return the path of the checkpoint.

        Further calls return the same path, or raise the same error.

        Raises:
            CheckpointError: The disk is full or reports an error. Earlier checkpoints are
                unchanged.
            Exception: Writing failed for another reason.
        """
        if not self.is_over:
            if self._sealing is not None:
                self._sealing.outcome(is_awaited=True)
            elif self._ask(is_awaited=True) is not None:
                self._sealed()
        if self._failure is not None:
            raise self._failure
        assert self._path is not None
        return self._path

    def _ask(self, *, is_awaited: bool) -> float | None:
        try:
            seconds = self._written(is_awaited)
        except Exception as error:
            self._failure = error
            return None
        assert seconds is not None or not is_awaited
        self._seconds += seconds or 0.0
        return seconds

    def _sealed(self) -> Any:
        started = time.monotonic()
        try:
            path = self._seal()
        except Exception as error:
            self._failure = error
        else:
            self._seconds += time.monotonic() - started
            self._path = path


# Work in the background of a program: one piece after the other, in a thread.


class Background:
    """Runs functions in the background, one after the other, in batches.

    A batch ends when `outcome` has returned a number or raised an error; the next `start` begins a
    new batch. After a function has failed, the rest of its batch is skipped. The process does not
    exit before all functions have ended.
    """

    def __init__(self, name: str) -> None:
        """Set the name of the threads; none is started yet."""
        self._name = name
        self._pieces: list[Future[float]] = []
        self._is_reported = False

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in the background, after earlier work.

        The reference to `work` is dropped as soon as it has run.
        """
        if self._is_reported:
            self._pieces = []
            self._is_reported = False
        thread = ThreadPoolExecutor(1, self._name)
        self._pieces.append(thread.submit(_timed, work, tuple(self._pieces)))
        thread.shutdown(wait=False)  # it ends with the piece

    def outcome(self, *, is_awaited: bool) -> float | None:
        """Return the seconds that the functions of the batch took; None if some have not ended.

        Raises:
            Exception: A function failed. Every call raises this error until a new batch begins.
        """
        if not is_awaited and not all(piece.done() for piece in self._pieces):
            return None
        wait(self._pieces)
        self._is_reported = True
        return sum(piece.result() for piece in self._pieces)


def _timed(work: Callable[[], object], before: tuple[Future[float], ...]) -> float:
    wait(before)
    if any(piece.exception() is not None for piece in before):
        return 0.0
    started = time.monotonic()
    try:
        work()
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # or they would keep what was to be written,
        del work  # and so would this one
        raise
    return time.monotonic() - started
