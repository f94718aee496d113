"""How a conversation becomes a number: the scoring contract.

It is defined here once, saved with every checkpoint as `scoring.json`, and used by training,
evaluation, serving and environments alike. Callers pass raw messages; no other code renders a
template, adds a special token or chooses the position of the score.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from laurel.errors import CheckpointError, DataError, ModelError, key_of, speaking, terms_in_use
from laurel.models.tokenizer import (
    bind_variables,
    close_ends,
    pin_date,
    refuse_left_out,
    render,
)
from laurel.types import Conversation, Group, Message, SentTurn, TokenGroup, group_of

FILE_NAME = "scoring.json"
FORMAT = 1

TrainedIds = list[int]


class GoldenScore(BaseModel):
    """A golden conversation: its scores when the checkpoint was saved, compared at every load."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: tuple[Message, ...]
    """The conversation as raw messages."""
    values_K: tuple[float, ...]
    """Outputs of the head."""
    num_tokens: int
    """Tokens of the rendered conversation, after truncation."""


class ScoringRules(BaseModel):
    """The contract as it is saved: everything that decides a score besides the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    """Version of the file format."""
    template_sha256: str
    """Hash of the chat template that is saved with the tokenizer."""
    template_kwargs: dict[str, Any] = {}
    """Variables that the template is rendered with."""
    pinned_date: str | None = None
    """The date that a template with a clock was pinned to."""
    bos_id: int | None
    """The token that begins a text; null where there is none, as below."""
    eos_id: int | None
    """The token that ends a text; null where there is none."""
    pad_id: int | None
    """The token that fills rows up; its place is never scored."""
    pooled: Literal["last", "model"] = "last"
    """`last`: the score is read from the last token. `model`: an encoder pools by itself."""
    max_length: int
    """Tokens; longer conversations are cut."""
    truncation_side: Literal["left", "right"]
    """The side that is cut from conversations longer than `max_length`."""
    head_dtype: str = "float32"
    """Dtype of the head's arithmetic."""
    attributes: tuple[str, ...] = ()
    """Names of the outputs of a regression head; empty for a scalar."""
    attribute_weights: tuple[float, ...] | None = None
    """Weights that combine the attributes into one score."""
    mean: float | None = None
    """Mean of the scores of reference completions; null: not measured."""
    std: float | None = None
    """Their standard deviation."""
    num_reference: int = 0
    """Completions that mean and std were measured on."""
    golden: tuple[GoldenScore, ...] = ()
    """Conversations whose scores the model must reproduce at every load."""
    golden_dtype: str = "float32"
    """Dtype of the weights, and of the arithmetic that gave the golden scores."""
    versions: dict[str, str] = {}
    """Versions of the libraries it was saved with."""

    @classmethod
    def read(cls, directory: Path) -> ScoringRules:
        """Read `scoring.json` of a checkpoint without looking at the tokenizer beside it.

        Raises:
            CheckpointError: It is unreadable, or of a format this version cannot read.
        """
        path = directory / FILE_NAME
        try:
            rules = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if rules.format != FORMAT:
            raise CheckpointError(
                f"{path} has format {rules.format}; this version reads {FORMAT}. Load it with the "
                "version of Laurel that wrote it"
            )
        return rules


_PROBE, _ANSWER = "What a user says here", "What an assistant says here"
# Marks that the templates of common models write, and that users rarely type.
_FOREIGN_MARK = re.compile(
    r"<\|[a-z_]{2,30}\|>|<(?:start|end)_of_turn>|\[/?INST\]|<\uff5c[^<>]{2,30}\uff5c>"
)


