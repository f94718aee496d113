"""Tokenises the conversations of a policy, for sampling and for supervised fine-tuning.

Conversations of both kinds are divided into the same pieces: the prompt, which is the template's
text up to where the assistant begins; the policy's own tokens, including the token that ends its
turn; and the template's text from there to the assistant's next turn. Each piece is tokenised by
itself, so no token spans two pieces, and the policy's tokens stay exactly as generated.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from laurel.config.yaml_tree import nearest
from laurel.errors import DataError, ModelError
from laurel.models.tokenizer import (
    QUOTED,
    PlainContents,
    PlainText,
    TextStream,
    bind_variables,
    close_ends,
    fields_of,
    loses_thoughts,
    pin_date,
    plain_text,
    refuse_left_out,
    shared_prefix,
)
from laurel.types import (
    USUAL_ROLES,
    Conversation,
    Message,
    Observation,
    TokenGroup,
    ToolSchemas,
    messages_of,
)

if TYPE_CHECKING:
    from laurel.types import Mask, TokenIds

ENVIRONMENT = "environment"
"""The role of messages whose text continues inside the policy's own turn."""

_ANOTHER = (
    "Choose a template that only appends (policy.tokenizer.chat_template=chatml, or a path "
    "ending in .jinja)"
)
_MARK = "laurelmark"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demonstration:
    """A conversation prepared for supervised fine-tuning."""

    tokens: TokenGroup
    """A group of one completion. It has one branch, which begins with the assistant's first token,
    or several where the template rewrites earlier turns."""
    mask_L: Mask
    """bool [L]: which tokens of the branches, one after the other, are learned; the last token of
    each always is."""

    @property
    def truncated(self) -> bool:
        """Whether the end of the conversation was cut off at the maximum length."""
        return any(self.tokens.truncated_G)


class _Piece(NamedTuple):
    ids: list[int]
    is_learned: bool


