"""The table of what is plugged into Laurel, found by name without importing what is not used.

A package declares its plug-ins as Python entry points, in its `pyproject.toml`::

    [project.entry-points."laurel.losses"]
    mine = "my_package.losses:Mine"

and `loss_fn.loss_type=mine` uses the class `Mine`, which derives from the base class of its kind
here (`Loss`). Laurel's own stand in the same table, declared in Laurel's own `pyproject.toml`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import sys
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from laurel import __version__
from laurel.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from types import ModuleType

    import typer
    from torch import Tensor

    from laurel.protocols import Generator, MetricLogger, Scorer, WorkerGroup

OWN = "laurel-rl"
"""The name of Laurel's own distribution."""
PREFIX = "laurel."


class Plugin(ABC):
    """A plug-in of any kind. Its class is imported when its name is used, so it imports little.

    The docstring of the class says what it does, and stands in the generated documentation.
    """

    section: ClassVar[type[Any] | None] = None
    """The settings that it brings, a `Section`; they stand under the plug-in's name, beside the key
    that chooses it. None: it has no settings."""

    @abstractmethod
    def make(self, section: Any, given: Any, /) -> Any:
        """Create what is used, from the plug-in's own settings and what its kind says."""


class Choice(Plugin):
    """A plug-in that a key of a section chooses, beside keys that may not fit it."""

    def check(self, settings: Any) -> None:
        """Check the section that chooses the plug-in, such as `loss_fn`.

        Raises:
            ValueError: Its keys do not fit together; the message says what to change.
        """


class Loss(Choice):
    """A loss of a policy: the term of a token, without its weight (`loss_fn.loss_type`).

    The divergence from the reference policy, the correction by importance sampling, the divisor and
    the metrics are the same for all.
    """

    clips: ClassVar[bool] = True
    """Whether `ratio_clip_min` and `ratio_clip_max` are read; then clipped ratios are counted."""
    of_completions: ClassVar[bool] = False
    """Whether all tokens of a completion have one loss. Then `token_level_loss: true` and
    advantages of tokens are refused."""

    def unread(self, settings: Any) -> dict[str, str]:
        """Return the keys of `loss_fn` that are not read with this loss, with the reasons.

        A run in which one of them is set is refused.
        """
        return {}

    @abstractmethod
    def make(self, section: Any, settings: Any) -> Callable[[Any], Tensor]:
        """Return the function from `training.policy_loss.TokenValues` to the losses of tokens [U].

        Args:
            settings: The whole section `loss_fn`.
        """


class PreferenceLoss(Choice):
    """A loss of a reward model (`rm.loss.type`)."""

    reads: ClassVar[Literal["pairs", "lists", "ratings", "steps"]] = "pairs"
    """What it is computed from, which decides the arguments of the function that `make` returns:

    - `pairs`: `training.losses.ScoredPairs`, for the losses of pairs [P]
    - `lists`: scores [N] and their `training.losses.PairIndex`, for the losses of groups [B]
    - `ratings`: predictions and targets [N, K], for the losses of completions [N]
    - `steps`: the logits of steps [S] and the labels of each answer, for losses that are added up
    """
    uses_ties: ClassVar[bool] = False
    """Whether it learns from completions of the same rank."""
    keys: ClassVar[Collection[str]] = ()
    """What it reads of those keys of `rm.loss` that not all losses read."""

    @abstractmethod
    def make(self, section: Any, settings: Any) -> Callable[..., Tensor]:
        """Return the function that computes the loss, which is never divided by a batch.

        Args:
            settings: The whole section `rm.loss`.
        """

    def count_steps(self, steps_NS: Sequence[Sequence[float]]) -> int:
        """Return what the labels of answers add to the divisor, for a loss of steps.

        It is the number of labelled steps, if a loss does not say otherwise.
        """
        return sum(not math.isnan(label) for steps_S in steps_NS for label in steps_S)


