"""The scores of the rows of an evaluation, from a model that is loaded here or from a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from laurel.cli.local_scorer import check_named, find_local, open_local, say_on
from laurel.cli.scorer_settings import policy_of_settings
from laurel.errors import ConfigError, Terms, key_of, setting_of, speaking
from laurel.observe.progress import RowProgress
from laurel.rewards.load import Say, ScorerOptions

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.rewardbench_format import ReferenceFormat, RewardBenchContract
    from laurel.rewards.contract_scorer import OnBatch
    from laurel.rewards.local import LocalScorer
    from laurel.types import Group, Score

CHUNK = 256
"""Groups that are given to a model at a time."""
CHUNK_OF_SERVER = 32
"""And to a server: all of them must come back within one time limit."""
KEY_VARIABLE = "LAUREL_API_KEY"

ScoreNow = Callable[["Sequence[Group]", "OnBatch"], "list[tuple[Score, ...]]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScorer:
    """What the command line says of the model."""

    model: str
    """A directory, a hub name, or the address of a running `laurel serve`."""
    options: ScorerOptions = field(default_factory=ScorerOptions)
    settings: tuple[str, ...] = ()
    """What `--set` says; see `policy_of_settings`."""
    cpu_threads: int | None = None
    api_key_env: str | None = None
    """Variable with the key of a server; None: `LAUREL_API_KEY` where it is set."""
    reproduces: ReferenceFormat | None = None
    """Make tokens as another program does; None: by the scoring contract."""

    @property
    def is_server(self) -> bool:
        """Whether the model is behind an address."""
        return self.model.startswith(("http://", "https://"))


def check_model(scorer: EvalScorer) -> None:
    """What can be told before any row is read.

    Raises:
        UserError: No model is named, there is none at that place, or it cannot score so.
    """
    check_named(scorer.model, or_server=True)
    if not scorer.is_server:
        find_local(scorer.model, scores=True)
    elif scorer.reproduces is not None:
        raise ConfigError(
            "--compatibility decides what tokens the model reads, and a server decides that by "
            f"itself: {setting_of('--model', scorer.model)} is an address. Name the directory "
            "of the model, or "
            "its name on the hub"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenScorer:
    """A model that is ready to score, as often as it is asked."""

    console: Console
    score_now: ScoreNow
    chunk: int
    """Groups that it is given at a time."""
    own: LocalScorer | None = None
    """By the model's own contract, where `score_now` reproduces another program."""
    reference: RewardBenchContract | None = None
    """How `score_now` makes tokens then."""

    def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """One score per completion of each group, in order; a failure where there is none."""
        return self._score(groups, self.score_now)

    def score_now_quietly(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The same of a few, without a bar."""
        return self.score_now(groups, lambda *_: None)

    def score_by_contract(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The same by the model's own contract."""
        return self._score(groups, self.score_now if self.own is None else self.own.score_now)

    def _score(self, groups: Sequence[Group], score_now: ScoreNow) -> list[tuple[Score, ...]]:
        scores: list[tuple[Score, ...]] = []
        with RowProgress(
            self.console, len(groups), chunk=self.chunk, shares_screen=False
        ) as progress:
            for first in range(0, len(groups), self.chunk):
                chunk = groups[first : first + self.chunk]
                progress.show()
                scores += score_now(chunk, progress.advance)
                progress.hide(done=len(chunk))
        return scores


@contextmanager
def open_scorer(scorer: EvalScorer, console: Console) -> Iterator[OpenScorer]:
    """Load a model, or find its server.

    Raises:
        UserError: A model, a server or a setting that cannot be used.
    """
    if scorer.is_server:
        with _server(scorer, say_on(console), console) as score_now:
            yield OpenScorer(console=console, score_now=score_now, chunk=CHUNK_OF_SERVER)
    else:
        yield _local(scorer, console)


def _local(scorer: EvalScorer, console: Console) -> OpenScorer:
    place = find_local(scorer.model)
    form = scorer.reproduces
    own = open_local(
        place, scorer.options, settings=scorer.settings, cpu_threads=scorer.cpu_threads,
        console=console, note_max_length=form is None,
    )  # fmt: skip
    if form is None:
        return OpenScorer(console=console, score_now=own.score_now, chunk=CHUNK)
    from laurel.models.rewardbench_format import RewardBenchContract
    from laurel.rewards.local import LocalScorer

    policy = policy_of_settings(scorer.settings, rules=None, say=lambda _: None)
    reference = RewardBenchContract.beside(own.contract, policy, place.name, form=form)
    console.print(
        f"format  of {form.program}: more than {reference.form.max_length:,} tokens are cut on the "
        f"{reference.form.truncation_side}",
        soft_wrap=True,
    )
    other = LocalScorer(own.model, reference, batch_tokens=own.batch_tokens)
    return OpenScorer(
        console=console, score_now=other.score_now, chunk=CHUNK, own=own, reference=reference
    )


@contextmanager
def _server(scorer: EvalScorer, say: Say, console: Console) -> Iterator[ScoreNow]:
    from laurel.config.environments import RewardModelEnvironmentConfig
    from laurel.environments.open_scorer import open_scorer as open_server
    from laurel.rewards.blocking import BlockingScorer

    if scorer.settings:
        raise ConfigError(
            f"--set is for a model that is loaded here, and {key_of('--model')} is an address"
        )
    variable = scorer.api_key_env or (KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None)
    with console.status(f"asking {scorer.model}"), speaking(_ADDRESS):
        try:
            config = RewardModelEnvironmentConfig(
                urls=[scorer.model], api_key_env=variable, connect_patience=0.0
            )
        except ValidationError as error:
            said = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
            raise ConfigError(said) from error
        found = open_server(config, device=scorer.options.device, say=say)
    blocking = BlockingScorer(found)
    try:
        yield lambda groups, _: blocking.score_now(groups)
    finally:
        blocking.close()


_ADDRESS = Terms(
    {
        "env.reward_model": "--model",
        "env.reward_model.api_key_env": "--api-key-env",
        "urls": "--model",
        "api_key_env": f"--api-key-env (default {KEY_VARIABLE})",
    }
)
"""Errors about the section of an environment, for somebody who has only the command line."""
