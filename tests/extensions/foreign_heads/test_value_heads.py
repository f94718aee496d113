"""Reward models as OpenRLHF, LLaMA-Factory and TRL save them score as they score them.

The directories are built by hand in the form of those programs, and the expected scores are a
hidden state of plain transformers times the head, at the token that those programs read.
"""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import tiny
import tiny_tokenizers as made
from laurel import plugins
from laurel.config.policy import PolicyConfig
from laurel.errors import ConfigError, ModelError
from laurel.models.loading.reward_model import find_value_head
from laurel.rewards.open import load_scorer
from laurel.rewards.spec import ScorerSpec, find_model
from laurel.run.model import model_spec
from laurel.types import Message, group_of
from model_directories import edit_json
from runs import warm_python

GROUP = group_of(
    [Message("user", "Where is the laurel?")], ["By the western gate.", "No.\n"], group_id="a"
)
WEIGHT = torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
BIAS = torch.tensor([0.75])


def tokenizer_that_pads_with_eos(template=made.CHATML):
    return made.make_tokenizer(
        bos=None,
        eos="<|im_end|>",
        pad="<|im_end|>",
        more=("<|im_start|>", "<|pad|>"),
        template=template,
    )


def llama_factory(directory, *, form="value_head.safetensors", max_shard_size="50GB"):
    """A causal language model, its tokenizer, and the head in a file of its own."""
    tiny.tiny_language_model("qwen3").save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer_that_pads_with_eos().save_pretrained(directory)
    head = {"v_head.summary.weight": WEIGHT, "v_head.summary.bias": BIAS}
    if form == "value_head.bin":
        torch.save(head, directory / form)
    else:
        save_file(head, directory / form, metadata={"format": "pt"})
    return directory


def trl(directory):
    """The same head among the weights, as TRL's own `save_pretrained` leaves it."""
    llama_factory(directory)
    weights = load_file(directory / "model.safetensors")
    weights |= load_file(directory / "value_head.safetensors")
    (directory / "value_head.safetensors").unlink()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def openrlhf(directory, *, prefix="score", form="single", template=made.CHATML):
    """A decoder with a linear layer beside it, and what `train_rm` puts into config.json."""
    tiny.tiny_language_model("qwen3").save_pretrained(directory)
    tokenizer_that_pads_with_eos(template).save_pretrained(directory)
    path = directory / "model.safetensors"
    weights = {k: v for k, v in load_file(path).items() if not k.startswith("lm_head")}
    weights[f"{prefix}.weight"] = WEIGHT
    path.unlink()
    if form == "single":
        save_file(weights, path, metadata={"format": "pt"})
    elif form == "bin":
        torch.save(weights, directory / "pytorch_model.bin")
    else:
        names = sorted(weights)
        parts = {
            "model-00001-of-00002.safetensors": names[:9],
            "model-00002-of-00002.safetensors": names[9:],
        }
        for file, held in parts.items():
            save_file({n: weights[n] for n in held}, directory / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: f for f, held in parts.items() for n in held}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    said = {
        "architectures": ["RewardModel"],
        "value_head_prefix": prefix,
        "normalize_reward": False,
        "mean": 0.5,
        "std": 2.0,
    }
    edit_json(directory / "config.json", lambda config: config.update(said))
    return directory


def scored(directory, **policy):
    said = []
    scorer = load_scorer(
        find_model(str(directory)),
        ScorerSpec(device="cpu", model=model_spec(PolicyConfig(**policy))),
        say=said.append,
    )
    (scores,) = scorer.score_now([GROUP])
    return scorer, [score.value for score in scores], "\n".join(said)


def by_hand(directory, texts, *, bias=0.0):
    """The hidden state of the last token of each text, by plain transformers, times the head."""
    decoder = AutoModel.from_pretrained(directory, use_safetensors=None).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    found = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            hidden = decoder(input_ids=ids).last_hidden_state[0, -1].float()
        found.append(float(hidden @ WEIGHT[0]) + bias)
    return found


