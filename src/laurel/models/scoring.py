"""Defines the scoring contract: the rules by which a conversation becomes a score.

The contract is saved with every checkpoint as `scoring.json`, and training, evaluation, serving and
environments all use it. Callers pass raw messages; no other code renders a template, adds a special
token or chooses the position of the score.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from laurel.errors import (
    CheckpointError,
    DataError,
    ModelError,
    key_of,
    names_in_use,
    setting_of,
    speaking,
)
from laurel.models.tokenizer import (
    FOREIGN_MARK,
    PlainContents,
    PlainText,
    bind_variables,
    close_ends,
    loses_thoughts,
    pin_date,
    refuse_left_out,
    render,
    shared_prefix,
)
from laurel.types import Conversation, Group, Message, SentTurn, TokenGroup, group_of

FILE_NAME = "scoring.json"
FORMAT = 2
"""The version of the file's format. Since 2, contents of messages are plain text: with 1, a message
that spells a control token holds it, as other programs read it."""
FORMATS = (1, FORMAT)
OLD_CONTENTS = (
    "its scoring.json is of format 1: where a message spells a control token, such as <|im_end|>, "
    "it holds one, so a policy can forge turns. Models that are trained anew, or written anew by "
    "`laurel export`, read it as plain text; their other scores stay"
)
"""The note of a model that an earlier version saved."""

TrainedIds = list[int]


class GoldenScore(BaseModel):
    """The scores of one conversation when a checkpoint was saved.

    Every load checks that the model still gives them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    messages: tuple[Message, ...]
    """The conversation as raw messages."""
    values_K: tuple[float, ...]
    """The outputs of the head; of a process reward model, its logit for each step."""
    num_tokens: int
    """The number of tokens of the rendered conversation, after truncation."""


Aggregate = Literal["min", "product", "last", "mean"]
"""How the values of the steps of an answer become its score."""


class StepRules(BaseModel):
    """The part of the scoring contract that only a process reward model has.

    The value of a step is the sigmoid of the head's output at the step's last token: the last token
    of the separator that follows it, or the last token of the conversation.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    separator: str = "\n\n"
    """The text between two steps of an answer; it belongs to the step before it."""
    read_out: Literal["each step"] = "each step"
    """Where the head is read."""
    aggregate: Aggregate = "min"
    """How the values of the steps become the score of the answer."""


class ScoringRules(BaseModel):
    """The saved form of the scoring contract: all that decides a score besides the weights.

    This includes the template, the truncation and the position of the score.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    """The version of the file format: 2 if contents of messages are plain text; 1 if a control
    token that a message spells is one, and thoughts reach the template in the content."""
    template_sha256: str
    """The hash of the chat template that is saved with the tokenizer."""
    template_kwargs: dict[str, Any] = {}
    """The variables that the template is rendered with."""
    pinned_date: str | None = None
    """The date that the template prints, if it would print the current date; otherwise null."""
    bos_id: int | None
    """The token that begins a text; null if there is none."""
    eos_id: int | None
    """The token that ends a text; null if there is none."""
    pad_id: int | None
    """The padding token, whose position is never scored; null if there is none."""
    pooled: Literal["last", "model"] = "last"
    """`last`: the score is read from the last token. `model`: an encoder pools by itself."""
    max_length: int
    """The maximum number of tokens; `overlong` says what happens to longer conversations."""
    truncation_side: Literal["left", "right"]
    """The side on which longer conversations are truncated."""
    head_dtype: str = "float32"
    """The dtype in which the head computes."""
    attributes: tuple[str, ...] = ()
    """The names of the outputs of a regression head; empty for a scalar."""
    attribute_weights: tuple[float, ...] | None = None
    """The weights that combine the attributes into one score; null: their mean."""
    steps: StepRules | None = None
    """How a process reward model reads steps; null for all other models."""
    mean: float | None = None
    """The mean of the scores of reference completions; null if it was not measured."""
    std: float | None = None
    """The standard deviation of these scores; null if it was not measured."""
    num_reference: int = 0
    """The number of completions from which `mean` and `std` were measured."""
    golden: tuple[GoldenScore, ...] = ()
    """Conversations whose scores the model must reproduce at every load."""
    golden_dtype: str = "float32"
    """The dtype of the weights and of the arithmetic that gave the golden scores."""
    versions: dict[str, str] = {}
    """The versions of the libraries that saved the contract."""

    @property
    def overlong(self) -> str:
        """What happens to longer conversations, as the end of a sentence about them."""
        # A part of the steps would be an answer that nobody gave.
        side = self.truncation_side
        return f"are cut on the {side}" if self.steps is None else "get no score"

    @classmethod
    def read(cls, directory: Path) -> ScoringRules:
        """Read `scoring.json` of a checkpoint, without checking the tokenizer.

        Raises:
            CheckpointError: The file is unreadable, or has a format that this version cannot read.
        """
        path = directory / FILE_NAME
        try:
            rules = cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if rules.format not in FORMATS:
            raise CheckpointError(
                f"{path} has format {rules.format}; this version reads up to {FORMAT}. Load it "
                "with the version of Laurel that wrote it"
            )
        return rules

    @property
    def has_plain_contents(self) -> bool:
        """Whether contents of messages are plain text, whatever control tokens they spell."""
        return self.format > 1


