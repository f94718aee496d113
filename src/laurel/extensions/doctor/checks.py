"""Defines the checks of `laurel doctor --trial`, and runs them within a time limit.

Each check builds its own small models, measures, and raises `CheckFailed` if the machine does not
meet a requirement of training. A check whose prerequisites the machine lacks is skipped.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from laurel.config.grpo import GenerationConfig
from laurel.config.policy import ClusterConfig, NamedCall, Precision
from laurel.data.forest import MicroBatch, to_forest, to_padded
from laurel.errors import install_command
from laurel.extensions.doctor.machine import measure_products
from laurel.extensions.doctor.phases import (
    StepPhases,
    policy_labels,
    policy_loss,
    random_groups,
    random_model,
    saved_model,
)
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.load import GeneratorSpec, PluggedMaker, TransformersMaker
from laurel.generation.replicas import GeneratorReplicas
from laurel.generation.weights.probe import model_logprobs
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.decoder import RewardModel
from laurel.models.loading.policy import load_policy
from laurel.models.parallel.mesh import held_bytes
from laurel.models.spec import ModelSpec, ParallelShape
from laurel.planning.memory import ModelShape, decoder_shape, training_memory
from laurel.planning.operations import (
    Workload,
    forward_operations,
    known_devices,
    training_operations,
)
from laurel.planning.plan import Mesh, TrainingRequest
from laurel.plugins import EngineStart
from laurel.run.generator import probe_of, transfer_of
from laurel.sandbox.scratch import ScratchFolder
from laurel.training.learner import Learner, LocalLearner
from laurel.training.learner_group import LearnerGroup, LearnerWorker
from laurel.types import TokenGroup
from laurel.workers.spawned import SpawnedGroup

NOISE = 2.0
"""The largest allowed ratio of a forest's error to that of the model's own attention."""
FLOOR = 1e-6
"""The relative error that is always allowed, because any order of summation may have it."""
SPREAD_LOSS, SPREAD_GRADIENT = 1e-5, 1e-4
"""The largest allowed relative differences between float32 ranks and one process.

The test suite allows 1e-5 on gloo.
"""
MEMORY_ROOM = 1.1
"""The largest allowed ratio of used memory to predicted memory."""
FOREST_OFF = "sdpa"
"""The attention implementation of transformers that is compared with the forest's."""
DESCENT = NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0})
"""Plain gradient descent with rate 1, under which a weight changes by its negative gradient."""


class CheckFailed(Exception):
    """Raised if the machine does not meet a requirement of training."""


class Skipped(Exception):
    """Raised if the machine lacks what a check needs, so that the check is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one check: passed, failed or skipped, with the details."""

    name: str
    status: Literal["pass", "fail", "skipped"]
    detail: str
    """The measurement with the allowed limit, or the reason for a failure or skip."""
    share: float | None = None
    """The achieved fraction of the device's peak throughput; None if it was not measured."""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The measured values by name, for programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measurements of a check that passed."""

    detail: str
    share: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the models and sequences that the checks use."""

    small: ModelShape
    """The shape of the model for comparisons of results."""
    large: ModelShape
    """The shape of the model for measurements of speed and memory."""
    work: Workload
    """The workload of one training step of the large model."""
    vocabulary: int
    """A vocabulary like those of real models, with which training is measured once more: the head
    takes a share of the time that grows with it."""


