import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

import tiny_tokenizers
from laurel.cli.main import app
from laurel.config.load import load_config
from laurel.config.reward_model import RATE
from laurel.config.schemas import SCHEMAS
from laurel.errors import ConfigError, UserError
from laurel.extensions.starter.options import InitOptions
from laurel.extensions.starter.starter import TASKS, run_init
from model_directories import save_model
from tiny import tiny_language_model

PAIRS = [
    {"prompt": f"What is {n} + 1?", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(4)
]
SUMS = [{"question": row["prompt"], "answer": row["chosen"]} for row in PAIRS]
PROGRAMS = [
    {"prompt": f"Write f, which returns {n}.", "test_list": [f"assert f() == {n}"]}
    for n in range(3)
]
TWO_FUNCTIONS = [{"prompt": "Write f.", "test_list": ["assert f() == 1", "assert g() == 1"]}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "rm": PAIRS,
    "grpo-math": SUMS,
    "grpo-rm": PAIRS,
    "grpo-code": PROGRAMS,
}
CPU = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny language model with ChatML and 1,024 positions."""
    directory = tmp_path_factory.mktemp("model")
    return str(save_model(directory, tiny_language_model("qwen3")))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory to work in, but for data of each task; the hub is never asked."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for task, rows in ROWS.items():
        write(tmp_path / f"{task}.jsonl", rows)
    return tmp_path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def init(task, model, num_gpus=CPU, **more):
    """As a script would."""
    options = {"task": task, "model": model, "data": f"{task}.jsonl"} | more
    run_init(InitOptions(**options), num_gpus=num_gpus)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_gpus", [0, 4])
def test_each_starter_is_read_by_its_command(task, num_gpus, here, model, capsys):
    init(task, model, num_gpus=num_gpus)
    path = here / f"{task}.yaml"
    config: Any = load_config(SCHEMAS[TASKS[task]["trainer"]], path).config
    assert config.policy.model_name == model
    assert config.policy.precision == ("bfloat16" if num_gpus else "float32")
    assert config.policy.max_total_sequence_length <= 1024  # what the model can number
    assert config.cluster.gpus_per_node == max(1, num_gpus)
    assert config.data.train[0].data_path == f"{task}.jsonl"
    assert config.checkpointing.checkpoint_dir == f"results/{task}"
    text = path.read_text(encoding="utf-8")
    schema = here / text.partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
    checked = Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    assert list(checked.iter_errors(yaml.safe_load(text))) == []
    if task != "rm":
        assert config.default_environment == TASKS[task]["settings"]["data.env_name"]
    said = capsys.readouterr()
    assert f"laurel {TASKS[task]['trainer']} --config {task}.yaml" in said.out
    assert "laurel plan" in said.out
    assert (
        f"laurel data check {task}.jsonl --for {TASKS[task]['trainer']} --model {model}" in said.out
    )
    assert "warning" not in said.err


@pytest.mark.parametrize("task", ["rm", "grpo-math"])
def test_a_starter_from_scratch_runs_as_it_is_without_a_hub(task, here):
    runner = CliRunner()
    made = runner.invoke(
        app,
        ["init", "--task", task, "--scratch", "--data", f"{task}.jsonl"],
        catch_exceptions=False,
    )
    assert made.exit_code == 0
    assert "--model" not in made.stdout  # of `laurel data check`
    more = ["cluster.cpu_threads=1", "logger.tensorboard_enabled=false"]
    more += ["rm.max_num_steps=1"] if task == "rm" else ["grpo.max_num_steps=1"]
    more += [] if task == "rm" else ["policy.generation.max_new_tokens=8"]
    command = "rm" if task == "rm" else "grpo"
    done = runner.invoke(app, [command, "--config", f"{task}.yaml", *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (here / "results" / task / "step_1" / "config.json").is_file()


@pytest.mark.parametrize("task", TASKS)
def test_a_model_from_scratch_has_a_learning_rate_of_its_own(task, here):
    pretrained: Any = load_config(
        SCHEMAS[TASKS[task]["trainer"]], None, ["policy.scratch={}"]
    ).config
    for num_gpus in (0, 2):
        init(task, "scratch", force=True, num_gpus=num_gpus)
        config: Any = load_config(SCHEMAS[TASKS[task]["trainer"]], here / f"{task}.yaml").config
        assert config.policy.model_name is None
        kwargs = config.policy.optimizer.kwargs
        usual = pretrained.policy.optimizer.kwargs["lr"]
        assert kwargs["lr"] >= 50 * (RATE if usual == "auto" else usual)
        assert config.policy.scratch.hidden_size == (512 if num_gpus else 128)
    text = " ".join((here / f"{task}.yaml").read_text(encoding="utf-8").replace("#", "").split())
    assert "The model is new, and policy.scratch describes it." in text
    assert "This learning rate (lr) suits a small, newly initialized model." in text


def config_directory(directory, **sizes):
    """The configuration of a model alone."""
    directory.mkdir(parents=True)
    sizes = {"model_type": "llama", "vocab_size": 512, "num_hidden_layers": 2} | sizes
    (directory / "config.json").write_text(json.dumps(sizes))
    return directory


@pytest.mark.parametrize(("task", "rate"), [("rm", 1e-4), ("grpo-math", 1e-5)])
def test_a_small_pretrained_model_has_a_learning_rate_of_its_own(task, rate, here, model, capsys):
    def written(name):
        init(task, name, force=True)
        path = here / f"{task}.yaml"
        config: Any = load_config(SCHEMAS[TASKS[task]["trainer"]], path).config
        text = " ".join(path.read_text(encoding="utf-8").replace("#", "").split())
        return config.policy, "which no sweep chose" in text

    default: Any = load_config(SCHEMAS[TASKS[task]["trainer"]], None, ["policy.scratch={}"]).config
    default_kwargs = default.policy.optimizer.kwargs
    policy, is_said = written(model)
    assert policy.optimizer.kwargs == {**default_kwargs, "lr": rate}
    assert is_said
    large = config_directory(here / "large", hidden_size=4096, intermediate_size=16384)
    assert written(str(large))[0].optimizer.kwargs == default_kwargs
    assert not written(str(large))[1]
    policy, is_said = written("someone/unknown")
    assert (policy.optimizer.kwargs, is_said) == (default_kwargs, False)
    assert "so it is read from the Hugging Face hub; unchecked\n" in capsys.readouterr().err


def test_the_configuration_of_a_model_on_the_hub_is_read(here, monkeypatch, capsys):
    """As huggingface_hub keeps what it has fetched."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here))
    commit = "0" * 40
    config_directory(
        here / "models--owner--name" / "snapshots" / commit, max_position_embeddings=96
    )
    (here / "models--owner--name" / "refs").mkdir()
    (here / "models--owner--name" / "refs" / "main").write_text(commit)
    init("rm", "owner/name")
    config: Any = load_config(SCHEMAS["rm"], here / "rm.yaml").config
    assert config.policy.max_total_sequence_length == 96
    assert config.policy.optimizer.kwargs["lr"] == 1e-4
    assert "hub; unchecked but for its configuration" in " ".join(capsys.readouterr().err.split())


def test_the_command_for_training_does_not_stop_at_a_malformed_row(here, model, capsys):
    write(here / "own.jsonl", [*PAIRS, {"prompt": "Why?", "chosen": None, "rejected": "?"}])
    init("rm", model, data="own.jsonl")
    said = capsys.readouterr()
    assert "1 row is malformed, and the run stops at own.jsonl:5: fix it, or" in (
        " ".join(said.err.split())
    )
    assert "laurel rm --config rm.yaml data.on_bad_row=skip   # train" in said.out
    init("rm", model, data="own.jsonl", force=True, column_words=["data.on_bad_row=skip"])
    said = capsys.readouterr()
    assert "laurel rm --config rm.yaml   # train" in said.out
    assert "the run leaves out own.jsonl:5" in " ".join(said.err.split())
    config: Any = load_config(SCHEMAS["rm"], here / "rm.yaml").config
    assert config.data.on_bad_row == "skip"


def test_questions_are_asked_once_each_and_again_after_a_wrong_answer(here, model, capsys):
    answers = iter(["rmm", "rm", "./nowhere", model, "nothere.jsonl", "HelpSter3", "rm.jsonl"])
    asked: list[str] = []

    def ask(question, default):
        asked.append(question)
        return next(answers)

    run_init(InitOptions(), ask=ask, num_gpus=CPU)
    assert (here / "rm.yaml").is_file()
    assert len(asked) == 7
    assert len(set(asked)) == 3
    said = capsys.readouterr().err
    for part in (
        "'rmm' is no task. Did you mean rm?",
        "there is no such directory",
        "nothere.jsonl does not exist",
        "Did you mean HelpSteer3?",
    ):
        assert part in " ".join(said.split())


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ([], "--task is missing.*no terminal"),
        (["--task", "rm", "--model", "owner/name"], "--data is missing.*no terminal"),
        (["--task", "rm", "--scratch", "--model", "a/b"], "--model a/b names one; say one of them"),
    ],
)
def test_without_a_terminal_what_is_missing_is_an_error(said, refusal, here):
    done = CliRunner().invoke(app, ["init", *said])
    with pytest.raises(ConfigError, match=refusal):
        raise done.exception or AssertionError
    assert not list(here.glob("*.yaml"))