_PROBE, _ANSWER = "What a user says here", "What an assistant says here"


class ScoringContract:
    """Converts conversations to tokens, and outputs of the head to scores, by saved rules."""

    def __init__(self, tokenizer: Any, rules: ScoringRules) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._contents = PlainContents(tokenizer, rules.template_kwargs)
        self._headers: dict[tuple[str, str], str] = {}
        self._names = names_in_use()
        """The key names of the caller that opened the model, for errors in other threads and
        processes."""

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
        steps: StepRules | None = None,
    ) -> ScoringContract:
        """Create the contract of a model that has none yet.

        Args:
            tokenizer: A tokenizer from `load_tokenizer`. Its template is changed if it prints the
                date, takes variables, or lacks a BOS or EOS.
            max_length: The maximum number of tokens of a conversation.
            append_eos: Whether every conversation ends with EOS, and begins with BOS if there is
                one. It is True for models trained here. Other models are scored on their template
                as it is, with the BOS that their tokenizer adds.
            pooled: The position of the score: `last` for the last token, `model` if an encoder
                pools by itself.
            attributes: The names of the outputs of a regression head.
            attribute_weights: The weights of the attributes in the score; None: the score is the
                mean of the attributes.
            today: The date that replaces the current date in a template that prints it.
            closes_ends: Whether a missing BOS or EOS is added to the template; False if the
                template already gives exactly the texts that the model was trained on.
            steps: How a process reward model reads steps; None for all other models.
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
            steps=steps,
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
        """Write the rules of the contract to `scoring.json` in a directory."""
        # Earlier versions refuse keys that they do not know.
        absent = {"steps"} if self.rules.steps is None else None
        rules = self.rules.model_dump(mode="json", exclude=absent)
        text = json.dumps(rules, indent=1, ensure_ascii=False)
        (directory / FILE_NAME).write_text(text + "\n", encoding="utf-8")

    def with_rules(self, **changes: Any) -> ScoringContract:
        """Return a copy with some rules changed, such as reference statistics or golden scores."""
        return ScoringContract(self.tokenizer, self.rules.model_copy(update=changes))

    def render(self, conversation: Conversation) -> str:
        """Render a conversation as the text that is scored.

        Raises:
            DataError: The template cannot render the conversation.
        """
        return self._rendered(conversation).text

    def loses_thoughts(self, group: Group) -> bool | None:
        """Report whether the template leaves out the thoughts of answers.

        A template does with one answer what it does with all. None if no answer of the group begins
        with thoughts.

        Raises:
            DataError: The template cannot render the conversation.
        """
        for index, completion in enumerate(group.completions_G):
            last = completion.messages[-1]
            if loses_thoughts(last, ""):
                return loses_thoughts(last, self.render(group.conversation(index)))
        return None

    def control_token_in(self, text: str) -> str | None:
        """Return the first control token that a text spells; None if it spells none.

        In the contents of messages it is plain text (`ScoringRules.has_plain_contents`). In text
        that another program has rendered, it cannot be distinguished from the template's own.
        """
        return self._contents.control_token_in(text)

    def _rendered(self, conversation: Conversation) -> PlainText:
        with speaking(*self._names) if self._names else nullcontext():
            if self.rules.has_plain_contents:
                return self._contents.render(conversation)
            kwargs = self.rules.template_kwargs
            return PlainText(render(self.tokenizer, conversation, kwargs, splits_thoughts=False))

    def encode(
        self, groups: Sequence[Group], *, sources: Sequence[str] = (), exact_steps: bool = False
    ) -> list[TokenGroup]:
        """Tokenise groups, each a prompt with its completions.

        Each conversation is tokenised as one text, so a token may span two messages; only around
        the characters of control tokens that messages spell, it is divided. The tokens
        that all conversations of a group share at the start are stored once, as the trunk; at least
        one token of each conversation is left for its own branch.

        For a process reward model, the groups name the ends of steps (`TokenGroup.reads_G`). A
        conversation that was cut has none, because some of its steps cannot be read.

        Args:
            groups: Prompts with at least one completion each.
            exact_steps: Whether a token that holds the end of one step and the start of the next is
                an error. Otherwise the earlier step is read there.

        Raises:
            DataError: The template cannot render a conversation, or a conversation has no token, or
                the steps of an answer cannot be found. The message names the source of the group.
        """
        where = sources or [group.id for group in groups]
        texts: list[PlainText] = []
        for source, group in zip(where, groups, strict=True):
            try:
                texts.extend(
                    self._rendered(group.conversation(i)) for i in range(len(group.completions_G))
                )
            except DataError as error:
                raise DataError(f"{source}: {error}") from error
        if not texts:
            return []
        ids_N, offsets_N = self._contents.tokenize(
            texts,
            add_special_tokens=self.rules.pooled == "model",
            with_offsets=self.rules.steps is not None,
        )
        encoded: list[TokenGroup] = []
        first = 0
        for source, group in zip(where, groups, strict=True):
            rows = ids_N[first : first + len(group.completions_G)]
            if not all(rows):
                raise DataError(f"{source}: a conversation without a single token has no score")
            tokens = token_group(group.id, [self._finish(row) for row in rows])
            if self.rules.steps is not None:
                try:
                    reads_G = [
                        ()
                        if tokens.truncated_G[i]
                        else read_positions(
                            offsets_N[first + i],
                            self._step_ends(texts[first + i].text, group.completions_G[i].messages),
                            exact=exact_steps,
                        )
                        for i in range(len(rows))
                    ]
                except DataError as error:
                    raise DataError(f"{source}: {error}") from error
                tokens = replace(tokens, reads_G=tuple(reads_G))
            first += len(rows)
            encoded.append(tokens)
        return encoded

    def _step_ends(self, text: str, messages: Conversation) -> list[int]:
        # Returns where the steps of the last messages of a rendered conversation end. They are
        # searched from the end of the text, because the prompt may hold the same words.
        assert self.rules.steps is not None
        end = len(text.removesuffix(self._end_of_turn))
        ends: list[int] = []
        for index, message in enumerate(reversed(messages)):
            content, trimmed = message.content, message.content.strip()
            start, start_trimmed = text.rfind(content, 0, end), text.rfind(trimmed, 0, end)
            # Many templates trim. What they have trimmed may be whole earlier, in the prompt.
            if start < 0 or start + content.find(trimmed) < start_trimmed:
                content, start = trimmed, start_trimmed
            is_last = index == 0 and message.role == "assistant"
            if start < 0 or (is_last and text[start + len(content) : end].strip()):
                raise DataError(
                    "the chat template changes the answer, so the ends of its steps cannot be "
                    f"found. Choose another: {key_of('policy.tokenizer.chat_template')}=chatml"
                )
            if message.role == "assistant":
                own = step_ends(content, self.rules.steps.separator)
                ends[:0] = [start + one for one in own]
            end = start
            if index + 1 < len(messages):
                # A short message, such as "user", may be whole in the header of the next.
                header = self._between(messages[-index - 2].role, message.role)
                end = len(text[:start].removesuffix(header))
        # The last step is read where other reward models are read.
        return [*ends[:-1], len(text)]

    def _between(self, role: str, next_role: str) -> str:
        # Returns what the template writes between two messages, empty if it refuses such a pair.
        if (role, next_role) not in self._headers:
            pair = (Message(role, _PROBE), Message(next_role, _ANSWER))
            text = ""
            with suppress(DataError):
                text = self.render((Message("user", "a"), *pair) if role == "assistant" else pair)
            self._headers[role, next_role] = text.partition(_PROBE)[2].partition(_ANSWER)[0]
        return self._headers[role, next_role]

    def encode_rendered(self, row: str | Sequence[int] | SentTurn) -> TokenGroup:
        """Tokenise one conversation that the caller has rendered by the template of this contract.

        The tokens are those of the conversation's messages, so its last turn is rendered again:
        trainers remove the end of a turn, or send what the policy sampled in its place, and some
        templates ask for an answer with other text than they write before a given one. Padding is
        removed, and BOS is there once if the template writes it.

        Args:
            row: The text, the ids of its tokens, or a prompt and a response (`SentTurn`).

        Raises:
            DataError: The conversation has no token, or one that the tokenizer does not know; or
                its last turn cannot be found, or holds a mark of the template; or it cannot be
                determined whether the template rendered the prompt of a `SentTurn`.
        """
        if isinstance(row, SentTurn) and isinstance(row.prompt, str) and row.is_rendered is None:
            row = row._replace(prompt=self._without_opening(row.prompt))
        if isinstance(row, SentTurn) and not self._was_rendered(row):
            said = row.prompt
            prompt = (Message("user", said),) if isinstance(said, str) else said
            answer = self._without_end(row.response, in_rendered_text=False)
            return self.encode([group_of(prompt, (answer,), group_id="")])[0]
        if self.rules.steps is not None:
            raise DataError(
                "a process reward model finds the steps of an answer in its message, which "
                "rendered text does not show. Send messages"
            )
        if isinstance(row, SentTurn):
            assert isinstance(row.prompt, str), "messages are not rendered"
            ids = self._ids_of(self._completed(row.prompt, row.response))
        elif isinstance(row, str):
            ids = self._ids_of(self._completed(row))
        else:
            ids = self._completed_ids(list(row))
        if not ids:
            raise DataError("a conversation without a single token has no score")
        return token_group("", [self._finish(ids)])

    def _was_rendered(self, turn: SentTurn) -> bool:
        # A prompt with marks of another template is refused, because it is unclear what it is.
        if not isinstance(turn.prompt, str):
            return False
        if turn.is_rendered is not None:
            return turn.is_rendered
        if self._asks_for_an_answer and turn.prompt.endswith(self._asks_for_an_answer):
            return True
        mark = self.control_token_in(turn.prompt)
        if mark is None and (found := FOREIGN_MARK.search(turn.prompt)):
            mark = found[0]
        if mark is None:
            return False
        raise DataError(
            f"the prompt holds {mark!r}, as rendered text does, but it does not end as prompts "
            f"of this model's chat template do ({self._ways_to_ask}). Send the messages; or add "
            "?rendered=1 if the template has made it, ?rendered=0 if it is what the user says"
        )

    def _completed(self, prompt: str, response: str | None = None) -> str:
        # Returns a conversation as the template writes it. Without a response the answer is what
        # follows the last request for one.
        prompt = self._opened(prompt)
        text = prompt + (response or "")
        asks = self._asks_for_an_answer
        if response is None:
            start = max((text.rfind(one) for one in asks), default=0)
        else:
            start = len(prompt) - max((len(one) for one in asks if prompt.endswith(one)), default=0)
        if start < 0:
            raise DataError(
                "the text holds no answer: this model's chat template asks for one with "
                f"{self._ways_to_ask}. Render it with this template, or send the messages"
            )
        ask = max((one for one in asks if text.startswith(one, start)), key=len, default="")
        if ask and response is None and start + len(ask) == len(text):
            raise DataError(
                f"the text ends with {ask!r}, which asks for an answer, and holds none. Render the "
                "conversation with its answer, and without add_generation_prompt"
            )
        answer = self._without_end(text[start + len(ask) :], in_rendered_text=True)
        is_known = response is not None or ask
        if is_known and (mark := self.control_token_in(answer)) is not None:
            raise DataError(
                f"the answer holds {mark!r}, which in rendered text cannot be distinguished "
                "from what the chat template writes. Send the messages: what they say is text"
            )
        if not ask:
            return text[:start] + answer + self._end_of_turn
        last = (Message("user", _PROBE), Message("assistant", answer))
        return text[:start] + self.render(last).partition(_PROBE)[2]

    def _completed_ids(self, ids: TrainedIds) -> TrainedIds:
        known = len(self.tokenizer)
        if any(not 0 <= one < known for one in ids):
            raise DataError(f"a token id is beyond the {known} of the vocabulary")
        rules = self.rules
        if rules.pooled == "model":  # nothing is read at the end
            return ids
        before = {rules.bos_id, rules.pad_id}
        first = next((index for index, one in enumerate(ids) if one not in before), len(ids))
        ids = ids[first:]
        if not ids:
            return ids
        if self.opening_bos is not None:
            ids = [self.opening_bos, *ids]
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        marks = self._contents.control_tokens_in(text)
        mark_ids = set(self.tokenizer.convert_tokens_to_ids(marks))
        are_spelled = len(marks) != sum(one in mark_ids for one in ids)
        asks = self._asks_for_an_answer
        are_cut = len(ids) >= rules.max_length
        if are_spelled or (asks and not any(one in text for one in asks)):
            # The text does not show where the answer begins, but the ids may be complete: those of
            # a conversation that was cut, or whose messages spell marks in plain tokens.
            end = self._ids_of(self._end_of_turn)
            if are_cut or ids[len(ids) - len(end) :] == end:
                return ids
            raise DataError(
                f"the token ids do not end as this model's chat template ends an answer ({end}). "
                "Render the conversation with this template, or send the messages"
            )
        try:
            completed = self._completed(text)
        except DataError:
            if are_cut:
                return ids
            raise
        return ids if completed == text else self._ids_of(completed)

    def _ids_of(self, text: str) -> TrainedIds:
        return list(
            self.tokenizer(text, add_special_tokens=self.rules.pooled == "model")["input_ids"]
        )

    def _without_opening(self, text: str) -> str:
        # Callers leave out BOS, which many servers add, or send two; and the padding of a batch.
        tokenizer = self.tokenizer
        removed = (tokenizer.bos_token, tokenizer.cls_token, tokenizer.pad_token)
        while mark := next((one for one in removed if one and text.startswith(one)), None):
            text = text.removeprefix(mark)
        return text

    def _opened(self, text: str) -> str:
        text = self._without_opening(text)
        bos, opening = self.tokenizer.bos_token, self._around_probes[0]
        if bos and opening.startswith(bos):
            text = bos + text
        day = self.rules.pinned_date
        if day is None or day not in opening:
            return text
        before, _, after = opening.partition(day)
        printed = rf"\A({re.escape(before)}).{{1,40}}?({re.escape(after[:2])})"
        return re.sub(printed, lambda found: f"{found[1]}{day}{found[2]}", text)

    def _without_end(self, answer: str, *, in_rendered_text: bool) -> str:
        # Removes what ends a turn: what the template writes, what policies sample, and padding.
        end = self._end_of_turn
        tokenizer = self.tokenizer
        marks = [*self._contents.control_tokens_in(end)]
        marks += filter(None, (tokenizer.eos_token, tokenizer.pad_token, tokenizer.sep_token))
        between = re.split("|".join(map(re.escape, marks)) or "(?!)", end)
        marks += filter(None, map(str.strip, between))
        length = len(answer)
        while True:
            stop = length
            while stop and answer[stop - 1].isspace():
                stop -= 1
            mark = next((one for one in marks if answer.endswith(one, 0, stop)), None)
            if mark is None:
                break
            length = stop - len(mark)
        blank = end[: len(end) - len(end.lstrip())]
        if length < len(answer):
            return answer[:length].removesuffix(blank)
        kept = 0
        if in_rendered_text:
            kept = next(n for n in range(len(blank), -1, -1) if answer.endswith(blank[:n]))
        return answer[: len(answer) - kept]

    @cached_property
    def _asks_for_an_answer(self) -> tuple[str, ...]:
        # The texts between a user's turn and the answer: within a conversation, and at the end of a
        # prompt. The result is empty if the template's text is too short to be recognised.
        found = [self._around_probes[1]]
        with suppress(DataError):  # a template may refuse a conversation without an answer
            asked = (Message("user", _PROBE),)
            asking = render(self.tokenizer, asked, self.rules.template_kwargs, prompt=True)
            found.append(asking.partition(_PROBE)[2])
        if any(len(text.strip()) < 4 for text in found):
            return ()
        return tuple(dict.fromkeys(found))

    @property
    def _ways_to_ask(self) -> str:
        return " or ".join(map(repr, self._asks_for_an_answer))

    @cached_property
    def _around_probes(self) -> tuple[str, str, str]:
        # What the template writes before a question, between it and its answer, and at the end.
        text = self.render((Message("user", _PROBE), Message("assistant", _ANSWER)))
        opening, _, rest = text.partition(_PROBE)
        return opening, rest.partition(_ANSWER)[0], text.rpartition(_ANSWER)[2]

    @property
    def _end_of_turn(self) -> str:
        return self._around_probes[2]

    @cached_property
    def opening_bos(self) -> int | None:
        """The id of the BOS token if every conversation begins with it, otherwise None."""
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

    def scalar(self, values_K: Sequence[float]) -> float:
        """Combine the outputs of the head for a completion into one reward.

        A single output is the reward. Several outputs are summed with `attribute_weights`, or
        averaged if there are no weights. The reward of a process reward model is the aggregate of
        the values of the steps. If any output is not finite, the reward is NaN.
        """
        if not all(map(math.isfinite, values_K)):
            return math.nan
        if self.rules.steps is not None:
            return aggregate(self.values(values_K), self.rules.steps.aggregate)
        if len(values_K) == 1:
            return values_K[0]
        weights = self.rules.attribute_weights
        if weights is None:
            return math.fsum(values_K) / len(values_K)
        return math.fsum(w * v for w, v in zip(weights, values_K, strict=True))

    def values(self, values_K: Sequence[float]) -> tuple[float, ...]:
        """Return the values that outputs of the head stand for: of steps, probabilities.

        The value of a step whose output is not finite is NaN, because the sigmoid of infinity would
        be a number.
        """
        if self.rules.steps is None:
            return tuple(values_K)
        return tuple(sigmoid(one) if math.isfinite(one) else math.nan for one in values_K)


# The steps of an answer, for process reward models.


def step_ends(text: str, separator: str) -> list[int]:
    """Return where each step of an answer ends, the separator after it included.

    Blank text between two separators is no step. An answer without a separator is one step.
    """
    ends: list[int] = []
    start = 0
    while (found := text.find(separator, start)) >= 0:
        end = found + len(separator)
        if text[start:found].strip():
            ends.append(end)
        start = end
    if text[start:].strip() or not ends:
        ends.append(len(text))
    return ends


def read_positions(
    offsets: Sequence[tuple[int, int]], ends: Sequence[int], *, exact: bool
) -> tuple[int, ...]:
    """Return the token at which each step is read: the one with the step's last character.

    Args:
        offsets: The first character of each token, and the one after its last.
        ends: The character after the last of each step.
        exact: Whether a token that reaches beyond the end of a step is an error.

    Raises:
        DataError: A token belongs to two steps.
    """
    starts = [start for start, _ in offsets]
    reads = tuple(bisect_left(starts, end) - 1 for end in ends)
    for step, (read, end) in enumerate(zip(reads, ends, strict=True), start=1):
        if exact and offsets[read][1] > end:
            raise DataError(
                f"the end of step {step} and the beginning of the next are one token, so the step "
                "cannot be read by itself. Remove blanks from the ends of the steps, or choose "
                f"another {key_of('policy.reward_model_cfg.step_separator')}"
            )
    return reads


def aggregate(values_S: Sequence[float], how: Aggregate) -> float:
    """Combine the values of the steps of an answer into its score.

    `min` and `product` are those of Lightman et al. (2023, arXiv:2305.20050) and of Math-Shepherd
    (Wang et al. 2023, arXiv:2312.08935).
    """
    if how == "min":
        return min(values_S)
    if how == "product":
        return math.prod(values_S)
    return values_S[-1] if how == "last" else math.fsum(values_S) / len(values_S)


def sigmoid(logit: float) -> float:
    """Return the sigmoid of any finite number, without overflow."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))


