"""Whether settings that a page shows are settings: whole configurations, and parts of them."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from doc_blocks import ROOT, Block
from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section
from laurel.errors import ConfigError

RUNS: dict[str, type[Section]] = {"rm": RewardTrainingRun, "sft": SFTRun, "grpo": GRPORun}


def check_settings(block: Block) -> None:
    """A block of YAML parses; a schema takes it, unless it is a file, which a command reads."""
    for document in yaml.safe_load_all(block.text):
        if block.kind == "run" and isinstance(document, dict):
            wrong = problems(document)
            assert not wrong, f"{block.place}: {wrong}"


def problems(settings: dict[str, Any]) -> str | None:
    """Why no schema takes these settings; None where one does."""
    runs = list(RUNS.values())
    whole = [run for run in runs if settings and run.model_fields.keys() >= settings.keys()]
    whole = whole or [run for run in runs if _fits(settings, run)]
    if whole:
        told = [_told_by_loading(settings, run) for run in whole]
        return None if None in told else "; ".join(filter(None, told))
    parts = [section for section in _sections(Section) if _fits(settings, section)]
    if not parts:
        return f"no section has all of {sorted(settings)}"
    told = [_told_by_section(settings, part) for part in parts]
    return None if None in told else "; ".join(filter(None, told))


def _fits(settings: dict[str, Any], section: type[Section]) -> bool:
    known = {*section.model_fields, *section.foreign_keys}
    if section in RUNS.values():
        known |= {"defaults"} | {name.split(".")[0] for name in section.other_names}
    return bool(settings) and known >= settings.keys()


def _told_by_loading(settings: dict[str, Any], run: type[Section]) -> str | None:
    if "defaults" in settings:  # relative to the file; a page's stand at the root of a checkout
        settings = {**settings, "defaults": str(ROOT / settings["defaults"])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        try:
            load_config(run, path)
        except ConfigError as error:
            return str(error)
    return None


def _told_by_section(settings: dict[str, Any], section: type[Section]) -> str | None:
    try:
        section.model_validate(settings)
    except ValidationError as error:
        others = [told for told in error.errors() if told["type"] != "missing"]
        return f"{section.__name__}: {others}" if others else None
    return None


def _sections(base: type[Section]) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        yield section
        yield from _sections(section)


# ------------------------------------------------------------------ commands that are only shown


def laurel_commands(text: str) -> Iterator[list[str]]:
    """The arguments of each `laurel` of a block of bash."""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if re.match(r"\s*laurel\s", line):
            words = shlex.split(line, comments=True)
            ends = [
                i for i, word in enumerate(words) if word in ("|", ">", "&", "&&", ">>", "<", ";")
            ]
            yield words[1 : min(ends, default=len(words))]


def wrong_options(arguments: list[str]) -> str | None:
    """What `laurel` does not know of a command, which is not run."""
    import typer.main

    from laurel.cli.main import app

    command: Any = typer.main.get_command(app)
    rest, known = list(arguments), {"--help"}
    while True:
        known |= {name for option in command.params for name in option.opts}
        known |= {name for option in command.params for name in option.secondary_opts}
        below = getattr(command, "commands", {})
        if not below or not rest:
            break
        if rest[0] in below:
            command = below[rest.pop(0)]
        elif "show" in below:  # what `laurel config` does unless told otherwise
            command = below["show"]
        elif rest[0].startswith("-"):
            break
        else:
            return f"there is no command {rest[0]}"
    given = [word.split("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)]
    unknown = [word for word in given if word not in known]
    return f"{' '.join(arguments)}: no such option: {unknown}" if unknown else None


def wrong_overrides(arguments: list[str]) -> str | None:
    """What the schema says of a command that trains with a configuration of this checkout."""
    kind, *rest = arguments or [""]
    files = [rest[i + 1] for i, word in enumerate(rest[:-1]) if word in ("-c", "--config")]
    if kind not in RUNS or len(files) != 1 or not (ROOT / files[0]).is_file():
        return None
    overrides = [w for w in rest if re.match(r"[+~]{0,2}\w+(\.\w+)*=", w)]
    try:
        load_config(RUNS[kind], ROOT / files[0], overrides)
    except ConfigError as error:
        return f"{' '.join(arguments)}: {error}"
    return None
