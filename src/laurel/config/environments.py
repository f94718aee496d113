"""Defines the `env` section: the environments that grade a run's completions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from laurel import plugins
from laurel.config.data import BenchmarkSetConfig
from laurel.config.plugged import NameOf, OpenSection, field_of, field_of_section
from laurel.config.policy import (
    NamedCall,
    Precision,
    ResourcesConfig,
    RewardModelConfig,
    TokenizerConfig,
)
from laurel.config.yaml_tree import (
    CALLS,
    MAY_CHANGE,
    PROCESSES,
    Removed,
    Section,
    removed,
)
from laurel.errors import about, key_of
from laurel.plugins import Engine, EngineThatScores, EnvironmentKind

# Where the scores of a reward-model environment come from.

Bound = Annotated[float, Field(allow_inf_nan=True)]
"""A bound that may be infinite, and then bounds nothing."""

SCORE_PATTERN = r"[Ss]core\W*?[:=]\W*?(-?\d+(?:\.\d+)?)"
"""The default pattern for a judge's score: `Score: 7`, `**Score:** 7`, `"score": 7` and so on."""


def checked_urls(urls: Sequence[str]) -> None:
    """Check that every text is an HTTP address without a password in it.

    Raises:
        ValueError: An address is invalid; the message names the first such address.
    """
    for url in urls:
        try:
            found = urlsplit(url)
            host, _ = found.hostname, found.port
        except ValueError as error:
            raise ValueError(f"{about('urls')}{_shown(url)} is no address: {error}") from error
        if found.scheme not in ("http", "https") or not host:
            raise ValueError(f"{about('urls')}{_shown(url)} is no address: write http://HOST:PORT")
        if found.username is not None or found.password is not None:
            raise ValueError(
                f"{about('urls')}the address of {host} has a password in it; name an environment "
                f"variable that holds an API key instead ({key_of('api_key_env')})"
            )
    if len(set(urls)) < len(urls):
        raise ValueError(f"{about('urls')}an address is there twice")


def _shown(url: str) -> str:
    # A password or a query may be a secret.
    address = url.partition("?")[0].partition("#")[0]
    return ascii(address.rpartition("@")[2])


class ScoringEngineSection(OpenSection):
    """A section that chooses the engine of a model whose weights never change."""

    kind_of_plugin: ClassVar[str] = "engines"
    suffix_of_plugins: ClassVar[str] = "_cfg"
    settings_of_plugins: ClassVar[str] = "scoring_section"

    if TYPE_CHECKING:
        backend: str

    @property
    def engine(self) -> tuple[EngineThatScores, Any] | None:
        """Return the engine with its settings; None is Laurel's own, `transformers`."""
        if self.backend == "transformers":
            return None
        engine, section = self.settings_of(Engine, self.backend)
        if not isinstance(engine, EngineThatScores):
            raise ValueError(f"backend={self.backend}: this engine samples, and computes no scores")
        return engine, section

    @model_validator(mode="after")
    def _engine_computes_scores(self) -> ScoringEngineSection:
        _ = self.engine
        return self


def _is_set(section: Section, key: str) -> bool:
    # A key that is written with its default has no other effect than one that is left out.
    field = field_of(type(section), key)
    assert field is not None
    return bool(getattr(section, key) != field.get_default(call_default_factory=True))


