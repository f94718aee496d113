"""Options of the commands, and what the shell offers for them at a Tab."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from laurel.errors import LaurelError
from laurel.observe.json_output import JsonOption

if TYPE_CHECKING:
    from laurel.config.schemas import Kind
    from laurel.config.yaml_tree import Section


# --------------------------------------------------------------------------------------------------
# What the shell offers at a Tab: keys of the configuration, data sets, environments.
#
# A shell puts a blank behind the only thing that is offered, and takes whatever all that is offered
# begins with. So a section is never offered alone, but with what is in it; and beside a key that
# may hold anything stands the same with its default. No model, data set or network is touched.

Offer = tuple[str, str]
"""What is offered, and a word about it, which zsh and fish show."""

_COMMANDS: dict[str, Kind] = {"rm": "rm", "sft": "sft", "grpo": "grpo", "policy": "grpo"}
"""The schema of the overrides of a command."""


def offer_overrides(context: typer.Context, incomplete: str) -> list[Offer]:
    """Keys of the configuration, and the values of those that can hold only a few."""
    from laurel.config.schemas import SCHEMAS

    schema = SCHEMAS[_kind(context)]
    before = [text for text in context.params.get("overrides") or () if isinstance(text, str)]
    # bash takes `key=value` for three words, and wants the last of them.
    if before and before[-1] == "=":
        before.pop()
    elif incomplete or not before or "=" in before[-1]:
        return list(overrides(schema, incomplete))
    written = f"{before[-1]}=" if before else ""
    return [
        (value.removeprefix(written), about)
        for value, about in overrides(schema, written + incomplete)
        if value != written
    ]


def overrides(schema: type[Section], incomplete: str) -> Iterator[Offer]:
    """What `incomplete` may become: `sec` becomes `section.key=`, and that `section.key=value`.

    Args:
        schema: Of the whole configuration.
        incomplete: The beginning of an override, with its sign.
    """
    key = incomplete.lstrip("+~")
    sign, (key, equals, _) = incomplete[: len(incomplete) - len(key)], key.partition("=")
    *above, last = key.split(".")
    kinds: tuple[Any, ...] = (schema,)
    for name in above:
        kinds = _inside(kinds, name)
    found = {name: about for name, about in _keys(kinds) if name.startswith(last)}
    if equals:
        found = {last: found[last]} if last in found else {}
    while len(found) == 1 and not equals:
        (name,) = found
        deeper = dict(_keys(_inside(kinds, name)))
        if not deeper:
            break
        above, kinds, found = [*above, name], _inside(kinds, name), deeper
    path = sign + "".join(f"{name}." for name in above)
    if len(found) == 1 and sign != "~":
        (name,) = found
        yield from ((f"{path}{name}={value}", found[name]) for value in _values(kinds, name))
        return
    for name, about in found.items():
        ending = "." if dict(_keys(_inside(kinds, name))) else "" if sign == "~" else "="
        yield f"{path}{name}{ending}", about


def _inside(kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    from laurel.config.schema_info import step_into

    return step_into(kinds, name).kinds if kinds else ()


def _keys(kinds: tuple[Any, ...]) -> Iterator[Offer]:
    """The keys of the sections among these kinds, each with its first sentence."""
    from laurel.config.schema_info import sections_of

    for section in sections_of(kinds):
        for name, field in section.model_fields.items():
            yield name, " ".join((field.description or "").split()).partition(". ")[0]


def _values(kinds: tuple[Any, ...], name: str) -> list[str]:
    """The values that a key can hold, where these are few; else none of them, and its default."""
    from laurel.config.schema_info import choices_of, step_into

    step = step_into(kinds, name)
    if choices := choices_of(step.kinds):
        return choices
    if bool in step.kinds:
        return ["true", "false"]
    if step.field is None or step.field.is_required():
        return [""]
    default = step.field.get_default(call_default_factory=True)
    if default is None:
        return ["", "null"]
    said = str(default) if isinstance(default, int | float | str) else ""
    return ["", said] if said and said.isascii() and not set(said) & set(" \t'\"\\$`") else [""]


def _kind(context: typer.Context) -> Kind:
    """Which schema the command has: others are told it, or have it in their file."""
    from laurel.config.schemas import command_of_file

    command = context.info_name or ""
    if command in _COMMANDS:
        return _COMMANDS[command]
    said = context.params.get("kind") or context.params.get("trainer")
    file = context.params.get("config")
    if said in _COMMANDS:
        return _COMMANDS[said]
    try:
        return command_of_file(Path(file) if file else None)
    except LaurelError:  # told when the command is carried out
        return "rm"


# ----------------------------------------------------------------------------- values of options


def offer_tasks() -> list[str]:
    """Data sets of tasks that have a name."""
    from laurel.data.task_formats import TASK_SETS

    return list(TASK_SETS)


def offer_preferences() -> list[str]:
    """Classes that read preferences."""
    from laurel.data.preferences import DATASET_CLASSES

    return list(DATASET_CLASSES)


def offer_environments() -> list[str]:
    """Environments that are there without a configuration."""
    from laurel.environments.registry import BUILT_IN

    return list(BUILT_IN)


def offer_layers() -> list[str]:
    """Layers of the sandbox that can be left out."""
    from laurel.sandbox.tiers import LAYERS

    return [*LAYERS, "cgroup"]


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file; without it, the defaults.", metavar="FILE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=offer_overrides,
        help="Changes to the configuration: a.b=c sets, +a.b=c adds, ++a.b=c either, ~a.b deletes.",
    ),
]

ColumnKeys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=COLUMN",
        help="Columns of other names, as laurel rm is told them: data.prompt_key=, "
        "data.chosen_key=, data.rejected_key=.",
    ),
]

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A directory or a hub name.")
]
MaxLengthOption = Annotated[
    int | None, typer.Option(min=2, help="Longest conversation, for a model without scoring.json.")
]
BatchTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Of the weights and the arithmetic.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Threads on a CPU; default: one per core.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the policy section, e.g. tokenizer.pad_token=auto.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned, besides the configuration."""

    kind: Annotated[
        Literal["rm", "sft", "grpo"] | None,
        typer.Option("--for", help="The command it is for; else told from the file's sections."),
    ] = None
    num_nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Plan for so many nodes: cluster.num_nodes."),
    ] = None
    slots_per_node: Annotated[
        int | None,
        typer.Option("--gpus-per-node", min=1, help="Slots of each: cluster.gpus_per_node."),
    ] = None
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of each device, e.g. 80GiB. Default: that of --device."),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A100, H100 or H200: say how long a step takes."),
    ] = None
    efficiency: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Part of the device's peak that products reach. Default: 0.4, as the report on "
            "Llama 3 has 38 to 43 % on H100s.",
        ),
    ] = 0.4
    memory_efficiency: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Part of its memory's bandwidth that decoding reaches. Default: 0.7, as kernels "
            "start between the reads; an assumption.",
        ),
    ] = 0.7
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Of a typical prompt. Default: what completions leave."
        ),
    ] = None
    completion_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Of a typical completion. Default: half of the longest conversation, or fewer "
            "where the run allows no more.",
        ),
    ] = None
    policy_shape: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="The policy, where its configuration cannot be read: num_parameters=70B,"
            "hidden_size=8192,num_layers=80,intermediate_size=28672,num_heads=64,num_kv_heads=8,"
            "vocab_size=128256.",
        ),
    ] = None
    reward_shape: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUE,...", help="The same of the reward model that judges."),
    ] = None
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What is served, and how."""

    model: ModelOption = ""
    null: Annotated[
        bool, typer.Option("--null", help="Serve no model but trivial scores, for load tests.")
    ] = False
    replicas: Annotated[
        int, typer.Option(metavar="N", help="Processes with the model; 1: this one.")
    ] = 1
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000
    engine: Annotated[Literal["laurel", "vllm"], typer.Option(help="What computes the scores.")] = (
        "laurel"
    )
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variable with the API key; default: LAUREL_API_KEY, or else a file that is made.",
        ),
    ] = None
    admin_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variable with the key for /admin; default: LAUREL_ADMIN_KEY, or else the API "
            "key.",
        ),
    ] = None
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="Need no key; on loopback only.")
    ] = False
    allow_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Private addresses, such as 10.0.0.0/8, that need no key for scores; repeatable.",
        ),
    ] = None
    precision: PrecisionOption = "float32"
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    max_length: MaxLengthOption = None
    batch_tokens: BatchTokensOption = 8192
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Completions that may wait; further requests get 429.")
    ] = 2000
    request_seconds: Annotated[
        float, typer.Option(min=0.1, help="Of one request; then it gets 503.")
    ] = 120.0
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="What was accepted may take when the server is ended.")
    ] = 30.0
    access_log: Annotated[
        str,
        typer.Option(metavar="FILE", help="JSON lines of requests; - is stderr, none is none."),
    ] = "-"
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="Put what is asked into the access log.")
    ] = False
    as_json: JsonOption = False
