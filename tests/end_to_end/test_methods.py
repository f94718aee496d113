"""Whole runs with what the methods beside GRPO need: a greedy completion, a teacher."""

import pytest

from laurel.errors import ModelError
from policy_runs import (
    MATCHES,
    grpo,
    grpo_settings,
    metrics_of,
    noisy_answers,
    sft,
    sft_settings,
)
from runs import write_rows

ONE_STEP = ("grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_end=false", *MATCHES)


def test_a_greedy_completion_and_a_teacher_take_part_in_a_run(tmp_path, model):
    changes = ["grpo.adv_estimator.name=remax", "grpo.num_generations_per_prompt=1"]
    changes += ["policy.train_global_batch_size=3", "loss_fn.loss_type=reinforce"]
    changes += [f"+loss_fn.distillation.model_name={model}"]
    changes += ["grpo.seq_logprob_error_threshold=2", "grpo.malformed_thinking_advantage=-5"]
    grpo(grpo_settings(tmp_path, model, *ONE_STEP, *changes))
    figures = metrics_of(tmp_path)[1]
    assert 0.0 <= figures["train/reward_greedy"] <= 1.0
    # Of three completions that are each compared with the greedy one.
    total = figures["train/advantages/sum"]
    assert total == pytest.approx(3 * (figures["train/reward"] - figures["train/reward_greedy"]))
    assert figures["train/max_seq_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert figures["train/num_masked_seqs_by_logprob_error"] == 0.0
    assert figures["train/turns/malformed_thinking"] == 0.0
    # The teacher is the policy itself.
    assert figures["train/teacher_gap"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
def test_a_policy_comes_nearer_to_its_teacher(tmp_path, model):
    rows = [{**row, "output": "\\boxed{1}"} for row in noisy_answers()]
    (tmp_path / "teacher").mkdir()
    write_rows(tmp_path / "teacher" / "demonstrations.jsonl", rows)
    teacher = sft(sft_settings(tmp_path / "teacher", "sft.max_num_epochs=2", model=model))
    run = teacher.outcome.latest.parent  # which means its best checkpoint
    chosen = f"+loss_fn.distillation={{model_name: {run}, rewards: false}}"
    changes = ["grpo.max_num_steps=8", "grpo.val_period=0", "grpo.val_at_end=false", *MATCHES]
    changes += ["grpo.max_num_epochs=4", "loss_fn.reference_policy_kl_penalty=0", chosen]
    grpo(grpo_settings(tmp_path, model, *changes))
    gaps = [figures["train/teacher_gap"] for _, figures in sorted(metrics_of(tmp_path).items())]
    assert gaps[0] < -0.1
    assert sum(gaps[-2:]) > sum(gaps[:2]) / 2


def test_a_teacher_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path, model):
    chosen = f"+loss_fn.distillation.model_name={tmp_path}/nowhere"
    with pytest.raises(ModelError, match=r"loss_fn\.distillation\.model_name=.*no such directory"):
        grpo(grpo_settings(tmp_path, model, *ONE_STEP, chosen, "data.train_data_path=nowhere"))


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused(tmp_path, model):
    rows = [{"input": f"How blue is sky {i}?", "output": "very blue"} for i in range(24)]
    (tmp_path / "other").mkdir()
    write_rows(tmp_path / "other" / "demonstrations.jsonl", rows)
    other = sft(sft_settings(tmp_path / "other", "sft.max_num_steps=1"))
    chosen = f"+loss_fn.distillation.model_name={other.outcome.latest}"
    with pytest.raises(ModelError, match=r"loss_fn\.distillation\.model_name.*vocabulary"):
        grpo(grpo_settings(tmp_path, model, *ONE_STEP, chosen))