class JudgeConfig(Section):
    """How a language model is asked for a verdict: at an OpenAI-compatible endpoint, or here.

    The keys beside `judge` say which model it is, and where and how it is loaded or asked.
    What it is shown was written by the policy, which learns to persuade it. The default template
    puts the response between marks that the policy cannot write; a template of your own should too.
    """

    removed: ClassVar[Mapping[str, Removed]] = removed("JudgeConfig")

    read_out: Literal["written", "log_probability"] = "written"
    """`written`: the judge writes a reply, in which the verdict stands. `log_probability` (without
    `urls`): it writes nothing, and the verdict is the probability of the first of `words`, as
    P(first) / (P(first) + P(second)) (Zhang et al. 2024, arXiv 2408.15240)."""
    compares: bool = False
    """Ask which of two completions of a prompt is better, in both positions, without `urls`. The
    score of a completion is its mean probability to win against the others: of G completions there
    are G(G-1) questions."""
    max_opponents: int | None = Field(default=None, ge=2)
    """With `compares`: most others that a completion is compared with, in a ring; an even number.
    Null: all."""
    words: tuple[str, str] | None = None
    """The two verdicts, for the better (or first) response and for the worse (or second). Null:
    `A` and `B` with `compares`, otherwise `Yes` and `No`."""
    template: str | None = None
    """Jinja2 text of the question. It may use `prompt` (text of the last user message),
    `response`, `conversation` (messages with `role` and `content`, the response left out),
    `ground_truth` (none where the task has none), `mark` (a word that no response holds), and
    with `compares` also `other_response`; `words` are the verdicts. Null asks for a score in
    `score_range`, for one of `words`, or for the better response."""
    system: str | None = None
    """A system message, as it is."""
    score_pattern: str = SCORE_PATTERN
    """Regular expression with one group, the number; unused with `score_key`. Its last match
    counts. With `compares` the verdict is one of `words` in double brackets: `[[A]]`."""
    score_key: str | None = None
    """Key of the number in a JSON object of the reply, the last one that has it."""
    score_range: tuple[Bound, Bound] = (0.0, 10.0)
    """Lowest and highest score: a number outside is none; `-.inf` and `.inf` bound nothing."""
    num_samples: int = Field(default=1, ge=1)
    """Replies of which the score is the mean."""
    min_samples: int = Field(default=1, ge=1)
    """Replies that must have a score; with fewer the completion has failed."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the replies."""
    seed: int | None = 0
    """Of the first reply, and one more with each; null (with `urls`): the server's."""
    max_tokens: int = Field(default=1024, ge=1)
    """Of one reply. One that is cut off has no score."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More keys of the request, as they are, e.g. `chat_template_kwargs`."""

    @field_validator("words", mode="before")
    @classmethod
    def _are_text(cls, words: Any) -> Any:
        if isinstance(words, list | tuple) and any(isinstance(word, bool) for word in words):
            raise ValueError("YAML reads Yes and No as booleans: put the words in quotes")
        return words

    @model_validator(mode="after")
    def _can_judge(self) -> JudgeConfig:
        self._refuse_unused()
        if self.words is not None and (
            not all(word.strip() for word in self.words) or len(set(self.words)) < 2
        ):
            raise ValueError(f"words={list(self.words)}: name two words that differ")
        if self.max_opponents is not None and self.max_opponents % 2:
            raise ValueError(
                f"max_opponents={self.max_opponents} must be even: half of them follow a "
                "completion in the ring, and half come before it"
            )
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error as error:
            raise ValueError(f"score_pattern is no regular expression: {error}") from error
        if groups != 1:
            raise ValueError(
                f"score_pattern has {groups} groups, and the one group is the number; write "
                "(?:...) for the others"
            )
        if self.min_samples > self.num_samples:
            raise ValueError(
                f"min_samples={self.min_samples} is more than num_samples={self.num_samples}"
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"num_samples={self.num_samples} with temperature=0 are as many equal replies; "
                "set a temperature, or num_samples=1"
            )
        low, high = self.score_range
        if not low < high:
            raise ValueError(
                f"score_range={list(self.score_range)} must be [lowest, highest], the lower one "
                "first"
            )
        asks_for_number = not self.compares and self.read_out == "written"
        if asks_for_number and self.template is None and math.inf in (-low, high):
            raise ValueError(
                "template=null asks for a score in score_range, and one of its bounds is infinite; "
                "give both, or a template"
            )
        taken = sorted({"model", "messages", "n", "stream"} & self.extra_body.keys())
        if taken:
            raise ValueError(f"extra_body must not hold {', '.join(taken)}: Laurel writes that")
        return self

    def _refuse_unused(self) -> None:
        """Raise an error for a key that would have no effect beside the others."""
        found: list[tuple[str, Sequence[str]]] = []
        if self.read_out == "log_probability":
            found.append(("is for replies, and read_out=log_probability writes none", _WRITTEN))
        elif self.compares:
            found.append(
                ("is for a score, and compares=true asks which response is better", _SCORE)
            )
        else:
            found.append(("is for read_out=log_probability or compares=true", ("words",)))
        if not self.compares:
            found.append(("is for compares=true", ("max_opponents",)))
        self._refuse(found)

    def check_place(self, *, is_served: bool) -> None:
        """Check that every key has an effect on a judge that servers hold, or one loaded here.

        Raises:
            ValueError: A key has none.
        """
        if is_served:
            self._refuse([(NOT_LOADED, _LOADED)])
        else:
            self._refuse([("says how urls are asked, and there are none", ("extra_body",))])
            if self.seed is None:
                raise ValueError(
                    "seed=null is the server's own, and there are no urls: give a number"
                )

    def _refuse(self, found: Sequence[tuple[str, Sequence[str]]]) -> None:
        for why, keys in found:
            for key in keys:
                if _is_set(self, key):
                    raise ValueError(f"{key} {why}")

    @property
    def verdict_words(self) -> tuple[str, str]:
        """The verdicts for the better (or first) response, and for the worse (or second)."""
        return self.words or (("A", "B") if self.compares else ("Yes", "No"))


NOT_LOADED = "is for a judge that this process loads; leave it out, or take urls out"
_LOADED = ("read_out", "compares", "words", "max_opponents")
"""The keys of `judge` without effect on one that is asked at `urls`."""
_SCORE = ("score_pattern", "score_key", "score_range")
_WRITTEN = (
    *_SCORE,
    *("num_samples", "min_samples", "temperature", "seed", "max_tokens"),
)


