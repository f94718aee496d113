"""`examples/plugin`, a package of its own, is used by name, and no file of Laurel's knows it."""

from __future__ import annotations

import ast
import importlib
import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.resuming import changes
from laurel.errors import ConfigError
from laurel.rewards.remote.dialects import dialect_of
from laurel.types import Message, group_of
from packages import installed
from policy_batches import gradient, labels, loss_of, outputs
from policy_runs import grpo, grpo_settings, metrics_of

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "plugin"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
POINTS = {group.removeprefix("laurel."): names for group, names in PROJECT["entry-points"].items()}


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory, monkeypatch):
    """As pip leaves an editable install: metadata on the path, and the sources."""
    site = installed(tmp_path_factory.mktemp("site"), PROJECT["name"], {}, POINTS)
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()


def test_a_run_with_an_environment_a_loss_and_a_logger_of_the_package(tmp_path):
    chosen = ("data.env_name=words", "env.words.letter=b", "loss_fn.loss_type=asymmetric")
    logged = ("logger.csv_enabled=true", "logger.csv.file=lines.csv", "grpo.max_num_steps=2")
    loss = ("+loss_fn.asymmetric.worse=0.25", "loss_fn.reference_policy_kl_penalty=0")
    grpo(grpo_settings(tmp_path, None, *chosen, *loss, *logged))
    last = metrics_of(tmp_path)[2]
    assert "env/words/letters" in str(sorted(last)), sorted(last)
    (lines,) = tmp_path.rglob("lines.csv")
    assert any(line.startswith("2,train/reward,") for line in lines.read_text().splitlines())


def test_its_loss_reads_its_own_settings():
    batch = [labels([2.0, -2.0], [[-1.0], [-1.0]])]
    given = outputs([-1.0, -1.0])
    found = [
        gradient(loss_of(loss_type="asymmetric", **settings), given, batch)
        for settings in ({}, {"asymmetric": {"worse": 0.25}})
    ]
    assert found == [[-2.0, 1.0], [-2.0, 0.5]]


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("env.words.leter=b", "did you mean 'letter'"),
        ("env.words.letter=bb", "env.words.letter"),
        ("env.wrds.letter=b", "did you mean 'words'"),
        ("loss_fn.loss_type=asymetric", "did you mean 'asymmetric'"),
        ("logger.cvs_enabled=true", "did you mean 'csv_enabled'"),
        ("logger.csv_enabled=3", "true or false"),
        ("loss_fn={loss_type: asymmetric, ratio_clip_c: 3}", "ratio_clip_c is not read by"),
        ("env.reward_model.url_protocol=plian", "did you mean 'plain'"),
    ],
)
def test_its_settings_are_checked_like_ours(override, what):
    with pytest.raises(ConfigError) as caught:
        load_config(GRPORun, None, [override])
    assert what in str(caught.value)


def test_its_settings_are_described_and_completed():
    shown = ["config", "--for", "grpo", "--describe", "env.words.letter=b"]
    done = CliRunner().invoke(app, shown)
    assert "words:\n" in done.stdout
    assert "# The letter." in done.stdout
    done = CliRunner().invoke(app, ["config", "--for", "grpo", "--json-schema"])
    schema = json.loads(done.stdout)
    assert "words" in schema["$defs"]["EnvironmentsConfig"]["properties"]
    assert "csv_enabled" in schema["$defs"]["RolloutLoggerConfig"]["properties"]
    assert "letter" in schema["$defs"]["EnvironmentsConfig.words"]["properties"]


def test_a_run_does_not_resume_with_other_settings_of_it():
    one, other = (
        load_config(GRPORun, None, [f"env.words.letter={letter}"]).config.model_dump(mode="json")
        for letter in "ab"
    )
    (change,) = changes(GRPORun, one, other)
    assert (change.key, change.before, change.now) == ("env.words.letter", "a", "b")


def test_its_dialect_asks_and_reads():
    group = group_of((Message("user", "hi"),), ("hello",), group_id="g")
    query = dialect_of("plain").ask([group], request_id="r", version="")
    assert query.value == {"text": "hello"}
    ((score,),) = query.read({"score": 0.5}).scores
    assert score.value == 0.5


def test_it_is_small_and_no_file_of_laurel_names_it():
    lines = [text for file in EXAMPLE.rglob("*.py") for text in file.read_text().splitlines()]
    assert len(lines) < 200
    words = {PROJECT["name"], "laurel_words", "asymmetric"}  # plain and csv are words of others too
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if any(word in text for word in words):
            nodes = ast.walk(ast.parse(text))
            assert not words & {node.value for node in nodes if isinstance(node, ast.Constant)}, (
                file
            )
