"""Scores depend on the conversation alone, and a failure never becomes a number."""

import asyncio
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import laurel.rewards.scorer as scorer_module
import tiny
import tiny_tokenizers as made
from laurel.data.forest import to_forest
from laurel.errors import ScoringContractError, speaking
from laurel.models.checkpoint.export import save_reward_model
from laurel.models.forest.decoder import RewardModel
from laurel.models.loading.reward_model import load_reward_model
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import (
    LocalScorer,
    check_golden,
    conversation_group,
    divide_into_micro_batches,
    golden_scores,
    model_batch,
    score_tokens,
)
from laurel.run.specs import OPTIONS
from laurel.types import Message, group_of


def contract_of(tokenizer=None, **changes):
    options = {"max_length": 256, "truncation_side": "left", "append_eos": True, **changes}
    return ScoringContract.create(tokenizer or made.chatml(), **options)


def scorer_of(
    name="qwen2-sliding", *, path="forest", tokenizer=None, batch_tokens=8192, rules=None, **model
):
    """A scorer whose weights are float64, so that scores in float32 are the same to the last bit
    or its neighbour whatever the order of sums was."""
    reward_model = tiny.tiny_reward_model(name, dtype=torch.float64, **model)
    if path == "padded":
        own = tiny.own_attention(reward_model.classifier)
        reward_model.classifier.set_attn_implementation(own)
        reward_model.path = "padded"
    contract = contract_of(tokenizer, **(rules or {}))
    return LocalScorer(reward_model, contract, batch_tokens=batch_tokens)


def groups_of(count):
    return [
        group_of(
            [Message("user", f"What is {i} + {i}?")],
            [f"It is {i + answer}." + " Surely." * (i * answer % 5) for answer in range(1 + i % 4)],
            group_id=str(i),
        )
        for i in range(count)
    ]


def values(scored):
    return [[score.value for score in scores] for scores in scored]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=3e-7, abs=3e-7)


@pytest.mark.parametrize("path", ["forest", "padded"])
@pytest.mark.parametrize("batch_tokens", [1, 100, 700, 10**6])
def test_the_size_of_a_batch_changes_no_score(path, batch_tokens):
    groups = groups_of(9)
    expected = values(scorer_of(path=path).score_now(groups))
    assert_same(values(scorer_of(path=path, batch_tokens=batch_tokens).score_now(groups)), expected)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_a_group_larger_than_a_batch_is_scored_in_parts(monkeypatch, num_outputs):
    """Also a prompt and an answer that are larger by themselves."""
    rules = {"attributes": tuple("abc")} if num_outputs == 3 else None
    scorer = scorer_of(num_labels=num_outputs, rules=rules)
    tokens = tiny.random_groups(1, [(300, [200, 100, 5, 40]), (3, [9])])
    expected_NK = score_tokens(scorer.model, tokens, batch_tokens=10**6, pad_id=0)
    monkeypatch.setattr(scorer_module, "LEAST_PART", 1)
    sizes, compute = [], scorer.model.hidden_of_row
    monkeypatch.setattr(
        scorer.model,
        "hidden_of_row",
        lambda ids_T, *others: sizes.append(len(ids_T)) or compute(ids_T, *others),
    )
    found_NK = score_tokens(scorer.model, tokens, batch_tokens=64, pad_id=0)
    assert max(sizes) <= 64
    assert sum(sizes) == sum(group.num_tokens for group in tokens)
    np.testing.assert_allclose(found_NK, expected_NK, rtol=0, atol=1e-6)


def test_a_cpu_computes_what_stays_in_its_cache_at_a_time(monkeypatch):
    scorer, groups = scorer_of(batch_tokens=8192), groups_of(6)
    tokens = scorer.encode(groups)
    largest = max(group.num_tokens for group in tokens)
    whole = values(scorer.score_now(groups))
    sizes = []
    forward = scorer.model.forward
    monkeypatch.setattr(scorer_module, "CPU_PASS_TOKENS", largest)
    monkeypatch.setattr(
        scorer.model, "forward", lambda batch: sizes.append(len(batch.ids_T)) or forward(batch)
    )
    seen = []
    scored = values(scorer.score_now(groups, lambda *counts: seen.append(counts)))
    assert len(sizes) > 1
    assert max(sizes) == largest
    assert sum(sizes) == sum(group.num_tokens for group in tokens)
    assert seen == [(6, sum(sizes))], "a micro-batch is what the budget says"
    assert_same(scored, whole)


