"""From the settings of a reward-model environment to its scorer, errors first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.config.schema import PolicyConfig, TokenizerConfig
from laurel.errors import (
    ConfigError,
    Terms,
    UserError,
    WorkerError,
    key_of,
    speaking,
    spoken_in,
    terms_in_use,
)
from laurel.models.parallel import ParallelShape
from laurel.models.scoring import ScoringContract, ScoringRules
from laurel.protocols import WorkerGroup
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.group_scorer import GroupScorer
from laurel.rewards.load import (
    ModelPlace,
    Say,
    ScorerOptions,
    check_at_once,
    check_files,
    check_not_missing,
    find_model,
    load_scorer,
    read_contract,
    read_rules,
)
from laurel.rewards.local import LocalScorer
from laurel.rewards.scoring_worker import ScoringWorker

WHERE = "env.reward_model"
"""What the section is called in messages."""
Device = Literal["auto", "cpu", "cuda"]
MakeGroup = Callable[..., WorkerGroup]
"""Called with the class of the workers, and what each is made with besides its place."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IN_THE_SECTION = Terms(
    {"policy": WHERE, "policy.max_total_sequence_length": f"{WHERE}.max_model_len"}
)
"""Errors about a model, for whoever wrote the section of the environment."""


def open_reward_model(
    config: RewardModelEnvironmentConfig, *, device: Device, say: Say
) -> LocalScorer:
    """The scorer that the settings describe, in this process.

    Args:
        config: The settings.
        device: Where the model goes.
        say: Told what was loaded, found and decided.

    Raises:
        UserError: A setting or a model that cannot be used. What can be told without loading the
            model is told before.
    """
    check_one_rank(config)
    with _in_its_words(config):
        place, options = _found(config, tp=1, device=device, say=say)
        return load_scorer(place, options, say=say)


def open_in_vllm(config: RewardModelEnvironmentConfig, *, say: Say) -> ContractScorer:
    """The scorer that the settings describe, in vLLM's processes on this machine.

    Raises:
        UserError: As `open_reward_model`; or vLLM is not installed.
        EngineError: vLLM does not start.
    """
    from laurel.engines.vllm_pooling import PoolingOptions
    from laurel.engines.vllm_settings import check_has_vllm
    from laurel.rewards.vllm_scorer import load_vllm_scorer

    assert config.generation is not None
    settings = config.generation.vllm_cfg
    check_has_vllm(f"{WHERE}.generation.backend=vllm")
    pooling = PoolingOptions(
        tensor_parallel_size=settings.tensor_parallel_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        may_sleep=True,
    )
    with _in_its_words(config):
        place, options = _found(config, tp=1, device="auto", say=say)
        return load_vllm_scorer(place, options, say=say, pooling=pooling)


def check_one_rank(config: RewardModelEnvironmentConfig) -> None:
    """Refuse a model of several ranks.

    Raises:
        ConfigError: It asks for them.
    """
    if config.dtensor_cfg.tensor_parallel_size > 1:
        raise ConfigError(
            f"{key_of('env.reward_model.dtensor_cfg.tensor_parallel_size')}="
            f"{config.dtensor_cfg.tensor_parallel_size}: here the reward model is in one process; "
            "set it to 1, or use RewardModelEnvironment.remote(...)"
        )


def open_reward_model_group(
    config: RewardModelEnvironmentConfig,
    make_group: MakeGroup,
    *,
    shape: ParallelShape,
    device: Device,
    say: Say,
) -> GroupScorer:
    """The scorer that the settings describe, in processes of their own; `close` ends them.

    Args:
        config: The settings; `shape` says how many ranks compute one replica.
        make_group: Called once, with the class of the workers and what they are made with.
        shape: `dp_replicate` replicas of `tp` ranks each.
        device: Where the model goes.
        say: Told what was loaded, found and decided.

    Raises:
        UserError: As `open_reward_model`; what can be told without the group is told before.
        WorkerError: A worker died, or failed for another reason.
    """
    found = found_reward_model(config, tp=shape.tp, device=device, say=say)
    return found.open(make_group, shape=shape, say=say)


def found_reward_model(
    config: RewardModelEnvironmentConfig, *, tp: int, device: Device, say: Say
) -> FoundRewardModel:
    """The model that the settings mean now, its files checked; nothing is loaded.

    Raises:
        UserError: See `open_reward_model`.
    """
    with _in_its_words(config):
        place, options = _found(config, tp=tp, device=device, say=say)
    return FoundRewardModel(config, place, options)


@dataclass(frozen=True, slots=True)
class FoundRewardModel:
    """A model that can be opened any number of times, and is the same each time."""

    config: RewardModelEnvironmentConfig
    place: ModelPlace
    options: ScorerOptions

    def open(self, make_group: MakeGroup, *, shape: ParallelShape, say: Say) -> GroupScorer:
        """The scorer in processes of its own; see `open_reward_model_group`."""
        with _in_its_words(self.config):
            # The workers say what is wrong in the words that it is said in here.
            load = partial(spoken_in, terms_in_use(), load_scorer, self.place, self.options)
            try:
                group = make_group(ScoringWorker, load, shape=shape, device=self.options.device)
            except WorkerError as error:
                cause = error.__cause__
                if isinstance(cause, UserError):  # every rank says the same
                    raise type(cause)(str(cause)) from error
                raise
        try:
            scorer = GroupScorer(
                group,
                batch_tokens=self.options.batch_tokens,
                batch_size=self.options.batch_size,
                batch_timeout=self.config.batch_timeout,
            )
        except BaseException:
            group.shutdown()
            raise
        for line in scorer.said:
            say(line)
        return scorer