SMALL = decoder_shape(
    hidden_size=128,
    num_layers=2,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
)
SIZES = {
    "cpu": Sizes(
        small=SMALL,
        large=decoder_shape(
            hidden_size=512,
            num_layers=8,
            intermediate_size=1536,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            vocab_size=8192,
        ),
        work=Workload(num_prompts=2, per_prompt=4, prompt_tokens=128, completion_tokens=64),
        vocabulary=32_768,
    ),
    "cuda": Sizes(
        small=SMALL,
        large=decoder_shape(
            hidden_size=2048,
            num_layers=16,
            intermediate_size=5632,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=32768,
        ),
        work=Workload(num_prompts=8, per_prompt=8, prompt_tokens=512, completion_tokens=512),
        vocabulary=151_936,
    ),
}
EXACT_WORK = Workload(num_prompts=6, per_prompt=5, prompt_tokens=37, completion_tokens=11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The machine to check, with the time limit and the sizes to use."""

    device: torch.device
    num_devices: int
    """The number of GPUs; on a machine without GPUs, the number of processes."""
    sizes: Sizes
    end: float
    """The time at which the trial ends, by `time.monotonic`."""

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the trial ends."""
        return self.end - time.monotonic()

    @property
    def limit(self) -> float:
        """Return the time limit of calls to other processes, in seconds."""
        return max(30.0, self.seconds_left)

    @property
    def precision(self) -> Precision:
        """Return the floating-point type that a run on this machine would compute in."""
        return "bfloat16" if self.device.type == "cuda" else "float32"


Check = Callable[[Trial], Measurement]


def run_trial(
    trial: Trial,
    *,
    checks: Mapping[str, Check] | None = None,
    say: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run checks one after the other, and return their outcomes."""
    outcomes = []
    for name, check in (ALL_CHECKS if checks is None else checks).items():
        outcome = _outcome(name, check, trial)
        outcomes.append(outcome)
        say(outcome)
    return outcomes


def _outcome(name: str, check: Check, trial: Trial) -> Outcome:
    if trial.seconds_left <= 0:
        return Outcome(name=name, status="skipped", detail="the time is over: --minutes gives more")
    started = time.monotonic()
    try:
        measurement = check(trial)
    except Skipped as reason:
        return Outcome(name=name, status="skipped", detail=str(reason))
    except Exception as error:  # whatever a machine does wrong, the other checks go on
        kind = "" if isinstance(error, CheckFailed) else f"{type(error).__name__}: "
        detail = f"{kind}{' '.join(str(error).split())}"
        seconds = time.monotonic() - started
        return Outcome(name=name, status="fail", detail=detail, seconds=seconds)
    finally:
        if trial.device.type == "cuda":
            torch.cuda.empty_cache()
    return Outcome(
        name=name,
        status="pass",
        detail=measurement.detail,
        share=measurement.share,
        seconds=time.monotonic() - started,
        figures=measurement.figures,
    )


def exactness(trial: Trial, *, precision: Precision) -> Measurement:
    """Check that a forest's scores and gradients are as exact as those of single sequences.

    The single sequences use the model's own attention. Both results are compared with float64,
    because two ways to sum in a low precision differ from each other whichever of them is better.
    """
    register()
    shape, device = trial.sizes.small, trial.device
    groups = random_groups(shape, EXACT_WORK)
    alone = [
        replace(group, id=f"{group.id}-{number}", branches_ids_G=(ids,))
        for group in groups
        for number, ids in enumerate(group.branches_ids_G)
    ]
    truth = _judge(shape, torch.float64, torch.float64, device, FOREST_OFF, alone)
    dtype: torch.dtype = getattr(torch, precision)
    ours = _judge(shape, torch.float32, dtype, device, FOREST, groups)
    own = _judge(shape, torch.float32, dtype, device, FOREST_OFF, alone)
    figures = {
        what: {"forest": _distance(forest, exact), "own": _distance(single, exact)}
        for what, forest, single, exact in zip(
            ("scores", "gradients"), ours, own, truth, strict=True
        )
    }
    detail = ", ".join(
        f"{what} {errors['forest']:.1e} from float64 (own attention {errors['own']:.1e})"
        for what, errors in figures.items()
    )
    for errors in figures.values():
        # A NaN compares false with everything, so the comparison asks for agreement.
        if not errors["forest"] <= NOISE * errors["own"] + FLOOR:
            raise CheckFailed(f"{detail}; {NOISE:g} times the own is allowed")
    return Measurement(detail=detail, figures=figures)


def _judge(
    shape: ModelShape,
    weights: torch.dtype,
    precision: torch.dtype,
    device: torch.device,
    attention: str,
    groups: Sequence[TokenGroup],
) -> tuple[Tensor, Tensor]:
    """Return the scores, and the gradient of all weights as one vector."""
    classifier = random_model(shape, has_language_head=False, dtype=weights, device=device)
    classifier.set_attn_implementation(attention)
    model = RewardModel(classifier, head_name="score", path="forest", precision=precision)
    if attention == FOREST:
        scores_N = model(to_forest(groups))[:, 0]
    else:
        scores_N = torch.cat([model(to_padded([group], pad_id=0))[:, 0] for group in groups])
    pull_N = torch.linspace(-1, 1, len(scores_N), dtype=scores_N.dtype, device=device)
    (scores_N * pull_N).sum().backward()
    gradients = [p.grad for p in classifier.parameters() if p.grad is not None]
    return scores_N.detach().double(), torch.cat([g.flatten().double() for g in gradients])


def _distance(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).norm() / exact.norm())


def peak_of(device: torch.device, precision: Precision) -> tuple[float, str]:
    """Return the device's peak rate of matrix products, in operations per second, and its origin.

    The rate is that of the datasheet if the device is known, else it is measured.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for device_type in known_devices().values():
            if device_type.name in name:
                return device_type.flops[precision], f"of {device_type.name}'s datasheet"
    rate = measure_products((precision,), device.type, seconds=0.5)[precision]
    return rate * 1e9, "of products measured here"


def with_vocabulary(shape: ModelShape, vocabulary: int) -> ModelShape:
    """Return the shape of the same layers with embeddings and a head of another vocabulary."""
    more = 2 * (vocabulary - shape.vocab_size) * shape.hidden_size
    return replace(shape, vocab_size=vocabulary, num_parameters=shape.num_parameters + more)


def speed(
    trial: Trial,
    *,
    phase: Literal["training", "scoring", "generation"],
    has_real_vocabulary: bool = False,
) -> Measurement:
    """Measure the throughput of a phase of a step as a fraction of the device's peak."""
    shape, work, precision = trial.sizes.large, trial.sizes.work, trial.precision
    if has_real_vocabulary:
        shape = with_vocabulary(shape, trial.sizes.vocabulary)
    peak, whose = peak_of(trial.device, precision)
    phases = StepPhases(shape, work, trial.device, precision)
    run: Callable[[], Any] = {
        "training": phases.train,
        "scoring": phases.score,
        "generation": phases.generate,
    }[phase]
    forward = forward_operations(shape, work, has_logits=phase != "scoring")
    operations = forward.total
    if phase == "training":
        operations = training_operations(forward, TrainingRequest(precision=precision))
    try:
        seconds = _timed(run, trial)
    finally:
        phases.close()
    share = operations / seconds / peak
    tokens = work.num_prompts * work.per_prompt * work.completion_tokens
    return Measurement(
        detail=f"{operations / seconds / 1e12:.3g} TFLOP/s in {precision}, {share:.0%} {whose}; "
        f"{tokens / seconds:.0f} completion tokens/s",
        share=share,
        figures={"seconds": seconds, "operations": operations, "peak": peak, "tokens": tokens},
    )


def _timed(run: Callable[[], Any], trial: Trial) -> float:
    """Return the median seconds of at most five runs after a warm-up run.

    The runs take at most about a tenth of the time that is left.
    """
    end = time.monotonic() + trial.seconds_left / 10
    run()
    times: list[float] = []
    while not times or (len(times) < 5 and time.monotonic() < end):
        _wait_for_device(trial.device)
        started = time.perf_counter()
        run()
        _wait_for_device(trial.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(trial: Trial) -> Measurement:
    """Check that training uses about as much memory as the planner predicts.

    On a CPU activations cannot be measured, so only the learner's own memory is compared.
    """
    shape, work, precision = trial.sizes.large, trial.sizes.work, trial.precision
    shape = replace(shape, normalises_heads=True)
    tokens = work.tokens // work.num_prompts
    parts = training_memory(TrainingRequest(precision=precision), shape, Mesh(dp=1), tokens=tokens)
    on_gpu = trial.device.type == "cuda"
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(trial.device)
        before = torch.cuda.memory_allocated(trial.device)
    phases = StepPhases(shape, work, trial.device, precision)
    phases.train()
    if on_gpu:
        predicted = sum(parts.values())
        used = torch.cuda.max_memory_allocated(trial.device) - before
    else:
        predicted = parts["weights"] + parts["optimizer"]
        states = phases.learner.optimizer.state.values()
        used = held_bytes(phases.policy) + sum(
            value.nbytes for state in states for value in state.values() if value.dim()
        )
    what = "the peak of a training step" if on_gpu else "weights and optimizer states"
    detail = f"{what}: {used / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f}"
    if not predicted / 2 <= used <= MEMORY_ROOM * predicted:
        raise CheckFailed(f"{detail}; half to {MEMORY_ROOM:g} times that is allowed")
    return Measurement(
        detail=detail, figures={"used": used, "predicted": predicted, "parts": parts}
    )


def spread(trial: Trial, *, tp: int) -> Measurement:
    """Check that a gradient step over all devices equals one in this process.

    `tp` is the number of devices that share each layer (tensor parallelism).
    """
    shape = ParallelShape(dp_shard=max(2, trial.num_devices) // tp, tp=tp)
    if find_spec("ray") is None:
        raise Skipped(f"Ray is not installed: {install_command('ray')}")
    if trial.num_devices < shape.num_ranks:
        raise Skipped("there is one GPU, and every rank needs its own")
    from laurel.workers.ray_cluster import RayCluster
    from laurel.workers.ray_group import RayGroup
    from laurel.workers.reservations import Resources

    on_gpu = trial.device.type == "cuda"
    with ScratchFolder("trial") as scratch:
        folder = str(scratch.path)
        load = _loader(trial, folder)
        alone = LocalLearner(load(device=trial.device).model, optimizer=DESCENT)
        expected = _step(alone, trial)
        load = _loader(trial, folder, tp=tp)
        ranks = shape.num_ranks
        with RayCluster(cpus=ranks, gpus=ranks if on_gpu else 0) as cluster:
            each = Resources(cpus=0, gpus=1) if on_gpu else Resources(cpus=1)
            slots = cluster.reserve("policy", ranks, each)
            settings = _worker_settings(trial, shape)
            group = RayGroup(slots, LearnerWorker, load, limit=trial.limit, **settings)
            learner = LearnerGroup(group, shape)
            try:
                update = _step(learner, trial)
            finally:
                learner.shutdown()
    loss = abs(update.loss / expected.loss - 1)
    size = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    apart = math.sqrt(
        sum(
            float((update.gradients[name] - gradient).square().sum())
            for name, gradient in expected.gradients.items()
        )
    )
    gradient = apart / size
    detail = (
        f"dp {shape.dp} x tp {tp}: loss {loss:.1e}, gradient {gradient:.1e} from one process, in "
        "float32"
    )
    if not (loss <= SPREAD_LOSS and gradient <= SPREAD_GRADIENT):
        raise CheckFailed(f"{detail}; {SPREAD_LOSS:g} and {SPREAD_GRADIENT:g} are allowed")
    return Measurement(detail=detail, figures={"loss": loss, "gradient": gradient})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    loss: float
    gradients: Mapping[str, Tensor]


def _loader(trial: Trial, folder: str, *, tp: int = 1) -> Callable[..., Any]:
    """Return a function that loads a small policy in any process."""
    directory = saved_model(Path(folder), trial.sizes.small)
    spec = replace(_spec(directory), tensor_parallel_size=tp)
    return partial(load_policy, spec, seed=1, max_length=256)


def _spec(directory: str) -> ModelSpec:
    return ModelSpec(name=directory, precision="float32")


def _worker_settings(trial: Trial, shape: ParallelShape) -> dict[str, Any]:
    device: Literal["cuda", "cpu"] = "cuda" if trial.device.type == "cuda" else "cpu"
    return {
        "shape": shape,
        "optimizer": DESCENT,
        "scheduler": None,
        "max_grad_norm": None,
        "cluster": ClusterConfig(device=device, cpu_threads=1),
        "seed": 1,
    }


def _step(learner: Learner, trial: Trial) -> _Step:
    """Take a step of gradient descent, and read the gradient off the weights."""
    groups = random_groups(trial.sizes.small, EXACT_WORK)
    batch = [
        MicroBatch(inputs=to_forest([group]), labels=[label], num_tokens=group.num_tokens)
        for group, label in zip(groups, policy_labels(groups), strict=True)
    ]
    before = _copied(learner.named_weights())
    update = learner.update(batch, policy_loss(EXACT_WORK))
    if update.failure is not None:
        raise CheckFailed(f"the step was not taken: {update.failure}")
    after = _copied(learner.named_weights())
    gradients = {name: before[name] - after[name] for name in before}
    return _Step(loss=update.metrics["loss"], gradients=gradients)


def _copied(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: weight.detach().double().cpu().clone() for name, weight in weights}


def weight_transfer(trial: Trial) -> Measurement:
    """Check that changed weights reach an engine in another process.

    A probe compares both sides' log-probabilities at the start and after the transfer.
    """
    apart = trial.num_devices > 1
    device = "cuda" if trial.device.type == "cuda" else "cpu"
    transfer = transfer_of("broadcast", device=device, take_turns=not apart)
    with ScratchFolder("trial") as scratch:
        folder = str(scratch.path)
        load = _loader(trial, folder)
        shape = ParallelShape()
        group = SpawnedGroup(
            "policy",
            LearnerWorker,
            load,
            limit=trial.limit,
            cpu_threads=1,
            **_worker_settings(trial, shape),
        )
        learner = LearnerGroup(group, shape)
        try:
            maker = TransformersMaker(
                model=_spec(folder), spec=_generator_spec(), device=device, cpu_threads=1
            )
            generator = GeneratorReplicas(
                lambda index: SpawnedGroup(
                    "generation",
                    EngineWorker,
                    maker,
                    limit=trial.limit,
                    cpu_threads=1,
                    local_rank=int(apart),
                ),
                1,
                probe=probe_of(learner, "forest"),
                transfer=transfer,
                max_restarts=0,
                patience=trial.limit,
            )
            with closing(generator):
                _step(learner, trial)
                started = time.monotonic()
                asyncio.run(generator.update_weights(learner.weights(1)))
                seconds = time.monotonic() - started
        finally:
            learner.shutdown()
    way = f"{transfer.name} to {transfer.device}"
    return Measurement(
        detail=f"by {way} in {seconds:.2f} s; the probe agrees before and after",
        figures={"seconds": seconds, "way": way},
    )


def _generator_spec() -> GeneratorSpec:
    settings = GenerationConfig.model_validate({"vllm_cfg": {"gpu_memory_utilization": 0.2}})
    return GeneratorSpec(settings=settings, max_length=256, end_ids=(1,))


def vllm(trial: Trial) -> Measurement:
    """Check that vLLM's log-probabilities of the probe's tokens match those of Laurel's policy."""
    if find_spec("vllm") is None:
        raise Skipped(f"vLLM is not installed: {install_command('vllm')}")
    precision = trial.precision
    with ScratchFolder("trial") as scratch:
        folder = str(scratch.path)
        directory = saved_model(Path(folder), trial.sizes.small)
        spec = replace(_spec(directory), precision=precision)
        policy = load_policy(spec, seed=1, max_length=256, device=trial.device).model
        group = SpawnedGroup(
            "generation",
            EngineWorker,
            PluggedMaker(
                name="vllm",
                start=EngineStart(directory=directory, spec=_generator_spec(), precision=precision),
            ),
            limit=trial.limit,
        )
        try:
            answer = group.call_one(0, "answer_probe")
            worst = answer.require_agreement(partial(model_logprobs, policy), version=0)
        finally:
            group.shutdown()
    return Measurement(
        detail=f"log-probabilities differ by {worst:.1e}, {answer.tolerance:g} is allowed",
        figures={"difference": worst},
    )


ALL_CHECKS: Mapping[str, Check] = {
    **{f"forest in {p}": partial(exactness, precision=p) for p in get_args(Precision)},
    # Speed comes after what no speed makes up for: the time may end before.
    "memory of training": memory,
    "weight transfer": weight_transfer,
    "FSDP2": partial(spread, tp=1),
    "FSDP2, tensor parallel": partial(spread, tp=2),
    "speed of training": partial(speed, phase="training"),
    "speed of training, large vocabulary": partial(
        speed, phase="training", has_real_vocabulary=True
    ),
    "speed of scoring": partial(speed, phase="scoring"),
    "speed of generation": partial(speed, phase="generation"),
    "vLLM": vllm,
}
