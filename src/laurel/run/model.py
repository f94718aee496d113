"""Describes, finds, sizes and loads the model that a run trains, here or over a cluster's ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from laurel.config.load import to_yaml, translated
from laurel.config.policy import (
    PolicyConfig,
    RewardModelConfig,
    RewardPolicyConfig,
    RoleName,
    TokenizerConfig,
)
from laurel.config.yaml_tree import Section, YamlNode, plain_values, read_document
from laurel.errors import CheckpointError, ConfigError, ModelError, speaking
from laurel.models.checkpoint.manifest import MANIFEST_NAME
from laurel.models.checkpoint.store import steps_in
from laurel.models.spec import ModelSpec
from laurel.observe.console import format_parameters, quiet_libraries, say_on
from laurel.observe.hub import check_fetchable
from laurel.planning.memory import GIB, ModelShape, Shapes, decoder_shape, parse_shape
from laurel.planning.plan import plan_run
from laurel.run.context import R, RunContext, describe_data, describe_output
from laurel.run.request import model_server, request_of, uses_reward_model
from laurel.sandbox.limits import available_memory

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from laurel.config.environments import ScorerSource, ScoringParallelConfig
    from laurel.config.schemas import Run
    from laurel.data.report import TextReport
    from laurel.rewards.spec import Say
    from laurel.run.allocation import Allocation
    from laurel.training.learner import Learner
    from laurel.training.learner_group import Load, ModelFacts


_NO_HEAD = RewardModelConfig()


def model_spec(policy: PolicyConfig) -> ModelSpec:
    """Return the spec of the model that a `policy` section describes."""
    is_named = policy.scratch is None or "model_name" in policy.model_fields_set
    parallel = policy.dtensor_cfg
    return ModelSpec(
        name=policy.model_name if is_named else None,
        revision=policy.revision,
        trust_remote_code=policy.trust_remote_code,
        safetensors_only=policy.safetensors_only,
        config_overrides=policy.hf_config_overrides,
        scratch=policy.scratch,
        tokenizer=policy.tokenizer,
        head=policy.reward_model_cfg if isinstance(policy, RewardPolicyConfig) else _NO_HEAD,
        precision=policy.precision,
        compile=policy.compile,
        reads_forests=policy.sequence_packing.enabled,
        lora=parallel.lora_cfg if parallel.lora_cfg.enabled else None,
        activation_checkpointing=parallel.activation_checkpointing,
        tensor_parallel_size=parallel.tensor_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        cpu_offload=parallel.cpu_offload,
        parallel_plan=parallel.custom_parallel_plan,
    )


def teacher_spec(policy: PolicyConfig, name: str) -> ModelSpec:
    """Return the spec of the model from which a policy learns besides, spread as the policy is."""
    return replace(
        model_spec(policy),
        name=name,
        revision=None,
        config_overrides={},
        scratch=None,
        tokenizer=TokenizerConfig(),
        lora=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedModel:
    """A model being trained, with its optimizer, in this process or in others."""

    learner: Learner
    facts: ModelFacts
    in_process: Any | None
    """The model object itself; None if other processes hold it."""


def load_trained_model(
    context: RunContext[R],
    *,
    load: Load,
    seed: int,
    load_reference: Load | None = None,
    load_teacher: Load | None = None,
    with_entropy: bool = False,
    check_room: Callable[[torch.device], None] | None = None,
) -> TrainedModel:
    """Load the model to train, check it, and build its optimizer.

    Args:
        load: A function that loads the model, as `LearnerWorker` takes it.
        seed: The seed of dropout.
        check_room: A function that checks, given the device, that the model fits there; it is
            called before a model is loaded into this process.

    Raises:
        ConfigError: torch lacks the optimizer or scheduler, or refuses its arguments.
        CheckpointError: The checkpoint to resume from belongs to a run with other settings.
    """
    policy, cluster = context.config.policy, context.config.cluster
    with context.console.status("loading torch and the model"):
        from torch import nn

        from laurel.training.learner import build_optimizer, build_scheduler
        from laurel.training.learner_group import LearnerWorker
        from laurel.workers.process import choose_device
        from laurel.workers.rendezvous import RankPlace

        quiet_libraries()
        if context.resume_from:
            for line in check_same_settings(context.resume_from, context.config):
                context.console.print(line)
        # Settings that torch refuses are reported before anything is loaded.
        optimizer = build_optimizer(policy.optimizer, list(nn.Linear(1, 1).named_parameters()))
        build_scheduler(policy.scheduler, optimizer)
        settings: dict[str, Any] = {
            "optimizer": policy.optimizer,
            "scheduler": policy.scheduler,
            "max_grad_norm": policy.max_grad_norm,
            "cluster": cluster,
            "seed": seed,
            "load_reference": load_reference,
            "load_teacher": load_teacher,
            "with_entropy": with_entropy,
        }
        if context.allocation is None:
            from laurel.models.spec import ParallelShape

            if check_room is not None:
                check_room(choose_device(cluster.device))
            worker = LearnerWorker(
                RankPlace(role="policy"), load, shape=ParallelShape(), **settings
            )
            return TrainedModel(
                learner=worker.learner, facts=worker.describe(), in_process=worker.learner.model
            )
    return _spread(context.allocation, load, settings, console=context.console)


def load_policy_to_train(
    context: RunContext[R],
    *,
    seed: int,
    texts: Iterable[str],
    temperature: float = 1.0,
    needs_reference: bool = False,
    teacher: str | None = None,
    samples_from_copy: bool = False,
    with_entropy: bool = False,
) -> TrainedModel:
    """Load the policy with its optimizer, after checking that it fits into memory.

    Args:
        seed: The seed of adapters, a model from scratch and dropout.
        texts: The texts on which a tokenizer from scratch is trained.
        temperature: The temperature at which completions are sampled.
        needs_reference: Whether a frozen copy of the policy before training is kept.
        samples_from_copy: Whether the generator keeps a copy of the weights.
    """
    with context.console.status("loading torch"):
        from laurel.models.loading.policy import load_policy
    policy, resume_from = context.config.policy, context.resume_from
    load = partial(
        load_policy,
        model_spec(policy),
        seed=seed,
        max_length=policy.max_total_sequence_length,
        texts=tuple(texts) if policy.scratch is not None else (),
        temperature=temperature,
    )
    resumed = partial(load, resume_from=resume_from) if resume_from else load
    check_room = partial(
        check_memory,
        policy,
        needs_reference=needs_reference,
        samples_from_copy=samples_from_copy,
        teacher=teacher,
    )
    load_teacher = None
    if teacher is not None:
        load_teacher = partial(
            load_policy,
            teacher_spec(policy, teacher),
            seed=seed,
            max_length=policy.max_total_sequence_length,
            temperature=temperature,
        )
    return load_trained_model(
        context,
        load=resumed,
        seed=seed,
        check_room=check_room,
        load_reference=load if needs_reference else None,
        load_teacher=load_teacher,
        with_entropy=with_entropy,
    )


def check_same_settings(directory: Path, config: Section) -> list[str]:
    """Refuse to resume from the checkpoint of a run with other settings.

    Returns:
        A line about the settings of an earlier version that there are no more, if there are any.

    Raises:
        CheckpointError: The checkpoint belongs to another run, or cannot be resumed.
    """
    from laurel.config.resuming import changes, gone
    from laurel.training.state import another_run, check_same_rows

    check_same_rows(directory, {})
    before = saved_settings(directory, type(config))
    # Both are read the same way, so that no value changes by how it is written.
    now = read_document(to_yaml(config), "this run")
    found = changes(type(config), plain_values(before), plain_values(now))
    changed = [(one.key, one.before, one.now) for one in found]
    if changed:
        raise another_run(directory, changed)
    keys_by_reason: dict[str, list[str]] = {}
    for key, instead in gone((type(config),), before):
        keys_by_reason.setdefault(instead, []).append(key)
    old = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in keys_by_reason.items())
    return [f"{directory.name} was saved with settings that are gone: {old}"] if old else []


def saved_settings(directory: Path, schema: type[Section]) -> YamlNode:
    """Return the configuration that a checkpoint was saved with, by today's names.

    Raises:
        CheckpointError: They cannot be read.
    """
    from laurel.config.resuming import (
        with_judges_beside_their_models,
        with_settings_of_all_models,
        with_values_where_they_are_now,
    )
    from laurel.training.state import CONFIG

    path = directory / CONFIG
    try:
        saved = read_document(path.read_text(encoding="utf-8"), str(path))
        saved = with_values_where_they_are_now(translated(schema, saved))
        saved = with_judges_beside_their_models(saved)
        return with_settings_of_all_models(saved)
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _spread(
    allocation: Allocation, load: Load, settings: Mapping[str, Any], *, console: Console
) -> TrainedModel:
    from laurel.training.learner_group import LearnerGroup, LearnerWorker

    shape = allocation.shape_of("policy")
    with console.status(f"starting {shape.num_ranks} ranks of the policy"):
        group = allocation.group("policy", LearnerWorker, load, shape=shape, **settings)
        learner = LearnerGroup(group, shape)
    return TrainedModel(learner=learner, facts=learner.facts, in_process=None)


def describe_model(kind: str, facts: ModelFacts, context: RunContext[R]) -> None:
    """Print which model was loaded, its facts, and where it is."""
    console = context.console
    trained = f", {format_parameters(facts.num_trained)} trained"
    console.print(
        f"{kind:<7} {facts.class_name} from {facts.base_model}: "
        f"{format_parameters(facts.num_parameters)} parameters"
        + (trained if facts.num_trained != facts.num_parameters else "")
        + f", {context.config.policy.precision} on {facts.device}"
    )
    if context.allocation is not None:
        for line in context.allocation.describe():
            console.print(f"placed  {line}")
    if facts.path == "forest":
        check = f"self-check against one-by-one: {facts.self_check:.1e}"
        console.print(f"path    token forest; {check}")
    policy = context.config.policy
    if facts.device == "cpu" and "precision" not in policy.model_fields_set:
        console.print(
            f"note    policy.precision={policy.precision} is the default, for GPUs. On a CPU "
            "float32 is more precise, and as fast or faster unless laurel doctor finds bfloat16 "
            "instructions"
        )
    for note in facts.notes:
        console.print(note if note.startswith("warning: ") else f"note    {note}")


def describe_policy(
    context: RunContext[R], facts: ModelFacts, reports: Mapping[str, TextReport], run_dir: Path
) -> None:
    """Print the facts of the data and the policy that were loaded, and the output directories."""
    describe_data(reports, run_dir, context.console)
    describe_model("policy", facts, context)
    describe_output(context, run_dir)


# The check that a policy fits beside what is loaded already, before it is loaded.


def check_memory(
    policy: PolicyConfig,
    device: torch.device,
    *,
    needs_reference: bool,
    samples_from_copy: bool,
    teacher: str | None = None,
) -> None:
    """Check that a policy's weights, gradients and optimizer state fit into the free memory.

    Activations come on top: a policy that passes may still be too large for its batches.

    Raises:
        ModelError: They do not fit; the message has the sizes, and settings that need less.
    """
    if policy.scratch is not None:
        return
    from laurel.models.loading.pretrained import count_parameters

    num_parameters = count_parameters(model_spec(policy))
    has_adapters = policy.dtensor_cfg.lora_cfg.enabled
    copies = {"weights": 1}
    if not has_adapters:
        copies |= {"gradients": 1, "optimizer": 2}
        copies |= {"reference": 1} if needs_reference else {}
    copies |= {"generator's copy": 1} if samples_from_copy else {}
    needed = {what: 4 * count * num_parameters for what, count in copies.items()}
    if teacher is not None:
        needed["teacher"] = 4 * count_parameters(teacher_spec(policy, teacher))
    free = _free_bytes(device)
    if free is None or sum(needed.values()) <= free:
        return
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in needed.items())
    advice = "a smaller policy or reward model"
    if not has_adapters:
        advice += "; policy.dtensor_cfg.lora_cfg.enabled=true, which trains adapters only"
        if needs_reference:
            advice += "; loss_fn.reference_policy_kl_penalty=0, which needs no reference"
    if teacher is not None:
        advice += "; a smaller teacher (loss_fn.distillation.model_name)"
    raise ModelError(
        f"policy.model_name={policy.model_name} has {num_parameters / 1e9:.2f}G parameters: to "
        f"train it takes {sum(needed.values()) / GIB:.1f} GiB ({parts}) besides activations, and "
        f"{free / GIB:.1f} GiB of {device.type} memory are free beside what is loaded already. "
        f"What would fit: {advice}."
    )


def _free_bytes(device: torch.device) -> int | None:
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


# The model that a run starts from, resolved as in every command before anything heavy is loaded.

_INSTEAD = (
    ", or make a small one here: policy.model_name=null 'policy.scratch={}', with a higher "
    "learning rate (laurel init --scratch writes both)"
)


def resolve_model(config: R, console: Console) -> R:
    """Return the configuration with `policy.model_name` resolved to what transformers can load.

    If the name is the directory of a run, one of the run's checkpoints replaces it.

    Raises:
        UserError: There is no such model, or the hub that has it does not answer.
    """
    policy = config.policy
    if policy.scratch is not None or policy.model_name is None:
        return config
    saving = config.checkpointing
    goes_on = saving.enabled and steps_in(Path(saving.checkpoint_dir))
    if goes_on and not Path(policy.model_name).expanduser().is_dir():
        return config  # the run resumes from its own checkpoint
    say = say_on(console)
    name = found_name(policy.model_name, say=lambda note: say(f"note    {note}"), instead=_INSTEAD)
    if name == policy.model_name:
        return config
    found = {"policy": policy.model_copy(update={"model_name": name})}
    return cast(R, config.model_copy(update=found))


def found_teacher(name: str, *, say: Say) -> str:
    """Resolve the name of a teacher as `found_name` does that of the policy."""
    with speaking({"policy.model_name": "loss_fn.distillation.model_name"}):
        return found_name(name, say=say)


def found_name(name: str, *, say: Say, instead: str = "") -> str:
    """Resolve a model's name to what Laurel loads: for a run's directory, a checkpoint in it.

    `rewards.spec.find_model` chooses the checkpoint. Any other name is returned as written, because
    a run that resumes must have the same one.

    Args:
        name: A directory, a name on the hub, or a GGUF file, which is read here.
        say: Called with a message about the chosen checkpoint.
        instead: Advice for the error message if the hub does not answer.

    Raises:
        UserError: There is no such model, or the hub that has it does not answer.
    """
    from laurel.rewards.spec import find_model

    place = find_model(name)
    if place.file is not None:
        for note in place.notes:
            say(note)
        return name  # its loader asks where its files are, and the run keeps its name
    directory = Path(name).expanduser()
    if not directory.is_dir():
        check_fetchable(name, key="policy.model_name", instead=instead)
        return name
    if any((directory / file).is_file() for file in (MANIFEST_NAME, "config.json")):
        # transformers does not know ~.
        return str(directory) if name.startswith("~") else name
    assert steps_in(directory), f"{name} is no run, and was found"
    for note in place.notes:
        say(note)
    return str(directory / Path(place.name).name)


KEY = "policy.sequence_packing.train_mb_tokens"


def resolve_micro_batches(context: RunContext[R]) -> RunContext[R]:
    """Return the context with a number where `train_mb_tokens` is `auto`, and print the number.

    How a batch is cut decides the rounding of its sums, so a run that is resumed keeps the number
    that its checkpoint has.
    """
    config = context.config
    if config.policy.sequence_packing.train_mb_tokens != "auto":
        return context
    tokens, why = _kept(context), "as the run began"
    if tokens is None:
        memory = _device_memory(config) if context.allocation is None else None
        tokens, why = _chosen(config, memory)
    context.console.print(f"note    {KEY}=auto: {tokens:,} tokens, {why}", soft_wrap=True)
    return replace(context, config=with_tokens(config, tokens))


def with_tokens(config: R, tokens: int) -> R:
    """Return a run with a number of tokens of its micro-batches."""
    packing = config.policy.sequence_packing.model_copy(update={"train_mb_tokens": tokens})
    policy = config.policy.model_copy(update={"sequence_packing": packing})
    return cast(R, config.model_copy(update={"policy": policy}))


def largest_tokens(config: Run, shapes: Shapes, device_memory: int) -> int | None:
    """Return the tokens of the largest micro-batches that fit; None if the default ones do not."""
    from laurel.planning.memory import estimate, larger_micro_batch

    request = request_of(config)
    plan = plan_run(request)
    phases = estimate(request, plan, shapes, device_memory=device_memory)
    if not plan.fits or not all(phase.fits(device_memory) for phase in phases):
        return None
    found = larger_micro_batch(request, plan, shapes, device_memory=device_memory)
    return (plan if found is None else found[0]).batch("policy").tokens


def _kept(context: RunContext[R]) -> int | None:
    if context.resume_from is None:
        return None
    before = plain_values(saved_settings(context.resume_from, type(context.config)))
    kept = before.get("policy", {}).get("sequence_packing", {}).get("train_mb_tokens")
    policy = context.config.policy
    # A run that began with null goes on with what null meant.
    return kept if isinstance(kept, int) else policy.token_budget


def _chosen(config: Run, device_memory: int | None) -> tuple[int, str]:
    policy = config.policy
    default = policy.token_budget
    if not policy.sequence_packing.enabled:
        return default, "as null gives: policy.sequence_packing.enabled is false"
    if device_memory is None:
        return default, "as null gives: the memory of one GPU would decide, and the run has none"

    read = read_shapes(config)
    if read.unknown:
        role, reason = next(iter(read.unknown.items()))
        return default, f"as null gives: the size of the {role} is not known ({reason})"
    tokens = largest_tokens(_with_engine(config), read.shapes, device_memory)
    if tokens is None:
        return default, "as null gives: by the plan even these do not fit (laurel plan)"
    return tokens, "the largest that fit by the plan"


def _with_engine(config: Run) -> Run:
    """Return a run that names the engine which `auto` chooses on the GPU of this machine."""
    if config.command != "grpo":
        return config
    generation = config.policy.generation
    name = generation.engine_of(has_gpu=True, runs_here=True)
    generation = generation.model_copy(update={"backend": name})
    policy = config.policy.model_copy(update={"generation": generation})
    return config.model_copy(update={"policy": policy})


def _device_memory(config: Run) -> int | None:
    if config.cluster.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShapes:
    """The shapes (layer sizes) of a run's models, as far as they are known."""

    shapes: Shapes
    unknown: Mapping[RoleName, str]
    """The reason why a role's model has no known shape; its memory is not estimated."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how the shapes were determined."""


