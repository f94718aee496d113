"""Every kind of scorer is opened by one function, asked in one way, and ended in one way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from judges import ONLY_RESPONSE, by_length, judge_server, named_judge
from laurel.config.environments import FunctionConfig, ScorerSource
from laurel.errors import (
    ConfigError,
    EnvironmentFailedError,
    ModelError,
    key_of,
    setting_of,
    speaking,
)
from laurel.extensions.server import service
from laurel.models.checkpoint.export import save_reward_model
from laurel.models.loading.reward_model import load_reward_model
from laurel.models.spec import ModelSpec
from laurel.rewards import open as opening
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.open import ScorerPlacement, open_local, open_scorer
from laurel.rewards.replicas import GroupScorer
from laurel.rewards.scorer import golden_scores
from laurel.rewards.spec import MemberSpec, NamedSource, ScorerSpec, find_reward_model
from laurel.run.specs import OPTIONS
from laurel.types import Message, group_of
from local_group import LocalGroup
from reward_models import small_model, write_model
from reward_servers import RewardServer

pytestmark = pytest.mark.usefixtures("warm_processes")

GROUPS = [
    group_of((Message("user", "Where?"),), ("By the gate.", "No."), group_id="a"),
    group_of((Message("user", "Bread?"),), ("Wine.",), group_id="b"),
]
FUNCTION = FunctionConfig(path="word_function:compute_score")
KINDS = ("model", "replicas", "one group", "servers", "judge", "function", "members")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("model")
    loaded = small_model()
    loaded.contract = loaded.contract.with_rules(mean=0.5, std=2.0)
    write_model(loaded, directory)
    return str(directory)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of an earlier version, one of whose golden conversations spells a control token."""
    directory = tmp_path_factory.mktemp("older")
    loaded = small_model()
    contract = loaded.contract.with_rules(format=1)
    forged = f"No.{contract.tokenizer.eos_token}Yes."
    golden = golden_scores(
        loaded.model, contract, [group_of(GROUPS[0].prompt, (forged,), group_id="g")]
    )
    save_reward_model(directory, loaded.model, contract.with_rules(golden=golden), card="Older.")
    return directory


def test_a_model_of_an_earlier_version_scores_as_it_did_and_this_is_said(older: Path) -> None:
    said: list[str] = []
    with open_scorer(of_model(str(older)), say=said.append) as scorer:
        assert not scorer.contract.rules.has_plain_contents
    assert sum("scoring.json is of format 1" in line for line in said) == 1
    assert any("checked golden scores agree" in line for line in said)


@pytest.mark.parametrize(("resumes", "expected"), [(False, 2), (True, 1)])
def test_a_run_that_begins_reads_contents_as_text_and_one_that_goes_on_as_before(
    older: Path, resumes: bool, expected: int
) -> None:
    loaded = load_reward_model(
        ModelSpec(name=str(older), precision="float32"),
        seed=0,
        max_length=64,
        truncation_side="left",
        device=torch.device("cpu"),
        resume_from=older if resumes else None,
        for_training=True,
    )
    assert loaded.contract.rules.format == expected
    assert any("of format 1" in note for note in loaded.notes) == resumes


def of_model(model: str, **settings: Any) -> ScorerSpec:
    return ScorerSpec(model=ModelSpec(name=model), device="cpu", **settings)


def in_this_process(*args: Any, **kwargs: Any) -> LocalGroup:
    return LocalGroup("reward_model", *args, **kwargs)


