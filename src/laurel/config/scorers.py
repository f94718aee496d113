"""Where the scores of a reward-model environment come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from laurel.config.schema import (
    BatchingConfig,
    PackingConfig,
    RewardModelConfig,
    TokenizerConfig,
)
from laurel.config.section import Section
from laurel.errors import about, key_of

UrlProtocol = Literal["laurel", "vllm", "sglang", "sglang_embeddings", "openrlhf", "slime"]
RENDERED: frozenset[str] = frozenset({"sglang", "sglang_embeddings", "openrlhf"})
"""Protocols whose servers take conversations that somebody has rendered for them."""
SCORE_PATTERN = r"[Ss]core\W*?[:=]\W*?(-?\d+(?:\.\d+)?)"
"""`Score: 7`, `**Score:** 7`, `"score": 7` and their like."""


def checked_urls(urls: Sequence[str]) -> None:
    """Refuse what is no address of HTTP, or has a password in it.

    Raises:
        ValueError: The first of them.
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
    """Without what may be a secret: a password, a query."""
    address = url.partition("?")[0].partition("#")[0]
    return ascii(address.rpartition("@")[2])


class AskingConfig(Section):
    """How servers are asked that others have started."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the API key; never the key itself."""
    request_timeout: float = Field(default=120.0, gt=0)
    """Seconds for a score, all tries together; a completion without one then has failed."""
    attempt_timeout: float = Field(default=30.0, gt=0)
    """Seconds of one try."""
    hedge: bool = False
    """Ask a second server as well where an answer takes unusually long. Default: it doubles some of
    the work."""
    connect_patience: float = Field(default=60.0, ge=0)
    """Seconds to wait for a server that does not answer yet when the run begins."""

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
    def _times_fit(self) -> AskingConfig:
        if self.attempt_timeout > self.request_timeout:
            raise ValueError(
                f"attempt_timeout={self.attempt_timeout:g} is one try of request_timeout="
                f"{self.request_timeout:g} seconds, and cannot be longer"
            )
        return self


class JudgeConfig(AskingConfig):
    """A language model that is asked for a score, at an OpenAI-compatible endpoint.

    What it is shown was written by the policy, which learns to persuade it. The default template
    puts the response between marks that the policy cannot write; a template of your own should too.
    """

    urls: list[str] = Field(min_length=1)
    """Servers of the same judge; `/v1/chat/completions` is added where it is not there."""
    model: str
    """What the servers call it."""
    template: str | None = None
    """Jinja2 text of the question. It may use `prompt` (text of the last user message),
    `response`, `conversation` (messages with `role` and `content`, the response left out),
    `ground_truth` (none where the task has none) and `mark` (a word that the response does not
    hold). Null asks for a score from 0 to 10."""
    system: str | None = None
    """A system message, as it is."""
    score_pattern: str = SCORE_PATTERN
    """Regular expression with one group, the number; not used where `score_key` is set."""
    score_key: str | None = None
    """Key of the number in a JSON object of the reply."""
    which: Literal["last", "first"] = "last"
    """The match or object that counts where there are several. A judge that quotes what it judges
    does so before its verdict."""
    lowest: float | None = 0.0
    """A lower number is no score; null: any is one."""
    highest: float | None = 10.0
    """A higher number is no score; null: any is one."""
    num_samples: int = Field(default=1, ge=1)
    """Replies of which the score is the mean."""
    min_samples: int = Field(default=1, ge=1)
    """Replies with a score that there must be; with fewer the completion has failed."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the replies."""
    seed: int | None = 0
    """Of the first reply, and one more with each; null: the server's."""
    max_tokens: int = Field(default=1024, ge=1)
    """Of one reply. One that is cut off has no score."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More keys of the request, as they are, e.g. `chat_template_kwargs`."""
    request_timeout: float = Field(default=600.0, gt=0)
    """Seconds for a score, all tries together; a completion without one then has failed."""
    attempt_timeout: float = Field(default=120.0, gt=0)
    """Seconds of one try."""

    @model_validator(mode="after")
    def _can_judge(self) -> JudgeConfig:
        checked_urls(self.urls)
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
        if None not in (self.lowest, self.highest) and not _rises(self.lowest, self.highest):
            raise ValueError(f"lowest={self.lowest} must be below highest={self.highest}")
        if self.template is None and None in (self.lowest, self.highest):
            raise ValueError(
                "template=null asks for a score from lowest to highest, and one of them is null; "
                "give both, or a template"
            )
        taken = sorted({"model", "messages", "n", "stream"} & self.extra_body.keys())
        if taken:
            raise ValueError(f"extra_body must not hold {', '.join(taken)}: Laurel writes that")
        return self


