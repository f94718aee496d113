"""What a sweep searches, how trials are told apart, and which rows a fold has."""

import json
import math
from contextlib import ExitStack
from io import StringIO
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.data.reading import prompts_of_folds
from laurel.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    UnsavedError,
    WorkerError,
)
from laurel.extensions.report.sweep_page import copy_page
from laurel.extensions.sweep import sweep as sweeps
from laurel.extensions.sweep.options import SweepOptions
from laurel.extensions.sweep.run import ranked_trials, table_of
from laurel.extensions.sweep.sweep import InterruptedSweep, Sweep, TrialOutcome, parse_words
from laurel.observe.console import new_table, print_table
from laurel.run.reward_model import load_data
from runs import TINY, pairs, write_rows

LR, SMOOTHING = "policy.optimizer.kwargs.lr", "rm.loss.label_smoothing"


def values_of(words, params):
    dimensions, fixed = parse_words(words)
    chosen = [one.set_to(params[one.key]) for one in dimensions]
    config = load_config(RewardTrainingRun, None, [*fixed, *chosen]).config
    return config.policy.optimizer.kwargs["lr"], config.rm.loss.label_smoothing


def test_lists_and_ranges_are_searched_and_other_words_hold_for_all_trials():
    words = [f"{LR}=log(1e-5, 1e-3)", f"{SMOOTHING}=0.1", "rm.max_num_steps=range(4,8)"]
    dimensions, fixed = parse_words(words)
    assert [(one.key, one.is_log, one.is_whole) for one in dimensions] == [
        (LR, True, False),
        ("rm.max_num_steps", False, True),
    ]
    assert dimensions[0].ends() == [1e-5, 1e-3]
    assert dimensions[1].ends() == [4, 8]
    assert [one.text for one in fixed] == [words[1]]
    assert values_of(words[:2], {LR: 2e-4}) == (2e-4, 0.1)
    assert values_of([f"{LR}=[1e-3,2e-3]", f"{SMOOTHING}=0.1"], {LR: "0.002"}) == (0.002, 0.1)


def test_a_list_of_one_is_that_value_so_that_lists_can_be_tried_and_fixed():
    dimensions, fixed = parse_words([f"{LR}=[1,2]", "a.betas=[[0.9,0.95]]", "b=[[1,2],[3,4]]"])
    assert [one.value for one in fixed[0].value.value] == [0.9, 0.95]
    assert list(dimensions[1].choices) == ["[1, 2]", "[3, 4]"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{LR}=[]"], "the list is empty"),
        ([LR], "a value is missing"),
        ([f"{LR}=1e-3"], "nothing is searched"),
        ([f"{LR}=[1e-3,1e-3]"], "a value is named twice"),
        ([f"{LR}=[1,2]", f"{LR}=[3,4]"], "is searched twice"),
        ([f"{LR}=[1,2]", f"{LR}=3"], "is searched too"),
        ([f"{LR}=3", f"{LR}=log(1,2)"], "is searched too"),
        ([f"{LR}=log(0,1)"], "above 0"),
        ([f"{LR}=range(2,1)"], "first end must be below"),
        ([f"{LR}=range(1)"], "a range has two ends. Write a range as"),
        ([f"{LR}=uniform(1,2)"], "it is no range"),
        (["rm.seed=[1,2]"], "--seeds N"),
        (["logger.log_dir=[a,b]"], "sets logger.log_dir of every run itself"),
    ],
)
def test_words_that_search_nothing_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        parse_words(words)


def test_no_prompt_is_in_two_folds_and_folds_are_of_similar_size():
    prompts = [bytes([i % 7]) for i in range(100)] + [bytes([i]) for i in range(50)]
    folds = prompts_of_folds(prompts, 5, 3)
    assert sorted(one for fold in folds for one in fold) == sorted({*prompts})
    sizes = [sum(one in fold for one in prompts) for fold in folds]
    assert max(sizes) - min(sizes) <= 16  # a prompt has 15 rows at most
    assert prompts_of_folds(prompts[::-1], 5, 3) == folds
    assert prompts_of_folds(prompts, 5, 4) != folds
    with pytest.raises(DataError, match="cannot be divided into 4 folds"):
        prompts_of_folds([b"a", b"a", b"b"], 4, 0)


def test_the_interval_of_a_mean_is_students():
    of_two = TrialOutcome(number=0, params={}, state="complete", values=(0.5, 0.7))
    assert of_two.mean == pytest.approx(0.6)
    # By hand: the deviation is 0.1 sqrt(2), over sqrt(2) runs, times 12.706.
    assert of_two.half_width == pytest.approx(1.2706)
    many = TrialOutcome(number=0, params={}, state="complete", values=(0.0, 1.0) * 30)
    assert many.half_width == pytest.approx(
        2.0 * 0.5 * math.sqrt(60 / 59) / math.sqrt(60), rel=0.01
    )
    failed = TrialOutcome(number=0, params={}, state="failed", values=(0.5,))
    assert (failed.mean, failed.half_width) == (None, None)