def test_several_attributes_become_one_number():
    rules = {"attributes": ("a", "b", "c"), "attribute_weights": (1.0, 0.5, -2.0)}
    scorer = scorer_of("qwen3", num_labels=3, rules=rules)
    (score,) = scorer.score_now(groups_of(1))[0]
    assert len(score.values_K) == 3
    a, b, c = score.values_K
    assert score.value == pytest.approx(a + 0.5 * b - 2 * c)


def test_progress_is_told_of_all_groups_and_tokens():
    scorer, groups = scorer_of(batch_tokens=300), groups_of(9)
    seen = []
    scorer.score_now(groups, on_batch=lambda done, tokens: seen.append((done, tokens)))
    assert len(seen) > 1
    assert sum(done for done, _ in seen) == 9
    encoded = scorer.contract.encode(groups)
    assert sum(tokens for _, tokens in seen) == sum(tokens.num_tokens for tokens in encoded)


def test_scoring_leaves_dropout_as_it_was_and_without_effect():
    model = tiny.tiny_reward_model("qwen3", attention_dropout=0.5).train()
    scorer = LocalScorer(model, contract_of())
    first, again = scorer.score_now(groups_of(4)), scorer.score_now(groups_of(4))
    assert first == again
    assert model.training
    model.eval()
    assert scorer.score_now(groups_of(4)) == first
    assert not model.training


def test_calls_side_by_side_do_not_disturb_one_another():
    """In training, with dropout: who ends first must not switch it on for the others."""
    model = tiny.tiny_reward_model("qwen3", attention_dropout=0.5).train()
    scorer = LocalScorer(model, contract_of(), batch_tokens=60)
    calls = [groups_of(count) for count in range(1, 13)]
    expected = [scorer.score_now(groups) for groups in calls]

    async def all_at_once():
        return await asyncio.gather(*(scorer.score(groups) for groups in calls))

    assert asyncio.run(all_at_once()) == expected
    assert model.training


def test_training_goes_on_after_scoring():
    """Nothing made without gradients stays behind in the model."""
    model = tiny.tiny_reward_model("gemma3").train()
    scorer = LocalScorer(model, contract_of())
    scorer.score_now(groups_of(2))
    model(to_forest(scorer.contract.encode(groups_of(2)))).sum().backward()
    assert model.classifier.score.weight.grad.abs().sum() > 0


