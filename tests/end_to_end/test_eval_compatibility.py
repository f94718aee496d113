"""`laurel eval` with the reference's own formatting, of all benchmarks, and by given margins."""

import json

import pytest

from eval_rows import WORDS, accuracies, evaluate, list_rows, pair_rows, refused, write
from laurel.models.tokenizer import CHATML
from model_directories import save_model
from tiny import tiny_classifier
from tiny_tokenizers import make_tokenizer


@pytest.fixture(scope="module")
def model(reward_model):
    return reward_model


def bos_model(directory):
    """A model with BOS twice, as other programs save it."""
    tokenizer = make_tokenizer(
        template="{{ bos_token }}" + CHATML, eos="<|im_end|>", more=("<|im_start|>",), adds_bos=True
    )
    network = tiny_classifier(
        "qwen3", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    return save_model(directory, network, tokenizer)


@pytest.mark.slow
def test_the_references_format_and_where_it_differs(laurel, tmp_path):
    model = bos_model(tmp_path / "model")
    data = write(tmp_path / "rows.jsonl", pair_rows())
    asked = ["eval", "reward-bench", "-m", str(model), "-d", str(data), "--json"]
    plain = laurel(asked)
    assert plain.returncode == 0, plain.stderr
    told = {}
    for length in (2048, 50):
        done = laurel([*asked, "--compatibility", "rewardbench", "--max-length", str(length)])
        assert done.returncode == 0, done.stderr
        told[length] = json.loads(done.stdout)
    report = told[2048]
    assert report["compatibility"] == {
        "program": "rewardbench 0.1.4, scripts/run_rm.py",
        "max_length": 2048,
        "truncation_side": "left",
        "num_rows": 24,
        "num_rows_read_differently": 0,
        "num_completions": 48,
        "num_completions_read_differently": 0,
        "reasons": {"BOS doubled, the first hidden": {"num_rows": 24, "num_completions": 48}},
    }
    assert accuracies(report) == accuracies(json.loads(plain.stdout)), "a hidden BOS is not read"
    assert report["final"]["by_contract"] == report["final"]["value"]
    assert "by_contract" not in json.loads(plain.stdout)["final"]
    assert told[50]["num_truncated"] == 44
    assert "--max-length is not used" not in done.stderr

    shown = laurel([*asked[:-1], "--compatibility", "rewardbench"])
    assert "by contract" in shown.stdout
    assert "other tokens than by the scoring contract in 24 of 24 rows (48 answers)" in shown.stdout
    assert "BOS doubled, the first hidden: 24 rows (48 answers)" in shown.stdout
    lists = write(tmp_path / "lists.jsonl", list_rows())
    second = evaluate(
        laurel, "reward-bench-2", model, lists, "--json", "--compatibility", "rewardbench"
    )
    assert second.returncode == 0, second.stderr
    found = json.loads(second.stdout)["compatibility"]
    assert found["program"].endswith("scripts/run_v2.py")
    assert (found["truncation_side"], found["num_rows"]) == ("right", 14)


@pytest.mark.slow
def test_both_figures_where_the_model_reads_other_tokens(laurel, model, tmp_path):
    rows = [{**row, "prompt": f"{row['prompt']} {'So it goes. ' * 12}"} for row in pair_rows()]
    data = write(tmp_path / "rows.jsonl", rows)
    asked = ["eval", "reward-bench", "-m", str(model), "-d", str(data), "--json"]
    own, other = laurel(asked), laurel([*asked, "--compatibility", "rewardbench"])
    assert other.returncode == 0, other.stderr
    report, plain = json.loads(other.stdout), json.loads(own.stdout)
    assert plain["num_truncated"] == 48, "to the 64 tokens of the model's contract"
    assert report["num_truncated"] == 0
    assert report["compatibility"]["num_rows_read_differently"] == 24
    assert report["compatibility"]["reasons"]["cut differently"]["num_rows"] == 24
    by_contract = {one["name"]: one["by_contract"] for one in report["subsets"]}
    assert by_contract == accuracies(plain)
    assert accuracies(report) != accuracies(plain)


@pytest.mark.slow
def test_all_benchmarks_whose_rows_are_at_hand(laurel, model, tmp_path):
    pairs = [{"prompt": "q?", "chosen": WORDS[i], "rejected": WORDS[i + 1]} for i in range(3)]
    files = {"reward-bench": pair_rows(), "reward-bench-2": list_rows(), "pairs": pairs}
    named = [
        part
        for name, rows in files.items()
        for part in ("-d", str(write(tmp_path / f"{name}.jsonl", rows)))
    ]
    asked = ["eval", "all", "-m", str(model), *named]
    done = laurel([*asked, "-o", str(tmp_path / "out"), "--json"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("token forest") == 1, "the model is loaded once"
    report = json.loads(done.stdout)
    assert [one["benchmark"] for one in report["summary"]] == list(files)
    assert report["absent"] == ["rm-bench", "judge-bench", "best-of-n"]
    for name in files:
        alone = evaluate(laurel, name, model, tmp_path / f"{name}.jsonl", "--json")
        expected = json.loads(alone.stdout)
        found = report["benchmarks"][name]
        assert {**found, "seconds": 0} == {**expected, "seconds": 0}
        assert json.loads((tmp_path / "out" / f"{name}-report.json").read_text()) == found
        (line,) = (one for one in report["summary"] if one["benchmark"] == name)
        assert line["score"] == expected["final"]["value"]
    assert json.loads((tmp_path / "out" / "all-report.json").read_text()) == report

    shown = laurel(asked)
    assert shown.returncode == 0, shown.stderr
    assert "absent  RM-Bench (rm-bench), JudgeBench (judge-bench), Best of n" in shown.stdout
    assert "RewardBench 2:" in shown.stdout


@pytest.mark.slow
def test_what_all_cannot_use(laurel, model, tmp_path):
    message = refused(laurel, ["all", "-m", str(model)])
    assert "no rows are named; add --data" in message
    assert "--hub" in message
    strange = write(tmp_path / "rows.jsonl", [{"text": "a"}])
    message = refused(laurel, ["all", "-m", str(model), "-d", str(strange)])
    assert "rows.jsonl:1: the columns (text) are those of no benchmark" in message
    assert "no reward model is named" in refused(laurel, ["all", "-d", str(strange)])
    # A row further down is told before the model is loaded.
    mixed = write(tmp_path / "mixed.jsonl", [pair_rows()[0], {"text": "a"}])
    message = refused(laurel, ["all", "-m", str(model), "-d", str(mixed)])
    assert "mixed.jsonl:2: the row has no 'prompt'" in message


@pytest.mark.slow
def test_accuracy_by_given_margins(laurel, model, tmp_path):
    rows = [{**row, "better": i % 4, "worse": 0} for i, row in enumerate(pair_rows())]
    data = write(tmp_path / "rows.jsonl", rows)
    asked = ["eval", "pairs", "-m", str(model), "-d", str(data), "--json"]
    done = laurel([*asked, "--margin-key", "better-worse"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["diagnostics"]["by_margin"]
    assert len(found) > 1
    assert sum(part["accuracy"]["num_pairs"] for part in found) == 24
    assert "diagnostics" not in json.loads(laurel(asked).stdout)
    assert "margin" in refused(laurel, [*asked[1:], "--margin-key", "nothing"])
