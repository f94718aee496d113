"""Process reward models: where steps end, what is read there, and that batching changes nothing."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from laurel.data.forest import to_forest, to_padded
from laurel.errors import DataError, ModelError, ScoringContractError
from laurel.extensions.export.plain import plain_scores
from laurel.models.checkpoint.card import CardFacts, reward_model_card
from laurel.models.checkpoint.export import save_reward_model
from laurel.models.loading.reward_model import check_paths, load_reward_model
from laurel.models.scoring import (
    ScoringContract,
    ScoringRules,
    StepRules,
    aggregate,
    read_positions,
    sigmoid,
    step_ends,
)
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import LocalScorer, check_golden, golden_scores
from laurel.types import Completion, Group, Message
from process_models import process_model, solutions

ANSWERS = ("take 4\n\nadd 5\n\nSo it is 9.", "take 4\n\nadd 6\n\nSo 10.", "So 7")


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a\n\nb", [3, 4]),
        ("a", [1]),
        ("", [0]),
        ("a\n\n", [3]),
        ("\n\na\n\n\n\nb\n\n ", [5, 10]),
        ("a\n\n\nb", [3, 5]),
    ],
)
def test_a_step_ends_with_its_separator_and_blank_text_is_no_step(
    text: str, ends: list[int]
) -> None:
    assert step_ends(text, "\n\n") == ends


def test_a_step_is_read_at_the_token_with_its_last_character() -> None:
    offsets = [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert read_positions(offsets, [3, 6], exact=True) == (1, 3)
    # The third token reaches from one step into the next.
    assert read_positions([(0, 1), (1, 4), (4, 5)], [3, 5], exact=False) == (1, 2)
    with pytest.raises(DataError, match="end of step 1 and the beginning of the next are one"):
        read_positions([(0, 1), (1, 4), (4, 5)], [3, 5], exact=True)


def test_aggregates() -> None:
    values = (0.5, 0.25, 1.0)
    assert aggregate(values, "min") == 0.25
    assert aggregate(values, "product") == 0.125
    assert aggregate(values, "last") == 1.0
    assert aggregate(values, "mean") == pytest.approx(1.75 / 3)


def test_the_contract_reads_the_ends_of_steps_wherever_the_trunk_ends() -> None:
    contract = process_model().contract
    (tokens,) = contract.encode([solutions("how much?", *ANSWERS)])
    assert tokens.num_reads_G == (3, 3, 1)
    for index, (branch, reads) in enumerate(
        zip(tokens.branches_ids_G, tokens.reads_G, strict=True)
    ):
        ids = [*tokens.trunk_ids, *branch]
        text = contract.render(solutions("how much?", *ANSWERS).conversation(index))
        assert reads[-1] == len(ids) - 1
        for read, step in zip(reads[:-1], ANSWERS[index].split("\n\n"), strict=False):
            before = contract.tokenizer.decode(ids[: read + 1])
            assert before.endswith(step + "\n\n")
            assert text.startswith(before)
    # The same words in the question are no steps, and neither are those of the user.
    (other,) = contract.encode([solutions(ANSWERS[0], "add 5\n\nadd 5")])
    assert other.num_reads_G == (2,)
    turns = Completion(
        messages=(
            Message("assistant", "a\n\nb"),
            Message("user", "x\n\ny"),
            Message("assistant", "c"),
        )
    )
    (several,) = contract.encode(
        [Group(id="g", prompt=(Message("user", "q"),), completions_G=(turns,))]
    )
    assert several.num_reads_G == (3,)


def test_forest_padded_rows_and_single_conversations_agree() -> None:
    groups = [solutions("how much?", *ANSWERS), solutions("and now?", "add 5\n\n4", group_id="h")]
    loaded = process_model()
    check_paths(loaded.model)
    tokens = loaded.contract.encode(groups)
    alone = [
        loaded.contract.encode([solutions(group.prompt[0].content, answer)])[0]
        for group in groups
        for answer in (one.messages[0].content for one in group.completions_G)
    ]
    with torch.no_grad():
        together = loaded.model(to_forest(tokens))
        apart = loaded.model(to_forest(tokens, share_prompts=False))
        single = torch.cat([loaded.model(to_forest([one])) for one in alone])
        rows = process_model(reads_forests=False).model(to_padded(tokens, pad_id=0))
    assert together.shape == (9, 1)
    # Two answers begin with the same step, which is computed once and read twice.
    assert torch.equal(together[0], together[3])
    for other in (apart, single, rows):
        torch.testing.assert_close(together, other, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_forest_are_those_of_single_conversations() -> None:
    groups = [solutions("how much?", *ANSWERS)]
    loaded = process_model()
    (tokens,) = loaded.contract.encode(groups)
    weights = torch.randn(7, 1, generator=torch.Generator().manual_seed(0))

    def gradients(batches: list[object]) -> torch.Tensor:
        loaded.model.zero_grad()
        (torch.cat([loaded.model(batch) for batch in batches]) * weights).sum().backward()
        return torch.cat(
            [p.grad.flatten() for p in loaded.model.parameters() if p.grad is not None]
        )

    forest = gradients([to_forest([tokens])])
    single = gradients([to_forest([tokens.select([i])]) for i in range(3)])
    assert float((forest - single).norm() / single.norm()) < 1e-5


def test_a_score_has_the_value_of_each_step_and_their_aggregate() -> None:
    group = solutions("how much?", *ANSWERS)
    for how in ("min", "product", "last", "mean"):
        loaded = process_model(aggregate=how)
        (scores,) = LocalScorer(loaded.model, loaded.contract).score_now([group])
        assert [len(score.values_K) for score in scores] == [3, 3, 1]
        for score in scores:
            assert all(0.0 < value < 1.0 for value in score.values_K)
            assert score.value == aggregate(score.values_K, how)


def test_a_cut_answer_and_a_value_that_is_not_finite_are_failures() -> None:
    loaded = process_model(max_length=60)
    scorer = LocalScorer(loaded.model, loaded.contract)
    group = solutions("q", "add 5\n\n" * 40, "a\n\nb")
    ((cut, whole),) = scorer.score_now([group])
    assert cut.value is None
    assert cut.values_K == ()
    assert "longer than 60 tokens" in str(cut.failure)
    assert whole.value is not None
    with torch.no_grad():
        loaded.model.classifier.score.weight.fill_(math.nan)
    ((_, broken),) = scorer.score_now([group])
    assert (broken.value, broken.failure) == (None, "not finite")


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["min", "product", "last", "mean"])
def test_an_output_that_is_not_finite_never_becomes_a_number(broken: float, how: str) -> None:
    contract = process_model(aggregate=how).contract
    assert math.isnan(contract.scalar((0.0, broken, 0.0)))
    values = contract.values((0.0, broken))
    assert values[0] == 0.5
    assert math.isnan(values[1])


TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
)


def reads_of(contract: ScoringContract, group: Group) -> list[str]:
    (tokens,) = contract.encode([group])
    ids = [*tokens.trunk_ids, *tokens.branches_ids_G[0]]
    return [contract.tokenizer.decode(ids[: read + 1]) for read in tokens.reads_G[0]]


def test_steps_are_found_in_the_answer_though_the_template_trims_it() -> None:
    contract = process_model().contract
    contract.tokenizer.chat_template = TRIMS
    group = solutions("Check: A=1\n\nB=2\n\nIs it right?", "A=1\n\nB=2\n\n")
    first, last = reads_of(contract, group)
    assert first.endswith("<|im_start|>assistant\nA=1\n\n")
    assert last == contract.render(group.conversation(0))
    blank_around = reads_of(contract, solutions("q", "\n\nA=1\n\nB=2"))
    assert blank_around[0].endswith("<|im_start|>assistant\nA=1\n\n")


def test_an_answer_that_the_template_leaves_out_is_not_looked_for_in_the_question() -> None:
    contract = process_model().contract
    contract.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if m['role'] == 'user' else m['content'] | lower }}<|im_end|>\n"
        "{% endfor %}"
    )
    with pytest.raises(DataError, match="template changes the answer"):
        contract.encode([solutions("Is A\n\nB right?", "A\n\nB")])


@pytest.mark.parametrize("trims", [False, True])
def test_a_turn_of_one_word_is_not_found_in_the_header_of_the_next(trims: bool) -> None:
    contract = process_model().contract
    if trims:
        contract.tokenizer.chat_template = TRIMS
    turns = Completion(
        messages=(
            Message("assistant", "a\n\nb"),
            Message("user", "assistant"),
            Message("assistant", "user"),
            Message("user", "go on\n"),
            Message("assistant", "c"),
        )
    )
    group = Group(id="g", prompt=(Message("user", "q"),), completions_G=(turns,))
    first, second, third, _ = reads_of(contract, group)
    assert first.endswith("<|im_start|>assistant\na\n\n")
    assert second.endswith("<|im_start|>assistant\na\n\nb")
    assert third.endswith("assistant<|im_end|>\n<|im_start|>assistant\nuser")


def test_rendered_text_is_refused_as_its_steps_cannot_be_found() -> None:
    contract = process_model().contract
    with pytest.raises(DataError, match="Send messages"):
        contract.encode_rendered("<|im_start|>user\nq<|im_end|>")


def test_a_saved_model_is_a_token_classifier_of_plain_transformers(tmp_path: Path) -> None:
    loaded = process_model()
    with torch.no_grad():
        loaded.model.classifier.score.bias.fill_(0.3)
    group = solutions("how much?", *ANSWERS)
    golden = golden_scores(loaded.model, loaded.contract, [group])
    assert [len(one.values_K) for one in golden] == [3, 3, 1]
    contract = loaded.contract.with_rules(golden=golden)
    save_reward_model(tmp_path, loaded.model, contract, card="A model.")
    assert ScoringRules.read(tmp_path).steps == StepRules()
    (scores,) = LocalScorer(loaded.model, loaded.contract).score_now([group])

    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for answer, score in zip(ANSWERS, scores, strict=True):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "how much?"}, {"role": "assistant", "content": answer}],
            tokenize=False,
        )
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start = text.index(answer)
        ends = [start + i + 2 for i in range(len(answer)) if answer.startswith("\n\n", i)]
        places = [
            max(i for i, (first, _) in enumerate(found["offset_mapping"]) if first < end)
            for end in (*ends, len(text))
        ]
        with torch.inference_mode():
            logits = model(torch.tensor([found["input_ids"]])).logits[0, places, 0]
        np.testing.assert_allclose(
            [sigmoid(float(logit)) for logit in logits], score.values_K, atol=1e-6
        )

    spec = ModelSpec(name=str(tmp_path), precision="float32", head=_head(loaded.contract.rules))
    again = load_reward_model(
        spec, seed=0, max_length=128, truncation_side="left", device=torch.device("cpu")
    )
    assert check_golden(again.model, again.contract) < 1e-6
    with torch.no_grad():
        again.model.classifier.score.bias.fill_(0.2)
    with pytest.raises(ScoringContractError, match="scores"):
        check_golden(again.model, again.contract)
    with pytest.raises(ModelError, match="was trained to read"):
        load_reward_model(
            ModelSpec(name=str(tmp_path)),
            seed=0,
            max_length=128,
            truncation_side="left",
            device=torch.device("cpu"),
        )


BLANKS = ("a\n\nb\n\n", "a\n\n\n\nb", "\n\na\n\nb", "\n\n")


@pytest.mark.parametrize("trims", [False, True])
def test_blank_steps_have_no_value_in_plain_transformers_either(
    tmp_path: Path, trims: bool
) -> None:
    loaded = process_model()
    contract = loaded.contract
    if trims:
        contract.tokenizer.chat_template = TRIMS
    group = solutions("how much?", *BLANKS)
    card = reward_model_card(CardFacts(), contract)
    save_reward_model(tmp_path, loaded.model, contract, card=card)
    (scores,) = LocalScorer(loaded.model, contract).score_now([group])
    assert [len(one.values_K) for one in scores] == [2, 2, 2, 1]
    found = plain_scores(
        tmp_path,
        [group.conversation(i) for i in range(len(BLANKS))],
        device=torch.device("cpu"),
    )
    expected = [value for one in scores for value in one.values_K]
    np.testing.assert_allclose(found[:, 0], expected, atol=1e-6)
    code, *_ = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(code, names)
    for answer, score in zip(BLANKS, scores, strict=True):
        values = names["values"]([{"role": "user", "content": "how much?"}], answer.split("\n\n"))
        np.testing.assert_allclose(values, score.values_K, atol=1e-6)


def _head(rules: ScoringRules) -> object:
    from laurel.config.policy import RewardModelConfig

    assert rules.steps is not None
    return RewardModelConfig(reward_model_type="process", step_separator=rules.steps.separator)


def test_contracts_of_other_models_name_no_steps(tmp_path: Path) -> None:
    from reward_models import small_model

    small_model().contract.save(tmp_path)
    assert "steps" not in (tmp_path / "scoring.json").read_text()
