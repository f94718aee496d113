"""A checkpoint is a Hugging Face model: any program gets our scores from it."""

import contextlib
import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

import tiny
import tiny_tokenizers as made
from laurel.config.policy import LoraConfig
from laurel.data.forest import to_forest
from laurel.errors import CheckpointError
from laurel.models.checkpoint.card import CARD, CardFacts, reward_model_card
from laurel.models.checkpoint.export import save_reward_model
from laurel.models.forest.attention import FOREST
from laurel.models.loading.adapters import ADAPTERS, load_adapters
from laurel.models.loading.reward_model import load_reward_model
from laurel.models.scoring import ScoringContract
from laurel.models.spec import ModelSpec
from laurel.rewards.scorer import LocalScorer
from laurel.types import Message, group_of

PROMPT = [Message("user", "Where is the laurel?")]
GROUPS = [
    group_of(PROMPT, ["By the western gate, under the old wall.", "No."], group_id="a"),
    group_of([Message("user", "And the rose?")], ["Gone " * 12, "", "Why?"], group_id="b"),
]


def contract_of(tokenizer, **changes):
    options = {"max_length": 512, "truncation_side": "left", "append_eos": True, **changes}
    return ScoringContract.create(tokenizer, **options)


def card_of(contract):
    facts = CardFacts(
        base_model="a tiny model",
        data={"train": "errands.jsonl: 10 of 12 rows"},
        metrics={"validation-default_accuracy": 0.97531},
        settings={"loss": "bradley_terry"},
    )
    return reward_model_card(facts, contract)


def save(directory, model, contract):
    directory.mkdir(exist_ok=True)
    save_reward_model(directory, model, contract, card=card_of(contract))
    return directory


def scores_of(model, contract):
    """Ours, `[N, K]` in the order of the groups."""
    with torch.inference_mode():
        return model.eval()(to_forest(contract.encode(GROUPS)))


def conversations():
    return [
        [{"role": m.role, "content": m.content} for m in group.conversation(i)]
        for group in GROUPS
        for i in range(len(group.completions_G))
    ]


def scores_by_the_card(directory):
    """What the first python code in the README of a checkpoint computes, run in its directory."""
    text = (directory / CARD).read_text(encoding="utf-8")
    code, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {}
    with contextlib.chdir(directory):
        exec(code, names)
    return names["scores"](conversations()), names


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("qwen2-sliding", made.chatml),
        ("llama", made.llama_31),
        ("gemma2", made.gemma),
        ("gemma3", made.gemma),
        ("gpt-oss", made.chatml),
        ("phi", made.make_tokenizer),
    ],
)
def test_transformers_gives_the_same_scores_as_the_card_says(name, make, tmp_path):
    """In a padded batch of different lengths, with the tokenizer and template that were saved."""
    model, contract = tiny.tiny_reward_model(name, std=0.1), contract_of(make())
    model.classifier.config.pad_token_id = contract.rules.pad_id
    save(tmp_path, model, contract)
    scores_N, names = scores_by_the_card(tmp_path)
    torch.testing.assert_close(scores_N, scores_of(model, contract)[:, 0], rtol=0, atol=1e-6)
    assert [len(names["token_ids"](one)) for one in conversations()] == [
        length for tokens in contract.encode(GROUPS) for length in tokens.lengths_G
    ]


def test_the_configuration_says_what_every_program_needs_and_nothing_of_ours(tmp_path):
    model, contract = tiny.tiny_reward_model("qwen3"), contract_of(made.chatml())
    save(tmp_path, model, contract)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_labels == 1
    assert config.pad_token_id == contract.rules.pad_id
    assert config.architectures == ["Qwen3ForSequenceClassification"]
    assert config._attn_implementation != FOREST
    for path in tmp_path.rglob("*.json"):
        assert "laurel_forest" not in path.read_text(encoding="utf-8")
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["id2label"] == {"0": "LABEL_0"}
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).dtype == torch.float32


def test_saving_changes_nothing_of_the_model(tmp_path):
    model, contract = tiny.tiny_reward_model("gemma2"), contract_of(made.gemma())
    before, state = scores_of(model, contract), model.state_dict()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    model.train()
    save(tmp_path, model, contract)
    assert model.training
    assert model.classifier.config._attn_implementation == FOREST
    assert torch.equal(scores_of(model, contract), before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, copies[name])


