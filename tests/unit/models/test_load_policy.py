"""What is loaded as a policy, what is refused, and that each planted fault is found before use."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import tiny
import tiny_tokenizers as made
from laurel.config.grpo import GRPOPolicyConfig
from laurel.data.forest import to_forest, to_padded
from laurel.errors import CheckpointError, ConfigError, ModelError, speaking
from laurel.models.checkpoint.export import save_policy
from laurel.models.forest.attention import FOREST
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.adapters import ADAPTERS
from laurel.models.loading.policy import check_policy_paths, load_policy
from laurel.models.tokenizer import load_tokenizer
from laurel.run.model import model_spec
from model_directories import edit_json
from planted_faults import double_logits

TEXTS = ("the laurel grows by the western gate", "bread and wine", "an old man of the river")
GROUPS = tiny.random_groups(0, [(9, [5, 2]), (4, [7])])
SCRATCH = {"hidden_size": 32, "vocab_size": 400}


def load(
    directory, *, seed=1, max_length=512, resume=None, weights=None, temperature=1.0, **changes
):
    name = None if directory is None else str(directory)
    return load_policy(
        model_spec(GRPOPolicyConfig(model_name=name, **{"precision": "float32", **changes})),
        seed=seed,
        max_length=max_length,
        device=torch.device("cpu"),
        texts=TEXTS,
        weights_dtype=weights or torch.float32,
        resume_from=resume,
        temperature=temperature,
    )


def logprobs(model):
    return model.logprobs(
        to_forest(GROUPS) if model.path == "forest" else to_padded(GROUPS, pad_id=0)
    )


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "qwen3-tied", "phi", "gpt-oss"])
def test_a_policy_gives_what_transformers_gives(name, save):
    directory = save(tiny.tiny_policy(name, path="padded").causal_lm)
    loaded = load(directory)
    assert loaded.notes == []
    assert (loaded.model.path, loaded.base_model) == ("forest", str(directory))
    assert loaded.model.causal_lm.config._attn_implementation == FOREST
    reference = AutoModelForCausalLM.from_pretrained(directory).eval()
    expected = []
    for group in GROUPS:
        for branch in group.branches_ids_G:
            ids = torch.tensor([*group.trunk_ids, *branch])
            with torch.inference_mode():
                table = reference(input_ids=ids[None]).logits[0, len(group.trunk_ids) - 1 : -1]
            expected.append(
                table.log_softmax(-1).gather(1, ids[len(group.trunk_ids) :, None])[:, 0]
            )
    torch.testing.assert_close(logprobs(loaded.model), torch.cat(expected), rtol=0, atol=5e-6)
    assert check_policy_paths(loaded.model) < 5e-6


def test_settings_reach_the_model(save):
    directory = save(tiny.tiny_language_model("qwen3"))
    loaded = load(
        directory,
        temperature=0.7,
        precision="bfloat16",
        dtensor_cfg={"activation_checkpointing": True},
        hf_config_overrides={"attention_dropout": 0.25},
    ).model
    assert loaded.temperature == 0.7
    assert (loaded.precision, loaded.weights_dtype) == (torch.bfloat16, torch.float32)
    assert loaded.causal_lm.model.layers[0].gradient_checkpointing
    assert loaded.causal_lm.model.layers[0].self_attn.attention_dropout == 0.25
    low = load(directory, weights=torch.bfloat16).model
    assert (low.precision, low.weights_dtype) == (torch.bfloat16, torch.bfloat16)
    assert logprobs(low).dtype == torch.float32
    with pytest.raises(ConfigError, match=r"hf_config_overrides\.atention_dropout: .* no such"):
        load(directory, hf_config_overrides={"atention_dropout": 0.25})


def test_a_policy_is_made_of_nothing_from_a_seed():
    before = torch.get_rng_state()
    loaded, again, other = (load(None, scratch=SCRATCH, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.base_model == "nothing (qwen3)"
    assert loaded.notes == [
        "the weights are new and random: the policy writes noise before training"
    ]
    assert torch.equal(logprobs(loaded.model), logprobs(again.model))
    assert not torch.allclose(logprobs(loaded.model), logprobs(other.model))
    assert loaded.model.vocab_size == len(loaded.tokenizer)
    assert 0 < check_policy_paths(loaded.model) < 5e-6
    with pytest.raises(ConfigError, match="no language model can be made of this description"):
        load(None, scratch={**SCRATCH, "architecture": "vit", "config_overrides": {}})


def test_the_weights_do_not_lie_in_the_file_they_came_from(save):
    directory = save(tiny.tiny_language_model("qwen3"))
    model = load(directory).model
    expected = logprobs(model)
    (directory / "model.safetensors").write_bytes(b"gone")
    assert torch.equal(logprobs(model), expected)


def test_a_tokenizer_may_pad_with_its_end_because_nothing_is_read_by_padding(save):
    """As base models of Qwen 2.5 have it; of reward models it is refused."""
    tokenizer = made.make_tokenizer(pad="</s>", more=("<|pad|>",), template=made.BARE)
    directory = save(tiny.tiny_language_model("qwen3"), tokenizer)
    loaded = load(directory)
    end = tokenizer.eos_token_id
    assert loaded.tokenizer.pad_token_id == loaded.model.causal_lm.config.pad_token_id == end
    groups = tiny.random_groups(0, [(3, [4])])
    groups[0].branches_ids_G[0][:] = end
    loaded.model(to_forest(groups)).logprobs_M.sum().backward()
    embeddings = loaded.model.causal_lm.get_input_embeddings()
    assert embeddings.weight.grad[end].abs().sum() > 0  # the end of a text is learned
    other = load(directory, tokenizer={"pad_token": "<|pad|>"})
    assert other.tokenizer.pad_token == "<|pad|>"


def test_a_tokenizer_without_any_padding_takes_its_end(tmp_path):
    from laurel.config.policy import TokenizerConfig

    tokenizer = made.make_tokenizer(pad=None, template=made.BARE)
    tokenizer.save_pretrained(tmp_path)
    name = {"model_name": str(tmp_path), "trust_remote_code": False}
    with pytest.raises(ModelError, match="no token that could pad"):
        load_tokenizer(TokenizerConfig(), **name)
    found = load_tokenizer(TokenizerConfig(), **name, pad_may_end=True)
    assert found.pad_token == tokenizer.eos_token


LORA = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4, "alpha": 8}}}


@pytest.mark.parametrize("kind", ["loaded", "scratch"])
def test_adapters_come_back_exactly(kind, save, tmp_path):
    changes = LORA if kind == "loaded" else {**LORA, "scratch": SCRATCH}
    base = save(tiny.tiny_language_model("qwen3")) if kind == "loaded" else None
    loaded = load(base, **changes)
    for name, parameter in loaded.model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
    tiny.draw_adapters(loaded.model, 0.2, "lora_B")
    expected = logprobs(loaded.model)
    save_policy(tmp_path / "saved", loaded.model, loaded.tokenizer, card="")
    resumed = load(base, resume=tmp_path / "saved", **changes)
    assert torch.equal(logprobs(resumed.model), expected)
    assert check_policy_paths(resumed.model) < 5e-6
    merged = load(tmp_path / "saved").model
    torch.testing.assert_close(logprobs(merged), expected, rtol=0, atol=2e-6)
    (tmp_path / "saved" / ADAPTERS).unlink()
    with pytest.raises(CheckpointError, match="has no adapters"):
        load(base, resume=tmp_path / "saved", **changes)


def refused(directory, **changes):
    with pytest.raises(ModelError) as caught:
        load(directory, **changes)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_reward_model(is_tied, save):
    """Also where its configuration denies it, as after some conversions."""
    directory = save(tiny.tiny_classifier("qwen3", tie_word_embeddings=is_tied))
    text = refused(directory)
    for part in (
        "is a reward model or classifier (Qwen3ForSequenceClassification)",
        "env.reward_model.model_name",
    ):
        assert part in text
    edit_json(
        directory / "config.json", lambda c: c.update({"architectures": ["Qwen3ForCausalLM"]})
    )
    with speaking({"policy.model_name": "--model"}):
        text = refused(directory)
    assert f"--model {directory} is a reward model or classifier (its weights hold score.w" in text


def test_a_decoder_without_its_head(save):
    decoder = tiny.tiny_language_model("qwen3").model
    text = refused(save(decoder))
    for part in ("the weights lack lm_head.weight", "tie_word_embeddings", "without its head"):
        assert part in text
    tied = save(tiny.tiny_language_model("qwen3-tied").model, name="tied")
    assert load(tied).model.path == "forest"


def test_models_that_read_the_whole_text_at_once(save):
    settings = {**tiny.COMMON, "max_position_embeddings": 600}
    encoder = AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **settings))
    assert "BertLMHeadModel looks at later tokens" in refused(save(encoder))
    settings = {"use_bidirectional_attention": True, "head_dim": 8}
    network = tiny.tiny_policy("gemma2", path="padded", **settings).causal_lm
    assert "Gemma2ForCausalLM looks at later tokens" in refused(save(network, name="gemma"))
    translator = T5Config(vocab_size=300, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
    directory = save(T5ForConditionalGeneration(translator), name="t5")
    assert "T5Config" in refused(directory)


def test_a_tokenizer_that_is_larger_than_the_model(save):
    tokenizer = made.make_tokenizer(more=tuple(f"<extra_{i}>" for i in range(60)))
    text = refused(save(tiny.tiny_language_model("qwen3"), tokenizer))
    assert f"the tokenizer has {len(tokenizer)} tokens and the model embeds 300" in text


def test_texts_longer_than_the_model_can_number(save):
    directory = save(tiny.tiny_language_model("qwen3"))
    assert load(directory, max_length=1024).notes == []
    with pytest.raises(ConfigError, match=r"max_total_sequence_length=1025: .* has 1,024 positio"):
        load(directory, max_length=1025)


def test_the_padded_path_can_be_asked_for_and_is_taken_where_no_other_is_possible(save):
    directory = save(tiny.tiny_policy("qwen3", path="padded").causal_lm)
    padded = load(directory, sequence_packing={"enabled": False})
    assert padded.notes == ["padded path: policy.sequence_packing.enabled is false"]
    assert padded.model.path == "padded"
    torch.testing.assert_close(
        logprobs(padded.model), logprobs(load(directory).model), rtol=0, atol=5e-6
    )
    assert 0 < check_policy_paths(padded.model) < 5e-6
    overrides = {**tiny.JAMBA, "use_mamba_kernels": False}
    hybrid = {"architecture": "jamba", "config_overrides": overrides}
    other = load(None, scratch={**SCRATCH, **hybrid})
    assert (
        other.notes[0] == "padded path: JambaForCausalLM does not take an attention implementation"
    )
    assert 0 < check_policy_paths(other.model) < 1e-5


@pytest.mark.parametrize("name", sorted(tiny.LANGUAGE_MODELS))
def test_forests_of_every_architecture_pass(name):
    assert 0 < check_policy_paths(tiny.tiny_policy(name, std=0.2, temperature=0.7)) < 5e-6


def test_weights_in_bfloat16_pass_and_the_model_is_as_it_was():
    model = tiny.tiny_policy("qwen3-sliding", dtype=torch.bfloat16, precision=torch.bfloat16)
    model.train()
    model.with_entropy = True
    assert 1e-4 < check_policy_paths(model) < 0.05
    assert model.training
    assert model.with_entropy
    assert model.causal_lm.config._attn_implementation == FOREST
    assert model.causal_lm.config.sliding_window == 9


@pytest.mark.parametrize("std", [0.02, 0.2])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_an_attention_that_ignores_the_plan_is_refused(std, precision):
    model = tiny.tiny_policy("qwen3", std=std, precision=precision)
    model.causal_lm.set_attn_implementation("heedless")
    with pytest.raises(ModelError, match=r"another log-probability in a batch.*packing.enabled=fa"):
        check_policy_paths(model)


def test_weights_that_are_not_numbers_are_an_error_of_their_own():
    model = tiny.tiny_policy("llama")
    with torch.no_grad():
        model.causal_lm.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="NaN or infinite: its weights are damaged"):
        check_policy_paths(model)


def test_a_head_that_is_no_linear_layer_is_refused():
    network = tiny.tiny_language_model("llama")
    network.lm_head = nn.Sequential(network.lm_head)
    with pytest.raises(ModelError, match="no linear head over a vocabulary"):
        PolicyModel(network, path="forest", precision=torch.float32)


def forgetful_window():
    model = tiny.tiny_policy("qwen2-sliding", sliding_window=512)
    check_policy_paths(model)
    model.causal_lm.set_attn_implementation("windowless")
    return model


def doubled_logits():
    model = tiny.tiny_policy("llama")
    double_logits(model.causal_lm)
    return model


def with_a_head_that(name, attribute, value, std):
    """A model whose head does more than is known."""
    model = tiny.tiny_policy(name, std=std)
    setattr(model, attribute, value)
    return model


@pytest.mark.parametrize(
    "make",
    [
        forgetful_window,
        doubled_logits,
        *(
            partial(with_a_head_that, *head, std)
            for head in (
                ("granite", "logit_scale", 1),
                ("cohere", "logit_scale", 1),
                ("gemma2-capped", "softcap", 9),
            )
            for std in (0.05, 0.2)
        ),
    ],
)
def test_a_model_that_computes_something_else_is_refused(make):
    with pytest.raises(ModelError, match="another log-probability in a batch"):
        check_policy_paths(make())
