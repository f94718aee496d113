"""`laurel sft` from conversations to a model that answers like them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from policy_runs import metrics_of, sft, sft_settings
from runs import write_rows

ANSWERS = ("red", "blue", "green")
ROWS = [
    {"input": f"Colour of {word}?", "output": ANSWERS[i % 3]}
    for i, word in enumerate(("blood", "sky", "grass", "wine", "sea", "leaf"))
]


def answer(directory, question):
    """What the saved model says, with nothing but transformers, as its card shows."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    said = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(said)


def test_it_learns_to_answer_and_to_stop(tmp_path):
    write_rows(tmp_path / "demonstrations.jsonl", ROWS * 4)
    first = sft(
        sft_settings(
            tmp_path / "first",
            f"data.train_data_path={tmp_path}/demonstrations.jsonl",
            "sft.max_num_epochs=60",
            "data.split_validation_size=0",
        )
    )
    saved = first.outcome.latest
    assert saved is not None
    assert [answer(saved, row["input"]) for row in ROWS] == [row["output"] for row in ROWS]
    losses = [
        figures["train/loss"] for step, figures in sorted(metrics_of(tmp_path / "first").items())
    ]
    assert losses[0] > 4
    assert losses[-1] < 0.1
    # From that model on, to another answer.
    others = [row | {"output": "blue"} for row in ROWS]
    write_rows(tmp_path / "others.jsonl", others * 4)
    second = sft(
        sft_settings(
            tmp_path / "second",
            f"data.train_data_path={tmp_path}/others.jsonl",
            "policy.dtensor_cfg.lora_cfg.enabled=true",
            "sft.max_num_epochs=60",
            "data.split_validation_size=0",
            model=saved,
        )
    ).outcome.latest
    assert second is not None
    assert [answer(second, row["input"]) for row in others] == [row["output"] for row in others]


def test_what_is_measured_and_what_is_left_out(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "more"},
                {"role": "assistant", "content": "no"},
            ]
        }
        for i in range(16)
    ]
    rows.append(
        {
            "messages": [
                {"role": "user", "content": "long " * 200},
                {"role": "assistant", "content": "never seen"},
            ]
        }
    )
    path = write_rows(tmp_path / "rows.jsonl", rows)
    common = [
        "data.dataset_name=openai_format",
        f"data.train_data_path={path}",
        f"data.val_data_path={path}",
        "sft.val_period=1",
        "sft.max_num_epochs=1",
    ]
    done = sft(sft_settings(tmp_path / "all", *common))
    figures = metrics_of(tmp_path / "all")[1]
    assert {"train/loss", "train/grad_norm", "train/lr", "train/epoch"} <= set(figures)
    assert figures["validation-default/num_valid_samples"] == 16
    assert figures["validation-default/perplexity"] == pytest.approx(
        torch.tensor(figures["validation-default/loss"]).exp().item(), rel=1e-5
    )
    report = json.loads(
        (tmp_path / "all" / "logs" / "exp_001" / "data_report.json").read_text("utf-8")
    )
    assert "nothing to learn" in json.dumps(report["train"])
    assert done.outcome.best is not None
    last = sft(sft_settings(tmp_path / "last", *common, "sft.only_unmask_final=true"))
    assert last.outcome.ended == "finished"
    final = metrics_of(tmp_path / "last")[1]
    valid = "validation-default/num_valid_tokens"
    assert 0 < final[valid] < figures[valid]


def test_only_the_first_batches_of_a_validation_set_are_used(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    limit = ("sft.val_batches=1", "sft.val_global_batch_size=4", "sft.max_num_steps=1")
    data = (f"data.train_data_path={path}", f"data.val_data_path={path}")
    sft(sft_settings(tmp_path, *data, "data.split_validation_size=0", *limit, "sft.val_period=1"))
    assert metrics_of(tmp_path)[1]["validation-default/num_valid_samples"] == 4
