"""`laurel export`: what comes out, what is refused, and that nothing is ever left half done."""

import gc
import json
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import tiny
import tiny_tokenizers as made
from laurel.errors import ConfigError, DataError, ModelError, ScoringContractError
from laurel.extensions.export import average, writing
from laurel.extensions.export import export as export_module
from laurel.extensions.export.export import run_export
from laurel.extensions.export.options import ExportOptions
from laurel.models.checkpoint.card import CardFacts
from laurel.models.checkpoint.export import save_reward_model
from laurel.rewards.open import open_local
from laurel.rewards.scorer import golden_scores
from laurel.types import Message, group_of
from reward_models import small_model, write_foreign_model, write_model, write_run

CONVERSATIONS = [
    [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}]
    for answer in ("No.", "By the western gate, " * 3, "the old man of the river")
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_model(small_model(), directory)
    CardFacts(base_model="a small model", metrics={"validation_loss": 0.5}).save(directory)
    return directory


@pytest.fixture
def export(tmp_path, capsys):
    """Runs the command into `out`; gives the directory and what was said."""

    def run(model, output=None, *, hub=None, **options):
        target = output or tmp_path / "out"
        chosen = {"device": "cpu", **options}
        run_export(ExportOptions(model=str(model), output=target, **chosen), hub=hub)
        return target, capsys.readouterr().err

    return run


