"""Processes that render and tokenise conversations, so that this one has its hands free."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from laurel.errors import DataError, WorkerError
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.types import Completion, Group, Message, SentTurn, TokenGroup
from laurel.workers.rendezvous import RankPlace
from laurel.workers.replica_set import ReplicaSet
from laurel.workers.supervisor import Restarts

_log = logging.getLogger(__name__)

WORKER = "reward_worker"
MAX_RESTARTS = 8
"""Of all workers together."""


class PreparingWorker:
    """The worker of one such process."""

    def __init__(self, place: RankPlace, contract: ScoringContract) -> None:
        """Hold a contract, with a tokenizer of its own."""
        self._contract = contract

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer.prepare`."""
        return prepared_by(self._contract, groups)


class Preparers:
    """Several workers that share what is to be prepared. May be asked from several threads.

    One that is lost is replaced, and another does what it had: preparing changes nothing.
    """

    def __init__(
        self,
        contract: ScoringContract,
        num_workers: int,
        make_group: Callable[..., WorkerGroup],
        *,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        """Start them.

        Args:
            contract: What they render by.
            num_workers: At least one.
            make_group: Makes a group of one; called with the class and its arguments.
            say: Told of those that are replaced.

        Raises:
            WorkerError: One cannot be made.
        """
        self.workers = ReplicaSet[WorkerGroup](
            lambda _: make_group(PreparingWorker, contract),
            num_workers,
            name=WORKER,
            end=lambda group: group.shutdown(),
            restarts=Restarts(MAX_RESTARTS, say),
        )
        self._threads = ThreadPoolExecutor(num_workers, "laurel-preparing")

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer.prepare`.

        Raises:
            WorkerError: All were lost, and too many to be replaced; `is_lost`.
        """
        share = -(-len(groups) // len(self.workers.replicas))
        parts = [groups[first : first + share] for first in range(0, len(groups), share or 1)]
        return [one for done in self._threads.map(self._prepare, parts) for one in done]

    def _prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        try:
            found: list[Prepared] = self.workers.call(
                lambda group: group.call_one(0, "prepare", groups)
            )
            return found
        except WorkerError as error:
            if not error.is_lost:
                raise (error.__cause__ or error) from None
            # No conversation is to blame, and none can be scored any more.
            raise WorkerError(
                f"{error}. Processes that render are ended most often for want of memory: lower "
                "num_workers, or set it to 0 and let the run itself render",
                role=WORKER,
                exit_code=WorkerError.LOST_EXIT_CODE,
            ) from error

    def close(self) -> None:
        """End them. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self.workers.close()


# --------------------------------------------------------------------------------------------------
# Groups on their way to tokens: which completions can be rendered, and why the others cannot.

Prepared = tuple[TokenGroup | None, tuple[str | None, ...]]
"""The tokens of the completions of a group that can be rendered, and of each completion why it
cannot; None where none can."""


class Preparing(Protocol):
    """Renders and tokenises, in other processes. May be asked from several threads."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `prepared_by`.

        Raises:
            WorkerError: The processes are lost for good (`is_lost`).
        """

    def close(self) -> None:
        """End the processes. Idempotent."""


def prepared_by(contract: ScoringContract, groups: Sequence[Group]) -> list[Prepared]:
    """The tokens of the completions that can be rendered, and why each other one cannot."""
    groups_left = [group for group in groups if group.completions_G]
    try:
        encoded = iter(contract.encode(groups_left) if groups_left else ())
    except DataError:
        return [_one_by_one(contract, group) for group in groups]
    return [
        (next(encoded) if group.completions_G else None, (None,) * len(group.completions_G))
        for group in groups
    ]


def _one_by_one(contract: ScoringContract, group: Group) -> Prepared:
    def why_not(alone: Group) -> str | None:
        try:
            contract.encode([alone])
        except DataError as error:
            return str(error)
        return None

    sound, failures = filter_readable(group, why_not)
    return (contract.encode([sound])[0] if sound.completions_G else None), failures


def filter_readable(
    group: Group, why_not: Callable[[Group], str | None]
) -> tuple[Group, tuple[str | None, ...]]:
    """The group with the completions that can be used, and of each completion why it cannot.

    Args:
        group: Any.
        why_not: Told of each completion as a group of its own.
    """
    failures = tuple(why_not(replace(group, completions_G=(one,))) for one in group.completions_G)
    sound = tuple(
        completion
        for completion, failure in zip(group.completions_G, failures, strict=True)
        if failure is None
    )
    return replace(group, completions_G=sound), failures


# --------------------------------------------------------------------------------------------------
# Conversations that clients have rendered themselves, on their way through what takes groups.
#
# Such a group has an empty prompt, and each of its completions is one message: of the role
# `<rendered>` with the text, of the role `<token ids>` with the ids and a blank between them, or of
# the role `<sent turn>` with a prompt and a response as JSON. So routers and servers pass it on as
# any other; a batcher reads it, and nobody else should get it.

Rendered = str | tuple[int, ...] | SentTurn
"""A whole conversation as its client has sent it: rendered text, the ids of its tokens, or a prompt
of which only the model's contract can tell whether it was rendered, with its response."""
_RENDERED, _TOKEN_IDS, _SENT_TURN = "<rendered>", "<token ids>", "<sent turn>"


def rendered_group(rows: Sequence[Rendered]) -> Group:
    """Conversations that a client has rendered, as a group that a batcher understands."""
    return Group(
        id="",
        prompt=(),
        completions_G=tuple(Completion(messages=(_message(row),)) for row in rows),
    )


def _message(row: Rendered) -> Message:
    if isinstance(row, str):
        return Message(_RENDERED, row)
    if isinstance(row, SentTurn):
        return Message(_SENT_TURN, json.dumps([row.prompt, row.response, row.is_rendered]))
    return Message(_TOKEN_IDS, " ".join(map(str, row)))


def rendered_rows(group: Group) -> list[Rendered | None] | None:
    """The conversations of a group that a client has rendered, None for what cannot be read;
    None where it is a group like all others."""
    if group.prompt or not group.completions_G:
        return None
    rows: list[Rendered | None] = []
    for completion in group.completions_G:
        if len(completion.messages) != 1:
            return None
        (said,) = completion.messages
        if said.role == _RENDERED:
            rows.append(said.content)
        elif said.role == _SENT_TURN:
            rows.append(_turn(said.content))
        elif said.role == _TOKEN_IDS:
            rows.append(_ids(said.content))
        else:
            return None
    return rows


def _turn(text: str) -> SentTurn | None:
    try:
        prompt, response, is_rendered = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(prompt, str) or not isinstance(response, str):
        return None
    return SentTurn(prompt, response, None if is_rendered is None else bool(is_rendered))


def _ids(text: str) -> tuple[int, ...] | None:
    if re.fullmatch(r"(\d{1,10}( \d{1,10})*)?", text, re.ASCII) is None:
        return None
    ids = tuple(map(int, text.split()))
    return ids if all(one < 2**31 for one in ids) else None
