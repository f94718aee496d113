"""Directories as runs leave them, for tests of reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laurel.observe.run_record import RunRecord

EVIL = '</script><script>document.title="hacked"</script>\x1b[31m\u202egnp\u200b&amp;'
"""A completion that would like to be a program, to hide, and to stand the other way round."""


def record(
    curves: Mapping[str, Sequence[float]], *, kind: str = "grpo", **others: Any
) -> RunRecord:
    """A run of these figures, at steps from 1."""
    num_steps = max((len(values) for values in curves.values()), default=0)
    metrics = [
        {"step": float(i + 1), **{name: v[i] for name, v in curves.items() if i < len(v)}}
        for i in range(num_steps)
    ]
    return RunRecord(path=Path("exp_001"), kind=kind, metrics=metrics, **others)


def pair(index: int, **changes: object) -> dict[str, object]:
    """A row of a table of pairs: the chosen answer is ahead by its number less five."""
    return {
        "prompt": f"question {index}",
        "better": f"good answer {index}",
        "worse": f"bad answer {index}",
        "better_score": index - 5.0,
        "worse_score": 0.0,
        **changes,
    }


def write_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def reward_model_run(path: Path, *, num_steps: int = 100, num_pairs: int = 60) -> Path:
    """A run of a reward model with a table of pairs, one of them hostile."""
    write_lines(
        path / "metrics.jsonl",
        [
            {
                "step": step,
                "time": 100.0 + step,
                "train/loss": 0.7 - 0.004 * step + 0.1 * (step % 3),
                "train/accuracy": 0.5 + 0.003 * step,
                "train/grad_norm": 1.0 + (50 * (step == 40)),
                "timing/train/total_step_time": 1.0,
            }
            for step in range(1, num_steps + 1)
        ],
    )
    rows = [pair(index) for index in range(num_pairs)]
    rows[7]["better"] = EVIL
    write_lines(
        path / "samples.jsonl",
        [
            {
                "step": step,
                "time": 1.0,
                "table": "validation-default/pairs",
                "row": {**row, "better_score": float(str(row["better_score"])) + step / 100},
            }
            for step in (50, 100)
            for row in rows
        ],
    )
    (path / "config.json").write_text(
        json.dumps({"rm": {"max_num_steps": num_steps, "seed": 7}}), encoding="utf-8"
    )
    (path / "config.yaml").write_text("rm:\n  seed: 7\n", encoding="utf-8")
    return path
