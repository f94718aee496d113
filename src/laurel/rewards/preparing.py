"""Processes that render and tokenise conversations, to relieve the process that scores."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from laurel.errors import DataError, WorkerError
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.types import Completion, Group, Message, Score, SentTurn, TokenGroup
from laurel.workers.rendezvous import RankPlace
from laurel.workers.replica_set import ReplicaSet
from laurel.workers.supervisor import Restarts

_log = logging.getLogger(__name__)

WORKER = "reward_worker"
MAX_RESTARTS = 8
"""Restarts of all workers together."""


class PreparingWorker:
    """Renders and tokenises in a process of its own."""

    def __init__(self, place: RankPlace, contract: ScoringContract) -> None:
        """Hold a contract, with a tokenizer of its own."""
        self._contract = contract

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Render and tokenise groups."""
        return prepared_by(self._contract, groups)


class Preparers:
    """Divides rendering and tokenising among several workers; thread-safe.

    A lost worker is replaced, and its groups go to another one: preparing has no side effects.
    """

    def __init__(
        self,
        contract: ScoringContract,
        num_workers: int,
        make_group: Callable[..., WorkerGroup],
        *,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        """Start the workers.

        Args:
            make_group: Makes a group of one worker; called with the class and its arguments.
            say: Called with a line on every restart.

        Raises:
            WorkerError: A worker cannot be started.
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
        """Render and tokenise groups.

        Raises:
            WorkerError: All workers were lost, and the restart limit is reached (`is_lost` is set).
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
            # No conversation is at fault, and none can be scored any more.
            raise WorkerError(
                f"{error}. Tokenizer processes are ended most often for want of memory: lower "
                "num_workers, or set it to 0 to render in the run's own process",
                role=WORKER,
                exit_code=WorkerError.LOST_EXIT_CODE,
            ) from error

    def close(self) -> None:
        """End the workers; running calls fail. Idempotent."""
        self.workers.close()
        self._threads.shutdown(cancel_futures=True)


# Rendering a group: completions that cannot be rendered fail alone.

Prepared = tuple[TokenGroup | None, tuple[str | None, ...]]
"""Tokens of the completions of a group that can be rendered, None where none can; and the failure
of each completion, None where it can be rendered.
"""


def prepared_by(contract: ScoringContract, groups: Sequence[Group]) -> list[Prepared]:
    """Render and tokenise groups; a completion that cannot be rendered carries a failure."""
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
    """Return the group of the readable completions, and the failure of each completion.

    Args:
        why_not: Called with each completion as a group of its own; returns why it is unreadable.
    """
    failures = tuple(why_not(replace(group, completions_G=(one,))) for one in group.completions_G)
    sound = tuple(
        completion
        for completion, failure in zip(group.completions_G, failures, strict=True)
        if failure is None
    )
    return replace(group, completions_G=sound), failures


def fill_in(failures: Sequence[str | None], scores: Iterable[Score]) -> tuple[Score, ...]:
    """Return the score of each completion, given its failure or else the next of the scores."""
    rest = iter(scores)
    return tuple(
        next(rest) if failure is None else Score(value=None, failure=failure)
        for failure in failures
    )


def is_text(text: str) -> bool:
    """Whether a string is valid Unicode, without unpaired surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Conversations that clients have rendered, encoded as groups.
#
# Such a group has an empty prompt, and each of its completions is one message: of the role
# `<rendered>` with the text, of the role `<token ids>` with the ids and a blank between them, or of
# the role `<sent turn>` with a prompt and a response as JSON. So routers and servers pass it on as
# any other; only a batcher may read it.

Rendered = str | tuple[int, ...] | SentTurn
"""Whole conversation as its client sent it: rendered text, token ids, or a response with a prompt
of which only the model's contract can tell whether it was rendered.
"""
_RENDERED, _TOKEN_IDS, _SENT_TURN = "<rendered>", "<token ids>", "<sent turn>"


def rendered_group(rows: Sequence[Rendered]) -> Group:
    """Encode conversations that a client has rendered as a group that a batcher understands."""
    return Group(
        id="",
        prompt=(),
        completions_G=tuple(Completion(messages=(_message(row),)) for row in rows),
    )


def _message(row: Rendered) -> Message:
    if isinstance(row, str):
        return Message(_RENDERED, row)
    if isinstance(row, SentTurn):
        prompt = row.prompt
        said = prompt if isinstance(prompt, str) else [[one.role, one.content] for one in prompt]
        return Message(_SENT_TURN, json.dumps([said, row.response, row.is_rendered]))
    return Message(_TOKEN_IDS, " ".join(map(str, row)))


def rendered_rows(group: Group) -> list[Rendered | None] | None:
    """Decode a group of rendered conversations, with None for each unreadable one; return None for
    an ordinary group.
    """
    if group.prompt or not group.completions_G:
        return None
    rows: list[Rendered | None] = []
    for completion in group.completions_G:
        if len(completion.messages) != 1:
            return None
        (message,) = completion.messages
        if message.role == _RENDERED:
            rows.append(message.content)
        elif message.role == _SENT_TURN:
            rows.append(_turn(message.content))
        elif message.role == _TOKEN_IDS:
            rows.append(_ids(message.content))
        else:
            return None
    return rows


def _turn(text: str) -> SentTurn | None:
    try:
        said, response, is_rendered = json.loads(text)
        prompt = said if isinstance(said, str) else tuple(Message(*one) for one in said)
    except (ValueError, TypeError, RecursionError):
        return None
    turn = SentTurn(prompt, response, None if is_rendered is None else bool(is_rendered))
    return turn if all(isinstance(one, str) for one in texts_of(turn)) else None


def texts_of(row: Rendered) -> list[str]:
    """Return the texts of a conversation that its client sent."""
    if isinstance(row, str):
        return [row]
    if not isinstance(row, SentTurn):
        return []
    if isinstance(row.prompt, str):
        return [row.prompt, row.response]
    return [text for one in row.prompt for text in (one.role, one.content)] + [row.response]


def _ids(text: str) -> tuple[int, ...] | None:
    if re.fullmatch(r"(\d{1,10}( \d{1,10})*)?", text, re.ASCII) is None:
        return None
    ids = tuple(map(int, text.split()))
    return ids if all(one < 2**31 for one in ids) else None
