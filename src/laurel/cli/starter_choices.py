"""What a person who begins has: a model and rows, looked at so that a starter fits them."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from laurel.cli.data_check import Findings, examine
from laurel.cli.local_scorer import find_local
from laurel.cli.starter import FEW_ROWS, HELD_OUT, SCRATCH, StarterTask
from laurel.config.tree import nearest
from laurel.data.file_formats import READERS
from laurel.data.near_misses import KEYS_OF_COLUMNS, could_be_named
from laurel.data.row_formats import DATASET_CLASSES
from laurel.data.task_formats import TASK_SETS
from laurel.data.task_needs import NOT_WHAT_IS_RIGHT
from laurel.errors import DataError, Terms, speaking
from laurel.observe.console import shorten_middle
from laurel.observe.counts import counted, counted_that
from laurel.rewards.load import check_not_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenModel:
    """A model, and what its tokenizer and positions ask of the configuration."""

    name: str | None
    """None: a new one."""
    num_positions: int | None = None
    settings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenData:
    """Rows, and how they are to be read."""

    settings: tuple[str, ...]
    path: str | None = None
    """A file that was looked at."""
    held_out: float = HELD_OUT
    """Share of the rows to validate on."""
    notes: tuple[str, ...] = ()
    misfit: str = ""
    """Why it does not fit the task."""
    unnamed: tuple[str, ...] = ()
    """Keys that would name its columns, which nobody could tell."""


def choose_model(said: str, task: StarterTask) -> ChosenModel:
    """The model that a person names, or a new one; what can be read of a directory is read.

    Raises:
        UserError: There is no such directory, or no model in it.
    """
    if said == SCRATCH:
        return ChosenModel(name=None, notes=(_about_scratch(task),))
    is_path = said.endswith("/") and not said.startswith(("/", "~", "."))
    check_not_missing(f"./{said}" if is_path else said, key="--model")
    place = Path(said).expanduser()
    if not place.is_dir():
        note = f"{said} is taken for a name on the Hugging Face hub, and was not looked at"
        return ChosenModel(name=said, notes=(note,))
    with speaking(Terms({"policy.model_name": "--model"})):
        found = find_local(said)
        name = said if (place / "config.json").is_file() else os.path.relpath(found.name)
        num_positions = _positions(name)
        settings, notes = _tokenizer_needs(name, for_reward_model=task.trainer == "rm")
    return ChosenModel(
        name=name, num_positions=num_positions, settings=settings, notes=(*found.notes, *notes)
    )


def _about_scratch(task: StarterTask) -> str:
    if task.trainer == "rm":
        return "the model is made here, small and random; its tokenizer is learned from the data"
    return (
        "the policy is made here, small and random, and its tokenizer is learned from the data: it "
        "writes noise, and learns where noise earns a reward now and then. Otherwise warm it up "
        "first, with laurel sft on examples"
    )


def _positions(name: str) -> int | None:
    from laurel.config.schema import PolicyConfig
    from laurel.models.pretrained import read_config
    from laurel.rewards.load import quiet_libraries

    quiet_libraries()
    hf_config = read_config(PolicyConfig(), name).get_text_config()
    positions: int | None = getattr(hf_config, "max_position_embeddings", None)
    return positions


def _tokenizer_needs(
    name: str, *, for_reward_model: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What of a tokenizer has to be settled in the configuration, and why."""
    from laurel.config.schema import TokenizerConfig
    from laurel.errors import ModelError
    from laurel.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(
        TokenizerConfig(chat_template=None), model_name=name, trust_remote_code=False,
        pad_may_end=True,
    )  # fmt: skip
    settings: list[str] = []
    notes: list[str] = []
    try:
        load_tokenizer(
            TokenizerConfig(), model_name=name, trust_remote_code=False, pad_may_end=True
        )
    except ModelError:
        settings.append("policy.tokenizer.chat_template=chatml")
        notes.append(f"{name} has no chat template: chatml is chosen for it")
    if for_reward_model and tokenizer.pad_token == tokenizer.eos_token:
        settings.append("policy.tokenizer.pad_token=auto")
        notes.append(f"{name} pads with its end token: another is chosen (pad_token: auto)")
    return tuple(settings), tuple(notes)


