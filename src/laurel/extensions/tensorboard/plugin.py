"""Logs to TensorBoard: the logger as a plug-in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laurel.plugins import Logger, LoggerServices


class TensorboardLogger:
    """Writes event files for TensorBoard; events after `resumed_step` are hidden."""

    def __init__(self, events_dir: Path, *, resumed_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard would show the steps that a resumed run repeats twice.
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(events_dir), purge_step=purge_step, flush_secs=10)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Write the table as Markdown text."""
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[str(v).replace("|", "\\|").replace("\n", "<br>") for v in line] for line in lines]
        text = "\n".join("| " + " | ".join(line) + " |" for line in cells)
        self._writer.add_text(name, text, step)

    def log_config(self, config: Mapping[str, object]) -> None:
        """Write the configuration as preformatted text."""
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()))

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class Tensorboard(Logger):
    """TensorBoard events."""

    package = "tensorboard"

    def make(self, section: None, run: LoggerServices) -> TensorboardLogger:
        """Open the event files."""
        return TensorboardLogger(run.run_dir / "tensorboard", resumed_step=run.resumed_step)
