"""Reads and writes function calls as chat templates write them.

A form is chosen by a probe: the template renders an assistant's message with one call, and the form
that reads this call back is the one that the policy was trained to write, or will learn to.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from laurel.errors import EnvironmentFailedError, ModelError
from laurel.models.tokenizer import first_line

FormName = Literal["hermes", "llama"]
MAX_DEPTH = 64
"""Objects and lists within each other in a call or an action; readers of JSON behind tools take 200
or fewer, and an error of theirs would be a failure in place of the policy's own mistake."""
_NAMES_A_FUNCTION = re.compile(r"\{\s*\"name\"\s*:")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that could be read: the name of a function, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that was begun and cannot be read; `problem` tells the policy why."""

    problem: str


ReadCall = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class CallForm(ABC):
    """A form in which a policy writes calls into the text of its message."""

    name: ClassVar[FormName]
    prompt_opens_thoughts: bool = False
    """Whether the prompt ends in `<think>`, so that messages begin inside thoughts."""

    @abstractmethod
    def read(self, text: str) -> list[ReadCall]:
        """Return the calls in a message, in order; none in a final answer.

        What a reasoning model writes up to `</think>` is no call.
        """

    def answer_in(self, text: str, mark: str) -> str:
        """Return what comes after the thoughts of a message; `mark` is how its calls begin."""
        thoughts, ended, answer = text.partition("</think>")
        if self.prompt_opens_thoughts:
            return answer
        # A call may have `</think>` in an argument, so thoughts must come before the first call.
        begin = thoughts.lstrip().startswith("<think>") or mark not in thoughts
        return answer if ended and begin else text

    @abstractmethod
    def before_calls(self, text: str) -> str:
        """Return what a message with calls says before the first of them."""

    @abstractmethod
    def write(self, calls: Sequence[ToolCall]) -> str:
        """Write calls as `read` reads them."""


class HermesForm(CallForm):
    """Writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen do.

    Text around calls is part of the message. A last call may lack its closing tag.
    """

    name = "hermes"
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def read(self, text: str) -> list[ReadCall]:
        """Read what stands in each pair of tags; arguments may themselves contain tags."""
        rest, calls = self.answer_in(text, self._OPEN), list[ReadCall]()
        while self._OPEN in rest:
            rest = rest.partition(self._OPEN)[2].lstrip()
            try:
                value, end = _decode(rest)
            except ValueError as error:
                block, _, rest = rest.partition(self._CLOSE)
                calls.append(MalformedCall(_no_json(error, block)))
                continue
            calls.append(_call(value, ("arguments",)))
            rest = rest[end:]
        return calls

    def before_calls(self, text: str) -> str:
        """Return the thoughts, and what comes before the first opening tag."""
        rest = self.answer_in(text, self._OPEN).partition(self._OPEN)[1:]
        return text.removesuffix("".join(rest)).strip()

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Write each call on a line of its own between tags."""
        return "\n".join(
            f"{self._OPEN}\n{_object(call, 'arguments')}\n{self._CLOSE}" for call in calls
        )