class FunctionConfig(OpenSection):  # type: ignore[no-redef]  # mypy's plug-in has its own `kwargs`
    """A Python function that scores."""

    kind_of_plugin: ClassVar[str] = "reward_managers"
    removed: ClassVar[Mapping[str, Removed]] = removed("FunctionConfig")

    path: str
    """`module:function`, or `path/to/file.py:function`. Its arguments are verl's: `data_source`
    (`""` for a task without one), `solution_str`, `ground_truth` and `extra_info`; `response_str`,
    `num_turns` and `validate` if it names them. It returns a number, or a dictionary with a `score`
    and other numbers, which are logged. It may be async."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments, passed as they are."""
    group: bool = False
    """Call it once for all completions of a prompt, with lists (`data_sources`, `solution_strs`,
    `ground_truths`, `extra_infos`), for a list of results."""
    timeout: Annotated[float, MAY_CHANGE] = Field(default=30.0, gt=0)
    """Seconds of one call. With `num_workers` above 0 its process is then killed; a thread cannot
    be, and is left behind."""
    router: Annotated[str | None, MAY_CHANGE] = None
    """`HOST:PORT` of a model server (`laurel serve`, vLLM, SGLang) that the function calls itself,
    passed to a parameter `reward_router_address`, as verl does."""
    tokenizer: str | None = None
    """Hub name or directory of a model whose tokenizer is passed to a parameter
    `reward_model_tokenizer`, as verl does."""
    manager: Annotated[str, NameOf("reward_managers", ("naive",))] = "naive"
    """What makes the calls: `naive` once for each completion, `rate_limited` at a rate that a
    service allows, `verl` through a class that was written for verl. Its settings stand under its
    name."""

    @model_validator(mode="after")
    def _fits_the_manager(self) -> FunctionConfig:
        for name in self.model_extra or ():
            if name != self.manager and _is_set(self, name):
                raise ValueError(f"{name} is for manager={name}, and it is {self.manager}")
        if self.manager != "naive":
            self.settings_of(plugins.RewardManager, self.manager)[0].check(self)
        return self

    @field_validator("router")
    @classmethod
    def _is_an_address(cls, router: str | None) -> str | None:
        """Check the router's address and remove its `http://`, which functions add themselves.

        Raises:
            ValueError: The text is not HOST:PORT.
        """
        if router is None:
            return None
        address = router.removeprefix("http://").rstrip("/")
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in address or "@" in address:
            raise ValueError("router must be HOST:PORT, such as 127.0.0.1:8000")
        return address

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        module, _, name = path.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"path={path!r} must be module:function or path/to/file.py:function")
        return path


class ModelServerConfig(Section):
    """Servers of a language model that the run starts, for a function that asks them.

    Each replica has `tensor_parallel_size` slots of the cluster, as a reward model would.
    """

    removed: ClassVar[Mapping[str, Removed]] = removed("ModelServerConfig")

    model_name: str
    """Hub name or directory of the model."""
    backend: Annotated[str, NameOf("engines")] = "vllm"
    """The engine whose server it is; vLLM's has the forms of OpenAI and its own
    (`/v1/chat/completions`, `/classify`)."""
    replicas: Annotated[int, MAY_CHANGE, PROCESSES] = Field(default=1, ge=1)
    """Servers. The function has one address, which asks the one with the fewest requests."""
    tensor_parallel_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """GPUs, or on a CPU processes, that one replica is spread over."""
    resources: Annotated[ResourcesConfig, MAY_CHANGE] = ResourcesConfig()
    """Slots of their own. Null: they share those of the policy, and sleep but for the scores."""
    arguments: list[str] = Field(default_factory=list)
    """Further arguments of the program, such as `--max-model-len=4096`."""

    @model_validator(mode="after")
    def _fits_its_slots(self) -> ModelServerConfig:
        per_node, nodes = self.resources.gpus_per_node, self.resources.num_nodes or 1
        need = self.replicas * self.tensor_parallel_size
        if self.resources.are_own and (per_node is None or per_node * nodes != need):
            raise ValueError(
                f"resources: {self.replicas} replicas of {self.tensor_parallel_size} take {need} "
                f"slots, and these are {per_node} of gpus_per_node x {nodes} of num_nodes"
            )
        if not isinstance(plugins.find(Engine, self.backend), plugins.EngineThatServes):
            raise ValueError(f"backend={self.backend}: this engine has no server")
        return self


class ScoringGenerationConfig(ScoringEngineSection):
    """The engine that computes the scores of a reward model; the name is NeMo RL's."""

    backend: Annotated[str, NameOf("engines", ("transformers",))] = "transformers"
    """`transformers`: the model itself, in token forests; `vllm`: an engine of its own (extra
    `vllm`), checked against the golden scores. Default: it needs no second engine, and its noise
    can be measured exactly."""