def choose_data(said: str, task: StarterTask) -> ChosenData:
    """The rows that a person names; a file is looked at as `laurel data check` does.

    Raises:
        DataError: No such file, no rows in it, no data set of that name.
    """
    place = Path(said).expanduser()
    is_file = place.exists() or said.startswith((".", "/", "~")) or _has_suffix(said)
    if not is_file:
        return _named_set(said, task)
    chosen = [] if task.environment is None else [f"data.env_name={task.environment}"]
    findings = examine(said, task.trainer, chosen)
    mapped: tuple[str, ...] = ()
    if not findings.is_usable:
        near = next((one for one in findings.near if one.trainer == task.trainer), None)
        if near is not None:
            mapped = tuple(one for one in near.settings if not one.startswith("data.env_name="))
            findings = examine(said, task.trainer, [*mapped, *chosen])
    return _looked_at(said, findings, mapped, task)


def _has_suffix(said: str) -> bool:
    return said.lower().removesuffix(".gz").endswith(tuple(READERS))


def _looked_at(
    path: str, findings: Findings, mapped: Sequence[str], task: StarterTask
) -> ChosenData:
    named = (f"data.train_data_path={json.dumps(path)}", *mapped)
    reading = findings.readings[0]
    report = reading.report
    if report is None:
        why = f"{shorten_middle(reading.problem, 300)}; ask laurel data check {shlex.quote(path)}"
        # Tests have columns of fixed names.
        could_be = task.environment != "code" and could_be_named(findings.raw.first, task.trainer)
        unnamed = KEYS_OF_COLUMNS[task.trainer] if could_be else ()
        if unnamed:
            why += f". Say which column is which, by {', '.join(unnamed)}: the file has lines to "
            why += "fill in"
        return ChosenData(settings=named, path=path, misfit=why, unnamed=unnamed)
    told = tuple(one for one in reading.settings if not one.startswith("data.env_name="))
    what = findings.known.name if findings.known is not None else report.dataset_class
    notes = [
        f"{path}: {what}, {report.num_kept:,} of {counted(report.num_read, 'row')} can be used"
    ]
    if mapped:
        notes.append(f"its columns are read by {', '.join(mapped)}")
    if NOT_WHAT_IS_RIGHT in report.notes:
        notes.append(f"{path} holds preferences: {NOT_WHAT_IS_RIGHT}")
    if reading.num_malformed:
        first = report.dropped["malformed"].examples[0]
        them = "it" if reading.num_malformed == 1 else "them"
        notes.append(
            f"{counted_that(reading.num_malformed, 'row', 'are')} malformed, and the run stops at "
            f"{first}: mend {them}, or set data.on_bad_row: skip"
        )
    held_out = share_held_out(report.num_kept) if report.num_prompts > 1 else 0.0
    if round(held_out * report.num_kept) < FEW_ROWS:
        notes.append(
            f"of so few rows about {held_out * report.num_kept:.0f} are held out to validate on, "
            "which tells little: name more under data.val_data_path where you have them"
        )
    return ChosenData(settings=(*named, *told), path=path, notes=tuple(notes), held_out=held_out)


def share_held_out(num_rows: int) -> float:
    """The share of a file's rows to validate on: of few rows more, up to a fifth."""
    return min(0.2, max(HELD_OUT, math.ceil(100 * FEW_ROWS / max(num_rows, 1)) / 100))


def _named_set(said: str, task: StarterTask) -> ChosenData:
    """A data set of the table, or of the hub."""
    if task.trainer == "rm":
        hubs = {name: one.hub_name for name, one in DATASET_CLASSES.items() if one.hub_name}
    else:
        hubs = {name: one.hub.name for name, one in TASK_SETS.items() if one.hub.name}
    if said in hubs:
        note = f"{said} is fetched from the Hugging Face hub ({hubs[said]}) when the run begins"
        brings_own = task.trainer == "rm" and DATASET_CLASSES[said].has_validation
        return ChosenData(
            settings=(f"data.dataset_name={said}",),
            notes=(note,),
            held_out=0.0 if brings_own else HELD_OUT,
        )
    if "/" not in said:
        near = nearest(said, hubs)
        hint = f" Did you mean {near}?" if near else ""
        raise DataError(
            f"--data {said}: there is no such file here, and no data set of that name.{hint} "
            f"Known are {', '.join(hubs)}; or give a file, or a hub name (owner/name)"
        )
    note = f"{said} is taken for a name on the hub; laurel data check {said} looks at it"
    return ChosenData(settings=(f"data.train_data_path={json.dumps(said)}",), notes=(note,))