class Advantage(Choice):
    """An estimator of advantages (`grpo.adv_estimator.name`); it checks the section `grpo`."""

    reads_components: ClassVar[bool] = False
    """Whether it compares the named components of the reward instead of their total."""
    compares_steps: ClassVar[bool] = False
    """Whether `per_step` is possible: each step is compared with those of its group."""
    whitens: ClassVar[bool] = False
    """Whether it divides by the deviation of the whole batch, whatever `scale` says. Then a
    baseline is no must."""
    divides: ClassVar[bool] = True
    """Whether it divides by the deviation that `scale` names; otherwise `scale` is refused."""
    baseline: ClassVar[Literal["mean", "own", "greedy"]] = "mean"
    """What is subtracted from a reward:

    - `mean`: the mean of the group, or of its other completions (`use_leave_one_out_baseline`)
    - `own`: what the estimator makes of the group
    - `greedy`: the reward of a completion that is sampled besides, at temperature 0
    """
    compares_branches: ClassVar[bool] = False
    """Whether it reads where completions branched, and so needs `grpo.tree`."""
    keys: ClassVar[Collection[str]] = ()
    """What it reads of those keys of `grpo.adv_estimator` that not all estimators read."""

    def keys_of_tokens(self, section: Any) -> list[str]:
        """Return the settings by which the tokens of a completion get different advantages."""
        return []

    def without_effect(self, settings: Any) -> dict[str, str]:
        """Return the keys of `grpo` that are set and not read with this estimator, with reasons.

        The run warns of them.
        """
        return {}

    @abstractmethod
    def make(self, section: Any, settings: Any) -> Callable[[Any], Any]:
        """Return the function from `grpo.advantages.Rewards` to its advantages, a `Compared`.

        Args:
            settings: The `grpo.advantages.AdvantageRule` of the run.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerServices:
    """The run that a logger is opened for."""

    run_dir: Path
    """Its directory, in which a logger may keep files."""
    resumed_step: int | None = None
    """The step from which the run resumes; None: it begins."""


class Logger(Plugin):
    """A destination of metrics, on with `logger.<name>_enabled`."""

    package: ClassVar[str | None] = None
    """The package that it imports, which is looked for before a run begins."""
    extra: ClassVar[str | None] = None
    """The extra of Laurel that installs that package."""

    @abstractmethod
    def make(self, section: Any, run: LoggerServices) -> MetricLogger:
        """Open the logger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedServers:
    """What a dialect may need to know about the servers that it speaks to."""

    model: str
    """What the servers call the model; empty: they need no name."""
    reward_key: str
    """`env.reward_model.reward_key`."""
    contract: Any
    """The `models.scoring.ScoringContract` that renders conversations; None: no model is named."""
    preparers: Any
    """Tokenise in other processes; None: this process does."""


class ServerDialect(Choice):
    """A protocol of reward servers, from the client's side (`env.reward_model.url_protocol`)."""

    rendered: ClassVar[Literal["never", "with_model", "always"]] = "never"
    """Whether the servers are sent conversations that the reward model's own template rendered;
    `with_model`: if `model_name` names it, and otherwise they render themselves."""
    keys: ClassVar[Collection[str]] = ()
    """What it reads of those keys that not all dialects read: `reward_key`."""

    @abstractmethod
    def make(self, section: Any, servers: AskedServers) -> Any:
        """Return a `rewards.remote.dialects.Dialect`.

        Args:
            servers: What is known of the servers.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedFunction:
    """The function whose calls a reward manager makes."""

    where: str
    """Its section, for messages."""
    function: Callable[..., Any] | None
    """The function itself; None: it is in processes of its own (`num_workers`)."""
    kwargs: Mapping[str, Any]
    """The arguments that each call has besides those of the completion."""
    timeout: float
    """Seconds of one call."""


class RewardManager(Choice):
    """Makes the calls of a function that scores (`env.reward_model.function.manager`)."""

    @abstractmethod
    def make(self, section: Any, function: ManagedFunction) -> Callable[[Any, Any], Any]:
        """Return the async function that scores: `await scored(arguments, call)`.

        It is given the arguments of a completion, a mapping, and the call: `await call(arguments)`
        calls the function once, within its timeout, and returns its `types.Score`s, as a tuple. It
        may wait, call again or change what it is given, and returns such a tuple. No more than
        `max_concurrent` of it run at a time.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerServices:
    """What a source of scores is opened with."""

    where: str
    """Its section, for messages."""
    device: Any = "auto"
    """Where a model computes: `auto`, `cpu` or `cuda`."""
    num_workers: int = 0
    """`env.reward_model.num_workers`, the processes beside this one."""
    is_elsewhere: bool = False
    """Whether models are placed on a cluster, where this process has no device."""
    make_server: Callable[[int], Callable[..., WorkerGroup]] | None = None
    """Returns what makes a worker group of one in the slots of a replica of `server`, by its
    number; None: it is a process of this machine."""
    say: Callable[[str], None]
    """Called with a line on all that was loaded, found and decided."""
    server: Any = None
    """The model that the run serves for the source, a `config.environments.ModelServerConfig`."""
    source: Any = None
    """The section that the settings stand in, a `config.environments.ScorerSource`: which model it
    is, where it is, and how it is loaded or asked."""


