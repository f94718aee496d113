"""Whether a plan fits its models and its devices too, and which changes would mend it.

Each change that is named for want of memory was tried: with it, and nothing else, it fits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from laurel.planning.memory import ModelShape, Phase, Shapes, estimate
from laurel.planning.plan import Plan, plan_run
from laurel.planning.roles import (
    PARALLEL_KEYS,
    Change,
    Misfit,
    Run,
    as_typed,
    divisors,
    with_changes,
)

GIB = 2**30
MOST_NODES = 1024
"""Larger clusters are not tried as a mend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPlan:
    """A plan, and what it takes of each device."""

    plan: Plan
    phases: tuple[Phase, ...]
    """Empty where the shapes of the models are not known."""
    misfits: tuple[Misfit, ...]
    """The plan's own, and those with the models and the devices."""

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return not any(misfit.is_fatal for misfit in self.misfits)


def fit(config: Run, shapes: Shapes, *, device_memory: int | None = None) -> FittedPlan:
    """Plan a run and check it against its models and, where it is said, the devices' memory."""
    found = _examine(config, shapes, device_memory)
    if device_memory is None:
        return found
    crowded = [phase for phase in found.phases if not phase.fits(device_memory)]
    before = [misfit.problem for misfit in found.misfits if misfit.is_fatal]
    misfits = [_too_large(config, shapes, device_memory, phase, before) for phase in crowded]
    return replace(found, misfits=(*found.misfits, *misfits))


def _examine(config: Run, shapes: Shapes, device_memory: int | None) -> FittedPlan:
    """Everything but what does not fit into the devices."""
    plan = plan_run(config)
    return FittedPlan(
        plan=plan,
        phases=estimate(config, plan, shapes, device_memory=device_memory),
        misfits=(*plan.misfits, *_indivisible(plan, shapes)),
    )


# ----------------------------------------------------------------------------------------- models


def _indivisible(plan: Plan, shapes: Shapes) -> Iterator[Misfit]:
    """Heads and layers that the ranks of a group cannot share evenly."""
    models = [
        (role, shape)
        for role in plan.roles
        for shape in (shapes.reward_models if role.name == "reward_model" else (shapes.policy,))
    ]
    for role, shape in models:
        if shape is None:
            continue
        key, tp, pp = PARALLEL_KEYS[role.name], role.mesh.tp, role.mesh.pp
        # vLLM, which alone draws on groups of ranks, splits models in its own way.
        if tp > 1 and shape.refuses_tensor_parallel and role.name != "generation":
            yield Misfit(
                problem=f"{key}.tensor_parallel_size={tp} is refused when the model of {role.name} "
                f"is loaded: {shape.refuses_tensor_parallel}",
                mends=(f"{key}.tensor_parallel_size=1",),
            )
        if bad := _undivided(shape, tp, repeats_heads=role.name == "generation"):
            sizes = [s for s in divisors(len(role.slots) // (pp * role.mesh.cp)) if s < tp]
            good = [s for s in sizes if not _undivided(shape, s, repeats_heads=False)]
            yield Misfit(
                problem=f"{key}.tensor_parallel_size={tp} does not divide the "
                f"{' nor the '.join(bad)} of the model of {role.name}",
                mends=tuple(f"{key}.tensor_parallel_size={size}" for size in reversed(good)),
            )
        cp, heads = role.mesh.cp, shape.num_heads // tp
        if cp > 1 and shape.num_heads % tp == 0 and heads % cp:
            good = [size for size in divisors(role.mesh.cp * role.mesh.dp) if heads % size == 0]
            yield Misfit(
                problem=f"{key}.context_parallel_size={cp} does not divide the {heads} attention "
                f"heads that a rank of {role.name} has",
                mends=tuple(f"{key}.context_parallel_size={size}" for size in reversed(good)),
            )
        if pp > shape.num_layers:
            yield Misfit(
                problem=f"{key}.pipeline_parallel_size={pp}: there are {shape.num_layers} layers",
                mends=(f"{key}.pipeline_parallel_size=1",),
            )


def _undivided(shape: ModelShape, tp: int, *, repeats_heads: bool) -> list[str]:
    """vLLM repeats key and value heads where there are fewer than ranks; training does not."""
    heads, keys, wide = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    found = [f"{heads} attention heads"] if heads % tp else []
    if keys % tp and not (repeats_heads and tp % keys == 0):
        found.append(f"{keys} key/value heads")
    return [*found, f"{wide} feed-forward channels"] if wide % tp else found


# ----------------------------------------------------------------------------------------- memory


def _too_large(
    config: Run, shapes: Shapes, device_memory: int, phase: Phase, before: Collection[str]
) -> Misfit:
    """A phase that takes more than a device has, and the changes with which it does not."""
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])
    said = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)
    accepted: list[Change] = []
    for change in _changes(config, phase):
        is_needless = any(_contains(change, mend) for mend in accepted)
        if not is_needless and _mends(config, shapes, device_memory, phase, change, before):
            accepted.append(change)
    mends = [as_typed(change) for change in accepted]
    if not mends:
        mends = ["devices with more memory, a smaller model, or shorter sequences"]
    return Misfit(
        problem=f"{phase.name} takes {phase.total / GIB:.1f} GiB of each device of "
        f"{phase.slots_of}, which has {device_memory * phase.fraction / GIB:.1f}"
        f"{'' if phase.fraction == 1 else ' for it'} ({said})",
        mends=tuple(mends),
    )


