"""Tokenises conversations whose contents are plain text.

Control tokens come from the chat template alone. A message that spells `<|im_end|>` ends no turn:
each character of it becomes a token. Conversations that spell no control token are tokenised as
other programs tokenise them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from laurel.errors import DataError
from laurel.models.tokenizer import render
from laurel.types import USUAL_ROLES, Conversation, Message, ToolSchemas

FOREIGN_MARK = re.compile(
    r"<\|\w{2,30}\|>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS)\]"
    r"|<\uff5c[^<>]{2,30}\uff5c>"
)
"""Matches marks that the templates of common models write, and that users rarely type."""

QUOTED = re.compile(r"""['"](\w+)['"]""")
"""Matches the words that a template quotes; among them are the roles that it knows."""

# Contents by right wherever they stand: a template may write an empty thought before an answer.
_THOUGHTS = ("<think>", "</think>")
_PROBE = "laurelprobe"
# No end of one is the beginning of the other or of itself, so that both are found where they are.
_MARKS = ("laurelcut", "bayleafedge")

Offsets = list[tuple[int, int]]
_LISTS = (list, tuple)


class PlainText(NamedTuple):
    """A text, and the places in it that no token may span."""

    text: str
    cuts: tuple[int, ...] = ()
    """Places around the characters of control tokens that contents spell, in ascending order."""