class ScoringContract:
    """Turns conversations into token groups by a fixed set of rules, and outputs into a scalar."""

    def __init__(self, tokenizer: Any, rules: ScoringRules) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._terms = terms_in_use()
        """Key names of the caller that opened the model: it may render in other threads and
        processes.
        """

    @classmethod
    def create(
        cls,
        tokenizer: Any,
        *,
        max_length: int,
        truncation_side: Literal["left", "right"],
        append_eos: bool,
        template_kwargs: dict[str, Any] | None = None,
        pooled: Literal["last", "model"] = "last",
        attributes: Sequence[str] = (),
        attribute_weights: Sequence[float] | None = None,
        today: date | None = None,
        closes_ends: bool = True,
    ) -> ScoringContract:
        """Make the contract of a model that has none yet.

        Args:
            tokenizer: With template and padding settled; its template is changed where it prints
                the date, takes variables, or does not write a BOS or EOS that belongs there.
            max_length: Longest conversation in tokens.
            truncation_side: Which end of a longer one is cut.
            append_eos: End every conversation with EOS, and begin it with BOS where there is one.
                True for models trained here; a model from elsewhere is scored on its template as
                it is, as it was trained, with the BOS that its tokenizer would add.
            template_kwargs: Variables of the template.
            pooled: Where the score is read.
            attributes: Outputs of a regression head.
            attribute_weights: Their weights in the scalar; None is their mean.
            today: The date to pin a clock to.
            closes_ends: Whether the template is given the BOS and EOS that it lacks; False for one
                that says already, to the letter, what the model was trained on.
        """
        template, pinned = pin_date(tokenizer.chat_template, today or date.today())
        tokenizer.chat_template = bind_variables(template, template_kwargs or {})
        if pooled == "last" and closes_ends:
            close_ends(tokenizer, append_eos=append_eos)
        rules = ScoringRules(
            template_sha256=_sha256(tokenizer.chat_template),
            template_kwargs=template_kwargs or {},
            pinned_date=pinned,
            bos_id=tokenizer.bos_token_id,
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            pooled=pooled,
            max_length=max_length,
            truncation_side=truncation_side,
            attributes=tuple(attributes),
            attribute_weights=None if attribute_weights is None else tuple(attribute_weights),
        )
        return cls(tokenizer, rules)

    @classmethod
    def load(cls, directory: Path, tokenizer: Any) -> ScoringContract:
        """Load the contract saved in a checkpoint.

        Raises:
            CheckpointError: `scoring.json` is unreadable, or was written for another tokenizer.
        """
        rules = ScoringRules.read(directory)
        if _sha256(tokenizer.chat_template or "") != rules.template_sha256:
            raise CheckpointError(
                f"{directory}: the chat template is not the one this model was trained with "
                f"({FILE_NAME} holds its hash). Leave {key_of('policy.tokenizer.chat_template')} "
                "at `default` "
                "and restore chat_template.jinja from the checkpoint, or delete "
                f"{FILE_NAME} to score with the new template on your own authority."
            )
        for name in ("bos", "eos", "pad"):
            saved, found = getattr(rules, f"{name}_id"), getattr(tokenizer, f"{name}_token_id")
            if saved != found:
                raise CheckpointError(
                    f"{directory}: {name} is token {found}, the model was trained with {saved}"
                )
        return cls(tokenizer, rules)

    def save(self, directory: Path) -> None:
        """Write `scoring.json`."""
        text = json.dumps(self.rules.model_dump(mode="json"), indent=1, ensure_ascii=False)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    def with_rules(self, **changes: Any) -> ScoringContract:
        """The same contract with some rules changed (reference statistics, golden scores)."""
        return ScoringContract(self.tokenizer, self.rules.model_copy(update=changes))

    # ------------------------------------------------------------------------------- to tokens

    def render(self, conversation: Conversation) -> str:
        """Render a conversation as text.

        Raises:
            DataError: The template cannot render it.
        """
        with speaking(*self._terms) if self._terms else nullcontext():
            return render(self.tokenizer, conversation, self.rules.template_kwargs)

    def encode(self, groups: Sequence[Group], *, sources: Sequence[str] = ()) -> list[TokenGroup]:
        """Tokenise groups.

        The tokens of each conversation are those of its whole rendered text, so nothing is forced
        at the borders of messages; the trunk is the longest prefix of tokens that all completions
        share, which leaves each at least one of its own.

        Args:
            groups: Prompts with at least one completion each.
            sources: Where each group came from, for errors.

        Raises:
            DataError: A template that fails, with the source of the group.
        """
        where = sources or [group.id for group in groups]
        texts: list[str] = []
        for source, group in zip(where, groups, strict=True):
            try:
                texts.extend(
                    self.render(group.conversation(i)) for i in range(len(group.completions_G))
                )
            except DataError as error:
                raise DataError(f"{source}: {error}") from error
        if not texts:
            return []
        ids_N = self.tokenizer(texts, add_special_tokens=self.rules.pooled == "model")["input_ids"]
        encoded: list[TokenGroup] = []
        first = 0
        for source, group in zip(where, groups, strict=True):
            rows = ids_N[first : first + len(group.completions_G)]
            first += len(rows)
            if not all(rows):
                raise DataError(f"{source}: a conversation without a single token has no score")
            encoded.append(token_group(group.id, [self._finish(row) for row in rows]))
        return encoded

    def encode_rendered(self, row: str | Sequence[int] | SentTurn) -> TokenGroup:
        """Tokenise one conversation that the caller has rendered by the template of this contract.

        Args:
            row: Its text, the ids of its tokens, or a prompt and a response; see `SentTurn`. A
                text gets the BOS that conversations begin with here where it has none: clients of
                servers that add one leave it out.

        Raises:
            DataError: It has no token, or one that the tokenizer does not know; or it is unclear
                whether a prompt was rendered.
        """
        if isinstance(row, SentTurn):
            if not self._was_rendered(row):
                said = group_of((Message("user", row.prompt),), (row.response,), group_id="")
                return self.encode([said])[0]
            text = self._as_in_a_conversation(row.prompt) + row.response
            # Trainers cut the end of a turn off, or keep a part of it, and the reward is read from
            # the last token.
            end = self._end_of_turn
            kept = next((n for n in range(len(end), 0, -1) if text.endswith(end[:n])), 0)
            row = text + end[kept:]
        if isinstance(row, str):
            ids = self.tokenizer(row, add_special_tokens=self.rules.pooled == "model")["input_ids"]
            bos = self.opening_bos
            if ids and bos is not None and ids[0] != bos:
                ids = [bos, *ids]
        else:
            ids = list(row)
            known = len(self.tokenizer)
            if any(not 0 <= one < known for one in ids):
                raise DataError(f"a token id is beyond the {known} of the vocabulary")
        if not ids:
            raise DataError("a conversation without a single token has no score")
        return token_group("", [self._finish(ids)])

    def _was_rendered(self, turn: SentTurn) -> bool:
        # A prompt with marks of a template that is not this one is refused: what it is cannot be
        # known.
        if turn.is_rendered is not None:
            return turn.is_rendered
        if self._asks_for_an_answer and turn.prompt.endswith(self._asks_for_an_answer):
            return True
        mark = next((one for one in self._special_texts if one in turn.prompt), None)
        if mark is None and (found := _FOREIGN_MARK.search(turn.prompt)):
            mark = found[0]
        if mark is None:
            return False
        raise DataError(
            f"the prompt holds {mark!r}, as rendered text does, but it does not end as prompts of "
            f"this model's chat template do ({' or '.join(map(repr, self._asks_for_an_answer))}). "
            "Send the messages; or add ?rendered=1 if the template has made it, ?rendered=0 if it "
            "is what the user says"
        )

    def _as_in_a_conversation(self, prompt: str) -> str:
        # Some templates ask for an answer in other words than those before a given one (Qwen 3 with
        # and without thinking), so the end of the prompt is replaced by the latter.
        if not self._asks_for_an_answer:
            return prompt
        in_conversation, *others = self._asks_for_an_answer
        if prompt.endswith(in_conversation):
            return prompt
        other = next((text for text in others if prompt.endswith(text)), None)
        return prompt if other is None else prompt.removesuffix(other) + in_conversation

    @cached_property
    def _asks_for_an_answer(self) -> tuple[str, ...]:
        # The text between a user's turn and the answer: within a conversation, and as a prompt
        # ends. A template whose text for it is too short to be recognised has none.
        text = self.render((Message("user", _PROBE), Message("assistant", _ANSWER)))
        found = [text.partition(_PROBE)[2].partition(_ANSWER)[0]]
        with suppress(DataError):  # a template may refuse a conversation without an answer
            asked = (Message("user", _PROBE),)
            asking = render(self.tokenizer, asked, self.rules.template_kwargs, prompt=True)
            found.append(asking.partition(_PROBE)[2])
        if any(len(text.strip()) < 4 for text in found):
            return ()
        return tuple(dict.fromkeys(found))

    @cached_property
    def _end_of_turn(self) -> str:
        text = self.render((Message("user", _PROBE), Message("assistant", _ANSWER)))
        return text.rpartition(_ANSWER)[2]

    @cached_property
    def _special_texts(self) -> list[str]:
        # Special tokens include those that only the vocabulary calls special.
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = [str(token.content) for token in added if token.special]
        return [text for text in {*self.tokenizer.all_special_tokens, *special} if len(text) > 2]

    @cached_property
    def opening_bos(self) -> int | None:
        """Find the BOS token, if conversations begin with one."""
        asked = group_of((Message("user", "a"),), ("b",), group_id="")
        (tokens,) = self.encode([asked])
        first = int(tokens.branches_ids_G[0][0])
        return first if first == self.rules.bos_id else None

    def _finish(self, ids: TrainedIds) -> tuple[TrainedIds, bool]:
        # The last token, which is scored, and a BOS are always kept.
        rules = self.rules
        if len(ids) <= rules.max_length:
            return ids, False
        if rules.truncation_side == "right" or rules.pooled == "model":
            return [*ids[: rules.max_length - 1], ids[-1]], True
        if rules.bos_id is not None and ids[0] == rules.bos_id:
            return [rules.bos_id, *ids[len(ids) - rules.max_length + 1 :]], True
        return ids[len(ids) - rules.max_length :], True

    # ------------------------------------------------------------------------------ to a scalar

    def scalar(self, values_K: Sequence[float]) -> float:
        """Combine the outputs of the head into the reward of one completion."""
        if len(values_K) == 1:
            return values_K[0]
        weights = self.rules.attribute_weights
        if weights is None:
            return math.fsum(values_K) / len(values_K)
        return math.fsum(w * v for w, v in zip(weights, values_K, strict=True))


