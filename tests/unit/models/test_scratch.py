"""Small models made from nothing: the same from the same texts, and exact on forests."""

import pytest
import torch

from laurel.config.policy import PolicyConfig, ScratchConfig
from laurel.data.forest import to_forest
from laurel.errors import ConfigError
from laurel.models.loading.pretrained import scratch_config, start_of, train_tokenizer
from laurel.models.loading.reward_model import check_paths, load_reward_model
from laurel.models.spec import ModelSpec
from laurel.run.model import model_spec
from laurel.types import Message, group_of

TEXTS = ["the gate by the wall", "the wall by the gate", "där är lagern 月桂"] * 20
ARCHITECTURES = "qwen2, qwen3, llama, mistral, gemma, gemma2, gemma3_text, phi, phi3, olmo2"


def make(*, seed=1, texts=TEXTS, **settings):
    scratch = {"hidden_size": 32, "vocab_size": 320, "num_layers": 1, "num_heads": 2, **settings}
    return load_reward_model(
        ModelSpec(precision="float32", scratch=ScratchConfig.model_validate(scratch)),
        seed=seed,
        max_length=64,
        truncation_side="left",
        device=torch.device("cpu"),
        texts=texts,
    )


def test_a_tokenizer_has_a_token_for_every_text():
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)
    assert len(tokenizer) <= 320
    for text in ("the gate", "nie gesehen: Żółw 🐢\n\t", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(" the wall")["input_ids"]) < 4  # merges were learned
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert tokenizer.bos_token is None


def test_the_same_texts_give_the_same_tokenizer():
    first, second = (train_tokenizer(iter(TEXTS), vocab_size=320) for _ in range(2))
    assert first.get_vocab() == second.get_vocab()
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_the_seed_decides_every_weight():
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, again.model.get_parameter(name)), name
    embeddings = [m.model.classifier.get_input_embeddings().weight for m in (first, other)]
    assert not torch.equal(*embeddings)
    assert not torch.equal(first.model.classifier.score.weight, other.model.classifier.score.weight)
    assert first.has_new_head
    assert first.base_model == "nothing (qwen3)"


@pytest.mark.parametrize(
    ("given", "is_noted"),
    [({}, False), ({"model_name": None}, False), ({"model_name": "a/b"}, True)],
)
def test_a_name_beside_scratch_is_not_loaded_and_that_is_said(given, is_noted):
    start, notes = start_of(model_spec(PolicyConfig(scratch=ScratchConfig(), **given)))
    assert start == "nothing (qwen3)"
    assert [note.startswith("warning: policy.model_name=a/b is not loaded") for note in notes] == (
        [True] if is_noted else []
    )


def test_a_name_without_scratch_is_where_it_starts():
    assert start_of(ModelSpec(name="a/b")) == ("a/b", [])


@pytest.mark.parametrize("architecture", ARCHITECTURES.split(", "))
def test_every_architecture_that_is_named_works(architecture):
    loaded = make(architecture=architecture)
    assert loaded.model.path == "forest"
    assert check_paths(loaded.model) < 1e-5
    group = group_of([Message("user", "the gate?")], ["the wall", "no"], group_id="g")
    scores_NK = loaded.model(to_forest(loaded.contract.encode([group])))
    assert scores_NK.shape == (2, 1)
    assert scores_NK.isfinite().all()


KEYS = {"num_key_value_heads": 2}


def test_sizes_are_those_asked_for():
    tokenizer = train_tokenizer(TEXTS, vocab_size=320)
    scratch = ScratchConfig(hidden_size=48, num_layers=3, num_heads=4, config_overrides=KEYS)
    config = scratch_config(scratch, tokenizer, max_length=77)
    assert config.vocab_size == len(tokenizer)
    assert (config.hidden_size, config.num_hidden_layers) == (48, 3)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.head_dim, config.intermediate_size) == (12, 192)
    assert config.max_position_embeddings == 77
    assert config.pad_token_id == tokenizer.pad_token_id
    overrides = {"attention_dropout": 0.1, "intermediate_size": 50}
    changed = scratch_config(ScratchConfig(config_overrides=overrides), tokenizer, max_length=77)
    assert (changed.attention_dropout, changed.intermediate_size) == (0.1, 50)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "qwen33"}, r"architecture='qwen33' is no model_type.*qwen2, qwen3"),
        (
            {"config_overrides": {"atention_dropout": 0.1}},
            r"config_overrides.atention_dropout: qwen3 has no such setting; did you mean attention",
        ),
        ({"architecture": "granite"}, r"policy.scratch: no classifier can be made"),
    ],
)
def test_a_description_that_fits_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(**settings)
