"""`laurel rm` as a whole: what it measures, keeps, refuses to learn from, and learns."""

import json
import math
from shutil import rmtree

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import threads
from laurel.models.checkpoint.store import verify
from laurel.observe.loggers import read_metrics
from runs import (
    DIALOGUES,
    GOOD,
    ROOT,
    dialogue_rows,
    pairs,
    ranked,
    run,
    series,
    settings,
    train,
    write_rows,
)

one_thread = threads.one_thread

TRAIN_NAMES = (
    "loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "num_valid_samples",
    "grad_norm",
    "lr",
    "global_valid_seqs",
    "global_valid_toks",
)
VALIDATION_NAMES = (
    "loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "num_valid_samples",
)


@pytest.fixture(scope="module")
def two_sets(tmp_path_factory):
    """A run with two named validation sets of two classes."""
    directory = tmp_path_factory.mktemp("two-sets")
    easy = write_rows(directory / "easy.jsonl", pairs(10, seed=1))
    lists = write_rows(
        directory / "lists.jsonl",
        [
            ranked(f"list {i}?", {f"{word} {i}": rank for rank, word in enumerate(GOOD)})
            for i in range(6)
        ],
    )
    rows = write_rows(directory / "train.jsonl", pairs(40))
    named = f"{{Easy: {easy}, Lists: {{dataset_name: PreferenceDataset, data_path: {lists}}}}}"
    changes = [
        "data.split_validation_size=0",
        f"data.val_data_paths={named}",
        "rm.val_at_start=true",
    ]
    train(settings(directory, *changes, rows=rows))
    return directory


def test_metrics_have_the_names_of_nemo_rl(two_sets):
    lines = read_metrics(two_sets / "logs" / "exp_001" / "metrics.jsonl")
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    for line in steps:
        assert {f"train/{name}" for name in TRAIN_NAMES} <= line.keys()
        assert line["timing/train/total_step_time"] > 0
        assert line["train/num_valid_samples"] == 8
        assert line["train/global_valid_seqs"] == 16
    validations = [line for line in lines if "validation-Easy/loss" in line]
    assert [line["step"] for line in validations] == [0, 5]
    for line in validations:
        for name in ("Easy", "Lists"):
            assert {f"validation-{name}/{metric}" for metric in VALIDATION_NAMES} <= line.keys()
        assert line["validation-Easy/num_valid_samples"] == 10
        assert line["validation-Lists/num_valid_samples"] == 6 * 6  # the pairs of lists of four
        parts = [line[f"timing/validation-{n}/total_validation_time"] for n in ("Easy", "Lists")]
        assert line["timing/validation/total_validation_time"] == pytest.approx(sum(parts))
    (saving,) = [line for line in lines if "timing/train/checkpointing" in line]
    assert saving["step"] == 5
    known = ("train/", "validation-", "timing/", "performance/")
    assert all(k in ("step", "time") or k.startswith(known) for line in lines for k in line)


def test_the_data_report_is_kept_with_the_run(two_sets):
    path = two_sets / "logs" / "exp_001" / "data_report.json"
    reports = json.loads(path.read_text(encoding="utf-8"))
    assert set(reports) == {"train", "validation-Easy", "validation-Lists"}
    for report in reports.values():
        left_out = sum(reason["count"] for reason in report["rows_left_out"].values())
        assert report["rows_read"] == report["rows_kept"] + left_out > 0


def test_what_a_checkpoint_says_of_itself(two_sets):
    saved = two_sets / "saves" / "step_5"
    info = json.loads((saved / "training_info.json").read_text(encoding="utf-8"))
    expected = {"epoch": 0, "step": 0, "total_steps": 5, "consumed_samples": 40}
    assert {name: info[name] for name in expected} == expected
    for name in ("Easy", "Lists"):
        for metric in VALIDATION_NAMES:
            logged = series(two_sets, f"validation-{name}/{metric}")[5]
            assert info[f"validation-{name}_{metric}"] == logged
    card = (saved / "README.md").read_text(encoding="utf-8")
    assert "validation-Easy_accuracy" in card
    assert "easy.jsonl: 10 of 10 rows" in card
    (golden, *_) = json.loads((saved / "scoring.json").read_text(encoding="utf-8"))["golden"]
    assert golden["messages"][0]["content"].startswith("question 1-")


@pytest.mark.slow_parameters("checkpointing.metric_name=null")
@pytest.mark.parametrize(
    ("change", "key", "best"),
    [
        # The loss of a run that learns falls, so the highest is that of the first save.
        ("checkpointing.metric_name=auto", "validation-Easy_loss", 5),
        ("checkpointing.metric_name=null", None, None),
    ],
)
def test_what_checkpoints_are_ranked_by(tmp_path, two_sets, change, key, best):
    named = (
        f"{{Easy: {two_sets}/easy.jsonl, "
        f"Lists: {{dataset_name: PreferenceDataset, data_path: {two_sets}/lists.jsonl}}}}"
    )
    changes = ["data.split_validation_size=0", f"data.val_data_paths={named}", "rm.val_period=3"]
    done = train(
        settings(
            tmp_path, *changes, "checkpointing.save_period=2", change, rows=two_sets / "train.jsonl"
        )
    )
    for step in (2, 4, 5):
        manifest = verify(tmp_path / "saves" / f"step_{step}")
        assert manifest.metric_name == key
        if key is None:
            assert manifest.metric is None
        else:
            kind, _, name = key.partition("_")
            logged = series(tmp_path, f"{kind}/{name}")[step]
            assert manifest.metric == pytest.approx(logged, rel=1e-12)
    if best is not None:
        assert done.outcome.best == tmp_path / "saves" / f"step_{best}"
    assert (done.outcome.best is None) == (key is None)


