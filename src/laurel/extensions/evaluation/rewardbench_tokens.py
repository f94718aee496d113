"""Tokenization of conversations as in rewardbench 0.1.4, to reproduce its published scores.

Its `RewardBenchPipeline` differs from the scoring contract for sequence classifiers: roles are
given by position; special tokens are added to a text whose template has written some already, so
that BOS may stand twice, the first one hidden from attention; long texts lose their left end, BOS
included, before special tokens are added; the score is read at the last token that is not the
padding token, wherever a conversation ends. A hidden first token changes nothing but the positions
of all others, which does not matter to models with rotary positions: it is left out here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from laurel.errors import DataError, ModelError
from laurel.models.files import local_files
from laurel.models.scoring import ScoringContract, TrainedIds, token_group
from laurel.models.spec import ModelSpec
from laurel.models.tokenizer import render
from laurel.rewards.preparing import Prepared, prepared_by
from laurel.types import Conversation, Group, Message, TokenGroup

VERSION = "rewardbench 0.1.4"
MAX_LENGTH = 2048
"""The length at which its scripts cut; its command line cuts on request only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFormat:
    """The tokenization settings of the program whose published numbers are reproduced."""

    program: str
    truncation_side: Literal["left", "right"] | None
    """The end that is cut; None: the tokenizer's setting."""
    max_length: int = MAX_LENGTH


FORMATS = {
    "reward-bench": ReferenceFormat(
        program=f"{VERSION}, scripts/run_rm.py", truncation_side="left"
    ),
    "reward-bench-2": ReferenceFormat(
        program=f"{VERSION}, scripts/run_v2.py", truncation_side=None
    ),
}
"""The program of each benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRow:
    """One conversation as the reference passes it to a model."""

    text: str
    ids: TrainedIds
    """All tokens of the reference's tokenizer."""
    start: int
    """1 where BOS stands twice: the first is hidden from attention."""
    end: int
    """The index after the token from which the score is read."""
    truncated: bool

    @property
    def read_ids(self) -> TrainedIds:
        """The tokens that the model reads up to the score."""
        return self.ids[self.start : self.end]


