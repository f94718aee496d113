"""`laurel serve-null`: a reward server without a model, to measure everything else of a server.

It is a plug-in, so no file of Laurel's knows it. `ENVIRONMENT` puts it beside Laurel as an editable
install would: this folder and the metadata in `installed/` on Python's path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from laurel.errors import DataError
from laurel.extensions.server.options import ServeOptions
from laurel.plugins import Command
from laurel.types import (
    Conversation,
    Group,
    Message,
    Score,
    SentTurn,
    TokenGroup,
    group_of,
)

if TYPE_CHECKING:
    from laurel.extensions.server.service import ServingSpec
    from laurel.rewards.preparing import Prepared, Rendered
    from laurel.rewards.spec import Say

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(HERE), str(HERE / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
}
"""What a process needs to have the command."""
NAME = VERSION = "null"
_END = 16  # bytes that the score reads


class ServeNull(Command):
    """Serve trivial scores without a model, for load tests."""

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return serve_null


def serve_null(options: ServeOptions) -> None:
    """Serve trivial scores without a model, for load tests."""
    from laurel.extensions.server.serve import run_serve

    run_serve(options, opens=open_null)


def open_null(spec: ServingSpec, *, say: Say) -> tuple[str, str, NullScorer]:
    """Return name, version and backend, as `laurel.extensions.server.service.open_model` does."""
    return NAME, VERSION, NullScorer()


class NullScorer:
    """Scores without a model: a token is a byte, and the score the mean of the last bytes."""

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """Tokenise groups into bytes."""
        return [_prepared(group) for group in groups]

    def prepare_rendered(self, row: Rendered) -> TokenGroup:
        """Tokenise one rendered conversation into bytes."""
        if isinstance(row, SentTurn):
            prompt = row.prompt
            if not isinstance(prompt, str) or not row.is_rendered:
                said = (Message("user", prompt),) if isinstance(prompt, str) else prompt
                tokens, _ = _prepared(group_of(said, (row.response,), group_id=""))
                assert tokens is not None
                return tokens
            row = prompt + row.response
        ids = _bytes(row) if isinstance(row, str) else np.asarray(row, dtype=np.int32)
        if not len(ids):
            raise DataError("a conversation without a single token has no score")
        return TokenGroup(id="", trunk_ids=ids[:0], branches_ids_G=(ids,), truncated_G=(False,))

    def score_tokens(self, tokens: Sequence[TokenGroup]) -> list[tuple[Score, ...]]:
        """Score tokenised groups by their last bytes."""
        return [
            tuple(_score(group.trunk_ids, branch) for branch in group.branches_ids_G)
            for group in tokens
        ]

    def sleep(self) -> None:
        """Do nothing, as no memory is held."""

    def wake(self) -> None:
        """Do nothing, as no memory is held."""

    def close(self) -> None:
        """Do nothing, as no memory is held."""


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def _text(conversation: Conversation) -> str:
    return "".join(f"{message.role}\n{message.content}\n" for message in conversation)


def _prepared(group: Group) -> Prepared:
    if not group.completions_G:
        return None, ()
    size = len(group.completions_G)
    tokens = TokenGroup(
        id=group.id,
        trunk_ids=_bytes(_text(group.prompt)),
        branches_ids_G=tuple(_bytes(_text(one.messages)) for one in group.completions_G),
        truncated_G=(False,) * size,
    )
    return tokens, (None,) * size


def _score(trunk_ids: np.ndarray, branch_ids: np.ndarray) -> Score:
    end = branch_ids[-_END:]
    if len(end) < _END:
        end = np.concatenate([trunk_ids, end])[-_END:]
    value = sum(end.tolist()) / (128 * len(end)) - 1.0
    return Score(value=value, values_K=(value,), num_tokens=len(trunk_ids) + len(branch_ids))
