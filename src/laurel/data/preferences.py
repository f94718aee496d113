"""Reads preferences from any data set, checks each row, and counts every row that is left out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal

from laurel.config.data import DatasetConfig, is_import_path
from laurel.data import steps
from laurel.data.columns import (
    READ_OTHERWISE,
    ColumnNotes,
    find_question,
    is_there,
    question_of,
    refuse_tools,
    with_system,
)
from laurel.data.own_rows import own_validation_split
from laurel.data.reading import (
    NO_HUB,
    HubSet,
    LeftOutRow,
    OpenedSet,
    Remedy,
    UnusualRoles,
    held_out_of_sets,
    open_set,
    prompts_of_folds,
    split,
)
from laurel.data.report import DataReport, Reason, conversation_fingerprint, no_rows_left
from laurel.data.sources import (
    Row,
    UnusableRow,
    answer,
    integer,
    is_list,
    is_transcript,
    json_kind,
    locate,
    messages,
    number,
    number_at,
    parse_transcript,
    required,
    speaker,
    text,
    unlike,
)
from laurel.data.steps import (
    SEPARATOR,
    ReadSteps,
    StepRow,
    form_of_steps,
    joined_steps,
)
from laurel.errors import DataError, counted_that
from laurel.types import Completion, Conversation, Group, Message, Preference


def load_preferences(
    config: DatasetConfig,
    *,
    name: str,
    ties: Literal["keep", "drop", "error"],
    duplicates: Literal["drop", "keep"],
    on_bad_row: Literal["error", "skip"],
    attributes: Sequence[str] = (),
    max_samples: int | None = None,
    remedy: Remedy | None = None,
    separator: str = SEPARATOR,
    needs_steps: bool | None = None,
) -> tuple[list[Preference], DataReport]:
    """Return the usable preferences of one data set, and the report of all rows.

    Args:
        name: The set's name in the report and the start of its groups' ids, which are unique if
            names are.
        ties: Whether rows with a single rank are kept, left out, or errors.
        attributes: The ratings to read; each completion gets a number for each, NaN if unrated.
        max_samples: Reading stops when so many rows (or the configuration's, if less) are kept.
        remedy: Advice for a malformed row, if there is no configuration whose keys could be set.
        needs_steps: Whether rows must, or must not, label steps; None: both are read.

    Raises:
        DataError: A row or a file cannot be used, or no row is left.
    """
    report = DataReport(name=name)
    opened = open_set(
        config, known={name: known.hub for name, known in DATASET_CLASSES.items()}, report=report
    )
    reading = _Reading(
        opened=opened,
        report=report,
        class_name=None if opened.is_own else config.dataset_name,
        ties=ties,
        duplicates=duplicates,
        attributes=tuple(attributes),
        separator=separator,
        needs_steps=needs_steps,
    )
    preferences = opened.read(
        reading.preference,
        report=report,
        on_bad_row=on_bad_row,
        limit=max_samples,
        remedy=remedy,
    )
    report.describe(preferences)
    report.notes += reading.notes()
    if not preferences:
        raise DataError(no_rows_left(report))
    return preferences, report


def own_validation_preferences(config: DatasetConfig) -> DatasetConfig | None:
    """Return the validation set that comes with the data set; None if there is none.

    HelpSteer3 on the hub has one, and so may a class of the user's own have
    (`own_validation_split`).
    """
    name = config.dataset_name
    if name is None:
        return None
    if name in DATASET_CLASSES:
        has_one = DATASET_CLASSES[name].has_validation and config.data_path is None
        split = "validation" if has_one else None
    else:
        split = own_validation_split(config) if is_import_path(name) else None
    return None if split is None else config.model_copy(update={"split": split})


def hold_out(
    preferences: Sequence[Preference], *, shares: Sequence[float], seed: int
) -> tuple[list[Preference], list[Preference]]:
    """Split preferences into (train, validation), with about the share of each set held out.

    Prompts are held out whole, in an order that depends on the seed and the prompt alone, so rows
    with the same prompt stay on one side and the order of the rows does not matter. Each side has
    at least one row.

    Raises:
        DataError: There are fewer than two prompts.
    """
    prompts = [conversation_fingerprint(preference.group.prompt) for preference in preferences]
    ids = [preference.group.id for preference in preferences]
    held_out = held_out_of_sets(prompts, ids, [(share, seed) for share in shares])
    return split(preferences, prompts, held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """One of the parts into which the prompts of a set are divided for cross-validation."""

    index: int
    number: int
    """The number of parts."""
    seed: int

    def hold_out(
        self, preferences: Sequence[Preference]
    ) -> tuple[list[Preference], list[Preference]]:
        """Split preferences into (train, this fold); no prompt is in two folds.

        The folds have about as many rows each. Which prompts they have depends on the seed and the
        prompts, and not on the order of the rows.

        Raises:
            DataError: There are fewer prompts than folds.
        """
        prompts = [conversation_fingerprint(one.group.prompt) for one in preferences]
        return split(
            preferences, prompts, prompts_of_folds(prompts, self.number, self.seed)[self.index]
        )


@dataclass(slots=True, kw_only=True)
class _Reading:
    opened: OpenedSet[DatasetConfig]
    report: DataReport
    class_name: str | None
    """The data set class; None until the first row shows it."""
    ties: Literal["keep", "drop", "error"]
    duplicates: Literal["drop", "keep"]
    attributes: tuple[str, ...]
    separator: str
    needs_steps: bool | None
    seen: set[bytes] = field(default_factory=set)
    verdicts: set[bytes] = field(default_factory=set)
    num_contradictions: int = 0
    num_negative_margins: int = 0
    num_double_systems: int = 0
    num_duplicates: int = 0
    rated: set[str] = field(default_factory=set)
    roles: UnusualRoles = field(default_factory=UnusualRoles)
    columns: ColumnNotes = field(default_factory=ColumnNotes)

    def preference(self, source: str, row: Row) -> Preference:
        """Read a row, refuse it if it teaches nothing, and count what the notes are about."""
        class_name = self._class_of(row)
        ranked = ranked_row(
            row, class_name, self.opened.config, self.attributes, separator=self.separator
        )
        if self.needs_steps is not None and self.needs_steps != (ranked.steps_GS is not None):
            raise DataError(
                f"{locate(self.opened.path or self.report.name, source)}: rows of {class_name} "
                + (
                    "label no steps, and a process reward model learns from labels of steps. Give "
                    "rows of StepwiseSupervision, MathShepherd or PRM800K, or take out "
                    "policy.reward_model_cfg.reward_model_type=process"
                    if self.needs_steps
                    else "label the steps of answers, which only a process reward model learns "
                    "from. Set policy.reward_model_cfg.reward_model_type=process and "
                    "rm.loss.type=step_bce"
                )
            )
        frame = self.opened.frame
        _refuse_alone(ranked, class_name)
        refuse_tools(row)
        prompt = frame.around(with_system(row, ranked.prompt, self.opened.config.system_key))
        # The message of data.system_prompt_file comes first, so one of the row comes second.
        if frame.system is not None and len(prompt) > 1 and prompt[1].role == "system":
            self.num_double_systems += 1
        preference = Preference(
            group=Group(
                id=f"{self.report.name}:{source}",
                prompt=prompt,
                completions_G=ranked.completions_G,
            ),
            ranks_G=ranked.ranks_G,
            margin=ranked.margin,
            target=ranked.target,
            attributes_GK=ranked.attributes_GK,
            steps_GS=ranked.steps_GS,
            source=source,
        )
        if (reason := self._reason_against(preference)) is not None:
            raise LeftOutRow(reason)
        self._note(preference)
        self._look(source, row, preference, class_name)
        return preference

    def _look(self, source: str, row: Row, preference: Preference, class_name: str) -> None:
        config, group = self.opened.config, preference.group
        said = (*group.prompt, *(turn for one in group.completions_G for turn in one.messages))
        # Such a key may be a difference of two columns.
        numbers = f"{config.margin_key or ''}-{config.target_key or ''}"
        read = {key for key in row if str(key) in numbers}
        if self.attributes:
            read |= {f"completions.attributes.{name}" for name in self.attributes}
            read |= {*self.attributes} if class_name == "HelpSteer2" else set()
        self.columns.look(
            source, row, said, read=read | READ_OTHERWISE.get(class_name, frozenset())
        )

    def notes(self) -> list[str]:
        """Return the report's remarks on rows that were kept."""
        said = {
            ("prefer", "what an earlier row with the same prompt and answers did not"): (
                self.num_contradictions
            ),
            ("have", "a margin below 0"): self.num_negative_margins,
            (
                "begin",
                "with a system message of its own, which now follows that of "
                "data.system_prompt_file",
            ): self.num_double_systems,
            (
                "say",
                "exactly what an earlier row said; laurel rm leaves such rows out unless "
                "data.duplicates=keep",
            ): self.num_duplicates,
        }
        notes = [
            f"{counted_that(count, 'row', verb)} {what}"
            for (verb, what), count in said.items()
            if count
        ]
        missing = [name for name in self.attributes if name not in self.rated]
        if missing:
            notes.append(f"no row rates {', '.join(missing)}")
        return notes + self.roles.notes() + self.columns.notes()

    def _class_of(self, row: Row) -> str:
        if self.class_name is None:
            self.class_name, clue = class_of(row, self.opened.config)
            if self.report.dataset_class:
                self.report.dataset_class += f" (rows of {self.class_name})"
            else:
                self.report.dataset_class = self.class_name
                self.report.notes.append(f"read as {self.class_name}, recognized by: {clue}")
        return self.class_name

    def _reason_against(self, preference: Preference) -> Reason | None:
        """Return the reason why a well-formed row is left out, None if it is kept."""
        ratings = preference.attributes_GK
        if self.attributes and (ratings is None or all(map(math.isnan, sum(ratings, ())))):
            return "no rating"
        steps_GS = preference.steps_GS
        if steps_GS is not None and all(map(math.isnan, sum(steps_GS, ()))):
            return "no rating"
        completions_G = preference.group.completions_G
        # A system message alone asks nothing.
        asked = [one for one in preference.group.prompt if one.role != "system"]
        answers = [one for completion in completions_G for one in completion.messages]
        if not asked or any(not one.content.strip() for one in (*asked, *answers)):
            return "empty"
        if len(completions_G) > 1 and len(set(completions_G)) == 1:
            return "identical sides"
        is_tie = len(completions_G) > 1 and len(set(preference.ranks_G)) == 1
        if is_tie and steps_GS is None and self.ties != "keep":
            if self.ties == "error":
                path, source, ranks_G = self.opened.path, preference.source, preference.ranks_G
                raise DataError(
                    f"{source if path is None else locate(path, source)}: all {len(ranks_G)} "
                    f"completions share rank {ranks_G[0]} (a tie), which the loss cannot learn "
                    "from. Set data.ties=drop to leave ties out, or rm.loss.type to davidson or "
                    "rao_kupper to learn from them"
                )
            return "tie"
        content = _fingerprint(preference)
        if content in self.seen:
            if self.duplicates == "drop":
                return "duplicate"
            self.num_duplicates += 1
        self.seen.add(content)
        return None

    def _note(self, preference: Preference) -> None:
        self.num_negative_margins += preference.margin < 0
        group = preference.group
        answered = [message for one in group.completions_G for message in one.messages]
        self.roles.look(preference.source, (*group.prompt, *answered))
        for ratings in preference.attributes_GK or ():
            self.rated.update(
                name
                for name, rating in zip(self.attributes, ratings, strict=True)
                if not math.isnan(rating)
            )
        # Fingerprints have one length, so what is joined from them is unambiguous.
        prompt = conversation_fingerprint(preference.group.prompt)
        answers = [conversation_fingerprint(c.messages) for c in preference.group.completions_G]
        ordered = combinations(sorted(zip(preference.ranks_G, answers, strict=True)), 2)
        decided = [(better, worse) for (a, better), (b, worse) in ordered if a < b]
        self.num_contradictions += any(
            prompt + worse + better in self.verdicts for better, worse in decided
        )
        self.verdicts.update(prompt + better + worse for better, worse in decided)


def _fingerprint(preference: Preference) -> bytes:
    """Hash a row so that only rows with the same content, in any order, share the hash."""
    group = preference.group
    ratings = preference.attributes_GK or preference.steps_GS or ((),) * len(group.completions_G)
    answers = sorted(
        (rank, conversation_fingerprint(completion.messages), repr(rating))
        for rank, completion, rating in zip(
            preference.ranks_G, group.completions_G, ratings, strict=True
        )
    )
    said = repr(
        (conversation_fingerprint(group.prompt), answers, preference.margin, preference.target)
    )
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


# The forms of a preference, with one function per data set class, and their table.

_UNNAMED = DatasetConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRow:
    """A prompt with ranked completions as a row holds them, before prompt files and filters."""

    prompt: Conversation
    completions_G: tuple[Completion, ...]
    ranks_G: tuple[int, ...]
    margin: float = 0.0
    target: float = 1.0
    attributes_GK: tuple[tuple[float, ...], ...] | None = None
    steps_GS: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetClass:
    """A class of preference data sets: the reader of its rows, and their default place."""

    convert: Callable[[Row, DatasetConfig, Sequence[str]], RankedRow] | None = None
    """Reads a row, given the configuration and the names of the ratings to read."""
    read_steps: ReadSteps | None = None
    """Reads a row with labels of steps, in place of `convert`."""
    hub: HubSet = NO_HUB
    has_validation: bool = False
    """True if the hub data set has a `validation` split."""


def helpsteer3(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of HelpSteer3.

    `overall_preference` below 0 prefers `response1`, above 0 `response2`; 0 is a tie. The preferred
    response comes first. The margin is the strength of the preference, 0 to 3.
    """
    strength = number(required(row, "overall_preference"), what="'overall_preference'")
    first, second = (
        answer(messages(required(row, key), role="assistant", what=f"'{key}'"), what=f"'{key}'")
        for key in ("response1", "response2")
    )
    if strength > 0:
        first, second = second, first
    return RankedRow(
        prompt=messages(required(row, "context"), role="user", what="'context'"),
        completions_G=(Completion(messages=first), Completion(messages=second)),
        ranks_G=(0, 1 if strength else 0),
        margin=abs(strength),
    )


def tulu3(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of Tulu 3: two conversations that differ only in the last message."""
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


def ranked(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row with a `context` and `completions`, each with a rank.

    The form is `{"context": [...], "completions": [{"rank", "completion": [...]}, ...]}`. With
    `attributes`, one completion is enough and ranks may be missing.
    """
    context = required(row, "context")
    completions = required(row, "completions")
    if not is_list(completions):
        raise unlike(completions, "a list", what="'completions'")
    least = 1 if attributes else 2
    if len(completions) < least:
        raise UnusableRow(
            "too few completions",
            f"'completions' holds {len(completions)}, and a preference needs {least} or more",
        )
    read = [_ranked_completion(value, place) for place, value in enumerate(completions, start=1)]
    return RankedRow(
        prompt=messages(context, role="user", what="'context'"),
        completions_G=tuple(Completion(messages=said) for said, _ in read),
        ranks_G=_ranks([item for _, item in read], optional=bool(attributes)),
        margin=_optional_number(row, "margin", otherwise=0.0),
        target=_optional_number(row, "target", otherwise=1.0),
        attributes_GK=_ratings([item for _, item in read], attributes) if attributes else None,
    )


def binary(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a prompt, a chosen and a rejected answer, under the configured keys.

    Without a prompt, the two may be whole conversations (the prompt is what they share) or
    transcripts. With a prompt, they may repeat it.
    """
    chosen = required(row, config.chosen_key, setting="chosen_key")
    rejected = required(row, config.rejected_key, setting="rejected_key")
    names = f"'{config.chosen_key}'", f"'{config.rejected_key}'"
    if (asked := _prompt_column(row, config)) is not None:
        first = answer(messages(chosen, role="assistant", what=names[0]), what=names[0])
        second = answer(messages(rejected, role="assistant", what=names[1]), what=names[1])
        if first[0].role == second[0].role == "assistant":
            but = (config.chosen_key, config.rejected_key)
            return _pair(question_of(row, asked, but=but), first, second)
        prompt = messages(row[asked], role="user", what=f"'{asked}'")
        return _pair(*_without_prompt(prompt, first, second))
    if is_transcript(chosen) and is_transcript(rejected):
        return _pair(*split_transcripts(chosen, rejected))
    if _is_conversation(chosen) and _is_conversation(rejected):
        first = answer(messages(chosen, role="assistant", what=names[0]), what=names[0])
        second = answer(messages(rejected, role="assistant", what=names[1]), what=names[1])
        return _pair(*_shared_prompt(first, second))
    required(row, config.prompt_key, setting="prompt_key")
    raise AssertionError("the prompt was found missing above")


def _of_two(row: Row, asked: Any, keys: tuple[str, str], verdict: float) -> RankedRow:
    """Make a row of two answers in its own order; a verdict above 0 prefers the first."""
    said = (
        answer(messages(required(row, key), role="assistant", what=f"'{key}'"), what=f"'{key}'")
        for key in keys
    )
    return RankedRow(
        prompt=messages(asked, role="user", what="the prompt"),
        completions_G=tuple(Completion(messages=one) for one in said),
        ranks_G=(int(verdict < 0), int(verdict > 0)),
    )


def _one_of(row: Row, key: str, verdicts: Mapping[int, int]) -> int:
    found = integer(required(row, key), what=f"'{key}'")
    if found not in verdicts:
        raise UnusableRow(
            f"'{key}' names no answer",
            f"'{key}' is {found} where {' or '.join(map(str, verdicts))} is expected",
        )
    return verdicts[found]


def safe_rlhf(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of PKU-SafeRLHF, by which answer is better; `safer_response_id` is not read."""
    verdict = _one_of(row, "better_response_id", {0: 1, 1: -1})
    return _of_two(row, required(row, "prompt"), ("response_0", "response_1"), verdict)


def shp(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of SHP, in which `labels` is 1 if A is preferred, and 0 if B is."""
    verdict = _one_of(row, "labels", {1: 1, 0: -1})
    return _of_two(row, required(row, "history"), ("human_ref_A", "human_ref_B"), verdict)


def webgpt(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of WebGPT's comparisons; equal scores are a tie."""
    question = required(row, "question")
    if isinstance(question, Mapping):
        question = required(question, "full_text")
    first, second = (number(required(row, k), what=f"'{k}'") for k in ("score_0", "score_1"))
    return _of_two(row, question, ("answer_0", "answer_1"), first - second)


def nectar(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of Nectar: a transcript and `answers`, each with its rank."""
    answers = required(row, "answers")
    if not is_list(answers):
        raise unlike(answers, "a list", what="'answers'")
    completions = [
        {**one, "completion": one.get("answer")} if isinstance(one, Mapping) else one
        for one in answers
    ]
    return ranked({"context": required(row, "prompt"), "completions": completions}, config)


_PAIR_THE_ANSWERS = """\
import json, itertools; rows = itertools.groupby(map(json.loads, open("FILE")), \
lambda r: r["prompt"])
print(*(json.dumps({"context": p, "completions": [{"rank": -r["helpfulness"], "completion": \
r["response"]} for r in g]}) for p, g in [(p, list(g)) for p, g in rows] if len(g) > 1), \
sep="\\n", file=open("pairs.jsonl", "w"))"""


def helpsteer2(row: Row, config: DatasetConfig, attributes: Sequence[str] = ()) -> RankedRow:
    """Read a row of HelpSteer or HelpSteer2: one answer, whose ratings are columns."""
    said = messages(required(row, "response"), role="assistant", what="'response'")
    return RankedRow(
        prompt=messages(required(row, "prompt"), role="user", what="'prompt'"),
        completions_G=(Completion(messages=said),),
        ranks_G=(0,),
        attributes_GK=_ratings([{"attributes": row}], attributes) if attributes else None,
    )


def _refuse_alone(row: RankedRow, class_name: str) -> None:
    if len(row.completions_G) > 1 or row.attributes_GK is not None or row.steps_GS is not None:
        return
    raise UnusableRow(
        "one answer",
        f"a row of {class_name} has one answer, and a preference compares two",
        remedy="Learn the ratings themselves (policy.reward_model_cfg.reward_model_type=regression "
        "rm.loss.type=regression policy.reward_model_cfg.attributes=[helpfulness,correctness]), "
        "pair the answers of each prompt",
        program=_PAIR_THE_ANSWERS,
    )


RANK_THE_REPLIES = """\
import json; rows = {r["message_id"]: r for r in map(json.loads, open("FILE"))}; \
up = lambda i: [*up(rows[i]["parent_id"]), {"role": "user" if rows[i]["role"] == "prompter" else \
"assistant", "content": rows[i]["text"]}] if i else []
to = {}; [to.setdefault(r["parent_id"], []).append(r) for r in rows.values() if r["role"] == \
"assistant" and r["rank"] is not None]; print(*(json.dumps({"context": up(i), "completions": \
[{"rank": r["rank"], "completion": r["text"]} for r in g]}) for i, g in to.items() if len(g) > 1), \
sep="\\n", file=open("ranked.jsonl", "w"))"""
"""Two lines of Python that write the trees of messages in a file as ranked answers."""


def is_of_tree(row: Row) -> bool:
    """Report whether a row is a message of a tree, as OASST has them, each a row of its own."""
    return {"message_id", "parent_id", "text", "role"} <= row.keys()


def refuse_trees(row: Row) -> None:
    """Refuse a message of a tree, whose answers are other rows.

    Raises:
        UnusableRow: The row is one; its remedy is a program.
    """
    if is_of_tree(row):
        raise UnusableRow(
            "a message of a tree",
            "each row is one message of a tree (OASST), so a question and its answers are several "
            "rows",
            remedy="Write them as ranked answers",
            program=RANK_THE_REPLIES,
        )


DATASET_CLASSES: dict[str, DatasetClass] = {
    "HelpSteer3": DatasetClass(
        convert=helpsteer3,
        hub=HubSet(name="nvidia/HelpSteer3", parts=(("preference", None),)),
        has_validation=True,
    ),
    "Tulu3Preference": DatasetClass(
        convert=tulu3, hub=HubSet(name="allenai/llama-3.1-tulu-3-8b-preference-mixture")
    ),
    "PreferenceDataset": DatasetClass(convert=ranked),
    "BinaryPreferenceDataset": DatasetClass(convert=binary),
    "PKU-SafeRLHF": DatasetClass(convert=safe_rlhf, hub=HubSet(name="PKU-Alignment/PKU-SafeRLHF")),
    "Nectar": DatasetClass(convert=nectar, hub=HubSet(name="berkeley-nest/Nectar")),
    "SHP": DatasetClass(convert=shp, hub=HubSet(name="stanfordnlp/SHP"), has_validation=True),
    "WebGPT": DatasetClass(convert=webgpt, hub=HubSet(name="openai/webgpt_comparisons")),
    "HelpSteer2": DatasetClass(
        convert=helpsteer2, hub=HubSet(name="nvidia/HelpSteer2"), has_validation=True
    ),
    "StepwiseSupervision": DatasetClass(read_steps=steps.trl_row),
    "MathShepherd": DatasetClass(
        read_steps=steps.shepherd_row, hub=HubSet(name="peiyi9979/Math-Shepherd")
    ),
    "PRM800K": DatasetClass(read_steps=steps.prm800k_row),
}


PUBLISHED: Mapping[str, frozenset[str]] = {
    "PKU-SafeRLHF": frozenset({"prompt", "response_0", "response_1", "better_response_id"}),
    "Nectar": frozenset({"prompt", "answers", "num_responses"}),
    "SHP": frozenset({"history", "human_ref_A", "human_ref_B", "labels"}),
    "WebGPT": frozenset({"question", "answer_0", "answer_1", "score_0", "score_1"}),
    "HelpSteer2": frozenset({"prompt", "response", "helpfulness"}),
}
"""The columns by which rows of published sets with a form of their own are recognized."""


def _in_steps(read: StepRow, separator: str) -> RankedRow:
    # Answers are not ranked by the labels of their steps.
    answers = [joined_steps(answer_S, separator) for answer_S in read.answers_GS]
    if not answers:
        raise UnusableRow("an answer without a step", "the row has no answer with steps")
    return RankedRow(
        prompt=read.prompt,
        completions_G=tuple(
            Completion(messages=(Message("assistant", said),)) for said, _ in answers
        ),
        ranks_G=(0,) * len(answers),
        steps_GS=tuple(labels for _, labels in answers),
    )


def ranked_row(
    row: Row,
    class_name: str,
    config: DatasetConfig,
    attributes: Sequence[str],
    *,
    separator: str = SEPARATOR,
) -> RankedRow:
    """Read a row with the reader of the given data set class.

    `separator` is put between the steps of an answer, where rows label steps.

    Raises:
        UnusableRow: The row is malformed.
    """
    known = DATASET_CLASSES[class_name]
    try:
        if known.read_steps is not None:
            read = _in_steps(known.read_steps(row, config.prompt_key), separator)
        else:
            assert known.convert is not None
            read = known.convert(row, config, attributes)
    except UnusableRow as problem:
        found = infer_class(row, config)
        if problem.kind.startswith("missing key") and found and found[0] != class_name:
            remedy = f"It looks like a row of {found[0]}: set data.dataset_name={found[0]}"
            raise UnusableRow(
                problem.kind, problem.message, remedy=remedy, lacks_columns=True
            ) from None
        raise
    margin, target = read.margin, read.target
    if config.margin_key is not None:
        margin = number_at(row, config.margin_key, setting="margin_key")
    if config.target_key is not None:
        target = number_at(row, config.target_key, setting="target_key")
    if not 0.0 <= target <= 1.0:
        raise UnusableRow(
            "target is no probability",
            f"the target is {target:g} where a probability, 0 to 1, is expected",
        )
    return replace(read, margin=margin, target=target)


def best_answer(row: Row, class_name: str) -> tuple[Conversation, Conversation]:
    """Return the prompt of a row and its best-ranked completion (the first of them in a tie).

    Where rows label steps, it is the first completion without a wrong step.

    Raises:
        UnusableRow: The row is malformed, or every completion has a wrong step.
    """
    read = ranked_row(row, class_name, _UNNAMED, ())
    if read.steps_GS is not None:
        for completion, labels_S in zip(read.completions_G, read.steps_GS, strict=True):
            if all(label > 0.5 for label in labels_S):
                return read.prompt, completion.messages
        raise UnusableRow("no right answer", "no answer of the row has right steps only")
    best = min(range(len(read.ranks_G)), key=lambda index: read.ranks_G[index])
    return read.prompt, read.completions_G[best].messages


def infer_class(row: Row, config: DatasetConfig) -> tuple[str, str] | None:
    """Recognize the data set class of a row; return its name and the columns that show it.

    The result is None if no class fits.
    """
    if {"context", "response1", "response2", "overall_preference"} <= row.keys():
        return "HelpSteer3", "columns response1, response2 and overall_preference"
    if {"context", "completions"} <= row.keys():
        return "PreferenceDataset", "columns context and completions"
    for name, columns in PUBLISHED.items():
        # A table has all columns in all rows.
        if all(row.get(column) not in (None, "") for column in columns):
            other = "; safer_response_id is not read" if "safer_response_id" in row else ""
            return name, f"columns {', '.join(sorted(columns))}{other}"
    if row.keys() & {"label", "labels"}:
        in_steps = form_of_steps(row, config.prompt_key)
        if in_steps is not None:
            return in_steps
    if not {config.chosen_key, config.rejected_key} <= row.keys():
        return None
    chosen, rejected = row[config.chosen_key], row[config.rejected_key]
    if (asked := _prompt_column(row, config)) is not None:
        keys = (asked, config.chosen_key, config.rejected_key)
        return "BinaryPreferenceDataset", "columns {}, {} and {}".format(*keys)
    if is_transcript(chosen) and is_transcript(rejected):
        return "BinaryPreferenceDataset", "transcripts of Human and Assistant"
    if _is_conversation(chosen) and _is_conversation(rejected):
        return "BinaryPreferenceDataset", "whole conversations; the prompt is what the two share"
    return None


def class_of(row: Row, config: DatasetConfig) -> tuple[str, str]:
    """Recognize the data set class of a row; return its name and the columns that show it.

    Raises:
        UnusableRow: The row has no known form.
    """
    found = infer_class(row, config)
    if found is None:
        for setting in ("prompt_key", "chosen_key", "rejected_key"):
            named = getattr(config, setting)
            if named != getattr(_UNNAMED, setting):
                required(row, named, setting=setting)
        refuse_trees(row)
        raise UnusableRow(
            "columns of no known class",
            f"nothing names the class of the rows, and their columns ({', '.join(map(str, row))}) "
            "do not tell it. Rows may have: context and completions (PreferenceDataset); prompt, "
            "completions and labels of steps (StepwiseSupervision); "
            f"{config.prompt_key}, {config.chosen_key} and {config.rejected_key}, or the last two "
            "as whole conversations (BinaryPreferenceDataset)",
            remedy="Set data.prompt_key, data.chosen_key and data.rejected_key if your columns "
            "have other names, or data.dataset_name",
            lacks_columns=True,
        )
    return found


def _pair(prompt: Conversation, chosen: Conversation, rejected: Conversation) -> RankedRow:
    return RankedRow(
        prompt=prompt,
        completions_G=(Completion(messages=chosen), Completion(messages=rejected)),
        ranks_G=(0, 1),
    )


def _prompt_column(row: Row, config: DatasetConfig) -> str | None:
    """Return the column of a pair's prompt; None if the answers are whole conversations."""
    key, answers = config.prompt_key, (config.chosen_key, config.rejected_key)
    values = [row.get(one) for one in answers]
    if all(map(is_transcript, values)):
        return None
    if is_there(row, key):
        return key
    if key != _UNNAMED.prompt_key or all(map(_is_conversation, values)):
        return None
    if is_list(row.get("conversations")):
        return "conversations"
    return find_question(row, but=answers)


def _is_conversation(value: Any) -> bool:
    # A list that begins with the assistant is an answer alone.
    if not is_list(value) or len(value) < 2:
        return False
    return isinstance(value[0], Mapping) and speaker(value[0]) not in ("assistant", "gpt")


def _without_prompt(
    prompt: Conversation, chosen: Conversation, rejected: Conversation
) -> tuple[Conversation, Conversation, Conversation]:
    # The answers begin by repeating the prompt.
    shared, first, second = _shared_prompt(chosen, rejected)
    # They may share more than the prompt: a system message before it, turns after it.
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
    """Split two conversations into the messages that they share and their answers."""
    num_shared = _num_shared(chosen[:-1], rejected[:-1])
    first, second = chosen[num_shared:], rejected[num_shared:]
    if first[0].role != "assistant" or second[0].role != "assistant":
        raise UnusableRow(
            "conversations part before the answer",
            "the chosen and rejected conversations must share everything before the answer; they "
            f"differ at message {num_shared + 1}",
        )
    return chosen[:num_shared], first, second


def _num_shared(one: Conversation, other: Conversation) -> int:
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _ranked_completion(value: Any, place: int) -> tuple[Conversation, Row]:
    what = f"completion {place}"
    if not isinstance(value, Mapping):
        raise UnusableRow(
            "a completion is not an object",
            f"{what} is {json_kind(value)} where {{'rank': ..., 'completion': ...}} is expected",
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
            raise unlike(rated, "an object", what="'attributes'", form="{name: number}")
        row = []
        for name in attributes:
            value = rated.get(name)
            # A table has one column for all rows, so a missing rating is null or NaN there.
            is_missing = value is None or (isinstance(value, float) and math.isnan(value))
            row.append(math.nan if is_missing else number(value, what=f"attribute '{name}'"))
        rows.append(tuple(row))
    return tuple(rows)


def _optional_number(row: Row, key: str, *, otherwise: float) -> float:
    value = row.get(key)
    return otherwise if value is None or value == "" else number(value, what=f"'{key}'")


def split_transcripts(
    chosen: str, rejected: str
) -> tuple[Conversation, Conversation, Conversation]:
    """Split two transcripts into the turns that they share and the assistant turn that each adds.

    An empty turn is left for the caller to handle.

    Raises:
        UnusableRow: The transcripts differ in more than the last turn, or roles do not alternate.
    """
    first = parse_transcript(text(chosen, what="the chosen transcript"))
    second = parse_transcript(text(rejected, what="the rejected transcript"))
    num_shared = _num_shared(first[:-1], second[:-1])
    tails = (len(first) - num_shared, len(second) - num_shared)
    if tails != (1, 1):
        raise UnusableRow(
            f"transcripts part too early ({tails[0]} and {tails[1]} turns left)",
            "the two transcripts must share everything but one last assistant turn; after what "
            f"they share, chosen goes on for {tails[0]} and rejected for {tails[1]} turns",
        )
    for conversation in (first, second):
        for place, message in enumerate(conversation):
            if message.role != ("user", "assistant")[place % 2]:
                raise UnusableRow(
                    "turns do not alternate",
                    f"turn {place + 1} of the transcript is spoken by '{message.role}' again: "
                    "Human and Assistant must take turns",
                )
        if len(conversation) % 2:
            raise UnusableRow(
                "transcript ends with Human", "the transcript must end with an Assistant turn"
            )
    return first[:num_shared], first[num_shared:], second[num_shared:]