class RewardBenchContract(ScoringContract):
    """A model's scoring contract with the reference's tokenization."""

    def __init__(
        self,
        contract: ScoringContract,
        tokenizer: Any,
        *,
        pad_id: int | None,
        form: ReferenceFormat,
    ) -> None:
        """Replace a model's contract.

        Args:
            tokenizer: The tokenizer as saved beside the model, without the contract's fixes; its
                truncation side and padding are changed.
            pad_id: The padding token in the model's configuration; None where it names none.

        Raises:
            ModelError: The reference has no score for such a model, or none that depends on the
                conversation alone.
        """
        if tokenizer.chat_template is None:
            raise ModelError(
                f"the tokenizer has no chat template, and what {VERSION} takes instead, a "
                "conversation of FastChat, is not known here; give the tokenizer of the model a "
                "template, or leave --compatibility out"
            )
        if len(contract.rules.attributes) > 1:
            raise ModelError(
                f"the model has {len(contract.rules.attributes)} outputs, which {VERSION} does not "
                "make one score of; leave --compatibility out"
            )
        if contract.rules.steps is not None:
            raise ModelError(
                f"{VERSION} reads one score of a conversation, and the model gives a value for "
                "each step; leave --compatibility out"
            )
        side = form.truncation_side or tokenizer.truncation_side
        tokenizer.truncation_side = side
        rules = contract.rules.model_copy(
            update={"max_length": form.max_length, "truncation_side": side}
        )
        super().__init__(tokenizer, rules)
        self.own = contract
        """The contract of the model."""
        self.form = replace(form, truncation_side=side)
        self.ignored_id = _settle_padding(tokenizer, pad_id)
        """The padding token, from which no score is read."""

    @classmethod
    def beside(
        cls, contract: ScoringContract, spec: ModelSpec, *, form: ReferenceFormat
    ) -> RewardBenchContract:
        """Make the contract from a model's files, read as the reference program reads them.

        Raises:
            ModelError: The reference cannot score such a model.
        """
        from transformers import AutoTokenizer

        from laurel.models.loading.pretrained import read_config

        tokenizer = AutoTokenizer.from_pretrained(
            local_files(spec.tokenizer.name or str(spec.name)),
            trust_remote_code=spec.trust_remote_code,
        )
        pad_id = getattr(read_config(spec, spec.files), "pad_token_id", None)
        return cls(contract, tokenizer, pad_id=pad_id, form=form)

    def render(self, conversation: Conversation) -> str:
        """Render a conversation whose roles are final, by the template alone.

        Raises:
            DataError: The template cannot render it.
        """
        return render(self.tokenizer, conversation, {})

    def encode(
        self, groups: Sequence[Group], *, sources: Sequence[str] = (), exact_steps: bool = False
    ) -> list[TokenGroup]:
        """Tokenize groups as `ScoringContract.encode` does, with the reference's tokens.

        Raises:
            DataError: The reference, or the template, refuses a conversation.
        """
        texts: list[str] = []
        for source, group in zip(sources or [g.id for g in groups], groups, strict=True):
            try:
                texts += self._texts(group)
            except DataError as error:
                raise DataError(f"{source}: {error}") from error
        rows = iter(self._rows(texts))
        return [
            token_group(
                group.id,
                [(row.read_ids, row.truncated) for row in islice(rows, len(group.completions_G))],
            )
            for group in groups
        ]

    def rows(self, group: Group) -> list[ReferenceRow]:
        """Return each conversation of a group as the reference passes it to the model.

        Raises:
            DataError: The reference, or the template, refuses a conversation.
        """
        return self._rows(self._texts(group))

    def _texts(self, group: Group) -> list[str]:
        return [
            self.render(by_position(group.prompt, completion.messages))
            for completion in group.completions_G
        ]

    def _rows(self, texts: Sequence[str]) -> list[ReferenceRow]:
        ids_N = self.tokenizer(list(texts))["input_ids"] if texts else []
        return [self._row(text, ids) for text, ids in zip(texts, ids_N, strict=True)]

    def _row(self, text: str, ids: TrainedIds) -> ReferenceRow:
        is_long = len(ids) > self.form.max_length
        if is_long:
            cut = self.tokenizer(text, truncation=True, max_length=self.form.max_length)
            ids = cut["input_ids"]
        bos = self.tokenizer.bos_token_id
        # The template writes BOS, and the tokenizer of the reference adds one more.
        start = int(bos is not None and ids[:2] == [bos, bos])
        end = len(ids)
        # The reference finds the last token that is not padding; a text may end in such tokens.
        if self.rules.pooled == "last":
            while end and ids[end - 1] == self.ignored_id:
                end -= 1
        elif start:
            raise DataError("BOS stands twice, which the reference hides; an encoder reads it")
        if end <= start:
            raise DataError("nothing but padding tokens, of which the reference reads no score")
        return ReferenceRow(text=text, ids=ids, start=start, end=end, truncated=is_long)


def by_position(prompt: Conversation, answer: Conversation) -> Conversation:
    """Join prompt and answer with the roles user and assistant in alternation.

    The reference implementation of RewardBench assigns roles in this way.

    Raises:
        DataError: The answer is not one message, or the prompt has an even number of messages;
            the reference implementation refuses both.
    """
    if len(answer) != 1:
        raise DataError(f"an answer of {len(answer)} messages, and {VERSION} knows those of one")
    # By turns the last message of such a prompt would be the assistant's.
    if len(prompt) % 2 == 0:
        raise DataError(
            f"a prompt of {len(prompt)} messages, at which {VERSION} stops: it takes them for user "
            "and assistant by turns, and the last must be the user's"
        )
    turns = (*prompt, *answer)
    return tuple(
        Message("assistant" if index % 2 else "user", message.content)
        for index, message in enumerate(turns)
    )


