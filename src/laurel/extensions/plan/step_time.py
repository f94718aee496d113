"""Estimates the seconds of a training step by phase, from operations, bytes and an efficiency.

No model is loaded and nothing is measured. Matrix products take as long as the slowest of the
products, their own memory traffic and the communication beside them. On a GPU the elementwise
operations of layers and head come on top, by the bytes that they move. Each time is reported beside
that of the padded baseline, in which every completion has its own copy of the prompt.
`docs/parallelism.md` lists what is counted and what is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from laurel.config.policy import Precision, RoleName
from laurel.errors import ConfigError
from laurel.planning.memory import (
    COMPUTE_BYTES,
    MASTER_BYTES,
    ModelShape,
    Shapes,
    key_value_bytes,
)
from laurel.planning.operations import (
    Device,
    Workload,
    forward_operations,
    known_devices,
    training_operations,
)
from laurel.planning.plan import (
    ClusterRequest,
    Mesh,
    Plan,
    RewardModelRequest,
    RolePlan,
    TrainingRequest,
)

PhaseName = Literal["generation", "scoring", "log-probs", "training", "weight transfer"]
Limit = Literal["products", "memory", "link", "host"]

HOST_RATE = 1e9
"""Bytes per second of a broadcast over gloo: `benchmarks/weight_transfer.py` measured 474 MB to two
replicas in 0.46 s."""
COMPILED = 0.25
"""The part of the elementwise bytes of layers that is left where they are compiled, until a GPU has
shown one. `benchmarks/counted.py --of compiled` asks torch's compiler: that of torch 2.11 counted
0.23 in training and 0.28 in scoring, that of torch 2.13 for CPUs 0.16 and 0.21 (docs/gpu.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The fractions of a device's peak rates that real kernels reach."""

    products: float = 0.75
    """Fraction of the peak of matrix products while they run. An H200 reached 26 % of its peak in
    scoring, in which products took 34 % of the time."""
    memory: float = 0.7
    """Fraction of the memory bandwidth. Decoding reads weights and cache in order, but kernels
    start between the reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The operations and bytes of each device in a phase, and the seconds that they take."""

    flops: float = 0.0
    """Floating-point operations of the matrix products on one device."""
    memory_bytes: float = 0.0
    """Bytes that one device reads from or writes to its memory."""
    link_bytes: float = 0.0
    """Bytes that one device sends to others."""
    seconds: float
    limit: Limit
    """The resource that determines the time: products, memory or link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """The cost of one phase of a step, with shared prompts and with padded rows."""

    name: PhaseName
    slots_of: RoleName
    """The role on whose slots the phase runs."""
    shared: Cost
    padded: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The estimated times of a step's phases; phases of models with unknown shapes are missing."""

    device: Device
    efficiency: Efficiency
    workload: Workload
    phases: tuple[PhaseTime, ...]
    overlaps: bool
    """Whether generation and scoring of the next step run while the learner trains."""

    def seconds(self, *, is_padded: bool = False) -> float:
        """Return the seconds of the step: the sum of its phases.

        If generation overlaps with training, only the slower of generation with scoring and of
        training counts, and the transfer of weights is added.

        Args:
            is_padded: Whether to return the time of the padded baseline, without shared prompts.
        """
        seconds_of = {p.name: (p.padded if is_padded else p.shared).seconds for p in self.phases}
        if not self.overlaps:
            return sum(seconds_of.values())
        ahead = seconds_of.pop("generation", 0.0) + seconds_of.pop("scoring", 0.0)
        transfer = seconds_of.pop("weight transfer", 0.0)
        return max(ahead, sum(seconds_of.values())) + transfer


def device_named(name: str) -> Device:
    """Return the device of this name from the table.

    Raises:
        ConfigError: The table has no such device.
    """
    devices = known_devices()
    if name.upper() not in devices:
        raise ConfigError(f"--device {name}: the peaks of {', '.join(devices)} are known")
    return devices[name.upper()]


def step_time(
    request: ClusterRequest,
    plan: Plan,
    shapes: Shapes,
    *,
    workload: Workload,
    device: Device,
    efficiency: Efficiency,
) -> StepTime:
    """Estimate the seconds of each phase of a training step.

    Args:
        shapes: Shapes of the models; phases of unknown models are left out.
    """
    run = _Planned(request, plan, _Clock(device, efficiency))
    phases: list[PhaseTime] = []
    policy, shape = plan.role("policy"), shapes.policy
    if policy is not None and shape is not None:
        phases += _of_policy(run, policy, shape, workload)
    scorer = plan.role("reward_model")
    if scorer is not None and shapes.reward_models:
        sampled = _sampled(run, workload)
        # Parts of a group that is larger than a pass are computed once each.
        shared, padded = (
            _scoring(run, scorer, shapes, work)
            for work in (_on(scorer.mesh, sampled.shared()), sampled.padded())
        )
        phases.append(_phase("scoring", scorer, shared, padded))
    order: tuple[PhaseName, ...] = (
        "generation",
        "scoring",
        "log-probs",
        "training",
        "weight transfer",
    )
    return StepTime(
        device=device,
        efficiency=efficiency,
        workload=workload,
        phases=tuple(sorted(phases, key=lambda phase: order.index(phase.name))),
        overlaps=request.drawing is not None and request.drawing.runs_ahead,
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    """Converts operations and bytes of one device to seconds."""

    device: Device
    efficiency: Efficiency

    def cost(
        self,
        precision: Precision,
        *,
        flops: float = 0.0,
        memory_bytes: float = 0.0,
        link_bytes: float = 0.0,
        rate: float = 1.0,
    ) -> Cost:
        """Return the cost of products, memory and link, which overlap: the slowest counts."""
        times: dict[Limit, float] = {
            "products": flops / (self.device.flops[precision] * self.efficiency.products),
            "memory": memory_bytes / (self.device.bandwidth * self.efficiency.memory),
            "link": link_bytes / rate,
        }
        limit = max(times, key=lambda name: times[name])
        return Cost(
            flops=flops,
            memory_bytes=memory_bytes,
            link_bytes=link_bytes,
            seconds=times[limit],
            limit=limit,
        )

    def rate(self, role: RolePlan) -> float:
        """Return the bytes per second between the devices of a role."""
        nodes = {slot.node for slot in role.slots}
        return self.device.link if len(nodes) == 1 else self.device.network


class _Planned(NamedTuple):
    """A run, its plan, and the clock of its devices."""

    request: ClusterRequest
    plan: Plan
    clock: _Clock


def _together(costs: list[Cost]) -> Cost:
    """Return the cost of several costs in sequence; the longest one determines the limit."""
    longest = max(costs, key=lambda cost: cost.seconds)
    return Cost(
        flops=sum(cost.flops for cost in costs),
        memory_bytes=sum(cost.memory_bytes for cost in costs),
        link_bytes=sum(cost.link_bytes for cost in costs),
        seconds=sum(cost.seconds for cost in costs),
        limit=longest.limit,
    )


def _phase(name: PhaseName, role: RolePlan, shared: Cost, padded: Cost) -> PhaseTime:
    return PhaseTime(
        name=name, slots_of=role.shares_with or role.name, shared=shared, padded=padded
    )


def _of_policy(
    run: _Planned, policy: RolePlan, shape: ModelShape, workload: Workload
) -> Iterator[PhaseTime]:
    request, plan, _ = run
    step = request.step
    batch = plan.batch("policy")
    tree = workload.shared()
    # A tree in parts is divided only where it exceeds what each rank has to compute.
    budget = batch.tokens
    if batch.part_tokens is not None:
        budget = max(budget, -(-tree.tokens // policy.mesh.dp))
    divided = tree if step is None else tree.divided(budget)
    works = (_on(policy.mesh, divided), workload.padded())
    before = None
    if batch.part_tokens is not None:
        joins = not request.training.has_logits
        before = works[0].computed_before(batch.part_tokens, joins_completions=joins)
    shared = _training(run, policy, shape, works[0], before=before)
    yield _phase("training", policy, shared, _training(run, policy, shape, works[1]))
    generation = plan.role("generation")
    if step is None or generation is None or request.drawing is None:
        return
    sampled = _sampled(run, workload)
    shared, padded = (_generation(run, shape, work) for work in (sampled, sampled.padded()))
    yield _phase("generation", generation, shared, padded)
    if step.logprob_passes:
        shared, padded = (_logprobs(run, policy, shape, work) for work in works)
        yield _phase("log-probs", policy, shared, padded)
    transfer = _transfer(run, policy, generation, shape)
    yield _phase("weight transfer", policy, transfer, transfer)


def _sampled(run: _Planned, workload: Workload) -> Workload:
    """Return the conversations that are sampled and scored, some of which are not trained on."""
    beside = run.request.step.beside if run.request.step is not None else 0
    return replace(workload, per_prompt=workload.per_prompt + beside)


def _on(mesh: Mesh, workload: Workload) -> Workload:
    # Ranks that divide a layer or its tokens compute all tokens in it.
    return replace(workload, skips_unread=mesh.tp == mesh.cp == 1)


def _passes(clock: _Clock, precision: Precision, flops: float, mesh: Mesh) -> Cost:
    """Return the cost of products that all devices of a role divide evenly."""
    return clock.cost(precision, flops=flops / mesh.size)


def _logprobs(run: _Planned, role: RolePlan, shape: ModelShape, workload: Workload) -> Cost:
    request, _, clock = run
    assert request.step is not None
    training, times = request.training, request.step.logprob_passes
    flops = forward_operations(shape, workload, has_logits=True).total
    products = _passes(clock, training.precision, times * flops, role.mesh)
    moved = _elementwise(run, role, shape, workload, training, trains=False, has_logits=True)
    return _together([products, clock.cost(training.precision, memory_bytes=times * moved)])


def _elementwise(
    run: _Planned,
    role: RolePlan,
    shape: ModelShape,
    workload: Workload,
    settings: TrainingRequest | RewardModelRequest,
    *,
    trains: bool,
    has_logits: bool,
) -> float:
    """Return the bytes of elementwise operations on one device; on a CPU 0.

    The efficiency of products on a CPU is measured with these operations.
    """
    request, plan, _ = run
    training, mesh = request.training, role.mesh
    if request.device == "cpu":
        return 0.0
    # Ranks of a policy divide its weights; each replica of a reward model has all of them.
    is_policy = isinstance(settings, TrainingRequest)
    is_whole = (mesh.size if is_policy else mesh.group_size) == 1
    compiles = is_whole if settings.compiles == "auto" else settings.compiles
    layers = layer_bytes(
        shape,
        tokens=workload.tokens,
        trains=trains,
        recomputes=trains and training.recomputes,
    )
    completions = workload.num_prompts * workload.per_prompt * workload.completion_tokens
    head = head_bytes(shape, tokens=completions, trains=trains) if has_logits else 0.0
    moved = layers * (COMPILED if compiles else 1.0) + head
    # Twice as wide numbers move nearly twice the bytes.
    width = COMPUTE_BYTES[settings.precision]
    casts = 0.0
    if is_policy and width < MASTER_BYTES:
        batch = plan.batch("policy")
        passes = max(batch.updates, -(-workload.tokens / mesh.dp // batch.tokens))
        casts = cast_bytes(
            shape, passes=passes * mesh.dp, trains=trains, frozen=training.adapters.enabled
        )
    return (moved * width / 2 + casts) / mesh.size


def _training(
    run: _Planned,
    role: RolePlan,
    shape: ModelShape,
    workload: Workload,
    *,
    before: Workload | None = None,
) -> Cost:
    """Return the cost of training, and of what parts compute `before` without gradients."""
    request, plan, clock = run
    training, mesh, batch = request.training, role.mesh, plan.batch("policy")
    forward = forward_operations(shape, workload, has_logits=training.has_logits)
    width = COMPUTE_BYTES[training.precision]
    each = workload.tokens / mesh.dp
    passes = max(batch.updates, -(-each // batch.tokens))
    flops, passes_before = training_operations(forward, training), 0.0
    if before is not None:
        has_logits = training.has_logits and before.completion_tokens > 0
        flops += forward_operations(shape, before, has_logits=has_logits).total
        # A part holds tokens of one group.
        groups = before.num_prompts * before.copies
        passes_before = groups / mesh.dp * -(-before.tokens // (groups * batch.tokens))
    # Shards are gathered for the forward and for the backward pass; gradients are summed in float32
    # while the products go on.
    shards = mesh.dp * mesh.cp
    held = shape.num_parameters / mesh.tp
    sent = passes * (2 * width + MASTER_BYTES) + passes_before * width
    sent *= held * (shards - 1) / shards
    products = clock.cost(
        training.precision,
        flops=flops / mesh.size,
        link_bytes=sent,
        rate=clock.rate(role),
    )
    # Tensor-parallel ranks wait for the sums of their results: two a layer in the forward pass, two
    # in the backward pass, and two more where layers are computed again.
    sums = 6 if training.recomputes else 4
    summed = sums * shape.num_layers * each / mesh.cp * shape.hidden_size * width
    waiting = clock.cost(
        training.precision,
        link_bytes=2 * summed * (mesh.tp - 1) / mesh.tp,
        rate=clock.device.link,
    )
    trained = shape.num_parameters if not training.adapters.enabled else 0
    # The gradient is read once; the weight and each state of it are read and written.
    accesses = 1 + 2 * (1 + training.optimizer_states)
    states = clock.cost(
        training.precision,
        memory_bytes=batch.updates * accesses * MASTER_BYTES * trained / mesh.size,
    )
    moved = _elementwise(
        run, role, shape, workload, training, trains=True, has_logits=training.has_logits
    )
    elementwise = clock.cost(training.precision, memory_bytes=moved)
    return _together([products, elementwise, waiting, states])


def _scoring(run: _Planned, role: RolePlan, shapes: Shapes, workload: Workload) -> Cost:
    """Return the cost of all reward models, which read all conversations one after the other."""
    request, plan, clock = run
    batch = plan.batch("reward_model")
    passes = -(-workload.tokens / role.mesh.dp // batch.tokens)
    costs = []
    for scorer, shape in zip(request.reward_models, shapes.reward_models, strict=True):
        forward = forward_operations(shape, workload, has_logits=False)
        weights = COMPUTE_BYTES[scorer.precision] * shape.num_parameters / role.mesh.group_size
        costs.append(
            clock.cost(
                scorer.precision,
                flops=forward.total / role.mesh.size,
                memory_bytes=passes * weights,
            )
        )
        moved = _elementwise(run, role, shape, workload, scorer, trains=False, has_logits=False)
        costs.append(clock.cost(scorer.precision, memory_bytes=moved))
    return _together(costs)


def _generation(run: _Planned, shape: ModelShape, workload: Workload) -> Cost:
    """Return the cost of prompts in one pass each, then of decoding token by token.

    Each decoding step reads the weights and all keys and values once. Engines share a prompt's keys
    and values in memory; the engine in process also reads them once for all completions of the
    prompt.
    """
    request, plan, clock = run
    role, drawing, batch = plan.role("generation"), request.drawing, plan.batch("generation")
    assert role is not None
    assert drawing is not None
    mesh, precision = role.mesh, drawing.precision
    width = COMPUTE_BYTES[precision]
    weights = width * shape.num_parameters
    token_bytes = key_value_bytes(shape, mesh, compute_bytes=width)
    prompt, completion = workload.prompt_tokens, workload.completion_tokens
    prompts = replace(
        workload,
        num_prompts=workload.num_prompts * workload.copies,
        per_prompt=1,
        completion_tokens=0,
        copies=1,
        skips_unread=workload.skips_unread and not drawing.has_own_weights and mesh.tp == 1,
    )
    read = forward_operations(shape, prompts, has_logits=False)
    costs = [_passes(clock, precision, read.total, mesh)]
    one_token = Workload(num_prompts=1, per_prompt=1, prompt_tokens=0, completion_tokens=1)
    token = forward_operations(shape, one_token, has_logits=True)
    at_once = max(1, batch.tokens // batch.longest)
    left = -(-workload.num_prompts * workload.per_prompt // mesh.dp)
    reads_once = workload.copies == 1 and not drawing.has_own_weights
    while left > 0:
        rows = min(left, at_once)
        left -= rows
        trunks = -(-rows // workload.per_prompt) if reads_once else rows
        context = trunks * prompt + rows * (completion + 1) / 2
        attention = token.attention * (prompt + (completion + 1) / 2)
        step = clock.cost(
            precision,
            flops=rows * (token.linear + token.head + attention) / mesh.group_size,
            memory_bytes=weights / mesh.group_size + token_bytes * context,
        )
        costs.append(
            replace(
                step,
                flops=completion * step.flops,
                memory_bytes=completion * step.memory_bytes,
                seconds=completion * step.seconds,
            )
        )
    return _together(costs)


def _transfer(run: _Planned, policy: RolePlan, generation: RolePlan, shape: ModelShape) -> Cost:
    """Return the cost of sending the changed weights from the learner to all engines.

    The engine in process samples from the learner's own weights; other engines of ours get float32,
    and vLLM the dtype that it holds. Between GPUs that the two have for themselves weights go over
    NCCL; on the same GPUs they are copied in memory, up to five times; on CPUs, and where it is
    set, they go through the host.
    """
    request, _, clock = run
    training, drawing = request.training, request.drawing
    assert drawing is not None
    changed = shape.num_parameters
    if training.adapters.enabled:
        adapted = (training.adapters.layers or set(shape.linear_layers)) - training.adapters.exclude
        sizes = [
            rows * columns for n, (rows, columns) in shape.linear_layers.items() if n in adapted
        ]
        changed = shape.num_layers * sum(sizes)
    width = COMPUTE_BYTES[drawing.precision] if drawing.has_own_weights else MASTER_BYTES
    sent = float(width * changed)
    is_apart = generation.shares_with is None
    if not drawing.has_own_weights and not is_apart and not drawing.runs_ahead:
        sent = 0.0
    if request.device == "cpu" or drawing.through_host or not sent:
        return Cost(link_bytes=sent, seconds=sent / HOST_RATE, limit="host")
    if is_apart:
        both = replace(policy, slots=policy.slots + generation.slots)
        return clock.cost(training.precision, link_bytes=sent, rate=clock.rate(both))
    # Read as the learner has them, written once, and read and written in each further copy.
    copied = MASTER_BYTES * changed + 9 * sent
    return clock.cost(training.precision, memory_bytes=copied)


def layer_bytes(shape: ModelShape, *, tokens: float, trains: bool, recomputes: bool) -> float:
    """Return the bytes that elementwise operations of all layers move in half precision.

    They are those of norms, rotary positions, activations, residual sums and casts, uncompiled.

    Args:
        recomputes: Whether the backward pass computes the forward pass again.
    """
    norms = int(shape.normalises_heads)
    forward = (100, 20 + 44 * norms, 10)
    both = (358, 58 + 160 * norms, 28)
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    sizes = (shape.hidden_size, heads, shape.intermediate_size)
    passes = [both if trains else forward, *([forward] if recomputes else [])]
    each = sum(n * size for one in passes for n, size in zip(one, sizes, strict=True))
    return float(shape.num_layers * tokens * each)


def head_bytes(shape: ModelShape, *, tokens: float, trains: bool) -> float:
    """Return the bytes that the head of a policy moves besides its products.

    Args:
        tokens: Number of completion tokens.
        trains: Whether there is a backward pass, and entropy.
    """
    return tokens * shape.vocab_size * (76 if trains else 16)


def cast_bytes(shape: ModelShape, *, passes: float, trains: bool, frozen: bool) -> float:
    """Return the bytes of autocast's copies of float32 weights and of sums of gradients.

    Each pass rounds the weights of layers (6 bytes). Training also widens their gradients (6) and
    adds them up (12).
    """
    weights = shape.num_layers * shape.layer_parameters
    return passes * weights * (24 if trains and not frozen else 6)