def test_a_file_is_not_written_over_unless_that_is_forced(here, model):
    path = here / "mine.yaml"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="--force"):
        init("rm", model, output=Path("mine.yaml"))
    assert path.read_text(encoding="utf-8") == "precious"
    init("rm", model, output=Path("mine.yaml"), force=True)
    assert "checkpoint_dir: results/mine" in path.read_text(encoding="utf-8")


def test_a_schema_of_another_content_is_not_written_over_unless_that_is_forced(here, model):
    schema = here / "laurel-rm.schema.json"
    init("rm", model)
    init("rm", model, output=Path("another.yaml"))  # the same schema is no reason to stop
    written = schema.read_text(encoding="utf-8")
    schema.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"laurel-rm\.schema\.json exists already.*--force"):
        init("rm", model, output=Path("third.yaml"))
    assert schema.read_text(encoding="utf-8") == "precious"
    assert not (here / "third.yaml").exists()
    init("rm", model, output=Path("third.yaml"), force=True)
    assert schema.read_text(encoding="utf-8") == written


@pytest.mark.parametrize(
    ("task", "rows", "why"),
    [
        ("grpo-code", SUMS, "own.jsonl:1: no tests"),
        ("grpo-code", TWO_FUNCTIONS, "own.jsonl:1: test_list needs the name of a function"),
        ("grpo-math", [{"prompt": "Write a line."}], "does not fit"),
        ("rm", SUMS, "columns of no known class"),
    ],
)
def test_data_that_does_not_fit_is_said(task, rows, why, here, model, capsys):
    write(here / "own.jsonl", rows)
    init(task, model, data="own.jsonl")
    said = " ".join(capsys.readouterr().err.split())
    assert "warning the data does not fit" in said
    assert why in said


