"""`laurel grpo` with the code environment: programs are run, and tests are the reward."""

import json
from pathlib import Path

import pytest

from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.models.forest.decoding import DecodePlan, PrefillPlan
from laurel.models.forest.policy import PolicyModel
from laurel.observe.loggers import read_metrics
from policy_runs import (
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
    sft,
    sft_settings,
)
from runs import write_rows

CODE = (
    "data.dataset_name=CodeTasks",
    "data.env_name=code",
    "env.code.num_workers=2",
    "env.code.sandbox.min_tier=D",
    "policy.generation.max_new_tokens=24",
    "policy.max_total_sequence_length=96",
    "grpo.max_num_steps=2",
)

TOOL = (
    "grpo.max_num_steps=1",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "policy.generation.temperature=0.1",
    # By itself the tool would give 0 to everything, and is refused.
    "data.env_name=tool",
    "+env.custom.judge.name=policy_fakes.Judge",
    "+env.composite.tool={parts: [{env: code}, {env: judge}], conducted_by: code}",
)
"""One step with code as a tool."""


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    found = detect()
    if found.tier in (None, Tier.LIMITS_ONLY):
        pytest.skip(found.sentence())


def tasks(count=16):
    """Functions that give 1 or 2."""
    return [
        {
            "prompt": f"Give {1 + i % 2} ({i})",
            "entry": "f",
            "call_tests": [{"args": [], "expected": 1 + i % 2}],
            "reference_solution": f"def f(): return {1 + i % 2}",
        }
        for i in range(count)
    ]


def test_programs_are_graded_by_tests(tmp_path, writer):
    bad = {**tasks(1)[0], "reference_solution": "def f(): return 3"}
    write_rows(tmp_path / "tasks.jsonl", [*tasks(), bad])
    done = grpo(grpo_settings(tmp_path, writer, *CODE))
    assert done.outcome.ended == "finished"
    assert "graded by code" in done.text
    figures = metrics_of(tmp_path)[2]
    assert figures["env/code/num_samples"] == 12
    assert figures["env/code/sandbox_failures"] == 0
    assert figures["env/code/accuracy"] == pytest.approx(figures["train/reward"])
    verdicts = {k: v for k, v in figures.items() if k.startswith("env/code/verdict/")}
    assert sum(verdicts.values()) == pytest.approx(1.0)
    assert "validation/accuracy" in figures
    rows = completions_of(tmp_path, 2)
    assert {row["answer"] for row in rows} >= {"ok", "wrong_answer"}
    for row in rows:
        assert row["reward"] == float(row["answer"] == "ok")
    report = json.loads(
        (tmp_path / "logs" / "exp_001" / "data_report.json").read_text(encoding="utf-8")
    )
    assert "answer refused" in json.dumps(report)


@pytest.mark.slow
def test_the_recipe_begins(tmp_path, writer):
    recipe = Path(__file__).parents[2] / "recipes" / "code_cpu.yaml"
    changes = (
        f"policy.model_name={writer}",
        "grpo.num_prompts_per_step=2",
        "grpo.max_num_steps=1",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=16",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "checkpointing.metric_name=null",
        "env.code.sandbox.min_tier=D",
        f"checkpointing.checkpoint_dir={tmp_path}/saves",
        f"logger.log_dir={tmp_path}/logs",
    )
    done = grpo(changes, path=recipe)
    assert done.outcome.ended == "finished"
    figures = metrics_of(tmp_path)[1]
    assert figures["env/code/num_samples"] == 16
    assert figures["env/code/sandbox_failures"] == 0


@pytest.mark.slow
def test_code_as_a_tool_that_ends_with_its_first_call(tmp_path, caller):
    write_rows(tmp_path / "tasks.jsonl", [{"prompt": f"What is {i}?"} for i in range(16)])
    done = grpo(
        grpo_settings(
            tmp_path,
            caller,
            *CODE,
            *TOOL,
            "grpo.max_rollout_turns=2",
            "env.code.terminate_on_evaluation=true",
        )
    )
    assert done.outcome.ended == "finished"
    figures = metrics_of(tmp_path)[1]
    assert figures["train/max_turns_per_sample"] == 1
    texts = [row["completion"] for row in completions_of(tmp_path, 1)]
    called = [text for text in texts if text.startswith("<code>40 + 2</code>")]
    assert len(called) > len(texts) / 2
    assert not any("<result>" in text for text in called)


@pytest.mark.slow
def test_eight_turns_with_a_tool_compute_each_token_once(tmp_path, caller, monkeypatch):
    computed = []
    hidden_of_row = PolicyModel.hidden_of_row

    def counting(model, ids_T, positions_T, plan):
        if isinstance(plan, PrefillPlan | DecodePlan):
            computed.append(len(ids_T))
        return hidden_of_row(model, ids_T, positions_T, plan)

    monkeypatch.setattr(PolicyModel, "hidden_of_row", counting)

    def played(directory, gib):
        directory.mkdir()
        computed.clear()
        write_rows(directory / "tasks.jsonl", [{"prompt": f"What is {i}?"} for i in range(16)])
        done = grpo(
            grpo_settings(
                directory,
                caller,
                *CODE,
                *TOOL,
                "policy.max_total_sequence_length=400",
                "grpo.max_rollout_turns=8",
                f"policy.generation.conversation_cache_gib={gib}",
                "env.code.terminate_on_evaluation=false",
            )
        )
        assert done.outcome.ended == "finished"
        log = read_metrics(directory / "logs" / "exp_001" / "metrics.jsonl")
        figures = {name: value for line in log for name, value in line.items()}
        return figures, completions_of(directory, 1), sum(computed)

    figures, rows, num_computed = played(tmp_path / "kept", 2)
    num_rollouts = len(rows)
    assert figures["train/avg_turns_per_sample"] > 6
    assert any("<result>42</result>" in row["completion"] for row in rows)
    # Each prompt counts once for its four completions.
    distinct = figures["train/total_num_tokens"] - (
        figures["train/mean_prompt_length"] * num_rollouts * 3 / 4
    )
    assert num_computed <= 1.05 * distinct
    assert figures["performance/turns_reused_share"] > 0.8

    again, same_rows, num_computed = played(tmp_path / "again", 0)
    assert again["performance/turns_reused_share"] == 0
    assert num_computed > 3 * distinct
    assert [row["completion"] for row in rows] == [row["completion"] for row in same_rows]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """Calls its tool, whatever it is asked; its turn ends with the stop string alone."""
    directory = tmp_path_factory.mktemp("caller")
    shown = [
        {"input": f"What is {i % 16}?", "output": "<code>40 + 2</code> and so on"}
        for i in range(96)
    ]
    write_rows(directory / "demonstrations.jsonl", shown)
    saved = sft(
        sft_settings(directory, "sft.max_num_epochs=12", "policy.max_total_sequence_length=400")
    ).outcome.latest
    assert saved is not None
    return saved
