"""Builds the engine that samples the completions of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from laurel.config.grpo_run import GRPORun
from laurel.errors import ConfigError
from laurel.plugins import Engine, EngineStart
from laurel.run.context import RunContext
from laurel.run.model import model_spec
from laurel.sandbox.scratch import ScratchFolder

QUICKER = "it was quicker where the two were measured (docs/benchmarks.md)"

if TYPE_CHECKING:
    import numpy as np

    from laurel.generation.load import EngineMaker, GeneratorSpec
    from laurel.generation.weights.routes import WeightTransfer
    from laurel.models.chat import ChatFormat
    from laurel.models.forest.decoder import Path as ModelPath
    from laurel.protocols import Generator, WorkerGroup
    from laurel.run.allocation import Allocation
    from laurel.run.model import TrainedModel
    from laurel.training.learner import Learner


def make_generator(
    context: RunContext[GRPORun], model: TrainedModel, chat: ChatFormat, texts: Sequence[str] = ()
) -> Generator:
    """Build the generator that `policy.generation.backend` selects.

    `texts` are those that a tokenizer from scratch was trained on: each replica trains the same
    one.

    Raises:
        ConfigError: The generator cannot sample as the configuration asks.
    """
    config, facts = context.config, model.facts
    size = facts.vocab_size
    odd = [i for i in config.policy.generation.stop_token_ids or () if not 0 <= i < size]
    if odd:
        raise ConfigError(
            f"policy.generation.stop_token_ids: {', '.join(map(str, odd))} not in the model's "
            f"vocabulary of {size} tokens"
        )
    generation = config.policy.generation
    backend = generation.engine_of(has_gpu=facts.device == "cuda", runs_here=True)
    if backend == "transformers" and (
        facts.path == "padded" and not config.policy.sequence_packing.enabled
    ):
        raise ConfigError(
            "policy.sequence_packing.enabled=false: the transformers engine reads token forests; "
            "leave packing on, or set policy.generation.backend=vllm"
        )
    if context.allocation is not None:
        return _replicas(context, context.allocation, model, chat, texts, backend)
    if backend != "transformers":
        return _plugged(backend, config, model, chat)
    from laurel.generation.transformers.engine import TransformersEngine

    assert model.in_process is not None
    return TransformersEngine(
        model.in_process,
        facts.tokenizer,
        end_ids=chat.end_ids,
        max_concurrent=config.policy.generation.max_concurrent,
        conversation_bytes=config.policy.generation.conversation_bytes,
        static_slots=config.policy.generation.transformers_cfg.static_slots,
        # Only a copy can sample from old weights while the learner makes new ones.
        shares_weights=config.grpo.max_staleness == 0,
    )


def generator_spec(config: GRPORun, end_ids: Iterable[int]) -> GeneratorSpec:
    """Return the spec of a GRPO run's sampling engine; `end_ids` are the tokens that end a turn."""
    from laurel.generation.load import GeneratorSpec

    return GeneratorSpec(
        settings=config.policy.generation,
        max_length=config.policy.max_total_sequence_length,
        end_ids=tuple(end_ids),
        seed=config.grpo.seed,
    )


def _plugged(name: str, config: GRPORun, model: TrainedModel, chat: ChatFormat) -> Generator:
    # The engine has read the directory of the policy's current weights by the time it is made.
    engine, section = config.policy.generation.settings_of(Engine, name)
    with ScratchFolder("policy") as folder:
        model.learner.export(folder.path, "")
        return engine.make(
            section,
            EngineStart(
                directory=str(folder.path),
                spec=generator_spec(config, chat.end_ids),
                precision=config.policy.precision,
                probe=probe_of(model.learner, model.facts.path),
            ),
        )


def _replicas(
    context: RunContext[GRPORun],
    allocation: Allocation,
    model: TrainedModel,
    chat: ChatFormat,
    texts: Sequence[str],
    backend: str,
) -> Generator:
    """Build replicas of the engine, each in one or more slots of the role `generation`."""
    from laurel.generation.engine_worker import EngineWorker
    from laurel.generation.replicas import GeneratorReplicas
    from laurel.types import Weights

    config = context.config

    def current() -> Weights | None:
        # The learner must not be asked while it trains or while its shares are off the GPUs.
        if config.grpo.max_staleness > 0 or (
            allocation.take_turns("generation") and model.facts.device == "cuda"
        ):
            return None
        return model.learner.weights(replicas.weight_version)

    needs = config.policy.generation.needs_of(backend)
    each = needs.num_devices if needs is not None else 1

    def make_group(number: int) -> WorkerGroup:
        ranks = range(number * each, (number + 1) * each)
        return allocation.group("generation", EngineWorker, make, ranks=ranks, slots_each=each)

    transfer = transfer_of(
        config.policy.generation.weight_transfer,
        device=model.facts.device,
        take_turns=allocation.take_turns("generation"),
    )
    if needs is not None:
        make = _plugged_maker(backend, context, model, chat)
    else:
        make = _transformers_maker(context, chat, texts)
    replicas = GeneratorReplicas(
        make_group,
        allocation.num_slots("generation") // each,
        current_weights=current,
        probe=probe_of(model.learner, model.facts.path),
        transfer=transfer,
    )
    return replicas


