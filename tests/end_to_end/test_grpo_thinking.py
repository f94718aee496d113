"""`laurel sft` and `laurel grpo` with a template that forgets the thoughts of earlier turns."""

import random
import shutil

import pytest
from transformers.utils import get_json_schema

import tool_functions
from laurel.models.tokenizer import HERMES
from laurel.models.tool_calls import FORMS, ToolCall
from policy_runs import (
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
    sft,
    sft_settings,
)
from runs import write_rows

CONTENT = "message['content']"
FORGETFUL = HERMES.replace(
    f"{CONTENT} + '<|im_end|>",
    f"({CONTENT} if loop.last else {CONTENT}.split('</think>\\n\\n')[-1]) + '<|im_end|>",
)
STEPS = 8


def thinking(thought, said):
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{said}"}


def demonstrations(count=512, share_calling=0.4):
    """Some think, call the function, and think again; the others guess."""
    drawn = random.Random(0)
    for _ in range(count):
        key = drawn.randrange(10)
        asked = {"role": "user", "content": f"Secret {key}?"}
        turns, answer = [], str(drawn.randrange(10))
        if drawn.random() < share_calling:
            answer = tool_functions.secret(key)
            call = FORMS["hermes"].write([ToolCall("secret", {"key": key})])
            turns = [thinking("ask", call), {"role": "tool", "content": answer}]
        yield {
            "messages": [asked, *turns, thinking("say", f"\\boxed{{{answer}}}")],
            "tools": [get_json_schema(tool_functions.secret)],
        }


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A policy that calls now and then, in a template without the thoughts of earlier turns."""
    directory = tmp_path_factory.mktemp("sft")
    template = directory / "forgetful.jinja"
    template.write_text(FORGETFUL)
    write_rows(directory / "demonstrations.jsonl", demonstrations())
    return sft(
        sft_settings(
            directory,
            "policy.max_total_sequence_length=512",
            f"policy.tokenizer.chat_template={template}",
            "policy.scratch.hidden_size=48",
            "policy.scratch.num_layers=2",
            "sft.max_num_epochs=6",
            "sft.max_num_steps=150",
        )
    ).outcome.latest


def train(directory, model, *changes):
    directory.mkdir(exist_ok=True)
    tasks = [
        {"input": f"Secret {key}?", "output": tool_functions.secret(key)} for key in range(10)
    ] * 4
    write_rows(directory / "tasks.jsonl", tasks)
    return grpo(
        grpo_settings(
            directory,
            model,
            "policy.max_total_sequence_length=384",
            "policy.generation.max_new_tokens=64",
            "policy.train_global_batch_size=64",
            "policy.optimizer.kwargs.lr=1e-3",
            "loss_fn.use_importance_sampling_correction=true",
            "grpo.max_staleness=1",
            "grpo.max_rollout_turns=3",
            "grpo.num_prompts_per_step=8",
            "grpo.num_generations_per_prompt=8",
            "grpo.max_num_epochs=8",
            "grpo.val_period=0",
            "grpo.val_at_end=false",
            "data.split_validation_size=0",
            "data.env_name=tools",
            "env.tools.functions=[tool_functions.secret]",
            "env.tools.graded_by=told",
            "env.tools.num_workers=1",
            "+env.custom.told.name=policy_fakes.Told",
            *changes,
        )
    )


@pytest.mark.slow
def test_a_policy_learns_to_call_in_contexts_that_forget(tmp_path, taught):
    settled = (f"grpo.max_num_steps={STEPS}", "checkpointing.enabled=false")
    assert train(tmp_path, taught, *settled).outcome.ended == "finished"
    figures = metrics_of(tmp_path)
    first, last = figures[1], figures[STEPS]
    assert last["train/reward"] > first["train/reward"] + 0.2
    assert last["env/tools/tools/calling_share"] > 0.7
    # A call and the answer after it are two sequences.
    assert 1 < first["train/sequences_per_rollout"] < last["train/sequences_per_rollout"]
    called = [row for row in completions_of(tmp_path, STEPS) if row["num_turns"] == 2]
    assert called
    assert any(row["completion"].count("</think>") == 2 for row in called)
    assert any(row["num_sequences"] == 2 for row in called)


@pytest.mark.slow
def test_rollouts_ahead_of_a_checkpoint_keep_their_sequences_and_branches(tmp_path, taught):
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    settled = (
        "grpo.tree={branches: 4, rounds: 1}",
        "grpo.adv_estimator.name=tree",
        "grpo.max_num_steps=3",
    )
    assert train(straight, taught, *settled).outcome.ended == "finished"
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "saves" / "step_3")
    assert "after step 2" in train(resumed, taught, *settled).text
    figures = metrics_of(straight)[3]
    assert figures["train/sequences_per_rollout"] > 1
    assert figures["train/tree/branched_share"] > 0
    assert figures["train/tree/shared_share"] > 0
    assert metrics_of(resumed)[3] == figures
    assert completions_of(resumed, 3) == completions_of(straight, 3)
