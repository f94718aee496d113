"""Checks a plan against its models and devices, and suggests the nearest setting that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from laurel.config.policy import RoleName
from laurel.planning.memory import (
    GIB,
    SERVED,
    MemoryPhase,
    ModelShape,
    Shapes,
    estimate,
    power_of_two,
)
from laurel.planning.plan import (
    ClusterRequest,
    Conflict,
    Plan,
    RolePlan,
    TrainingRequest,
    divisors,
    plan_run,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPlan:
    """A plan with its memory estimate, checked against the models and the devices."""

    plan: Plan
    phases: tuple[MemoryPhase, ...]
    """Memory of each phase of a step; empty if the shapes of the models are unknown."""
    conflicts: tuple[Conflict, ...]
    """Conflicts of the plan itself, then those with the models and with the devices' memory."""

    @property
    def fits(self) -> bool:
        """Whether the run can start: no conflict is fatal."""
        return not any(conflict.is_fatal for conflict in self.conflicts)


def fit(request: ClusterRequest, shapes: Shapes, *, device_memory: int | None = None) -> FittedPlan:
    """Plan a run, and check the plan against its models and the devices' memory.

    Args:
        shapes: Shapes of its models; what is unknown is not checked.
        device_memory: Bytes of a device; None: memory is estimated, but not checked.
    """
    plan = plan_run(request)
    phases = estimate(request, plan, shapes, device_memory=device_memory)
    conflicts, keys = [*plan.conflicts], {role.name: role.parallel_key for role in request.roles}
    for role in plan.roles:
        for shape in _models(shapes, role.name):
            conflicts += _indivisible(keys[role.name], role, shape)
    if device_memory is not None:
        conflicts += [
            _too_large(request, plan, shapes, device_memory, phase)
            for phase in phases
            if not phase.fits(device_memory)
        ]
    return FittedPlan(plan=plan, phases=phases, conflicts=tuple(conflicts))


def _models(shapes: Shapes, name: RoleName) -> tuple[ModelShape, ...]:
    """Return the models of a role whose shapes are known."""
    if name == "reward_model":
        return shapes.reward_models or tuple(filter(None, (shapes.served,)))
    return () if shapes.policy is None else (shapes.policy,)


