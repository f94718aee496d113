import io
import math
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from laurel.observe.console import make_console
from laurel.observe.progress import Timers, TrainingProgress
from laurel.run.train import conclude
from laurel.training.loop import RunOutcome
from report_runs import reward_model_run

METRICS = {
    "train/loss": 0.6512,
    "train/accuracy": 0.75,
    "train/lr": 2e-6,
    "train/grad_norm": 1.5,
    "train/rewards_chosen_mean": 3.0,
}


class FakeClock:
    def __init__(self):
        self.now = 500.0

    def __call__(self):
        return self.now


def plain(total_steps, start_step=0, **options):
    clock, file = FakeClock(), io.StringIO()
    console = Console(width=80, file=file, force_terminal=False)
    return TrainingProgress(total_steps, start_step, console, clock=clock, **options), clock, file


def test_a_line_says_everything():
    progress, clock, file = plain(200)
    with progress:
        clock.now += 2.0
        progress.step(1, METRICS, pairs=128, tokens=40_000)
    # 128 pairs and 40,000 tokens in 2 s; 199 steps of 2 s are left: 6 min 38 s.
    assert file.getvalue() == (
        "step 1/200 (0%)  loss 0.6512  accuracy 0.7500  lr 2.000e-06  grad norm 1.500  "
        "64 pairs/s  20k tokens/s  elapsed 0:00:02  left 0:06:38\n"
    )


def test_the_time_left_is_unknown_while_the_first_of_many_side_by_side_are_not_done():
    """Of 64 answers that are sampled at once the first came after 146 s: 2 h 33 min were said."""
    progress, clock, file = plain(80, side_by_side=64)
    with progress:
        clock.now += 146.0
        for step in (1, 63, 64, 80):
            clock.now += 6.0
            progress.step(step, {}, pairs=1, tokens=0)
    left = [line.rpartition("left ")[2] for line in file.getvalue().splitlines()]
    assert left == ["?", "?", "0:00:41", "0:00:00"]


class TerminalFile(io.StringIO):
    def isatty(self):
        return True


def test_lines_come_now_and_then_and_first_and_last():
    progress, clock, file = plain(20)
    with progress:
        for step in range(1, 21):
            clock.now += 1.0
            progress.step(step, METRICS, pairs=1, tokens=10)
    steps = re.findall(r"^step (\d+)/20", file.getvalue(), flags=re.MULTILINE)
    assert steps == ["1", "6", "11", "16", "20"]


def test_a_run_that_ends_early_shows_where_and_a_phase_that_counts_nothing_no_number():
    progress, clock, file = plain(100)
    with progress:
        for step in (1, 2, 3):
            clock.now += 0.5
            progress.step(step, {}, pairs=1, tokens=10)
        clock.now += 60.0
        with progress.phase("saving", None) as saving:
            saving.advance(0)
    lines = file.getvalue().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["step", "1/100"],
        ["saving"],
        ["step", "3/100"],
    ]


def test_a_resumed_run_reckons_from_where_it_started():
    progress, clock, file = plain(100, start_step=90)
    with progress:
        clock.now += 3.0
        progress.step(91, {}, pairs=6, tokens=60)
    assert file.getvalue() == (
        "step 91/100 (91%)  2 pairs/s  20 tokens/s  elapsed 0:00:03  left 0:00:27\n"
    )


def test_phases_do_not_slow_the_rate_but_count_for_the_time_left():
    progress, clock, file = plain(4)
    with progress:
        clock.now += 1.0
        progress.step(1, {}, pairs=10, tokens=100)
        with progress.phase("validating default", total=8) as phase:
            clock.now += 4.0
            phase.advance()  # 4 s after the last line: not yet
            clock.now += 2.0
            phase.advance(3)
        clock.now += 1.0
        progress.step(2, {}, pairs=10, tokens=100)
        clock.now += 8.0
        progress.step(3, {}, pairs=10, tokens=100)
    lines = file.getvalue().splitlines()
    assert lines[1] == "validating default 4/8"
    # Training took 1 + 1 + 8 s for 30 pairs; 16 s in all for 3 steps.
    assert lines[2] == "step 3/4 (75%)  3 pairs/s  30 tokens/s  elapsed 0:00:16  left 0:00:05"


def test_the_time_left_does_not_grow_while_a_step_goes_on():
    """In a step of 10 s, the second of 30, it had risen from 4:36 to 8:10."""
    progress, clock, _ = plain(4, live=True)
    with progress:
        clock.now += 10.0
        progress.step(1, {}, pairs=10, tokens=100)
        left = []
        for _ in range(4):
            shown = Console(width=80, file=io.StringIO(), force_terminal=False)
            shown.print(progress)
            left.append(shown.file.getvalue().split("left ")[1].strip())
            clock.now += 4.0
    assert left == ["0:00:30", "0:00:26", "0:00:22", "0:00:20"]


