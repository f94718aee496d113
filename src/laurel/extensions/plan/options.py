"""The options of `laurel plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from laurel.run.options import JsonOption


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `laurel plan`, besides the configuration and its overrides."""

    kind: Annotated[
        Literal["rm", "sft", "grpo"] | None,
        typer.Option(
            "--for", help="The command to plan for. Default: recognized by the file's sections."
        ),
    ] = None
    num_nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Plan for N nodes, as cluster.num_nodes sets them."),
    ] = None
    slots_per_node: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node",
            min=1,
            help="Plan for N slots on each node, as cluster.gpus_per_node sets them.",
        ),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The memory of each device, such as 80GiB. Default: that of --device.",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Estimate the seconds of a step on an A100, H100 or H200."
        ),
    ] = None
    efficiency: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="The part of the device's peak that products reach while they run. Default: what "
            "an H200 did in scoring.",
        ),
    ] = 0.75
    memory_efficiency: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="The part of the memory's bandwidth that generation and elementwise operations "
            "reach. Default: an assumption.",
        ),
    ] = 0.7
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The length of a typical prompt. Default: what a completion leaves of the "
            "longest conversation.",
        ),
    ] = None
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="The length of a typical completion. Default: half of the longest "
            "conversation, or fewer where the run allows no more.",
        ),
    ] = None
    alike_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="How many tokens the completions of a prompt begin with alike, which training "
            "and scoring compute once.",
        ),
    ] = 0
    policy_shape: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="The shape of a policy whose configuration cannot be read, comma-separated, such "
            "as num_parameters=70B. Keys: num_parameters, hidden_size, num_layers, "
            "intermediate_size, num_heads, num_kv_heads, vocab_size.",
        ),
    ] = None
    reward_shape: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="The shape of a reward model whose configuration cannot be read.",
        ),
    ] = None
    as_json: JsonOption = False
