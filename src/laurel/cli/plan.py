"""`laurel plan`: where everything of a run would go, without loading or starting anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from laurel.cli.json_output import write_json
from laurel.cli.plan_report import ReadShapes, as_facts, as_text
from laurel.cli.schemas import SCHEMAS, Kind, kind_of
from laurel.config.grpo_training import GRPORun
from laurel.config.load import load_config
from laurel.config.schema import DTensorConfig, PolicyConfig
from laurel.config.scorers import ScorerSource
from laurel.distributed.claims import Run, uses_reward_model
from laurel.distributed.fitting import fit
from laurel.distributed.memory import Shapes
from laurel.distributed.model_shape import ModelShape, decoder_shape, parse_bytes, parse_shape
from laurel.distributed.roles import RoleName
from laurel.errors import CheckpointError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the command line says besides the configuration."""

    kind: Kind | None = None
    num_nodes: int | None = None
    slots_per_node: int | None = None
    device_memory: str | None = None
    policy_shape: str | None = None
    reward_shape: str | None = None
    as_json: bool = False


def run_plan(path: Path | None, overrides: Sequence[str], options: PlanOptions) -> bool:
    """Print the plan; whether it fits.

    Raises:
        ConfigError: The configuration or an option cannot be read. What does not fit is printed.
    """
    sizes = {"num_nodes": options.num_nodes, "gpus_per_node": options.slots_per_node}
    cluster = [f"cluster.{key}={size}" for key, size in sizes.items() if size is not None]
    device_memory = parse_bytes(options.device_memory) if options.device_memory else None
    loaded = load_config(SCHEMAS[options.kind or kind_of(path)], path, [*overrides, *cluster])
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    config = cast(Run, loaded.config)
    read = read_shapes(config, options)
    fitted = fit(config, read.shapes, device_memory=device_memory)
    if options.as_json:
        write_json(as_facts(fitted, read, device_memory=device_memory))
    else:
        print(as_text(config, fitted, read, device_memory=device_memory))
    return fitted.fits


# ------------------------------------------------------------------------------------------ shapes


def read_shapes(config: Run, options: PlanOptions) -> ReadShapes:
    """The shapes of the models, or why one is not known."""
    notes: list[str] = []
    unknown: dict[RoleName, str] = {}
    policy: ModelShape | None = None
    try:
        policy = _policy_shape(config.policy, options.policy_shape, notes)
    except (ModelError, CheckpointError) as error:
        unknown["policy"] = f"{str(error).rstrip('.')}. --policy-shape would tell it"
    judges: tuple[ModelShape, ...] = ()
    if isinstance(config, GRPORun) and uses_reward_model(config):
        try:
            loaded = config.env.reward_model.loaded
            split = config.env.reward_model.dtensor_cfg  # of all of them
            judges = tuple(_judge_shape(judge, split, options.reward_shape) for judge in loaded)
        except (ModelError, CheckpointError) as error:
            said = str(error).replace("policy.model_name", "env.reward_model.model_name")
            unknown["reward_model"] = f"{said.rstrip('.')}. --reward-shape would tell it"
    shapes = Shapes(policy=policy, reward_models=judges)
    return ReadShapes(shapes=shapes, unknown=unknown, notes=tuple(notes))


def _policy_shape(policy: PolicyConfig, written: str | None, notes: list[str]) -> ModelShape:
    has_head = not policy.reward_model_cfg.enabled
    if written is not None:
        return parse_shape(written, has_language_head=has_head)
    scratch = policy.scratch
    if scratch is not None:
        shape = decoder_shape(
            hidden_size=scratch.hidden_size, num_layers=scratch.num_layers,
            intermediate_size=scratch.intermediate_size or 4 * scratch.hidden_size,
            num_heads=scratch.num_heads, num_kv_heads=scratch.num_kv_heads,
            vocab_size=scratch.vocab_size, has_language_head=has_head,
        )  # fmt: skip
        return replace(shape, normalises_heads=scratch.architecture == "qwen3")
    from laurel.cli.found_model import found_name

    name = found_name(str(policy.model_name), say=notes.append)
    return _read(policy, name, has_head)


def _judge_shape(judge: ScorerSource, split: DTensorConfig, written: str | None) -> ModelShape:
    if written is not None:
        return parse_shape(written, has_language_head=False)
    name = judge.checkpoint_path or judge.model_name
    if name is None:
        raise ModelError("env.reward_model.model_name is not said.")
    from laurel.cli.found_model import found_name

    policy = PolicyConfig(trust_remote_code=judge.trust_remote_code, dtensor_cfg=split)
    return _read(policy, found_name(name, say=lambda _: None), False)


def _read(policy: PolicyConfig, name: str, has_head: bool) -> ModelShape:
    from laurel.models.shapes import read_shape
    from laurel.rewards.load import quiet_libraries

    quiet_libraries()
    return read_shape(policy, name, has_language_head=has_head)
