"""Seconds to read preferences, to pack conversations, and to look for leaked prompts.

python benchmarks/reading.py
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from laurel.config.data import DatasetConfig
from laurel.data.forest import bin_pack, pack_evenly
from laurel.data.preferences import load_preferences
from laurel.evaluation.statistics import ScoredPair
from laurel.extensions.evaluation.diagnostics import find_leaks
from laurel.types import Message

UKP = Path("ukp_convarg1") / "train.jsonl.gz"
NUM_CONVERSATIONS = 50_000
NUM_TRAINED, NUM_EVALUATED = 10_000, 1_000


def read_ukp(data_dir: Path) -> int:
    """Reads the training pairs of UKP and says how many there are."""
    pairs, _ = load_preferences(
        DatasetConfig(data_path=str(data_dir / UKP)),
        name="train",
        ties="drop",
        duplicates="keep",
        on_bad_row="error",
        attributes=(),
        max_samples=None,
    )
    return len(pairs)


def drawn_pairs(prefix: str, count: int, drawn: random.Random) -> list[ScoredPair]:
    """Pairs whose prompts are a hundred words drawn from 5,000."""
    vocabulary = [f"word{number}" for number in range(5000)]
    pairs = []
    for number in range(count):
        text = " ".join(drawn.choices(vocabulary, k=100))
        pairs.append(
            ScoredPair(
                id=f"{prefix}{number}",
                prompt=(Message("user", text),),
                chosen="yes",
                rejected="no",
                score_chosen=None,
                score_rejected=None,
            )
        )
    return pairs


def works(data_dir: Path) -> Iterator[tuple[str, float | None, Callable[[], object]]]:
    """What is timed: its name, the seconds that were aimed at, and the work."""
    if (data_dir / UKP).exists():
        yield "UKP's 8,589 training pairs read and checked", 1.0, lambda: read_ukp(data_dir)
    else:
        print(f"UKP is not in {data_dir} (LAUREL_DATA): not measured")
    sizes = np.random.default_rng(0).integers(50, 2000, NUM_CONVERSATIONS).tolist()
    yield "50,000 conversations packed", None, lambda: bin_pack(sizes, 8192)
    yield "the same for eight places", None, lambda: pack_evenly(sizes, 8192, dp_size=8)
    drawn = random.Random(0)
    trained, evaluated = (
        drawn_pairs(prefix, count, drawn)
        for prefix, count in (("t", NUM_TRAINED), ("e", NUM_EVALUATED))
    )
    name = "1,000 prompts looked for among 10,000 (100 words each)"
    yield name, None, lambda: find_leaks(evaluated, trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"medians of {repeats}; load {os.getloadavg()[0]:.1f}")
    for name, aim, work in works(Path(os.environ.get("LAUREL_DATA", "../shared/data"))):
        seconds = []
        for _ in range(repeats + 1):  # the first one also imports
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
        target = f", aimed at {aim:.2f} s" if aim else ""
        print(f"{name}: {statistics.median(seconds[1:]):.2f} s (first {seconds[0]:.2f} s{target})")


if __name__ == "__main__":
    main()
