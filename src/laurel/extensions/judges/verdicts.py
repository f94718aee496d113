"""What teaches a judge, in the words of its own prompt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.errors import DataError, counted
from laurel.extensions.judges.served import JudgePrompt, taught_verdicts, verdict_rows
from laurel.observe.console import message_console, say_on
from laurel.observe.files import check_output, replace_file
from laurel.observe.json_output import json_text, write_json
from laurel.run.specs import read_judge

if TYPE_CHECKING:
    from laurel.evaluation.benchmarks import BenchmarkOptions


def write_verdicts(
    rows: BenchmarkOptions, *, judge_file: Path, output: Path, as_json: bool
) -> None:
    """Write the verdicts on preferences as conversations for `laurel sft`."""
    say = say_on(message_console())
    judge = read_judge(judge_file, say=say).judge
    for file in rows.data:
        check_output(output, read_from=file)
    from laurel.evaluation.benchmarks import preference_rows

    prompt = JudgePrompt(judge, where="judge")
    taught_verdicts(judge)
    preferences = preference_rows(rows, say)
    verdicts: Counter[str] = Counter()
    with replace_file(output) as stream:
        for row in preferences:
            try:
                for line in verdict_rows(prompt, judge, row.group, row.ranks_G):
                    stream.write(json_text(line, indent=None) + "\n")
                    verdicts[line["messages"][-1]["content"]] += 1
            except DataError as error:
                raise DataError(f"{row.source}: {error}") from error
    each = ", ".join(f"{count:,} {word}" for word, count in verdicts.items())
    total = counted(verdicts.total(), "verdict")
    say(f"wrote {total} ({each}) on {counted(len(preferences), 'row')} to {output}")
    if as_json:
        facts = {"num_rows": len(preferences), "num_verdicts": verdicts.total()}
        write_json({"file": output, **facts, "verdicts": dict(verdicts)})
