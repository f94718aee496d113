"""The model that a run begins from: found as every command finds models, before anything heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from laurel.cli.local_scorer import say_on
from laurel.distributed.claims import Run
from laurel.models.checkpoint_reading import steps_in
from laurel.models.manifest import MANIFEST_NAME
from laurel.observe.hub import check_fetchable
from laurel.rewards.load import Say, find_model

if TYPE_CHECKING:
    from rich.console import Console

R = TypeVar("R", bound=Run)
_INSTEAD = (
    ", or make a small one here: policy.model_name=null 'policy.scratch={}', with a higher "
    "learning rate (laurel init --scratch writes both)"
)


def with_found_model(config: R, console: Console) -> R:
    """The configuration of a run, with the checkpoint where `policy.model_name` names a run.

    Raises:
        UserError: There is no such model, or the hub that has it does not answer.
    """
    policy = config.policy
    if policy.scratch is not None or policy.model_name is None:
        return config
    saving = config.checkpointing
    goes_on = saving.enabled and steps_in(Path(saving.checkpoint_dir))
    if goes_on and not Path(policy.model_name).expanduser().is_dir():
        return config  # its checkpoint has the weights
    say = say_on(console)
    name = found_name(policy.model_name, say=lambda note: say(f"note    {note}"), instead=_INSTEAD)
    if name == policy.model_name:
        return config
    found = {"policy": policy.model_copy(update={"model_name": name})}
    return cast(R, config.model_copy(update=found))


def found_name(name: str, *, say: Say, instead: str = "") -> str:
    """What transformers loads for a name: of the directory of a run one of its checkpoints.

    Which one is as for `rewards.load.find_model`. Any other name stays as it was written: it is
    part of what a run is known by when it goes on.

    Args:
        name: A directory, or a name on the hub.
        say: Told which checkpoint was taken.
        instead: What else could be done where the hub does not answer.

    Raises:
        UserError: There is no such model, or the hub that has it does not answer.
    """
    place = find_model(name)
    directory = Path(name).expanduser()
    if not directory.is_dir():
        check_fetchable(name, key="policy.model_name", instead=instead)
        return name
    if any((directory / file).is_file() for file in (MANIFEST_NAME, "config.json")):
        return str(directory) if name.startswith("~") else name
    assert steps_in(directory), f"{name} is no run, and was found"
    for note in place.notes:
        say(note)
    return str(directory / Path(place.name).name)
