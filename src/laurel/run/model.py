"""The model that a run trains: in this process, or spread over the ranks of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from laurel.config.policy import ClusterConfig, PolicyConfig
from laurel.models.checkpoint.manifest import MANIFEST_NAME, steps_in
from laurel.observe.hub import check_fetchable
from laurel.rewards.open import Say, find_model, quiet_libraries
from laurel.run.places import Places
from laurel.run.schemas import Run
from laurel.run.scorer import say_on

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from laurel.training.learner import Learner
    from laurel.training.learner_group import Load, ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedModel:
    """A model with its optimizer, wherever it is."""

    learner: Learner
    facts: ModelFacts
    in_process: Any | None
    """The model itself; None where other processes hold it."""


def load_trained_model(
    policy: PolicyConfig,
    cluster: ClusterConfig,
    places: Places,
    *,
    load: Load,
    seed: int,
    identity: Mapping[str, object],
    resume_from: Path | None,
    console: Console,
    load_reference: Load | None = None,
    with_entropy: bool = False,
    check_room: Callable[[torch.device], None] | None = None,
) -> TrainedModel:
    """Load the model, check it, and build its optimizer.

    Args:
        policy: The policy section.
        cluster: Device and threads.
        places: Where the role `policy` works.
        load: See `LearnerWorker`.
        seed: Likewise.
        identity: See `RunState.identity`.
        resume_from: Checkpoint of the same run.
        console: Shows that something is going on.
        load_reference: See `LearnerWorker`.
        with_entropy: Likewise.
        check_room: Called with the device before a model is loaded into this process.
    """
    with console.status("loading torch and the model"):
        from torch import nn

        from laurel.training.learner_group import LearnerWorker
        from laurel.training.state import check_same_run
        from laurel.workers.process import choose_device
        from laurel.workers.rendezvous import Place

        quiet_libraries()
        if resume_from:
            check_same_run(resume_from, identity)
        check_optimizer(policy, nn.Linear(1, 1))
        settings: dict[str, Any] = {
            "policy": policy,
            "cluster": cluster,
            "seed": seed,
            "load_reference": load_reference,
            "with_entropy": with_entropy,
        }
        if not places.are_remote:
            from laurel.models.parallel.mesh import ParallelShape

            if check_room is not None:
                check_room(choose_device(cluster.device))
            worker = LearnerWorker(Place(role="policy"), load, shape=ParallelShape(), **settings)
            return TrainedModel(
                learner=worker.learner, facts=worker.describe(), in_process=worker.learner.model
            )
    return _spread(places, load, settings, console)


def _spread(
    places: Places, load: Load, settings: Mapping[str, Any], console: Console
) -> TrainedModel:
    from laurel.training.learner_group import LearnerGroup, LearnerWorker

    shape = places.shape_of("policy")
    with console.status(f"starting {shape.num_ranks} ranks of the policy"):
        group = places.group("policy", LearnerWorker, load, shape=shape, **settings)
        learner = LearnerGroup(group, shape)
    return TrainedModel(learner=learner, facts=learner.facts, in_process=None)


def check_optimizer(policy: PolicyConfig, model: Any) -> None:
    """What torch refuses is told before anything is loaded.

    Raises:
        ConfigError: An optimizer or scheduler that torch does not have, or refuses.
    """
    from laurel.training.optimizers import build_optimizer, build_scheduler

    optimizer = build_optimizer(policy.optimizer, list(model.named_parameters()))
    build_scheduler(policy.scheduler, optimizer)


def describe_model(
    kind: str, facts: ModelFacts, policy: PolicyConfig, places: Places, console: Console
) -> None:
    """Say what was loaded, and where it is."""
    trained = f", {facts.num_trained / 1e6:.2f}M trained"
    console.print(
        f"{kind:<7} {facts.class_name} from {facts.base_model}: "
        f"{facts.num_parameters / 1e6:.1f}M parameters"
        + (trained if facts.num_trained != facts.num_parameters else "")
        + f", {policy.precision} on {facts.device}"
    )
    for line in places.describe():
        console.print(f"places  {line}")
    if facts.path == "forest":
        check = f"self-check against one-by-one: {facts.self_check:.1e}"
        console.print(f"path    token forest; {check}")
    for note in facts.notes:
        console.print(note if note.startswith("warning: ") else f"note    {note}")


# --------------------------------------------------------------------------------------------------
# The model that a run begins from: found as every command finds models, before anything heavy.

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

    Which one is as for `rewards.open.find_model`. Any other name stays as it was written: it is
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