@pytest.mark.parametrize("width", [60, 100])
def test_a_trial_is_one_line_of_the_table(width):
    sweep = SimpleNamespace(dimensions=parse_words([f"{LR}=log(1e-5, 1e-3)"])[0])
    trial = TrialOutcome(
        number=12, params={LR: 0.000123}, state="complete", values=(0.5, 0.7), seconds=123.4
    )
    header, rows = table_of(sweep, [trial])
    table, file = new_table("", *header), StringIO()
    table.add_row(*rows[0])
    print_table(Console(file=file, width=width), table)
    (line,) = [one for one in file.getvalue().splitlines() if one.strip().startswith("12")]
    assert line.split() == ["12", "0.0001230", "0.6000", "1.2706", "2", "complete", "123"]


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", pairs(20))


def swept(rows, *more, searched=f"{LR}=[1e-3,1e-2]", **options):
    """A sweep over two rates on these rows."""
    tiny = [one for one in TINY if not one.startswith(LR)]
    data = ["data.dataset_name=BinaryPreferenceDataset", f"data.train_data_path={rows}"]
    words = [*tiny, *data, "data.split_validation_size=0.2", searched, *more]
    output = options.pop("output", rows.parent / "out")
    return Sweep(SweepOptions(overrides=words, output=output, **options))


@pytest.fixture
def opened():
    with ExitStack() as stack:

        def start(sweep):
            sweep.open(stack)
            return sweep

        yield start


def trained(monkeypatch, *ends, value=0.5):
    """Let runs validate once, at step 4, and end like this: an error, or fields of the outcome."""
    following = iter(ends)

    def train(config, *, console, fold, on_validation):
        saves = config.checkpointing.checkpoint_dir
        sweeps.Path(saves).mkdir(parents=True, exist_ok=True)
        on_validation(4, {"validation-default_loss": value})
        end = next(following)
        if isinstance(end, BaseException):
            raise end
        return SimpleNamespace(
            **{"step": 4, "ended": "finished", "signal": None, "is_early": False, **end}
        )

    monkeypatch.setattr(sweeps, "train_reward_model", train)


def a_run(sweep):
    return sweep.runs_of(SimpleNamespace(number=0), {LR: "0.001"})[0]


def never(step, value):
    return False


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("torn"),
        UnsavedError("unsaved"),
        MemoryError("out of memory"),
        WorkerError("gone", exit_code=WorkerError.LOST_EXIT_CODE),
        OSError("no space"),
    ],
)
def test_what_is_wrong_with_the_machine_is_no_verdict_on_a_trial(monkeypatch, rows, error):
    trained(monkeypatch, error)
    run = a_run(swept(rows))
    with pytest.raises(type(error)):
        run.train(never)
    assert run.result() is None
    assert (run.directory / "saves").is_dir()


def test_a_full_disk_is_no_verdict_although_it_is_an_error_of_data(monkeypatch, rows):
    error = DataError("cannot be written")
    error.__cause__ = OSError(28, "No space left on device")
    trained(monkeypatch, error)
    run = a_run(swept(rows))
    with pytest.raises(DataError):
        run.train(never)
    assert run.result() is None


@pytest.mark.parametrize("error", [NonFiniteError("nan"), ConfigError("no"), DataError("row")])
def test_what_the_settings_do_is_a_verdict(monkeypatch, rows, error):
    trained(monkeypatch, error)
    run = a_run(swept(rows))
    run.train(never)
    assert run.result()["failure"] == f"{type(error).__name__}: {error}"
    assert not (run.directory / "saves").exists()


def test_the_end_of_the_time_budget_leaves_a_run_unfinished(monkeypatch, rows):
    trained(monkeypatch, {"ended": "deadline"})
    run = a_run(swept(rows))
    with pytest.raises(InterruptedSweep, match="checkpoint_must_save_by"):
        run.train(never)
    assert run.result() is None
    assert (run.directory / "saves").is_dir()


def test_a_signal_at_the_end_of_a_run_stops_the_sweep_after_its_result(monkeypatch, rows):
    trained(monkeypatch, {"signal": "SIGINT"})
    run = a_run(swept(rows))
    with pytest.raises(InterruptedSweep, match="SIGINT"):
        run.train(never)
    assert run.result()["value"] == 0.5


def test_a_run_that_trained_to_its_end_keeps_its_value(monkeypatch, rows):
    trained(monkeypatch, {}, {"is_early": True})
    run = a_run(swept(rows))
    run.train(lambda step, value: True)
    assert run.result()["is_pruned"] is False
    run.train(lambda step, value: True)
    assert run.result()["is_pruned"] is True


