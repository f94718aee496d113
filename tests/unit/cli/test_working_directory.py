"""Classes beside the user can be named, as a configuration names an environment of one's own."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from laurel.cli.main import main
from laurel.environments.registry import imported
sys.argv = ["laurel", "--version"]
try:
    main()
except SystemExit:
    pass
print(imported("mine_alone.Judge", "env.custom.mine").__name__)
import json
print(json.loads("1"))
"""


@pytest.mark.slow
def test_a_module_in_the_working_directory_is_found_and_hides_none(tmp_path):
    (tmp_path / "mine_alone.py").write_text("class Judge: pass\n")
    (tmp_path / "json.py").write_text("raise ImportError('the wrong json')\n")
    # -P: as the script `laurel` is started, without the working directory.
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["Judge", "1"]