class PlainContents:
    """Renders and tokenises conversations so that control tokens come from the template alone.

    Control tokens are the special tokens of the tokenizer, and those added tokens that the template
    writes around messages. Other added tokens, such as `<think>` and `<tool_call>`, are contents by
    right.

    Args:
        tokenizer: A tokenizer with a chat template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})

    def render(
        self, conversation: Conversation, *, prompt: bool = False, tools: ToolSchemas = ()
    ) -> PlainText:
        """Render a conversation; `prompt` adds the opening of the assistant's turn.

        Raises:
            DataError: The template cannot render the conversation, or a message spells a control
                token that cannot be distinguished from the template's own.
        """

        def rendered(messages: Conversation, functions: ToolSchemas) -> str:
            kwargs = self._template_kwargs
            return render(self.tokenizer, messages, kwargs, prompt=prompt, tools=functions)

        fields = [text for one in conversation for text in (one.role, one.content)]
        fields += _strings(tools)
        spelled = next(filter(None, map(self.control_token_in, fields)), None)
        if spelled is None and not any(any(self._joins(one.content)) for one in conversation):
            return PlainText(rendered(conversation, tools))
        for text in fields:
            self._refuse_inseparable(text)
        marks = _MARKS
        while any(mark in text for mark in marks for text in fields):
            marks = (marks[0] + marks[0][-1], marks[1] + marks[1][-1])
        # A template that does more to messages than to write them would do it to the marks, too.
        # Then two pairs of marks give two texts.
        found = [
            self._unmarked(
                rendered(
                    tuple(self._marked(message, cut, edge) for message in conversation),
                    [_mapped(tool, partial(self._apart, cut=cut)) for tool in tools],
                ),
                cut,
                edge,
            )
            for cut, edge in (marks, marks[::-1])
        ]
        if found[0] == found[1]:
            return found[0]
        shown = "a part of a control token" if spelled is None else f"the control token {spelled!r}"
        raise DataError(
            f"a message holds {shown}, and the chat template changes the message, so that it "
            "cannot be distinguished from the template's own. Remove it from the message, or "
            "choose a template that writes messages as they are"
        )

    def plain(self, text: str) -> PlainText:
        """Mark the control tokens in a text that no template renders.

        Raises:
            DataError: The text spells a control token that cannot be written as plain text.
        """
        self._refuse_inseparable(text)
        places = (
            place
            for found in self._control.finditer(text)
            for place in range(found.start(), found.end() + 1)
        )
        return PlainText(text, tuple(dict.fromkeys(places)))

    def control_token_in(self, text: str) -> str | None:
        """Return the first control token that a text spells; None if it spells none."""
        return next(iter(self.control_tokens_in(text)), None)

    def control_tokens_in(self, text: str) -> list[str]:
        """Return the control tokens that a text spells, in order."""
        found: list[str] = self._control.findall(text)
        if not found and self._reads_normalized:
            found = self._control.findall(self._normalized(text))
        return found

    def _refuse_inseparable(self, text: str) -> None:
        found = self._control.findall(text)
        if one := next((token for token in found if len(token) == 1), None):
            raise DataError(
                f"a text holds {one!r}, a control token of one character, which this tokenizer "
                "cannot write as plain text. Remove it"
            )
        normal = self._control.findall(self._normalized(text))
        if len(normal) > len(found):
            raise DataError(
                f"a text holds characters that the tokenizer reads as the control token "
                f"{normal[0]!r}. Remove them"
            )

    def _apart(self, text: str, cut: str) -> str:
        return self._control.sub(lambda found: cut.join(("", *found[0], "")), text)

    def _marked(self, message: Message, cut: str, edge: str) -> Message:
        role, content = (self._apart(text, cut) for text in (message.role, message.content))
        head, tail = self._joins(message.content)
        body = content.strip()  # as many templates trim
        if head or tail:
            start = content.index(body)
            marked = f"{edge if head else ''}{body}{edge if tail else ''}"
            content = content[:start] + marked + content[start + len(body) :]
        return replace(message, role=role, content=content)

    def _joins(self, content: str) -> tuple[bool, bool]:
        # Whether text before and after a content may become a control token together with it.
        heads, tails, longest = self._ends
        body = content.strip()
        reach = range(1, min(len(body), longest) + 1)
        return any(body[:n] in tails for n in reach), any(body[-n:] in heads for n in reach)

    def _unmarked(self, marked: str, cut: str, edge: str) -> PlainText:
        text = ""
        cuts: list[int] = []
        edges: list[int] = []
        for piece in re.split(f"({cut}|{edge})", marked):
            if piece in (cut, edge):
                (cuts if piece == cut else edges).append(len(text))
            else:
                text += piece
        # An edge is cut only where a control token would span it.
        needed: list[int] = []
        for start, end in _between(text, cuts) if edges else ():
            while found := self._control.search(text, start, end):
                inside = [one for one in edges if found.start() < one < found.end()]
                needed += inside[:1]
                start = inside[0] if inside else found.end()
        return PlainText(text, tuple(sorted({*cuts, *needed})))

    def tokenize(
        self,
        rows: Sequence[PlainText],
        *,
        add_special_tokens: bool = False,
        with_offsets: bool = False,
    ) -> tuple[list[list[int]], list[Offsets]]:
        """Tokenise texts, each the beginning of a sequence.

        Args:
            with_offsets: Whether the characters of each token are returned, too.

        Returns:
            The tokens of each text, and the first character of each token and the one after its
            last.
        """
        found = self.tokenizer(
            [row.text for row in rows],
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=with_offsets,
        )
        ids_N = [list(ids) for ids in found["input_ids"]]
        offsets_N = list(found["offset_mapping"]) if with_offsets else []
        for index, row in enumerate(rows):
            if not row.cuts:
                continue
            ids, offsets = self._pieces(row, 0, len(row.text))
            if add_special_tokens:
                bare = self.tokenizer(row.text, add_special_tokens=False)["input_ids"]
                whole = ids_N[index]
                places = range(len(whole) - len(bare) + 1)
                start = next(i for i in places if whole[i : i + len(bare)] == bare)
                ids = [*whole[:start], *ids, *whole[start + len(bare) :]]
            ids_N[index] = ids
            if with_offsets:
                offsets_N[index] = offsets
        return ids_N, offsets_N

    def ids(
        self, row: PlainText, start: int = 0, end: int | None = None, *, continues: bool = False
    ) -> list[int]:
        """Tokenise a part of a text.

        Args:
            start: Where the part begins; if not with the text, it continues a sequence.
            end: Where the part ends; None: with the text.
            continues: Whether the text itself continues a sequence.
        """
        return self._pieces(row, start, len(row.text) if end is None else end, continues)[0]

    def _pieces(
        self, row: PlainText, start: int, end: int, continues: bool = False
    ) -> tuple[list[int], Offsets]:
        places = list(_between(row.text, row.cuts, start, end))
        if not places:
            return [], []
        before = [(self._before or "") if first or continues else "" for first, _ in places]
        found = self.tokenizer(
            [front + row.text[i:j] for front, (i, j) in zip(before, places, strict=True)],
            add_special_tokens=False,
            return_offsets_mapping=self.tokenizer.is_fast,
        )
        ids: list[int] = []
        offsets: Offsets = []
        for index, (front, (first, _)) in enumerate(zip(before, places, strict=True)):
            skipped, shift = 1 if front else 0, first - len(front)
            ids += found["input_ids"][index][skipped:]
            if self.tokenizer.is_fast:
                of_piece = found["offset_mapping"][index][skipped:]
                offsets += [(one + shift, other + shift) for one, other in of_piece]
        return ids, offsets

    @cached_property
    def _before(self) -> str | None:
        # Tokenizers of the SentencePiece kind put a blank before all text at the start of a
        # sequence. Behind a special token it is not the start, so text that continues is put
        # behind one.
        tokenizer = self.tokenizer
        token = tokenizer.eos_token or tokenizer.bos_token
        if token is None:
            return None
        added = tokenizer.added_tokens_decoder.get(tokenizer.convert_tokens_to_ids(token))
        if added is None or added.rstrip:
            return None
        alone = tokenizer("a", add_special_tokens=False)["input_ids"]
        behind = tokenizer(f"{token}a", add_special_tokens=False)["input_ids"]
        return str(token) if behind[1:] != alone else None

    @cached_property
    def _known(self) -> dict[str, Any]:
        # The control tokens. The template need not spell them ('<|' + role + '|>'), and spells
        # others, which messages may hold honestly: `<tool_call>` shows a policy the form of a call.
        asked, said = Message("user", _PROBE), Message("assistant", _PROBE)
        roles = dict.fromkeys((*USUAL_ROLES, *QUOTED.findall(self.tokenizer.chat_template or "")))
        # Nothing ends in the assistant's turn, whose opening may hold `<think>`.
        talks = [(asked, said, Message(role, _PROBE)) for role in roles if role != said.role]
        written: set[int] = set()
        for talk in ((Message("system", _PROBE), asked), *talks):
            with suppress(DataError):  # a template need not take every role
                text = render(self.tokenizer, talk, self._template_kwargs).replace(_PROBE, " ")
                written.update(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return {
            token.content: token
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
            if token.content not in _THOUGHTS
            and (token.special or (token_id in written and token.content.strip()))
            and (len(token.content) > 1 or self._is_control(token_id, token))
        }

    def _is_control(self, token_id: int, token: Any) -> bool:
        # A token of one character, such as `!`, may be what the vocabulary has for it.
        as_text = self.tokenizer(
            token.content, add_special_tokens=False, split_special_tokens=True
        )["input_ids"]
        return bool(token.special) and token_id not in as_text

    @cached_property
    def _control(self) -> re.Pattern[str]:
        longest_first = sorted(map(re.escape, self._known), key=len, reverse=True)
        return re.compile("|".join(longest_first) or "(?!)")

    @cached_property
    def _ends(self) -> tuple[frozenset[str], frozenset[str], int]:
        # The beginnings of control tokens, their ends, and the length of the longest.
        known = self._known
        heads = frozenset(token[:n] for token in known for n in range(1, len(token)))
        tails = frozenset(token[n:] for token in known for n in range(1, len(token)))
        return heads, tails, max(map(len, heads), default=0)

    @cached_property
    def _reads_normalized(self) -> bool:
        # Some tokenizers look for added tokens in normalised text, in which `\uff1c` may be `<`.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        has_normalizer = getattr(backend, "normalizer", None) is not None
        return has_normalizer and any(token.normalized for token in self._known.values())

    def _normalized(self, text: str) -> str:
        if not self._reads_normalized:
            return text
        return str(self.tokenizer.backend_tokenizer.normalizer.normalize_str(text))


def _between(
    text: str, cuts: Sequence[int], start: int = 0, end: int | None = None
) -> Iterator[tuple[int, int]]:
    # The parts of a text between cuts that are not empty.
    last = len(text) if end is None else end
    places = [start, *(cut for cut in cuts if start < cut < last), last]
    return ((one, other) for one, other in pairwise(places) if one < other)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(one, change) for key, one in value.items()}
    return [_mapped(one, change) for one in value] if isinstance(value, _LISTS) else value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return [text for one in value for text in _strings(one)] if isinstance(value, _LISTS) else []