def test_preferences_are_not_answers_to_check_by(here, model, capsys):
    init("grpo-math", model, data="rm.jsonl")
    said = " ".join(capsys.readouterr().err.split())
    assert "rm.jsonl holds preferences: completions are graded against the answers that" in said
    assert "laurel init --task grpo-rm" in said


def test_columns_of_other_names_are_mapped_in_the_file(here, model):
    rows = [{"question": r["prompt"], "better": r["chosen"], "worse": r["rejected"]} for r in PAIRS]
    write(here / "own.jsonl", rows)
    init("rm", model, data="own.jsonl")
    config: Any = load_config(SCHEMAS["rm"], here / "rm.yaml").config
    (rows,) = config.data.train
    keys = rows.prompt_key, rows.chosen_key, rows.rejected_key
    assert keys == ("question", "better", "worse")


def test_columns_that_tell_nothing_are_asked_for_in_the_file_or_named_as_words(here, model):
    names = {"prompt": "Frage", "chosen": "gute Antwort", "rejected": "schlechte"}
    write(here / "own.jsonl", [{names[key]: row[key] for key in names} for row in PAIRS])
    runner = CliRunner()
    command = ["init", "--task", "rm", "--model", model, "--data", "own.jsonl"]
    done = runner.invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 2
    assert done.stdout == ""  # there is no command to go on with
    assert "laurel init --force ... data.prompt_key=COLUMN" in " ".join(done.stderr.split())
    comments = (here / "rm.yaml").read_text(encoding="utf-8").replace("#", "")
    assert "The rows have Frage, gute Antwort, schlechte." in " ".join(comments.split())
    words = [f"data.{key}_key={column}" for key, column in names.items()]
    done = runner.invoke(app, [*command, "--force", *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert "'data.chosen_key=gute Antwort'" in done.stdout
    config: Any = load_config(SCHEMAS["rm"], here / "rm.yaml").config
    (rows,) = config.data.train
    keys = rows.prompt_key, rows.chosen_key, rows.rejected_key
    assert keys == tuple(names.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "./nowhere"}, "there is no such directory"),
        ({"data": "nothere.jsonl"}, "does not exist"),
        ({"data": "HelpSter3"}, "Did you mean HelpSteer3"),
        ({"reward_model": "results/rm"}, "--reward-model is for --task grpo-rm"),
        ({"column_words": ["data.prompt_kye=a"]}, "only the columns"),
        ({"column_words": ["data.promt_key=a"]}, "did you mean 'prompt_key'"),
        ({"output": Path("no/such/x.yaml")}, "does not exist"),
    ],
)
def test_what_is_said_wrong_is_an_error_and_nothing_is_written(changes, says, here, model):
    with pytest.raises(UserError, match=says):
        init("rm", **({"model": model} | changes))
    assert not list(here.glob("**/*.yaml"))