class FakeGroup:
    """A group whose calls do this: nothing, or raise."""

    def __init__(self, *does):
        self.does = [*does]
        self.runs = []

    def start(self, method, run):
        self.runs.append(run)
        return SimpleNamespace(done=lambda: True, wait=lambda: self.does.pop(0)(run))


def train_it(run):
    run.train(never)


def die(run):
    raise WorkerError("trials 1: rank 0 died", exit_code=WorkerError.LOST_EXIT_CODE)


def outcome_there(sweep, *does):
    group = FakeGroup(*does)
    trial = next(sweep.trials())
    (outcome,) = [one for one in sweep._run_there(trial, [lambda: group], 0) if one is not None]
    return outcome, group


def test_a_run_in_a_worker_starts_no_cluster_of_its_own(rows):
    sweep = swept(rows, "cluster.address=auto", "cluster.backend=ray", num_workers=2)
    cluster = a_run(sweep).config.cluster
    assert (cluster.address, cluster.backend) == (None, "local")
    with pytest.raises(ConfigError, match="--workers 2: each run has one slot"):
        swept(rows, "cluster.gpus_per_node=2", num_workers=2)
    assert a_run(swept(rows, "cluster.gpus_per_node=2")).config.cluster.gpus_per_node == 2


def test_a_worker_that_writes_no_result_fails_its_trial_and_says_why(rows, opened):
    sweep = opened(swept(rows, num_workers=2))
    outcome, _ = outcome_there(sweep, lambda run: None)
    assert outcome.state == "failed"
    assert "wrote no result.json here; --output must be on a file system" in outcome.failure


def test_a_result_that_is_torn_is_none_and_the_output_is_absolute(rows, monkeypatch):
    monkeypatch.chdir(rows.parent)
    run = a_run(swept(rows, output=sweeps.Path("here")))
    assert run.directory.is_absolute()
    run.directory.mkdir(parents=True)
    for text in ('{"value": 0.', "{}", "[]"):
        (run.directory / "result.json").write_text(text)
        assert run.result() is None


def test_a_worker_that_dies_is_started_again_once(monkeypatch, rows, opened):
    trained(monkeypatch, {})
    sweep = opened(swept(rows, num_workers=2))
    outcome, group = outcome_there(sweep, die, train_it)
    assert (outcome.state, outcome.values, len(group.runs)) == ("complete", (0.5,), 2)
    outcome, group = outcome_there(sweep, die, die)
    assert (outcome.state, len(group.runs)) == ("failed", 2)
    assert "its worker died twice: trials 1: rank 0 died" in outcome.failure


def test_what_is_wrong_with_a_workers_machine_ends_the_sweep(rows, opened):
    sweep = opened(swept(rows, num_workers=2))

    def fail(run, cause):
        raise WorkerError("trials 1: rank 0 failed") from cause

    with pytest.raises(WorkerError):
        outcome_there(sweep, lambda run: fail(run, CheckpointError("torn")))
    with pytest.raises(InterruptedSweep, match="SIGTERM"):
        outcome_there(sweep, lambda run: fail(run, InterruptedSweep("SIGTERM")))
    # Both are left to the same command.
    assert sweep.outcomes() == []
    assert [one.number for one, _ in zip(sweep.trials(), range(1), strict=False)] == [0]


def test_a_trial_that_was_killed_before_it_sampled_samples_the_same(rows, opened):
    searched = f"{LR}=log(1e-5,1e-1)"
    whole = opened(swept(rows, searched=searched, output=rows.parent / "whole"))
    expected = [one.suggest(next(whole.trials())) for one in whole.dimensions]
    for place in ("first", "second"):
        sweep = opened(swept(rows, searched=searched, output=rows.parent / place))
        sweep.study.ask()  # and killed
        again = next(sweep.trials())
        assert again.number == 0
        assert [one.suggest(again) for one in sweep.dimensions] == expected


def test_a_setting_that_no_run_could_have_is_refused_before_the_first_trial(rows):
    stopping = "rm.early_stopping={metric_name: validation-other_loss, patience: 2}"
    other = f"data.val_data_paths={{other: {rows}}}"
    searched = ["data.split_validation_size=0", other, stopping]
    swept(rows, *searched)
    with pytest.raises(ConfigError, match="validation-other_loss"):
        swept(rows, *searched, num_folds=2)


def test_other_rows_in_the_same_file_are_another_sweep(rows):
    with ExitStack() as stack:
        swept(rows).open(stack)
    with ExitStack() as stack:
        swept(rows).open(stack)
    write_rows(rows, pairs(20, seed=1))
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"holds another sweep \(rows: "):
        swept(rows).open(stack)
    assert "rows" in json.loads((rows.parent / "out" / "sweep.json").read_text())


