"""How large is the report of a long run, and how soon can it be used in a browser?

python benchmarks/report_size.py

Makes the records of a GRPO run of 10,000 steps with 100,000 samples, in the files and through the
functions that a run writes them with (synthetic numbers and texts, from a seed), writes its report,
and opens it in headless Chromium.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config, to_yaml
from laurel.extensions.report.page import write_report
from laurel.observe.console import CompletionRow, write_completions
from laurel.observe.loggers import JsonlLogger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from headless_browser import browser_page, find_browser

MAX_SECONDS, MAX_MEGABYTES = 2.0, 15.0
NUM_STEPS, NUM_SAMPLES = 10_000, 100_000
NUM_VALIDATED = 50
"""Completions that each validation logs."""
WORDS_OF_COMPLETION = 90
_BEGINNINGS = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu")
_ENDINGS = ("den", "lor", "mas", "nik", "pe")
WORDS = [first + last for first in _BEGINNINGS for last in _ENDINGS]


def text(draws: random.Random, num_words: int) -> str:
    """Words in sentences: not compressible to nothing, not noise either."""
    words = draws.choices(WORDS, k=max(4, round(draws.gauss(num_words, num_words / 4))))
    return " ".join(words).capitalize() + "."


def metrics(step: int, draws: random.Random) -> dict[str, float]:
    """Figures of a step under the names that GRPO logs."""
    progress = 1 - math.exp(-step / 2500)
    spike = 60.0 if step in (4321, 7777) else 1.0
    return {
        "train/reward": progress + draws.gauss(0, 0.15),
        "train/reward_std": 0.4 - 0.2 * progress + abs(draws.gauss(0, 0.02)),
        "train/loss": draws.gauss(0, 0.02),
        "train/kl_penalty": 0.05 * progress + abs(draws.gauss(0, 0.004)),
        "train/entropy": 1.4 - progress + draws.gauss(0, 0.05),
        "train/mean_gen_tokens_per_sample": 120 + 90 * progress + draws.gauss(0, 9),
        "train/grad_norm": spike * math.exp(draws.gauss(-0.5, 0.3)),
        "train/frac_reward_zero_std": min(1.0, max(0.0, 0.6 * progress + draws.gauss(0, 0.1))),
        "train/truncation_rate": max(0.0, 0.02 + draws.gauss(0, 0.01)),
        "train/num_failures": float(draws.random() < 0.01),
        "train/total_turns": 8.0,
        "train/avg_turns_per_sample": 1.0,
        "train/lr": 1e-6,
        "train/bad_steps_in_a_row": 0.0,
        "performance/tokens_per_second": draws.gauss(900, 60),
        "timing/train/generation": draws.gauss(3, 0.2),
        "timing/train/policy_training": draws.gauss(2, 0.1),
        "timing/train/policy_and_reference_logprobs": draws.gauss(0.7, 0.05),
        "timing/train/total_step_time": draws.gauss(6, 0.3),
    }


def completions(step: int, count: int, draws: random.Random) -> Iterator[CompletionRow]:
    """Completions of a step, or of a validation, whose tasks come again."""
    for index in range(count):
        prompt = random.Random(f"prompt {index % NUM_VALIDATED}")
        yield CompletionRow(
            step=step,
            task=f"task-{index % NUM_VALIDATED}",
            group=f"{step}-{index // 4}",
            environment="math",
            prompt=text(prompt, 30),
            completion=text(draws, WORDS_OF_COMPLETION),
            reward=draws.gauss(1 - math.exp(-step / 2500), 0.4),
            advantage=draws.gauss(0, 1),
            answer=str(draws.randrange(100)),
            expected=str(draws.randrange(100)),
            truncated=draws.random() < 0.02,
            num_tokens=draws.randrange(80, 260),
        )


def make_run(directory: Path, num_steps: int, num_samples: int, *, seed: int) -> int:
    """Write the records of a run; how many samples they hold."""
    draws = random.Random(seed)
    directory.mkdir(parents=True)
    changes = [
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=8",
        f"grpo.max_num_steps={num_steps}",
    ]
    config = load_config(GRPORun, None, changes).config
    logger = JsonlLogger(directory)
    logger.log_config(config.model_dump(mode="json"))
    (directory / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    period = max(1, num_steps // 200)
    in_validation = NUM_VALIDATED * (num_steps // period)
    each = max(1, round((num_samples - in_validation) / num_steps))
    written = 0
    for step in range(1, num_steps + 1):
        logger.log(metrics(step, draws), step=step)
        rows = list(completions(step, each, draws))
        write_completions(directory / "completions" / f"step_{step:06d}.parquet", rows)
        written += len(rows)
        if step % period == 0:
            validated = list(completions(step, NUM_VALIDATED, draws))
            cells = [row.cells for row in validated]
            logger.log_table("validation/completions", CompletionRow.columns(), cells, step=step)
            right = 0.2 + 0.7 * (1 - math.exp(-step / 2500)) + draws.gauss(0, 0.02)
            logger.log({"validation/accuracy": right}, step=step)
            written += len(validated)
    logger.close()
    return written


SEARCH = """(async () => {
  const details = document.querySelector('[id$="-samples2-fold"]');
  const started = performance.now();
  details.open = true;
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const search = document.querySelector('[id$="-samples2-search"]');
  search.value = 'baden';
  search.dispatchEvent(new Event('input', {bubbles: true}));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return (performance.now() - started) / 1000;
})()"""


def opened(page: Path, program: str) -> dict[str, float]:
    """Seconds from the start of the navigation, by the browser's own clock."""
    with browser_page(program) as tab:
        tab.look()
        tab.open(page.as_uri())
        usable = tab.run("performance.getEntriesByName('report-usable')[0].startTime / 1000")
        tab.wait_for("performance.getEntriesByType('paint').length > 0")
        paint = tab.run("performance.getEntriesByType('paint')[0].startTime / 1000")
        loaded = tab.run("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000")
        return {
            "usable": usable,
            "first paint": paint,
            "loaded": loaded,
            "a table opened and searched": tab.run(SEARCH),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keep the run and its page in this directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        run, page = directory / "exp_001", directory / "report.html"
        count = make_run(run, options.steps, options.samples, seed=options.seed)
        started = time.perf_counter()
        write_report(page, [run])
        seconds = time.perf_counter() - started
        size = page.stat().st_size / 1e6
        records = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6
        print(f"{options.steps:,} steps, {count:,} samples, {records:.0f} MB of records")
        print(f"written in {seconds:.1f} s: {size:.1f} MB (limit {MAX_MEGABYTES:.0f} MB)")
        fine = size < MAX_MEGABYTES
        program = find_browser()
        if program is None:
            print("no browser here (Debian: apt-get install chromium); times to open not measured")
        else:
            rounds = [opened(page, program) for _ in range(options.rounds)]
            for name in rounds[0]:
                times = sorted(one[name] for one in rounds)
                limit = f"; limit {MAX_SECONDS:.0f} s" if name == "usable" else ""
                print(
                    f"{name}: {statistics.median(times):.2f} s "
                    f"({times[0]:.2f} to {times[-1]:.2f}, {len(times)} rounds{limit})"
                )
            fine &= max(one["usable"] for one in rounds) < MAX_SECONDS
        print(json.dumps({"within the limits": fine}))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