def _settle_padding(tokenizer: Any, pad_id: int | None) -> int:
    """Return the id of the padding token that rewardbench would use, and set it in the tokenizer.

    Raises:
        ModelError: There is no padding token, or the model and its tokenizer have different ones.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer has no token to pad with, nor an end, so {VERSION} cannot score "
                "the model; leave --compatibility out"
            )
        tokenizer.pad_token_id = tokenizer.eos_token_id
        return int(tokenizer.eos_token_id)
    if pad_id is not None and pad_id != tokenizer.pad_token_id and tokenizer.padding_side != "left":
        raise ModelError(
            f"the configuration of the model names token {pad_id} as padding, and its tokenizer "
            f"pads with {tokenizer.pad_token_id}: {VERSION} reads such a model's scores from the "
            "padding, so they depend on the other rows of a batch; leave --compatibility out"
        )
    return int(tokenizer.pad_token_id if pad_id is None else pad_id)


BOS = "BOS doubled, the first hidden"
ROLES = "roles by position"
CUT = "cut differently"
EARLIER = "read before the last token"
TEXT = "rendered differently"
CONTROL = "control tokens in messages, which the reference reads"
SPECIAL = "special tokens added"
FAILS = "one of the two cannot read it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of the tokens of one conversation."""

    reasons: tuple[str, ...]
    is_read: bool
    """Whether the model reads other tokens; a hidden BOS is none."""


def differences(
    reference: RewardBenchContract, groups: Sequence[Group]
) -> list[tuple[Difference | None, ...]]:
    """Return the difference of each completion of each group; None where tokens are the same."""
    own = prepared_by(reference.own, groups)
    theirs = prepared_by(reference, groups)
    return [
        tuple(
            _difference(reference, group, index, ours, other)
            for index, (ours, other) in enumerate(
                zip(_ids_of(own_tokens), _ids_of(other_tokens), strict=True)
            )
        )
        for group, own_tokens, other_tokens in zip(groups, own, theirs, strict=True)
    ]


def _ids_of(prepared: Prepared) -> list[tuple[list[int], bool] | None]:
    tokens, failures = prepared
    if tokens is None:
        return [None] * len(failures)
    trunk = tokens.trunk_ids.tolist()
    read = iter(
        [
            (trunk + ids.tolist(), was_cut)
            for ids, was_cut in zip(tokens.branches_ids_G, tokens.truncated_G, strict=True)
        ]
    )
    return [next(read) if failure is None else None for failure in failures]


def _difference(
    reference: RewardBenchContract,
    group: Group,
    index: int,
    ours: tuple[list[int], bool] | None,
    theirs: tuple[list[int], bool] | None,
) -> Difference | None:
    if ours is None or theirs is None:
        return None if ours is theirs else Difference(reasons=(FAILS,), is_read=True)
    alone = Group(id=group.id, prompt=group.prompt, completions_G=(group.completions_G[index],))
    (row,) = reference.rows(alone)
    is_read = row.read_ids != ours[0]
    if not is_read and row.ids == ours[0]:
        return None
    conversation = group.conversation(index)
    has_other_roles = by_position(group.prompt, group.completions_G[index].messages) != conversation
    checks = {
        BOS: row.start > 0,
        ROLES: has_other_roles,
        CUT: is_read and (row.truncated or ours[1]),
        EARLIER: row.end < len(row.ids),
        TEXT: not has_other_roles and row.text != reference.own.render(conversation),
        CONTROL: reference.own.rules.has_plain_contents
        and any(reference.own.control_token_in(message.content) for message in conversation),
    }
    return Difference(
        reasons=tuple(reason for reason, holds in checks.items() if holds) or (SPECIAL,),
        is_read=is_read,
    )


def summary(compared: Sequence[Sequence[Difference | None]]) -> dict[str, Any]:
    """Count the rows and conversations that differ by reason, in JSON's types."""
    rows = [[difference for difference in row if difference is not None] for row in compared]
    every = [difference for row in rows for difference in row]
    reasons = Counter(reason for difference in every for reason in difference.reasons)
    rows_by_reason = Counter(
        reason for row in rows for reason in {r for difference in row for r in difference.reasons}
    )
    return {
        "num_rows": sum(map(bool, rows)),
        "num_rows_read_differently": sum(
            any(difference.is_read for difference in row) for row in rows
        ),
        "num_completions": len(every),
        "num_completions_read_differently": sum(difference.is_read for difference in every),
        "reasons": {
            reason: {"num_rows": rows_by_reason[reason], "num_completions": count}
            for reason, count in reasons.most_common()
        },
    }
