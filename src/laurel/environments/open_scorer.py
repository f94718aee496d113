"""From the settings of a reward-model environment to whatever gives its scores."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.config.scorers import AskingConfig, EnsemblePart, ScorerSource
from laurel.environments.load_reward_model import (
    WHERE,
    Device,
    MakeGroup,
    read_contract_of,
    rules_of,
)
from laurel.environments.open_reward_loop import Opening, opening_here
from laurel.errors import ConfigError, Terms, setting_of, speaking
from laurel.models.scoring import ScoringContract
from laurel.protocols import Scorer
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.ensemble import EnsembleScorer, Member
from laurel.rewards.function_scorer import FunctionScorer
from laurel.rewards.judge import JudgeScorer
from laurel.rewards.load import Say
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.preparing import Preparers
from laurel.rewards.remote.http_scorer import HttpScorer
from laurel.rewards.remote.replica import close_scorer
from laurel.rewards.remote.router import Router
from laurel.rewards.remote.router_options import Canary, RouterOptions
from laurel.rewards.remote.server_check import ServerCheck


def open_scorer(
    config: RewardModelEnvironmentConfig,
    *,
    device: Device,
    say: Say,
    opening: Opening | None = None,
) -> Scorer:
    """What the settings say gives the scores: one model, servers, a judge, a function, or several.

    Servers are asked for a first score, so that a wrong address or key is told at once.

    Args:
        config: The settings.
        device: Where models go that are loaded here.
        say: Told what was loaded, found and decided.
        opening: How models and processes are opened; None: here.

    Raises:
        UserError: A setting, a model, a server or a function that cannot be used. What can be told
            without loading or asking is told before.
    """
    opening = opening or opening_here(device=device, say=say)
    if config.models is None:
        check_keys(config, where=WHERE)
        return _open(config, where=WHERE, opening=opening, say=say)
    return _open_ensemble(config, config.models, opening=opening, say=say)


def statistics_of(
    config: RewardModelEnvironmentConfig, scorer: Scorer | None = None
) -> tuple[float | None, float | None]:
    """Mean and standard deviation that a model was saved with which servers hold; None: not known.

    Args:
        config: The settings.
        scorer: Given to the environment, in which case they say nothing of it.
    """
    if scorer is not None or config.urls is None:
        return None, None
    rules = rules_of(config)
    return (rules.mean, rules.std) if rules is not None else (None, None)


def merges(scorer: Scorer) -> bool:
    """Whether completions of a prompt may come one by one and nothing is computed twice for it."""
    if isinstance(scorer, EnsembleScorer):
        return all(merges(member.scorer) for member in scorer.members)
    return isinstance(scorer, LoopScorer) or not isinstance(scorer, ContractScorer)


def check_keys(config: ScorerSource, *, where: str) -> None:
    """Refuse to begin without the API keys that will be needed.

    Raises:
        ConfigError: Which variable is not set.
    """
    _key(config, where)
    if config.judge is not None:
        _key(config.judge, f"{where}.judge")


def _key(config: AskingConfig, where: str) -> str | None:
    name = config.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"{setting_of(f'{where}.api_key_env', name)}: there is no such environment variable, "
            "or it is empty; "
            f"run with {name}=... in the environment"
        )
    return key


# ------------------------------------------------------------------------------ one of each kind


def _open(
    config: RewardModelEnvironmentConfig, *, where: str, opening: Opening, say: Say, name: str = ""
) -> Scorer:
    if config.urls is not None:
        return _open_servers(
            config, config.urls, where=where, make_worker=opening.make_worker, say=say
        )
    if config.judge is not None:
        judge = JudgeScorer(
            config.judge, api_key=_key(config.judge, f"{where}.judge"), where=f"{where}.judge"
        )
        return _checked(judge, config.judge, contract=None, where=f"{where}.judge", say=say)
    if config.function is not None:
        return FunctionScorer(
            config.function, num_workers=config.num_workers, where=f"{where}.function"
        )
    return opening.open_model(config, name)


def _open_servers(
    config: RewardModelEnvironmentConfig,
    urls: list[str],
    *,
    where: str,
    make_worker: MakeGroup,
    say: Say,
) -> Scorer:
    contract = (
        read_contract_of(config, say=say) if config.checkpoint_path or config.model_name else None
    )
    preparers = None
    if contract is not None and config.num_workers:
        preparers = Preparers(contract, config.num_workers, make_worker)
    scorer = HttpScorer(
        urls,
        protocol=config.url_protocol,
        api_key=_key(config, where),
        contract=contract,
        model=config.url_model,
        reward_key=config.reward_key,
        preparers=preparers,
        options=RouterOptions(
            timeout=config.request_timeout,
            attempt_timeout=config.attempt_timeout,
            hedge=config.hedge,
            version=config.model_version,
            canary=Canary(),
        ),
    )
    try:
        return _checked(scorer, config, contract=contract, where=where, say=say)
    except BaseException:
        if preparers is not None:
            preparers.close()
        raise


def _checked(
    scorer: Router,
    config: AskingConfig,
    *,
    contract: ScoringContract | None,
    where: str,
    say: Say,
) -> Router:
    """The scorer, once every server has shown that it can score."""
    check = ServerCheck(
        patience=config.connect_patience, limit=config.attempt_timeout, say=say, where=where,
        contract=contract, has_canary=scorer.options.canary is not None,
        version=scorer.options.version,
    )  # fmt: skip
    replicas = [standing.replica for standing in scorer.standings.values()]
    _run(lambda: check.check_all(replicas))
    return scorer


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end, whether or not the caller has an event loop."""
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(context.run, lambda: asyncio.run(work())).result()


