"""`laurel grpo` with functions that the policy calls before it answers."""

import json
import random
import re
from pathlib import Path

import pytest
from transformers.utils import get_json_schema
from typer.testing import CliRunner

import tool_functions
from laurel.cli.main import app
from laurel.errors import ModelError
from laurel.models.tool_calls import FORMS, ToolCall
from policy_runs import completions_of, grpo, grpo_settings, metrics_of, sft, sft_settings
from runs import write_rows

KEYS = range(10)
SCHEMA = get_json_schema(tool_functions.secret)
ROOM = (
    "policy.max_total_sequence_length=384",
    "policy.generation.max_new_tokens=48",
    "grpo.max_rollout_turns=3",
    "data.env_name=tools",
    "env.tools.functions=[tool_functions.secret]",
    "env.tools.graded_by=math",
    "env.tools.num_workers=2",
    "env.math.num_workers=1",
)


def asked(key):
    return {"role": "user", "content": f"What is secret {key}?"}


def demonstrations(count=512, share_calling=0.4):
    """Some call the function and copy what it says; the others guess."""
    drawn = random.Random(0)
    for _ in range(count):
        key = drawn.choice(KEYS)
        told, guessed = tool_functions.secret(key), str(drawn.randrange(10))
        if drawn.random() < share_calling:
            call = FORMS["hermes"].write([ToolCall("secret", {"key": key})])
            turns = [{"role": "assistant", "content": call}, {"role": "tool", "content": told}]
            answer = told
        else:
            turns, answer = [], guessed
        last = {"role": "assistant", "content": f"\\boxed{{{answer}}}"}
        yield {"messages": [asked(key), *turns, last], "tools": [SCHEMA]}


def tasks(directory):
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{"input": asked(key)["content"], "output": tool_functions.secret(key)} for key in KEYS]
    write_rows(directory / "tasks.jsonl", rows * 4)


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A policy that sometimes calls, and is right where it does."""
    directory = tmp_path_factory.mktemp("caller")
    write_rows(directory / "demonstrations.jsonl", demonstrations())
    changes = (
        "policy.max_total_sequence_length=512",
        "policy.tokenizer.chat_template=hermes",
        "policy.scratch.hidden_size=48",
        "policy.scratch.num_layers=2",
        "sft.max_num_epochs=6",
        "sft.max_num_steps=80",
    )
    saved = sft(sft_settings(directory, *changes)).outcome.latest
    assert saved is not None
    return saved


def test_calls_are_answered_in_messages_of_their_own(tmp_path, caller):
    tasks(tmp_path)
    changes = ("grpo.max_num_steps=1", "policy.generation.temperature=0.7")
    done = grpo(grpo_settings(tmp_path, caller, *ROOM, *changes))
    assert done.outcome.ended == "finished"
    assert "graded by tools" in done.text
    figures = metrics_of(tmp_path)[1]
    assert figures["env/tools/num_failures"] == 0
    assert "validation/accuracy" in figures
    texts = [row["completion"] for row in completions_of(tmp_path, 1)]
    called = [text for text in texts if "<tool_call>" in text]
    assert called
    for text in called:
        key = re.search(r'"key": (\d)\}\}\n</tool_call>', text)
        if key is not None:
            assert tool_functions.secret(int(key[1])) in text.partition("</tool_call>")[2]


def test_a_template_that_shows_no_tools_refuses_the_run(tmp_path):
    tasks(tmp_path)
    with pytest.raises(ModelError, match=r"leaves out the tools of env\.tools, so.*hermes"):
        grpo(grpo_settings(tmp_path, None, *ROOM))


@pytest.mark.slow
def test_other_commands_show_tools_too(tmp_path, caller):
    tasks(tmp_path)
    rows = str(tmp_path / "tasks.jsonl")
    tools = ROOM[3:]

    def run(*words):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    check = ("data", "check", rows, "--for", "grpo", "--model", str(caller), "--json")
    alone = run(*check, "data.env_name=math")["first_row"]["parts"][0]["tokens"]
    shown = run(*check, *tools, "grpo.max_rollout_turns=2")["first_row"]["parts"][0]["tokens"]
    assert len(shown) > len(alone) + 50
    assert "secret" in "".join(piece["text"] for piece in shown)
    result = run(
        *("eval", "policy", "--model", str(caller), "--dataset", "ResponseDataset"),
        *("--data-path", rows, "-n", "2", "--environment", "tools", "--json"),
        *(one for one in ROOM if "env_name" not in one),
        "cluster.cpu_threads=1",
        "cluster.device=cpu",
    )
    assert result["figures"]["env/tools/tools/calling_share"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tools_sft_cpu", "tools_cpu"])
def test_the_recipes_begin(tmp_path, caller, name):
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    places = (f"checkpointing.checkpoint_dir={tmp_path}/saves", f"logger.log_dir={tmp_path}/logs")
    if name == "tools_sft_cpu":
        from laurel.config.load import load_config
        from laurel.config.sft import SFTRun

        config = load_config(SFTRun, recipe, [*places]).config
        assert config.data.train_sets()[0].dataset_name == "laurel.demo.data.CalculatorTasks"
        return
    changes = (
        f"policy.model_name={caller}",
        "grpo.num_prompts_per_step=2",
        "grpo.max_num_steps=1",
        "policy.train_global_batch_size=16",
        "policy.train_micro_batch_size=16",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "grpo.val_at_end=false",
        "checkpointing.metric_name=null",
    )
    done = grpo([*changes, *places], path=recipe)
    assert done.outcome.ended == "finished"
    assert metrics_of(tmp_path)[1]["env/tools/num_samples"] == 16
