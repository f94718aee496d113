"""A judge that this process loads, in `laurel eval`, `laurel score` and `laurel data verdicts`."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

import tiny
import tiny_tokenizers
from eval_rows import pair_rows, write
from judges import ONLY_RESPONSE, by_length, judge_section, judge_server, named_judge
from laurel import api
from laurel.cli.main import app
from laurel.errors import ConfigError
from laurel.extensions.evaluation.tables import print_judge
from laurel.rewards.open import open_scorer
from laurel.rewards.spec import ScorerSpec
from laurel.run.specs import read_judge
from laurel.types import Message, group_of
from model_directories import save_model

JUDGE = """\
model_name: {model}
precision: float32
judge:
  read_out: log_probability
  compares: {compares}
"""


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The file of a random judge that compares."""
    directory = tmp_path_factory.mktemp("judge")
    tokenizer = tiny_tokenizers.chatml()
    policy = tiny.tiny_policy("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048)
    save_model(directory / "model", policy.causal_lm, tokenizer)
    file = directory / "judge.yaml"
    file.write_text(JUDGE.format(model=directory / "model", compares="true"), encoding="utf-8")
    return file


@pytest.fixture
def called():
    def call(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    return call


def test_eval_counts_the_verdicts_and_says_how_often_they_flip(called, judge, tmp_path):
    rows = pair_rows()[:8]
    data = write(tmp_path / "rows.jsonl", rows)
    done = called("eval", "reward-bench", "--judge", judge, "-d", data, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    groups = [
        group_of((Message("user", r["prompt"]),), (r["chosen"], r["rejected"]), group_id="g")
        for r in rows
    ]
    source = named_judge(read_judge(judge, say=print))
    with open_scorer(ScorerSpec(source=source, device="cpu"), say=print) as scorer:
        scores = scorer.score_now(groups)
    plain = next(one for one in report["sections"] if one["name"] == "all rows, unweighted")
    right = [one.value > other.value for one, other in scores]
    assert plain["value"] == pytest.approx(sum(right) / 8)
    flips = sum(one.parts["position_flips"] for one, _ in scores) / 8
    assert report["judge"]["position_flips"] == pytest.approx(flips)
    shown = called("eval", "reward-bench", "--judge", judge, "-d", data, "--device", "cpu")
    assert f"verdicts that change with the position {flips:.3f}" in shown.stdout


@pytest.mark.parametrize(("flips", "warns"), [(0.5, False), (0.75, True)])
def test_a_judge_that_follows_the_position_is_named(flips, warns):
    console = Console(file=io.StringIO(), width=80)
    print_judge(console, {"position_flips": flips})
    assert ("warning" in console.file.getvalue()) == warns


def test_score_writes_the_probabilities(called, judge, tmp_path):
    single = tmp_path / "judge.yaml"
    single.write_text(judge.read_text().replace("compares: true", "compares: false"))
    row = {"prompt": "Bread?", "completions": ["Wine.", "No."]}
    data = write(tmp_path / "rows.jsonl", [row])
    done = called("score", data, "--judge", single, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    assert all(0 < score < 1 for score in json.loads(line)["scores"])


def test_verdicts_are_written_for_both_positions(called, judge, tmp_path):
    data = write(tmp_path / "rows.jsonl", [{"prompt": "Where?", "chosen": "x", "rejected": "y"}])
    output = tmp_path / "verdicts.jsonl"
    done = called("data", "verdicts", data, "--judge", judge, "-o", output, "--json")
    assert done.exit_code == 0, done.output
    first, second = (json.loads(line)["messages"] for line in output.read_text().splitlines())
    assert (first[-1]["content"], second[-1]["content"]) == ("A", "B")
    assert first[0]["content"].index("\nx\n") < first[0]["content"].index("\ny\n")
    assert second[0]["content"].index("\ny\n") < second[0]["content"].index("\nx\n")


def test_verdicts_are_written_of_named_columns_and_counted(called, judge, tmp_path):
    single = tmp_path / "judge.yaml"
    single.write_text(judge.read_text().replace("compares: true", "compares: false"))
    data = write(tmp_path / "rows.jsonl", [{"q": "Where?", "good": "x", "bad": "y"}])
    output = tmp_path / "verdicts.jsonl"
    columns = ("data.prompt_key=q", "data.chosen_key=good", "data.rejected_key=bad")
    asked = ("data", "verdicts", data, "--judge", single, "-o", output, "--json")
    done = called(*asked, *columns)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verdicts"] == {"Yes": 1, "No": 1}
    done = called(*asked, "--dataset", "HelpSteer3")
    assert done.exit_code
    assert "no 'overall_preference'" in str(done.exception)
    done = called(*asked[:2], *asked[3:], *columns)
    assert "which pairs? Name them with FILE" in str(done.exception)


def test_probabilities_have_no_calibration_and_python_asks_judges_too(judge, tmp_path):
    data = write(tmp_path / "rows.jsonl", pair_rows()[:4])
    found = api.evaluate("pairs", data=[data], judge=judge, diagnostics=True, quiet=True)
    facts = found.report()["diagnostics"]
    assert facts["num_pairs"] == 4
    assert facts["num_failures"] == 0
    assert "calibration" not in facts
    with pytest.raises(ConfigError, match="leave out model"):
        api.evaluate("pairs", "x", data=[data], judge=judge, quiet=True)
    options = ScorerSpec(precision="bfloat16", device="cpu")
    with pytest.raises(ConfigError, match="all of scorer_options but device"):
        api.evaluate("pairs", data=[data], judge=judge, scorer_options=options, quiet=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--precision", "float32"), "--precision is about a reward model"),
        (("--model", "x"), "the file sets model_name"),
        (("--member", "x"), "--member is about a reward model"),
    ],
)
def test_an_option_about_a_reward_model_is_refused_beside_a_judge(called, judge, words, said):
    done = called("eval", "pairs", "--judge", judge, "-d", "rows.jsonl", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_judge_that_compares_has_no_scores_for_sensitivity(called, judge):
    done = called("eval", "pairs", "--judge", judge, "-d", "rows.jsonl", "--sensitivity")
    assert "relative to the other answers" in str(done.exception)


def test_eval_asks_a_judge_behind_an_address(called, tmp_path):
    rows = [{"prompt": "?", "chosen": c, "rejected": r} for c, r in (("abc", "a"), ("a", "ab"))]
    data = write(tmp_path / "rows.jsonl", rows)
    with judge_server(by_length) as server:
        file = tmp_path / "judge.yaml"
        section = judge_section(urls=[server.url], url_model="judge", template=ONLY_RESPONSE)
        file.write_text(json.dumps(section), encoding="utf-8")
        done = called("eval", "pairs", "--judge", file, "-d", data, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["final"]["value"] == 0.5


@pytest.mark.parametrize("command", [("eval", "pairs", "-d"), ("score",)])
@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"model_name": "./nowhere"}, "model_name=./nowhere"),
        (
            {"urls": ["http://h"], "url_model": "j", "template": "{{ x }}"},
            "judge.template: there is",
        ),
    ],
)
def test_a_wrong_judge_is_reported_before_rows_are_read(called, command, section, said, tmp_path):
    file = write(tmp_path / "judge.yaml", [judge_section(**section)])
    done = called(*command, tmp_path / "no rows.jsonl", "--judge", file)
    assert said in str(done.exception)


def test_process_bench_needs_the_values_of_steps(called, judge, tmp_path):
    row = {"id": "1", "problem": "?", "steps": ["a", "b"], "label": 0}
    data = write(tmp_path / "rows.jsonl", [row])
    done = called("eval", "process-bench", "--judge", judge, "-d", data)
    assert done.exit_code
    assert "values of steps" in str(done.exception)


def test_a_judge_that_writes_numbers_has_no_verdicts_to_learn(called, tmp_path):
    judge = write(tmp_path / "judge.yaml", [{"model_name": "m", "judge": {}}])
    done = called("data", "verdicts", tmp_path / "no rows.jsonl", "--judge", judge)
    assert "set read_out=log_probability, or compares=true" in str(done.exception)


def test_verdicts_need_the_file_of_a_judge(called):
    done = called("data", "verdicts", "rows.jsonl")
    assert done.exit_code == 2
    assert "Missing option '--judge'" in done.output
    assert "in place of a reward model" not in called("data", "verdicts", "--help").output
