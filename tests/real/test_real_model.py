"""What only a real chat model shows: `make test-real` brings it (tools/real_model.py).

Elsewhere these tests are skipped, unless `LAUREL_REAL_MODEL` names its directory or the cache
has it.
"""

import json

import pytest
import torch
from typer.testing import CliRunner

import real_model
from laurel.cli.main import app
from laurel.extensions.export.plain import plain_scores
from laurel.types import Message
from policy_runs import CPU, MATCHES, grpo, metrics_of
from runs import train, write_rows
from serve_processes import Serving

pytestmark = pytest.mark.slow

SYSTEM = "You are a helpful AI assistant named SmolLM"
QUESTION = "What is the capital of France?"
ANSWERS = ("The capital of France is Paris.", "Lyon, I think.", "No.", "Paris. " * 12)


@pytest.fixture(scope="module")
def model():
    found = real_model.find(real_model.default_cache())
    if found is None:
        pytest.skip("the real model is not here: make test-real fetches it")
    return found


def test_it_answers_as_a_chat_model_and_as_the_learner_computes(model, tmp_path):
    """A step of GRPO whose validation is greedy."""
    tasks = write_rows(tmp_path / "tasks.jsonl", [{"input": QUESTION, "output": "Paris"}])
    run = [
        *CPU,
        *MATCHES,
        *("policy.max_total_sequence_length=64", "policy.train_global_batch_size=4"),
        *("policy.generation.backend=transformers", "policy.generation.max_new_tokens=12"),
        *("policy.generation.val_temperature=0", "grpo.num_prompts_per_step=1"),
        *("grpo.num_generations_per_prompt=4", "grpo.max_num_steps=1", "grpo.val_at_start=true"),
        *("data.dataset_name=ResponseDataset", f"data.train_data_path={tasks}"),
        *(f"data.val_data_path={tasks}", f"policy.model_name={model}"),
        *("checkpointing.enabled=false", f"logger.log_dir={tmp_path}/logs"),
    ]
    done = grpo(run)
    figures = metrics_of(tmp_path)
    assert figures[0]["validation/accuracy"] == 1, done.text
    step = figures[1]
    assert step["train/token_mult_prob_error"] == pytest.approx(1, abs=1e-4)
    assert step["train/gen_kl_error"] == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A reward model of one step, and what its run printed."""
    folder = tmp_path_factory.mktemp("real")
    capitals = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Japan": "Tokyo"}
    rows = [
        {"prompt": f"The capital of {country}?", "chosen": city, "rejected": "Nobody knows."}
        for country, city in capitals.items()
    ]
    done = train(
        [
            *CPU,
            *("policy.max_total_sequence_length=96", "policy.train_global_batch_size=2"),
            # Its optimizer has no state, which would be a gigabyte on the disk.
            "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 1e-3}}",
            *("rm.max_num_steps=1", "rm.val_period=0", "data.split_validation_size=0.5"),
            "data.dataset_name=BinaryPreferenceDataset",
            f"data.train_data_path={write_rows(folder / 'pairs.jsonl', rows)}",
            f"policy.model_name={model}",
            f"checkpointing.checkpoint_dir={folder}/saves",
            f"logger.log_dir={folder}/logs",
        ]
    )
    return folder, done.text


def test_scores_are_the_same_wherever_they_are_asked_for(trained, tmp_path):
    folder, _ = trained
    checkpoint = folder / "saves" / "step_1"
    row = {"prompt": QUESTION, "completions": ANSWERS}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    written, exported = tmp_path / "scores.jsonl", tmp_path / "exported"

    def called(*words):
        done = CliRunner().invoke(app, [*map(str, words), "--device", "cpu"])
        assert done.exit_code == 0, done.output

    called("score", rows, "--model", checkpoint, "-o", written)
    by_command = json.loads(written.read_text())["scores"]
    assert len(set(by_command)) == len(ANSWERS)
    called("export", "--model", checkpoint, "--output", exported)
    asked = [(Message("user", QUESTION), Message("assistant", answer)) for answer in ANSWERS]
    plain = plain_scores(exported, asked, device=torch.device("cpu"))[:, 0]
    assert plain.tolist() == pytest.approx(by_command, abs=1e-5)
    with Serving(tmp_path, "--model", str(checkpoint), "--device", "cpu").ready() as server:
        status, answer = server.score(*ANSWERS, prompt=QUESTION)
    assert status == 200
    served = [one["value"] for one in answer["groups"][0]["scores"]]
    assert served == pytest.approx(by_command, abs=1e-5)


def test_its_padding_and_its_template_are_settled(trained):
    """It pads with its end token, and its template puts a system message first."""
    folder, text = trained
    said = " ".join(text.split())
    assert "the tokenizer pads with '<|im_end|>', which ends texts: '<|endoftext|>' is" in said
    checkpoint = folder / "saves" / "step_1"
    said = json.loads((checkpoint / "config.json").read_text())
    assert (said["pad_token_id"], said["eos_token_id"]) == (0, 2)
    assert SYSTEM in (checkpoint / "chat_template.jinja").read_text()
    golden = json.loads((checkpoint / "scoring.json").read_text())
    assert golden["golden"], "scored again at every load"