def token_group(group_id: str, rows: Sequence[tuple[TrainedIds, bool]]) -> TokenGroup:
    """Return a token group of conversations with the same prompt.

    Tokens that all conversations share at the start are stored once.

    Args:
        rows: The tokens of each conversation, and whether the conversation was truncated.
    """
    ids_G = [np.asarray(ids, dtype=np.int32) for ids, _ in rows]
    shared = shared_prefix(ids_G) if len(ids_G) > 1 else 0
    return TokenGroup(
        id=group_id,
        trunk_ids=ids_G[0][:shared],
        branches_ids_G=tuple(ids[shared:] for ids in ids_G),
        truncated_G=tuple(was_cut for _, was_cut in rows),
    )


def check_rendering(contract: ScoringContract, *, own_pad: int | None = None) -> None:
    """Check the template of a contract by a sample conversation.

    The template must render every message. If the score is read from the last token, that token
    must not be the padding token.

    Args:
        own_pad: The padding token of a model that was trained elsewhere, which transformers looks
            for to find the last token; None if it does not matter.

    Raises:
        ModelError: A message does not appear in the text that would be scored, or other programs
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
    if rules.pooled == "last" and last == own_pad:
        token = contract.tokenizer.convert_ids_to_tokens(last)
        named = setting_of("policy.tokenizer.pad_token", repr(contract.tokenizer.pad_token))
        raise ModelError(
            f"the model's config.json pads with {token!r}, which also ends every conversation, so "
            "transformers reads its score from the token before, and Laurel would read it from the "
            f"last. If it was trained to be read there, say so by naming its padding: {named}"
        )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
