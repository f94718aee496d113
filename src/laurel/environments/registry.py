"""Creates environments by their names; the core's own kind is that of reward models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from laurel import plugins
from laurel.config.environments import (
    CompositeEnvironmentConfig,
    CompositePart,
    EnvironmentsConfig,
    FoundEnvironment,
    RewardModelEnvironmentConfig,
)
from laurel.config.policy import NamedCall
from laurel.config.yaml_tree import nearest
from laurel.environments.interface import EnvironmentInterface, EnvironmentSpec, other_return
from laurel.errors import ConfigError, LaurelError
from laurel.observe.user_code import ForkGuard, check_form, error_with_line, import_object
from laurel.plugins import EnvironmentKind, EnvironmentServices
from laurel.protocols import Environment
from laurel.types import ToolSchemas

if TYPE_CHECKING:
    from laurel.data.tasks import RowSource
    from laurel.rewards.open import ScorerPlacement
    from laurel.workers.reservations import ClusterNodes


class ScoredByModel(EnvironmentKind):
    """Conversations scored by reward models, servers, a judge or a function."""

    section = RewardModelEnvironmentConfig

    def make(
        self, section: RewardModelEnvironmentConfig, services: EnvironmentServices
    ) -> Environment:
        """Return the environment."""
        from laurel.environments.reward_model_environment import RewardModelEnvironment

        return RewardModelEnvironment(
            section, device=services.device, opening=services.placement, say=services.say
        )

    def needs(
        self, section: RewardModelEnvironmentConfig
    ) -> Collection[Literal["answers", "tests"]]:
        """Return that tasks have answers, if the answer's score is subtracted."""
        return ["answers"] if section.transform.subtract_reference else []


OTHER_NAMES = {"math_default": "math"}
"""Further names of environments, as NeMo RL's files have them."""


def built_in() -> list[str]:
    """Return the names of Laurel's own environments that need no name of the user's."""
    kinds = plugins.names("environments")
    ours = [name for name in kinds if plugins.is_own("environments", name)]
    alone = [name for name in ours if not plugins.find(EnvironmentKind, name).several]
    return [*alone, *OTHER_NAMES]


_NEEDED = ("step", "global_post_process_and_metrics")
# Methods that an environment with a state defines, and one without does not.
_STATE = ("state_dict", "load_state_dict", "end_batch")
# Methods that are only called on environments that derive from the interface.
_OF_INTERFACE = (
    *_STATE,
    "close_conversations",
    "noise_floor",
    "step_noise_floor",
    "validate",
    "use_tokenizer",
    "resting",
)
# Attributes that were read before environments had a spec.
_REPLACED_BY_SPEC = ("judges", "stop_strings", "take_notes")


def register_env(name: str, class_path: str) -> None:
    """Register an environment class of the user under a name.

    The class is called with the settings in `env.<name>`: as keyword arguments if it takes them,
    otherwise as the one mapping that environments of NeMo RL take. Without any it is called without
    arguments. `env.custom.<name>` of a configuration takes precedence.

    Args:
        class_path: The path `module.Class` or `module:Class`, which is imported when the
            environment is created.

    Raises:
        ConfigError: The name is taken, or the path does not have that form.
    """
    if name in (*plugins.names("environments"), *OTHER_NAMES, *plugins.REGISTERED):
        raise ConfigError(
            f"an environment called '{name}' is already registered; call yours something else"
        )
    check_form(class_path, where=f"environment '{name}'")
    plugins.REGISTERED[name] = class_path


def row_sources(config: EnvironmentsConfig) -> dict[str, RowSource]:
    """Return what makes the rows of the data sets that packages bring, by the sets' names."""

    def of(name: str) -> RowSource:
        return lambda chosen: plugins.find(plugins.Rows, name).make(chosen, config)

    return {name: of(name) for name in plugins.names("rows")}


def environment_names(config: EnvironmentsConfig) -> list[str]:
    """Return all names that `create_environment` knows."""
    return list(dict.fromkeys([*config.names(), *OTHER_NAMES, *plugins.REGISTERED]))


def create_environment(name: str, config: EnvironmentsConfig) -> Environment:
    """Create the environment of this name.

    Raises:
        ConfigError: There is no such environment, or its settings are invalid.
    """
    return create_environments([name], config)[name]


