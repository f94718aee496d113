"""What a Tab offers: asked as the shells ask it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.config.schemas import SCHEMAS

ROOT = Path(__file__).parents[3]


def offered(*words):
    """By bash, which has cut the line into words; the last one is being written."""
    asked = {
        "_LAUREL_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["laurel", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = CliRunner().invoke(app, [], env=asked, prog_name="laurel")
    return done.stdout.split("\n")[:-1]


def test_commands_and_choices():
    assert offered("sc") == ["score"]
    assert {"reward-bench", "rm-bench", "pairs"} <= {*offered("eval", "")}
    assert offered("config", "--for", "g") == ["grpo"]
    assert offered("score", "--device", "") == ["auto", "cpu", "cuda"]
    assert offered("sandbox", "check", "--without", "land") == ["landlock"]


def test_names_of_data_sets_and_environments():
    assert offered("eval", "policy", "--dataset", "Hum") == ["HumanEval"]
    assert "BinaryPreferenceDataset" in offered("eval", "pairs", "--dataset", "")
    assert offered("eval", "policy", "-e", "co") == ["code"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("rm", "policy.prec"), ["policy.precision=float32", "policy.precision=bfloat16"]),
        (("rm", "policy.precision", "=", "b"), ["bfloat16"]),  # as bash cuts it
        (("rm", "policy.precision", "="), ["float32", "bfloat16"]),
        (("rm", "policy.precision=b"), ["policy.precision=bfloat16"]),  # as zsh and fish do
        (("sft", "~policy.prec"), ["~policy.precision"]),
        (("rm", "policy.nothing"), [""]),
        (("rm", "nothing.nothing."), [""]),
        (("rm", "policy.precision.deeper"), [""]),
    ],
)
def test_keys_of_the_configuration(words, expected):
    assert offered(*words) == expected


def test_the_schema_is_that_of_the_command_the_option_or_the_file():
    assert offered("rm", "grpo.") == [""]
    steps = SCHEMAS["grpo"].model_validate({}).grpo.max_num_steps  # type: ignore[attr-defined]
    beside_a_free_key_stands_its_default = [f"grpo.max_num_steps={end}" for end in ("", steps)]
    assert offered("grpo", "grpo.max_num_st") == beside_a_free_key_stands_its_default
    assert offered("config", "--for", "grpo", "gr")[0].startswith("grpo.")
    file = str(ROOT / "examples" / "configs" / "grpo_math_1B.yaml")
    assert offered("plan", "--config", file, "gr")[0].startswith("grpo.")
    assert offered("plan", "--config", "not-there.yaml", "rm.s")[0].startswith("rm.s")


def test_a_tab_imports_nothing_heavy():
    program = (
        "import sys\n"
        "from laurel.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'transformers', 'datasets', 'pandas', 'ray', 'omegaconf')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    asked = {"_LAUREL_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "laurel grpo grpo.max_num"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['laurel']\n" + program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
    assert "grpo.max_num_steps=" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_the_script_of_each_shell(shell, tmp_path):
    detection = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    program = "import sys; sys.argv[0] = 'laurel'; from laurel.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--show-completion", shell],
        env={**os.environ, **detection},
        capture_output=True,
        text=True,
    )
    assert f"_LAUREL_COMPLETE=complete_{shell}" in done.stdout, done.stderr
