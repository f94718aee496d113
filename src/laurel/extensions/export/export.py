"""`laurel export`: write a model as a plain Hugging Face directory, and verify it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from laurel.errors import CheckpointError, ConfigError, DataError, key_of, setting_of, speaking
from laurel.extensions.export.options import ExportOptions
from laurel.models.tokenizer import first_line
from laurel.observe.console import message_console, quiet_libraries, say_on
from laurel.observe.files import replace_directory
from laurel.observe.json_output import write_json
from laurel.rewards.spec import ModelPlace, Say, ScorerSpec, check_files, find_model
from laurel.run.model import model_spec
from laurel.run.specs import OPTIONS, policy_of_settings, scorer_spec

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from rich.console import Console

    from laurel.extensions.export.average import MemberAgreement
    from laurel.models.checkpoint.card import EvaluationTable

_MARK = "config.json"
"""A file of every model; a directory without it is not overwritten."""


def run_export(
    options: ExportOptions, *, hub: HfApi | None = None, messages: Console | None = None
) -> None:
    """Write a model as a directory that can be used without Laurel.

    Everything that needs no model is checked first. A directory that fails the test of its scores
    is not kept.

    Raises:
        UserError: A model, a directory, a setting or a login cannot be used, or the directory
            would give other scores.
    """
    messages = messages or message_console()

    say = say_on(messages)
    places = _find(options)
    for place in places:
        target = check_target(options.output, overwrite=options.overwrite, read_from=place.name)
    if options.push_to_hub is not None:
        from huggingface_hub import HfApi

        hub = hub or HfApi()
        check_hub(hub, options.push_to_hub)
    # Everything that can fail in seconds comes before the weights are loaded, which takes minutes.
    tables = _tables(options, places, say)
    with messages.status("checking the files of the model"):
        for place in places:
            for note in place.notes:
                say(note)
            check_files(place)
    with (
        messages.status("writing the model, and loading it with plain transformers"),
        speaking(OPTIONS),
        replace_directory(target) as directory,
    ):
        agreement = _write(directory, places, options, tables, say)
    say(f"written to {options.output}")
    if hub is not None and options.push_to_hub is not None:
        with messages.status(f"bringing it to {options.push_to_hub}"):
            push(hub, options.push_to_hub, target, private=options.private)
        say(f"pushed  to {options.push_to_hub}")
    if options.as_json:
        facts = {"model": place.source, "output": options.output, "hub": options.push_to_hub}
        if options.average:
            facts["model"] = [place.source for place in places]
            facts["agreement"] = None if agreement is None else asdict(agreement)
        write_json(facts)


def check_target(path: Path, *, overwrite: bool, read_from: str) -> Path:
    """Refuse a directory that could not be written, before any work is done.

    Returns:
        The path, links followed.

    Raises:
        ConfigError: The directory is not empty, or would replace the model that is read.
        DataError: The directory cannot be made.
    """
    option = setting_of("--output", path)
    target = Path(os.path.realpath(path.expanduser()))
    source = Path(os.path.realpath(Path(read_from).expanduser()))
    if source.is_dir() and (target == source or target in source.parents):
        raise ConfigError(f"{option} is, or holds, the model that is read ({source}); name another")
    # Only a model is ever replaced: a mistyped path must not delete somebody's files.
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ConfigError(
                f"{option} is there and not empty; name another directory, or add "
                f"{key_of('--overwrite')} to replace it"
            )
        if not (target / _MARK).is_file():
            raise ConfigError(
                f"{option} holds no model ({_MARK}), so {key_of('--overwrite')} does not delete "
                "it; name another directory, or delete it yourself"
            )
    elif target.exists() and not target.is_dir():
        raise ConfigError(f"{option} is a file; name a directory")
    # The nearest directory that exists decides whether the others can be made.
    nearest = target.parent
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise DataError(f"{option} cannot be made: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise DataError(f"{option} cannot be written: no permission in {nearest}")
    return target


def _find(options: ExportOptions) -> list[ModelPlace]:
    if options.average:
        from laurel.extensions.export.average import check_alike

        if options.model or options.step is not None:
            raise ConfigError(
                "--average writes the mean of the models that are named after it; leave out "
                "--model and --step, and name a checkpoint as RUN/step_N"
            )
        with speaking(OPTIONS):
            places = [find_model(name) for name in options.average]
        check_alike(places)
        return places
    if not options.model:
        raise ConfigError(
            f"no model is named; add {key_of('--model')} with a directory (of a model, a "
            "checkpoint, or a run with checkpoints) or a name on the Hugging Face hub"
        )
    name = options.model
    if options.step is not None:
        root = Path(name).expanduser()
        if not (root / f"step_{options.step}").is_dir():
            from laurel.models.checkpoint.store import steps_in

            steps = ", ".join(map(str, steps_in(root))) if root.is_dir() else ""
            raise ConfigError(
                f"--step {options.step}: {name} has no step_{options.step}. "
                + (f"It has the steps {steps}" if steps else "It holds no checkpoints")
            )
        name = str(root / f"step_{options.step}")
    with speaking(OPTIONS):
        return [find_model(name)]


def _tables(
    options: ExportOptions, places: Sequence[ModelPlace], say: Say
) -> Sequence[EvaluationTable]:
    """Read the evaluations for the card, and warn where one is of another model."""
    if not options.evaluations:
        return ()
    from laurel.extensions.export.evaluations import read_evaluations

    tables, models = read_evaluations(options.evaluations)
    names = {options.model, os.path.realpath(options.output.expanduser())}
    if not options.average:  # an evaluation of a member is none of the mean
        names |= {os.path.realpath(Path(options.model).expanduser()), places[0].name}
    for model in dict.fromkeys(models):
        if model not in names and os.path.realpath(Path(model).expanduser()) not in names:
            say(f"warning: an evaluation is of {model}, by its name not the model that is written")
    return tables


def _write(
    directory: Path,
    places: Sequence[ModelPlace],
    options: ExportOptions,
    tables: Sequence[EvaluationTable],
    say: Say,
) -> MemberAgreement | None:
    from laurel.extensions.export import writing
    from laurel.rewards.open import read_rules
    from laurel.workers.process import prepare

    prepare(options.device, cpu_threads=options.cpu_threads, seed=0)
    quiet_libraries()
    place = places[0]
    rules = read_rules(place)
    policy = policy_of_settings(options.settings or (), rules=rules, say=say)
    kind = _kind(place, safetensors_only=policy.safetensors_only)
    if kind == "policy":
        if tables:
            raise ConfigError(
                f"--eval is for reward models, and {place.source} writes text; leave it out"
            )
        writing.write_policy(directory, places, model_spec(policy), options, say)
        return None
    choice = ScorerSpec(
        max_length=options.max_length, precision=options.dtype, device=options.device
    )
    spec = scorer_spec(choice, policy)
    return writing.write_reward_model(directory, places, spec, options, tables, say)


def _kind(place: ModelPlace, *, safetensors_only: bool) -> Literal["reward model", "policy"]:
    """Find out the kind of a model from its files."""
    from laurel.models.loading.reward_model import find_value_head
    from laurel.models.scoring import FILE_NAME

    directory = Path(place.name)
    if (directory / FILE_NAME).is_file():
        return "reward model"
    if find_value_head(directory, safetensors_only=safetensors_only) is not None:
        return "reward model"
    try:
        if directory.is_dir():
            config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            architectures = config.get("architectures") or []
        else:
            from transformers import AutoConfig

            architectures = AutoConfig.from_pretrained(place.name).architectures or []
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the configuration of {place.name} cannot be read: {error}"
        ) from error
    # A classifier without Laurel's file scores by its template; everything else writes text.
    is_classifier = any(
        name.endswith(("ForSequenceClassification", "ForTokenClassification"))
        for name in architectures
    )
    return "reward model" if is_classifier else "policy"


def check_hub(api: HfApi, name: str) -> None:
    """Check the name of a repository and the login, before any work is done.

    Raises:
        ConfigError: The hub does not accept the name, or there is no login.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"--push-to-hub {name}: {first_line(error)} Give USER/MODEL, or MODEL for your own"
        ) from error
    # Asked now: without a login the upload would fail after all the work.
    try:
        api.whoami()
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network
        raise ConfigError(
            f"--push-to-hub {name}: the hub does not say who you are ({first_line(error)}). Log in "
            "with `hf auth login`, or put a token that may write into HF_TOKEN"
        ) from error


def push(api: HfApi, name: str, directory: Path, *, private: bool) -> None:
    """Create the repository where it is missing, and upload the files of a directory.

    Raises:
        DataError: The hub refuses; the directory stays as it is.
    """
    try:
        # An existing repository keeps its visibility.
        api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=str(directory), commit_message="Written by laurel export"
        )
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network
        raise DataError(
            f"{directory} is written, but could not be brought to {name}: {first_line(error)}. "
            f"Try again with: hf upload {name} {directory}"
        ) from error