class SourceConfig(OpenSection):
    """The source of scores: a model or servers, which a judge may ask, or a function."""

    kind_of_plugin: ClassVar[str] = "dialects"
    removed: ClassVar[Mapping[str, Removed]] = removed("ScorerSource")

    model_name: str | None = None
    """Hub name or directory of the reward model, or a directory of checkpoints. With `urls` only
    its tokenizer, template and contract are read. Of a judge that this process loads also a GGUF
    file."""
    checkpoint_path: str | None = None
    """Directory whose weights are used instead of those of `model_name`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Null names are those of the model."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest conversation in tokens, for a model without a scoring contract; null is 8192, or the
    model's positions if fewer. Longer ones are truncated and counted; of a judge, whose verdict
    has to fit as well, they fail."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    urls: Annotated[list[str] | None, MAY_CHANGE] = None
    """Servers of one model, which this run does not start; any may fail. Of a judge
    `/v1/chat/completions` is added if it is missing."""
    url_protocol: Annotated[str, NameOf("dialects")] = "laurel"
    """The protocol of `urls`: `laurel serve`, vLLM's `/classify`, SGLang's `/classify` or
    `/v1/embeddings`, OpenRLHF's `/get_reward`, or slime's remote_rm. Where a server takes rendered
    conversations, `model_name` names the model of their template."""
    url_model: str = ""
    """What they call the model, where they ask for it, as those of a judge do."""
    reward_key: str = ""
    """Key of the score in the reply of slime's servers; empty: the reply is the score."""
    model_version: str = ""
    """Version of the model; other versions are refused. Empty: that of the first reply."""
    api_key_env: Annotated[str | None, MAY_CHANGE] = None
    """Name of the environment variable with the API key; never the key itself."""
    judge: JudgeConfig | None = None
    """The model, loaded here or at `urls`, is a language model that is asked for a verdict."""
    function: FunctionConfig | None = None
    """A Python function that scores."""

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # What was written may be the key: it must not come up in a message.
            raise ValueError(
                f"{key_of('api_key_env')} is the name of an environment variable, such as "
                "REWARD_API_KEY, and what stands there cannot be one. Never write the key itself "
                "into a configuration"
            )
        return name

    @model_validator(mode="after")
    def _is_one_source(self) -> SourceConfig:
        if self.urls is not None:
            if not self.urls:
                raise ValueError("urls is empty: name a server, or leave the key out")
            checked_urls(self.urls)
        if self.judge is not None:
            self._check_judge(self.judge)
        elif self.urls is not None:
            if self._dialect.rendered == "always" and not self._model:
                raise ValueError(
                    f"url_protocol={self.url_protocol}: its servers take rendered conversations, "
                    "so name the reward model (model_name), whose template and tokenizer are used"
                )
            if self.reward_key and "reward_key" not in self._dialect.keys:
                users = " or ".join(plugins.readers(plugins.ServerDialect, "reward_key"))
                raise ValueError(f"reward_key is for url_protocol={users}, not {self.url_protocol}")
            self._dialect.check(self)
        else:
            for key in ("url_model", "reward_key", "model_version", "api_key_env"):
                if _is_set(self, key):
                    raise ValueError(f"{key} says how urls are asked, and there are none beside it")
        if len(self._sources()) > 1:
            raise ValueError(
                f"{' and '.join(self._sources())} cannot both give the score; keep one"
            )
        return self

    def _check_judge(self, judge: JudgeConfig) -> None:
        for key in ("checkpoint_path", "reward_model_cfg", *_OF_A_DIALECT):
            if _is_set(self, key):
                raise ValueError(f"{key} is for a reward model, and here a judge scores")
        if self.urls is None:
            if not self.model_name:
                raise ValueError("model_name is missing: which model is the judge?")
            why = "says how urls are asked, and there are none"
            unused: Sequence[str] = ("url_model", "api_key_env")
        else:
            if not self.url_model:
                raise ValueError("url_model is missing: what do the servers call the judge?")
            unused, why = ("model_name", "tokenizer", "max_model_len"), NOT_LOADED
        for key in unused:
            if _is_set(self, key):
                raise ValueError(f"{key} {why}")
        judge.check_place(is_served=self.urls is not None)

    def _sources(self) -> list[str]:
        is_asked = self.judge is not None
        found = {
            "urls": self.urls is not None and not is_asked,
            "model_name": self.urls is None and self._model is not None and not is_asked,
            **{name: True for name, _ in self._named()},
        }
        return [name for name, is_there in found.items() if is_there]

    @property
    def _dialect(self) -> plugins.ServerDialect:
        return self.settings_of(plugins.ServerDialect, self.url_protocol)[0]

    @property
    def _model(self) -> str | None:
        return self.checkpoint_path or self.model_name

    @property
    def loads_model(self) -> bool:
        """Report whether this run loads a reward model's weights, as no other source is set."""
        return self.urls is None and self.named is None

    @property
    def named(self) -> tuple[str, Any] | None:
        """Return the source that a plug-in opens, such as `judge`, with its settings."""
        return next(iter(self._named()), None)

    def _named(self) -> list[tuple[str, Any]]:
        names = plugins.names("scorers")
        own = [key for key in type(self).model_fields if key in names]
        return [
            (name, self[name])
            for name in dict.fromkeys((*own, *names))
            if self.get(name) is not None
        ]

    @classmethod
    def keys_of_plugins(cls) -> list[str]:
        """Return the keys that dialects and sources of scores may bring."""
        return [*super().keys_of_plugins(), *plugins.names("scorers")]

    @classmethod
    def plugged_in(cls, key: str) -> FieldInfo | None:
        """Return the field that a dialect or a source of scores brings."""
        if key in cls.model_fields or key not in plugins.names("scorers"):
            return super().plugged_in(key)
        # It is chosen by being there, so one without settings has an empty section.
        section = cls.section_of(plugins.find(plugins.ScoreSource, key)) or Section
        kind: Any = field_of_section(section).annotation
        return FieldInfo(annotation=kind | None, default=None, description=section.__doc__)

    @property
    def loads_judge(self) -> bool:
        """Report whether this run loads a judge, which no server holds."""
        return self.judge is not None and self.urls is None

    @property
    def writes_replies(self) -> bool:
        """Report whether this run loads a judge that writes its verdicts."""
        return self.judge is not None and self.loads_judge and self.judge.read_out == "written"

    @property
    def uses_workers(self) -> bool:
        """Report whether this run needs workers: to render conversations, or to call a function.

        Conversations are rendered for a loaded model, and for servers that expect rendered text.
        """
        renders_for_servers = (
            self.urls is not None
            and self.judge is None
            and bool(self._model)
            and self._dialect.rendered != "never"
        )
        return self.loads_model or renders_for_servers or self.function is not None

    @property
    def asks_served_model(self) -> bool:
        """Report whether a function asks the model that the run serves."""
        return self.function is not None and self.function.router is None

    @property
    def judges_groups(self) -> bool:
        """Report whether all completions of a prompt must be scored in one call."""
        compares = self.judge is not None and self.judge.compares
        return compares or (self.function is not None and self.function.group)