# --------------------------------------------------------------------------------------- several


def _open_ensemble(
    config: RewardModelEnvironmentConfig, parts: list[EnsemblePart], *, opening: Opening, say: Say
) -> Scorer:
    named = [(part, f"{WHERE}.models[{index}]") for index, part in enumerate(parts)]
    for part, where in named:
        check_keys(part, where=where)
    statistics = {part.name: _statistics(part, where) for part, where in named}
    found: dict[str, Scorer] = {}
    with ExitStack() as opened:
        # What takes no loading is tried first.
        for part, where in sorted(named, key=lambda one: one[0].loads_model):
            with speaking(_terms_of_part(where)):
                alone = _alone(part, config)
                scorer = _open(alone, where=where, opening=opening, say=say, name=part.name)
            opened.callback(_run, partial(close_scorer, scorer))
            found[part.name] = scorer
        opened.pop_all()
    return EnsembleScorer(
        [
            Member(
                name=part.name, scorer=found[part.name], weight=part.weight,
                mean=statistics[part.name][0], std=statistics[part.name][1],
            )
            for part in parts
        ],
        combine=config.combine,
        uncertainty_penalty=config.uncertainty_penalty,
    )  # fmt: skip


def _alone(part: EnsemblePart, whole: RewardModelEnvironmentConfig) -> RewardModelEnvironmentConfig:
    """A member's settings as those of an environment."""
    own = {name: getattr(part, name) for name in ScorerSource.model_fields}
    return RewardModelEnvironmentConfig(
        **own, num_workers=whole.num_workers if part.uses_workers else 0,
        use_reward_loop=whole.use_reward_loop,
        dtensor_cfg=whole.dtensor_cfg,
    )  # fmt: skip


def _terms_of_part(where: str) -> Terms:
    """Errors about the environment's section, for whoever wrote the section of a member."""
    return Terms({f"{WHERE}.{key}": f"{where}.{key}" for key in EnsemblePart.model_fields})


def _statistics(part: EnsemblePart, where: str) -> tuple[float, float]:
    """What a member's scores are normalised with.

    Raises:
        ConfigError: It has none.
    """
    if part.normalize == "none":
        return 0.0, 1.0
    if part.mean is not None and part.std is not None:
        return part.mean, part.std
    with speaking(_terms_of_part(where)):
        rules = rules_of(
            RewardModelEnvironmentConfig(
                model_name=part.model_name, checkpoint_path=part.checkpoint_path
            )
        )
    if rules is None or rules.mean is None or not rules.std:
        raise ConfigError(
            f"{where}.normalize=stored: {part.checkpoint_path or part.model_name} has no "
            "scoring.json with the mean and standard deviation of its scores. Give its mean and "
            "std, or normalize=none"
        )
    return rules.mean, rules.std
