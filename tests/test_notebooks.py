"""The notebooks of examples/notebooks: each runs as it stands, and what it tells is so.

A notebook's source is NAME.py, in the percent form of jupytext; NAME.ipynb is made from it, with
the outputs of a run. `python tests/test_notebooks.py [NAME ...]` (`make notebooks`) does that;
`python tests/test_notebooks.py --seed 1 [NAME ...]` prints what another seed gives of what the
texts claim, and writes nothing.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
Config = pytest.importorskip("traitlets.config").Config
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SECONDS = 600
"""Of a cell, on a machine that does much else; alone the slowest takes twenty."""
MAX_BYTES = 300_000
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|Users|usr|opt|mnt|var|srv|data)/\S*")


def from_source(name: str) -> Any:
    """The notebook without outputs. A cell's id is made of its text, so that it lasts."""
    notebook = jupytext.read(NOTEBOOKS / f"{name}.py", fmt="py:percent")
    made = nbformat.v4.new_notebook(metadata=METADATA)
    seen: set[str] = set()
    for cell in notebook.cells:
        new = (
            nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        )
        id = blake2b(cell.source.encode(), digest_size=4).hexdigest()
        assert id not in seen, f"{name}: two cells say: {cell.source}"
        seen.add(id)
        made.cells.append(new(cell.source, id=id))
    return made


def run(
    name: str, folder: Path, values: Mapping[str, str] | None = None, *, seed: int = 0
) -> tuple[Any, Any]:
    """The notebook with the outputs of a run in an empty folder, and what expressions were then."""
    notebook = from_source(name)
    first = next(cell for cell in notebook.cells if "SEED = 0" in cell.source)
    first.source = first.source.replace("SEED = 0", f"SEED = {seed}")
    fields = ", ".join(f"{key!r}: {expression}" for key, expression in (values or {}).items())
    asked = nbformat.v4.new_code_cell(f"import json; print(json.dumps({{{fields}}}))")
    notebook.cells.append(asked)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "COLUMNS"},
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(folder / ".ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    # Sockets that are files: nobody else on the machine can listen. Their names have to be short.
    runtime = tempfile.TemporaryDirectory(prefix="nb", dir="/tmp")
    connection = {"transport": "ipc", "connection_file": f"{runtime.name}/kernel.json"}
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        config=Config({"KernelManager": connection}),
    )
    with runtime:
        client.execute(env=environment)
    notebook.cells.pop()
    first.source = first.source.replace(f"SEED = {seed}", "SEED = 0")
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook, json.loads(asked.outputs[0].text)


def text_of(notebook: Any) -> str:
    """All that was put out, pictures aside."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            found.append(output.get("text", ""))
            found += [text for kind, text in output.get("data", {}).items() if "image" not in kind]
    return "\n".join(found)


def check_outputs(notebook: Any) -> None:
    """What readers should never see: warnings, and where it was run."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    stderr = [one.text for one in outputs if one.output_type == "stream" and one.name == "stderr"]
    assert not stderr, f"written to standard error: {stderr}"
    assert "\x1b" not in text_of(notebook)
    found = ABSOLUTE.findall(text_of(notebook))
    assert not found, f"places of a machine in the outputs: {found}"


# ----------------------------------------------------------------------------- what is in the files


