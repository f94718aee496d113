"""`laurel eval reward-bench` and its siblings, from the command line to the files."""

import json
from typing import Any

import pytest

from eval_rows import SUBSETS, WORDS, accuracies, evaluate, list_rows, pair_rows, refused, write
from laurel.rewards.open import open_local
from laurel.types import Message, group_of
from reward_models import small_model, write_model
from reward_servers import RewardServer


@pytest.fixture(scope="module")
def model(reward_model):
    return reward_model


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other")
    write_model(small_model(seed=3), directory)
    return directory


def own_scores(model, rows, key):
    """What the scorer says of each answer when it is asked for it alone."""
    scorer = open_local(str(model), say=lambda _: None)
    groups = [
        group_of((Message("user", row["prompt"]),), (row[key],), group_id="g") for row in rows
    ]
    return [scores[0].value for scores in scorer.score_now(groups)]


def test_reward_bench_from_rows_to_files(laurel, model, tmp_path):
    rows = pair_rows()
    data = write(tmp_path / "rows.jsonl.gz", rows)
    done = evaluate(
        laurel,
        "reward-bench",
        model,
        data,
        "-o",
        str(tmp_path / "new" / "out"),
        "--device",
        "cpu",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    chosen, rejected = own_scores(model, rows, "chosen"), own_scores(model, rows, "rejected")
    right = [one > other for one, other in zip(chosen, rejected, strict=True)]
    expected = {
        subset: sum(right[i] for i in range(24) if i % 4 == place) / 6
        for place, subset in enumerate(SUBSETS)
    }
    report = json.loads(done.stdout)
    assert accuracies(report) == pytest.approx(expected)
    assert 0 < sum(right) < 24, "a model that is right everywhere shows nothing"
    assert report["final"]["value"] == pytest.approx(sum(expected.values()) / 4)
    longer = [len(row["chosen"]) > len(row["rejected"]) for row in rows]
    plain = next(one for one in report["sections"] if one["name"] == "all rows, unweighted")
    assert plain["longer_wins"] == pytest.approx(sum(longer) / 24)
    assert "hep-go has 6 rows where RewardBench has 164" in report["notes"]

    flat = json.loads((tmp_path / "new" / "out" / "reward-bench.json").read_text())
    assert flat == {
        "model": str(model),
        "model_type": "Seq. Classifier",
        "chat_template": "tokenizer",
        **accuracies(report),
    }
    assert list(flat) == sorted(flat)
    scores = json.loads((tmp_path / "new" / "out" / "reward-bench-scores.json").read_text())
    assert scores["results"] == [float(one) for one in right]
    assert scores["scores_chosen"] == pytest.approx(chosen, abs=2e-6)
    assert scores["text_rejected"] == [row["rejected"] for row in rows]
    assert json.loads((tmp_path / "new" / "out" / "reward-bench-report.json").read_text()) == report


def test_two_models_side_by_side(laurel, model, other_model, tmp_path):
    data = write(tmp_path / "rows.jsonl", pair_rows())
    for name, one in (("a", model), ("b", other_model)):
        done = evaluate(laurel, "reward-bench", one, data, "-o", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    files = [tmp_path / "a" / "reward-bench.json", tmp_path / "b" / "reward-bench-scores.json"]
    done = laurel(["eval", "reward-bench", "--compare", *map(str, files), "--json"])
    assert done.returncode == 0, done.stderr
    first, second = (
        json.loads((tmp_path / name / "reward-bench-scores.json").read_text())["results"]
        for name in "ab"
    )
    found = json.loads(done.stdout)["all_rows"]
    assert found["num_rows"] == 24
    assert found["only_a"] == sum(a > b for a, b in zip(first, second, strict=True)) > 0
    assert found["only_b"] == sum(b > a for a, b in zip(first, second, strict=True)) > 0
    shown = laurel(["eval", "reward-bench", "--compare", *map(str, files)])
    assert "24 rows have a verdict in both" in shown.stdout


def test_reward_bench_2_with_all_six(laurel, model, tmp_path):
    data = write(tmp_path / "rows.jsonl", list_rows())
    done = evaluate(laurel, "reward-bench-2", model, data, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = accuracies(report)
    assert list(found) == ["Factuality", "Precise IF", "Math", "Safety", "Focus", "Ties"]
    assert report["final"]["value"] == pytest.approx(sum(found.values()) / 6)
    assert report["num_completions"] == 10 * 4 + 2 * 3 + 2 * 5


def test_the_other_benchmarks(laurel, model, tmp_path):
    styles = {"chosen": ["4", "It is 4.", "**4** it is."], "rejected": ["5", "It is 5.", "**5**."]}
    domains = ("chat", "math", "code", "safety-refuse", "safety-response")
    rm = [{"id": name, "domain": name, "prompt": "2 + 2?", **styles} for name in domains]
    judge = [
        {
            "pair_id": str(i),
            "source": "mmlu-pro-law",
            "question": f"{i}?",
            "label": label,
            "response_A": WORDS[i],
            "response_B": WORDS[i + 1],
        }
        for i, label in enumerate(["A>B", "B>A", "A>B"])
    ]
    groups = [
        {"prompt": "q?", "completions": list(WORDS[:4]), "correct": [1, 0, 0, 0]},
        {"prompt": "r?", "completions": list(WORDS[:3]), "correct": [False] * 3},
    ]
    ranked = [
        {
            "context": "q?",
            "completions": [
                {"rank": rank, "completion": text} for rank, text in enumerate(WORDS[:3])
            ],
        }
    ]
    commands = {"rm-bench": rm, "judge-bench": judge, "best-of-n": groups, "pairs": ranked}
    reports = {}
    for name, rows in commands.items():
        data = write(tmp_path / f"{name}.jsonl", rows)
        done = evaluate(laurel, name, model, data, "--json")
        assert done.returncode == 0, done.stderr
        reports[name] = json.loads(done.stdout)
    matrix = reports["rm-bench"]["matrix"]
    assert sum(map(sum, matrix)) / 9 == pytest.approx(reports["rm-bench"]["final"]["value"])
    assert reports["judge-bench"]["final"]["num_rows"] == 3
    swapped = [
        {
            **row,
            "label": {"A>B": "B>A", "B>A": "A>B"}[row["label"]],
            "response_A": row["response_B"],
            "response_B": row["response_A"],
        }
        for row in judge
    ]
    data = write(tmp_path / "swapped.jsonl", swapped)
    again = evaluate(laurel, "judge-bench", model, data, "--json")
    assert json.loads(again.stdout)["final"] == reports["judge-bench"]["final"]
    oracle = next(o for o in reports["best-of-n"]["sections"] if o["name"].startswith("any"))
    assert oracle["value"] == 0.5
    assert reports["pairs"]["final"]["num_rows"] == 3, "three answers make three pairs"


def test_what_else_the_scores_of_pairs_show(laurel, model, tmp_path):
    rows = pair_rows()
    data = write(tmp_path / "held_out.jsonl", rows)
    # One conversation of the evaluation is in training, too, and one says the opposite of another.
    learned = [{**row, "prompt": f"Before: {row['prompt']}"} for row in rows[:12]]
    swapped = {**learned[0], "chosen": learned[0]["rejected"], "rejected": learned[0]["chosen"]}
    train = write(tmp_path / "train.jsonl", [*learned, rows[3], swapped])
    asked = ["eval", "pairs", "-m", str(model), "-d", str(data), "--train-data", str(train)]
    done = laurel([*asked, "--sensitivity", "--json"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    found = report["diagnostics"]
    assert found["num_pairs"] == 24
    assert found["accuracy"]["value"] == report["final"]["value"]
    assert found["accuracy"]["baselines"]["longer wins"] == report["final"]["longer_wins"]
    assert set(found["accuracy"]["baselines"]) == {"longer wins", "bag of words"}
    bins = [part["accuracy"]["num_pairs"] for part in found["by_length_difference"]]
    assert len(bins) > 1
    assert sum(bins) == 24
    assert found["training_set"]["num_contradictory"] == 2, "both of them"
    assert found["leakage"]["num_same_prompt"] == 1
    assert {one["name"] for one in found["sensitivity"]} >= {"flattery", "truncated"}

    missing = laurel([*asked[:-1], str(tmp_path / "nothing.jsonl")])
    assert missing.returncode == 2
    assert "nothing.jsonl" in missing.stderr


@pytest.mark.slow
def test_broken_rows_of_training_sets_are_counted_and_of_evaluations_refused(
    laurel, model, tmp_path
):
    rows = pair_rows()
    data = write(tmp_path / "held_out.jsonl", rows)
    broken = write(tmp_path / "broken.jsonl", [*rows[:10], {"prompt": "q?", "chosen": "a"}])
    broken.write_text(broken.read_text() + '{"prompt": "', encoding="utf-8")
    asked = ["eval", "pairs", "-m", str(model), "-d", str(data), "--train-data", str(broken)]
    done = laurel([*asked, "--json"])
    assert done.returncode == 0, done.stderr
    said = (
        f"{broken}: 2 of 12 rows are malformed (e.g. broken.jsonl:11: missing key 'rejected') and "
        "left out"
    )
    assert said in done.stderr
    found = json.loads(done.stdout)["diagnostics"]["training_set"]
    assert (found["num_pairs"], found["notes"]) == (10, [said])

    broken.write_text(broken.read_text() + "\n{" * 10, encoding="utf-8")
    done = laurel(asked)
    assert done.returncode == 2
    assert "12 of 22 rows are malformed" in done.stderr
    assert "checked golden scores" not in done.stderr, "before a model is loaded"

    done = evaluate(laurel, "pairs", model, broken)
    assert done.returncode == 2
    assert "broken.jsonl:11: the row has no 'rejected'" in done.stderr
    assert f"laurel data check {broken}" in done.stderr
    assert "as for laurel rm (data.prompt_key=COLUMN" in done.stderr


@pytest.mark.slow
def test_pairs_whose_columns_have_other_names(laurel, model, tmp_path):
    names = {"prompt": "Frage (user)", "chosen": "gut", "rejected": "schlecht"}
    rows = pair_rows()
    asked = ["eval", "pairs", "-m", str(model), "--json", "-d"]
    usual = laurel([*asked, str(write(tmp_path / "usual.jsonl", rows))])
    renamed = [{names[key]: row[key] for key in names} for row in rows]
    keys = [f"data.{key}_key={name}" for key, name in names.items()]
    data = str(write(tmp_path / "renamed.jsonl", [*renamed, renamed[0]]))
    done = laurel([*asked, data, *keys])
    assert done.returncode == 0, done.stderr
    assert (
        "note    1 row says exactly what an earlier row said; laurel rm leaves such rows out"
        in done.stderr
    )
    final = json.loads(done.stdout)["final"]
    assert final["num_rows"] == json.loads(usual.stdout)["final"]["num_rows"] + 1
    scored = laurel(["score", data, "-m", str(model), "--json", *keys])
    assert scored.returncode == 0, scored.stderr
    first = json.loads(scored.stdout.splitlines()[0])
    assert first["scores"] == pytest.approx(
        [own_scores(model, rows[:1], key)[0] for key in ("chosen", "rejected")], abs=1e-5
    )
    told = laurel(["score", data, "-m", str(model), "data.prompt_key=nobody"])
    assert "renamed.jsonl:1: the row has no 'nobody'; its keys are: Frage (user)" in told.stderr
    told = laurel(["score", data, "-m", str(model), "rm.seed=1"])
    assert told.returncode == 2
    assert "only the columns of rows can be named: data.prompt_key=COLUMN" in told.stderr


@pytest.mark.slow
def test_members_noise_and_another_language(laurel, model, other_model, tmp_path):
    rows = pair_rows()
    data = write(tmp_path / "held_out.jsonl", rows)
    # Whoever has translated the rows has not changed what they say: here every third changed sides.
    said = [
        {**row, "chosen": row["rejected"], "rejected": row["chosen"]} if n % 3 == 0 else row
        for n, row in enumerate(rows)
    ]
    translated = write(tmp_path / "translated.jsonl", said)
    asked = ["eval", "pairs", "-m", str(model), "-d", str(data)]
    others = ["--member", str(other_model), "--other-language", str(translated)]
    done = laurel([*asked, *others, "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["diagnostics"]

    def verdicts(of):
        sides = [own_scores(of, rows, key) for key in ("chosen", "rejected")]
        return [a > b for a, b in zip(*sides, strict=True)]

    ours, theirs = verdicts(model), verdicts(other_model)
    (agreement,) = found["agreement"]
    assert (agreement["first"], agreement["second"]) == (str(model), str(other_model))
    assert agreement["num_pairs"] == len(rows)
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    assert agreement["same_verdict_share"] == pytest.approx(same / len(rows))

    (language,) = found["sensitivity"]
    assert (language["name"], language["num_pairs"]) == ("other language", len(rows))
    assert language["flip_share"] == pytest.approx(len(rows[::3]) / len(rows))
    assert 0 < found["noise_floor"]["noise"] < 1e-4
    assert found["noise_floor"]["within_share"] == 0

    short = write(tmp_path / "short.jsonl", said[:5])
    missing = laurel([*asked, "--other-language", str(short)])
    assert (missing.returncode, "24 pairs and 5" in missing.stderr) == (2, True), missing.stderr
    twice = laurel([*asked, "--member", str(model)])
    assert (twice.returncode, "agrees with itself" in twice.stderr) == (2, True), twice.stderr
    absent = laurel([*asked, "--member", str(tmp_path / "absent")])
    assert (absent.returncode, "absent" in absent.stderr) == (2, True), absent.stderr


@pytest.mark.slow
def test_a_running_server_scores_and_its_failures_are_counted(laurel, tmp_path):
    data = write(tmp_path / "rows.jsonl", pair_rows())

    with RewardServer(poison="laurel,") as server:  # which only wrong answers have
        done = evaluate(
            laurel, "reward-bench", server.url, data, "-o", str(tmp_path / "out"), "--json"
        )
    assert done.returncode == 1
    failed = [row for row in pair_rows() if "laurel, " in row["rejected"]]
    assert 0 < len(failed) < 24
    assert f"FAILED  {len(failed)} of 48 completions have no score" in done.stderr
    assert f"the first: {data}:{failed[0]['id'] + 1}: not finite" in done.stderr
    report = json.loads(done.stdout)
    assert report["num_failures"] == len(failed)
    assert report["final"]["num_rows"] == 24 - len(failed)
    assert report["final"]["num_failures"] == len(failed)
    scores = json.loads((tmp_path / "out" / "reward-bench-scores.json").read_text())
    missing = [one is None for one in scores["results"]]
    assert missing == [row in failed for row in pair_rows()]
    assert [one is None for one in scores["scores_rejected"]] == missing


GOOD = pair_rows()[:3]
WRONG: dict[str, tuple[str, list[Any], list[str]]] = {
    "a row without an answer": (
        "reward-bench",
        [*GOOD, {"id": 9, "subset": "hep-go", "prompt": "q", "chosen": "a"}],
        [
            "rows.jsonl:4: the row has no 'rejected'; its keys are: id, subset, prompt, chosen",
            'A row of RewardBench is {"id", "subset", "prompt", "chosen", "rejected"}',
        ],
    ),
    "no JSON": (
        "best-of-n",
        ['{"prompt": '],
        ["rows.jsonl:1: column 13: not JSON"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_cannot_be_used(laurel, model, tmp_path, case):
    name, rows, expected = WRONG[case]
    data = write(tmp_path / "rows.jsonl", rows)
    message = refused(laurel, [name, "-m", str(model), "-d", str(data)])
    for text in expected:
        assert text in message


@pytest.mark.slow
def test_other_things_that_cannot_be_used(laurel, model, tmp_path):
    data = str(write(tmp_path / "rows.jsonl", GOOD))
    assert "no reward model is named" in refused(laurel, ["reward-bench", "-d", data])
    gone = ["reward-bench", "-m", str(tmp_path / "gone"), "-d", data]
    assert "there is no such directory" in refused(laurel, gone)
    assert "rows.jsonl is a file; name a directory" in refused(
        laurel, ["reward-bench", "-m", str(model), "-d", data, "-o", data]
    )
    assert f"cannot be made: {data} is a file" in refused(
        laurel, ["reward-bench", "-m", str(model), "-d", data, "-o", f"{data}/deep/er"]
    )
    assert "no data is named; add --data" in refused(laurel, ["best-of-n", "-m", str(model)])
    assert "which pairs?" in refused(laurel, ["pairs", "-m", str(model)])
    missing = refused(laurel, ["reward-bench", "-m", str(model), "-d", str(tmp_path / "row.jsonl")])
    assert "does not exist in" in missing
    assert "there is rows.jsonl" in missing
    nobody = refused(laurel, ["reward-bench", "-m", "http://127.0.0.1:9", "-d", data])
    assert "--model http://127.0.0.1:9/v1/score does not answer" in nobody
    assert "env.reward_model" not in nobody
    keyless = ["reward-bench", "-m", "http://127.0.0.1:9", "-d", data, "--api-key-env", "NO_SUCH"]
    assert "--api-key-env NO_SUCH: there is no such environment variable" in refused(
        laurel, keyless
    )
    assert "--model" in refused(laurel, ["reward-bench", "-m", "http://", "-d", data])


def test_results_that_cannot_be_compared(laurel, tmp_path):
    good = tmp_path / "good.json"
    good.write_text(json.dumps({"model": "m", "hep-go": 0.5}))
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert "bad.json holds no results" in refused(
        laurel, ["reward-bench", "--compare", str(good), str(bad)]
    )
    assert "is a result of laurel eval reward-bench" in refused(
        laurel, ["judge-bench", "--compare", str(good), str(good)]
    )
    assert "gone.json cannot be read" in refused(
        laurel, ["reward-bench", "--compare", str(good), str(tmp_path / "gone.json")]
    )