def create_environments(
    names: Iterable[str],
    config: EnvironmentsConfig,
    *,
    device: str = "auto",
    opening: ScorerPlacement | None = None,
    nodes: ClusterNodes | None = None,
    say: Callable[[str], None] | None = None,
    max_turns: int | None = None,
) -> dict[str, Environment]:
    """Create the environments of these names; composites share their parts.

    `opening` places the processes of `reward_model`, and `nodes` run programs; None is this
    machine. `max_turns` are the policy's turns in a rollout.

    Raises:
        ConfigError: A name is unknown or ambiguous, or an environment cannot be created.
    """
    several = config.named()
    # What one key of `env` brings has its name alone.
    taken = {*plugins.names("environments"), *OTHER_NAMES} - several.keys()
    named: dict[str, str] = {}
    sections: dict[str, Iterable[str]] = {
        "custom": config.custom,
        "composite": config.composite,
        **several,
    }
    for section, own in sections.items():
        for name in own:
            if name in taken:
                raise ConfigError(
                    f"env.{section}.{name}: '{name}' is an environment of Laurel's or of a package "
                    "that is installed; call yours something else"
                )
            if name in named:
                raise ConfigError(
                    f"env.{named[name]} and env.{section} both have {name}; rename one of the two"
                )
            named[name] = section
    services = EnvironmentServices(
        name="",
        device=device,
        max_turns=max_turns,
        timeout_seconds=config.timeout_seconds,
        max_observation_chars=config.max_observation_chars,
        say=say,
        placement=opening,
        nodes=nodes,
    )
    # An environment that is named both by itself and as a part of a composite is made once. Each
    # may be shut down, since `shutdown` is idempotent.
    made: dict[str, Environment] = {}

    def environment_of(name: str, inside: tuple[str, ...] = ()) -> Environment:
        """Return the environment of a name; `inside` are the composites that contain it."""
        name = OTHER_NAMES.get(name, name)
        if name in inside:
            raise ConfigError(
                f"env.composite: '{name}' is part of itself ({' -> '.join([*inside, name])}); take "
                "it out of one of these"
            )
        if name not in made:
            made[name] = make(name, inside)
        return made[name]

    def make(name: str, inside: tuple[str, ...]) -> Environment:
        # The configuration takes precedence over what a program registered.
        if name in config.custom:
            return _checked(name, _called(f"env.custom.{name}", config.custom[name]))
        if name in config.composite:
            from laurel.environments.composite import CompositeEnvironment

            settings = config.composite[name]
            for part in settings.parts:
                one = config.found(part.env)
                if (
                    one is not None
                    and one.kind.must_be_graded
                    and settings.conducted_by != part.env
                    and one.kind.graded_by(one.section) is None
                ):
                    raise ConfigError(
                        f"env.composite.{name}: the others would score before {one.where} has "
                        f"answered the policy: set env.composite.{name}.conducted_by={part.env}, "
                        f"or {one.where}.graded_by"
                    )
            parts = {part.env: environment_of(part.env, (*inside, name)) for part in settings.parts}
            return CompositeEnvironment(settings, parts)
        if (found := config.found(name)) is not None:
            return of_kind(name, found, inside)
        if name in several or name in plugins.names("environments"):
            raise ConfigError(
                f"'{name}' is a kind of environments: write one of them under env.{name}, by a "
                "name of your own, and use that name"
            )
        if name in plugins.REGISTERED:
            call = NamedCall(name=plugins.REGISTERED[name], kwargs=config.get(name) or {})
            return _checked(name, _called(f"env.{name}", call, may_be_one=True))
        known = environment_names(config)
        near = nearest(name, known)
        raise ConfigError(
            f"no environment is called '{name}'"
            + (f", as '{inside[-1]}' names one" if inside else "")
            + (f"; did you mean '{near}'?" if near else ".")
            + f" Known are {', '.join(known)}; "
            "add your own under env.custom or with register_env()."
        )

    def of_kind(name: str, found: FoundEnvironment, inside: tuple[str, ...]) -> Environment:
        """Return what a plug-in makes, with the environment that grades it, if any."""
        judge = found.kind.graded_by(found.section)
        if found.kind.must_be_graded and judge is None and not inside:
            raise ConfigError(
                f"{found.where} grades nothing: set {found.where}.graded_by to the environment "
                "that grades the final answer, such as math"
            )
        parts = {} if judge is None else {judge: environment_of(judge, (*inside, name))}
        own = _checked(name, found.kind.make(found.section, replace(services, name=name)))
        return conducted(name, own, parts) if parts else own

    def conducted(
        name: str, conductor: Environment, parts: Mapping[str, Environment]
    ) -> Environment:
        """Return the composite in which one environment leads and the others score the end."""
        from laurel.environments.composite import CompositeEnvironment

        everything = {name: conductor, **parts}
        settings = CompositeEnvironmentConfig(
            parts=[CompositePart(env=one) for one in everything], conducted_by=name
        )
        return CompositeEnvironment(settings, everything)

    try:
        return {name: environment_of(name) for name in dict.fromkeys(names)}
    except BaseException:
        for environment in made.values():
            environment.shutdown()
        raise


class ShownTools(NamedTuple):
    """The functions of one section of `env` that prompts show."""

    where: str
    """The section."""
    schemas: ToolSchemas


def shown_tools(name: str, config: EnvironmentsConfig) -> list[ShownTools]:
    """Return the functions that the prompts of an environment show, by section.

    Raises:
        ConfigError: A function cannot be imported or described.
    """
    if (found := config.found(name)) is not None:
        tools = found.kind.tools(found.section, EnvironmentServices(name=name))
        return [ShownTools(found.where, tools)] if tools else []
    parts = config.composite[name].parts if name in config.composite else ()
    return [one for part in parts if part.env != name for one in shown_tools(part.env, config)]