def test_there_are_three() -> None:
    assert NAMES == [
        "train_and_evaluate_a_reward_model",
        "watch_reward_hacking",
        "write_an_environment",
    ]
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_that_of_its_source_and_was_run(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    saved, made = nbformat.read(path, as_version=4), from_source(name)
    nbformat.validate(saved)
    told = [(cell.id, cell.cell_type, cell.source) for cell in saved.cells]
    assert told == [(cell.id, cell.cell_type, cell.source) for cell in made.cells], (
        f"{name}.ipynb and {name}.py differ; change the .py, then: make notebooks"
    )
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert saved.metadata == METADATA
    check_outputs(saved)
    kinds = {kind for cell in code for one in cell.outputs for kind in one.get("data", {})}
    assert {"image/png", "text/html"} <= kinds
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_short(name: str) -> None:
    for cell in from_source(name).cells:
        assert len(cell.source.splitlines()) <= 45, cell.source
        if cell.cell_type == "code":
            assert max(map(len, cell.source.splitlines())) <= 100, cell.source


# --------------------------------------------------------------------------------- what they claim


FIGURES: dict[str, dict[str, str]] = {
    "train_and_evaluate_a_reward_model": {
        "report": "report",
        "loss": "list(run.series('train/loss').values)",
        "accuracy": "accuracy['value']",
        "baselines": "accuracy['baselines']",
        "either": "diagnostics['length_controlled_accuracy']['value']",
        "subsets": "{one.name: one.value for one in evaluation.measured.subsets}",
        "scores": "[score.value for score in scores]",
        "again": "[score.value for score in api.score(exported, "
        "[{'prompt': prompt, 'completions': answers}])[0]]",
        "calibration": "calibration",
        "leaks": "diagnostics['leakage']['num_same_prompt']",
    },
    "write_an_environment": {
        "by_hand": "verdict.rewards.tolist()",
        "reward": "list(reward.values)",
        "held_out": "list(held_out.values)",
        "exact": "list(exact.values)",
    },
    "watch_reward_hacking": {
        "right_on_short": "right_on_short",
        "first_alarm": "first_alarm",
        "alarm": "alarms.alarm[0] if raised else None",
        "fallen": "fallen",
        "gold": "list(smooth.gold)",
        "reward": "list(smooth.reward)",
        "divergence": "list(smooth.divergence)",
        "length": "list(smooth.length)",
    },
}
"""What the text of a notebook speaks of, as expressions at its end."""


def figures(name: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    notebook, said = run(name, folder, FIGURES[name], seed=seed)
    check_outputs(notebook)
    return said


@pytest.mark.slow
def test_train_and_evaluate_a_reward_model(tmp_path: Path) -> None:
    said = figures("train_and_evaluate_a_reward_model", tmp_path)
    left_out = said["report"]["rows_left_out"]
    assert left_out["identical sides"]["count"] == 1
    assert left_out["duplicate"]["count"] >= 2
    assert sum(said["loss"][-20:]) / 20 < 0.6 < 0.65 < sum(said["loss"][:5]) / 5
    assert set(said["baselines"]) == {"longer wins", "bag of words"}
    assert said["accuracy"] > max(said["baselines"].values()) + 0.1
    assert said["accuracy"] <= 0.95  # a tenth of the labels is swapped
    assert said["either"] < said["accuracy"]  # with seeds 0 and 2
    places = {Path(name).name for name in said["subsets"]}
    assert {"one-digit-off.jsonl", "another-number.jsonl"} <= places
    assert said["scores"][0] > max(said["scores"][2:])  # the right number beats another one
    assert said["again"] == pytest.approx(said["scores"], abs=1e-4)
    assert len(said["calibration"]["rows"]) >= 5
    assert said["leaks"] == 0
    assert said["scores"][3] > said["scores"][2]  # a friendly word lifts a wrong answer


@pytest.mark.slow
def test_write_an_environment(tmp_path: Path) -> None:
    said = figures("write_an_environment", tmp_path)
    assert said["by_hand"] == pytest.approx([1, 2 / 3, 0, 0, 0, 0])
    assert sum(said["reward"][-5:]) / 5 > sum(said["reward"][:3]) / 3 + 0.2
    assert said["held_out"][-1] > said["held_out"][0] + 0.15
    assert said["exact"][-1] > said["exact"][0] + 0.1


@pytest.mark.slow
def test_watch_reward_hacking(tmp_path: Path) -> None:
    said = figures("watch_reward_hacking", tmp_path)
    gold, reward = said["gold"], said["reward"]
    assert said["right_on_short"] < 0.2  # the bias shows before any policy has learned it
    assert said["alarm"] == "overoptimisation"
    assert said["first_alarm"] < said["fallen"]
    assert gold[0] + 0.02 < max(gold)  # better first ...
    assert gold[-1] < 0.8 * max(gold)  # ... then worse,
    assert reward[-1] > reward[gold.index(max(gold))] > reward[0]  # while the reward only grows
    assert said["divergence"][-1] > 10 * said["divergence"][0]
    assert said["length"][-1] > 1.2 * said["length"][0]


# ---------------------------------------------------------------------------- making them anew


def refresh(names: list[str]) -> None:
    """Run the notebooks and write them with what came out."""
    for name in names or NAMES:
        if name not in NAMES:
            sys.exit(f"there is no notebook called {name}; there are {', '.join(NAMES)}")
        with tempfile.TemporaryDirectory() as folder:
            notebook, _ = run(name, Path(folder))
        check_outputs(notebook)
        nbformat.validate(notebook)
        target = NOTEBOOKS / f"{name}.ipynb"
        text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        target.write_text(text, encoding="utf-8")
        print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")


def tell(names: list[str], seed: int) -> None:
    """Print what the notebooks' texts speak of, with another seed."""
    for name in names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            said = figures(name, Path(folder), seed)
        print(json.dumps({"notebook": name, "seed": seed, **said}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seed"]:
        tell(sys.argv[3:], int(sys.argv[2]))
    else:
        refresh(sys.argv[1:])
