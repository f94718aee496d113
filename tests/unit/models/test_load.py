"""What is loaded as a reward model, what becomes one, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import tiny
import tiny_tokenizers as made
from laurel.config.policy import RewardPolicyConfig
from laurel.data.forest import to_forest, to_padded
from laurel.errors import CheckpointError, ConfigError, ModelError
from laurel.models.forest.attention import FOREST
from laurel.models.loading.reward_model import load_reward_model
from laurel.run.model import model_spec
from laurel.types import Message, group_of
from model_directories import edit_json, edit_weights

GROUP = group_of([Message("user", "Where is the laurel?")], ["By the gate."], group_id="g")


def policy(directory, **changes):
    settings = {"precision": "float32", **changes}
    return model_spec(RewardPolicyConfig(model_name=str(directory), **settings))


def load(
    directory,
    *,
    seed=1,
    max_length=512,
    truncation_side="left",
    resume=None,
    weights=None,
    **changes,
):
    return load_reward_model(
        policy(directory, **changes),
        seed=seed,
        max_length=max_length,
        truncation_side=truncation_side,
        device=torch.device("cpu"),
        weights_dtype=weights or torch.float32,
        resume_from=resume,
    )


def score(loaded, group=GROUP):
    tokens = loaded.contract.encode([group])
    batch = to_forest(tokens) if loaded.model.path == "forest" else to_padded(tokens, pad_id=0)
    with torch.inference_mode():
        return loaded.model.eval()(batch)


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma2", "llama", "phi", "gpt-oss"])
def test_a_reward_model_gives_the_scores_that_transformers_gives(name, save):
    directory = save(tiny.tiny_classifier(name))
    loaded = load(directory)
    assert not loaded.has_new_head
    assert loaded.notes == []
    assert loaded.model.path == "forest"
    assert loaded.base_model == str(directory)
    reference = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    (tokens,) = loaded.contract.encode([GROUP])
    with torch.inference_mode():
        ids = torch.from_numpy(tokens.branches_ids_G[0]).long()
        expected = reference(input_ids=ids[None]).logits
    torch.testing.assert_close(score(loaded), expected, rtol=0, atol=2e-6)


def test_weights_in_bfloat16_become_float32_masters_unless_they_can_stay(save):
    directory = save(tiny.tiny_classifier("qwen3", dtype=torch.bfloat16))
    for loaded, kept in (
        (load(directory, precision="bfloat16"), torch.float32),
        (load(directory, weights=torch.bfloat16), torch.bfloat16),
    ):
        assert {p.dtype for p in loaded.model.parameters()} == {kept}
        assert loaded.model.precision == torch.bfloat16
        assert score(loaded).dtype == torch.float32


def test_a_config_that_denies_the_head_does_not_matter(save):
    """D23: exported with the architecture of the language model and no number of labels."""
    directory = save(tiny.tiny_classifier("qwen3"))
    expected = score(load(directory))

    def deny(config):
        config["architectures"] = ["Qwen3ForCausalLM"]
        del config["id2label"], config["label2id"]

    edit_json(directory / "config.json", deny)
    loaded = load(directory)
    assert not loaded.has_new_head
    assert torch.equal(score(loaded), expected)


def test_every_token_learns_though_the_old_padding_was_one_of_them(save):
    """The row of the padding token gets no gradient: it must not be that of a word."""
    tokenizer = made.chatml()
    classifier = tiny.tiny_classifier("qwen3", pad_token_id=tokenizer.eos_token_id)
    loaded = load(save(classifier, tokenizer))
    tokens = loaded.contract.encode([GROUP])
    loaded.model(to_forest(tokens)).sum().backward()
    gradient = loaded.model.classifier.get_input_embeddings().weight.grad
    assert gradient[tokenizer.eos_token_id].abs().sum() > 0


def test_a_language_model_becomes_a_reward_model_with_a_seeded_head(save):
    language_model = tiny.tiny_language_model("qwen3")
    directory = save(language_model)
    before = torch.get_rng_state()
    loaded, again, other = load(directory, seed=1), load(directory, seed=1), load(directory, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert loaded.has_new_head
    assert loaded.notes == [
        "the reward head is new and random: its scores mean nothing before training"
    ]
    heads = [model.model.classifier.score.weight for model in (loaded, again, other)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.allclose(heads[0], heads[2])
    assert 0.3 < float(heads[0].detach().std()) * 33 < 3  # a standard deviation of 1 / (32 + 1)
    body = loaded.model.classifier.model.state_dict()
    for name, weight in language_model.model.state_dict().items():
        assert torch.equal(body[name], weight), name


def test_a_model_that_learns_a_head_here_closes_its_conversations(save):
    directory = save(tiny.tiny_language_model("llama"), made.gemma())
    assert load(directory).contract.render(GROUP.conversation(0)).endswith("<eos>")
    trained = save(tiny.tiny_classifier("llama"), made.gemma(), name="trained")
    assert load(trained).contract.render(GROUP.conversation(0)).endswith("<end_of_turn>\n")


def test_a_regression_head_has_one_output_for_each_attribute(save):
    attributes = ["helpfulness", "correctness", "verbosity"]
    regression = {
        "reward_model_type": "regression",
        "attributes": attributes,
        "attribute_weights": [1.0, 1.0, -0.5],
    }
    loaded = load(save(tiny.tiny_language_model("qwen3")), reward_model_cfg=regression)
    assert loaded.model.num_outputs == 3
    assert score(loaded).shape == (1, 3)
    assert loaded.contract.rules.attributes == tuple(attributes)
    assert loaded.contract.scalar([1.0, 2.0, 4.0]) == 1.0
    trained = save(tiny.tiny_classifier("qwen3", num_labels=3), name="trained")
    assert not load(trained, reward_model_cfg=regression).has_new_head
    with pytest.raises(ModelError, match=r"score.weight has 3 outputs and this run needs 1"):
        load(trained)


def test_an_encoder_without_a_head_gets_one(save):
    encoder = tiny.randomised("bert", {"max_position_embeddings": 64}).bert
    loaded = load(save(encoder))
    assert loaded.has_new_head
    other = load(save(encoder, name="again"), seed=2)
    assert not torch.equal(
        loaded.model.classifier.classifier.weight, other.model.classifier.classifier.weight
    )


def refused(directory, **changes):
    with pytest.raises(ModelError) as caught:
        load(directory, **changes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def cut(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("spoil", "changes", "said"),
    [
        (
            lambda d: edit_weights(d, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")),
            {},
            "the weights lack model.layers.1.mlp.up_proj.weight, which would be left random",
        ),
        (
            lambda d: edit_weights(d, lambda w: w.pop("score.weight")),
            {},
            "the weights lack score.weight",
        ),
        (
            lambda d: None,
            {"hf_config_overrides": {"intermediate_size": 48}},
            "down_proj.weight is [32, 64] in the weights and [32, 48] by the configuration",
        ),
        (cut, {}, "cannot be loaded"),
    ],
    ids=["missing", "without its head", "of another size", "damaged"],
)
def test_weights_that_do_not_make_the_model(spoil, changes, said, save):
    directory = save(tiny.tiny_classifier("qwen3"))
    spoil(directory)
    assert said in refused(directory, **changes)


def test_pickled_weights_unless_they_are_trusted(save):
    directory = save(tiny.tiny_classifier("qwen3"))
    expected = score(load(directory))
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / "pytorch_model.bin")
    path.unlink()
    text = refused(directory)
    for part in ("Pickled weights can run code", "policy.safetensors_only=false"):
        assert part in text
    assert torch.equal(score(load(directory, safetensors_only=False)), expected)


def test_code_that_comes_with_a_model(save, tmp_path):
    directory = save(tiny.tiny_classifier("qwen3"))
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w').close()\nfrom transformers import Qwen3Config as C\n"
    (directory / "own.py").write_text(code, encoding="utf-8")

    def bring_code(config):
        config["model_type"] = "a_type_of_its_own"
        config["auto_map"] = {"AutoConfig": "own.C"}

    edit_json(directory / "config.json", bring_code)
    text = refused(directory)
    assert "It brings Python code: read it, then set policy.trust_remote_code=true" in text
    assert not marker.exists()


def test_a_tokenizer_that_is_larger_than_the_model(save):
    words = tuple(f"<extra_{i}>" for i in range(60))
    tokenizer = made.make_tokenizer(more=words)
    text = refused(save(tiny.tiny_classifier("qwen3"), tokenizer))
    assert f"the tokenizer has {len(tokenizer)} tokens and the model embeds 300" in text


def test_a_tokenizer_without_a_template(save):
    text = refused(save(tiny.tiny_classifier("qwen3"), made.make_tokenizer(template=None)))
    for part in ("no chat template", "policy.tokenizer.chat_template", "chatml", ".jinja"):
        assert part in text
    loaded = load(
        save(tiny.tiny_classifier("qwen3"), made.make_tokenizer(template=None), name="again"),
        tokenizer={"chat_template": "plain"},
    )
    expected = "User: Where is the laurel?\n\nAssistant: By the gate.\n\n"
    assert loaded.contract.render(GROUP.conversation(0)) == expected


def test_padding_that_ends_sequences(save):
    tokenizer = made.make_tokenizer(pad="</s>", more=("<|pad|>",))
    directory = save(tiny.tiny_classifier("qwen3"), tokenizer)
    assert "policy.tokenizer.pad_token=auto" in refused(directory, tokenizer={"pad_token": None})
    loaded = load(directory)
    assert any("'<|pad|>' is the padding token instead" in note for note in loaded.notes)
    assert loaded.contract.tokenizer.pad_token == "<|pad|>"
    assert loaded.contract.rules.pad_id != loaded.contract.rules.eos_id


def test_a_head_that_transformers_reads_before_the_end_is_not_read_at_the_end_in_silence(save):
    """Its configuration pads with the token that ends every conversation."""
    template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    tokenizer = made.make_tokenizer(pad="</s>", more=("<|pad|>",), template=template)
    classifier = tiny.tiny_classifier("qwen3", pad_token_id=tokenizer.eos_token_id)
    directory = save(classifier, tokenizer)
    text = refused(directory)
    assert "reads its score from the token before" in text
    assert "policy.tokenizer.pad_token='<|pad|>'" in text
    loaded = load(directory, tokenizer={"pad_token": "<|pad|>"})
    assert loaded.contract.rules.pad_id != loaded.contract.rules.eos_id
    model = tiny.tiny_language_model("qwen3")
    model.config.pad_token_id = tokenizer.eos_token_id
    assert load(save(model, tokenizer, name="new head")).has_new_head


def test_nothing_there(tmp_path):
    text = refused(tmp_path / "gone")
    assert str(tmp_path / "gone") in text
    (tmp_path / "empty").mkdir()
    assert "policy.model_name=" in refused(tmp_path / "empty")
    made.chatml().save_pretrained(tmp_path)  # only a tokenizer
    assert f"policy.model_name={tmp_path} cannot be loaded" in refused(tmp_path)


BIDIRECTIONAL = {"use_bidirectional_attention": True, "head_dim": 8}
PADDED = {
    "bert": ({"max_position_embeddings": 600}, "BertForSequenceClassification pools by itself"),
    "jamba": (
        tiny.JAMBA,
        "JambaForSequenceClassification does not take an attention implementation",
    ),
    "minimax": (
        {"num_local_experts": 2, "num_hidden_layers": 2},
        "MiniMaxForSequenceClassification has layers of type linear_attention",
    ),
    "gemma2": (BIDIRECTIONAL, "Gemma2ForSequenceClassification looks at later tokens"),
}


@pytest.mark.parametrize("kind", sorted(PADDED))
def test_what_a_forest_cannot_serve_takes_the_padded_path(kind, save):
    settings, reason = PADDED[kind]
    loaded = load(save(tiny.randomised(kind, settings)))
    assert loaded.model.path == "padded"
    assert loaded.notes == [f"padded path: {reason}"]
    assert loaded.model.classifier.config._attn_implementation != FOREST
    assert loaded.contract.rules.pooled == ("model" if kind == "bert" else "last")
    assert score(loaded).shape == (1, 1)


@pytest.mark.parametrize("name", sorted(tiny.ARCHITECTURES))
def test_the_padded_path_can_be_asked_for(name, save):
    """Also of models that have no fused attention of their own, like Gemma 2 and gpt-oss."""
    directory = save(tiny.tiny_classifier(name))
    loaded = load(directory, sequence_packing={"enabled": False})
    assert loaded.model.path == "padded"
    assert loaded.notes == ["padded path: policy.sequence_packing.enabled is false"]
    forest = load(directory)
    assert forest.model.path == "forest"
    assert forest.model.classifier.config._attn_implementation == FOREST
    torch.testing.assert_close(score(loaded), score(forest), rtol=0, atol=5e-6)


def test_an_encoder_reads_no_more_than_it_has_positions_for(save):
    directory = save(tiny.randomised("bert", {"max_position_embeddings": 32}))
    loaded = load(directory)
    assert loaded.contract.rules.max_length == 32
    assert "the model has 32 positions: longer conversations are cut to that" in loaded.notes
    long = group_of(GROUP.prompt, ["By the western gate. " * 9], group_id="g")
    assert score(loaded, long).shape == (1, 1)


LONGROPE = {
    "max_position_embeddings": 1024,
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    },
}


def test_a_long_neighbour_changes_no_score_though_the_rotation_depends_on_length(save):
    """Phi-3 turns all texts of a batch by other frequencies as soon as one of them is long."""
    directory = save(tiny.tiny_classifier("phi3", **LONGROPE))
    loaded = load(directory)
    assert loaded.contract.rules.max_length == 40
    assert "the model has 40 positions: longer conversations are cut to that" in loaded.notes
    short = group_of((), ["Here."], group_id="s")
    long = group_of(GROUP.prompt, ["By the western gate. " * 9], group_id="l")
    alone = score(loaded, short)
    with torch.inference_mode():
        together = loaded.model(to_forest(loaded.contract.encode([short, long])))
        torch.testing.assert_close(together[:1], alone, rtol=0, atol=2e-6)
        # The danger is real: with longer texts let in, the short one gets another score.
        uncut = loaded.contract.with_rules(max_length=512).encode([short, long])
        assert (loaded.model(to_forest(uncut))[0] - alone).abs().item() > 1e-3


def test_a_clock_in_the_template_is_told_of(save):
    loaded = load(save(tiny.tiny_classifier("qwen3"), made.llama_31()))
    (note,) = loaded.notes
    assert note.startswith("the chat template prints the date; it is pinned to ")
    assert loaded.contract.rules.pinned_date in note
    assert "policy.tokenizer.date" in note


def test_the_contract_of_a_model_goes_before_the_configuration(save):
    directory = save(tiny.tiny_classifier("qwen3"))
    first = load(directory, max_length=77, truncation_side="right").contract
    first.save(directory)
    loaded = load(directory, max_length=512, truncation_side="left")
    assert loaded.contract.rules == first.rules
    assert loaded.notes == [
        "the model brings its own contract: conversations of more than 77 tokens are cut on the "
        "right, as it was trained"
    ]
    assert load(directory, max_length=77, truncation_side="right").notes == []
    with pytest.raises(CheckpointError, match="chat template is not the one"):
        load(directory, tokenizer={"chat_template": "plain"})


def test_attributes_of_another_contract_are_refused(save):
    directory = save(tiny.tiny_classifier("qwen3", num_labels=2))
    regression = {"reward_model_type": "regression", "attributes": ["a", "b"]}
    load(directory, reward_model_cfg=regression).contract.save(directory)
    assert load(directory, reward_model_cfg=regression).contract.rules.attributes == ("a", "b")
    with pytest.raises(ModelError, match=r"gives the attributes \['a', 'b'\].*asks for \['b', 'a'"):
        load(directory, reward_model_cfg={**regression, "attributes": ["b", "a"]})


def adapters(**settings):
    return {"lora_cfg": {"enabled": True, "dim": 2, **settings}}


def test_adapters_train_themselves_and_the_head_only(save):
    loaded = load(save(tiny.tiny_language_model("qwen3")), dtensor_cfg=adapters())
    trained = {n for n, p in loaded.model.classifier.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert all("lora_" in name for name in trained - {"score.weight"})
    layers = {name.split(".")[-4] for name in trained - {"score.weight"}}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_adapters_for_chosen_layers(save):
    directory = save(tiny.tiny_language_model("qwen3"))
    config = adapters(target_modules=["q_proj", "v_proj"], exclude_modules=["v_proj"])
    loaded = load(directory, dtensor_cfg=config)
    trained = {n for n, p in loaded.model.classifier.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained - {"score.weight"}} == {"q_proj"}
    with pytest.raises(ConfigError) as caught:
        load(directory, dtensor_cfg=adapters(target_modules=["q_proj", "query"]))
    text = str(caught.value)
    assert "no linear layer is called query; there are down_proj, gate_proj, k_proj" in text
    with pytest.raises(ConfigError, match=r"exclude_modules leaves no layer to adapt"):
        load(directory, dtensor_cfg=adapters(target_modules=["q_proj"], exclude_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"exclude_modules: no linear layer is called gate;"):
        load(directory, dtensor_cfg=adapters(exclude_modules=["gate"]))