def texts_of(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in GROUP.conversation(i)], tokenize=False
        )
        for i in range(2)
    ]


def test_llama_factory_scores_the_template_as_it_is_and_adds_its_bias(tmp_path):
    directory = llama_factory(tmp_path)
    scorer, found, said = scored(directory)
    expected = by_hand(directory, texts_of(directory), bias=0.75)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found != pytest.approx([one - 0.75 for one in expected], abs=1e-2)
    assert "made by LLaMA-Factory; its head is from value_head.safetensors" in said
    assert "it padded with '<|im_end|>', which ends texts; padding is now '<|pad|>'" in said
    assert scorer.contract.tokenizer.chat_template == made.CHATML


def test_llama_factory_in_several_files(tmp_path):
    directory = llama_factory(tmp_path, max_shard_size="20KB")
    assert (directory / "model.safetensors.index.json").is_file()
    _, found, _ = scored(directory)
    assert found == pytest.approx(by_hand(directory, texts_of(directory), bias=0.75), abs=1e-5)


@pytest.mark.slow
def test_a_pickled_head_is_refused_with_the_command_that_converts_it(tmp_path):
    directory = llama_factory(tmp_path, form="value_head.bin")
    with pytest.raises(ModelError, match=r"value_head\.bin is pickled") as error:
        scored(directory, safetensors_only=False)
    program = str(error.value).partition('python -c "')[2].removesuffix('"')
    ran = warm_python()([sys.executable, "-c", program], directory)
    assert ran.returncode == 0, ran.stderr
    _, found, _ = scored(directory)
    assert found == pytest.approx(by_hand(directory, texts_of(directory), bias=0.75), abs=1e-5)


def test_trl_keeps_the_head_among_the_weights(tmp_path):
    directory = trl(tmp_path)
    _, found, said = scored(directory)
    assert found == pytest.approx(by_hand(directory, texts_of(directory), bias=0.75), abs=1e-5)
    assert "made by TRL; its head is from model.safetensors: v_head.summary.weight" in said


@pytest.mark.parametrize("prefix", ["score", "value_head"])
@pytest.mark.parametrize("form", ["single", "sharded"])
def test_openrlhf_ends_with_eos_and_no_line_break(prefix, form, tmp_path):
    directory = openrlhf(tmp_path, prefix=prefix, form=form)
    scorer, found, said = scored(directory)
    texts = [text.rstrip("\n") for text in texts_of(directory)]
    assert all(text.endswith("<|im_end|>") for text in texts)  # by the template
    assert found == pytest.approx(by_hand(directory, texts), abs=1e-5)
    assert found != pytest.approx(by_hand(directory, texts_of(directory)), abs=1e-2)
    assert "made by OpenRLHF; its head is from model" in said
    rules = scorer.contract.rules
    assert (rules.mean, rules.std, rules.truncation_side) == (0.5, 2.0, "right")
    assert not {"value_head_prefix", "mean", "std"} & vars(scorer.model.classifier.config).keys()


def test_openrlhf_puts_eos_behind_a_blank_where_the_template_has_none(tmp_path):
    directory = openrlhf(tmp_path, template=made.BARE)
    _, found, _ = scored(directory)
    texts = [f"{text.rstrip(chr(10))} <|im_end|>" for text in texts_of(directory)]
    assert found == pytest.approx(by_hand(directory, texts), abs=1e-5)


def test_openrlhf_with_pickled_weights_needs_leave(tmp_path):
    directory = openrlhf(tmp_path, form="bin")
    with pytest.raises(ModelError, match=r"OpenRLHF, and has no weights in safetensors"):
        scored(directory)
    _, found, _ = scored(directory, safetensors_only=False)
    texts = [text.rstrip("\n") for text in texts_of(directory)]
    assert found == pytest.approx(by_hand(directory, texts), abs=1e-5)