_OF_A_DIALECT = ("url_protocol", "reward_key", "model_version")


class ScorerSource(SourceConfig):
    """A source of scores, and how it is loaded and asked."""

    request_timeout: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    """Seconds for a score, all tries together; then the completion has failed. One try has a
    quarter of them. Null: 120, and of a judge 600."""
    hedge: Annotated[bool, MAY_CHANGE] = False
    """Ask a second server as well, of `urls` or of `server`, where an answer takes unusually long.
    Default: it doubles some of the work."""
    connect_patience: Annotated[float, MAY_CHANGE] = Field(default=60.0, ge=0)
    """Seconds to wait at the start for a server that does not answer yet."""
    generation: Annotated[ScoringGenerationConfig | None, MAY_CHANGE] = None
    """What computes the scores of a model that this run loads: `backend` is `transformers` (also
    null), or `vllm`, an engine of its own on one machine. Of `models` it computes the judges.
    Default: no second engine, and its noise can be measured exactly."""
    precision: Precision = "bfloat16"
    """Dtype of the weights and of the decoder's arithmetic; the head is float32 either way.
    Default: half the memory; groups are kept from its noise by `noise_floor_factor`."""
    compile: Annotated[Literal["auto"] | bool, MAY_CHANGE] = "auto"
    """Compile the model's layers, as `policy.compile` does."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    safetensors_only: bool = True
    """Refuse pickled weights."""
    batch_tokens: Annotated[int, MAY_CHANGE] = Field(default=8192, ge=1)
    """Token budget of one forward pass. A larger group is computed in parts."""
    max_concurrent: Annotated[int | None, MAY_CHANGE, CALLS] = Field(default=None, ge=1)
    """Calls of `function` at a time, or replies that a loaded judge writes side by side. Null: 16
    calls in threads, 256 of an async function, or the number of processes; 64 replies, a bound on
    the memory of their keys and values."""
    server: ModelServerConfig | None = None
    """A model that the run serves for `function`, which gets its address and tokenizer."""

    @property
    def engine(self) -> tuple[EngineThatScores, Any] | None:
        """Return the engine that computes a loaded model, with its settings; None: Laurel's."""
        return None if self.generation is None else self.generation.engine

    @property
    def seconds_of_score(self) -> float:
        """Return the seconds for a score, all tries together."""
        return self.request_timeout or (120.0 if self.judge is None else 600.0)

    @property
    def seconds_of_try(self) -> float:
        """Return the seconds of one try: a server that hangs leaves time to ask three others."""
        return self.seconds_of_score / 4

    def lacks_slot(self, where: str) -> str:
        """Return the message on a loaded judge in a run on a cluster, for the section `where`."""
        return (
            f"{where}.judge: on a cluster a judge is not loaded by the run, which would have no "
            f"slot for it. Serve it (vllm serve {self.model_name}), and name its address in "
            f"{where}.urls and its name there in url_model"
        )

    @property
    def sources(self) -> Sequence[ScorerSource]:
        """Return what gives the scores."""
        return [self]

    @model_validator(mode="after")
    def _fits_the_sources(self) -> ScorerSource:
        urls = [source.urls for source in self.sources if source.urls is not None]
        num_served = self.server.replicas if self.server is not None else 0
        if self.hedge and max(num_served, *map(len, urls), 0) < 2:
            why = "urls has only one" if urls else "there are no urls"
            why = "server has one replica" if num_served else why
            raise ValueError(f"hedge asks a second server, and {why}")
        if self.server is not None and sum(one.asks_served_model for one in self.sources) != 1:
            raise ValueError(
                "server is for a function that asks it, and for one alone: set function.path, and "
                "leave function.router out"
            )
        if self.max_concurrent is not None and not any(
            source.function is not None or source.writes_replies for source in self.sources
        ):
            raise ValueError(
                "max_concurrent is for a function, or for a judge that this process loads and that "
                "writes replies"
            )
        if all(source.judge is not None for source in self.sources):
            self._check_judges()
        return self

    def _check_judges(self) -> None:
        """Check that what is said for all sources has an effect where all of them are judges."""
        of_a_model = ("trust_remote_code", "safetensors_only", "dtensor_cfg")
        found: list[tuple[str, Sequence[str]]] = [
            ("is for a reward model, and here a judge scores", of_a_model)
        ]
        loaded = [source for source in self.sources if source.loads_judge]
        if not loaded:
            found.append((NOT_LOADED, ("precision", "compile", "batch_tokens", "generation")))
        elif len(loaded) == len(self.sources):
            why = "says how urls are asked, and there are none"
            found.append((why, ("request_timeout", "connect_patience")))
        if self.engine is not None:
            found.append(("is for generation.backend=transformers", ("batch_tokens", "compile")))
        for why, keys in found:
            for key in keys:
                # `dtensor_cfg` is no key of a source outside of a run.
                if key in type(self).model_fields and _is_set(self, key):
                    raise ValueError(f"{key} {why}")