def read_shapes(
    config: Run, *, policy_shape: str | None = None, reward_shape: str | None = None
) -> ReadShapes:
    """Read the shapes of a run's models, with the reason for each that is unknown.

    Args:
        policy_shape: The policy's shape as `parse_shape` reads it; None: that of its files.
        reward_shape: That of every reward model.
    """
    notes: list[str] = []
    unknown: dict[RoleName, str] = {}
    policy: ModelShape | None = None
    try:
        policy = _policy_shape(config.policy, policy_shape, notes)
    except (ModelError, CheckpointError) as error:
        unknown["policy"] = f"{str(error).rstrip('.')}. --policy-shape would tell it"
    judges: tuple[ModelShape, ...] = ()
    if config.command == "grpo" and uses_reward_model(config):
        try:
            loaded = config.env.reward_model.loaded
            split = config.env.reward_model.dtensor_cfg  # of all of them
            judges = tuple(_judge_shape(judge, split, reward_shape) for judge in loaded)
        except (ModelError, CheckpointError) as error:
            unknown["reward_model"] = f"{str(error).rstrip('.')}. --reward-shape would tell it"
    teacher: ModelShape | None = None
    if config.command == "grpo" and (name := config.loss_fn.distillation.model_name) is not None:
        try:
            teacher = _read(
                teacher_spec(config.policy, found_teacher(name, say=notes.append)), True
            )
        except (ModelError, CheckpointError) as error:
            notes.append(f"the teacher is left out of memory: {error}")
    served: ModelShape | None = None
    if config.command == "grpo" and not judges and (server := model_server(config)):
        try:
            served = _served_shape(server.model_name, "env.reward_model.server", reward_shape)
        except (ModelError, CheckpointError) as error:
            unknown["reward_model"] = f"{str(error).rstrip('.')}. --reward-shape would tell it"
    shapes = Shapes(policy=policy, reward_models=judges, served=served, teacher=teacher)
    return ReadShapes(shapes=shapes, unknown=unknown, notes=tuple(notes))


