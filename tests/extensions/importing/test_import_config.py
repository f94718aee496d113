"""`laurel config import`: its lists, its JSON and its file; and `laurel config` as it was."""

import json

import pytest
from typer.testing import CliRunner

from imported_sources import OPENRLHF_RM, TRL_GRPO
from laurel.cli.main import app
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError, DataError


def run(*arguments, stdin=None):
    done = CliRunner().invoke(app, ["config", *arguments], input=stdin, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(TRL_GRPO, encoding="utf-8")
    return path


def test_the_lists_go_to_stderr_and_the_configuration_to_stdout(source):
    done = run("import", str(source), "--devices", "4")
    assert done.stdout.startswith("# From TRL (grpo.yaml)")
    for heading in ("carried (", "not needed (", "not carried (", "differs from Laurel's"):
        assert heading in done.stderr
    assert "read as TRL: its keys model_name_or_path" in done.stderr
    assert "beta=0.04 -> loss_fn.reference_policy_kl_penalty=0.04" in done.stderr
    assert "8 x 4 processes x 4 accumulation" in done.stderr
    assert "hub_token=(not shown)" in done.stderr
    assert "not_to_be_seen" not in done.output


def test_a_file_is_written_whole_and_loads(source, tmp_path):
    output = tmp_path / "ours.yaml"
    done = run("import", str(source), "--from", "trl", "--for", "grpo", "-o", str(output))
    assert done.stdout.splitlines()[-1] == f"wrote {output}; run it: laurel grpo --config {output}"
    assert load_config(GRPORun, output).config.loss_fn.reference_policy_kl_penalty == 0.04
    with pytest.raises(DataError, match="is the file that is read"):
        run("import", str(source), "-o", str(source))
    assert source.read_text(encoding="utf-8") == TRL_GRPO


def test_nothing_is_written_where_a_value_cannot_be_used(source, tmp_path):
    source.write_text(TRL_GRPO + "temperature: -1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="TRL's temperature"):
        run("import", str(source), "-o", str(tmp_path / "ours.yaml"))
    assert not (tmp_path / "ours.yaml").exists()


def test_json_has_the_same_and_stdin_is_read(tmp_path):
    done = run("import", "-", "--json", "--total-steps", "400", stdin=OPENRLHF_RM)
    facts = json.loads(done.stdout)
    assert (facts["from"], facts["for"]) == ("openrlhf", "rm")
    carried = {one["key"]: one for one in facts["carried"]}
    assert carried["train.batch_size"]["to"] == {"policy.train_global_batch_size": 256}
    assert {one["key"] for one in facts["not_carried"]} == {"logger.wandb.key"}
    assert facts["configuration"]["policy.model_name"] == "my-org/sft-8b"
    lists = ("carried", "not_needed", "not_carried")
    keys = [one["key"] for name in lists for one in facts[name]]
    assert len(keys) == len(set(keys))
    assert "not_to_be_seen" not in done.output


def test_without_a_command_the_configuration_is_printed_as_before():
    printed = run("--for", "grpo", "grpo.seed=7").stdout
    assert printed == run("show", "--for", "grpo", "grpo.seed=7").stdout
    assert "\n  seed: 7\n" in printed
    assert run().stdout.startswith("rm:\n")
    assert "import" in run("--help").stdout