def read_contract_of(config: RewardModelEnvironmentConfig, *, say: Say) -> ScoringContract:
    """The contract of the model that the settings name, whose weights servers hold.

    Raises:
        UserError: See `open_reward_model`.
    """
    with _in_its_words(config):
        place = _place_of(config)
        rules = read_rules(place)
        _check_against(config, rules, place, say)
        return read_contract(place, _options(config, place, tp=1, device="cpu"), say=say)


def rules_of(config: RewardModelEnvironmentConfig) -> ScoringRules | None:
    """The scoring contract that was saved with the model that the settings name, if one was.

    Raises:
        UserError: There is no such model.
    """
    if config.model_name is None and config.checkpoint_path is None:
        return None
    with _in_its_words(config):
        return read_rules(_place_of(config))


def _place_of(config: RewardModelEnvironmentConfig) -> ModelPlace:
    return find_model(config.checkpoint_path or config.model_name or "")


def _in_its_words(config: RewardModelEnvironmentConfig) -> AbstractContextManager[None]:
    """Errors in the words of the section, for as long as the model is opened."""
    model_key = "model_name" if config.checkpoint_path is None else "checkpoint_path"
    model_name = {"policy.model_name": f"{WHERE}.{model_key}"}
    return speaking(Terms({**IN_THE_SECTION.names, **model_name}))


def _found(
    config: RewardModelEnvironmentConfig, *, tp: int, device: Device, say: Say
) -> tuple[ModelPlace, ScorerOptions]:
    """The model, its files checked, and how it is to score."""
    _check_settings(config)
    place = _place_of(config)
    for note in place.notes:
        say(note)
    check_at_once(place)
    check_files(place)
    rules = read_rules(place)
    _check_against(config, rules, place, say)
    return place, _options(config, place, tp=tp, device=device)


def _options(
    config: RewardModelEnvironmentConfig, place: ModelPlace, *, tp: int, device: Device
) -> ScorerOptions:
    """How the model is to score."""
    policy = PolicyConfig(
        trust_remote_code=config.trust_remote_code,
        safetensors_only=config.safetensors_only,
        tokenizer=_tokenizer(config, place),
        sequence_packing=config.sequence_packing,
        reward_model_cfg=config.reward_model_cfg,
        dtensor_cfg=config.dtensor_cfg.model_copy(update={"tensor_parallel_size": tp}),
    )
    return replace(
        _batches(config),
        max_length=config.max_model_len,
        precision=config.precision,
        device=device,
        policy=policy,
    )


def _check_settings(config: RewardModelEnvironmentConfig) -> None:
    """What the settings alone get wrong.

    Raises:
        ConfigError: The first thing found.
    """
    if config.model_name is None and config.checkpoint_path is None:
        raise ConfigError(
            f"{key_of('env.reward_model.model_name')} is missing: name a reward model, as a "
            "directory (of a "
            "model, a checkpoint or a run with checkpoints) or on the Hugging Face hub"
        )
    parallel = config.dtensor_cfg
    unknown = {
        "context_parallel_size": parallel.context_parallel_size > 1,
        "sequence_parallel": parallel.sequence_parallel,
        "cpu_offload": parallel.cpu_offload,
    }
    for key, is_set in unknown.items():
        if is_set:
            raise ConfigError(
                f"{key_of('env.reward_model.dtensor_cfg')}.{key}: a reward model that judges is "
                "spread by "
                "tensor_parallel_size alone; set it to its default"
            )
    if parallel.lora_cfg.enabled:
        raise ConfigError(
            f"{key_of('env.reward_model.dtensor_cfg')}.lora_cfg.enabled: a reward model is not "
            "trained here; "
            "checkpoints of Laurel hold merged weights, so name the checkpoint and leave this out"
        )


def _check_against(
    config: RewardModelEnvironmentConfig, rules: ScoringRules | None, place: ModelPlace, say: Say
) -> None:
    """Settings that the contract of the model, or its lack, contradicts or makes useless."""
    if config.transform.normalize == "stored" and (rules is None or not rules.std):
        raise ConfigError(
            f"{key_of('env.reward_model.transform.normalize')}=stored: {place.name} has no "
            "scoring.json with "
            "the mean and standard deviation of its scores. Choose running or none"
        )
    if rules is None:
        return
    wanted = config.reward_model_cfg.attributes
    if wanted and wanted != list(rules.attributes):
        raise ConfigError(
            f"{key_of('env.reward_model.reward_model_cfg.attributes')}={wanted}: {place.name} "
            "gives "
            f"{list(rules.attributes) or 'one score'}; leave the key out"
        )
    if config.max_model_len not in (None, rules.max_length):
        say(f"note    max_model_len is not used: scoring.json says {rules.max_length} tokens")


def _tokenizer(config: RewardModelEnvironmentConfig, place: ModelPlace) -> TokenizerConfig:
    """The tokenizer block, for the model that was found.

    Files usually repeat the model's name in it. Where that means the best checkpoint of a run, or
    where another directory's weights are used, the tokenizer is the one beside the weights.
    """
    given = config.tokenizer
    if given.name not in (None, config.model_name, config.checkpoint_path):
        check_not_missing(str(given.name), key="policy.tokenizer.name")
        return given
    directory = Path(place.name)
    has_own = not directory.is_dir() or any((directory / f).is_file() for f in TOKENIZER_FILES)
    name = None if has_own or config.checkpoint_path is None else config.model_name
    return given.model_copy(update={"name": name})


def _batches(config: RewardModelEnvironmentConfig) -> ScorerOptions:
    """How conversations are divided over forward passes."""
    for block in (config.sequence_packing, config.dynamic_batching):
        if block.enabled:
            return ScorerOptions(batch_tokens=block.train_mb_tokens or config.batch_tokens)
    return ScorerOptions(batch_size=config.batch_size)
