"""Loads the tokenizer of a model, sets its template and padding, and tokenises conversations.

Template and padding token are chosen only here, and saved with every checkpoint, because scores are
silently wrong if two programs choose differently.

Contents are plain text: control tokens come from the chat template alone. A message that spells
`<|im_end|>` ends no turn: each character of it becomes a token. Conversations that spell no control
token are tokenised as other programs tokenise them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers.decoders import DecodeStream

from laurel.config.policy import TokenizerConfig
from laurel.errors import ConfigError, DataError, ModelError, key_of, no_file_at, setting_of
from laurel.models.files import local_files
from laurel.observe.hub import check_fetchable
from laurel.types import USUAL_ROLES, Conversation, Message, ToolSchemas

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
CONCATENATION = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_HERMES_SYSTEM = (
    "<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "You may call these functions:\n<tools>"
    "{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}"
    "{{ '\\n</tools>\\nA call is an object with name and arguments between tags:\\n' }}"
    "<tool_call>\n{}\n</tool_call><|im_end|>\n"
)
_HERMES_RESULTS = (
    "{% if loop.first or loop.previtem['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_HERMES_CALLS = (
    "{{ '<|im_start|>assistant\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] %}"
    "{{ ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
)
HERMES = (
    f"{{% if tools %}}{_HERMES_SYSTEM}{{% endif %}}{{% for message in messages %}}"
    f"{{% if message['role'] == 'tool' %}}{_HERMES_RESULTS}"
    f"{{% elif message['tool_calls'] %}}{_HERMES_CALLS}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that also shows functions, their calls and their results, as Hermes and Qwen do."""
TEMPLATES = {"chatml": CHATML, "plain": PLAIN, "hermes": HERMES}

PAD_CANDIDATES = (
    "<|finetune_right_pad_id|>",
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<|padding|>",
    "<\uff5c\u2581pad\u2581\uff5c>",
    "<|vision_pad|>",
    "<|fim_pad|>",
    "<|endoftext|>",
    "<unk>",
)
"""Tokens that models reserve for padding, or that no text of a conversation contains."""

RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""The names of variables that Hugging Face sets itself when it renders a template."""

_CLOCK = re.compile(r"strftime_now\s*\(")
_DATE_CALL = re.compile(r"strftime_now\s*\(\s*(['\"])(?P<format>.*?)\1\s*\)")
_PINNED = "macro strftime_now("
_PINNED_DAY = re.compile(r"macro strftime_now\(format\) %\}\{% if .*? %\}(?P<day>[^{]*)\{%")


def load_tokenizer(
    config: TokenizerConfig,
    *,
    model_name: str,
    trust_remote_code: bool,
    pad_may_end: bool = False,
    notes: list[str] | None = None,
) -> Any:
    """Load a tokenizer, and set its chat template and padding token.

    Args:
        model_name: The model whose tokenizer is read if the configuration names no other.
        pad_may_end: Whether padding may be the end-of-sequence token (`settle_padding`).
        notes: Receives a remark if another padding token is picked.

    Raises:
        ModelError: There is no tokenizer or no chat template, or padding would end sequences.
    """
    from transformers import AutoTokenizer

    name = config.name or model_name
    key = "policy.tokenizer.name" if config.name else "policy.model_name"
    name = local_files(name, key=key)
    if not Path(name).exists():
        check_fetchable(name, key=key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        hint = "Give a Hugging Face name or a directory that holds tokenizer.json."
        if "trust_remote_code" in str(error):
            trust = f"{key_of('policy.trust_remote_code')}=true"
            hint = f"It brings Python code: read it, then set {trust}."
        raise ModelError(
            f"{setting_of(key, name)}: no tokenizer could be loaded ({first_line(error)}). {hint}"
        ) from error
    for how_loaded in ("is_local", "local_files_only"):
        # transformers saves them: a resumed run, which loads its own checkpoint, would differ.
        tokenizer.init_kwargs.pop(how_loaded, None)
    settle_template(tokenizer, config.chat_template, day=config.date)
    note = settle_padding(tokenizer, config.pad_token, may_end=pad_may_end)
    if note is not None and notes is not None:
        notes.append(note)
    return tokenizer


def settle_template(tokenizer: Any, choice: str | None, *, day: date | None = None) -> None:
    """Set the chat template of a tokenizer.

    Args:
        tokenizer: The tokenizer, which is changed.
        choice: `default` for the tokenizer's own template, the name of a template of Laurel's, a
            path that ends in `.jinja`, or the template itself. None: the contents of the messages
            are concatenated.
        day: The day that a template prints instead of the current one; None: today.

    Raises:
        ModelError: The tokenizer has no template, the name is unknown, the file is missing, or the
            date cannot be pinned.
    """
    tokenizer.chat_template = _chosen_template(tokenizer, choice)
    tokenizer.chat_template, _ = pin_date(tokenizer.chat_template, day or date.today())


def _chosen_template(tokenizer: Any, choice: str | None) -> str:
    if choice is None:
        return CONCATENATION
    if choice in TEMPLATES:
        return TEMPLATES[choice]
    if choice.endswith(".jinja"):
        path = Path(choice)
        if not path.is_file():
            why = no_file_at(path) or "there is no such file"
            raise ModelError(f"{setting_of('policy.tokenizer.chat_template', choice)}: {why}")
        return path.read_text(encoding="utf-8")
    if choice != "default":
        if "{" not in choice:
            raise ModelError(
                f"{setting_of('policy.tokenizer.chat_template', repr(choice))} is neither a "
                "template nor a known name."
                f" Choose default, {', '.join(TEMPLATES)}, null, a path ending in .jinja, or write"
                " the Jinja template itself."
            )
        return choice
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer has no chat template. Set {key_of('policy.tokenizer.chat_template')} "
            "to chatml or "
            "plain (templates of Laurel's), to null (contents joined as they are), to a path "
            "ending in .jinja, or to the template itself."
        )
    if isinstance(tokenizer.chat_template, dict):
        named = tokenizer.chat_template
        if "default" not in named:
            raise ModelError(
                f"the tokenizer has several chat templates ({', '.join(sorted(named))}) and none is"
                f" called default; set {key_of('policy.tokenizer.chat_template')} to the one you "
                "mean"
            )
        return str(named["default"])
    return str(tokenizer.chat_template)


def settle_padding(tokenizer: Any, choice: str | None, *, may_end: bool = False) -> str | None:
    """Set the padding token of a tokenizer, so that it is not the end-of-sequence token.

    Hugging Face's own reward head reads the score at the last token that is not padding. If padding
    is EOS, this is the token before EOS, so the same model gives other scores than in a program
    that reads the last token.

    Args:
        tokenizer: The tokenizer, which is changed.
        choice: The value of `policy.tokenizer.pad_token`.
        may_end: Whether EOS is allowed if the configuration names no other token; for language
            models, nothing depends on the padding token.

    Returns:
        A remark for the user if another token takes the place of EOS.

    Raises:
        ModelError: The padding token is the end-of-sequence token, or is not in the vocabulary.
    """
    vocabulary = tokenizer.get_vocab()
    own, eos = tokenizer.pad_token, tokenizer.eos_token
    is_refused = own == eos and not may_end
    if choice not in (None, "auto"):
        if choice not in vocabulary:
            raise ModelError(
                f"{setting_of('policy.tokenizer.pad_token', repr(choice))} is not in the "
                "vocabulary; name a token "
                "that is, or auto to have one picked"
            )
        tokenizer.pad_token = choice
    elif own is None or (choice == "auto" and is_refused):
        free = [
            t for t in PAD_CANDIDATES if t in vocabulary and t not in (eos, tokenizer.bos_token)
        ]
        reserved = sorted(t for t in vocabulary if "reserved_special_token" in t)
        if not free and not reserved and not may_end:
            raise ModelError(
                "the tokenizer has no token that could pad without ending a sequence. Name one "
                f"that your texts never contain: {key_of('policy.tokenizer.pad_token')}=..."
            )
        tokenizer.pad_token = (free or reserved or [eos])[0]
    if tokenizer.pad_token == eos and not may_end:
        raise ModelError(
            f"the tokenizer pads with its end-of-sequence token {eos!r}: other programs would read "
            "this model's score one token too early. Give "
            f"{key_of('policy.tokenizer.pad_token')}=auto to pick "
            "another, or name a token."
        )
    if own is None or tokenizer.pad_token == own or own != eos:
        return None
    return (
        f"the tokenizer pads with {own!r}, which ends texts: {tokenizer.pad_token!r} is the "
        f"padding token instead ({setting_of('policy.tokenizer.pad_token', choice)})"
    )


def pin_date(template: str, today: date) -> tuple[str, str | None]:
    """Make a template that prints the current date print one fixed date.

    Scores that change from day to day cannot be compared, so a macro in the saved template replaces
    the clock by the day of training, or of the first load in a run. A pinned template stays as it
    is.

    Returns:
        The template, and the pinned date as the template prints it; None if the template does not
        print the current date.

    Raises:
        ModelError: The template computes the format of the date, so it cannot be pinned.
    """
    if _PINNED in template:
        found = _PINNED_DAY.search(template)
        return template, None if found is None else found["day"]
    calls = list(_DATE_CALL.finditer(template))
    if not _CLOCK.search(template):
        return template, None
    if len(calls) < len(_CLOCK.findall(template)):
        raise ModelError(
            "the chat template prints the date in a format that it computes (strftime_now without "
            "a literal), so its text would change from day to day and cannot be pinned. Write a "
            "date into a copy of it and name that: "
            f"{key_of('policy.tokenizer.chat_template')}=copy.jinja"
        )
    formats = sorted({match["format"] for match in calls})
    cases = "".join(
        f"{{% {'if' if index == 0 else 'elif'} format == {fmt!r} %}}{today.strftime(fmt)}"
        for index, fmt in enumerate(formats)
    )
    macro = f"{{% {_PINNED}format) %}}{cases}{{% endif %}}{{% endmacro %}}\n"
    return macro + template, today.strftime(formats[0])


def bind_variables(template: str, kwargs: Mapping[str, Any]) -> str:
    """Return a template in which the variables in `kwargs` default to the given values.

    Raises:
        ConfigError: A name is reserved by Hugging Face, or is not a valid name.
    """
    cases = ""
    for name, value in kwargs.items():
        if name in RESERVED or not name.isidentifier():
            raise ConfigError(
                f"{key_of('policy.tokenizer.chat_template_kwargs')}.{name} is not a variable of "
                "the template; "
                "a conversation is always rendered whole, as text"
            )
        cases += f"{{% if {name} is not defined or {name} is none %}}"
        cases += f"{{% set {name} = {value!r} %}}{{% endif %}}"
    return f"{cases}\n{template}" if cases else template


def close_ends(tokenizer: Any, *, append_eos: bool) -> None:
    """Make a tokenizer's template write the BOS and EOS that belong to every conversation.

    Then scores do not depend on whether a program forgets to add special tokens, or adds them a
    second time.

    Args:
        tokenizer: The tokenizer, whose template is changed if a token is missing.
        append_eos: Whether a conversation ends with EOS. Line breaks may follow it, since ChatML
            ends a turn that way.

    Raises:
        ModelError: The template cannot render a question and its answer.
    """
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text = tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception as error:  # Jinja and the template itself raise what they like
        raise ModelError(
            f"the chat template cannot render a question and its answer: {first_line(error)}. "
            f"Fix it, or choose another: {key_of('policy.tokenizer.chat_template')}=chatml, or a "
            "path ending "
            "in .jinja"
        ) from error
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    adds_bos = bos is not None and (
        append_eos or tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    )
    # Jinja drops the line break after a comment and the one that ends a template. So the text in
    # front gets its own line, and the text at the end replaces the last line break.
    if adds_bos and not text.startswith(bos):
        tokenizer.chat_template = "{{ bos_token }}{# begin #}\n" + tokenizer.chat_template
    if append_eos and eos is not None and not text.rstrip("\n").endswith(eos):
        tokenizer.chat_template = tokenizer.chat_template.removesuffix("\n") + (
            "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
        )


def render(
    tokenizer: Any,
    conversation: Conversation,
    template_kwargs: Mapping[str, Any],
    *,
    prompt: bool = False,
    tools: ToolSchemas = (),
    splits_thoughts: bool = True,
) -> str:
    """Render a conversation as text; `prompt` adds the opening of the assistant's turn.

    The template shows `tools` to the policy. It reads messages as `fields_of` returns them, or with
    thoughts in their contents if `splits_thoughts` is False.

    Raises:
        DataError: The template cannot render the conversation.
    """
    template = tokenizer.chat_template if splits_thoughts else ""
    try:
        return str(
            tokenizer.apply_chat_template(
                [fields_of(message, template) for message in conversation],
                tokenize=False,
                add_generation_prompt=prompt,
                **({**template_kwargs, "tools": list(tools)} if tools else template_kwargs),
            )
        )
    except Exception as error:  # Jinja and the template itself raise what they like
        roles = ", ".join(message.role for message in conversation)
        raise DataError(
            f"the chat template cannot render a conversation with the roles [{roles}]: "
            f"{first_line(error)}. Choose a template that can "
            f"({key_of('policy.tokenizer.chat_template')}=chatml, or a path ending in .jinja), or "
            "change the "
            "conversations."
        ) from error


_THOUGHTS = re.compile(r"<think>\n?(.*?)\n?</think>\n*(.*)", re.DOTALL)
_TAKES_THOUGHTS = re.compile(r"""(?:\.|\[?['"])(reasoning_content|thinking)\b""")


def fields_of(message: Message, template: str) -> dict[str, str]:
    """Return a message as a template reads it.

    Thoughts at the beginning of an answer, in `<think>`, get a key of their own if the template has
    one for them and does not look for `</think>` itself.
    """
    fields = {"role": message.role, "content": message.content}
    if message.role == "assistant" and "</think>" not in template:
        key, found = _TAKES_THOUGHTS.search(template), _THOUGHTS.fullmatch(message.content)
        if key is not None and found is not None:
            fields |= {"content": found[2], key[1]: found[1]}
    return fields


def loses_thoughts(message: Message, text: str) -> bool:
    """Report whether the rendered text lacks the thoughts that a message begins with."""
    found = _THOUGHTS.fullmatch(message.content.lstrip())
    return found is not None and found[1].strip() not in text


def refuse_left_out(conversation: Conversation, text: str) -> None:
    """Check that a template rendered all messages of a conversation.

    Raises:
        ModelError: The text does not contain the content of a message.
    """
    for message in conversation:
        if message.content not in text:
            raise ModelError(
                f"the chat template leaves out the {message.role} message: it rendered {text!r}. "
                f"Fix it, or choose another: {key_of('policy.tokenizer.chat_template')}=chatml, "
                "or a path "
                "ending in .jinja"
            )


def plain_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens to text, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Decodes the tokens of a text one by one, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """Begin before the first token; the tokenizer is a fast one of transformers."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self.is_whole = True
        """Whether the text so far is that of the tokens; if not, a part of it is other."""

    def step(self, token: int) -> str:
        """Return the text that a token adds; nothing while it ends inside of a character."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:
            # A tokenizer that falls back to bytes decodes a run of them as a whole: a byte that is
            # no text takes back what those before it said, and the stream cannot.
            self.is_whole = False
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if there is none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def shared_prefix(ids_G: Sequence[np.ndarray]) -> int:
    """Return the length of the longest common prefix that leaves each sequence a token."""
    limit = min(len(ids) for ids in ids_G) - 1
    for other in ids_G[1:]:
        different = np.flatnonzero(ids_G[0][:limit] != other[:limit])
        if different.size:
            limit = int(different[0])
    return limit


FOREIGN_MARK = re.compile(
    r"<\|\w{2,30}\|>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT|TOOL_RESULTS)\]"
    r"|<\uff5c[^<>]{2,30}\uff5c>"
)
"""Matches marks that the templates of common models write, and that users rarely type."""

QUOTED = re.compile(r"""['"](\w+)['"]""")
"""Matches the words that a template quotes; among them are the roles that it knows."""

# Contents by right wherever they stand: a template may write an empty thought before an answer.
_THOUGHT_TAGS = ("<think>", "</think>")
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
            if token.content not in _THOUGHT_TAGS
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
