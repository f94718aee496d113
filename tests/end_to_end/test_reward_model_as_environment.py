"""D29: a reward model trained here judges in an environment exactly as `laurel score` says."""

import json
import shutil
from pathlib import Path

import pytest

import runs
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.extensions.score.score import RowsFile, run_score
from laurel.models.checkpoint.export import save_reward_model
from laurel.rewards.open import load_scorer
from laurel.rewards.spec import ScorerSpec, find_model

PROMPTS = ("question 9?", "question 10?", "another question?")
ANSWERS = ("one clear answer", "this is rude", "more wrong reply", "useful")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The run, one of its checkpoints, that checkpoint without its manifest, and an export."""
    root = tmp_path_factory.mktemp("trained")
    finished = runs.train(runs.settings(root, "rm.max_num_steps=10"))
    step = finished.outcome.latest
    bare, exported = root / "bare", root / "exported"
    shutil.copytree(step, bare, ignore=shutil.ignore_patterns("MANIFEST.json", "training"))
    scorer = load_scorer(find_model(str(step)), ScorerSpec(device="cpu"), say=lambda _: None)
    exported.mkdir()
    save_reward_model(exported, scorer.model, scorer.contract, card="")
    return {"run": root / "saves", "step": step, "bare": bare, "exported": exported}


def said_by_score(model, path, capsys):
    """What `laurel score` prints, flat."""
    options = ScorerSpec(device="cpu")
    capsys.readouterr()
    code = run_score(
        RowsFile(file=str(path)),
        model=str(model),
        output=None,
        as_json=True,
        options=options,
        cpu_threads=1,
    )
    assert code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [score for line in lines for score in line["scores"]]


def judged(logs, **settings):
    with RewardModelEnvironment({"precision": "float32", **settings}, device="cpu") as environment:
        found = environment.step(logs, [{}] * len(logs))
        assert found.failures == [None] * len(logs)
        return found.rewards.tolist()


@pytest.mark.slow_parameters(
    "step-model_name",
    "bare-model_name",
    "exported-model_name",
)
@pytest.mark.parametrize(
    ("form", "key"),
    [
        ("run", "checkpoint_path"),
        *((form, "model_name") for form in ("run", "step", "bare", "exported")),
    ],
)
def test_d29_rewards_are_the_scores_to_the_last_bit(directories, form, key, tmp_path, capsys):
    rows = [{"prompt": prompt, "completions": ANSWERS} for prompt in PROMPTS]
    path = runs.write_rows(tmp_path / "rows.jsonl", rows)
    logs = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt in PROMPTS
        for answer in ANSWERS
    ]
    place = str(directories[form])
    expected = said_by_score(place, path, capsys)
    assert len(set(expected)) == 12
    assert judged(logs, **{key: place}) == expected
    assert judged(logs, **{key: place, "tokenizer": {"name": place}}) == expected


def test_the_statistics_that_training_saved_normalise_its_scores(directories):
    checkpoint = Path(find_model(str(directories["run"])).name)
    contract = json.loads((checkpoint / "scoring.json").read_text(encoding="utf-8"))
    logs = [
        [{"role": "user", "content": "question?"}, {"role": "assistant", "content": answer}]
        for answer in ANSWERS
    ]
    place = str(directories["run"])
    raw = judged(logs, model_name=place)
    normalised = judged(logs, model_name=place, transform={"normalize": "stored"})
    assert normalised == pytest.approx(
        [(score - contract["mean"]) / contract["std"] for score in raw], abs=1e-4
    )
