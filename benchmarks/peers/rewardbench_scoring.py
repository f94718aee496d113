"""rewardbench's own scripts/run_rm.py behind a channel: run under the peer's interpreter.

Each step is the script's `main()`, as its package ships it: rows formatted, the model loaded, pairs
scored by its pipeline in batches of 64, accuracies by subset. Two things of it are replaced,
because nothing else runs here: where the rows come from (a file, not the hub), and the device its
pipeline names (`cuda`). The time is that of its pipeline's calls alone, tokenising included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from channel import Channel, Meter

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import os  # noqa: E402

import rewardbench.utils  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from rewardbench.models import RewardBenchPipeline  # noqa: E402
from scripts import run_rm  # noqa: E402

in_pipeline = {"seconds": 0.0, "user_seconds": 0.0, "system_seconds": 0.0}


def timed(call: Any) -> Any:
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        meter = Meter()
        meter.start()
        try:
            return call(*args, **kwargs)
        finally:
            cost = meter.read()
            for key in in_pipeline:
                in_pipeline[key] += cost[key]

    return timed_call


def replace_surroundings() -> None:
    """Rows from a file, the device that there is, and a clock around the pipeline."""
    with open(SETTINGS["rows"], encoding="utf-8") as lines:
        rows = Dataset.from_list([json.loads(line) for line in lines])
    rewardbench.utils.load_dataset = lambda *_, **__: rows
    transformers.BatchEncoding.to = lambda self, device: self
    RewardBenchPipeline.__call__ = timed(RewardBenchPipeline.__call__)


def run_script() -> None:
    sys.argv = [
        "run_rm.py",
        "--model",
        SETTINGS["model"],
        "--not_quantized",
        "--do_not_save",
        "--disable_beaker_save",
        "--torch_dtype",
        "float32",
        "--max_length",
        str(SETTINGS["max_length"]),
    ]
    run_rm.main()


def hand_over() -> None:
    """What the script left behind, in one file for the driver."""
    name = f"{SETTINGS['model']}.json"
    accuracies = json.loads(Path(f"./results/eval-set/{name}").read_text(encoding="utf-8"))
    scores = json.loads(Path(f"./results/eval-set-scores/{name}").read_text(encoding="utf-8"))
    found = {
        "ids": scores["id"],
        "chosen": [one for (one,) in scores["scores_chosen"]],
        "rejected": [one for (one,) in scores["scores_rejected"]],
        "accuracies": {key: one for key, one in accuracies.items() if isinstance(one, float)},
    }
    Path(SETTINGS["scores"]).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(SETTINGS["threads"])
    os.chdir(SETTINGS["scratch_dir"])
    replace_surroundings()
    channel.say(
        program="rewardbench 0.1.4, scripts/run_rm.py",
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        threads=torch.get_num_threads(),
    )
    meter = Meter()
    while channel.next_command()["do"] == "steps":
        in_pipeline.update(dict.fromkeys(in_pipeline, 0.0))
        meter.start()
        run_script()
        cost = meter.read()
        hand_over()
        channel.say(**{**cost, "whole_seconds": cost["seconds"], **in_pipeline})


if __name__ == "__main__":
    main()