def _indivisible(key: str, role: RolePlan, shape: ModelShape) -> Iterator[Conflict]:
    """Yield a conflict for heads and layers that the ranks of a group cannot share evenly."""
    tp, cp, pp = role.mesh.tp, role.mesh.cp, role.mesh.pp
    # vLLM, which alone generates on groups of ranks, splits models in its own way.
    generates = role.name == "generation" or key.endswith(".server")
    if tp > 1 and shape.refuses_tensor_parallel and not generates:
        yield Conflict(
            problem=f"{key}.tensor_parallel_size={tp} is refused when the model of {role.name} is "
            f"loaded: {shape.refuses_tensor_parallel}",
            fix=f"{key}.tensor_parallel_size=1",
        )
    if bad := _undivided(shape, tp, repeats_heads=generates):
        sizes = [size for size in divisors(len(role.slots) // (pp * cp)) if size < tp]
        good = [size for size in sizes if not _undivided(shape, size, repeats_heads=generates)]
        yield Conflict(
            problem=f"{key}.tensor_parallel_size={tp} does not divide the {' nor the '.join(bad)} "
            f"of the model of {role.name}",
            fix=f"{key}.tensor_parallel_size={good[-1]}",
        )
    heads = shape.num_heads // tp
    if cp > 1 and shape.num_heads % tp == 0 and heads % cp:
        good = [size for size in divisors(cp * role.mesh.dp) if size < cp and heads % size == 0]
        yield Conflict(
            problem=f"{key}.context_parallel_size={cp} does not divide the {heads} attention heads "
            f"that a rank of {role.name} has",
            fix=f"{key}.context_parallel_size={good[-1]}",
        )
    if pp > shape.num_layers:
        yield Conflict(
            problem=f"{key}.pipeline_parallel_size={pp}: there are {shape.num_layers} layers",
            fix=f"{key}.pipeline_parallel_size=1",
        )


def _undivided(shape: ModelShape, tp: int, *, repeats_heads: bool) -> list[str]:
    """Name the parts of a model that the tensor-parallel size does not divide.

    vLLM repeats key and value heads where there are fewer than ranks; training does not.
    """
    heads, keys, wide = shape.num_heads, shape.num_kv_heads, shape.intermediate_size
    parts = [f"{heads} attention heads"] if heads % tp else []
    if keys % tp and not (repeats_heads and tp % keys == 0):
        parts.append(f"{keys} key/value heads")
    return [*parts, f"{wide} feed-forward channels"] if wide % tp else parts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A setting that saves memory, with the request and the plan that result from it."""

    setting: str
    request: ClusterRequest
    plan: Plan


def _too_large(
    request: ClusterRequest, plan: Plan, shapes: Shapes, device_memory: int, phase: MemoryPhase
) -> Conflict:
    """Return the conflict of a phase that exceeds the memory, with a setting that would fit."""
    parts = sorted(phase.parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size)
    fix = "more devices or larger ones, a smaller model, or shorter sequences"
    for change in _changes(request, plan, shapes, device_memory, phase):
        phases = estimate(change.request, change.plan, shapes, device_memory=device_memory)
        same = next(p for p in phases if (p.name, p.slots_of) == (phase.name, phase.slots_of))
        if same.fits(device_memory):
            fix = change.setting
            break
    return Conflict(
        problem=f"{phase.name} takes {phase.total / GIB:.1f} GiB of each device of "
        f"{phase.slots_of}, which has {device_memory * phase.fraction / GIB:.1f}"
        f"{'' if phase.fraction == 1 else ' for it'} ({shares})",
        fix=fix,
    )


def _changes(
    request: ClusterRequest, plan: Plan, shapes: Shapes, device_memory: int, phase: MemoryPhase
) -> Iterator[_Change]:
    """Yield changes that reduce the memory of a phase, the least costly first."""
    yield from _served_changes(request, plan, device_memory, phase)
    if phase.name == "training":
        yield from _training_changes(request, plan, shapes)
    elif phase.name == "generation":
        yield from _drawing_changes(request, plan, device_memory, phase)
        if request.drawing is not None and request.drawing.has_own_weights:
            yield from _larger_groups(request, plan, shapes, "generation")
    else:
        if [judge.precision for judge in request.reward_models] == ["float32"]:
            narrower = (replace(request.reward_models[0], precision="bfloat16"),)
            narrow = replace(request, reward_models=narrower)
            yield _Change(setting="env.reward_model.precision=bfloat16", request=narrow, plan=plan)
        yield from _larger_groups(request, plan, shapes, "reward_model")


def _served_changes(
    request: ClusterRequest, plan: Plan, device_memory: int, phase: MemoryPhase
) -> Iterator[_Change]:
    """Yield the share of the memory that servers of a model would have to have."""
    served, role = request.served, request.role("reward_model")
    own = sum(phase.parts.get(name, 0) for name in SERVED)
    if served is None or role is None or not own:
        return
    room = int(device_memory * phase.fraction) - (phase.total - own)
    share, name = int(100 * served.memory_share * room / own) / 100, "--gpu-memory-utilization"
    if share > 0 and name not in served.arguments:  # there its value would be the next one
        arguments = [argument for argument in served.arguments if not argument.startswith(name)]
        arguments.append(f"{name}={share:g}")
        yield _Change(
            setting=f"{role.parallel_key}.arguments=[{','.join(arguments)}]",
            request=replace(request, served=replace(served, memory_share=share)),
            plan=plan,
        )


def _training_changes(request: ClusterRequest, plan: Plan, shapes: Shapes) -> Iterator[_Change]:
    """Yield changes of the training settings that may make the run fit.

    Each is added to the ones before; only larger groups of ranks are tried on their own.
    """
    training, role = request.training, request.roles[0]
    settings: list[str] = []

    def change(setting: str, changed: TrainingRequest) -> _Change:
        settings.append(f"{role.parallel_key}.{setting}=true")
        changed_request = replace(request, training=changed)
        return _Change(setting=" ".join(settings), request=changed_request, plan=plan)

    if not training.recomputes:
        training = replace(training, recomputes=True)
        yield change("activation_checkpointing", training)
    if role.tp > 1 and not training.sequence_parallel:
        training = replace(training, sequence_parallel=True)
        yield change("sequence_parallel", training)
    for larger in _larger_groups(replace(request, training=training), plan, shapes, "policy"):
        yield replace(larger, setting=" ".join([*settings, larger.setting]))
    if not training.adapters.enabled:
        training = replace(training, adapters=replace(training.adapters, enabled=True))
        yield change("lora_cfg.enabled", training)
    if not training.offloads and plan.roles[0].mesh.size > 1:
        yield change("cpu_offload", replace(training, offloads=True))


def _drawing_changes(
    request: ClusterRequest, plan: Plan, device_memory: int, phase: MemoryPhase
) -> Iterator[_Change]:
    """Yield the memory share of vLLM, or the number of concurrent completions, that would fit."""
    role, drawing, batch = request.role("generation"), request.drawing, plan.batch("generation")
    assert role is not None
    assert drawing is not None
    cache = phase.parts["keys and values"]
    room = int(device_memory * phase.fraction) - (phase.total - cache)
    if drawing.has_own_weights:
        weights = phase.parts.get("engine's weights", phase.parts.get("weights", 0))
        share = int(100 * (room + weights) / device_memory) / 100
        if 0 < share < 1:
            yield _Change(
                setting=f"{role.parallel_key}.gpu_memory_utilization={share:g}",
                request=replace(request, drawing=replace(drawing, memory_share=share)),
                plan=plan,
            )
        return
    rows = batch.tokens // batch.longest
    if drawing.has_static_slots:
        rows = power_of_two(rows)
    number = max(0, room) * rows // cache
    if drawing.has_static_slots and number:
        number = power_of_two(number + 1) // 2  # the largest that is not above it
    if number:
        fewer = replace(batch, tokens=number * batch.longest)
        batches = tuple(fewer if each is batch else each for each in plan.batches)
        yield _Change(
            setting=f"policy.generation.max_concurrent={number}",
            request=request,
            plan=replace(plan, batches=batches),
        )


def _larger_groups(
    request: ClusterRequest, plan: Plan, shapes: Shapes, name: RoleName
) -> Iterator[_Change]:
    """Yield larger tensor-parallel sizes on the same slots, where nodes and models allow them."""
    role, role_request = plan.role(name), request.role(name)
    if role is None or role_request is None:
        return
    counts = Counter(slot.node for slot in role.slots).values()
    generates = name == "generation"
    for times in divisors(role.mesh.dp)[1:]:
        mesh = replace(role.mesh, dp=role.mesh.dp // times, tp=role.mesh.tp * times)
        is_refused = any(count % mesh.group_size for count in counts) or any(
            _undivided(shape, mesh.tp, repeats_heads=generates)
            or (shape.refuses_tensor_parallel and not generates)
            for shape in _models(shapes, name)
        )
        if not is_refused:
            larger = replace(role, mesh=mesh)
            roles = tuple(larger if each is role else each for each in plan.roles)
            setting = f"{role_request.parallel_key}.tensor_parallel_size={mesh.tp}"
            yield _Change(setting=setting, request=request, plan=replace(plan, roles=roles))
