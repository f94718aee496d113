"""`examples/run_sft.py` and `examples/run_grpo_rm.py`, as people type them."""

import pytest
from pyarrow import parquet

from laurel.observe.loggers import read_metrics
from policy_runs import CPU, SCRATCH, noisy_answers, sums
from runs import ROOT, run, save_model, write_rows

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.mark.slow
def test_from_fine_tuning_to_a_reward_model(tmp_path):
    """The policy of the one is that of the other; each reads its file from `examples/configs`."""
    demonstrations = write_rows(tmp_path / "demonstrations.jsonl", noisy_answers(24))
    done = run(
        [
            *CPU,
            *SCRATCH,
            "policy.max_total_sequence_length=64",
            "policy.train_global_batch_size=8",
            "sft.max_num_steps=2",
            "sft.val_period=0",
            "sft.val_at_start=false",
            "data.train.dataset_name=null",
            "data.train.split=null",
            f"data.train.data_path={demonstrations}",
            "data.validation=null",
            "++data.split_validation_size=0.25",
        ],
        program=[str(EXAMPLES / "run_sft.py")],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "finished after step 2" in done.stdout

    judge = save_model(tmp_path / "judge", num_labels=1)
    rows = write_rows(tmp_path / "tasks.jsonl", sums(8))
    done = run(
        [
            "--config",
            str(EXAMPLES / "configs" / "grpo_rm_1B.yaml"),
            *CPU,
            f"policy.model_name={tmp_path}/results/sft/step_2",
            "policy.max_total_sequence_length=64",
            "policy.train_global_batch_size=8",
            "policy.generation.max_new_tokens=4",
            "grpo.num_prompts_per_step=2",
            "grpo.num_generations_per_prompt=4",
            "grpo.max_num_steps=2",
            "grpo.val_period=2",
            f"env.reward_model.model_name={judge}",
            "env.reward_model.precision=float32",
            "data.train.dataset_name=null",
            f"data.train.data_path={rows}",
            "data.prompt_file=null",
            "++data.split_validation_size=0.25",
        ],
        program=[str(EXAMPLES / "run_grpo_rm.py")],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "graded by reward_model" in done.stdout
    assert "finished after step 2" in done.stdout
    run_dir = next((tmp_path / "logs").glob("exp_*/completions")).parent
    trained = [row for row in read_metrics(run_dir / "metrics.jsonl") if "train/loss" in row]
    assert [row["env/reward_model/num_samples"] for row in trained] == [8, 8]
    table = parquet.read_table(run_dir / "completions" / "step_000002.parquet")
    assert table.num_rows == 8
    assert table.column("environment").unique().to_pylist() == ["reward_model"]
