"""A reward model from wherever it is, and how it is made to score."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from laurel.config.policy import TokenizerConfig
from laurel.errors import CheckpointError, ConfigError, ModelError
from laurel.models.spec import ModelSpec
from laurel.observe.hub import check_not_missing
from laurel.rewards.open import load_scorer, open_local
from laurel.rewards.spec import (
    ModelPlace,
    ScorerSpec,
    check_files,
    find_model,
    find_reward_model,
)
from laurel.types import Message, group_of
from model_directories import edit_weights
from reward_models import small_model, write_foreign_model, write_model, write_run

GROUPS = [
    group_of((Message("user", "Where?"),), ("By the gate.", "No.", "In the river"), group_id="a"),
    group_of((Message("user", "Bread?"),), ("Wine.", "Bread and wine."), group_id="b"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_model(small_model(), directory)
    return directory


def quiet(_text):
    pass


def load(directory, **options):
    options = ScorerSpec(**{"device": "cpu", **options})
    return load_scorer(find_model(str(directory)), options, say=quiet)


def values(scorer):
    return [score.value for scores in scorer.score_now(GROUPS) for score in scores]


def test_a_name_that_is_no_directory_is_one_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "rm").mkdir(parents=True)
    place = find_model("organisation/model")
    assert (place.name, place.is_checkpoint) == ("organisation/model", False)
    assert "no directory here" in place.notes[0]
    with pytest.raises(ModelError, match="no such directory; results holds: rm"):
        find_model("results/mr")


def test_what_is_missing_is_told_with_its_key(tmp_path):
    check_not_missing("organisation/model", key="a.b")
    check_not_missing(str(tmp_path), key="a.b")
    with pytest.raises(ModelError, match=r"^a\.b=\./nowhere: there is no such directory; \. holds"):
        check_not_missing("./nowhere", key="a.b")


def test_places(checkpoint, tmp_path):
    assert not find_model(str(checkpoint)).is_checkpoint
    run = write_run(tmp_path / "run", {1: 0.6, 2: 0.9, 3: 0.7})
    best = find_model(str(run))
    assert best.name == str((run / "step_2").resolve())
    assert best.is_checkpoint
    weights = run / "step_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has"):
        check_files(best)
    assert check_files(find_model(str(checkpoint))) is None


def test_a_language_model_is_refused_before_torch_is_imported(tmp_path):
    headless = write_foreign_model(tmp_path / "headless", head=False)
    with_head = write_foreign_model(tmp_path / "with-head")
    find_reward_model(str(with_head))
    program = (
        "import sys\n"
        "from laurel.rewards.spec import find_reward_model\n"
        "try: find_reward_model(sys.argv[1])\n"
        "except ValueError as error: print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(headless)], check=True, capture_output=True, text=True
    )
    error, has_torch = ran.stdout.splitlines()
    assert "is a language model without a reward head" in error
    assert has_torch == "False"


def test_a_language_model_with_a_weight_of_another_name_is_left_to_loading(tmp_path):
    headless = write_foreign_model(tmp_path / "model", head=False)
    edit_weights(headless, lambda weights: weights.update({"score.weight": torch.zeros(1, 32)}))
    find_reward_model(str(headless))


def test_open_scorer_says_what_it_found(tmp_path):
    said = []
    run = write_run(tmp_path / "run", {1: 0.6, 2: 0.9})
    scorer = open_local(str(run), say=said.append)
    assert "the best is step_2" in said[0]
    assert any(line.startswith("checked golden scores agree") for line in said)
    assert values(scorer) == values(load(run / "step_2"))


def test_loading_leaves_threads_and_random_numbers_alone(checkpoint):
    """An environment is loaded in the process of a run that has seeded its own."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    threads = torch.get_num_threads()
    load(checkpoint)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_weights_are_held_in_the_precision_and_scores_are_near(checkpoint, precision):
    exact, rough = load(checkpoint), load(checkpoint, precision=precision)
    assert {p.dtype for p in rough.model.parameters()} == {getattr(torch, precision)}
    assert values(rough) != values(exact)
    assert values(rough) == pytest.approx(values(exact), abs=0.1)


def test_the_head_computes_in_float32(checkpoint):
    model = load(checkpoint, precision="bfloat16").model
    hidden = torch.ones(1, model.classifier.config.hidden_size, dtype=torch.bfloat16)
    assert model.apply_head(hidden).dtype == torch.float32


def test_padded_rows_fill_the_budget(checkpoint):
    scorer = load(checkpoint, model=ModelSpec(reads_forests=False), batch_tokens=60)
    assert scorer.model.path == "padded"
    seen = []
    scorer.score_now(GROUPS, on_batch=lambda done, _: seen.append(done))
    assert len(seen) == len(GROUPS) > 1
    assert values(scorer) == pytest.approx(values(load(checkpoint)), abs=5e-6)


def test_a_model_without_a_contract_takes_a_tokenizer_and_a_length(tmp_path):
    write_foreign_model(tmp_path)
    plain = ModelSpec(tokenizer=TokenizerConfig(chat_template="plain"))
    scorer = load(tmp_path, model=plain, max_length=20)
    assert scorer.contract.rules.max_length == 20
    assert scorer.contract.render(GROUPS[0].conversation(0)).startswith("User: Where?")
    assert values(scorer) != pytest.approx(values(load(tmp_path)), abs=1e-3)


def test_a_contract_wins_over_settings(checkpoint):
    assert load(checkpoint, max_length=20).contract.rules.max_length == 64


def test_a_device_that_is_not_there(checkpoint):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        load(checkpoint, device="cuda")


def test_a_place_is_shown_from_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ModelPlace(name=str(tmp_path / "results" / "rm")).shown == "results/rm"
    assert ModelPlace(name=str(tmp_path.parent / "rm")).shown == str(tmp_path.parent / "rm")
    assert ModelPlace(name="organisation/model").shown == "organisation/model"
