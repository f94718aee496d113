"""A GGUF file wherever a model can be named: it is read, or refused by its own name."""

import json
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from eval_rows import pair_rows, write
from gguf_files import write_tiny
from laurel.cli.main import app
from laurel.config.environments import JudgeFile
from laurel.config.schemas import SCHEMAS
from laurel.errors import ModelError, UserError
from laurel.extensions.gguf.reading import CACHE_VARIABLE
from laurel.models.checkpoint.card import CardFacts
from laurel.models.files import local_files
from policy_runs import TINY_GRPO, TINY_SFT, sums
from runs import LOADED, pairs, save_model, write_rows
from site_commands import all_commands

TOLD = "quantised as Q8_0; they were dequantised to float32"
RM = [*LOADED, "rm.max_num_steps=2", "data.dataset_name=BinaryPreferenceDataset"]
SFT = [*TINY_SFT, "sft.max_num_steps=1"]
MATH = ["data.env_name=math", "policy.max_total_sequence_length=96"]
GRPO = [*TINY_GRPO, *MATH, "grpo.max_num_steps=1", "grpo.val_at_start=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, rows of every kind, and an empty cache."""
    folder = tmp_path_factory.mktemp("gguf")
    write_tiny(folder)
    write_rows(folder / "pairs.jsonl", pairs(24))
    write_rows(folder / "sums.jsonl", sums(12))
    write(folder / "bench.jsonl", pair_rows()[:4])
    save_model(folder / "rm", num_labels=1)
    judge = "{model_name: tiny.Q8_0.gguf, precision: float32, judge: {read_out: log_probability}}"
    (folder / "judge.yaml").write_text(judge)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        yield folder


@pytest.fixture
def called(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def call(*words):
        done = CliRunner().invoke(app, [str(word) for word in words])
        if done.exception is not None and not isinstance(done.exception, SystemExit | UserError):
            raise done.exception
        return done

    return call


FILE = "tiny.Q8_0.gguf"
PAIRS, SUMS, BENCH = "data.train_data_path=pairs.jsonl", "data.train_data_path=sums.jsonl", "-d"
SCORES = ["env.reward_model.enabled=true", "data.env_name=reward_model"]
ON_CPU = ["--device", "cpu"]

READ = {
    "RewardPolicyConfig.model_name": ["rm", *RM, PAIRS, f"policy.model_name={FILE}"],
    "SFTPolicyConfig.model_name": ["sft", *SFT, SUMS, f"policy.model_name={FILE}"],
    "GRPOPolicyConfig.model_name": ["grpo", *GRPO, SUMS, f"policy.model_name={FILE}"],
    "DistillationConfig.model_name": [
        *("grpo", *GRPO, SUMS, f"policy.model_name={FILE}"),
        f"loss_fn.distillation.model_name={FILE}",
    ],
    "JudgeFile.model_name": ["score", "pairs.jsonl", "--judge", "judge.yaml", *ON_CPU],
    "init --model": ["init", "--task", "rm", "--model", FILE, "--data", "pairs.jsonl"],
    "data check --model": ["data", "check", "pairs.jsonl", "--model", FILE],
    "eval policy --model": [
        *(
            "eval",
            "policy",
            "--model",
            FILE,
            "--dataset",
            "ResponseDataset",
            "--environment",
            "math",
        ),
        *("--data-path", "sums.jsonl", "--max-new-tokens", "4", "cluster.device=cpu"),
        "policy.precision=float32",
    ],
    "plan": ["plan", f"policy.model_name={FILE}", "cluster.device=cpu"],
}
"""What reads a language model, and tells once what was made of the file."""

_EVAL = ["--model", FILE, "-d", "bench.jsonl", *ON_CPU]
REFUSED = {
    "score --model": ["score", "pairs.jsonl", "--model", FILE, *ON_CPU],
    "serve --model": ["serve", "--model", FILE, "--port", "0"],
    "eval pairs --member": ["eval", "pairs", "--member", *_EVAL[1:], "--model", "rm"],
    "eval all --model": ["eval", "all", "--model", FILE, *ON_CPU],
    **{
        f"eval {name} --model": ["eval", name, *_EVAL]
        for name in (
            *("reward-bench", "reward-bench-2", "rm-bench", "judge-bench", "pairs"),
            *("best-of-n", "process-bench"),
        )
    },
    **{
        f"RewardModelEnvironmentConfig.{key}": [
            *("grpo", *GRPO, SUMS, "policy.model_name=" + FILE, *SCORES),
            f"env.reward_model.{key}={FILE}",
        ]
        for key in ("model_name", "checkpoint_path")
    },
    **{
        f"EnsemblePart.{key}": [
            *("grpo", *GRPO, SUMS, "policy.model_name=" + FILE, *SCORES),
            "env.reward_model.models=["
            + ", ".join(f"{{name: {n}, normalize: none, {key}: {FILE}}}" for n in "ab")
            + "]",
        ]
        for key in ("model_name", "checkpoint_path")
    },
}
"""What needs a reward model, which no GGUF file is."""

ELSEWHERE = {
    "export --model": "test_an_export_says_what_the_weights_are",
    "JudgeFile.checkpoint_path": "refused: it is for a reward model",
    "TokenizerConfig.name": "test_a_tokenizer_of_a_file",
    "init --reward-model": "written down, and read by laurel grpo",
    "ModelServerConfig.model_name": "given to vLLM, which reads such files in its own way",
}


def _options():
    for path, command, _ in all_commands():
        for option in command.params:
            if option.metavar == "MODEL":
                yield f"{' '.join(path)} {option.opts[0]}"


def _keys(kind, seen):
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        if kind in seen:
            return
        seen.add(kind)
        for name, field in kind.model_fields.items():
            if name in ("model_name", "checkpoint_path", "model") and str in (
                field.annotation,
                *typing.get_args(field.annotation),
            ):
                yield f"{kind.__name__}.{name}"
            yield from _keys(field.annotation, seen)
    for inner in typing.get_args(kind):
        yield from _keys(inner, seen)


def test_the_list_is_complete():
    seen: set[type] = set()
    names = {*_options(), "plan", "TokenizerConfig.name"}
    for section in (*SCHEMAS.values(), JudgeFile):
        names |= {*_keys(section, seen)}
    assert names == READ.keys() | REFUSED.keys() | ELSEWHERE.keys()


@pytest.mark.slow_parameters(*(case for case in READ if "init" not in case and "data" not in case))
@pytest.mark.parametrize("case", READ)
def test_it_is_read_and_told_once(case, called, folder):
    places = []
    if "Config.model_name" in case:
        places = [f"checkpointing.checkpoint_dir=saves/{case}", f"logger.log_dir=logs/{case}"]
    done = called(*READ[case], *places)
    assert done.exit_code == 0, done.output
    assert " ".join(done.output.split()).count(TOLD) == 1, done.output
    if not places:
        return
    saved = folder / "saves" / case
    assert [*saved.glob("step_*")]
    facts = CardFacts.load(next(saved.glob("step_*")))
    assert facts is not None
    assert facts.base_model == f"{FILE} (llama, Q8_0, dequantised to float32)"
    cache = str(folder / "cache").encode()
    for file in [*saved.rglob("*"), *(folder / "logs" / case).rglob("*")]:
        assert not file.is_file() or cache not in file.read_bytes(), f"{file} names the cache"


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_its_own_name(case, called, folder):
    done = called(*REFUSED[case])
    output = " ".join(f"{done.output} {done.exception}".split())
    assert isinstance(done.exception, ModelError), done.output
    assert f"{FILE} is a language model without a reward head" in output
    assert f"laurel rm policy.model_name={FILE}" in output
    assert str(folder) not in str(done.exception)


def test_a_tokenizer_of_a_file(called, folder):
    done = called("plan", "policy.model_name=null", "policy.scratch={}", "cluster.device=cpu")
    assert done.exit_code == 0, done.output
    row = called("data", "check", "pairs.jsonl", f"policy.tokenizer.name={FILE}", "--model", FILE)
    assert row.exit_code == 0, row.output


@pytest.mark.slow
def test_a_run_goes_on_without_its_file(called, folder):
    """A checkpoint holds all weights; only adapters need those that the run began with."""
    asked = ["rm", *RM, PAIRS, "policy.model_name=moved.gguf", "checkpointing.save_period=1"]
    asked += ["checkpointing.checkpoint_dir=saves/moved", "logger.log_dir=logs/moved"]
    file = Path("moved.gguf")
    file.write_bytes(Path(FILE).read_bytes())
    assert called(*asked, "rm.max_num_steps=1").exit_code == 0
    file.unlink()
    done = called(*asked)
    assert done.exit_code == 0, done.output
    assert (folder / "saves" / "moved" / "step_2").is_dir()


@pytest.mark.slow
def test_an_export_says_what_the_weights_are(called, folder):
    done = called("export", "--model", FILE, "--output", "card", *ON_CPU, "--json")
    assert done.exit_code == 0, done.output
    assert " ".join(done.stderr.split()).count(TOLD) == 1
    card = (folder / "card" / "README.md").read_text()
    assert TOLD in card
    assert "cache" not in card
    assert json.loads(done.stdout)["model"] == FILE
    assert local_files(FILE) != FILE