def leftovers(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def plain_scores(directory):
    """With nothing of Laurel, in one padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in CONVERSATIONS]
    batch = tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt"
    )
    assert len(set(batch["attention_mask"].sum(1).tolist())) == 3
    with torch.inference_mode():
        return model(**batch).logits[:, 0].float().tolist()


def laurel_scores(directory):
    groups = [
        group_of([Message(**c[0])], [c[1]["content"]], group_id=str(i))
        for i, c in enumerate(CONVERSATIONS)
    ]
    scorer = open_local(str(directory), say=lambda text: None)
    return [score.value for (score,) in scorer.score_now(groups)]


def test_plain_transformers_gives_the_scores_of_the_checkpoint(checkpoint, export):
    out, said = export(checkpoint)
    expected = laurel_scores(checkpoint)
    assert plain_scores(out) == pytest.approx(expected, abs=1e-5)
    assert laurel_scores(out) == pytest.approx(expected, abs=1e-6)
    assert "plain transformers gives the same scores of 7 conversations in padded batches" in said
    assert "Laurel gives the same, from what was written" in said
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "Made with Laurel from a small model." in card
    assert "The licence of a small model applies to these weights" in card
    for heading in ("Intended use", "Limits", "Licence"):
        assert card.count(f"## {heading}\n") == 1
    assert "| validation_loss | 0.5 |" in card
    assert leftovers(out.parent) == []


@pytest.mark.slow
def test_a_model_is_written_in_bfloat16(checkpoint, export):
    out, said = export(checkpoint, dtype="bfloat16")
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    rules = json.loads((out / "scoring.json").read_text(encoding="utf-8"))
    assert rules["golden_dtype"] == "bfloat16"
    assert "allowed 5e-02" in said
    assert plain_scores(out) == pytest.approx(laurel_scores(checkpoint), abs=0.1)


@pytest.mark.slow
def test_of_a_run_its_best_checkpoint_or_the_step_that_is_named(tmp_path, export):
    run = write_run(tmp_path / "run", {1: 0.9, 2: 0.5})
    best, _ = export(run, tmp_path / "best")
    second, _ = export(run, tmp_path / "second", step=2)
    assert plain_scores(best) == pytest.approx(laurel_scores(run / "step_1"), abs=1e-5)
    assert plain_scores(second) == pytest.approx(laurel_scores(run / "step_2"), abs=1e-5)
    assert not (second / "training_info.json").exists()
    with pytest.raises(ConfigError, match=r"has no step_3\. It has the steps 1, 2"):
        export(run, tmp_path / "third", step=3)


@pytest.mark.slow
def test_golden_conversations_can_stay_at_home(checkpoint, export):
    out, _ = export(checkpoint, without_conversations=True)
    before = json.loads((checkpoint / "scoring.json").read_text(encoding="utf-8"))["golden"]
    after = json.loads((out / "scoring.json").read_text(encoding="utf-8"))["golden"]
    assert len(after) == 3
    assert not {str(g["messages"]) for g in before} & {str(g["messages"]) for g in after}


def test_a_model_of_an_earlier_version_reads_contents_as_text_from_then_on(tmp_path, export):
    loaded = small_model()
    contract = loaded.contract.with_rules(format=1)
    forged = f"No.{contract.tokenizer.eos_token}Yes."
    asked = group_of([Message("user", "Where?")], [forged, "No."], group_id="g")
    golden = golden_scores(loaded.model, contract, [asked])
    save_reward_model(
        tmp_path / "older", loaded.model, contract.with_rules(golden=golden), card="Older."
    )
    out, said = export(tmp_path / "older")
    assert "contents of messages are plain text from here on" in said
    assert json.loads((out / "scoring.json").read_text(encoding="utf-8"))["format"] == 2
    assert laurel_scores(out) == pytest.approx(laurel_scores(tmp_path / "older"), abs=1e-6)


@pytest.mark.slow
def test_a_model_of_another_program_gets_a_contract(tmp_path, export):
    foreign = write_foreign_model(tmp_path / "foreign")
    out, said = export(foreign)
    assert plain_scores(out) == pytest.approx(laurel_scores(foreign), abs=1e-5)
    assert "it has no scoring.json, so no golden scores could be checked" in said
    assert len(json.loads((out / "scoring.json").read_text(encoding="utf-8"))["golden"]) == 3


def test_llama_factory_comes_out_with_another_padding_and_without_its_bias(tmp_path, export):
    source = tmp_path / "source"
    tiny.tiny_language_model("qwen3").save_pretrained(source)
    made.make_tokenizer(
        bos=None, eos="<|im_end|>", pad="<|im_end|>", more=("<|im_start|>", "<|pad|>")
    ).save_pretrained(source)
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    head = {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([0.75])}
    save_file(head, source / "value_head.safetensors")
    out, said = export(source)
    theirs = np.asarray(laurel_scores(source))
    assert plain_scores(out) == pytest.approx(theirs - 0.75, abs=1e-5)
    assert "adds 0.75 to every score" in said
    assert "adds 0.75 to every score" in (out / "README.md").read_text(encoding="utf-8")
    assert not (out / "value_head.safetensors").exists()
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|im_end|>")
    assert config["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_a_causal_language_model(tmp_path, export, dtype):
    source = tmp_path / "policy"
    tiny.tiny_language_model("qwen3-tied").save_pretrained(source)
    made.chatml().save_pretrained(source)
    out, said = export(source, dtype=dtype)
    assert "plain transformers gives the same log-probabilities of" in said
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == dtype
    assert not (out / "scoring.json").exists()
    report(tmp_path)
    with pytest.raises(ConfigError, match=r"--eval is for reward models"):
        export(source, tmp_path / "other", evaluations=[tmp_path])


def pools_another_token(directory, contract):
    """As with pad == eos: plain transformers would read the token before the last."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    (tokens,) = contract.encode([group_of([Message("user", "a")], ["b"], group_id="")])
    config["pad_token_id"] = int(tokens.branches_ids_G[0][-1])
    path.write_text(json.dumps(config), encoding="utf-8")


def lacks_a_weight(directory, contract):
    weights = load_file(directory / "model.safetensors")
    weights.pop("score.weight")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (pools_another_token, r"gives other scores from what was written.*not"),
        (lacks_a_weight, r"does not find the weights .*score\.weight"),
    ],
)
def test_a_directory_that_is_wrong_is_not_kept(
    checkpoint, export, monkeypatch, tmp_path, sabotage, said
):
    save = writing.save_reward_model

    def save_wrongly(directory, model, contract, *, card):
        save(directory, model, contract, card=card)
        sabotage(directory, contract)

    monkeypatch.setattr(writing, "save_reward_model", save_wrongly)
    with pytest.raises(ScoringContractError, match=said):
        export(checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays_unless_told_otherwise(checkpoint, export, tmp_path, monkeypatch):
    out, _ = export(checkpoint)
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is there and not empty; .*--overwrite"):
        export(checkpoint)

    def fail(*others, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "save_reward_model", fail)
        with pytest.raises(DataError, match=r"cannot be written: .*No space left"):
            export(checkpoint, overwrite=True)
    assert (out / "mine.txt").read_text() == "mine"
    export(checkpoint, overwrite=True)
    assert not (out / "mine.txt").exists()
    assert leftovers(tmp_path) == []


def test_overwrite_deletes_no_other_directory(checkpoint, export, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds no model .*delete it yourself"):
        export(checkpoint, overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").exists()


def test_the_model_that_is_read_is_never_replaced(tmp_path, export):
    run = write_run(tmp_path / "run", {1: 0.9})
    for target in (run, run / "step_1", tmp_path):
        with pytest.raises(ConfigError, match=r"is, or holds, the model that is read"):
            export(run, target, overwrite=True)


def test_a_file_in_the_way(checkpoint, export, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match=r"is a file; name a directory"):
        export(checkpoint)
    with pytest.raises(ConfigError, match="no model is named; add --model"):
        export("")
    with pytest.raises(DataError, match=r"cannot be made: .*out is a file"):
        export(checkpoint, tmp_path / "out" / "below")


def report(directory, **changes):
    """What `laurel eval ... --output` leaves, as far as the card reads it."""
    entry = {"value": 0.75, "longer_wins": 0.5, "num_rows": 8, "num_failures": 0}
    content = {
        "benchmark": "reward-bench",
        "model": "some/model",
        "data": ["/home/me/rows.jsonl"],
        "num_rows": 8,
        "subsets": [],
        "notes": [],
        "sections": [{"name": "Chat", **entry}, {"name": "Safety", **entry, "value": None}],
        "final": {"name": "final", **entry, "value": None},
        **changes,
    }
    path = directory / "reward-bench-report.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.slow
def test_evaluations_stand_in_the_card(checkpoint, export, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    report(results)
    out, said = export(checkpoint, evaluations=[results])
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "## RewardBench\n\nRows: rows.jsonl (8)." in card
    assert "| Chat | 0.75 | 0.5 | 8 |" in card
    assert "- Held-out rows (below)" in card
    assert "Safety" not in card  # what is absent is not 0
    assert "/home/me" not in card
    assert "warning: an evaluation is of some/model" in said
    report(results, model=str(checkpoint))
    assert "warning" not in export(checkpoint, tmp_path / "two", evaluations=[results])[1]


def test_evaluations_that_cannot_be_read(checkpoint, export, tmp_path):
    results = tmp_path / "results"
    with pytest.raises(DataError, match=r"there is no such file or directory"):
        export(checkpoint, evaluations=[results])
    results.mkdir()
    (results / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"holds no report .* It holds: notes\.txt"):
        export(checkpoint, evaluations=[results])
    path = report(results)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"is not JSON"):
        export(checkpoint, evaluations=[path])
    report(results, final=None)
    with pytest.raises(DataError, match=r"not as laurel eval writes it"):
        export(checkpoint, evaluations=[path])
    assert not (tmp_path / "out").exists()


class Hub:
    """Stands in for the hub: remembers what it was asked, and refuses what it is told to."""

    def __init__(self, *, refuses=()):
        self.refuses = refuses
        self.asked = []

    def _take(self, name, **about):
        if name in self.refuses:
            raise RuntimeError(f"401: {name} is not allowed")
        self.asked.append((name, about))

    def whoami(self):
        self._take("whoami")
        return {"name": "someone"}

    def create_repo(self, repo_id, *, private, exist_ok):
        self._take("create_repo", repo_id=repo_id, private=private, exist_ok=exist_ok)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        files = sorted(path.name for path in export_module.Path(folder_path).iterdir())
        self._take("upload_folder", repo_id=repo_id, files=files)


@pytest.mark.slow
def test_it_goes_to_the_hub_once_it_is_whole(checkpoint, export):
    hub = Hub()
    out, said = export(checkpoint, hub=hub, push_to_hub="someone/rm", private=True)
    names = [name for name, _ in hub.asked]
    assert names == ["whoami", "create_repo", "upload_folder"]
    assert hub.asked[1][1] == {"repo_id": "someone/rm", "private": True, "exist_ok": True}
    assert hub.asked[2][1]["files"] == sorted(path.name for path in out.iterdir())
    assert "pushed  to someone/rm" in said
    assert "conversations of the data of the run, which go to the hub" in said
    assert 'directory = "someone/rm"\n' in (out / "README.md").read_text(encoding="utf-8")


def test_without_a_login_nothing_is_begun(checkpoint, export, tmp_path):
    hub = Hub(refuses=["whoami"])
    with pytest.raises(ConfigError, match=r"does not say who you are \(401.*hf auth login"):
        export(checkpoint, hub=hub, push_to_hub="someone/rm")
    with pytest.raises(ConfigError, match=r"Give USER/MODEL"):
        export(checkpoint, hub=Hub(), push_to_hub="not a name")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_hub_that_refuses_leaves_what_was_written(checkpoint, export, tmp_path):
    with pytest.raises(DataError, match=r"is written, but could not be brought.*hf upload"):
        export(checkpoint, hub=Hub(refuses=["upload_folder"]), push_to_hub="someone/rm")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def alike(directory, seed, **changes):
    """A copy of a small reward model with other weights, and its own golden scores."""
    loaded = small_model()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in loaded.model.network.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    write_model(loaded, directory)
    path = directory / "scoring.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.slow
def test_the_mean_of_models_has_golden_scores_of_its_own_and_says_how_far_they_agree(
    tmp_path, export, monkeypatch
):
    members, networks = [alike(tmp_path / str(seed), seed) for seed in range(3)], []
    with monkeypatch.context() as patched:
        for module in (average, writing):
            patched.setattr(module, "load_scorer", one_at_a_time(module.load_scorer, networks))
        out, said = export("", average=[str(one) for one in members])
    assert len(networks) == 5  # the members, the one that is written, and the written one
    found = load_file(out / "model.safetensors")
    weights = [load_file(one / "model.safetensors") for one in members]
    for name, value in found.items():
        expected = torch.stack([one[name].double() for one in weights]).mean(0).float()
        assert torch.equal(value, expected), name
    # It loads only because its golden scores are its own.
    assert plain_scores(out) == pytest.approx(laurel_scores(out), abs=1e-5)
    rules = json.loads((out / "scoring.json").read_text())
    assert rules["mean"] is None
    assert rules["num_reference"] == 0
    golden = [one["messages"] for one in rules["golden"]]
    groups = [
        group_of([Message(**g[0])], [g[1]["content"]], group_id=str(i))
        for i, g in enumerate(golden)
    ]
    scores = np.array(
        [
            [
                score.value
                for (score,) in open_local(str(m), say=lambda text: None).score_now(groups)
            ]
            for m in members
        ]
    )
    assert f"lie {scores.std(axis=0).mean():.4f} apart" in said
    card = (out / "README.md").read_text()
    assert "mean of those of 3 models" in card
    assert "apart" in card


def test_models_that_cannot_be_averaged_are_refused(tmp_path, export):
    one, other = alike(tmp_path / "1", 1), alike(tmp_path / "2", 2)
    cut = alike(tmp_path / "cut", 3, truncation_side="right")
    with pytest.raises(ModelError, match=r"another scoring contract \(truncation_side\)"):
        export("", average=[str(one), str(cut)])
    with pytest.raises(ConfigError, match="at least two"):
        export("", average=[str(one)])
    with pytest.raises(ConfigError, match="named twice"):
        export("", average=[str(one), str(one)])
    with pytest.raises(ConfigError, match="leave out"):
        export(one, average=[str(one), str(other)])
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ModelError, match=r"another architecture \(rms_norm_eps\)"):
        export("", average=[str(one), str(other)])
    assert not (tmp_path / "out").exists()


def one_at_a_time(load, networks):
    """Load, when no network that was loaded before is in memory, and add the network."""

    def loading(*arguments, **options):
        gc.collect()
        assert not [one for one in networks if one() is not None]
        loaded = load(*arguments, **options)
        networks.append(weakref.ref(loaded.model.network))
        return loaded

    return loading


def policies(directory):
    """Three random tied policies in bfloat16."""
    members = []
    for seed in range(3):
        members.append(directory / f"policy_{seed}")
        torch.manual_seed(seed)
        tiny.tiny_language_model("qwen3-tied").bfloat16().save_pretrained(members[-1])
        made.chatml().save_pretrained(members[-1])
    return members


def test_the_mean_of_tied_policies_in_bfloat16_is_rounded_once_and_stays_tied(
    tmp_path, export, monkeypatch
):
    """One policy at a time is in memory."""
    members, networks = policies(tmp_path), []
    with monkeypatch.context() as patched:
        patched.setattr(writing, "load_policy", one_at_a_time(writing.load_policy, networks))
        out, _ = export("", average=[str(one) for one in members], dtype="bfloat16")
    assert len(networks) == 4  # the members, and the one that is written
    found = load_file(out / "model.safetensors")
    weights = [load_file(one / "model.safetensors") for one in members]
    assert found.keys() == weights[0].keys()
    assert not any("lm_head" in name for name in found)
    twice = 0
    for name, value in found.items():
        assert value.dtype == torch.bfloat16
        mean = torch.stack([one[name].double() for one in weights]).mean(0)
        assert torch.equal(value, mean.bfloat16()), name
        # What a sum in bfloat16 would have given.
        twice += int((value != (sum(one[name] for one in weights) / 3)).sum())
    assert twice > 0
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