class ChatFormat:
    """Converts prompts, observations and demonstrations of one policy to tokens.

    Args:
        tokenizer: A tokenizer from `load_tokenizer`. Its template is changed if it prints the date,
            takes variables, or omits a BOS that the tokenizer adds, so that it renders the same
            text wherever it is loaded.
        generation_end_ids: The end tokens of the model's generation configuration.
        today: The date that replaces the current date in a template that prints it.

    Raises:
        ModelError: The template cannot render a question and its answer, or omits one of them; or
            no token ends the policy's turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        generation_end_ids: int | Sequence[int] | None = None,
        today: date | None = None,
    ) -> None:
        template, _ = pin_date(tokenizer.chat_template, today or date.today())
        tokenizer.chat_template = bind_variables(template, template_kwargs or {})
        close_ends(tokenizer, append_eos=False)
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self._contents = PlainContents(tokenizer, template_kwargs)
        self._closing, self._end_text = self._probe()
        given = generation_end_ids
        more = [] if given is None else [given] if isinstance(given, int) else list(given)
        self.end_id: int | None = None
        if self._end_text:
            self.end_id = int(tokenizer.convert_tokens_to_ids(self._end_text.strip()))
        ends = dict.fromkeys((self.end_id, tokenizer.eos_token_id, *more))
        self.end_ids: tuple[int, ...] = tuple(end for end in ends if end is not None)
        """The tokens that end the policy's turn; the first is the one that the template writes."""
        if not self.end_ids:
            raise ModelError(
                "neither the chat template nor the tokenizer has a token that ends a turn, so the "
                "policy could never stop. Choose a template that does "
                "(policy.tokenizer.chat_template=chatml), or a tokenizer with an EOS token"
            )

    def prompt_ids(self, conversation: Conversation, *, tools: ToolSchemas = ()) -> TokenIds:
        """Tokenise a conversation and the opening of the assistant's next turn: int32 [L].

        The template shows `tools` in the prompt.

        Raises:
            DataError: The template cannot render the conversation, or the prompt has no token.
        """
        return self.prompts_ids([conversation], tools=[tools])[0]

    def prompts_ids(
        self,
        conversations: Sequence[Conversation],
        *,
        sources: Sequence[str] = (),
        tools: Sequence[ToolSchemas] = (),
    ) -> list[TokenIds]:
        """Tokenise many conversations at once, each as `prompt_ids` does.

        Args:
            sources: The origin of each conversation, such as a file and a line, for error messages.

        Raises:
            DataError: The template cannot render a conversation, or a prompt has no token.
        """
        where = [f"{source}: " for source in sources] or [""] * len(conversations)
        shown = tools or [()] * len(conversations)
        texts: list[PlainText] = []
        for place, conversation, functions in zip(where, conversations, shown, strict=True):
            try:
                texts.append(self._contents.render(conversation, prompt=True, tools=functions))
            except DataError as error:
                raise DataError(f"{place}{error}") from error
        if not texts:
            return []
        rows, _ = self._contents.tokenize(texts)
        for place, row in zip(where, rows, strict=True):
            if not row:
                raise DataError(f"{place}the prompt has no token")
        return [np.asarray(row, dtype=np.int32) for row in rows]

    def observation_ids(
        self,
        observation: Observation,
        *,
        history: Conversation = (),
        turn_ids: Sequence[int] | TokenIds = (),
        tools: ToolSchemas = (),
    ) -> TokenIds:
        """Tokenise an environment's messages, up to the policy's next turn: int32 [L].

        Control tokens that the messages spell are plain text.

        Args:
            observation: The `role` and `content` of the environment's message, or several messages.
                With the role `environment` the text of a single one continues the policy's turn;
                any other role gets a turn of its own.
            history: The conversation before the policy's turn, on which a template may depend.
            turn_ids: The tokens of the policy's turn. If no end token is among them, the returned
                tokens begin with the text that closes the turn.
            tools: The functions that the prompt showed, on which a template may depend.

        Raises:
            DataError: The template does not know the role, or cannot render such a turn.
        """
        said = [Message(one["role"], one["content"]) for one in messages_of(observation)]
        if len(said) == 1 and said[0].role == ENVIRONMENT:
            text = self._contents.plain(said[0].content)
            return np.asarray(self._contents.ids(text, continues=True), dtype=np.int32)
        # Templates such as ChatML render any role, so that nothing else would report `usr`.
        named_by_template = QUOTED.findall(self.tokenizer.chat_template)
        for role in (message.role for message in said):
            if role in (*USUAL_ROLES, *named_by_template):
                continue
            near = nearest(role.lower(), USUAL_ROLES)
            raise DataError(
                f"the role {role!r} of an observation is none that the chat template names, and "
                f"none of {', '.join(USUAL_ROLES)}" + (f"; did you mean {near!r}?" if near else "")
            )
        row, _, start = self._marked_turn(history, said, tools)
        after = row.text[start:]
        for role, content in ((message.role, message.content) for message in said):
            # Llama's template writes what a tool answers as a JSON string.
            written = (content.strip(), json.dumps(content, ensure_ascii=False))
            if any(one in after for one in written):
                continue
            raise DataError(
                f"the chat template leaves out a message of role '{role}' after the assistant's "
                "turn, so the policy would never see it. Choose a template that has such turns "
                "(policy.tokenizer.chat_template=chatml), or let the environment answer with the "
                f"role 'user' or '{ENVIRONMENT}'"
            )
        ended = len(turn_ids) > 0 and int(turn_ids[-1]) in self.end_ids
        ids = [] if ended else [self.end_ids[0]]
        ids += self._contents.ids(row, len(row.text) - len(after.removeprefix(self._end_text)))
        return np.asarray(ids, dtype=np.int32)

    def rewritten_ids(
        self,
        observation: Observation,
        *,
        history: Conversation,
        turn: Message,
        tools: ToolSchemas = (),
    ) -> TokenIds | None:
        """Tokenise a conversation up to the policy's next turn if the template rewrites its turns.

        Templates of thinking models leave out the thoughts of earlier turns, for example. White
        space alone makes no difference.

        Args:
            observation: The environment's message, or several, that follow the turn.
            history: The conversation before the policy's turn.

        Returns:
            All tokens from the first on, int32 [L]; None if the template appends the turn and what
            follows to the text in which the turn was sampled.

        Raises:
            DataError: The template cannot render the conversation.
        """
        said = tuple(Message(one["role"], one["content"]) for one in messages_of(observation))
        if any(message.role == ENVIRONMENT for message in (*history, *said)):
            return None  # such text stands inside a turn, which no template renders
        talk = (*history, turn, *said)
        asked = self.render(history, prompt=True, tools=tools)
        whole = self.render(talk, prompt=True, tools=tools)
        if _continues(whole, asked + turn.content):
            return None
        # The policy may write a header of its turn itself, of tokens that are no text.
        row, start, _ = self._marked_turn(history, said, tools)
        opened = row.text[:start]
        if _continues(opened, asked) and _continues(whole, opened + turn.content):
            return None
        return self.prompt_ids(talk, tools=tools)

    def _marked_turn(
        self, history: Conversation, said: Sequence[Message], tools: ToolSchemas
    ) -> tuple[PlainText, int, int]:
        # The text with a turn of a mark, and where in it the mark begins and ends.
        mark = _MARK
        while any(mark in message.content for message in (*history, *said)):
            mark += "k"
        asked = tuple(history) or (Message("user", "a"),)
        row = self._contents.render(
            (*asked, Message("assistant", mark), *said), prompt=True, tools=tools
        )
        start = row.text.rfind(mark)
        if start < 0:  # the template writes the message otherwise
            return row, len(row.text), len(row.text)
        return row, start, start + len(mark)

    def token_ends(
        self, turn_ids: Sequence[int] | TokenIds, text: str, ends: Sequence[int]
    ) -> list[int]:
        """Return the number of a turn's tokens up to each of several places in its text.

        A token that holds the last character before a place, or the last bytes of that character,
        is the last one up to it, whatever else it holds. The end of the text is the end of the
        turn: the token that ends the turn comes before it.

        Args:
            turn_ids: The tokens of the turn, as the policy sampled them.
            text: The text of the turn, or its beginning.
            ends: Numbers of characters, at least 1, in ascending order.

        Raises:
            DataError: The tokens do not spell the text.
        """
        ids = [int(token) for token in turn_ids]
        stream = TextStream(self.tokenizer)
        said, numbers, reached = "", [0], [0]
        for number, token in enumerate(ids, start=1):
            new = stream.step(token)
            if not stream.is_whole:
                break
            if new:
                said += new
                numbers.append(number)
                reached.append(len(said))

        def spells(number: int, beginning: str) -> bool:
            return plain_text(self.tokenizer, ids[:number]).startswith(beginning)

        found: list[int] = []
        for end in ends:
            first, last = 1, len(ids) + 1
            if end >= len(text):
                first = last = len(ids)
            elif said.startswith(text[:end]):
                index = bisect_left(reached, end)
                first, last = numbers[index - 1] + 1, numbers[index]
            # One of the tokens that came with nothing new may have brought the whole of what is
            # before the end, and the first bytes of the next character.
            first += bisect_left(
                range(first, last), True, key=partial(spells, beginning=text[:end])
            )
            if first > len(ids):
                raise DataError(
                    f"the tokens of an answer do not spell its text up to character {end}, where a "
                    "step ends"
                )
            found.append(first)
        return found

    def render(
        self, conversation: Conversation, *, prompt: bool = False, tools: ToolSchemas = ()
    ) -> str:
        """Render a conversation as text; `prompt` adds the opening of the assistant's turn.

        The template shows `tools` to the policy.

        Raises:
            DataError: The template cannot render the conversation.
        """
        return self._contents.render(conversation, prompt=prompt, tools=tools).text

    def text_of(self, turn_ids: Sequence[int] | TokenIds) -> str:
        """Return the text of a turn's tokens, without special tokens."""
        return plain_text(self.tokenizer, [int(token) for token in turn_ids])

    def control_token_in(self, text: str) -> str | None:
        """Return the first control token that a text spells; None if it spells none."""
        return self._contents.control_token_in(text)

    def demonstration(
        self,
        conversation: Conversation,
        *,
        demonstration_id: str,
        max_length: int | None = None,
        only_final: bool = False,
        tools: ToolSchemas = (),
    ) -> Demonstration | None:
        """Tokenise a conversation, and mark the tokens that the loss is computed on.

        These are the assistant's turns and the tokens that end them, where a turn is to be learned.
        Where the template rewrites earlier turns once more follow, the conversation is several
        sequences, and each turn is learned in the context in which it would be sampled.

        Args:
            conversation: A conversation with at least one assistant turn.
            demonstration_id: The id of the demonstration, such as its file and line.
            max_length: The maximum number of tokens; the end of a longer conversation is cut off.
            only_final: Whether the loss covers only the assistant's last turn.

        Returns:
            The demonstration; None if no token for the loss is left, such as after truncation.

        Raises:
            DataError: The template prompts the assistant with other text than it begins turns
                with, or leaves out the thoughts of the last.
        """
        parts = [(conversation, 1)] if only_final else self._divided(conversation, tools)
        rows: list[tuple[TokenIds, Mask, int, bool]] = []
        for messages, num_turns in parts:
            pieces = self._pieces(messages, num_turns=num_turns, tools=tools)
            ids = [token for piece in pieces for token in piece.ids]
            mask = np.asarray([piece.is_learned for piece in pieces for _ in piece.ids], dtype=bool)
            learned = np.flatnonzero(mask[:max_length])
            if learned.size:
                end = int(learned[-1]) + 1
                is_cut = max_length is not None and len(ids) > max_length
                row = np.asarray(ids[:end], dtype=np.int32)
                rows.append((row, mask[:end], int(learned[0]), is_cut))
        if not rows:
            return None
        start = min(first for _, _, first, _ in rows)
        if len(rows) > 1:
            start = min(start, shared_prefix([row for row, *_ in rows]))
        return Demonstration(
            tokens=TokenGroup(
                id=demonstration_id,
                trunk_ids=rows[0][0][:start],
                branches_ids_G=tuple(row[start:] for row, *_ in rows),
                truncated_G=tuple(is_cut for *_, is_cut in rows),
                sequences_G=(len(rows),) if len(rows) > 1 else (),
            ),
            mask_L=np.concatenate([mask[start:] for _, mask, *_ in rows]),
        )

    def _divided(
        self, conversation: Conversation, tools: ToolSchemas
    ) -> list[tuple[Conversation, int]]:
        # Conversations whose turns the template does not rewrite, and how many of their last turns
        # are learned there: together each turn once, where nothing follows that changes it.
        turns = [i for i, message in enumerate(conversation) if message.role == "assistant"]
        if turns == [len(conversation) - 1]:  # nothing follows it
            return [(conversation, 1)]
        whole = self.render(conversation, tools=tools)
        said = {
            turn: self.render(conversation[: turn + 1], tools=tools).removesuffix(self._closing)
            for turn in turns
        }
        parts: list[list[int]] = []
        for turn in turns:
            if parts and all(said[turn].startswith(said[one]) for one in parts[-1]):
                parts[-1].append(turn)
            else:
                parts.append([turn])
        divided = [(conversation[: part[-1] + 1], len(part)) for part in parts]
        if parts and all(whole.startswith(said[turn]) for turn in parts[-1]):
            divided[-1] = (conversation, len(parts[-1]))
        return divided

    def _pieces(
        self, conversation: Conversation, *, num_turns: int, tools: ToolSchemas
    ) -> list[_Piece]:
        row = self._contents.render(conversation, tools=tools)
        text = row.text
        if _GENERATION.search(self.tokenizer.chat_template):
            spans = self._marked_spans(conversation, row, tools)
        else:
            spans = self._found_spans(conversation, text, num_turns=num_turns, tools=tools)
        pieces: list[_Piece] = []
        position = 0
        for start, end in spans[-num_turns:]:
            pieces.append(_Piece(self._contents.ids(row, position, start), False))
            has_end = bool(self._end_text) and text.startswith(self._end_text, end)
            pieces.append(_Piece([*self._contents.ids(row, start, end), self.end_ids[0]], True))
            position = end + (len(self._end_text) if has_end else 0)
        if loses_thoughts(conversation[-1], text):
            raise DataError(
                "the chat template leaves out the thoughts of the last answer, which would be "
                "learned without them. Choose a template that writes them "
                "(policy.tokenizer.chat_template=chatml, or a path ending in .jinja), or take the "
                "thoughts out of the row"
            )
        learned = [message.learned for message in conversation if message.role == "assistant"]
        return _with_weights(pieces, learned[-num_turns:])

    def _found_spans(
        self, conversation: Conversation, text: str, *, num_turns: int, tools: ToolSchemas
    ) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        turns = [i for i, message in enumerate(conversation) if message.role == "assistant"]
        for turn in turns[-num_turns:]:
            before = self.render(conversation[:turn], prompt=True, tools=tools) if turn else ""
            through = self.render(conversation[: turn + 1], tools=tools)
            said = through.removesuffix(self._closing)
            if not through.startswith(before):
                raise DataError(
                    "the chat template prompts the assistant with other text than its finished "
                    f"turn begins with ({_where_they_part(before, through)}), so the policy would "
                    f"learn to continue text that it never sees. {_ANOTHER}"
                )
            if not text.startswith(said) or not through.endswith(self._closing):
                raise DataError(
                    f"the chat template ends the first {turn + 1} messages in a way of its own "
                    f"({_where_they_part(said, text)}), so which tokens are the assistant's "
                    f"cannot be determined. {_ANOTHER}"
                )
            spans.append((len(before), len(said)))
        return spans

    def _marked_spans(
        self, conversation: Conversation, row: PlainText, tools: ToolSchemas
    ) -> list[tuple[int, int]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # its annotation says str, and it gives a pair
        texts, spans = render(
            conversations=[[fields_of(one, self.tokenizer.chat_template) for one in conversation]],
            chat_template=self.tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
            **({**self.template_kwargs, "tools": list(tools)} if tools else self.template_kwargs),
        )
        text = str(texts[0])
        if text != row.text:
            raise DataError(
                "the chat template writes other text where a message spells one of its control "
                "tokens, so which tokens are the assistant's cannot be determined. Remove it from "
                f"the message. {_ANOTHER}"
            )
        found: list[tuple[int, int]] = []
        for start, end in spans[0]:
            for closing in filter(None, (self._closing, self._end_text)):
                is_said = any(end - len(closing) < cut < end for cut in row.cuts)
                if text[start:end].endswith(closing) and not is_said:
                    end -= len(closing)
                    break
            found.append((start, end))
        return found

    def _probe(self) -> tuple[str, str]:
        # The text that the template writes after an assistant's turn, and the end token in it.
        asked, said = Message("user", f"{_MARK}user"), Message("assistant", f"{_MARK}assistant")
        text = self.render((asked, said))
        refuse_left_out((asked, said), text)
        closing = text[text.rindex(said.content) + len(said.content) :]
        added = {*self.tokenizer.added_tokens_encoder, *self.tokenizer.all_special_tokens}
        known = sorted(added, key=len, reverse=True)
        first = closing.lstrip()
        end = next((token for token in known if first.startswith(token)), "")
        blank = closing[: len(closing) - len(first)] if end else ""
        return closing, blank + end

    @property
    def asks_as_it_answers(self) -> bool:
        """Whether a rendered assistant turn begins with the text that opens it in a prompt.

        If not, prompts in training differ from those in sampling. The cause is a mistake in the
        template, or an opening in the prompt, such as `<think>`, that rendered assistant turns
        lack.
        """
        asked = (Message("user", "a"),)
        whole = self.render((*asked, Message("assistant", "b")))
        return whole.startswith(self.render(asked, prompt=True))


def _with_weights(pieces: Sequence[_Piece], learned: Sequence[bool]) -> list[_Piece]:
    """Return pieces of which only those of turns that are to be learned are learned."""
    if all(learned):
        return list(pieces)
    turns = [index for index, piece in enumerate(pieces) if piece.is_learned]
    if len(turns) != len(learned):
        raise DataError(
            f"the chat template marks {len(turns)} turns of the assistant's {len(learned)}, so "
            f"which of them has a weight of 0 cannot be determined. {_ANOTHER}"
        )
    is_learned = dict(zip(turns, learned, strict=True))
    return [
        piece._replace(is_learned=is_learned.get(index, False))
        for index, piece in enumerate(pieces)
    ]


def _continues(text: str, beginning: str) -> bool:
    """Report whether a text begins with another, white space aside."""
    return "".join(text.split()).startswith("".join(beginning.split()))


def _where_they_part(one: str, other: str) -> str:
    length = min(len(one), len(other))
    same = next((i for i in range(length) if one[i] != other[i]), length)
    start = max(0, same - 20)
    return f"{one[start : same + 30]!r} and {other[start : same + 30]!r}"
