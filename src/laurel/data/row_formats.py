"""The forms in which rows say a preference, one function per data-set class, and their table."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laurel.config.preference_data import DatasetConfig
from laurel.data.cells import (
    Row,
    UnusableRow,
    answer,
    integer,
    kind_of,
    messages,
    number,
    number_at,
    required,
)
from laurel.data.transcripts import is_transcript, split_transcripts
from laurel.types import Completion, Conversation

_UNNAMED = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a row says, before anything is put around its prompt or left out."""

    prompt: Conversation
    completions_G: tuple[Completion, ...]
    ranks_G: tuple[int, ...]
    margin: float = 0.0
    target: float = 1.0
    attributes_GK: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetClass:
    """How one class of data set reads its rows, and where it finds them if no path is given."""

    convert: Callable[[Row, DatasetConfig, Sequence[str]], Judged]
    """Takes a row, the configuration, and the names of the ratings that are wanted."""
    hub_name: str | None = None
    subset: str | None = None
    has_validation: bool = False
    """Whether the hub data set has a `validation` split."""


def helpsteer3(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> Judged:
    """`overall_preference` below 0 prefers `response1`, above 0 `response2`; 0 is a tie.

    The preferred response comes first. The margin is the strength of the preference, 0 to 3.
    """
    strength = number(required(row, "overall_preference"), what="'overall_preference'")
    first, second = (
        answer(messages(required(row, key), role="assistant", what=f"'{key}'"), what=f"'{key}'")
        for key in ("response1", "response2")
    )
    if strength > 0:
        first, second = second, first
    return Judged(
        prompt=messages(required(row, "context"), role="user", what="'context'"),
        completions_G=(Completion(messages=first), Completion(messages=second)),
        ranks_G=(0, 1 if strength else 0),
        margin=abs(strength),
    )


def tulu3(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> Judged:
    """Two conversations that share everything but the last message."""
    chosen, rejected = (
        answer(messages(required(row, key), role="assistant", what=f"'{key}'"), what=f"'{key}'")
        for key in ("chosen", "rejected")
    )
    if chosen[:-1] != rejected[:-1]:
        raise UnusableRow(
            "context mismatch",
            "'chosen' and 'rejected' must share every message but the last, and do not",
        )
    return _pair(chosen[:-1], chosen[-1:], rejected[-1:])


def ranked(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> Judged:
    """`{"context": [...], "completions": [{"rank", "completion": [...]}, ...]}`, as it stands.

    Where ratings are wanted, one completion is enough and ranks may be missing.
    """
    context = required(row, "context")
    completions = required(row, "completions")
    if not isinstance(completions, Sequence) or isinstance(completions, str):
        raise UnusableRow(
            "'completions' is not a list",
            f"'completions' is {kind_of(completions)} where a list is expected",
        )
    least = 1 if attributes else 2
    if len(completions) < least:
        raise UnusableRow(
            "too few completions",
            f"'completions' holds {len(completions)}, and a preference needs {least} or more",
        )
    read = [_ranked_completion(value, place) for place, value in enumerate(completions, start=1)]
    return Judged(
        prompt=messages(context, role="user", what="'context'"),
        completions_G=tuple(Completion(messages=said) for said, _ in read),
        ranks_G=_ranks([item for _, item in read], optional=bool(attributes)),
        margin=_optional_number(row, "margin", otherwise=0.0),
        target=_optional_number(row, "target", otherwise=1.0),
        attributes_GK=_ratings([item for _, item in read], attributes) if attributes else None,
    )


def binary(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> Judged:
    """A prompt, a chosen and a rejected answer, under the configured keys.

    Without a prompt, the two may be whole conversations (the prompt is what they share) or
    transcripts. With a prompt, they may repeat it.
    """
    chosen = required(row, config.chosen_key, setting="chosen_key")
    rejected = required(row, config.rejected_key, setting="rejected_key")
    names = f"'{config.chosen_key}'", f"'{config.rejected_key}'"
    if row.get(config.prompt_key) is not None:
        prompt = messages(row[config.prompt_key], role="user", what=f"'{config.prompt_key}'")
        first = answer(messages(chosen, role="assistant", what=names[0]), what=names[0])
        second = answer(messages(rejected, role="assistant", what=names[1]), what=names[1])
        return _pair(*_without_prompt(prompt, first, second))
    if is_transcript(chosen) and is_transcript(rejected):
        return _pair(*split_transcripts(chosen, rejected))
    if _is_conversation(chosen) and _is_conversation(rejected):
        first = answer(messages(chosen, role="assistant", what=names[0]), what=names[0])
        second = answer(messages(rejected, role="assistant", what=names[1]), what=names[1])
        return _pair(*_shared_prompt(first, second))
    required(row, config.prompt_key, setting="prompt_key")
    raise AssertionError("the prompt was found missing above")


DATASET_CLASSES: dict[str, DatasetClass] = {
    "HelpSteer3": DatasetClass(
        convert=helpsteer3,
        hub_name="nvidia/HelpSteer3",
        subset="preference",
        has_validation=True,
    ),
    "Tulu3Preference": DatasetClass(
        convert=tulu3, hub_name="allenai/llama-3.1-tulu-3-8b-preference-mixture"
    ),
    "PreferenceDataset": DatasetClass(convert=ranked),
    "BinaryPreferenceDataset": DatasetClass(convert=binary),
}


def judge(row: Row, class_name: str, config: DatasetConfig, attributes: Sequence[str]) -> Judged:
    """What the row says, read as a row of that class; `UnusableRow` where it says nothing."""
    try:
        judged = DATASET_CLASSES[class_name].convert(row, config, attributes)
    except UnusableRow as problem:
        found = infer_class(row, config)
        if problem.kind.startswith("missing key") and found and found[0] != class_name:
            remedy = f"It looks like a row of {found[0]}: set data.dataset_name={found[0]}"
            raise UnusableRow(
                problem.kind, problem.message, remedy=remedy, lacks_columns=True
            ) from None
        raise
    return _with_configured_numbers(judged, row, config)


def best_answer(row: Row, class_name: str) -> tuple[Conversation, Conversation]:
    """The prompt of a judged row, and the completion of the best rank (the first, in a tie)."""
    judged = judge(row, class_name, _UNNAMED, ())
    best = min(range(len(judged.ranks_G)), key=lambda index: judged.ranks_G[index])
    return judged.prompt, judged.completions_G[best].messages


def infer_class(row: Row, config: DatasetConfig) -> tuple[str, str] | None:
    """The class whose rows look like this one, and what gave it away; None where none does."""
    if {"context", "response1", "response2", "overall_preference"} <= row.keys():
        return "HelpSteer3", "columns response1, response2 and overall_preference"
    if {"context", "completions"} <= row.keys():
        return "PreferenceDataset", "columns context and completions"
    if not {config.chosen_key, config.rejected_key} <= row.keys():
        return None
    chosen, rejected = row[config.chosen_key], row[config.rejected_key]
    if row.get(config.prompt_key) is not None:
        keys = (config.prompt_key, config.chosen_key, config.rejected_key)
        return "BinaryPreferenceDataset", "columns {}, {} and {}".format(*keys)
    if is_transcript(chosen) and is_transcript(rejected):
        return "BinaryPreferenceDataset", "transcripts of Human and Assistant"
    if _is_conversation(chosen) and _is_conversation(rejected):
        return "BinaryPreferenceDataset", "whole conversations; the prompt is what the two share"
    return None


def class_of(row: Row, config: DatasetConfig) -> tuple[str, str]:
    """As `infer_class`, but a row of no known form is unusable."""
    found = infer_class(row, config)
    if found is None:
        raise UnusableRow(
            "columns of no known class",
            f"nothing names the class of the rows, and their columns ({', '.join(map(str, row))}) "
            "do not tell it. Rows may have: context and completions (PreferenceDataset); "
            f"{config.prompt_key}, {config.chosen_key} and {config.rejected_key}, or the last two "
            "as whole conversations (BinaryPreferenceDataset)",
            remedy="Set data.prompt_key, data.chosen_key and data.rejected_key if your columns "
            "have other names, or data.dataset_name",
            lacks_columns=True,
        )
    return found


def _pair(prompt: Conversation, chosen: Conversation, rejected: Conversation) -> Judged:
    return Judged(
        prompt=prompt,
        completions_G=(Completion(messages=chosen), Completion(messages=rejected)),
        ranks_G=(0, 1),
    )


def _is_conversation(value: Any) -> bool:
    """Whether the value is a list of messages that starts with what the assistant answers."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) < 2:
        return False
    return isinstance(value[0], Mapping) and value[0].get("role") != "assistant"


def _without_prompt(
    prompt: Conversation, chosen: Conversation, rejected: Conversation
) -> tuple[Conversation, Conversation, Conversation]:
    """The prompt and the two answers, where the answers may begin by repeating the prompt."""
    if chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    shared, first, second = _shared_prompt(chosen, rejected)
    # What they share may hold more than the prompt: a system message before it, turns after it.
    starts = range(len(shared) - len(prompt) + 1)
    if not any(shared[start : start + len(prompt)] == prompt for start in starts):
        raise UnusableRow(
            "conversations do not hold the prompt",
            "the chosen and rejected conversations do not both hold the prompt of their row",
        )
    return shared, first, second


def _shared_prompt(
    chosen: Conversation, rejected: Conversation
) -> tuple[Conversation, Conversation, Conversation]:
    """What two conversations share, and the answers that they end with."""
    num_shared = 0
    for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
        if one != other:
            break
        num_shared += 1
    first, second = chosen[num_shared:], rejected[num_shared:]
    if first[0].role != "assistant" or second[0].role != "assistant":
        raise UnusableRow(
            "conversations part before the answer",
            "the chosen and rejected conversations must share everything before the answer; they "
            f"differ at message {num_shared + 1}",
        )
    return chosen[:num_shared], first, second


def _ranked_completion(value: Any, place: int) -> tuple[Conversation, Row]:
    what = f"completion {place}"
    if not isinstance(value, Mapping):
        raise UnusableRow(
            "a completion is not an object",
            f"{what} is {kind_of(value)} where {{'rank': ..., 'completion': ...}} is expected",
        )
    if value.get("completion") is None:
        raise UnusableRow(
            "a completion without 'completion'",
            f"{what} has no 'completion'; its keys are: {', '.join(map(str, value)) or 'none'}",
        )
    said = messages(value["completion"], role="assistant", what="a completion")
    return answer(said, what=what), value


def _ranks(items: Sequence[Row], *, optional: bool) -> tuple[int, ...]:
    given = [item.get("rank") for item in items]
    if optional and all(rank is None for rank in given):
        return (0,) * len(items)
    for place, (rank, item) in enumerate(zip(given, items, strict=True), start=1):
        if rank is None:
            raise UnusableRow(
                "a completion without 'rank'",
                f"completion {place} has no 'rank'; its keys are: {', '.join(map(str, item))}",
            )
    return tuple(integer(rank, what="'rank'") for rank in given)


def _ratings(items: Sequence[Row], attributes: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    rows: list[tuple[float, ...]] = []
    for item in items:
        rated = item.get("attributes")
        if rated is None:
            rated = {}
        if not isinstance(rated, Mapping):
            raise UnusableRow(
                "'attributes' is not an object",
                f"'attributes' is {kind_of(rated)} where {{name: number}} is expected",
            )
        rows.append(tuple(_rating(rated.get(name), name) for name in attributes))
    return tuple(rows)


def _rating(value: Any, name: str) -> float:
    # A table has one column for all rows, so a rating nobody gave is null or NaN there.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    return number(value, what=f"attribute '{name}'")


def _optional_number(row: Row, key: str, *, otherwise: float) -> float:
    value = row.get(key)
    return otherwise if value is None or value == "" else number(value, what=f"'{key}'")


def _with_configured_numbers(judged: Judged, row: Row, config: DatasetConfig) -> Judged:
    """The margin and the soft label from the configured columns, checked."""
    margin, target = judged.margin, judged.target
    if config.margin_key is not None:
        margin = number_at(row, config.margin_key, setting="margin_key")
    if config.target_key is not None:
        target = number_at(row, config.target_key, setting="target_key")
    if not 0.0 <= target <= 1.0:
        raise UnusableRow(
            "target is no probability",
            f"the target is {target:g} where a probability, 0 to 1, is expected",
        )
    return replace(judged, margin=margin, target=target)