def describe_generator(generator: Generator) -> str:
    """Describe in words the engine and, if there is one, the transfer of weights to it."""
    transfer = getattr(generator, "transfer", None)
    way = "" if transfer is None else f", weights by {transfer.name} ({transfer.reason})"
    return f"{type(generator).__name__}{way}"


def transfer_of(
    setting: Literal["auto", "object_store", "broadcast", "ipc"],
    *,
    device: str,
    take_turns: bool,
) -> WeightTransfer:
    """Choose how the learner's weights are transferred to the engines.

    Args:
        setting: The value of `policy.generation.weight_transfer`.
        take_turns: Whether the engines use the learner's own devices.

    Raises:
        ConfigError: `ipc` is set, and the engines share no GPU with the learner.
    """
    from laurel.generation.weights.routes import WeightTransfer

    if setting == "object_store":
        return WeightTransfer(name="object_store", reason="it is set")
    if setting == "ipc" and (device != "cuda" or not take_turns):
        raise ConfigError(
            "policy.generation.weight_transfer=ipc: engines and learner share no GPU here, whose "
            "memory both could open; set it to auto"
        )
    if setting == "ipc" or (setting == "auto" and device == "cuda" and take_turns):
        why = "it is set" if setting == "ipc" else "engines and learner take turns on the same GPUs"
        return WeightTransfer(name="ipc", device="cuda", reason=why)
    why = "it is set" if setting == "broadcast" else QUICKER
    if device == "cuda" and not take_turns:
        return WeightTransfer(
            name="broadcast",
            device="cuda",
            reason=f"{why}; NCCL, as engines have GPUs of their own",
        )
    return WeightTransfer(name="broadcast", reason=f"{why}; gloo")


def _transformers_maker(
    context: RunContext[GRPORun], chat: ChatFormat, texts: Sequence[str]
) -> EngineMaker:
    from laurel.generation.load import TransformersMaker, from_directory

    config = context.config
    policy = model_spec(config.policy)
    if context.resume_from is not None:
        policy = from_directory(policy, context.resume_from)
    return TransformersMaker(
        model=policy,
        spec=generator_spec(config, chat.end_ids),
        device=config.cluster.device,
        cpu_threads=config.cluster.cpu_threads,
        texts=tuple(texts),
    )


def _plugged_maker(
    name: str, context: RunContext[GRPORun], model: TrainedModel, chat: ChatFormat
) -> EngineMaker:
    # The engine reads a directory that every node must see: the checkpoint, or the model's own.
    from laurel.generation.load import PluggedMaker

    config, policy = context.config, context.config.policy
    directory = str(context.resume_from or policy.model_name)
    if policy.scratch is not None and context.resume_from is None:
        # Every node sees the directory of the checkpoints. The weights stay until the run ends,
        # because a lost replica is restarted from them; the next run removes what a kill leaves.
        directory = str(Path(config.checkpointing.checkpoint_dir) / f".start-{uuid4().hex}")
        context.stack.callback(shutil.rmtree, directory, ignore_errors=True)
        Path(directory).mkdir(parents=True)
        model.learner.export(Path(directory), "")
    start = EngineStart(
        directory=directory,
        spec=generator_spec(config, chat.end_ids),
        precision=policy.precision,
    )
    return PluggedMaker(name=name, start=start)


def probe_of(learner: Learner, path: ModelPath) -> Callable[[Sequence[int]], np.ndarray]:
    """Return a function that computes the learner's log-probabilities of a token sequence.

    After a weight transfer, `generation.weights.probe` compares them with an engine's.
    """

    def probe(ids: Sequence[int]) -> np.ndarray:
        import numpy as np

        from laurel.generation.weights.probe import probe_batch

        (outputs,) = learner.outputs([probe_batch(ids, path)], temperature=1.0)
        return np.asarray(outputs.logprobs_M.cpu().numpy())

    return probe
