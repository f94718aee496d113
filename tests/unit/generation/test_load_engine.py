"""Engines that are made of what travels."""

import contextlib
import pickle

import pytest
import torch

from generators import draw, policy_and_tokenizer, request
from laurel.config.policy import LoraConfig, ScratchConfig, TokenizerConfig
from laurel.generation.load import GeneratorSpec, TransformersMaker, from_directory
from laurel.generation.transformers.engine import HeldWeights
from laurel.models.checkpoint.export import save_policy
from laurel.models.forest.decoder import adapted_layers
from laurel.models.loading.policy import load_policy
from laurel.models.spec import ModelSpec

TEXTS = ("The laurel is evergreen.", "Where does it grow?", "By the sea, in the sun. " * 5)


def scratch_policy(**changes):
    return ModelSpec(
        scratch=ScratchConfig(hidden_size=32, num_layers=2, num_heads=2, vocab_size=300),
        precision="float32",
        **changes,
    )


def maker_of(model, *, texts=(), **changes):
    spec = GeneratorSpec(seed=3, end_ids=(1,), max_length=64, **changes)
    return TransformersMaker(model=model, spec=spec, device="cpu", cpu_threads=1, texts=texts)


@pytest.mark.parametrize("lora", [False, True])
def test_it_has_the_learners_weights_and_no_more(lora):
    if lora:
        pytest.importorskip("peft")
    policy = scratch_policy(lora=LoraConfig(enabled=True, dim=4) if lora else None)
    learner = load_policy(policy, seed=3, max_length=64, device=torch.device("cpu"), texts=TEXTS)
    maker = maker_of(policy, texts=TEXTS, weight_version=5)
    with contextlib.closing(pickle.loads(pickle.dumps(maker))()) as engine:
        assert engine.weight_version == 5
        held = engine._held.model
        assert not adapted_layers(held.causal_lm)
        assert not any(parameter.requires_grad for parameter in held.parameters())
        found, expected = dict(held.named_weights()), dict(learner.model.named_weights())
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        (drawn,) = draw(engine, request([3, 4, 5], seeds=(1, 2), max_new_tokens=5))
        assert len(drawn) == 2


def test_it_begins_with_a_directory(tmp_path):
    policy, tokenizer = policy_and_tokenizer()
    save_policy(tmp_path, policy, tokenizer, card="")
    plain = scratch_policy(tokenizer=TokenizerConfig(chat_template="plain"))
    named = from_directory(plain, tmp_path)
    with contextlib.closing(maker_of(named)()) as engine:
        found = dict(engine._held.model.named_weights())
        for name, tensor in policy.named_weights():
            assert torch.equal(found[name], tensor), name
        assert engine._batch._tokenizer.get_vocab() == tokenizer.get_vocab()


def test_a_model_that_nobody_else_has_is_not_copied():
    policy, _ = policy_and_tokenizer()
    assert HeldWeights(policy, owns_model=True).model is policy
    assert HeldWeights(policy).model is not policy