class ScoreSource(Plugin):
    """What gives scores in place of a reward model (`env.reward_model.<name>`)."""

    def check(self, section: Any, where: str) -> None:
        """Check the settings before anything is loaded; `where` is the section, for messages.

        Raises:
            ConfigError: They cannot be used.
        """

    @abstractmethod
    def make(self, section: Any, services: ScorerServices) -> Scorer:
        """Open the source.

        Args:
            services: Where it computes, and how it is named.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """What an engine starts from, in the process that generates."""

    directory: str
    """The weights and the tokenizer as Hugging Face's files; or, where the weights are never
    replaced, a name on the hub or a GGUF file."""
    spec: Any
    """The `generation.load.GeneratorSpec`: the section `policy.generation`, lengths, seed."""
    precision: str
    """The dtype in which the learner computes, `policy.precision`."""
    probe: Any = None
    """Computes the learner's log-probabilities of tokens, with which the engine compares its own
    after every change of weights, a `generation.weights.probe.Probe`; None: its caller does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What one replica of an engine takes, for the plan of a run.

    The plan proposes keys of the engine's settings by the names that vLLM has for them:
    `tensor_parallel_size`, `pipeline_parallel_size` and `gpu_memory_utilization`.
    """

    tensor_parallel_size: int = 1
    """Devices of one node that share each layer."""
    pipeline_parallel_size: int = 1
    """Devices of one node that share the layers."""
    precision: Any = None
    """Dtype of its weights; None: `policy.precision`."""
    max_length: int | None = None
    """Longest prompt with its completion; None: `policy.max_total_sequence_length`."""
    memory_share: float = 0.9
    """Share of a device's memory that it takes for weights and keys and values."""
    through_host: bool = False
    """Whether new weights reach it through the memory of the host only."""

    @property
    def num_devices(self) -> int:
        """Number of devices that one copy of the model is spread over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Engine(Choice):
    """An engine that samples with weights of its own (`policy.generation.backend`).

    Its settings are `policy.generation.<name>_cfg`; it checks the section `policy`. `transformers`
    is none: it samples with the learner's own model.
    """

    package: ClassVar[str | None] = None
    """The package that it imports, which is looked for before a run begins."""
    extra: ClassVar[str | None] = None
    """The extra of Laurel that installs that package."""
    is_automatic: ClassVar[bool] = False
    """Whether `backend: auto` chooses it, where its package is installed and there is a GPU; read
    of Laurel's own only."""

    @abstractmethod
    def make(self, section: Any, start: EngineStart) -> Generator:
        """Start the engine.

        Args:
            start: The weights, and how they are sampled from.

        Raises:
            EngineError: It does not start.
        """

    def needs(self, section: Any) -> EngineNeeds:
        """Return what a replica takes of the devices."""
        return EngineNeeds()

    @property
    def is_installed(self) -> bool:
        """Report whether the package is there."""
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def check_installed(self, key: str) -> None:
        """Raise an error if the package is not installed; `key` is the setting that needs it.

        Raises:
            MissingDependencyError: It is not installed.
        """
        if self.is_installed:
            return
        assert self.package is not None
        if self.extra is not None:
            raise MissingDependencyError.of(self.package, extra=self.extra, purpose=key)
        raise MissingDependencyError(
            f"{key} needs the package '{self.package}', which is not installed. "
            f"Install it with: pip install {self.package}"
        )