def _policy_shape(policy: PolicyConfig, written: str | None, notes: list[str]) -> ModelShape:
    has_head = not isinstance(policy, RewardPolicyConfig)
    if written is not None:
        return parse_shape(written, has_language_head=has_head)
    scratch = policy.scratch
    if scratch is not None:
        more = scratch.config_overrides
        shape = decoder_shape(
            hidden_size=scratch.hidden_size,
            num_layers=scratch.num_layers,
            intermediate_size=more.get("intermediate_size") or 4 * scratch.hidden_size,
            num_heads=scratch.num_heads,
            num_kv_heads=more.get("num_key_value_heads"),
            vocab_size=scratch.vocab_size,
            has_language_head=has_head,
        )
        return replace(shape, normalises_heads=scratch.architecture == "qwen3")

    name = found_name(str(policy.model_name), say=notes.append)
    return _read(replace(model_spec(policy), name=name), has_head)


def _judge_shape(
    judge: ScorerSource, split: ScoringParallelConfig, written: str | None
) -> ModelShape:
    if written is not None:
        return parse_shape(written, has_language_head=False)
    name, key = judge.model_name, "model_name"
    if judge.checkpoint_path:
        name, key = judge.checkpoint_path, "checkpoint_path"
    if name is None:
        raise ModelError("env.reward_model.model_name is not said.")

    section = "env.reward_model"
    with speaking({"policy": section, "policy.model_name": f"{section}.{key}"}):
        spec = ModelSpec(
            name=found_name(name, say=lambda _: None),
            trust_remote_code=judge.trust_remote_code,
            parallel_plan=split.custom_parallel_plan,
        )
        return _read(spec, False)


def _served_shape(name: str, where: str, written: str | None) -> ModelShape:
    if written is not None:
        return parse_shape(written, has_language_head=True)

    with speaking({"policy": where, "policy.model_name": f"{where}.model_name"}):
        return _read(ModelSpec(name=found_name(name, say=lambda _: None)), True)


def _read(spec: ModelSpec, has_head: bool) -> ModelShape:
    from laurel.models.loading.pretrained import read_shape
    from laurel.observe.console import quiet_libraries

    quiet_libraries()
    return read_shape(spec, has_language_head=has_head)
