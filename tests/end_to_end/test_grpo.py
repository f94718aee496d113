"""`laurel grpo` from tasks to a better policy, with every kind of environment."""

import json
import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import runs
from laurel.errors import NonFiniteError
from laurel.generation.transformers.engine import HeldWeights
from policy_fakes import HOOKS
from policy_runs import (
    HOOKED,
    MATCHES,
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
    sums,
)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The checkpoints of a run of `laurel rm`."""
    directory = tmp_path_factory.mktemp("reward_model")
    runs.train(runs.settings(directory, "rm.max_num_steps=4", "rm.val_period=0"))
    return directory / "saves"


NO_VALIDATION = ("grpo.val_period=0", "grpo.val_at_end=false")


NAMES = [
    "train/loss",
    "train/reward",
    "train/grad_norm",
    "train/lr",
    "train/global_valid_seqs",
    "train/global_valid_toks",
    "train/mean_prompt_length",
    "train/total_num_tokens",
    "train/total_turns",
    "train/avg_turns_per_sample",
    "train/max_turns_per_sample",
    "train/natural_termination_rate",
    "train/truncation_rate",
    "train/mean_total_tokens_per_sample",
    "train/mean_gen_tokens_per_sample",
    "train/max_gen_tokens_per_sample",
    "train/mean_env_tokens_per_sample",
    "train/kl_penalty",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/policy_kl_error",
    "train/js_divergence_error",
    "train/sampling_importance_ratio",
    "train/approx_entropy",
    "train/probs_ratio",
    "train/probs_ratio_clamped",
    "train/probs_ratio_min",
    "train/probs_ratio_max",
    "train/num_valid_samples",
    "train/advantages/mean",
    "train/advantages/max",
    "train/advantages/min",
    "train/advantages/sum",
    "train/baseline_reward/pct_0",
    "train/baseline_reward/pct_1",
    "train/baseline_reward/pct_mixed",
    "train/frac_reward_zero_std",
    "train/completions/mean_length",
    "train/completions/clipped_ratio",
    "train/num_failures",
    "train/groups_without_signal",
    "train/scorer_noise",
    "train/staleness",
    "train/bad_steps_in_a_row",
]
TIMERS = [
    "timing/train/total_step_time",
    "timing/train/generation",
    "timing/train/reward_calculation",
    "timing/train/policy_and_reference_logprobs",
    "timing/train/policy_training",
    "timing/train/exposed_generation",
    "timing/train/prepare_for_generation/transfer_and_update_weights",
    "performance/tokens_per_second",
]


def logged(directory, step):
    """Everything in the metrics of a step."""
    path = directory / "logs" / "exp_001" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {k: v for line in lines if line["step"] == step for k, v in line.items()}


def test_with_the_math_environment(tmp_path, model):
    done = grpo(
        grpo_settings(
            tmp_path,
            model,
            "grpo.max_num_steps=2",
            "env.math.num_workers=1",
            "grpo.val_num_generations_per_prompt=2",
        )
    )
    assert done.outcome.ended == "finished"
    figures = logged(tmp_path, 2)
    assert not [name for name in (*NAMES, *TIMERS) if name not in figures]
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["env/math/num_samples"] == 12
    assert figures["env/math/accuracy"] == pytest.approx(figures["train/reward"])
    assert figures["validation/env/math/num_samples"] == 8
    # Every reward is 0 or 1, so their mean may be called accuracy.
    assert figures["validation/accuracy"] == figures["validation/reward_mean"]
    assert figures["validation/pass@2"] >= figures["validation/accuracy"]
    assert done.outcome.metrics["validation/reward_mean"] == figures["validation/reward_mean"]
    assert "graded by math; sampled by TransformersEngine" in done.text
    assert "completion" in done.text  # the table of answers
    best = done.outcome.best
    assert best is not None
    assert runs.metric_of(best) == figures["validation/reward_mean"]
    info = json.loads((best / "training_info.json").read_text(encoding="utf-8"))
    assert info["total_steps"] == 2

    rows = completions_of(tmp_path, 2)
    assert len(rows) == 12
    assert {row["reward"] for row in rows} <= {0.0, 1.0}
    assert sum(row["reward"] for row in rows) / 12 == pytest.approx(figures["train/reward"])
    assert {row["expected"] for row in rows} <= {"1", "2"}
    assert len({row["group"] for row in rows}) == 3
    right = [row for row in rows if row["reward"] == 1]
    assert all(row["answer"] == row["expected"] for row in right)
    by_group: dict[str, list[Any]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).append(row)
    for group in by_group.values():
        if len({row["reward"] for row in group}) == 1:
            assert {row["advantage"] for row in group} == {0.0}
        else:
            assert all((row["advantage"] > 0) == (row["reward"] == 1) for row in group)


def test_with_a_reward_model_that_laurel_trained(tmp_path, model, reward_model):
    done = grpo(
        grpo_settings(
            tmp_path,
            model,
            "grpo.max_num_steps=2",
            "env.reward_model.enabled=true",
            f"env.reward_model.model_name={reward_model}",
            "env.reward_model.precision=float32",
        )
    )
    figures = logged(tmp_path, 2)
    assert "graded by reward_model" in done.text
    for name in ("num_samples", "mean_reward", "std_reward", "min_reward", "max_reward"):
        assert f"env/reward_model/{name}" in figures
        assert f"validation/env/reward_model/{name}" in figures
    assert figures["env/reward_model/mean_reward"] == pytest.approx(figures["train/reward"])
    # A mean score is no accuracy.
    assert "validation/reward_mean" in figures
    assert "validation/accuracy" not in figures
    assert not any(name.startswith("validation/pass@") for name in figures)
    assert figures["train/num_failures"] == 0
    # The same text has the same reward in every step and group of equal prompts.
    rewards = {row["reward"] for row in completions_of(tmp_path, 1)}
    assert len(rewards) > 3


@pytest.mark.slow
def test_several_turns_with_an_environment_of_ones_own(tmp_path, model):
    done = grpo(
        grpo_settings(
            tmp_path,
            model,
            "grpo.max_num_steps=2",
            "data.env_name=shouts",
            "+env.custom.shouts.name=policy_fakes.Shouts",
            "grpo.max_rollout_turns=2",
            "grpo.max_val_samples=2",
            "grpo.val_batch_size=1",
        )
    )
    assert done.outcome.ended == "finished"
    figures = logged(tmp_path, 1)
    assert figures["train/mean_env_tokens_per_sample"] > 0
    assert figures["train/avg_turns_per_sample"] > 1.5
    assert figures["train/probs_ratio"] == pytest.approx(1, abs=1e-5)
    assert figures["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)
    # What the environment said is not learned from.
    assert figures["train/global_valid_toks"] == pytest.approx(
        12 * figures["train/mean_gen_tokens_per_sample"]
    )
    assert "validation/accuracy" not in logged(tmp_path, 2)


def test_it_learns(tmp_path, model):
    rows = [row | {"output": "2"} for row in sums()]
    runs.write_rows(tmp_path / "tasks.jsonl", rows)
    grpo(
        grpo_settings(
            tmp_path,
            model,
            *MATCHES,
            "grpo.max_num_steps=20",
            "grpo.max_num_epochs=9",
            "grpo.val_period=0",
            "grpo.val_at_start=true",
            "checkpointing.save_period=99",
            "grpo.num_generations_per_prompt=8",
            "policy.train_global_batch_size=24",
            "policy.optimizer.kwargs.lr=5e-3",
        )
    )
    before, after = (logged(tmp_path, s)["validation/reward_mean"] for s in (0, 20))
    late = [logged(tmp_path, s)["train/reward"] for s in range(16, 21)]
    assert before <= 0.75
    assert after == 1.0
    assert sum(late) / 5 > 0.9


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["policy.dtensor_cfg.lora_cfg.enabled=true"],
        [
            "policy.generation.temperature=0.7",
            "policy.generation.top_p=0.9",
            "policy.generation.top_k=50",
        ],
        ["loss_fn.use_importance_sampling_correction=true", "grpo.max_staleness=1"],
    ],
    ids=["plain", "adapters", "sampling", "copy"],
)
def test_on_policy_the_ratio_is_one(tmp_path, model, changes):
    grpo(
        grpo_settings(
            tmp_path,
            model,
            *MATCHES,
            *NO_VALIDATION,
            "grpo.max_num_steps=1",
            "checkpointing.enabled=false",
            *changes,
        )
    )
    figures = logged(tmp_path, 1)
    for name in (
        "probs_ratio",
        "probs_ratio_min",
        "probs_ratio_max",
        "token_mult_prob_error",
        "sampling_importance_ratio",
    ):
        assert figures[f"train/{name}"] == pytest.approx(1, abs=1e-5), name
    assert figures["train/gen_kl_error"] < 1e-9
    assert figures["train/kl_penalty"] < 1e-9
    assert figures["train/grad_norm"] > 0
    assert not (tmp_path / "saves").exists()


def test_several_updates_of_the_same_rollouts_are_off_policy(tmp_path, model):
    grpo(
        grpo_settings(
            tmp_path,
            model,
            *MATCHES,
            *NO_VALIDATION,
            "grpo.max_num_steps=1",
            "grpo.num_iterations=2",
            "policy.train_global_batch_size=6",
        )
    )
    figures = logged(tmp_path, 1)
    assert figures["train/optimizer_steps"] == 4, "of 12 completions, 6 at a time, twice"
    assert figures["train/num_valid_samples"] == 24
    assert figures["train/probs_ratio_max"] > 1.001 or figures["train/probs_ratio_min"] < 0.999
    # The old log-probabilities are of the weights before all of them, which the generator had too.
    assert figures["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-5)


def test_the_divergence_is_measured_from_where_the_run_began(tmp_path, model):
    """With adapters the reference is the policy without them; both are the same policy here."""
    for name, changes in {
        "whole": [],
        "adapters": ["policy.dtensor_cfg.lora_cfg.enabled=true"],
    }.items():
        grpo(
            grpo_settings(
                tmp_path / name,
                model,
                *MATCHES,
                *NO_VALIDATION,
                "grpo.max_num_steps=3",
                "policy.optimizer.kwargs.lr=1e-2",
                *changes,
            )
        )
        figures = [logged(tmp_path / name, step) for step in (1, 2, 3)]
        penalties = [f["train/kl_penalty"] for f in figures if "train/kl_penalty" in f]
        assert penalties[0] < 1e-9
        assert penalties[-1] > 1e-4, name
        # What is saved needs nothing of Laurel.
        saved = tmp_path / name / "saves" / "step_3"
        loaded = AutoModelForCausalLM.from_pretrained(saved)
        before = AutoModelForCausalLM.from_pretrained(model)
        text = AutoTokenizer.from_pretrained(saved)("Which is", return_tensors="pt")
        with torch.no_grad():
            assert not torch.allclose(loaded(**text).logits, before(**text).logits, atol=1e-3)


def states(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    state = load_file(checkpoint / "training" / "optimizer.safetensors")
    return weights, {name: tensor for name, tensor in state.items() if "/ahead/" not in name}


@pytest.mark.slow
def test_a_step_without_signal_moves_nothing(tmp_path, model, monkeypatch):
    taken: list[int] = []
    take = HeldWeights.take

    def counted(held, weights):
        taken.append(weights.version)
        take(held, weights)

    monkeypatch.setattr(HeldWeights, "take", counted)
    grpo(
        grpo_settings(
            tmp_path,
            model,
            *NO_VALIDATION,
            *HOOKED,
            "data.env_name=fades",
            "+env.custom.fades={name: policy_fakes.Fades, kwargs: {calls: 3}}",
            "grpo.max_num_steps=3",
            "checkpointing.save_period=1",
            "grpo.max_staleness=1",
            "loss_fn.use_importance_sampling_correction=true",
        )
    )
    figures = [logged(tmp_path, step) for step in (1, 2, 3)]
    assert [f["train/optimizer_steps"] for f in figures] == [1, 0, 0]
    assert taken == [0, 1], "what has not changed is not handed over"
    assert [f["train/staleness"] for f in figures] == [0, 1, 1], "and its version goes on"
    assert [f["train/groups_without_signal"] for f in figures][1:] == [3, 3]
    assert "train/loss" not in figures[1]
    one, two, three = (states(tmp_path / "saves" / f"step_{s}") for s in (1, 2, 3))
    for later in (two, three):
        for before, after in zip(one, later, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
    start = load_file(model / "model.safetensors")
    assert any(not torch.equal(start[name], one[0][name]) for name in start), "the first one did"
    assert [f["train/bad_steps_in_a_row"] for f in figures] == [0, 0, 0], "it is no fault either"


def test_failures_take_part_in_nothing(tmp_path, model):
    grpo(
        grpo_settings(
            tmp_path,
            model,
            "data.env_name=matches",
            "grpo.max_num_steps=2",
            "+env.custom.matches={name: policy_fakes.Matches, kwargs: {poison: '2'}}",
            "env.max_failed_share=1.0",
            "grpo.val_num_generations_per_prompt=4",
        )
    )
    for step in (1, 2):
        figures, rows = logged(tmp_path, step), completions_of(tmp_path, step)
        failed = [row for row in rows if row["failure"] is not None]
        judged = [row for row in rows if row["failure"] is None]
        assert failed
        assert judged
        assert all(row["reward"] is None and row["advantage"] == 0 for row in failed)
        assert failed[0]["failure"] == "'2' is poison"
        assert figures["train/num_failures"] == len(failed)
        mean = sum(row["reward"] for row in judged) / len(judged)
        assert figures["train/reward"] == pytest.approx(mean)
        if "train/num_valid_samples" in figures:
            assert figures["train/num_valid_samples"] == len(judged)
            tokens = sum(row["num_tokens"] for row in judged)
            assert figures["train/global_valid_toks"] == tokens
        assert figures["env/matches/seen"] == len(judged)
    figures = logged(tmp_path, 2)
    assert figures["validation/num_failures"] > 0
    assert figures["validation/env/matches/seen"] + figures["validation/num_failures"] == 16


@pytest.mark.parametrize(("noise", "is_damped"), [(0.1, False), (2.0, True)])
def test_noise_is_measured_of_rewards_before_they_are_scaled(tmp_path, model, noise, is_damped):
    """Rewards of 0 and 10 become 0 and 1: ten times a noise of 0.1 is then 0.1, not 1."""
    grpo(
        grpo_settings(
            tmp_path,
            model,
            *MATCHES,
            *NO_VALIDATION,
            "grpo.max_num_steps=1",
            "+env.custom.matches.kwargs.reward=10",
            f"+env.custom.matches.kwargs.noise={noise}",
            "grpo.reward_scaling.enabled=true",
            "grpo.reward_scaling.source_max=10",
            "policy.generation.temperature=1.6",
        )
    )
    figures = logged(tmp_path, 1)
    assert figures["train/groups_without_signal"] < 3
    assert figures["train/scorer_noise"] == noise
    assert (figures["train/groups_at_noise_floor"] > 0) is is_damped


def test_a_loss_that_is_not_finite_is_not_applied_and_its_rollouts_are_kept(tmp_path, model):
    """The rewards are as large as float32 holds, so the sum over the tokens is infinite."""
    overrides = grpo_settings(
        tmp_path,
        model,
        "data.env_name=matches",
        *NO_VALIDATION,
        "checkpointing.save_period=1",
        "+env.custom.matches={name: policy_fakes.Matches, kwargs: {reward: 3e38}}",
        "grpo.normalize_rewards=false",
        "grpo.max_bad_steps=2",
        "grpo.max_num_steps=6",
    )
    with pytest.raises(NonFiniteError, match=r"2 steps in a row were not finite .*rollouts are in"):
        grpo(overrides)
    bad = tmp_path / "logs" / "exp_001" / "bad_steps"
    assert sorted(path.name for path in bad.iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    rows = [json.loads(line) for line in (bad / "step_1.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 3
    assert "loss" in rows[0]["reason"]
    assert len(rows[0]["completions"]) == len(rows[0]["rewards"]) == 4
    assert logged(tmp_path, 1)["train/bad_steps_in_a_row"] == 1
    start, saved = (load_file(d / "model.safetensors") for d in (model, tmp_path / "saves/step_1"))
    assert all(torch.equal(start[name], saved[name]) for name in start)


def test_completions_that_cannot_be_written_do_not_end_the_run(tmp_path, model):
    def be_in_the_way():
        (tmp_path / "logs" / "exp_001" / "completions").write_text("a file, not a directory")

    HOOKS["judge"] = be_in_the_way
    try:
        done = grpo(
            grpo_settings(tmp_path, model, *MATCHES, *NO_VALIDATION, "grpo.max_num_steps=2")
        )
    finally:
        HOOKS.clear()
    assert done.outcome.ended == "finished"
    assert "step 1: its completions could not be written: " in done.text
    assert (tmp_path / "saves" / "step_2" / "MANIFEST.json").is_file()


def test_validation_may_be_greedy_and_does_not_depend_on_the_step(tmp_path, model):
    grpo(
        grpo_settings(
            tmp_path,
            model,
            "data.env_name=matches",
            "grpo.max_num_steps=2",
            "grpo.val_period=1",
            "+env.custom.matches={name: policy_fakes.Matches, kwargs: {reward: 0.0}}",
            "grpo.val_at_start=true",
        )
    )
    validated = [
        {k: v for k, v in metrics_of(tmp_path)[s].items() if k.startswith("validation/")}
        for s in (0, 1, 2)
    ]
    assert validated[0] == validated[1] == validated[2], "nothing was learned, so nothing changed"


@pytest.mark.slow
def test_d22_a_time_budget_ends_the_run_saved_and_in_time(tmp_path, model, monkeypatch):
    rarely = ("grpo.val_period=100000", "checkpointing.save_period=100000")
    length = ("grpo.max_num_steps=100000", "grpo.max_num_epochs=100000")
    with runs.budget_that_ends(monkeypatch) as budget:
        done = grpo(grpo_settings(tmp_path, model, *MATCHES, *length, *rarely, budget))
    assert done.outcome.ended == "deadline"
    (saved,) = (tmp_path / "saves").glob("step_*")
    assert saved.name == f"step_{done.outcome.step}"
    assert (saved / "MANIFEST.json").is_file()