def test_what_a_tokenizer_lacks_is_settled_in_the_file(here, capsys):
    bare = tiny_tokenizers.make_tokenizer(pad="</s>", more=("<pad>",), template=None)
    directory = here / "bare"
    save_model(directory, tiny_language_model("qwen3"), bare)
    init("rm", "bare")
    config: Any = load_config(SCHEMAS["rm"], here / "rm.yaml").config
    assert config.policy.tokenizer.chat_template == "chatml"
    given = "policy.tokenizer.chat_template=chatml"
    assert f"--model bare {given}   # show the first row, in tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["reasoning_gym", "verifiers", "openenv", "openreward"])
def test_sets_that_packages_make_are_graded_by_their_own_environment(name, here, model):
    init("grpo-math", model, data=name)
    config: Any = load_config(SCHEMAS["grpo"], here / "grpo-math.yaml").config
    assert (config.data.train[0].dataset_name, config.data.env_name) == (name, name)
    assert bool(config.data.train[0].tasks) == (name == "reasoning_gym")
    assert name in config.env.names()


def test_data_sets_of_the_table_are_named_and_not_looked_at(here, model):
    init("grpo-code", model, data="HumanEval")
    config: Any = load_config(SCHEMAS["grpo"], here / "grpo-code.yaml").config
    (rows,) = config.data.train
    assert (rows.dataset_name, rows.data_path) == ("HumanEval", None)


@pytest.mark.parametrize(("rows", "share"), [(60, 0.2), (200, 0.1), (500, 0.05)])
def test_of_few_rows_more_are_held_out(rows, share, here, model, capsys):
    pairs = [{**PAIRS[0], "prompt": f"{number}?"} for number in range(rows)]
    write(here / "own.jsonl", pairs)
    init("rm", model, data="own.jsonl")
    config: Any = load_config(SCHEMAS["rm"], here / "rm.yaml").config
    assert config.data.train[0].split_validation_size == share
    few = f"only about {rows * share:.0f} rows are held out for validation"
    assert (few in capsys.readouterr().err) == (rows * share < 20)