def _mends(
    config: Run,
    shapes: Shapes,
    device_memory: int,
    phase: Phase,
    change: Change,
    before: Collection[str],
) -> bool:
    """Whether with a change the phase fits, and nothing breaks that did not before."""
    found = _examine(with_changes(config, change), shapes, device_memory)
    worse = {m.problem for m in found.misfits if m.is_fatal} - set(before)
    same = [p for p in found.phases if (p.name, p.slots_of) == (phase.name, phase.slots_of)]
    return not worse and bool(same) and same[0].fits(device_memory)


def _changes(config: Run, phase: Phase) -> Iterator[Change]:
    """What could be changed, the least costly first."""
    if phase.slots_of == "policy" and phase.name == "training":
        yield from _training_changes(config)
    elif phase.slots_of == "reward_model":
        key = PARALLEL_KEYS["reward_model"]
        yield {"env.reward_model.precision": "bfloat16"}
        yield {"env.reward_model.max_model_len": 4096, "env.reward_model.batch_tokens": 4096}
        for size in (2, 4, 8):
            yield {f"{key}.tensor_parallel_size": size}
            slots = {"env.reward_model.resources.gpus_per_node": size}
            yield {f"{key}.tensor_parallel_size": size, **slots}
    else:
        for share in (0.4, 0.5, 0.7, 0.8, 0.9):
            yield {"policy.generation.vllm_cfg.gpu_memory_utilization": share}
        yield {"policy.generation.max_concurrent": 32}
        for size in (2, 4, 8):
            yield {f"{PARALLEL_KEYS['generation']}.tensor_parallel_size": size}
        yield from _more_nodes(config)


def _training_changes(config: Run) -> Iterator[Change]:
    parallel = "policy.dtensor_cfg"
    recompute = {f"{parallel}.activation_checkpointing": True}
    if not config.policy.dtensor_cfg.activation_checkpointing:
        yield recompute
    tp = config.policy.dtensor_cfg.tensor_parallel_size
    shares = {f"{parallel}.sequence_parallel": True}
    if tp > 1 and not config.policy.dtensor_cfg.sequence_parallel:
        yield shares
        yield {**recompute, **shares}
    for size in (2, 4, 8):
        if size > tp:
            yield {f"{parallel}.tensor_parallel_size": size}
            yield {f"{parallel}.tensor_parallel_size": size, **recompute}
    for more in _more_nodes(config):
        yield more
        yield {**more, **recompute}
    yield {f"{parallel}.lora_cfg.enabled": True}
    yield {f"{parallel}.lora_cfg.enabled": True, **recompute}
    yield {f"{parallel}.cpu_offload": True}
    yield {f"{parallel}.cpu_offload": True, **recompute}


def _more_nodes(config: Run) -> Iterator[Change]:
    nodes = 2 * config.cluster.num_nodes
    while nodes <= MOST_NODES:
        yield {"cluster.num_nodes": nodes}
        nodes *= 2


def _contains(change: Change, mend: Change) -> bool:
    """Whether a change does all that a mend does, or the same to a greater degree."""
    nodes = "cluster.num_nodes"
    if nodes in mend and nodes in change and mend[nodes] < change[nodes]:
        change = {**change, nodes: mend[nodes]}
    return all(key in change and change[key] == value for key, value in mend.items())
