"""A checkpoint of a policy is a Hugging Face model: any program gets our logits from it."""

import contextlib
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
import tiny_tokenizers as made
from laurel.config.policy import LoraConfig
from laurel.models.checkpoint.card import CARD, CardFacts, policy_card
from laurel.models.checkpoint.export import save_policy
from laurel.models.forest.attention import FOREST
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.adapters import ADAPTERS, add_adapters
from laurel.models.loading.policy import load_policy
from laurel.models.spec import ModelSpec

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))


def card():
    facts = CardFacts(
        method="GRPO",
        base_model="a tiny model",
        data={"train": "errands.jsonl: 10 of 12 rows"},
        metrics={"validation-accuracy": 0.97531},
        settings={"num_generations_per_prompt": 8},
    )
    return policy_card(facts)


def save(directory, model, tokenizer=None):
    directory.mkdir(exist_ok=True)
    save_policy(directory, model, tokenizer or made.chatml(), card=card())
    return directory


def logits_of(network):
    with torch.inference_mode():
        return network(input_ids=IDS).logits


@pytest.mark.parametrize(
    "name",
    ["qwen3", "qwen3-tied", "gemma2-capped", "phi", "granite", "cohere", "gpt-oss", "mixtral"],
)
def test_the_files_are_those_that_transformers_writes(name, tmp_path):
    if name == "mixtral":  # its experts are joined in memory
        model = PolicyModel(tiny.mixtral(), path="padded", precision=torch.float32)
    else:
        model = tiny.tiny_policy(name, path="padded")
    model.causal_lm.save_pretrained(tmp_path / "theirs")
    if name != "mixtral":
        model.causal_lm.set_attn_implementation(FOREST)  # as it is trained
    model.train()
    save(tmp_path / "ours", model)
    assert model.training
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} == theirs
    for file in theirs:
        ours = (tmp_path / "ours" / file).read_bytes()
        assert ours == (tmp_path / "theirs" / file).read_bytes(), file


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
def test_adapters_are_merged_and_lie_there_too(name, tmp_path):
    model = tiny.tiny_policy(name, path="padded")
    before = logits_of(model.causal_lm)
    lora = LoraConfig(enabled=True, dim=4, alpha=8)
    model.causal_lm = add_adapters(model.causal_lm, lora, trains_head=False)
    tiny.draw_adapters(model, 0.1, "lora_B")
    expected = logits_of(model.causal_lm)
    assert (expected - before).abs().max() > 0.1
    save(tmp_path, model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(model.causal_lm), expected)
    # Computed in float64, so that what is left is the rounding of the merged weights alone.
    exact = logits_of(model.causal_lm.double())
    torch.testing.assert_close(logits_of(again.double()), exact, rtol=0, atol=5e-6)
    assert (tmp_path / ADAPTERS).is_file()
    assert (b"lm_head.weight" in (tmp_path / "model.safetensors").read_bytes()) == (name == "qwen3")


def test_generation_settings_of_the_model_do_not_stop_a_save(tmp_path):
    """Some hub models say a temperature without sampling: transformers would not write it anew."""
    first, second = tmp_path / "first", tmp_path / "second"
    save(first, tiny.tiny_policy("qwen3"))
    path = first / "generation_config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {"temperature": 0.6, "top_p": 0.9}
    path.write_text(json.dumps(content), encoding="utf-8")
    loaded = load_policy(
        ModelSpec(name=str(first)), seed=0, max_length=64, device=torch.device("cpu")
    )
    save(second, loaded.model, loaded.tokenizer)
    saved = json.loads((second / "generation_config.json").read_text(encoding="utf-8"))
    assert (saved["temperature"], saved["top_p"]) == (0.6, 0.9)


def test_what_the_card_tells_runs_as_it_says(tmp_path):
    model = tiny.tiny_policy("qwen3-tied")
    save(tmp_path, model)
    text = (tmp_path / CARD).read_text(encoding="utf-8")
    for part in (
        "Policy trained with GRPO",
        "Made with Laurel from a tiny model.",
        "- **train**: errands.jsonl: 10 of 12 rows",
        "| validation-accuracy | 0.9753 |",
        "- num_generations_per_prompt: 8",
    ):
        assert part in text, part
    assert "pipeline_tag: text-generation" in text.split("---")[1]
    code, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {}
    with contextlib.chdir(tmp_path):
        exec(code.replace("256", "4"), names)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert names["answer"] == tokenizer.decode(names["output"][0, -4:], skip_special_tokens=True)