def test_a_validation_before_the_first_step_is_not_counted_for_each_step_that_is_left():
    progress, clock, file = plain(4)
    with progress:
        with progress.phase("validating", total=1) as phase:
            clock.now += 200.0
            phase.advance()
        clock.now += 10.0
        progress.step(1, {}, pairs=10, tokens=100)
    assert "elapsed 0:03:30  left 0:00:30" in file.getvalue().splitlines()[-1]


def test_a_long_phase_is_a_line_for_each_tenth():
    progress, clock, file = plain(4)
    with progress:
        with progress.phase("validating default", total=232) as phase:
            for _ in range(232):
                clock.now += 7.0
                phase.advance()
        with progress.phase("validating default", total=2) as phase:
            clock.now += 7.0
            phase.advance(2)
    found = [int(line.split()[2].split("/")[0]) for line in file.getvalue().splitlines()]
    assert found == [1, *(math.ceil(23.2 * tenth) for tenth in range(1, 11)), 2]


def test_messages_are_literal_and_safe():
    progress, _, file = plain(10)
    with progress:
        progress.message("saved [step_16]\nin \x1b[31m" + "x" * 100)
    assert file.getvalue() == "saved [step_16]\nin \\x1b[31m" + "x" * 100 + "\n"


def live(width=80):
    clock, file = FakeClock(), io.StringIO()
    console = Console(width=width, file=file, force_terminal=True, color_system=None)
    return TrainingProgress(200, 0, console, live=True, clock=clock), clock, console, file


def test_the_live_display_survives_errors_and_narrow_terminals():
    progress, _, _, file = live(width=10)

    def fail():
        with progress:
            progress.step(1, {"loss": math.nan}, pairs=1, tokens=1)
            with progress.phase("validating") as phase:
                phase.advance()
                raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert file.getvalue().endswith("\x1b[?25h")


RUN_LINES = (
    "model   Qwen3ForSequenceClassification from /runs/demo/checkpoints/sft/step_250: 0.2M "
    "parameters, float32 on cpu",
    "step 100  validation-held-out  loss 0.1670  accuracy 0.9260 of 392 pairs (longer answer "
    "0.5332, bag of words 0.2742)  margin_mean 5.127  score_length_correlation 0.2249  ece 0.02700",
)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_no_word_or_number_is_broken_and_no_line_is_too_long(width, tmp_path, monkeypatch):
    """The progress, a validation and the end of a run, as terminals of these widths show them."""
    file = TerminalFile()
    monkeypatch.setattr("sys.stdout", file)
    monkeypatch.setenv("COLUMNS", str(width))
    console = make_console()
    run_dir = reward_model_run(tmp_path / "exp_001")
    model = Path("/runs/of-somebody/reward-models-2026/checkpoints/rm/step_400")
    outcome = RunOutcome(
        step=100,
        ended="finished",
        metrics={},
        best=model,
        latest=model.with_name("step_500"),
        run_dir=run_dir,
        seconds=61.0,
    )
    clock = FakeClock()
    progress = TrainingProgress(200, 0, console, clock=clock, live=False)
    with progress:
        clock.now += 2.0
        progress.step(1, METRICS, pairs=128, tokens=40_000)
        for line in RUN_LINES:
            progress.message(line, is_routine=True)
    use = "laurel score --model {} /data/preferences/held-out-preferences.jsonl"
    conclude(outcome, console, use=use)
    with progress.phase("validating held-out", total=12):
        console.print(progress)
    shown = re.sub(r"\x1b\[\d*m", "", file.getvalue())
    assert max(map(cell_len, shown.splitlines())) <= width
    # A command goes on behind the sign with which shells continue lines.
    words = shown.replace("\\\n", "").split()
    for whole in (
        "Qwen3ForSequenceClassification",
        "/runs/demo/checkpoints/sft/step_250:",
        "score_length_correlation",
        "2.000e-06",
        "0.02700",
        "0:06:38",
        f"{model}",
        "/data/preferences/held-out-preferences.jsonl",
        "1/200",
        "0/12",
    ):
        assert whole in words, shown
    said = " ".join(words)
    for item in ("grad norm 1.500", "20k tokens/s", "left 0:06:38", "ece 0.02700", "in 61 s"):
        assert item in said, shown


def test_times_are_summed_until_they_are_collected_and_an_exception_still_counts():
    clock = FakeClock()
    timers = Timers(clock)
    for seconds in (1.0, 2.5):
        with timers.time("forward"):
            clock.now += seconds
    assert timers.collect() == {"forward": 3.5}
    with timers.time("step"):
        clock.now += 1
        with timers.time("forward"), timers.time("forward"):  # inside itself it counts once
            clock.now += 2
            assert timers.collect() == {}  # a running timer counts when it has ended
    assert timers.collect() == {"step": 3.0, "forward": 2.0}

    def fail():
        with timers.time("forward"):
            clock.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timers.collect() == {"forward": 2.0}
