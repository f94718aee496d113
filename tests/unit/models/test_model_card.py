"""The README of a model: what it says, what it leaves out, and that its programs do as it says."""

import contextlib
import re

import pytest
import torch
import yaml

import tiny
import tiny_tokenizers as made
from laurel.errors import CheckpointError
from laurel.models.checkpoint.card import (
    FACTS,
    CardFacts,
    EvaluationRow,
    EvaluationTable,
    policy_card,
    reward_model_card,
)
from laurel.models.checkpoint.export import save_reward_model
from laurel.models.scoring import ScoringContract
from laurel.models.spec import hub_name
from laurel.rewards.scorer import LocalScorer
from laurel.types import Message, group_of

METRICS = {
    "validation-easy_accuracy": 0.75,
    "validation-easy_longer_wins_baseline": 0.5,
    "validation-easy_num_valid_samples": 8.0,
    "validation-hard_accuracy": 0.25,
    "train_loss": 0.5,
}


def contract_of(tokenizer=None, **changes):
    options = {"max_length": 512, "truncation_side": "left", "append_eos": True, **changes}
    return ScoringContract.create(tokenizer or made.chatml(), **options)


def test_a_card_about_nothing_leaves_out_what_it_cannot_say():
    card = reward_model_card(CardFacts(), contract_of())
    headings = re.findall(r"^## (.*)$", card, flags=re.MULTILINE)
    assert headings == ["Intended use", "Limits", "How it scores", "Licence", "Use"]
    for word in ("N/A", "None", "not recorded", "Made with", "reference set", "golden", "Saved"):
        assert word not in card, word


def test_the_front_matter_is_yaml_and_names_a_base_only_where_the_hub_has_it():
    def front(**facts):
        return yaml.safe_load(reward_model_card(CardFacts(**facts), contract_of()).split("---")[1])

    assert front(base_model="a: b # c") == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["reward-model", "laurel"],
    }
    assert front(hub_base="Qwen/Qwen3-0.6B")["base_model"] == "Qwen/Qwen3-0.6B"


def test_a_name_is_the_hubs_unless_there_is_such_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    (tmp_path / "results" / "rm").mkdir(parents=True)
    assert hub_name("results/rm") is None
    assert hub_name(str(tmp_path)) is None
    assert hub_name(None) is None


def test_an_accuracy_stands_beside_the_baseline_of_its_set():
    card = reward_model_card(CardFacts(metrics=METRICS), contract_of())
    assert "| easy | 0.75 | 0.5 |  | 8 |" in card
    assert "| hard |" not in card  # it has no baseline
    for name, value in METRICS.items():
        # One batch of training says little about the model.
        assert (f"| {name} | {value:.4g} |" in card) == (not name.startswith("train_"))


def test_figures_that_are_not_finite_are_no_figures():
    facts = CardFacts().measured({"a": float("nan"), "b": float("inf"), "c": 1.5})
    assert facts.metrics == {"c": 1.5}


def test_figures_stand_beside_those_before_training():
    facts = CardFacts().measured({"a": 0.75, "b": 2.0}, before={"a": 0.25})
    assert "| a | 0.25 | 0.75 |\n| b |  | 2 |" in policy_card(facts)
    alone = CardFacts().measured({"a": 0.75})
    assert "the model was not validated before it" in policy_card(alone)


def test_evaluations_have_tables_with_the_baseline_and_the_failures():
    rows = (
        EvaluationRow(name="Chat | Hard", value=0.5, longer_wins=0.25, num_rows=4, num_failures=0),
        EvaluationRow(name="final", value=0.625, longer_wins=None, num_rows=8, num_failures=2),
    )
    table = EvaluationTable(
        title="Bench",
        data=("rows.jsonl",),
        num_rows=8,
        rows=rows,
        notes=("a subset\nis not whole",),
    )
    card = reward_model_card(CardFacts(), contract_of(), evaluations=[table])
    assert "## Bench\n\nRows: rows.jsonl (8).\n" in card
    assert "| Chat \\| Hard | 0.5 | 0.25 | 4 | 0 |" in card
    assert "| final | 0.625 |  | 8 | 2 |" in card
    assert "a subset is not whole" in card


@pytest.mark.parametrize(
    ("make", "token"),
    [
        (made.chatml, "`\\n`"),
        (made.llama_31, "`<|eot|>`"),
        (lambda: made.make_tokenizer(template=made.BARE), "`</s>`"),
    ],
)
def test_it_names_the_token_that_the_score_is_read_from(make, token):
    tokenizer = make()
    card = reward_model_card(CardFacts(), contract_of(tokenizer))
    assert f"read from the last token, which the template makes {token}" in card
    assert f"End of sequence: `{tokenizer.eos_token}` (id {tokenizer.eos_token_id})" in card
    scaled = contract_of(tokenizer).with_rules(mean=0.5, std=2.0, num_reference=64)
    card = reward_model_card(CardFacts(), scaled)
    assert "mean 0.5, standard deviation 2 over 64 completions" in card


def test_it_says_what_other_programs_make_of_control_tokens_in_messages():
    contract = contract_of()
    card = reward_model_card(CardFacts(), contract)
    assert "Laurel tokenises contents of messages as plain text. Other programs" in card
    assert "(`<|im_end|>`) holds it" in card
    older = reward_model_card(CardFacts(), contract.with_rules(format=1))
    assert "Laurel tokenises contents" not in older
    assert "(`<|im_end|>`) holds it" in older


def test_a_template_that_ends_with_the_answer_is_not_said_to_end_with_a_token():
    tokenizer = made.make_tokenizer(template="{{ messages[-1]['content'] }}")
    card = reward_model_card(CardFacts(), contract_of(tokenizer, append_eos=False))
    assert "read from the last token of the answer, by" in card


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [made.chatml, made.llama_31, made.gemma])
def test_its_program_cuts_what_is_too_long_as_laurel_does(make, side, tmp_path):
    """With a BOS, which stays, and without; the scores are those of Laurel."""
    model = tiny.tiny_reward_model("qwen3", std=0.1)
    contract = contract_of(make(), max_length=24, truncation_side=side)
    model.classifier.config.pad_token_id = contract.rules.pad_id
    save_reward_model(tmp_path, model, contract, card=reward_model_card(CardFacts(), contract))
    group = group_of([Message("user", "Where?")], ["No.", "By the wall. " * 9], group_id="")
    code, *_ = re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(), re.DOTALL)
    names = {}
    with contextlib.chdir(tmp_path):
        exec(code, names)
    asked = [
        [{"role": m.role, "content": m.content} for m in group.conversation(i)] for i in range(2)
    ]
    (ours,) = LocalScorer(model, contract).score_now([group])
    assert ours[1].truncated
    assert [len(names["token_ids"](one)) for one in asked] == [one.num_tokens for one in ours]
    expected = torch.tensor([one.value for one in ours])
    torch.testing.assert_close(names["scores"](asked), expected, rtol=0, atol=1e-5)


def test_facts_come_back_and_damaged_ones_are_told(tmp_path):
    facts = CardFacts(base_model="x", metrics=METRICS, settings={"a": 1, "b": "c"}, notes=("n",))
    facts.save(tmp_path)
    assert CardFacts.load(tmp_path) == facts
    (tmp_path / FACTS).write_text('{"metrics": 3}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"(?s)model_card\.json cannot be read.*Delete it"):
        CardFacts.load(tmp_path)
    (tmp_path / FACTS).unlink()
    assert CardFacts.load(tmp_path) is None
