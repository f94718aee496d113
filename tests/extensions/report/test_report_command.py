"""`laurel report`: runs in, one page out, its path on the last line."""

import json

from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.errors import DataError


def test_report(tmp_path):
    run = tmp_path / "exp_001"
    run.mkdir()
    row = {"step": 1, "time": 1.0, "train/loss": 0.25, "timing/train/total_step_time": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(run), "-o", str(page), "--title", "My runs"])
    assert done.exit_code == 0
    assert done.stdout == f"{page}\n"
    assert "<h1>My runs</h1>" in page.read_text(encoding="utf-8")
    said = json.loads(
        CliRunner().invoke(app, ["report", str(run), "-o", str(page), "--json"]).stdout
    )
    assert said["page"] == str(page)
    assert said["runs"][0]["directory"] == str(run)
    assert all({"weight", "text"} == set(one) for one in said["runs"][0]["findings"])
    refused = CliRunner().invoke(app, ["report", str(run), "--follow", "--json"])
    assert refused.exit_code == 2


def test_report_of_nothing(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert isinstance(done.exception, DataError)
    assert done.exit_code == 1
