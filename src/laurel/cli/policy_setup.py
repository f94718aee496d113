"""What fine-tuning and GRPO share on their way to a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel.cli.memory_check import check_memory
from laurel.cli.places import Places
from laurel.cli.run_setup import describe_data
from laurel.cli.trained_model import TrainedModel, describe_model, load_trained_model
from laurel.config.schema import CheckpointingConfig, ClusterConfig, PolicyConfig
from laurel.data.text_report import TextReport

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.algorithms.learner_worker import ModelFacts


def load_policy_to_train(
    policy: PolicyConfig,
    cluster: ClusterConfig,
    places: Places,
    *,
    seed: int,
    texts: Iterable[str],
    identity: Mapping[str, object],
    resume_from: Path | None,
    console: Console,
    temperature: float = 1.0,
    needs_reference: bool = False,
    draws_from_copy: bool = False,
    with_entropy: bool = False,
) -> TrainedModel:
    """The policy, checked, with its optimizer.

    Args:
        policy: The policy section.
        cluster: Where it goes.
        places: Likewise.
        seed: Seeds adapters, a model from scratch and dropout.
        texts: What a tokenizer from scratch learns from.
        identity: See `RunState.identity`.
        resume_from: Checkpoint of the same run.
        console: Shows that something is going on.
        temperature: That completions are drawn with.
        needs_reference: The policy before its training is kept, too.
        draws_from_copy: See `check_memory`.
        with_entropy: See `LearnerWorker`.
    """
    with console.status("loading torch"):
        from laurel.models.load_policy import load_policy
    load = partial(
        load_policy, policy, seed=seed, max_length=policy.max_total_sequence_length,
        texts=tuple(texts) if policy.scratch is not None else (), temperature=temperature,
    )  # fmt: skip
    resumed = partial(load, resume_from=resume_from) if resume_from else load
    check_room = partial(
        check_memory, policy, needs_reference=needs_reference, draws_from_copy=draws_from_copy
    )
    return load_trained_model(
        policy, cluster, places, load=resumed, seed=seed, identity=identity,
        resume_from=resume_from, console=console, check_room=check_room,
        load_reference=load if needs_reference else None, with_entropy=with_entropy,
    )  # fmt: skip


def policy_settings(policy: PolicyConfig, **sections: Mapping[str, Any]) -> dict[str, object]:
    """What must be the same when a run goes on, by dotted name, or it would be another run."""
    from laurel.algorithms.run_state import leaves

    names = {
        "model_name", "scratch", "hf_config_overrides", "tokenizer", "train_global_batch_size",
        "precision", "optimizer", "scheduler", "max_total_sequence_length",
    }  # fmt: skip
    chosen = policy.model_dump(mode="json", include=names)
    chosen["dtensor_cfg"] = {"lora_cfg": policy.dtensor_cfg.lora_cfg.model_dump(mode="json")}
    return dict(leaves("", {"policy": chosen, **sections}))


def describe_policy(
    policy: PolicyConfig,
    facts: ModelFacts,
    reports: Mapping[str, TextReport],
    run_dir: Path,
    saving: CheckpointingConfig,
    places: Places,
    console: Console,
) -> None:
    """Say what was read, loaded and decided."""
    describe_data(reports, run_dir, console)
    describe_model("policy", facts, policy, places, console)
    console.print(f"logs    {run_dir}")
    if saving.enabled:
        console.print(f"saves   {saving.checkpoint_dir}")