def test_without_checkpoints_nothing_is_saved(tmp_path):
    done = train(settings(tmp_path, "checkpointing.enabled=false"))
    assert done.outcome.latest is None
    assert done.outcome.best is None
    assert not (tmp_path / "saves").exists()
    assert series(tmp_path, "validation-default/accuracy")


def last(directory, name):
    figures = series(directory, name)
    return figures[max(figures)]


def test_on_two_threads_it_learns_the_same(tmp_path):
    """The other tests have one."""
    losses = []
    for number in (1, 2):
        changes = ("rm.max_num_steps=3", "rm.val_period=0", f"cluster.cpu_threads={number}")
        train(settings(tmp_path / str(number), "checkpointing.keep_top_k=null", *changes))
        assert torch.get_num_threads() == number
        losses.append(series(tmp_path / str(number), "train/loss"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 3


def test_it_learns_a_rule_and_hugging_face_agrees_on_every_score(tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", pairs(30, seed=9))
    rows = write_rows(tmp_path / "train.jsonl", pairs(120))
    changes = ["data.split_validation_size=0", f"data.val_data_path={held_out}"]
    done = train(settings(tmp_path, *changes, rows=rows))
    assert last(tmp_path, "validation-default/accuracy") >= 0.9

    best = done.outcome.best
    assert best is not None
    tokenizer = AutoTokenizer.from_pretrained(best)
    model = AutoModelForSequenceClassification.from_pretrained(best).eval()
    assert model.config.num_labels == 1
    chosen, rejected = [], []
    for row in pairs(30, seed=9):
        for side, scores in (("chosen", chosen), ("rejected", rejected)):
            messages = [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row[side]},
            ]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            batch = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                scores.append(float(model(**batch).logits[0, 0]))
    mean = math.fsum(chosen) / 30
    step = int(best.name.removeprefix("step_"))
    logged = series(tmp_path, "validation-default/rewards_chosen_mean")[step]
    assert mean == pytest.approx(logged, abs=1e-5)
    accuracy = sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 30
    assert accuracy == series(tmp_path, "validation-default/accuracy")[step]
    for golden in json.loads((best / "scoring.json").read_text(encoding="utf-8"))["golden"]:
        text = tokenizer.apply_chat_template(golden["messages"], tokenize=False)
        batch = tokenizer(
            [text, text + " and more"], padding=True, return_tensors="pt", add_special_tokens=False
        )
        with torch.no_grad():
            score = float(model(**batch).logits[0, 0])
        assert score == pytest.approx(golden["values_K"][0], abs=1e-5)


@pytest.mark.slow
def test_ties_are_learned_from(tmp_path):
    drawn = pairs(90)
    ties = [
        ranked(row["prompt"], {row["chosen"]: 0, f"{GOOD[0]} as well": 0}) for row in drawn[:30]
    ]
    rows = [ranked(row["prompt"], {row["chosen"]: 0, row["rejected"]: 1}) for row in drawn[30:]]
    rows += ties
    path = write_rows(tmp_path / "rows.jsonl", rows)
    changes = [
        "data.dataset_name=PreferenceDataset",
        "rm.loss.type=davidson",
        "rm.max_num_epochs=5",
    ]
    done = train(settings(tmp_path, *changes, rows=path))
    assert last(tmp_path, "train/loss") < series(tmp_path, "train/loss")[1]
    assert last(tmp_path, "validation-default/accuracy") >= 0.9
    assert sum(series(tmp_path, "train/num_valid_samples").values()) < sum(
        seqs / 2 for seqs in series(tmp_path, "train/global_valid_seqs").values()
    ), "ties have no right side, and are trained on"
    assert "tied pairs" in done.text


@pytest.mark.slow
def test_a_regression_head_learns_ratings(tmp_path):
    rows = [
        {
            "context": [{"role": "user", "content": row["prompt"]}],
            "completions": [
                rated(row["chosen"], 0, {"help": 4.0, "tone": 1.0}),
                rated(row["rejected"], 1, {"help": 1.0, "tone": 3.0}),
            ],
        }
        for row in pairs(80)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    changes = [
        "data.dataset_name=PreferenceDataset",
        "rm.loss.type=regression",
        "rm.max_num_epochs=10",
        "policy.reward_model_cfg.reward_model_type=regression",
        "policy.reward_model_cfg.attributes=[help, tone]",
        "policy.reward_model_cfg.attribute_weights=[1.0, 0.0]",
        "checkpointing.metric_name=validation-default_mse/help",
        "policy.optimizer.kwargs.lr=2e-2",
    ]
    done = train(settings(tmp_path, *changes, rows=path))
    assert last(tmp_path, "validation-default/mse/help") < 0.3
    assert last(tmp_path, "validation-default/pearson/tone") > 0.9
    assert last(tmp_path, "validation-default/accuracy") >= 0.9
    assert done.outcome.best is not None
    model = AutoModelForSequenceClassification.from_pretrained(done.outcome.best)
    assert model.config.num_labels == 2


def rated(text, rank, ratings):
    answer = [{"role": "assistant", "content": text}]
    return {"rank": rank, "completion": answer, "attributes": ratings}


def test_lora_trains_the_adapters_and_the_head_alone(tmp_path):
    changes = [
        "policy.dtensor_cfg.lora_cfg.enabled=true",
        "rm.max_num_epochs=3",
        "checkpointing.keep_top_k=null",
    ]
    train(settings(tmp_path, *changes))
    early, late = (
        load_file(tmp_path / "saves" / f"step_{s}" / "model.safetensors") for s in (5, 12)
    )
    changed = {name for name in early if not torch.equal(early[name], late[name])}
    adapted = {name for name in early if "_proj." in name}
    assert changed == adapted | {"score.weight"}
    adapters = load_file(tmp_path / "saves" / "step_12" / "adapter" / "adapters.safetensors")
    assert all("lora_" in name or name == "score.weight" for name in adapters)
    assert torch.equal(adapters["score.weight"], late["score.weight"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saves" / "step_12")
    assert torch.equal(model.score.weight, late["score.weight"])


def test_the_form_of_the_seeds(tmp_path):
    """`python examples/run_rm.py --config FILE key=value`, with a file of their sections."""
    rows = write_rows(tmp_path / "train.jsonl", pairs(40))
    (tmp_path / "base.yaml").write_text(
        "policy:\n  model_name: null\n  scratch: {hidden_size: 16, num_layers: 1, num_heads: 2, "
        "vocab_size: 400}\n  precision: float32\n  max_total_sequence_length: 128\n"
        "  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}\n"
        "  megatron_cfg: {enabled: false}\ncluster: {gpus_per_node: 1, num_nodes: 1}\n",
        encoding="utf-8",
    )
    (tmp_path / "rm.yaml").write_text(
        "defaults: base.yaml\n"
        "rm: {max_num_epochs: 1, max_num_steps: -1, val_period: 2, val_batches: -1}\n"
        "data:\n  dataset_name: BinaryPreferenceDataset\n"
        f"  train_data_path: {rows}\n  val_data_paths: {{Held: {rows}}}\n"
        "  max_input_seq_length: ${policy.max_total_sequence_length}\n"
        "checkpointing: {metric_name: 'val:validation-Held_loss', higher_is_better: false,\n"
        "  keep_top_k: 3, save_period: '${rm.val_period}', checkpoint_dir: results}\n"
        "logger: {log_dir: logs, tensorboard_enabled: false, monitor_gpus: false}\n",
        encoding="utf-8",
    )
    overrides = [
        "--config",
        str(tmp_path / "rm.yaml"),
        "policy.train_global_batch_size=8",
        "++rm.seed=7",
        "cluster.cpu_threads=1",
    ]
    done = run(overrides, program=[str(ROOT / "examples" / "run_rm.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning: these keys mean nothing here" in done.stdout
    assert "policy.megatron_cfg" in done.stdout
    assert "finished after step 5" in done.stdout
    assert sorted(p.name for p in (tmp_path / "results").glob("step_*")) == [
        "step_2",
        "step_4",
        "step_5",
    ]
    resolved = (tmp_path / "logs" / "exp_001" / "config.yaml").read_text(encoding="utf-8")
    assert "seed: 7" in resolved
    assert (tmp_path / "results" / "step_5" / "config.yaml").read_text(encoding="utf-8") == resolved


@pytest.mark.slow
def test_rows_of_one_dialogue_meet_and_a_run_of_them_resumes(tmp_path):
    rows = dialogue_rows()
    changes = [*DIALOGUES, "rm.max_num_steps=4", "checkpointing.save_period=2"]
    tokens = {}
    for grouped in ("false", "true"):
        place = tmp_path / grouped
        place.mkdir()
        file = write_rows(place / "rows.jsonl", rows)
        overrides = settings(place, *changes, f"data.group_by_prefix={grouped}", rows=file)
        train(overrides)
        tokens[grouped] = series(place, "performance/computed_tokens")
    # Each step has two whole dialogues, and four steps have all rows once.
    assert len(set(tokens["true"].values())) == 1
    assert sum(tokens["true"].values()) < 0.8 * sum(tokens["false"].values())
    whole = series(tmp_path / "true", "train/loss")
    rmtree(tmp_path / "true" / "saves" / "step_4")
    train(overrides)
    assert (tmp_path / "true" / "saves" / "step_4").is_dir()
    assert series(tmp_path / "true", "train/loss") == whole