def imported(path: str, where: str) -> Callable[..., Any]:
    """Import the callable that a path names; messages call the key of the path `where`."""
    found = import_object(path, where=where)
    # A run calls its environments in threads, and Ray's class could only be made into an actor: so
    # under `@ray.remote` the class itself is taken.
    in_actor = getattr(getattr(found, "__ray_metadata__", None), "modified_class", None)
    if in_actor is not None:
        found = getattr(in_actor, "__ray_actor_class__", in_actor)
    if not callable(found):
        raise ConfigError(f"{where}: '{path}' is {type(found).__name__}, not a class")
    made: Callable[..., Any] = found
    return made


def _called(where: str, call: NamedCall, *, may_be_one: bool = False) -> Any:
    """Call a class of the user's.

    With `may_be_one` the arguments are given as one mapping where it does not take them by name.
    """
    make = imported(call.name, where)
    as_one = may_be_one and call.kwargs and not _takes(make, call.kwargs)
    try:
        with ForkGuard():
            return make(dict(call.kwargs)) if as_one else make(**call.kwargs)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in call.kwargs.items())
        given = given or "no arguments"
        hint = (
            ". An environment is a class; a function that scores goes under env.reward_model: "
            "function.path=MODULE:FUNCTION, enabled=true"
        )
        raise ConfigError(
            f"{where}: {call.name} cannot be called with {given}: {error}"
            + (hint if inspect.isfunction(make) else "")
        ) from error
    except LaurelError:  # its message says what is wrong
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: {call.name} cannot be made: {error_with_line(error)}"
        ) from error


def _takes(make: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError:
        return False
    return True


class TwoMethods(EnvironmentInterface):
    """Wraps an object that has only the method `step` and that for metrics, as an environment."""

    step: Any = None
    global_post_process_and_metrics: Any = None

    def __init__(self, made: Any) -> None:
        """Take the two methods of the object, and its `shutdown` if it has one."""
        # The methods stay those of their class, so that an error names the class and the line.
        self.step = made.step
        self.global_post_process_and_metrics = made.global_post_process_and_metrics
        self._shutdown: Callable[[], None] = getattr(made, "shutdown", lambda: None)

    def shutdown(self) -> None:
        """Call the object's own `shutdown`, if it has one."""
        self._shutdown()


def _checked(name: str, made: Any) -> Environment:
    """Check that a created object is an environment, and return it as one.

    Raises:
        ConfigError: The object lacks a method, has a method that is never called, or would silently
            lose its state at a checkpoint.
    """
    where = f"environment '{name}': {type(made).__name__}"
    missing = [method for method in _NEEDED if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(
            f"{where} lacks {', '.join(missing)}; derive it from "
            "laurel.environments.interface.EnvironmentInterface"
        )
    if isinstance(made, EnvironmentInterface):
        environment: EnvironmentInterface = made
        ignored = [one for one in _REPLACED_BY_SPEC if hasattr(made, one)]
        ignored += [] if callable(made.noise_floor) else ["noise_floor"]
    else:
        environment = TwoMethods(made)
        ignored = [one for one in (*_REPLACED_BY_SPEC, *_OF_INTERFACE) if hasattr(made, one)]
        ignored += ["spec"] if isinstance(getattr(made, "spec", None), EnvironmentSpec) else []
    if ignored:
        raise ConfigError(
            f"{where} has {', '.join(ignored)}, which would be ignored: derive it from "
            "laurel.environments.interface.EnvironmentInterface, and let its `spec`, an "
            "EnvironmentSpec, say what it judges, its stop strings, its noise floor and whether it "
            "has a state; what its metrics need of conversations goes into `notes` of what `step` "
            "returns"
        )
    if (found := other_return(made.step)) is not None:
        raise ConfigError(
            f"{where}.step ({found}), and expected is an EnvironmentReturn with the six as its "
            "first arguments: from laurel.environments.interface import EnvironmentReturn"
        )
    spec, methods = environment.spec, type(environment)
    if not isinstance(spec, EnvironmentSpec):
        raise ConfigError(f"{where}: its spec is {spec!r}, and must be an EnvironmentSpec")
    own = [m for m in _STATE if getattr(methods, m) is not getattr(EnvironmentInterface, m)]
    if spec.has_state and len(own) < len(_STATE):
        raise ConfigError(
            f"{where} has a state, as its spec says, but not all of {', '.join(_STATE)}: what it "
            "remembers would be lost when the run is resumed"
        )
    if own and not spec.has_state:
        raise ConfigError(
            f"{where} has {', '.join(own)}, but no state, as its spec says: what it remembers "
            "would be lost when the run is resumed. Set has_state=True in its EnvironmentSpec"
        )
    for attribute, inside in getattr(made, "__dict__", {}).items():
        if isinstance(inside, EnvironmentInterface) and inside.spec.has_state > spec.has_state:
            raise ConfigError(
                f"{where} wraps a {type(inside).__name__} ({attribute}), and does not pass on its "
                "state, which would be lost when the run is resumed. Define "
                f"{', '.join(_STATE)}, e.g. by calling those of the environment inside, and set "
                "has_state=True in its EnvironmentSpec"
            )
    return environment