def described(kind: str, model: str, server: str, judge: str) -> tuple[ScorerSpec, ScorerPlacement]:
    here, as_one = (
        ScorerPlacement(),
        ScorerPlacement(make_group=lambda name, ranks: in_this_process),
    )
    spec = of_model(model)
    return {
        "model": (spec, here),
        "replicas": (replace(spec, in_loop=True), as_one),
        "one group": (spec, as_one),
        "servers": (ScorerSpec(servers=ScorerSource(urls=[server])), here),
        "judge": (
            ScorerSpec(
                source=named_judge(
                    ScorerSource(urls=[judge], url_model="m", judge={"template": ONLY_RESPONSE})
                )
            ),
            here,
        ),
        "function": (ScorerSpec(source=NamedSource("function", FUNCTION)), here),
        "members": (
            ScorerSpec(
                members=(
                    MemberSpec(name="a", spec=spec),
                    MemberSpec(
                        name="b",
                        spec=ScorerSpec(source=NamedSource("function", FUNCTION)),
                        mean=0.0,
                        std=1.0,
                    ),
                )
            ),
            here,
        ),
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_scores_until_its_context_ends(model: str, kind: str) -> None:
    with RewardServer() as server, judge_server(by_length) as judge:
        spec, placement = described(kind, model, server.url, judge.url)
        said: list[str] = []
        with open_scorer(spec, say=said.append, placement=placement) as scorer:
            found = scorer.score_now(GROUPS)
            assert [len(scores) for scores in found] == [2, 1]
            assert all(score.value is not None for scores in found for score in scores)
    loads = kind in ("model", "replicas", "one group", "members")
    assert sum("golden scores agree" in line for line in said) == loads
    if kind in ("servers", "judge", "function", "members", "replicas"):
        with pytest.raises(EnvironmentFailedError):
            scorer.score_now(GROUPS)


def test_where_the_processes_are_decides_who_scores(model: str) -> None:
    asked: list[tuple[str, range | None]] = []

    def make_group(name: str, ranks: range | None) -> Any:
        asked.append((name, ranks))
        return in_this_process

    spec, placement = of_model(model), ScorerPlacement(make_group=make_group)
    expected = open_local(spec, say=lambda _: None).score_now(GROUPS)
    for in_loop, is_one_group, kind in (
        (True, False, LoopScorer),
        (True, True, GroupScorer),
        (False, False, GroupScorer),
    ):
        placed = replace(placement, is_one_group=is_one_group)
        looped = replace(spec, in_loop=in_loop)
        with open_scorer(looped, say=lambda _: None, placement=placed) as scorer:
            assert isinstance(scorer, kind)
            assert scorer.path == "forest"
            assert scorer.score_now(GROUPS) == expected
    assert asked == [("", range(1)), ("", None), ("", None)]


@pytest.mark.slow
def test_workers_end_with_the_context_of_a_model(model: str) -> None:
    def children() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = children()
    with open_scorer(of_model(model, num_workers=1), say=lambda _: None) as scorer:
        assert len(children() - before) == 1
        assert scorer.score_now(GROUPS)[0][0].value is not None
    assert children() <= before


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("policy.model_name", "--model"),
        ("policy.tokenizer.pad_token", "--set tokenizer.pad_token"),
        ("cluster.device", "--device"),
        ("env.reward_model.urls", "env.reward_model.urls"),
    ],
)
def test_a_key_is_named_as_the_command_takes_it(key: str, wanted: str) -> None:
    """Options by their names, all else of the model as `--set` takes it."""
    with speaking(OPTIONS | {"policy": "--set "}):
        assert key_of(key) == wanted
        sign = " " if wanted in OPTIONS.values() else "="
        assert setting_of(key, "x") == f"{wanted}{sign}x"


def test_errors_name_keys_as_whoever_wrote_them_does(tmp_path: Path) -> None:
    names = ({"policy": "mine", "policy.model_name": "--judge"},)
    with pytest.raises(ModelError, match=f"^--judge {tmp_path} holds neither a model"):
        open_local(of_model(str(tmp_path), names=names), say=lambda _: None)
    with pytest.raises(ConfigError, match=r"^--judge is missing: name a reward model"):
        open_scorer(ScorerSpec(names=names), say=lambda _: None)
    wide = ScorerSpec(model=ModelSpec(name=str(tmp_path), tensor_parallel_size=2), names=names)
    with pytest.raises(ConfigError, match=r"^mine\.dtensor_cfg\.tensor_parallel_size=2: here"):
        open_scorer(wide, say=lambda _: None)


def test_a_model_that_was_found_is_not_looked_for_again(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def counted(name: str) -> Any:
        asked.append(name)
        return find_reward_model(name)

    for module in (opening, service):
        monkeypatch.setattr(module, "find_reward_model", counted)
    scorer = ScorerSpec(model=ModelSpec(name=model), device="cpu")
    for spec in (scorer, replace(scorer, found=find_reward_model(model))):
        service.open_model(service.ServingSpec(scorer=spec), say=lambda _: None)
    assert asked == [model]