def test_an_error_leaves_the_model_in_training():
    model = tiny.tiny_reward_model("qwen3").train()
    tokens = contract_of().encode(groups_of(1))

    def stop(_groups, _tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_tokens(model, tokens, batch_tokens=10, pad_id=0, on_batch=stop)
    assert model.training


def test_micro_batches_are_what_the_path_reads():
    groups = contract_of().encode(groups_of(6))
    model = tiny.tiny_reward_model("qwen3")
    for path, size in (
        ("forest", lambda batch: len(batch.ids_T)),
        ("padded", lambda batch: batch.ids_NL.numel()),
    ):
        model.path = path
        parts, least_shared = divide_into_micro_batches(model.path, groups, 300)
        assert sorted(i for part in parts for i in part) == list(range(6))
        assert len(parts) > 1
        for part in parts:
            batch = model_batch(
                model, [groups[i] for i in part], pad_id=0, least_shared=least_shared
            )
            assert size(batch) <= 300 or len(part) == 1
            assert batch.num_completions == sum(len(groups[i].branches_ids_G) for i in part)


@pytest.mark.parametrize("batch_tokens", [300, 8192])
def test_conversations_that_begin_alike_share_it_in_one_pass(batch_tokens, monkeypatch):
    """Each is a group of its own, as servers get them, and not all are asked for in a row."""
    groups = [
        group_of(
            [Message("user", f"{'A long question. ' * 8}{i % 3} of them?")],
            [f"It is {i}." + " Surely." * (i % 5)],
            group_id=str(i),
        )
        for i in range(12)
    ]
    scorer, computed = scorer_of("qwen3", batch_tokens=batch_tokens), []
    alone = [scorer.score_now([group])[0][0].value for group in groups]
    forward = RewardModel.forward

    def counted(model, batch):
        computed.append(len(batch.ids_T))
        return forward(model, batch)

    monkeypatch.setattr(RewardModel, "forward", counted)
    together = [scores[0].value for scores in scorer.score_now(groups)]
    assert together == pytest.approx(alone, abs=1e-6)
    assert sum(computed) < 0.75 * sum(group.num_tokens for group in scorer.encode(groups))
    assert max(computed) <= batch_tokens


def test_what_is_shared_is_decided_once_for_all_micro_batches(monkeypatch):
    """One of them alone would not be worth it, and without it would exceed the budget."""
    (alike,) = tiny.random_groups(1, [(200, [40] * 5)])
    (long,) = tiny.random_groups(2, [(30, [485, 485])])
    groups = [one.select([i]) for one in (alike, long) for i in range(len(one.branches_ids_G))]
    model = tiny.tiny_reward_model("qwen3", dtype=torch.float64)
    alone = [score_tokens(model, [one], batch_tokens=1000, pad_id=0) for one in groups]
    sizes, forward, decided = [], model.forward, []
    decide = scorer_module.least_worth_sharing
    monkeypatch.setattr(
        model, "forward", lambda batch: sizes.append(len(batch.ids_T)) or forward(batch)
    )
    monkeypatch.setattr(
        scorer_module,
        "least_worth_sharing",
        lambda *given: decided.append(given) or decide(*given),
    )
    found_NK = score_tokens(model, groups, batch_tokens=1000, pad_id=0)
    np.testing.assert_allclose(found_NK, np.concatenate(alone), rtol=0, atol=1e-6)
    assert sorted(sizes) == [400, 1000]
    assert len(decided) == 1


@pytest.fixture
def checkpoint(tmp_path):
    """A saved reward model with golden scores, and a function that loads it."""
    model = tiny.tiny_reward_model("qwen2-sliding", precision=torch.bfloat16)
    contract = contract_of()
    contract = contract.with_rules(golden=golden_scores(model, contract, groups_of(3)))
    model.classifier.config.pad_token_id = contract.rules.pad_id
    directory = tmp_path / "saved"
    directory.mkdir()
    save_reward_model(directory, model, contract, card="")

    def load(precision="float32", weights=torch.float32):
        return load_reward_model(
            ModelSpec(name=str(directory), precision=precision),
            seed=0,
            max_length=256,
            truncation_side="left",
            device=torch.device("cpu"),
            weights_dtype=weights,
        )

    return directory, load


def alter(directory, name, change):
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights[name] = change(weights[name].clone())
    save_file(weights, path, metadata={"format": "pt"})


def test_golden_scores_are_those_of_the_conversations(checkpoint):
    _, load = checkpoint
    loaded = load()
    golden = loaded.contract.rules.golden
    conversations = [g.conversation(i) for g in groups_of(3) for i in range(len(g.completions_G))]
    assert [entry.messages for entry in golden] == conversations
    scorer = LocalScorer(loaded.model, loaded.contract)
    for entry in golden:
        (score,) = scorer.score_now([conversation_group(entry.messages)])[0]
        assert entry.values_K == pytest.approx(score.values_K, abs=1e-6)
        assert entry.num_tokens == score.num_tokens


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_golden_scores_agree_after_loading(checkpoint, precision):
    """In whatever precision the run that saved and the run that loads compute."""
    _, load = checkpoint
    loaded = load(precision)
    assert check_golden(loaded.model, loaded.contract) < 1e-6
    assert loaded.model.precision == getattr(torch, precision)


def test_golden_scores_agree_roughly_where_the_weights_are_rounded(checkpoint):
    _, load = checkpoint
    loaded = load(weights=torch.bfloat16)
    assert 1e-4 < check_golden(loaded.model, loaded.contract) < 5e-2


@pytest.mark.parametrize(
    ("name", "change", "precision"),
    [
        ("score.weight", lambda w: w * 1.01, "float32"),
        ("score.weight", lambda w: w * 1.01, "bfloat16"),
        ("model.layers.1.mlp.up_proj.weight", lambda w: w + 0.01, "float32"),
        ("score.weight", lambda w: w * torch.nan, "bfloat16"),
    ],
)
def test_a_changed_weight_or_head_is_refused(checkpoint, name, change, precision):
    """A head that is off by one per cent, even where the run computes in bfloat16."""
    directory, load = checkpoint
    alter(directory, name, change)
    loaded = load(precision)
    with pytest.raises(ScoringContractError, match="weights, head or library behave differently"):
        check_golden(loaded.model, loaded.contract)


def test_another_precision_is_named_with_the_setting_that_mends_it_before_anything_else(checkpoint):
    directory, load = checkpoint
    alter(directory, "score.weight", lambda w: w * 1.5)  # further off than rounding explains
    loaded = load(weights=torch.bfloat16)
    with pytest.raises(ScoringContractError) as refusal:
        check_golden(loaded.model, loaded.contract)
    said = str(refusal.value)
    assert (
        "saved in float32 and is loaded in bfloat16; load it with policy.precision=float32" in said
    )
    assert said.index("policy.precision") < said.index("weights, head or library")
    with speaking(OPTIONS), pytest.raises(ScoringContractError, match="--precision float32"):
        check_golden(loaded.model, loaded.contract)


def test_a_tokenizer_that_splits_otherwise_is_refused(checkpoint):
    _, load = checkpoint
    loaded = load()
    golden = tuple(
        entry.model_copy(update={"num_tokens": entry.num_tokens + 1})
        for entry in loaded.contract.rules.golden
    )
    contract = loaded.contract.with_rules(golden=golden)
    with pytest.raises(ScoringContractError, match="the tokenizer or its template has changed"):
        check_golden(loaded.model, contract)


def test_without_golden_scores_there_is_nothing_to_disagree_with():
    assert check_golden(tiny.tiny_reward_model("qwen3"), contract_of()) == 0.0


@pytest.mark.slow
def test_an_encoder_scores_too():
    classifier = tiny.randomised("bert", {"max_position_embeddings": 300})
    model = RewardModel(classifier, head_name=None, path="padded", precision=torch.float32)
    tokenizer = made.make_tokenizer(template=made.BARE, adds_bos=True)
    scorer = LocalScorer(model, contract_of(tokenizer, pooled="model"))
    scored = scorer.score_now(groups_of(4))
    alone = [scorer.score_now([group])[0] for group in groups_of(4)]
    for one, other in zip(scored, alone, strict=True):
        assert [s.value for s in one] == pytest.approx([s.value for s in other], abs=1e-5)
        assert all(math.isfinite(s.value) for s in one)


def test_answers_that_become_the_same_tokens_get_the_same_score_to_the_last_bit():
    scorer = scorer_of(rules={"max_length": 64, "truncation_side": "right"})
    computed = []
    values = scorer._values

    def counted(tokens, *others, **more):
        computed.extend(len(group.branches_ids_G) for group in tokens)
        return values(tokens, *others, **more)

    scorer._values = counted
    long = "word " * 30
    asked = [Message("user", "Where?")]
    group = group_of(asked, [f"{long} Oak.", "Yes.", f"{long} Elm.", "Yes.", "No."], group_id="g")
    (scores,) = scorer.score_now([group])
    assert computed == [3]
    assert scores[0] == scores[2]
    assert scores[1] == scores[3]
    assert len({score.value for score in scores}) == 3