class EngineThatScores(Engine):
    """An engine that also computes reward models and judges, whose weights never change."""

    scoring_section: ClassVar[type[Any] | None] = None
    """Its settings for that, as `<name>_cfg` of `env.reward_model.generation`."""

    @abstractmethod
    def open_scorer(self, section: Any, model: Any, say: Callable[[str], None]) -> Any:
        """Return a `rewards.scorer.ModelScorer` of a reward model.

        Args:
            section: The settings, a `scoring_section`.
            model: The `rewards.spec.ScorerSpec` whose model has been found.
            say: Called with a line on all that was loaded and found.
        """

    @abstractmethod
    def for_judge(self, section: Any, judge: Any) -> Any:
        """Return the plug-in's own settings with which it computes a judge.

        Args:
            section: The settings, a `scoring_section`.
            judge: The section `judge`.

        Raises:
            ValueError: It cannot compute as the section asks.
        """

    def check_room(self, section: Any) -> None:
        """Check that a `scoring_section` leaves room on a GPU that the policy trains on.

        Raises:
            ValueError: It does not; the message says what to set.
        """


class EngineThatServes(Engine):
    """An engine whose server answers functions that ask a model (`env.reward_model.server`)."""

    @abstractmethod
    def serve_command(
        self, section: Any, host: str, port: int, *, on_gpu: bool, rests: bool
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command of one server, and the environment variables that it needs.

        It answers `GET /health` when it is ready.

        Args:
            section: A `config.environments.ModelServerConfig`.
            host: Address at which it listens, and no other.
            port: Its port there.
            on_gpu: Whether it has GPUs, the first that its process sees; else the CPU.
            rests: Whether it is asked to free its GPU's memory: `POST /sleep?level=1`, `/wake_up`.
        """

    def served_needs(self, section: Any) -> EngineNeeds:
        """Return what one server takes of its devices, by default a tenth less than all.

        Args:
            section: A `config.environments.ModelServerConfig`.
        """
        return EngineNeeds(tensor_parallel_size=section.tensor_parallel_size)


class ModelEndpoint(Protocol):
    """The servers of a model that the run serves, behind one address."""

    section: Any
    """Its `config.environments.ModelServerConfig`."""

    @property
    def rests(self) -> bool:
        """Whether a server has GPUs of the policy's, and frees their memory for it."""

    @property
    def address(self) -> str:
        """Return `HOST:PORT`."""

    def resting(self) -> AbstractContextManager[None]:
        """Free the servers' memory of devices while the context is open."""

    def close(self) -> None:
        """End all servers. Idempotent."""


class ModelServing(Plugin):
    """What starts the servers of a model, watches them and gives them one address."""

    @abstractmethod
    def make(self, section: Any, services: ScorerServices) -> ModelEndpoint:
        """Start the servers, and wait until they answer.

        Args:
            section: A `config.environments.ModelServerConfig`.
            services: Where they compute, and how their section is named.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentServices:
    """What a run has for the environments that it creates."""

    name: str
    """The name of the environment in tasks."""
    device: Any = "auto"
    """Where a model computes: `auto`, `cpu` or `cuda`."""
    max_turns: int | None = None
    """The policy's turns in a rollout."""
    timeout_seconds: float = 600.0
    """Seconds of one step of an environment, after which all of it fails."""
    max_observation_chars: int = 4096
    """Longest message of an environment that the policy sees."""
    say: Callable[[str], None] | None = None
    """Prints a line about what takes long."""
    placement: Any = None
    """Places the processes of models, a `rewards.open.ScorerPlacement`; None: this machine."""
    nodes: Any = None
    """Run programs, `workers.reservations.ClusterNodes`; None: this machine."""


class EnvironmentKind(Plugin):
    """A kind of environment, whose settings are `env.<name>`."""

    several: ClassVar[bool] = False
    """Whether its key holds several environments, by names of the user's own, each with the
    section of the kind. Otherwise the kind is the one environment, and has its name."""
    must_be_graded: ClassVar[bool] = False
    """Whether it scores nothing itself: it is part of a composite, or `graded_by` names one."""
    tests: ClassVar[Collection[str]] = ()
    """The keys of a task's metadata that may hold tests which it runs."""
    solution: ClassVar[str] = ""
    """The key of a task's metadata with a solution that `validate` runs against the tests."""

    def check(self, section: Any, run: Any, where: str) -> None:
        """Check that the settings fit the run, such as the policy's turns.

        Args:
            run: The configuration of the run, a `config.grpo_run.GRPORun`.
            where: The key of the settings.

        Raises:
            ValueError: They do not; the message says what to change.
        """

    @abstractmethod
    def make(self, section: Any, services: EnvironmentServices) -> Any:
        """Return the environment, a `protocols.Environment`."""

    def needs(self, section: Any) -> Collection[Literal["answers", "tests"]]:
        """Return what every task has to have: a known answer, or tests."""
        return ()

    def problem_of(self, section: Any, metadata: Mapping[str, Any]) -> str | None:
        """Return why it cannot grade a task, as far as the metadata alone say; None if it can."""
        return None

    def graded_by(self, section: Any) -> str | None:
        """Return the environment that scores the end of conversations that this one conducts."""
        return None

    def tools(self, section: Any, services: EnvironmentServices) -> Any:
        """Return the functions that prompts show, `types.ToolSchemas`, before the run begins.

        A kind that shows any has the key `form`, which says how calls are written.
        """
        return ()


class Rows(Plugin):
    """A data set of tasks whose rows a package makes (`data.dataset_name`).

    If an environment has the same name, it grades the tasks for which no other is named.
    """

    first_settings: ClassVar[Mapping[str, str]] = {}
    """Keys with values that `laurel init --data NAME` writes, besides the data set's name."""
    keys: ClassVar[Collection[str]] = ()
    """What it reads of those keys of a set that not all data sets read: `tasks`."""
    endless: ClassVar[bool] = False
    """Whether it makes rows without end, which `seed` and `split_validation_size` divide between
    training and validation."""
    to_do: ClassVar[str] = ""
    """What a person has to do about these."""

    @abstractmethod
    def make(self, chosen: Any, environments: Any) -> Any:
        """Return the rows, a `data.tasks.MadeRows`.

        Args:
            chosen: The settings of the set, a `TaskSetConfig`.
            environments: The section `env`.
        """


class TaskForm(Plugin):
    """A form of rows that are tasks, in files or in a data set (`data.dataset_name`)."""

    hub: ClassVar[str] = ""
    """The data set's name on the hub; empty: its rows stand in files alone."""
    processor: ClassVar[str] = ""
    """The name by which `data.processor` chooses it for any data set, of Laurel's own forms alone;
    empty: none."""
    has_tests: ClassVar[bool] = False
    """Whether its rows hold tests in other forms than the metadata keys of an environment, which
    messages then name; of Laurel's own forms alone."""
    otherwise: ClassVar[Collection[str]] = ()
    """Columns that it reads and whose texts do not come up in the task as they are."""

    @abstractmethod
    def make(self, section: None, name: str) -> Callable[[Any, Any], Any]:
        """Return the function from a row, a mapping, and its `TaskSetConfig` to a task.

        It returns `data.task_formats.TaskParts`, and raises `data.sources.UnusableRow` for a row
        that is not of the form.

        Args:
            section: A form has no settings but those of the set.
            name: The name that it was declared with.
        """


class BenchmarkKind(Plugin):
    """A benchmark of reward models (`benchmark` of a validation set)."""

    @abstractmethod
    def make(self, section: None, name: str) -> Any:
        """Return the benchmark, an `evaluation.benchmarks.Benchmark`.

        Args:
            section: A benchmark has no settings.
            name: The name that it was declared with.
        """


class Command(Plugin):
    """A command, or a group of commands, whose name is what is written after `laurel`.

    A name of two words is a command in one of Laurel's own groups, such as `config import`. The
    class is imported for `laurel --help`, so its module imports nothing heavy.
    """

    after: ClassVar[str] = ""
    """The command below which it stands in the help; empty: it stands below all others."""

    @abstractmethod
    def make(self, section: None, name: str) -> Callable[..., Any] | typer.Typer:
        """Return the command: a function, as typer takes it, or a `typer.Typer` for a group.

        The docstring of the function is the command's help. A function that has a parameter
        `as_json` keeps stdout for JSON where that is true.

        Args:
            section: A command has no settings but its options.
            name: The name that it was declared with.
        """

    def for_programs(self) -> ModuleType:
        """Return the module with what it does as functions, where `laurel.api` has them.

        Raises:
            NotImplementedError: It is for the command line alone, which is the default.
        """
        raise NotImplementedError(f"{type(self).__name__} is for the command line alone")


class Importer(Plugin):
    """Another system, whose configurations `laurel config import --from <name>` translates."""

    title: ClassVar[str]
    """The system's name for people."""
    devices_of_option: ClassVar[bool] = False
    """Whether its files do not say how many processes there are, so that `--devices` does."""
    is_sure: ClassVar[bool] = False
    """Whether a file that has `own_keys` is of this system, whatever others know of it."""

    @abstractmethod
    def own_keys(self, values: Mapping[str, Any]) -> Sequence[str]:
        """Return the keys of a file that this system knows; without any it is not of this system.

        A file for which no system is named is of the one that knows the most of its keys.
        """

    @abstractmethod
    def make(self, section: None, source: Any) -> Any:
        """Return the configuration of Laurel that another system's becomes.

        Args:
            section: An importer has no settings.
            source: What is imported, a `laurel.extensions.importing.rules.Source`.

        Returns:
            A `laurel.extensions.importing.rules.Imported`.
        """

    def keys_beside(self, section: type[Any]) -> Mapping[str, str]:
        """Return keys of this system that a section accepts and does not read, with the reasons.

        With this method, `adapt` and `unread`, commands read its files as they are, without
        `laurel config import`.
        """
        return {}

    def adapt(self, schema: type[Any], work: Any, problems: list[str]) -> None:
        """Translate the settings of a file that has keys of this system.

        Args:
            work: The file, a `laurel.config.other_systems.Adapted`, which is changed.
            problems: What is wrong in the file, to which more may be added.

        Raises:
            ConfigError: The file asks for features that Laurel does not have.
        """

    def unread(self, tree: Any, ignored: Sequence[str]) -> list[Any]:
        """Return a `laurel.config.other_systems.UnreadKey` for each key that is ignored.

        Args:
            tree: The file after `adapt`, a `laurel.config.yaml_tree.YamlNode`.
            ignored: The keys of `keys_beside` in the file, dotted from its top.
        """
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """A model in whose files a reward head is looked for."""

    directory: Path
    config: Mapping[str, Any]
    """Its `config.json`."""
    safetensors_only: bool
    """Whether pickled weights are refused."""


class ForeignHead(ABC):
    """A reward head that another program saved, and how that program scores with it."""

    program: str
    """The program's name for people."""
    is_apart: bool
    """Whether `put_into` copies the head; if not, transformers loads it with the model."""
    truncation_side: Literal["left", "right"] | None = None
    """The side on which the program truncates long texts; None: it cuts out the middle."""
    mean: float | None = None
    """The mean of the scores, as the program measured it; None if unknown."""
    std: float | None = None
    """Their standard deviation."""

    @abstractmethod
    def describe(self) -> str:
        """Return a sentence for the user about this head."""

    @abstractmethod
    def settle_tokenizer(self, tokenizer: Any, notes: list[str]) -> None:
        """Change a tokenizer so that it renders the text that the program scores.

        Args:
            notes: Receives remarks for the user.

        Raises:
            ModelError: The tokenizer cannot be changed so.
        """

    @abstractmethod
    def put_into(self, classifier: Any, *, keeps_bias: bool) -> float:
        """Copy this head into a classifier, a Hugging Face `...ForSequenceClassification`.

        Args:
            keeps_bias: Whether the bias is copied too. Hugging Face's own classes have no bias in
                the head.

        Returns:
            The bias, which the program adds to every score; 0 if there is none, or if transformers
            loads the head.

        Raises:
            ModelError: The head does not fit the classifier.
        """


class HeadFormat(Plugin):
    """A program that saves reward models in a form of its own, recognized by their files."""

    understood: ClassVar[str] = ""
    """The program and what it saves, for the error about a model without a known head."""

    def check_hub_name(self, name: str, hf_config: Any) -> None:
        """Check that a model on the hub needs no file but those that transformers reads.

        Args:
            hf_config: Its configuration, as transformers reads it.

        Raises:
            ModelError: It has to be downloaded before.
        """

    @abstractmethod
    def make(self, section: None, saved: SavedModel) -> ForeignHead | None:
        """Return the head of a model; None: the program did not save it.

        Args:
            section: A format has no settings.
            saved: The model. Only names of weights are read here, and no pickled file is opened.

        Raises:
            ModelError: The program saved the model, but it is incomplete or gives no reward.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModel:
    """A file with a model, and the Hugging Face directory that was made of it."""

    directory: Path
    notes: tuple[str, ...]
    """What was made of the weights and of the tokenizer, as lines for the user."""
    about: str
    """Description for a model card, without folders, e.g. `m.gguf (llama, Q8_0, ...)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFile:
    """A file that is named as a model."""

    name: str
    """What the user wrote: a path, or a file of a model on the hub."""
    key: str
    """The key with the name, for messages."""


class ModelFiles(Plugin):
    """A format of files with a whole model; its name is their ending in lower case, dots aside."""

    @abstractmethod
    def make(self, section: None, file: NamedFile) -> ReadModel:
        """Find a file, and write it as a Hugging Face directory unless that was done.

        Args:
            section: A format has no settings.
            file: The file.

        Raises:
            UserError: There is no such file, or it cannot be read or written.
        """


KINDS: Mapping[str, type[Any]] = {
    "losses": Loss,
    "reward_losses": PreferenceLoss,
    "advantages": Advantage,
    "loggers": Logger,
    "dialects": ServerDialect,
    "heads": HeadFormat,
    "model_files": ModelFiles,
    "engines": Engine,
    "model_serving": ModelServing,
    "scorers": ScoreSource,
    "reward_managers": RewardManager,
    "environments": EnvironmentKind,
    "rows": Rows,
    "task_forms": TaskForm,
    "benchmarks": BenchmarkKind,
    "commands": Command,
    "importers": Importer,
}
"""The base class of each kind; its entry points are in the group `laurel.` and this name."""

REGISTERED: dict[str, str] = {}
"""The class paths of environments that the program itself registered, by name: a program's own
table beside that of packages (`environments.registry.register_env`)."""

P = TypeVar("P", bound=Plugin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A plug-in as it was declared; it may not be importable."""

    kind: str
    name: str
    target: str
    """The class, as `module:Class`."""
    distribution: str
    """The package that declares it."""

    def __str__(self) -> str:
        return f"{self.target} of the package {self.distribution} (entry point {PREFIX}{self.kind})"

    def load(self) -> Plugin:
        """Import the class and create the plug-in.

        Raises:
            ConfigError: It cannot be imported or made, is no plug-in of its kind, or lacks a part.
        """
        module, _, name = self.target.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except Exception as error:  # a module of another package may raise anything
            raise ConfigError(
                f"'{self.name}' is {self}, which cannot be imported: {type(error).__name__}: "
                f"{error}; fix or uninstall that package"
            ) from error
        base = KINDS[self.kind]
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(
                f"'{self.name}' is {self}, which is no class that derives from "
                f"laurel.plugins.{base.__name__}"
            )
        lacking = [f"{one}()" for one in sorted(getattr(found, "__abstractmethods__", ()))]
        lacking += [one for one in inspect.get_annotations(base) if not hasattr(found, one)]
        if lacking:
            raise ConfigError(
                f"'{self.name}' is {self}, which lacks {' and '.join(lacking)}: "
                f"laurel.plugins.{base.__name__} says what that is"
            )
        try:
            made: Plugin = found()
        except Exception as error:  # a class of another package may raise anything
            raise ConfigError(
                f"'{self.name}' is {self}, which cannot be made without arguments: "
                f"{type(error).__name__}: {error}; fix or uninstall that package"
            ) from error
        return made


def names(kind: str) -> list[str]:
    """Return the names of all plug-ins of a kind, without importing them: Laurel's own first."""
    return list(_table()[kind])


def entries(kind: str) -> Iterator[Entry]:
    """Yield what is declared of a kind, Laurel's own first; a name may be declared twice."""
    for declared in _table()[kind].values():
        yield from declared


def is_own(kind: str, name: str) -> bool:
    """Report whether a plug-in is one of Laurel's own."""
    return any(entry.distribution == OWN for entry in _table()[kind].get(name, ()))


def readers(
    base: Callable[..., PreferenceLoss | Advantage | ServerDialect | Rows], key: str
) -> list[str]:
    """Return the names of Laurel's own plug-ins of a kind that read a key."""
    kind = _kind_of(base)
    return [name for name in names(kind) if is_own(kind, name) and key in find(base, name).keys]


def _kind_of(base: Callable[..., Plugin]) -> str:
    return next(kind for kind, one in KINDS.items() if one is base)


# A `type[P]` would be a class that can be made, and the bases are abstract: so mypy.
def find(base: Callable[..., P], name: str) -> P:
    """Return the plug-in of a name, imported at its first use; `base` is its base class.

    Raises:
        ConfigError: There is none, there are two, or it cannot be imported.
    """
    found: Any = plugin(_kind_of(base), name)
    made: P = found  # `Entry.load` has seen to it
    return made


def plugin(kind: str, name: str) -> Plugin:
    """Return the plug-in of a kind and a name, like `find`."""
    declared = _table()[kind].get(name, ())
    if not declared:
        near = get_close_matches(name, names(kind), n=1)
        raise ConfigError(
            f"there is no '{name}' among {PREFIX}{kind}"
            + (f"; did you mean '{near[0]}'?" if near else ".")
            + f" There are {', '.join(names(kind))}"
        )
    if len(declared) > 1:
        raise ConfigError(
            f"'{name}' is declared twice: as {' and as '.join(map(str, declared))}. Uninstall one "
            "of these packages, or rename its entry point"
        )
    return _loaded(declared[0])


@cache
def _loaded(entry: Entry) -> Plugin:
    return entry.load()


def _table() -> dict[str, dict[str, list[Entry]]]:
    return _read(tuple(sys.path))


@cache
def _read(path: Sequence[str]) -> dict[str, dict[str, list[Entry]]]:
    """Return the entries by kind and name; `path` is where packages are looked for."""
    table: dict[str, dict[str, list[Entry]]] = {kind: {} for kind in KINDS}
    for entry in [*_own(), *_foreign()]:
        table[entry.kind].setdefault(entry.name, []).append(entry)
    return table


def _own() -> list[Entry]:
    """Return Laurel's own plug-ins, by name: of a checkout as its `pyproject.toml` has them.

    The metadata of an installed package belong to its code, but those of an editable install are as
    old as the install.
    """
    declared = _of_checkout(Path(__file__).parents[2] / "pyproject.toml")
    if declared is None:
        declared = _of_install()
    return [
        Entry(kind=kind, name=name, target=target, distribution=OWN)
        for kind in KINDS
        for name, target in sorted(declared.get(PREFIX + kind, {}).items())
    ]


def _of_checkout(file: Path) -> dict[str, dict[str, str]] | None:
    if not file.is_file():
        return None
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return project.get("entry-points", {}) if project.get("name") == OWN else None


def _of_install() -> dict[str, dict[str, str]]:
    cure = f"install it again: pip install --force-reinstall {OWN}"
    try:
        installed = importlib.metadata.distribution(OWN)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the package {OWN} is not installed, so nothing says what Laurel's losses, loggers "
            f"and so on are: a copy of its folder alone does not do; {cure}"
        ) from None
    declared: dict[str, dict[str, str]] = {}
    for point in installed.entry_points:
        declared.setdefault(point.group, {})[point.name] = point.value
    lacking = [PREFIX + kind for kind in KINDS if PREFIX + kind not in declared]
    if installed.version != __version__ or lacking:
        what = f"declares no {lacking[0]}" if lacking else f"is {installed.version}"
        raise ConfigError(
            f"the code of Laurel at {Path(__file__).parent} is version {__version__}, and the "
            f"installed package {OWN} {what}: it belongs to other code; {cure}"
        )
    return declared


def _foreign() -> Iterator[Entry]:
    found = importlib.metadata.entry_points()  # once for all kinds: it reads what all packages say
    for kind in KINDS:
        for point in sorted(found.select(group=PREFIX + kind), key=lambda one: one.name):
            distribution = point.dist.name if point.dist is not None else "?"
            if distribution.lower().replace("_", "-") != OWN:
                yield Entry(
                    kind=kind, name=point.name, target=point.value, distribution=distribution
                )
