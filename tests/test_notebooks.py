"""The notebooks of examples/notebooks: each runs as it stands, and what it tells is so.

A notebook's source is NAME.py, in the percent form of jupytext; NAME.ipynb is made from it, with
the outputs of a run. `python tests/test_notebooks.py [NAME ...]` (`make notebooks`) does that.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from processes import forked

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
Config = pytest.importorskip("traitlets.config").Config
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|Users|usr|opt|mnt|var|srv|data)/\S*")
CLAIMS = {
    "train_and_evaluate_a_reward_model": [
        "report['rows_left_out']['identical sides']['count'] == 1",
        "sum(run.series('train/loss').values[-20:]) / 20 < 0.6",
        # A tenth of the labels is swapped.
        "max(accuracy['baselines'].values()) + 0.1 < accuracy['value'] <= 0.95",
        "diagnostics['length_controlled_accuracy']['value'] < accuracy['value']",
        # On four runs 0.92 to 0.99, and 0.09 to 0.27 (the notebook's last table).
        "min(right_wins['another number'], right_wins['another number, friendly']) > 0.8",
        "right_wins['right, friendly'] < 0.5",
        "diagnostics['leakage']['num_same_prompt'] == 0",
    ],
    "write_an_environment": [
        "max(abs(a - b) for a, b in zip(verdict.rewards.tolist(), [1, 2 / 3, 0, 0, 0, 0])) < 1e-6",
        "sum(reward.values[-5:]) / 5 > sum(reward.values[:3]) / 3 + 0.2",
        "held_out.values[-1] > held_out.values[0] + 0.15",
    ],
    "watch_reward_hacking": [
        "right_on_short < 0.2",  # the bias shows before any policy has learned it
        "raised and alarms.alarm[0] == 'length_bias'",
        "first_alarm < fallen",
        # Better first, then worse, while the reward only grows.
        "list(smooth.gold)[0] + 0.02 < max(smooth.gold)",
        "list(smooth.gold)[-1] < 0.8 * max(smooth.gold)",
        "list(smooth.reward)[-1] > list(smooth.reward)[0]",
    ],
}
"""What the text of a notebook tells, as expressions that are true at its end."""


def from_source(name: str) -> Any:
    """The notebook without outputs. A cell's id is made of its text, so that it lasts."""
    made = nbformat.v4.new_notebook(metadata=METADATA)
    for cell in jupytext.read(NOTEBOOKS / f"{name}.py", fmt="py:percent").cells:
        new = getattr(nbformat.v4, f"new_{cell.cell_type}_cell")
        text = cell.source.encode()
        made.cells.append(new(cell.source, id=blake2b(text, digest_size=4).hexdigest()))
    return made


def run(name: str, folder: Path) -> tuple[Any, list[str]]:
    """The notebook with the outputs of a run in an empty folder, and the claims that are not so."""
    notebook = from_source(name)
    code = f"import json; print(json.dumps([one for one in {CLAIMS[name]!r} if not eval(one)]))"
    notebook.cells.append(asked := nbformat.v4.new_code_cell(code))
    environment = {
        **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / ".ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    # Sockets that are files: nobody else on the machine can listen. Their names have to be short.
    with tempfile.TemporaryDirectory(prefix="nb", dir="/tmp") as runtime:
        connection = {"transport": "ipc", "connection_file": f"{runtime}/kernel.json"}
        nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"KernelManager": connection}),
        ).execute(env=environment)
    notebook.cells.pop()
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook, json.loads(asked.outputs[0].text)


def check_outputs(notebook: Any) -> None:
    """Refuse what readers should never see: warnings, and where it was run."""
    for output in (one for cell in notebook.cells for one in cell.get("outputs", ())):
        assert output.get("name") != "stderr", output.text
        data = output.get("data", {}).items()
        text = "\n".join([output.get("text", ""), *(t for kind, t in data if "image" not in kind)])
        assert "\x1b" not in text
        assert ABSOLUTE.findall(text) == []


@pytest.mark.parametrize("name", CLAIMS)
def test_the_notebook_is_that_of_its_source_and_was_run(name: str) -> None:
    saved = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    told = [(cell.id, cell.cell_type, cell.source) for cell in saved.cells]
    assert told == [(cell.id, cell.cell_type, cell.source) for cell in from_source(name).cells], (
        f"{name}.ipynb and {name}.py differ; change the .py, then: make notebooks"
    )
    assert all(cell.execution_count for cell in saved.cells if cell.cell_type == "code")
    check_outputs(saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_a_notebook_runs_and_what_it_tells_is_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUREL_WARM_COMMANDS", "ipykernel_launcher")
    with forked():
        notebook, wrong = run(name, tmp_path)
    check_outputs(notebook)
    assert wrong == []


if __name__ == "__main__":
    for one in sys.argv[1:] or CLAIMS:
        with tempfile.TemporaryDirectory() as at:
            refreshed, _ = run(one, Path(at))
        check_outputs(refreshed)
        text = json.dumps(refreshed, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        (NOTEBOOKS / f"{one}.ipynb").write_text(text, encoding="utf-8")