def token_group(group_id: str, rows: Sequence[tuple[TrainedIds, bool]]) -> TokenGroup:
    """Make the token group of conversations of one prompt; tokens that all share are kept once.

    Args:
        group_id: Id of the group.
        rows: The tokens of each, and whether it was cut to them.
    """
    ids_G = [np.asarray(ids, dtype=np.int32) for ids, _ in rows]
    shared = shared_prefix(ids_G) if len(ids_G) > 1 else 0
    return TokenGroup(
        id=group_id,
        trunk_ids=ids_G[0][:shared],
        branches_ids_G=tuple(ids[shared:] for ids in ids_G),
        truncated_G=tuple(was_cut for _, was_cut in rows),
    )


def shared_prefix(ids_G: Sequence[np.ndarray]) -> int:
    """Measure the prefix that all sequences share, short of the whole of any of them."""
    limit = min(len(ids) for ids in ids_G) - 1
    for other in ids_G[1:]:
        different = np.flatnonzero(ids_G[0][:limit] != other[:limit])
        if different.size:
            limit = int(different[0])
    return limit


def check_rendering(contract: ScoringContract) -> None:
    """Refuse a template that drops what it is given, or ends in padding.

    Raises:
        ModelError: The answer does not appear in the text that would be scored, or other programs
            would take the last token for padding.
    """
    probe = (Message("user", "Where is the laurel?"), Message("assistant", "By the western gate."))
    text = contract.render(probe)
    refuse_left_out(probe, text)
    rules = contract.rules
    last = contract.tokenizer(text, add_special_tokens=rules.pooled == "model")["input_ids"][-1]
    if rules.pooled == "last" and last == rules.pad_id:
        raise ModelError(
            f"the chat template ends a conversation with the padding token "
            f"{contract.tokenizer.pad_token!r}: other programs would read this model's score one "
            f"token too early. Name another: {key_of('policy.tokenizer.pad_token')}=..."
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
