"""Runs `laurel plan`: prints where the parts of a run would be placed, without starting any."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from rich.text import Text

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.policy import RoleName
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schemas import SCHEMAS, Run, command_of_file
from laurel.config.sft import SFTRun
from laurel.errors import ConfigError
from laurel.extensions.plan.fit import FittedPlan, fit
from laurel.extensions.plan.options import PlanOptions
from laurel.extensions.plan.step_time import Efficiency, StepTime, device_named, step_time
from laurel.observe.console import make_console
from laurel.observe.json_output import write_json
from laurel.planning.memory import (
    GIB,
    MASTER_BYTES,
    MemoryPhase,
    Shapes,
    larger_micro_batch,
    parse_bytes,
)
from laurel.planning.operations import Workload
from laurel.planning.plan import (
    BatchPlan,
    ClusterRequest,
    Plan,
    RolePlan,
    Slot,
    as_ranges,
    title,
    where,
)
from laurel.run.model import ReadShapes, largest_tokens, read_shapes, with_tokens
from laurel.run.request import (
    backend_of,
    judge_notes,
    request_of,
    sampling_notes,
)


def workload_of(
    config: Run,
    *,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    alike_tokens: int = 0,
) -> Workload:
    """Return the number and lengths of the conversations in one training step.

    Args:
        prompt_tokens: The length of each prompt; None is what a completion leaves of the longest
            conversation.
        completion_tokens: The length of each completion; None is half of the longest conversation,
            or less if the run allows no more.
        alike_tokens: How many of them the completions of a prompt begin with alike.

    Raises:
        ConfigError: A conversation would be longer than the run allows, or completions would not
            differ.
    """
    longest = config.policy.max_total_sequence_length
    most = config.policy.generation.max_new_tokens if config.command == "grpo" else None
    if completion_tokens is None:
        room = longest // 2 if prompt_tokens is None else longest - prompt_tokens
        completion_tokens = max(1, min(room, most or room))
    if prompt_tokens is None:
        prompt_tokens = longest - completion_tokens
    if prompt_tokens + completion_tokens > longest or prompt_tokens < 1:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens and a completion of {completion_tokens} do not "
            f"fit into policy.max_total_sequence_length={longest}"
        )
    if alike_tokens >= completion_tokens:
        raise ConfigError(
            f"completions of {completion_tokens} tokens cannot begin with {alike_tokens} alike and "
            "differ: give --alike-tokens fewer"
        )
    if config.command == "grpo":
        num_prompts = config.grpo.num_prompts_per_step
        per_prompt = config.grpo.num_generations_per_prompt
    else:
        num_prompts = config.policy.train_global_batch_size
        per_prompt = 2 if config.command == "rm" else 1
    return Workload(
        num_prompts=num_prompts,
        per_prompt=per_prompt,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        alike_tokens=alike_tokens,
    )


def run_plan(path: Path | None, overrides: Sequence[str], options: PlanOptions) -> bool:
    """Print the plan of a run, and return whether the run fits the cluster.

    Raises:
        ConfigError: The configuration or an option is invalid. A run that does not fit is no error:
            the plan says so, and False is returned.
    """
    sizes = {"num_nodes": options.num_nodes, "gpus_per_node": options.slots_per_node}
    cluster = [f"cluster.{key}={size}" for key, size in sizes.items() if size is not None]
    device = device_named(options.device) if options.device else None
    device_memory = device.memory if device else None
    if options.device_memory:
        device_memory = parse_bytes(options.device_memory)
    loaded = load_config(
        SCHEMAS[options.kind or command_of_file(path)], path, [*overrides, *cluster]
    )
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    config = cast(Run, loaded.config)
    check_selection(config)
    read = read_shapes(config, policy_shape=options.policy_shape, reward_shape=options.reward_shape)
    is_auto = config.policy.sequence_packing.train_mb_tokens == "auto"
    if is_auto and device_memory is not None and config.cluster.device != "cpu":
        tokens = largest_tokens(config, read.shapes, device_memory)
        if tokens is not None:
            config = with_tokens(config, tokens)
            tokens_note = f"policy.sequence_packing.train_mb_tokens=auto: {tokens:,} tokens"
            read = replace(read, notes=(*read.notes, tokens_note))
    request = request_of(config)
    fitted = fit(request, read.shapes, device_memory=device_memory)
    if isinstance(config, GRPORun):
        may_be = fitted.fits and config.cluster.backend != "local"
        on_cluster = may_be and backend_of(fitted.plan, config.cluster) == "ray"
        notes = [*judge_notes(config, on_cluster=on_cluster), *sampling_notes(config)]
        read = replace(read, notes=(*read.notes, *notes))
    if device_memory is not None and fitted.fits:
        note = _room_note(config, request, fitted, read.shapes, device_memory)
        read = replace(read, notes=(*read.notes, *note))
    time = None
    if device is not None:
        time = step_time(
            request,
            fitted.plan,
            read.shapes,
            workload=workload_of(
                config,
                prompt_tokens=options.prompt_tokens,
                completion_tokens=options.completion_tokens,
                alike_tokens=options.alike_tokens,
            ),
            device=device,
            efficiency=Efficiency(products=options.efficiency, memory=options.memory_efficiency),
        )
    if options.as_json:
        write_json(plan_facts(fitted, read, device_memory=device_memory, time=time))
    else:
        text = plan_text(request, fitted, read, device_memory=device_memory, time=time)
        make_console().print(Text(text), soft_wrap=True)
    return fitted.fits


def _room_note(
    config: Run, request: ClusterRequest, fitted: FittedPlan, shapes: Shapes, device_memory: int
) -> Iterator[str]:
    """Yield a note on larger micro-batches that fit a GPU, unless their size is configured."""
    packing = config.policy.sequence_packing
    if not packing.enabled or packing.train_mb_tokens is not None or request.device == "cpu":
        return
    larger = larger_micro_batch(request, fitted.plan, shapes, device_memory=device_memory)
    if larger is None:
        return
    plan, training = larger
    before, now = fitted.plan.batch("policy"), plan.batch("policy")
    yield (
        f"policy.sequence_packing.train_mb_tokens={now.tokens} fits, too, with "
        f"{_gib(training.total)} GiB in training: at most {now.num_micro_batches} passes instead "
        f"of {before.num_micro_batches}, each of which casts all weights and adds up all gradients"
    )


LETTERS: Mapping[RoleName, str] = {"policy": "P", "generation": "G", "reward_model": "R"}


def plan_facts(
    fitted: FittedPlan,
    read: ReadShapes,
    *,
    device_memory: int | None,
    time: StepTime | None = None,
) -> dict[str, Any]:
    """Convert a plan to JSON-compatible values; memory is in bytes per device."""
    plan = fitted.plan
    timed: dict[str, Any] = {}
    if time is not None:
        seconds, padded = time.seconds(), time.seconds(is_padded=True)
        timed["time"] = {**asdict(time), "seconds": seconds, "padded_seconds": padded}
    return timed | {
        "fits": fitted.fits,
        "cluster": {
            "num_nodes": plan.num_nodes,
            "slots_per_node": plan.slots_per_node,
            "idle": plan.num_idle,
            "device_memory": device_memory,
        },
        "roles": [
            {
                "name": role.name,
                "shares_with": role.shares_with,
                "fraction": role.fraction,
                "mesh": asdict(role.mesh),
                "slots": [[slot.node, slot.index] for slot in role.slots],
            }
            for role in plan.roles
        ],
        "batches": [
            asdict(batch)
            | {"per_share": batch.per_share, "num_micro_batches": batch.num_micro_batches}
            for batch in plan.batches
        ],
        "models": asdict(read.shapes),
        "memory_not_estimated": dict(read.unknown),
        "memory": [
            {"phase": p.name, "slots_of": p.slots_of, "parts": dict(p.parts), "total": p.total}
            for p in fitted.phases
        ],
        "misfits": [
            {"problem": conflict.problem, "mends": [conflict.fix], "is_fatal": conflict.is_fatal}
            for conflict in fitted.conflicts
        ],
        "notes": list(read.notes),
    }


def plan_text(
    request: ClusterRequest,
    fitted: FittedPlan,
    read: ReadShapes,
    *,
    device_memory: int | None,
    time: StepTime | None = None,
) -> str:
    """Format a plan, with its problems and their fixes, as text for the terminal."""
    plan = fitted.plan
    total = plan.num_nodes * plan.slots_per_node
    nodes = "1 node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes"
    lines = [f"cluster  {nodes} x {plan.slots_per_node} slots = {total}, {plan.num_idle} idle"]
    if plan.roles:
        lines += ["", *_roles(plan), "", *_picture(plan)]
        for is_validation, name in ((False, "batches"), (True, "batches of a validation")):
            batches = [b for b in plan.batches if b.is_validation == is_validation]
            lines += ["", name, *(f"  {_batch(batch)}" for batch in batches)] if batches else []
    if fitted.phases:
        lines += ["", *_memory(fitted, device_memory), "", *_arithmetic(request, plan, read.shapes)]
    if time is not None and time.phases:
        lines += ["", *time_lines(time, width=shutil.get_terminal_size().columns)]
    lines += ["", *(f"note    {note}" for note in read.notes)] if read.notes else []
    for conflict in fitted.conflicts:
        kind = "CONFLICT" if conflict.is_fatal else "WASTE"
        lines += ["", f"{kind:<10}{conflict.problem}", f"  fix     {conflict.fix}"]
    return "\n".join([*lines, "", *_verdict(fitted, read)])


def _verdict(fitted: FittedPlan, read: ReadShapes) -> Iterator[str]:
    """Yield lines that say whether the run fits, and what that statement does not cover."""
    for role, why in read.unknown.items():
        yield f"memory of the {title(role)} is not estimated: {why}"
    if not fitted.fits:
        yield "it does not fit"
    elif read.unknown:
        yield "slots and batches fit; whether the memory does is not known"
    else:
        yield "it fits"


def _roles(plan: Plan) -> Iterator[str]:
    rows = [("role", "slots", "mesh", "copies of the model", "where")]
    for role in plan.roles:
        mesh = role.mesh
        axes = [("dp", mesh.dp), ("pp", mesh.pp), ("cp", mesh.cp), ("tp", mesh.tp)]
        shown = " x ".join(f"{n} {size}" for n, size in axes if size > 1 or n in ("dp", "tp"))
        copies = "1, in shards" if role.name == "policy" else str(mesh.dp)
        count = str(len(role.slots)) + (f" x {role.fraction:g}" if role.fraction < 1 else "")
        rows.append((title(role.name), count, shown, copies, _where(role, plan)))
    yield from _columns(rows)


def _where(role: RolePlan, plan: Plan) -> str:
    owner = plan.role(role.shares_with) if role.shares_with is not None else None
    if owner is None:
        return where(role.slots)
    those = f"the slots of {title(owner.name)}"
    return those if role.slots == owner.slots else f"of {those}: {where(role.slots)}"


def _picture(plan: Plan) -> Iterator[str]:
    """Yield a line for each run of equal nodes; `|` separates groups of slots that share layers."""
    letters: dict[Slot, str] = {}
    ends: set[Slot] = set()
    for role in plan.roles:
        for slot in role.slots:
            letters[slot] = letters.get(slot, "") + LETTERS[role.name]
        if role.shares_with is None:
            ends |= {group[-1] for group in role.groups}
    width = max(map(len, letters.values()), default=1)

    def picture(node: int) -> str:
        slots = [Slot(node=node, index=i) for i in range(plan.slots_per_node)]
        return "| " + "".join(
            f"{letters.get(s, '.'):<{width}} {'| ' if s in ends or s == slots[-1] else ''}"
            for s in slots
        )

    for row, alike in groupby(range(plan.num_nodes), key=picture):
        nodes = list(alike)
        name = f"node{'s' if len(nodes) > 1 else ''} {as_ranges(nodes)}"
        yield f"{name:<16}{row}".rstrip()
    used = "  ".join(f"{LETTERS[role.name]} {title(role.name)}" for role in plan.roles)
    yield f"{'':<16}{used}{'  . idle' if plan.num_idle else ''}"


def _batch(batch: BatchPlan) -> str:
    each = batch.per_share
    exact = "" if batch.size % batch.num_shares == 0 else "at most "
    text = f"{title(batch.role):<13} {batch.size} {batch.unit} / {batch.num_shares} = "
    text += f"{exact}{each} each"
    if batch.role == "generation":
        return f"{text}, {batch.tokens // batch.longest} side by side"
    passes = f"{batch.tokens} tokens a pass, {batch.longest} the longest of {batch.unit}"
    text += f"; {passes}: at most {batch.num_micro_batches} passes"
    return text + (f"; {batch.updates} updates a step" if batch.updates > 1 else "")


def _memory(fitted: FittedPlan, device_memory: int | None) -> Iterator[str]:
    room = f" of {device_memory / GIB:.1f}" if device_memory else ""
    rows: list[tuple[str, ...]] = [
        ("memory, GiB of each device", "on the slots of", f"total{room}", "made up of")
    ]
    rows += [_phase(phase) for phase in fitted.phases]
    yield from _columns(rows)


def _phase(phase: MemoryPhase) -> tuple[str, str, str, str]:
    parts = ", ".join(f"{n} {_gib(size)}" for n, size in phase.parts.items() if size)
    total = _gib(phase.total) + (f" (has {phase.fraction:g} of it)" if phase.fraction < 1 else "")
    return phase.name, title(phase.slots_of), total, parts


def _arithmetic(request: ClusterRequest, plan: Plan, shapes: Shapes) -> Iterator[str]:
    """Yield lines that explain how the largest numbers are computed."""
    role, shape = plan.role("policy"), shapes.policy
    if role is not None and shape is not None:
        ranks, count = role.mesh.size, shape.num_parameters
        each = MASTER_BYTES * count / ranks
        tokens = -(-plan.batch("policy").tokens // role.mesh.cp)
        yield (
            f"policy        {_count(count)} parameters x {MASTER_BYTES} bytes / {ranks} ranks = "
            f"{_gib(each)} GiB of weights (float32), the same of gradients, twice that of AdamW's "
            "states"
            + (
                "; LoRA: gradients and states of adapters only"
                if request.training.adapters.enabled
                else ""
            )
        )
        how = "recomputed: each layer's input, and one layer whole"
        if not request.training.recomputes:
            how = "every layer whole"
        yield (
            f"              activations of {tokens} tokens in {shape.num_layers} layers of width "
            f"{shape.hidden_size}, {shape.intermediate_size} / tp {role.mesh.tp}: {how}"
        )
    role = plan.role("reward_model")
    if role is not None:
        for judge, shape in zip(request.reward_models, shapes.reward_models, strict=False):
            yield (
                f"reward model  {_count(shape.num_parameters)} parameters in {judge.precision} / "
                f"{role.mesh.group_size} ranks of each of {role.mesh.dp} replicas"
            )


NARROW = 80
"""The terminal width, in columns, below which the table of times shows the seconds alone."""


def time_lines(time: StepTime, *, width: int) -> Iterator[str]:
    """Yield the table of the step's phases, with the lengths and the efficiency it assumes."""
    device, work = time.device, time.workload
    text = (
        f"seconds of a step on {device.name}, at {time.efficiency.products:.0%} of the peak of its "
        f"products and {time.efficiency.memory:.0%} of its memory's bandwidth: {work.num_prompts} "
        f"prompts of {work.prompt_tokens} tokens, each with {work.per_prompt} of "
        f"{work.completion_tokens}, which begin with {work.alike_tokens} alike; padded: a prompt "
        "for every completion"
    )
    yield from textwrap.wrap(text, width)
    rows: list[tuple[str, ...]] = [
        ("phase", "on the slots of", "PFLOP a device", "limit", "seconds", "padded", "ratio")
    ]
    for phase in time.phases:
        shared, padded = phase.shared, phase.padded
        rows.append(
            (
                phase.name,
                title(phase.slots_of),
                f"{shared.flops / 1e15:.3g}",
                shared.limit,
                f"{shared.seconds:.3g}",
                f"{padded.seconds:.3g}",
                f"{padded.seconds / shared.seconds:.2f}" if shared.seconds else "",
            )
        )
    whole, padded_whole = time.seconds(), time.seconds(is_padded=True)
    name = "step, overlapping" if time.overlaps else "step"
    ratio = f"{padded_whole / whole:.2f}"
    rows.append((name, "", "", "", f"{whole:.3g}", f"{padded_whole:.3g}", ratio))
    if width < NARROW:
        rows = [(row[0], *row[3:]) for row in rows]
    yield from _columns(rows)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size >= GIB / 2 else f"{size / GIB:.1g}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}G" if number >= 1e8 else f"{number / 1e6:.2f}M"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def check_selection(config: Run) -> None:
    """Check that a run measures the metrics that it names, as the run itself does at its start.

    Raises:
        ConfigError: It does not.
    """
    if isinstance(config, RewardTrainingRun):
        from laurel.run.reward_model import reward_selection

        reward_selection(config)
    elif isinstance(config, SFTRun):
        from laurel.run.sft import demonstration_selection

        demonstration_selection(config)
    else:
        from laurel.run.grpo import policy_selection

        policy_selection(config)