class JudgeFile(ScorerSource):
    """A file that says which judge scores, for commands that take `--judge`.

    Its keys are those of `env.reward_model`.
    """

    judge: JudgeConfig
    """How it is asked."""

    @property
    def called(self) -> str:
        """Return the name of the judge, as the file has it."""
        return self.model_name or self.url_model


class EnsemblePart(SourceConfig):
    """One of several reward models that score the same conversation."""

    removed: ClassVar[Mapping[str, Removed]] = {
        **removed("ScorerSource"),
        **removed("EnsemblePart"),
    }

    name: str = Field(pattern=r"^[A-Za-z][\w.-]*$")
    """The name of its scores in metrics."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    normalize: Literal["stored", "none"] | tuple[float, float] = "stored"
    """`stored`: subtract the mean and divide by the standard deviation of the saved model; `none`:
    use its scores as they are; `[mean, std]`: these, in place of the stored ones or for what has
    none, such as a judge, a function or servers."""

    @model_validator(mode="after")
    def _is_whole(self) -> EnsemblePart:
        if not self._sources():
            raise ValueError(
                f"the model '{self.name}' has no source: give it a model_name, urls, a judge or a "
                "function"
            )
        if isinstance(self.normalize, tuple) and self.normalize[1] <= 0:
            raise ValueError(f"normalize={list(self.normalize)}: the deviation must be above 0")
        has_stored = self._model is not None and self.judge is None
        if self.normalize == "stored" and not has_stored:
            raise ValueError(
                f"normalize=stored: nothing is stored with what '{self.name}' names; give its "
                "[mean, std], or normalize=none"
            )
        return self

    @property
    def mean_and_std(self) -> tuple[float, float] | None:
        """Return what is subtracted and what is divided by; None: what the model has stored."""
        if isinstance(self.normalize, tuple):
            return self.normalize
        return (0.0, 1.0) if self.normalize == "none" else None


class ScoreTransformConfig(Section):
    """Changes of a reward model's scores before they are rewards, in this order."""

    subtract_reference: bool = False
    """Subtract the score of the task's own reference answer (`ground_truth`)."""
    normalize: Literal["none", "stored", "running"] = "none"
    """Subtract a mean and divide by a standard deviation: `stored` uses those in the model's
    scoring.json, `running` those of all training scores so far. Default: what is compared within a
    group is changed by no mean, and normalised by no scale."""
    scale: float = 1.0
    """Multiplied."""
    shift: float = 0.0
    """Added."""
    clip: tuple[Bound, Bound] | None = None
    """Lowest and highest reward; `-.inf` and `.inf` are none. Default: a bound hides what the
    reward model says of the best answers."""

    @model_validator(mode="after")
    def _clip_is_a_range(self) -> ScoreTransformConfig:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ValueError(
                f"clip {list(self.clip)} must be [lowest, highest], the lower one first"
            )
        return self


class ScoringParallelConfig(Section):
    """The devices that one copy of a reward model is spread over."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer."""
    custom_parallel_plan: str | dict[str, Any] | None = None
    """Import path or mapping of a tensor-parallel plan."""


