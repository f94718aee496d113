"""`laurel eval reward-bench --compatibility rewardbench` behind a channel.

The parts that the command runs. The time is that of a step from conversations to scores: rendering,
tokenising, packing, the model. Loading and accuracies are not in it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from channel import Channel, Meter

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import torch  # noqa: E402
import transformers  # noqa: E402

import laurel  # noqa: E402
from laurel.extensions.evaluation.benchmarks import BENCHMARKS  # noqa: E402
from laurel.extensions.evaluation.rewardbench_tokens import (  # noqa: E402
    FORMATS,
    differences,
    summary,
)
from laurel.extensions.evaluation.run import (  # noqa: E402
    EvalScorer,
    EvaluationRequest,
    open_evaluation_scorer,
)
from laurel.observe.console import make_console  # noqa: E402
from laurel.rewards.spec import ScorerSpec  # noqa: E402


def main() -> None:
    form = replace(FORMATS["reward-bench"], max_length=SETTINGS["max_length"])
    request = EvaluationRequest(
        scorer=EvalScorer(
            model=SETTINGS["model"],
            reproduces=form,
            cpu_threads=SETTINGS["threads"],
            options=ScorerSpec(device="cpu"),
        ),
        data=(SETTINGS["rows"],),
    )
    benchmark = BENCHMARKS["reward-bench"]
    rows = benchmark.read(request, lambda _: None)
    groups = [row.group for row in rows]
    with open_evaluation_scorer(request.scorer.resolved(), make_console(stderr=True)) as scorer:
        assert scorer.reference is not None
        tokens = scorer.reference.encode(groups)
        channel.say(
            program=f"Laurel {laurel.__version__}",
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            threads=torch.get_num_threads(),
            sequence_tokens=sum(sum(group.lengths_G) for group in tokens),
            distinct_tokens=sum(group.num_tokens for group in tokens),
            differences=summary(differences(scorer.reference, groups)),
        )
        meter = Meter()
        while channel.next_command()["do"] == "steps":
            meter.start()
            scores = scorer.score(groups)
            cost = meter.read()
            pairs = [
                p for row, one in zip(rows, scores, strict=True) for p in benchmark.scored(row, one)
            ]
            measured = benchmark.measure(pairs, request)
            found = {
                "ids": [row.id for row in rows],
                "chosen": [pair.score_chosen for pair in pairs],
                "rejected": [pair.score_rejected for pair in pairs],
                "accuracies": {one.name: one.value for one in measured.subsets},
            }
            Path(SETTINGS["scores"]).write_text(json.dumps(found), encoding="utf-8")
            channel.say(**cost)


if __name__ == "__main__":
    main()