def test_a_regression_model_gives_all_its_attributes(tmp_path):
    model = tiny.tiny_reward_model("qwen3", num_labels=3, std=0.1)
    contract = contract_of(made.chatml(), attributes=("a", "b", "c"))
    save(tmp_path, model, contract)
    scores_NK, _ = scores_by_the_card(tmp_path)
    assert scores_NK.shape == (5, 3)
    torch.testing.assert_close(scores_NK, scores_of(model, contract), rtol=0, atol=1e-6)


def test_an_encoder_by_its_card(tmp_path):
    from laurel.models.forest.decoder import RewardModel

    classifier = tiny.randomised("bert", {"max_position_embeddings": 128}, std=0.1)
    model = RewardModel(classifier, head_name=None, path="padded", precision=torch.float32)
    tokenizer = made.make_tokenizer(template=made.BARE, adds_bos=True)
    contract = contract_of(tokenizer, pooled="model")
    save(tmp_path, model, contract)
    scores_N, _ = scores_by_the_card(tmp_path)
    verdicts = LocalScorer(model, contract).score_now(GROUPS)
    ours = [score.value for group in verdicts for score in group]
    torch.testing.assert_close(scores_N, torch.tensor(ours), rtol=0, atol=1e-6)


@pytest.fixture
def adapted(tmp_path):
    """A language model with adapters that have learned something, as a run would load it."""
    directory = tmp_path / "base"
    tiny.tiny_language_model("qwen3").save_pretrained(directory)
    made.chatml().save_pretrained(directory)
    lora = LoraConfig(enabled=True, dim=4, alpha=8)
    spec = ModelSpec(name=str(directory), precision="float32", lora=lora)

    def load(resume_from=None):
        return load_reward_model(
            spec,
            seed=3,
            max_length=512,
            truncation_side="left",
            device=torch.device("cpu"),
            resume_from=resume_from,
        )

    loaded = load()
    frozen = {
        name: parameter.detach().clone()
        for name, parameter in loaded.model.classifier.named_parameters()
        if not parameter.requires_grad
    }
    head = loaded.model.classifier.score.weight.detach().clone()
    optimizer = torch.optim.Adam((p for p in loaded.model.parameters() if p.requires_grad), lr=0.02)
    wanted_N = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    for _ in range(5):
        scores_NK = loaded.model(to_forest(loaded.contract.encode(GROUPS)))
        (scores_NK[:, 0] - wanted_N).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return loaded, load, frozen, head


def test_merged_weights_score_as_the_adapted_model(adapted, tmp_path):
    loaded, _, frozen, first_head = adapted
    model, contract = loaded.model, loaded.contract
    ours = scores_of(model, contract)
    save(tmp_path / "saved", model, contract)
    theirs, names = scores_by_the_card(tmp_path / "saved")
    torch.testing.assert_close(theirs, ours[:, 0], rtol=0, atol=1e-6)
    assert (names["model"].score.weight - first_head).abs().max() > 1e-3
    # Merging happened beside the model: it is as it was, bit for bit.
    for name, parameter in model.classifier.named_parameters():
        assert name not in frozen or torch.equal(parameter, frozen[name]), name
    assert torch.equal(scores_of(model, contract), ours)
    # And the adapters did something, so the comparison above says something.
    for layer in model.classifier.modules():
        if hasattr(layer, "lora_B"):
            layer.lora_B["default"].weight.data.zero_()
    assert (scores_of(model, contract) - ours).abs().max() > 1e-3


def test_adapters_come_back_exactly(adapted, tmp_path):
    loaded, load, _, _ = adapted
    directory = save(tmp_path / "saved", loaded.model, loaded.contract)
    resumed = load(directory)
    assert resumed.notes == []
    again = dict(resumed.model.classifier.named_parameters())
    for name, parameter in loaded.model.classifier.named_parameters():
        assert torch.equal(parameter, again[name]), name
        assert parameter.requires_grad == again[name].requires_grad
    assert torch.equal(
        scores_of(resumed.model, resumed.contract), scores_of(loaded.model, loaded.contract)
    )


def test_adapters_of_another_run_are_refused(adapted, tmp_path):
    loaded, load, _, _ = adapted
    directory = save(tmp_path / "saved", loaded.model, loaded.contract)
    state = load_file(directory / ADAPTERS)
    (directory / ADAPTERS).unlink()
    with pytest.raises(CheckpointError, match="has no adapters: it was trained without lora_cfg"):
        load(directory)
    from safetensors.torch import save_file

    state.pop("score.weight")
    save_file(state, directory / ADAPTERS)
    with pytest.raises(CheckpointError, match=r"holds other parameters.*score\.weight"):
        load_adapters(directory, loaded.model.classifier)