class RewardModelEnvironmentConfig(ScorerSource):
    """Conversations scored by reward models, servers, a judge or a function."""

    enabled: bool = False
    """Score with this environment if `data.env_name` names none."""
    resources: Annotated[ResourcesConfig, MAY_CHANGE] = ResourcesConfig()
    dtensor_cfg: Annotated[ScoringParallelConfig, MAY_CHANGE] = ScoringParallelConfig()
    transform: ScoreTransformConfig = ScoreTransformConfig()
    use_reward_loop: Annotated[bool, MAY_CHANGE] = True
    """Score completions while others are still generated; false: the whole batch of a step at its
    end. The scores are equal except for rounding. Default: a step is shorter with it
    (docs/benchmarks.md)."""
    num_replicas: Annotated[int, MAY_CHANGE, PROCESSES] = Field(default=1, ge=1)
    """Replicas of the model with the loop; several are processes of their own. On Ray the slots of
    `resources`, or of the placement, decide."""
    num_workers: Annotated[int, MAY_CHANGE, PROCESSES] = Field(default=0, ge=0)
    """Processes that render and tokenise conversations or run `function`; each of several models
    has its own. 0: threads of this process. On Ray they are actors, spread over the nodes. Default:
    threads do where prompts are short."""
    benchmarks: Annotated[dict[str, BenchmarkSetConfig], MAY_CHANGE] = Field(default_factory=dict)
    """Benchmarks of the reward model before the first step of `laurel grpo`, by names of your own.
    Logged as `reward_model/<Name>_...`."""
    models: list[EnsemblePart] | None = Field(default=None, min_length=2)
    """Several sources of scores instead of one; the keys of this section that they do not have hold
    for all. On Ray each loaded model has replicas on all slots of `resources`."""
    combine: Literal["weighted_sum", "min", "mean_minus_std"] = "weighted_sum"
    """How several scores become one. `mean_minus_std` penalises disagreement. A failure of any of
    them is a failure of the completion."""
    uncertainty_penalty: float = Field(default=1.0, ge=0)
    """Standard deviations that `mean_minus_std` subtracts from the mean."""

    @model_validator(mode="after")
    def _usable(self) -> RewardModelEnvironmentConfig:
        if self.models is not None:
            self._check_models(self.models)
        elif self.combine != "weighted_sum":
            raise ValueError(f"combine={self.combine} is for several models, and there are none")
        elif self.enabled and not self._sources():
            raise ValueError("model_name is missing: which reward model?")
        judges = [source.judge for source in self.sources if source.judge]
        if self.transform.subtract_reference and any(judge.compares for judge in judges):
            raise ValueError(
                "judge.compares: a judge that compares has no score for a reference answer alone; "
                "take transform.subtract_reference out"
            )
        if self.combine != "mean_minus_std" and self.uncertainty_penalty != 1.0:
            raise ValueError("uncertainty_penalty is for combine=mean_minus_std; leave it out")
        if self.num_replicas > 1 and not self.loads_model:
            raise ValueError(
                f"num_replicas={self.num_replicas} is for one model that this run loads; leave it "
                "out where there are urls, a judge, a function or several models"
            )
        backend = self.generation.backend if self.generation is not None else "transformers"
        loads_judge = any(source.loads_judge for source in self.sources)
        if self.engine is not None and not (self.loads_model or loads_judge):
            raise ValueError(
                f"generation.backend={backend} is for one model that this run loads, or for "
                "judges; leave it out where there are urls, a function or several reward models"
            )
        if self.engine is not None and self.num_replicas > 1:
            raise ValueError(
                f"num_replicas={self.num_replicas} with generation.backend={backend}: it is one "
                f"engine here; spread it with generation.{backend}_cfg.tensor_parallel_size"
            )
        if self.num_workers and not self.uses_workers:
            hint = (
                "; or name the model whose tokens they are to be sent (model_name)"
                if self.urls is not None and self._dialect.rendered == "with_model"
                else ""
            )
            raise ValueError(
                f"num_workers={self.num_workers} is for processes that render conversations or run "
                f"a function, and here servers render what they are asked: leave it out{hint}"
            )
        return self

    def _check_models(self, models: Sequence[EnsemblePart]) -> None:
        if self._sources():
            raise ValueError(f"models and {self._sources()[0]} cannot both give the score")
        for key in SourceConfig.model_fields:
            if _is_set(self, key):
                raise ValueError(f"{key}: each of the models has its own; set it there")
        names = [part.name for part in models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"models: '{twice[0]}' is the name of two models")
        weighted = [part.name for part in models if part.weight != 1.0]
        if self.combine != "weighted_sum" and weighted:
            raise ValueError(
                f"the weight of '{weighted[0]}' counts only with combine=weighted_sum, not with "
                f"{self.combine}; leave it out"
            )
        if not any(part.weight for part in models):
            raise ValueError("models: every weight is 0, so the reward would be, too")
        if self.transform.normalize == "stored":
            raise ValueError(
                "transform.normalize=stored: several models have no statistics in common, and each "
                "is normalised by its own; choose running or none"
            )

    @property
    def loads_model(self) -> bool:
        """Report whether the environment's own model is loaded, not one of its `models`."""
        return self.models is None and super().loads_model

    @property
    def sources(self) -> Sequence[ScorerSource]:
        """Return what gives the scores: the environment itself, or its `models`.

        The models have the environment's settings for what they have none of their own for.
        """
        if self.models is None:
            return [self]
        shared = ScorerSource.model_fields.keys() - SourceConfig.model_fields.keys()
        of_all = {key: self[key] for key in shared}
        return [ScorerSource.model_construct(**of_all, **dict(part)) for part in self.models]

    @property
    def loaded(self) -> list[ScorerSource]:
        """Return the sources whose models are loaded."""
        return [source for source in self.sources if source.loads_model]

    @property
    def uses_workers(self) -> bool:
        """Report whether any model needs workers to render conversations or call a function."""
        if self.models is not None:
            return any(part.uses_workers for part in self.models)
        return super().uses_workers

    @property
    def judges_groups(self) -> bool:
        """Report whether any model must score all completions of a prompt in one call."""
        return super().judges_groups or any(part.judges_groups for part in self.models or ())