def test_a_sweep_of_a_version_with_other_keys_goes_on(rows):
    def opened_with(name):
        sets = f"data.val_data_paths={{{name}: {rows}}}"
        with ExitStack() as stack:
            swept(rows, "data.split_validation_size=0", sets).open(stack)

    opened_with("other")
    file = rows.parent / "out" / "sweep.json"
    saved = json.loads(file.read_text())
    flat = {"dataset_name": "BinaryPreferenceDataset", "val_data_paths": {"other": str(rows)}}
    saved["configuration"]["data"] |= {"validation": None, **flat}
    file.write_text(json.dumps(saved))
    opened_with("other")
    with pytest.raises(ConfigError, match=r"another sweep \(.*data\.validation\.other"):
        opened_with("another")


def test_a_sweep_that_began_before_the_rate_was_auto_keeps_its_rate(rows):
    """Trials with another rate could not be compared with those that have ended."""
    searched = f"{SMOOTHING}=[0,0.1]"

    def opened(sweep):
        with ExitStack() as stack:
            sweep.open(stack)
        return sweep

    sweep = opened(swept(rows, searched=searched))
    assert sweep.rate_kept is None
    file = rows.parent / "out" / "sweep.json"
    began = json.loads(file.read_text())
    assert began["configuration"]["policy"]["optimizer"]["kwargs"]["lr"] == "auto"
    began["configuration"]["policy"]["optimizer"]["kwargs"]["lr"] = 2e-6
    other = rows.parent / "other"
    other.mkdir()
    (other / "sweep.json").write_text(json.dumps(began))
    sweep = opened(swept(rows, searched=searched, output=other))
    assert sweep.rate_kept == 2e-6
    params = {SMOOTHING: "0.1"}
    (trial,) = sweep.runs_of(SimpleNamespace(number=1), params)
    assert trial.config.policy.optimizer.kwargs["lr"] == 2e-6
    best = TrialOutcome(number=1, params=params, state="complete", values=(0.5,))
    assert yaml.safe_load(sweep.winner_yaml(best))["policy"]["optimizer"]["kwargs"]["lr"] == 2e-6
    with pytest.raises(ConfigError, match=r"lr: 2e-06 then, 0\.001 now"):
        opened(swept(rows, f"{LR}=1e-3", searched=searched, output=other))


@pytest.mark.parametrize("own", ["0", "0.5"])
def test_folds_take_the_place_of_the_shares_that_sets_hold_out(rows, own):
    block = f"{{data_path: {rows}, split_validation_size: {own}}}"
    forms = ["~data.train_data_path", f"data.train={block}"]
    sweep = swept(rows, *forms, num_folds=2)
    assert sweep.selection.key == "validation-default_loss"
    for one in a_run(sweep), sweep.runs_of(SimpleNamespace(number=0), {LR: "0.01"})[1]:
        data = load_data(one.config, fold=one.fold)
        assert len(data.validation["default"]) == len(data.train) == 10


def test_a_report_of_a_sweep_is_refused_where_there_is_no_page_or_more_than_one_is_named(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(DataError, match="the sweep has not ended"):
        copy_page([tmp_path], tmp_path / "copy.html")
    with pytest.raises(ConfigError, match="stands alone"):
        copy_page([tmp_path, tmp_path / "trial_000"], tmp_path / "copy.html")
    for more in (["--follow"], ["--title", "Mine"]):
        refused = CliRunner().invoke(app, ["report", str(tmp_path), *more])
        assert refused.exit_code == 2
        assert "the page of a sweep has neither" in refused.output
    assert [one.name for one in tmp_path.iterdir()] == ["sweep.json"]


@pytest.mark.parametrize(
    ("metric", "direction", "first"),
    [("validation-default_loss", "MINIMIZE", 1), ("validation-default_accuracy", "MAXIMIZE", 2)],
)
def test_the_best_trial_is_the_lowest_or_the_highest_as_the_metric_is(
    rows, opened, metric, direction, first
):
    sweep = opened(swept(rows, metric=metric))
    assert sweep.study.direction.name == direction
    trials = [
        TrialOutcome(number=0, params={}, state="failed", failure="it did"),
        TrialOutcome(number=1, params={}, state="complete", values=(0.25,)),
        TrialOutcome(number=2, params={}, state="complete", values=(0.75,)),
        TrialOutcome(number=3, params={}, state="pruned"),
    ]
    assert sweep.best(trials).number == first
    ranked = ranked_trials(trials, higher_is_better=sweep.selection.higher_is_better)
    assert [one.number for one in ranked] == [first, 3 - first, 0, 3]
