"""What GRPO cannot use gets one clear message and exit status 2, and leaves nothing behind."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

import runs
from policy_runs import grpo_settings, sft_settings
from runs import write_rows


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Models that fit and models that do not."""
    root = tmp_path_factory.mktemp("places")
    trained = runs.train(
        runs.settings(root / "run", "rm.max_num_steps=1", "rm.val_period=0", "rm.val_at_end=false")
    )
    checkpoint = trained.outcome.latest
    assert checkpoint is not None
    other = root / "other"
    shutil.copytree(checkpoint, other, ignore=shutil.ignore_patterns("MANIFEST.json", "training"))
    weights = load_file(other / "model.safetensors")
    save_file(
        {name: 1.5 * w for name, w in weights.items()},
        other / "model.safetensors",
        metadata={"format": "pt"},
    )
    policy = runs.save_model(root / "policy")
    rows = {
        "no_answer": [{"input": f"q{i}?"} for i in range(8)],
        "long": [{"input": f"{i} which? " * 50, "output": "1"} for i in range(8)],
    }
    written = {name: write_rows(root / f"{name}.jsonl", each) for name, each in rows.items()}
    return {
        "policy": policy,
        "other": other,
        **written,
    }


def refused(directory, laurel, command, overrides):
    """The message of a run that must be refused; checks all that every refusal has."""
    before = sorted(directory.rglob("*"))
    done = laurel([command, *overrides])
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    assert sorted(directory.rglob("*")) == before, "it left something behind"
    return done.stderr


REWARD_MODEL = "env.reward_model.enabled=true"

CASES: dict[str, tuple[list[str], str]] = {
    "part of a composite": (
        ["data.env_name=both", "+env.composite.both.parts=[{env: reward_modle}]"],
        r"'reward_modle', as 'both' names one; did you mean 'reward_model'\?",
    ),
    "no answers": (
        ["data.train_data_path={no_answer}"],
        r"no_answer\.jsonl:1: the row has no answer in 'output'.*data\.output_key",
    ),
    "prompts too long": (
        ["data.train_data_path={long}"],
        r"all 6 prompts are longer than 63 tokens \(the shortest has \d+\); raise policy\.max",
    ),
    "prompts longer than the limit": (
        ["data.max_input_seq_length=3"],
        r"longer than 3 tokens .*raise data\.max_input_seq_length",
    ),
    "reward model scores otherwise": (
        [REWARD_MODEL, "env.reward_model.model_name={other}"],
        r"other does not score as it did when it was saved: .*scored",
    ),
    "unknown key": (["grpo.num_prompt_per_step=3"], r"did you mean 'num_prompts_per_step'\?"),
    "stop token": (
        ["policy.generation.stop_token_ids=[7,99999]"],
        r"stop_token_ids: 99999 not in the model's",
    ),
    "no packing": (
        ["policy.sequence_packing.enabled=false"],
        r"policy\.sequence_packing\.enabled=false: the",
    ),
}


@pytest.mark.slow_parameters(
    "prompts longer than the limit",
    "reward model scores otherwise",
    "stop token",
    "no packing",
    "part of a composite",
    "prompts too long",
    "no answers",
)
@pytest.mark.parametrize("case", CASES)
def test_grpo_refuses(tmp_path, laurel, places, case):
    changes, message = CASES[case]
    overrides = grpo_settings(tmp_path, places["policy"])
    filled = [re.sub(r"{(\w+)}", lambda m: str(places.get(m[1], m[0])), c) for c in changes]
    assert re.search(message, refused(tmp_path, laurel, "grpo", [*overrides, *filled]), re.DOTALL)


SFT_CASES: dict[str, tuple[list[str], str]] = {
    "no answer": (["data.train_data_path={no_answer}"], r"no_answer\.jsonl:1: .*output"),
    "too long": (
        ["data.train_data_path={long}"],
        r"train: no conversation has an answer within 64 tokens",
    ),
}


@pytest.mark.parametrize("case", SFT_CASES)
def test_fine_tuning_refuses(tmp_path, laurel, places, case):
    changes, message = SFT_CASES[case]
    overrides = sft_settings(tmp_path, model=places["policy"])
    filled = [re.sub(r"{(\w+)}", lambda m: str(places.get(m[1], m[0])), c) for c in changes]
    assert re.search(message, refused(tmp_path, laurel, "sft", [*overrides, *filled]), re.DOTALL)


def test_what_fails_in_the_middle_exits_with_1_and_one_message(tmp_path, laurel, places):
    """An environment that cannot judge anything is no mistake in the configuration."""
    custom = "+env.custom.mine={name: policy_fakes.Matches, kwargs: {poison: ''}}"
    done = laurel(
        ["grpo", *grpo_settings(tmp_path, places["policy"], "data.env_name=mine", custom)]
    )
    assert done.returncode == 1
    assert re.match(
        r"error: the environment 'mine' could not judge 12 of 12 samples, more than "
        r"env\.max_failed_share=0\.5 allows\. The first reason: '' is poison",
        done.stderr,
    )
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("saves/step_*"))
    assert json.loads((tmp_path / "logs/exp_001/data_report.json").read_text("utf-8"))