def _rises(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low < high


class FunctionConfig(Section):
    """A Python function that scores."""

    path: str
    """`module:function`, or `path/to/file.py:function`. It is called as verl calls it, with
    `data_source`, `solution_str`, `ground_truth` and `extra_info`, and returns a number, or a
    dictionary with a `score` and other numbers, which are logged. It may be async."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments, passed as they are."""
    group: bool = False
    """Call it once for all completions of a prompt, with the lists `data_sources`, `solution_strs`,
    `ground_truths` and `extra_infos`, for a list of results."""
    timeout: float = Field(default=30.0, gt=0)
    """Seconds of one call. With `num_workers` of the environment above 0 its process is killed
    then; a thread cannot be, and is left behind."""
    data_source: str = ""
    """Told to the function where a task has none of its own."""
    router: str | None = None
    """`HOST:PORT` of a server of a model that the function asks itself (`laurel serve`, vLLM,
    SGLang), given to a function that takes `reward_router_address`, as verl gives it."""
    tokenizer: str | None = None
    """Hub name or directory of a model whose tokenizer is given to a function that takes
    `reward_model_tokenizer`, as verl gives it."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Calls at a time; null: 16 in threads, 256 of an async function, or the number of
    processes."""
    max_rpm: float | None = Field(default=None, gt=0)
    """Calls a minute, evenly, as an API allows them; null: any number. The time until its turn does
    not count in `timeout`."""
    max_tpm: float | None = Field(default=None, gt=0)
    """Tokens a minute, where a call stands for `estimated_tokens_per_request`."""
    estimated_tokens_per_request: float = Field(default=2000, gt=0)
    """For `max_tpm`."""

    @field_validator("router")
    @classmethod
    def _is_an_address(cls, router: str | None) -> str | None:
        """Functions put `http://` before it themselves."""
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


class ScorerSource(AskingConfig):
    """What gives scores: a model that is loaded, servers, a judge or a function. One of them."""

    model_name: str | None = None
    """Hub name or directory of the reward model, or a directory of checkpoints. With `urls` only
    its tokenizer, template and contract are read."""
    checkpoint_path: str | None = None
    """Directory whose weights are used instead of those of `model_name`."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Null names are those of the model."""
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the weights and of the decoder's arithmetic; the head is float32 either way.
    Default: half the memory; groups are kept from its noise by `noise_floor_factor`."""
    batch_size: int = Field(default=32, ge=1)
    """Conversations of one forward pass where neither packing nor dynamic batching is on; with
    them the token budget counts."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest conversation in tokens, for a model that brings no contract of its own; null is 8192,
    or fewer where the model has fewer positions. Longer ones are truncated and counted."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    safetensors_only: bool = True
    """Refuse pickled weights."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig(enabled=True)
    """See there."""
    sequence_packing: PackingConfig = PackingConfig()
    """Token forests: several times faster and exact."""
    dynamic_batching: BatchingConfig = BatchingConfig()
    """Where packing is off: padded batches up to a token budget."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Token budget of one forward pass."""
    batch_timeout: float = Field(default=300.0, gt=0)
    """Seconds of one forward pass in a process of its own. A replica that takes longer hangs: it is
    started again, and others score what it had."""
    urls: list[str] | None = None
    """Addresses of servers of one reward model, which this run does not start; any may fail."""
    url_protocol: UrlProtocol = "laurel"
    """What they speak: `laurel serve`, vLLM's `/classify`, SGLang's `/classify` or
    `/v1/embeddings`, OpenRLHF's `/get_reward`, or slime's remote_rm. Where a server takes rendered
    conversations, `model_name` must say by whose template."""
    url_model: str = ""
    """What they call the model, where they ask for it."""
    reward_key: str = ""
    """Key of the score in the answer of slime's servers; empty: the answer is the score."""
    model_version: str = ""
    """Version of the model; scores of another are refused. Empty: that of the first answer."""
    judge: JudgeConfig | None = None
    """A language model that is asked for a score."""
    function: FunctionConfig | None = None
    """A Python function that scores."""

    @field_validator("reward_model_cfg")
    @classmethod
    def _is_enabled(cls, value: RewardModelConfig) -> RewardModelConfig:
        """Nobody writes `enabled` where there is nothing else that it could be."""
        said = "enabled" in value.model_fields_set
        return value if said else value.model_copy(update={"enabled": True})

    @model_validator(mode="after")
    def _is_one_source(self) -> ScorerSource:
        if not self.reward_model_cfg.enabled:
            raise ValueError("reward_model_cfg.enabled must be true in a reward-model environment")
        if self.urls is not None:
            self._check_urls(self.urls)
        else:
            for key in ("url_model", "reward_key", "model_version", "hedge", "api_key_env"):
                if getattr(self, key) != ScorerSource.model_fields[key].default:
                    where = "; a judge has its own" if self.judge is not None else ""
                    raise ValueError(f"{key} says how urls are asked, and there are none{where}")
        if len(self._sources()) > 1:
            raise ValueError(f"{' and '.join(self._sources())} cannot both give the score")
        return self

    def _check_urls(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ValueError("urls is empty: name a server, or leave the key out")
        checked_urls(urls)
        if self.url_protocol in RENDERED and not self._model:
            raise ValueError(
                f"url_protocol={self.url_protocol}: its servers take rendered conversations, so "
                "name the reward model (model_name), whose template and tokenizer are used"
            )
        if self.reward_key and self.url_protocol != "slime":
            raise ValueError(f"reward_key is for url_protocol=slime, not {self.url_protocol}")
        if self.hedge and len(urls) < 2:
            raise ValueError("hedge asks a second server, and urls has only one")

    def _sources(self) -> list[str]:
        found = {
            "urls": self.urls is not None,
            "model_name": self.urls is None and self._model is not None,
            "judge": self.judge is not None,
            "function": self.function is not None,
        }
        return [name for name, is_there in found.items() if is_there]

    @property
    def _model(self) -> str | None:
        return self.checkpoint_path or self.model_name

    @property
    def loads_model(self) -> bool:
        """Whether the weights of a reward model are needed: nothing else is to give the scores."""
        return self.urls is None and self.judge is None and self.function is None

    @property
    def uses_workers(self) -> bool:
        """Whether this run renders conversations, for a model that it loads or for servers that are
        sent rendered ones; or whether it runs a function."""
        is_sent_rendered = self.url_protocol in RENDERED or self.url_protocol == "vllm"
        renders_for_servers = self.urls is not None and is_sent_rendered and bool(self._model)
        return self.loads_model or renders_for_servers or self.function is not None

    @property
    def judges_groups(self) -> bool:
        """Whether all completions of a prompt must be judged in one call."""
        return self.function is not None and self.function.group


class EnsemblePart(ScorerSource):
    """One of several reward models that judge the same conversation."""

    name: str = Field(pattern=r"^[A-Za-z][\w.-]*$")
    """What its scores are called in figures."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    normalize: Literal["stored", "none"] = "stored"
    """`stored`: subtract the mean and divide by the standard deviation that the model was saved
    with, or those that stand here; `none`: take its scores as they are."""
    mean: float | None = None
    """Instead of the stored one, and for what has none stored: a judge, a function, servers."""
    std: float | None = Field(default=None, gt=0)
    """Likewise."""

    @model_validator(mode="after")
    def _is_whole(self) -> EnsemblePart:
        if not self._sources():
            raise ValueError(
                f"the model '{self.name}' has no source: give it a model_name, urls, a judge or a "
                "function"
            )
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together")
        if self.normalize == "none" and self.mean is not None:
            raise ValueError("normalize=none does not use mean and std; leave them out")
        if self.normalize == "stored" and self.mean is None and not self._model:
            raise ValueError(
                f"normalize=stored: nothing is stored with what '{self.name}' names; give its mean "
                "and std, or normalize=none"
            )
        return self