class CompositePart(Section):
    """One of several environments that grade the same sample."""

    env: str
    """Name of the environment."""
    weight: float = 1.0
    """Factor of its reward in the sum."""
    gate: float | None = None
    """Instead of adding: a reward of this part below the gate makes the whole reward
    `gated_reward`."""


class CompositeEnvironmentConfig(Section):
    """Several environments that grade one sample together."""

    parts: list[CompositePart] = Field(min_length=1)
    """Each scores every sample."""
    gated_reward: float = 0.0
    """The reward of a sample that a gate shut out."""
    as_components: bool = False
    """Keep the parts apart, for GDPO; their sum is the reward that is logged."""
    conducted_by: str | None = None
    """The part that answers the policy and ends the conversation; the others score its end once.
    Null: all score every turn, and any of them ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundEnvironment:
    """What the name of an environment stands for."""

    kind: EnvironmentKind
    where: str
    """The key of its settings."""
    section: Any
    """Its settings."""


class EnvironmentsConfig(OpenSection):
    """The environments, by the names that `data.env_name` uses."""

    kind_of_plugin: ClassVar[str] = "environments"

    reward_model: RewardModelEnvironmentConfig = RewardModelEnvironmentConfig()
    composite: dict[str, CompositeEnvironmentConfig] = Field(default_factory=dict)
    """Combinations of the others, by names of your own."""
    custom: dict[str, NamedCall] = Field(default_factory=dict)
    """Your own environments by name: an import path, and keyword arguments."""
    max_observation_chars: int = Field(default=4096, ge=64)
    """Longest message of an environment, such as the result of code or of a tool, that the policy
    sees; a longer one loses its middle."""
    max_failed_share: Annotated[float, MAY_CHANGE] = Field(default=0.5, ge=0.0, le=1.0)
    """The run stops if an environment fails on more than this share of a batch. Default: the rest
    would be no fair sample."""
    timeout_seconds: Annotated[float, MAY_CHANGE] = Field(default=600.0, gt=0)
    """Limit of one step of an environment; its samples then fail. A tenth of it is that of one
    answer of a server of environments, and of an outage. Default: longer than any verdict that
    still helps a step."""

    @classmethod
    def keys_of_plugins(cls) -> list[str]:
        """Return the keys that plug-ins may bring, and the environments that were registered."""
        return [*super().keys_of_plugins(), *plugins.REGISTERED]

    @classmethod
    def plugged_in(cls, key: str) -> FieldInfo | None:
        """Return the field of a kind of environments that a plug-in brings, or of a registered one.

        The settings of a registered environment are what its class takes, whatever it is.
        """
        if key in plugins.REGISTERED:
            kind: Any = dict[str, Any]
            return FieldInfo(annotation=kind, default_factory=dict)
        field = super().plugged_in(key)
        found = None if field is None else plugins.find(EnvironmentKind, key)
        if field is None or found is None or not found.several:
            return field
        kind = dict[str, field.annotation]  # type: ignore[name-defined]
        return FieldInfo(annotation=kind, default_factory=dict, description=found.__doc__)

    def named(self) -> dict[str, Mapping[str, Any]]:
        """Return the environments of each key that holds several, by the user's names."""
        kinds = [
            name
            for name in plugins.names("environments")
            # Those of other packages are imported only if they are used.
            if name in self or plugins.is_own("environments", name)
        ]
        return {
            kind: self.get(kind, {})
            for kind in kinds
            if plugins.find(EnvironmentKind, kind).several
        }

    def names(self) -> list[str]:
        """Return the names of all environments that a task may use."""
        several = self.named()
        kinds = [name for name in plugins.names("environments") if name not in several]
        own = [name for named in several.values() for name in named]
        return [*kinds, *own, *self.composite, *self.custom]

    def found(self, name: str) -> FoundEnvironment | None:
        """Return what the name of an environment stands for; None if no plug-in makes it.

        Raises:
            ConfigError: The plug-in cannot be imported, or needs settings that are not given.
        """
        for key, named in self.named().items():
            if name in named:
                kind = plugins.find(EnvironmentKind, key)
                return FoundEnvironment(kind=kind, where=f"env.{key}.{name}", section=named[name])
        is_one = name in plugins.names("environments")
        if not is_one or plugins.find(EnvironmentKind, name).several:
            return None
        kind, section = self.settings_of(EnvironmentKind, name)
        return FoundEnvironment(kind=kind, where=f"env.{name}", section=section)

    def configured(self) -> dict[str, FoundEnvironment]:
        """Return the environments of plug-ins that have settings, by name."""
        kinds = [key for key in plugins.names("environments") if key in self]
        own = [name for named in self.named().values() for name in named]
        return {name: found for name in (*kinds, *own) if (found := self.found(name)) is not None}