class LlamaForm(CallForm):
    """Writes `{"name": ..., "parameters": {...}}` as the whole message, as Llama 3 does.

    `<|python_tag|>` may come first; it is a special token, so most texts lack it. Several calls are
    separated by `;` or a line break.
    """

    name = "llama"
    _TAG = "<|python_tag|>"

    def read(self, text: str) -> list[ReadCall]:
        """Read the objects that the message begins with.

        An object without a name and parameters is an answer in JSON, unless the tag precedes it.
        """
        answer, calls = self.answer_in(text, "{").strip(), list[ReadCall]()
        is_tagged = answer.startswith(self._TAG)
        rest = answer.removeprefix(self._TAG).lstrip()
        while rest.startswith("{"):
            is_call = is_tagged or bool(calls)
            try:
                value, end = _decode(rest)
            except ValueError as error:
                if is_call or _NAMES_A_FUNCTION.match(rest):
                    calls.append(MalformedCall(_no_json(error, rest)))
                break
            if not is_call and not ("name" in value and value.keys() & {"parameters", "arguments"}):
                break
            calls.append(_call(value, ("parameters", "arguments")))
            rest = rest[end:].lstrip("; \t\r\n")
        if is_tagged and not calls:
            calls.append(MalformedCall(f"no JSON object comes after {self._TAG}"))
        return calls

    def before_calls(self, text: str) -> str:
        """Return the thoughts, for calls are the whole message after them."""
        return text.removesuffix(self.answer_in(text, "{")).strip()

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Write the calls one after the other, without the tag."""
        return "; ".join(_object(call, "parameters") for call in calls)


FORMS: dict[str, CallForm] = {form.name: form for form in (HermesForm(), LlamaForm())}
"""The known forms, by name."""


def _decode(text: str) -> tuple[Any, int]:
    # The value at the beginning of the text and its end; ValueError where there is none.
    try:
        return _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _no_json(error: ValueError, written: str) -> str:
    return f"it is not valid JSON: {error}" if written.strip() else "it is empty"


def _call(value: Any, keys: Sequence[str]) -> ReadCall:
    if not isinstance(value, dict):
        return MalformedCall(f"it is not a JSON object with name and {keys[0]}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall('it has no "name" of a function')
    others = sorted(value.keys() - {"name", "id", "type", *keys})
    if others and not value.keys() & {*keys}:
        # Taken for a call without arguments, the reply would be that each is missing.
        return MalformedCall(f'it has no "{keys[0]}", but "{others[0]:.50}"')
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return MalformedCall(f'its "{keys[0]}" must be a JSON object')
    if fault := fault_of(arguments) or fault_of({"name": name}):
        return MalformedCall(fault)
    return ToolCall(name, arguments)


def fault_of(value: Mapping[str, Any]) -> str | None:
    """Say why an object of JSON that a policy wrote cannot be sent to a server; None if it can."""
    if _is_deep(value):
        return f"it is nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "it has half of a surrogate pair, as in \\ud800, which is no text"
    except ValueError:
        return "it has a number that is no JSON (NaN or infinite)"
    return None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        lists = [one.values() if isinstance(one, dict) else one for one in level]
        level = [one for inside in lists for one in inside if isinstance(one, dict | list)]
    return bool(level)


def _object(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


# The form that a template writes.

_PROBE = ToolCall("laurel_probe", {"mark": 7})
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "Mark.",
        "parameters": {
            "type": "object",
            "properties": {"mark": {"type": "integer", "description": "Mark."}},
            "required": ["mark"],
        },
    },
}
_ANOTHER = "(policy.tokenizer.chat_template=hermes, or a path ending in .jinja)"


def form_of(tokenizer: Any, *, where: str = "env.tools") -> CallForm:
    """Return the form of calls that the chat template of a tokenizer writes.

    Args:
        tokenizer: A tokenizer with a chat template.
        where: The section of the configuration that has the tools.

    Raises:
        ModelError: The template leaves tools out of the prompt, so that the policy would not know
            of them; or it writes calls in no known form.
    """

    def rendered(*messages: dict[str, Any], prompt: bool = False) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages),
                    tools=[_PROBE_SCHEMA],
                    tokenize=False,
                    add_generation_prompt=prompt,
                )
            )
        except Exception as error:  # Jinja and the template itself raise what they like
            raise ModelError(
                f"the chat template cannot render a conversation with tools: {first_line(error)}. "
                f"Choose one that can {_ANOTHER}"
            ) from error

    asked = {"role": "user", "content": "a"}
    before = rendered(asked, prompt=True)
    if _PROBE.name not in before:
        raise ModelError(
            f"the chat template leaves out the tools of {where}, so the policy would "
            f"never see them. Choose one that shows them {_ANOTHER}"
        )
    turn_begins = before.rstrip().removesuffix("<think>")
    opens_thoughts = turn_begins != before.rstrip()
    function = {"name": _PROBE.name, "arguments": dict(_PROBE.arguments)}
    calls = [{"id": "laurel007", "type": "function", "function": function}]
    whole = rendered(asked, {"role": "assistant", "content": "", "tool_calls": calls})
    start = turn_begins if opens_thoughts else before
    pairs = enumerate(zip(start, whole, strict=False))
    turn = whole[next((i for i, (one, other) in pairs if one != other), len(start)) :]
    for form in FORMS.values():
        if form.read(turn) == [_PROBE]:
            return replace(form, prompt_opens_thoughts=opens_thoughts)
    raise ModelError(
        f"{where}: the chat template writes a function call in no form that is known here, of "
        f"{', '.join(FORMS)} ({turn!r:.200}). Choose another template {_ANOTHER}"
    )


def needed_form(form: CallForm | None, where: str) -> CallForm:
    """Return the form of calls, without which every call would count as an answer.

    Raises:
        EnvironmentFailedError: There is none yet: `form_of` has not found it out.
    """
    if form is None:
        raise EnvironmentFailedError(
            f"{where}: how the policy writes calls depends on its chat template: call "
            "use_tokenizer first"
        )
    return form