def test_a_head_of_a_name_of_its_own_in_pickled_weights_is_never_drawn_at_random(tmp_path):
    directory = openrlhf(tmp_path, prefix="value_head", form="bin")
    with pytest.raises(ModelError, match=r"make safetensors of them"):
        scored(directory, safetensors_only=False)
    edit_json(directory / "config.json", lambda c: c.update(value_head_prefix="score"))
    with pytest.raises(ModelError, match=r"the weights lack score\.weight"):
        scored(directory, safetensors_only=False)


def test_the_prompt_of_a_template_for_openrlhf_is_left_alone(tmp_path):
    scorer, _, _ = scored(openrlhf(tmp_path))
    asked = [{"role": "user", "content": "a"}]
    plain = tokenizer_that_pads_with_eos()
    arguments = {"tokenize": False, "add_generation_prompt": True}
    assert scorer.contract.tokenizer.apply_chat_template(
        asked, **arguments
    ) == plain.apply_chat_template(asked, **arguments)


def test_a_critic_is_refused(tmp_path):
    directory = openrlhf(tmp_path)
    edit_json(directory / "config.json", lambda c: c.update(architectures=["CriticModel"]))
    with pytest.raises(ModelError, match="is a critic of OpenRLHF"):
        scored(directory)


def test_what_is_found_and_what_is_understood_is_listed(tmp_path):
    directory = llama_factory(tmp_path)
    save_file({"reward.weight": WEIGHT}, directory / "value_head.safetensors")
    with pytest.raises(
        ModelError,
        match=r"holds no v_head\.summary\.weight and no v_head\.summary\.bias. It holds: "
        r"reward\.weight\. Understood are: .*LLaMA-Factory.*OpenRLHF.*TRL",
    ):
        scored(directory)


def test_a_head_by_another_name_than_the_configuration_says(tmp_path):
    directory = openrlhf(tmp_path, prefix="value_head")
    edit_json(directory / "config.json", lambda c: c.update(value_head_prefix="v"))
    with pytest.raises(ModelError, match=r"have no v\.weight .*they have: value_head\.weight"):
        scored(directory)


def test_a_head_of_another_size(tmp_path):
    directory = llama_factory(tmp_path)
    head = {"v_head.summary.weight": torch.zeros(1, 7), "v_head.summary.bias": BIAS}
    save_file(head, directory / "value_head.safetensors")
    with pytest.raises(ModelError, match=r"is \[1, 7\], and the head of .* is \[1, 32\]"):
        scored(directory)


def test_a_torn_head(tmp_path):
    directory = llama_factory(tmp_path)
    (directory / "value_head.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"value_head\.safetensors cannot be read"):
        scored(directory)


def test_a_head_that_nobody_knows_is_not_passed_over_in_silence(tmp_path):
    directory = llama_factory(tmp_path)
    (directory / "value_head.safetensors").unlink()
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"rm_head.weight": WEIGHT}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"hold, besides .*: rm_head\.weight\. Understood are"):
        scored(directory, tokenizer={"pad_token": "auto"})


def test_adapters_without_their_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapters without the model .*llamafactory-cli"):
        find_model(str(tmp_path))


def test_models_of_hugging_face_and_ours_have_no_foreign_head(tmp_path):
    tiny.tiny_language_model("qwen3").save_pretrained(tmp_path)
    assert find_value_head(tmp_path) is None
    assert find_value_head(tmp_path / "missing") is None
    save_file({}, tmp_path / "value_head.safetensors")
    assert find_value_head(tmp_path) is not None
    (tmp_path / "scoring.json").write_text("{}")
    assert find_value_head(tmp_path) is None


def test_a_broken_form_of_another_package_stops_no_model(tmp_path, monkeypatch):
    config = {"architectures": ["RewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    find, names = plugins.find, plugins.names("heads")

    def found(kind, name):
        if name == "theirs":
            raise ConfigError("theirs cannot be imported")
        return find(kind, name)

    monkeypatch.setattr(plugins, "find", found)
    monkeypatch.setattr(plugins, "names", lambda kind: ["theirs", *names])
    with (
        pytest.warns(RuntimeWarning, match="theirs"),
        pytest.raises(ModelError, match="OpenRLHF"),
    ):
        find_value_head(tmp_path)
