"""What stands in for a reward model: opened from settings, checked at once, and used as one."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import WordScorer
from judges import ONLY_RESPONSE, by_length, judge_server
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.errors import ConfigError, ScoringContractError, UserError
from laurel.extensions.server.foreign import sigmoid
from laurel.rewards.open import load_scorer, read_contract
from laurel.rewards.scorer import LocalScorer
from laurel.rewards.spec import ScorerSpec, find_model
from laurel.types import EnvironmentReturn, Score
from reward_models import small_model, write_foreign_model, write_model
from reward_servers import Answer, RewardServer, wait_until
from served_scores import KEY, Running

pytestmark = pytest.mark.usefixtures("warm_processes")

ANSWERS = ("By the gate.", "No.", "By the river, old man.")
LOGS = [
    [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": answer}]
    for answer in ANSWERS
]
INFOS: list[dict[str, Any] | None] = [{"ground_truth": "No."}, {"ground_truth": "No."}, None]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models with statistics, and one from elsewhere."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("first", "second")):
        loaded = small_model(seed=seed)
        loaded.contract = loaded.contract.with_rules(mean=0.5 + seed, std=2.0)
        (root / name).mkdir()
        write_model(loaded, root / name)
    write_foreign_model(root / "foreign")
    return root


@pytest.fixture(scope="module")
def scorers(models):
    return {name: local(models / name) for name in ("first", "second")}


def local(directory: Path) -> LocalScorer:
    options = ScorerSpec(device="cpu")
    return load_scorer(find_model(str(directory)), options, say=lambda _: None)


def serving(scorer: Any, behave: Any = None, **settings: Any) -> RewardServer:
    server = RewardServer(behave, **settings)
    server.scorer = scorer
    return server


def opened(said: list[str] | None = None, **settings: Any) -> RewardModelEnvironment:
    settings = {"connect_patience": 0.0, **settings}
    if "judge" not in settings:
        settings = {"precision": "float32", **settings}
    say = said.append if said is not None else lambda _: None
    return RewardModelEnvironment(settings, device="cpu", say=say)


def judged(logs: Any = LOGS, infos: Any = INFOS, **settings: Any) -> list[float]:
    with opened(**settings) as environment:
        found = environment.step(logs, infos)
        assert found.failures == [None] * len(logs)
        return found.rewards.tolist()


def asked_to_change(change: Any) -> Any:
    """A server that answers with other scores."""

    def of_reply(value: Any) -> Any:
        for scores in value["groups"]:
            for one in scores["scores"]:
                one["value"] = change(one["value"])
        return value

    return lambda number, asked: Answer(change=of_reply)


def test_servers_give_the_rewards_that_the_model_would(models, scorers):
    here = judged(model_name=str(models / "first"))
    with serving(scorers["first"]) as one, serving(scorers["first"]) as other:
        assert judged(urls=[one.url, other.url]) == pytest.approx(here, abs=1e-6)
        stored = {"normalize": "stored"}
        normal = judged(urls=[one.url], model_name=str(models / "first"), transform=stored)
        assert normal == pytest.approx([(value - 0.5) / 2.0 for value in here], abs=1e-6)


def test_a_server_of_ours_answers_every_question_of_every_run(models, monkeypatch):
    monkeypatch.setenv("RM_KEY", KEY)
    said: list[str] = []
    with Running(local(models / "first")) as it:
        settings = {"urls": [it.url], "api_key_env": "RM_KEY", "model_name": str(models / "first")}
        for protocol in ("laurel", "vllm", "sglang", "sglang_embeddings", "openrlhf"):
            with opened(said, url_protocol=protocol, **settings):
                assert "golden scores agree" in said.pop()
        with opened(said, url_protocol="vllm", **{**settings, "model_name": None}):
            assert not said


def test_a_resumed_run_hears_of_another_model_in_an_ensemble_or_on_a_server(models, tmp_path):
    def state_of(version: str, local: Path, state: Any = None) -> tuple[Any, list[str]]:
        said: list[str] = []
        with RewardServer(version=version) as server:
            parts = [{"model_name": str(local)}, {"urls": [server.url]}]
            for name, part in zip("ab", parts, strict=True):
                part |= {"name": name, "normalize": "none"}
            with opened(said, models=parts) as environment:
                if state is not None:
                    environment.load_state_dict(state)
                state = environment.state_dict()
        return state, [line for line in said if "another reward model" in line]

    copied = Path(shutil.copytree(models / "first", tmp_path / "copied"))
    state, _ = state_of("rm-0123456789abcdef", models / "first")
    assert state_of("moved-0123456789abcdef", copied, state)[1] == []
    for version, directory in (("rm-fedcba9876543210", "first"), ("rm-0123456789abcdef", "second")):
        (told,) = state_of(version, models / directory, state)[1]
        assert f"{state['version']} until this checkpoint" in told


@pytest.mark.slow
def test_workers_render_for_servers_and_end_with_the_environment(models, monkeypatch):
    monkeypatch.setenv("RM_KEY", KEY)
    before = children()
    settings = {
        "api_key_env": "RM_KEY",
        "model_name": str(models / "first"),
        "num_workers": 2,
        "url_protocol": "sglang",
    }
    with Running(local(models / "first")) as it:
        with opened(urls=[it.url], **settings) as environment:
            assert len(children() - before) == 2
            found = environment.step(LOGS, INFOS).rewards.tolist()
        assert children() == before
        url = it.url
    assert found == pytest.approx(judged(model_name=str(models / "first")), abs=1e-6)
    with pytest.raises(ConfigError, match="does not answer"):
        opened(urls=[url], **settings)
    assert children() == before


def test_workers_are_for_those_of_several_models_that_render_here(models, file):
    before = children()
    parts = [
        {"name": "a", "function": {"path": f"{file}:compute_score"}, "normalize": "none"},
        {"name": "b", "normalize": "none"},
    ]
    with RewardServer() as server:
        parts[1]["urls"] = [server.url]
        with opened(models=parts, num_workers=1) as environment:
            assert environment.step(LOGS, INFOS).failures == [None] * 3
            assert len(children() - before) == 1
    assert children() <= before


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize(
    ("settings", "reply"),
    [
        ({"url_protocol": "slime", "reward_key": "score"}, lambda length: {"score": length}),
        ({"url_protocol": "slime"}, float),
        ({"url_protocol": "vllm"}, lambda length: {"data": [{"index": 0, "probs": [length]}]}),
    ],
)
def test_servers_that_render_by_themselves_need_no_model_here(settings, reply):
    def answered(asked: Any) -> Any:
        if "response" in asked.value:
            return reply(len(asked.value["response"]))
        return reply(len(asked.value["messages"][-1]["content"]))

    with RewardServer(answer=answered) as server:
        assert judged(urls=[server.url], **settings) == [float(len(one)) for one in ANSWERS]


def test_the_contract_that_is_read_without_weights_is_that_of_the_loaded_model(models, tmp_path):
    for name in ("first", "foreign"):
        place, options = find_model(str(models / name)), ScorerSpec(device="cpu")
        whole = load_scorer(place, options, say=lambda _: None).contract
        bare = tmp_path / name
        bare.mkdir()
        for file in (models / name).iterdir():
            if file.suffix != ".safetensors":
                (bare / file.name).write_bytes(file.read_bytes())
        alone = read_contract(find_model(str(bare)), options, say=lambda _: None)
        assert alone.rules == whole.rules
        assert alone.tokenizer.chat_template == whole.tokenizer.chat_template


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (sigmoid, "this is the sigmoid of the score"),
        (lambda value: 0.25, "gives every conversation the same score"),
        (lambda value: value + 0.5, "another model or chat template"),
    ],
)
def test_a_server_with_other_scores_is_refused_with_both_numbers(models, scorers, change, cause):
    golden = scorers["first"].contract.rules.golden
    with (
        serving(scorers["first"], asked_to_change(change)) as server,
        pytest.raises(ScoringContractError, match=cause) as caught,
    ):
        opened(urls=[server.url], model_name=str(models / "first"))
    found = [entry.values_K[0] for entry in golden]
    assert server.url in str(caught.value)
    assert any(
        f"{change(value):.6g}, and its model scored {value:.6g}" in str(caught.value)
        for value in found
    )


def test_a_server_that_does_not_answer_is_told_at_once_and_by_name():
    with RewardServer() as server:
        url = server.url
    with pytest.raises(ConfigError, match="does not answer: connection:") as caught:
        opened(urls=[url])
    assert url in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=401), "refuses to score: answered 401; .* its key in api_key_env$"),
        (Answer(status=404), "refuses to score: answered 404; look at the path of its address"),
        (Answer(status=422), r"refuses to score: answered 422\. Are the address, the protocol"),
        (Answer(body=b"<html>"), "does not follow its protocol: reply"),
        (Answer(body=b'{"scores": []}'), "does not follow its protocol"),
    ],
)
def test_a_server_that_cannot_score_is_told_at_once(answer, message):
    with RewardServer(lambda number, asked: answer) as server:
        with pytest.raises(ConfigError, match=message) as caught:
            opened(urls=[server.url], connect_patience=60.0)
        assert server.url in str(caught.value)
        assert len(server.asked) == 1
        if "refuses" in message:
            assert str(caught.value).count(server.url) == 1


def test_a_server_that_would_never_be_trusted_is_told_at_once():
    class Mute(WordScorer):
        async def score(self, groups):
            none = Score(value=None, failure="error: no ground truth")
            return [(none,) * len(group.completions_G) for group in groups]

    told = "no score for a plain question: error: no ground truth"
    with serving(Mute()) as server, pytest.raises(ConfigError, match=told):
        opened(urls=[server.url])


def test_servers_that_do_not_say_the_version_that_is_wanted_are_refused():
    def answered(asked: Any) -> Any:
        return {"data": [{"index": 0, "probs": [0.5]}]}

    with RewardServer(answer=answered) as server:
        settings = {"urls": [server.url], "url_protocol": "vllm"}
        opened(**settings).shutdown()
        with pytest.raises(ConfigError, match=r"model_version=7: .* its answers do not say"):
            opened(**settings, model_version="7")


def test_the_key_comes_from_the_environment(monkeypatch):
    with RewardServer() as server:
        settings = {"urls": [server.url], "api_key_env": "REWARDS_OF_TEST"}
        with pytest.raises(ConfigError, match="api_key_env=REWARDS_OF_TEST: there is no such"):
            opened(**settings)
        monkeypatch.setenv("REWARDS_OF_TEST", "secret")
        judged(**settings)
        assert {asked.headers["authorization"] for asked in server.asked} == {"Bearer secret"}
        judge = {"urls": [server.url], "url_model": "m", "api_key_env": "OTHER_OF_TEST"}
        with pytest.raises(ConfigError, match=r"reward_model\.api_key_env=OTHER_OF_TEST"):
            opened(judge={}, **judge)


def test_a_model_name_that_is_none_is_told_before_a_server_is_asked(tmp_path):
    with RewardServer() as server, pytest.raises(UserError, match=r"env\.reward_model\.model_name"):
        opened(urls=[server.url], model_name=str(tmp_path))
    assert server.asked == []


def test_a_judge_gives_rewards_and_its_parts_are_figures():
    said: list[str] = []
    with judge_server(by_length) as server:
        judge = {"template": ONLY_RESPONSE, "num_samples": 2, "temperature": 1.0}
        source = {"urls": [server.url], "url_model": "m", "judge": judge}
        with opened(said, **source, transform={"scale": 0.1}) as environment:
            assert environment.spec.judges == "completion"
            found = environment.step(LOGS, INFOS)
            assert found.rewards.tolist() == pytest.approx([1.0, 0.3, 1.0])
            assert environment.noise_floor() == 0.0
            asked = len(server.asked)
            _, figures = environment.global_post_process_and_metrics(batch(found))
    assert figures["reward_model_env/part/spread/mean"] == 0.0
    assert figures["reward_model_env/part/unreadable/mean"] == 0.0
    assert figures["reward_model_env/mean_score"] == pytest.approx(23 / 3)
    assert asked == 8, "a first question and three completions, twice each"
    assert not [line for line in said if "warning" in line]


def test_a_judge_without_a_verdict_on_a_plain_question_is_a_warning():
    said: list[str] = []
    with judge_server(lambda asked: "Hm.") as server:
        judge = {"template": ONLY_RESPONSE}
        with opened(said, urls=[server.url], url_model="m", judge=judge) as environment:
            found = environment.step(LOGS[:1], INFOS[:1])
    assert found.failures[0].startswith("reply: 0 of 1 replies have a score")
    assert math.isnan(found.rewards[0])
    assert any("has no score for a plain question" in line for line in said)


def batch(returned: EnvironmentReturn) -> dict[str, Any]:
    return {"rewards": returned.rewards, "notes": returned.notes}


TEXT = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = float(solution_str == ground_truth)
    return {"score": 2 * right, "right": right, "pid": os.getpid()}

def rarity(data_sources, solution_strs, ground_truths, extra_infos):
    return [1 / solution_strs.count(one) for one in solution_strs]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_reads_the_metadata_of_each_task(file, num_workers):
    function = {"path": f"{file}:compute_score"}
    logs = [LOGS[1], LOGS[1], LOGS[0]]
    infos = [{"ground_truth": "No."}, {"ground_truth": "Yes."}, None]
    with opened(function=function, num_workers=num_workers) as environment:
        assert environment.spec.judges == "completion"
        assert environment.step(logs, infos).rewards.tolist() == [2.0, 0.0, 0.0]
        found = environment.step(LOGS, INFOS)
        _, figures = environment.global_post_process_and_metrics(batch(found))
        assert environment.noise_floor() == 0.0
    assert figures["reward_model_env/part/right/mean"] == pytest.approx(1 / 3)


def test_a_group_function_sees_the_group_with_what_is_in_it_twice(file):
    function = {"path": f"{file}:rarity", "group": True}
    logs = [LOGS[0], LOGS[1], LOGS[0]]
    with opened(function=function) as environment:
        assert environment.spec.judges == "group"
        assert environment.step(logs, [{}] * 3).rewards.tolist() == [0.5, 1.0, 0.5]
        other = [*logs, [{"role": "user", "content": "Why?"}, LOGS[0][1]]]
        assert environment.step(other, [{}] * 4).rewards.tolist() == [0.5, 1.0, 0.5, 1.0]


def test_the_reference_answer_can_be_subtracted_from_a_function(file):
    transform = {"subtract_reference": True}
    infos = [{"ground_truth": "No."}] * 3
    alone = {"function": {"path": f"{file}:compute_score"}, "transform": transform}
    assert judged(infos=infos, **alone) == [-2.0, 0.0, -2.0]
    together = {"function": {"path": f"{file}:rarity", "group": True}, "transform": transform}
    assert judged(infos=infos, **together) == [0.0, 0.0, 0.0], "references are not in the group"


def test_processes_end_with_the_environment(file):
    with opened(function={"path": f"{file}:compute_score"}, num_workers=1) as environment:
        scorer: Any = environment._scorer
        processes = scorer.scorer._processes
        assert processes.process_ids()
    wait_until(lambda: not processes.process_ids())


def test_an_environment_can_be_made_inside_an_event_loop():
    async def inside() -> list[float]:
        with RewardServer() as server:
            return await asyncio.to_thread(judged, urls=[server.url])

    async def directly() -> None:
        with RewardServer() as server:
            opened(urls=[server.url]).shutdown()

    assert len(asyncio.run(inside())) == 3
    asyncio.run(directly())


@pytest.mark.slow
def test_several_models_are_each_normalised_by_their_own_statistics(models, file):
    alone = [judged(model_name=str(models / name)) for name in ("first", "second")]
    normal = [[(v - 0.5 - i) / 2.0 for v in values] for i, values in enumerate(alone)]
    parts: list[dict[str, Any]] = [
        {"name": "a", "model_name": str(models / "first"), "weight": 2.0},
        {"name": "b", "model_name": str(models / "second")},
        {
            "name": "c",
            "function": {"path": f"{file}:compute_score"},
            "normalize": "none",
            "weight": 0.5,
        },
    ]
    right = [0.0, 2.0, 0.0]
    rows = list(zip(*normal, right, strict=True))
    expected = [2 * a + b + 0.5 * c for a, b, c in rows]
    assert judged(models=parts) == pytest.approx(expected, abs=1e-5)
    even = [{k: v for k, v in part.items() if k != "weight"} for part in parts]
    assert judged(models=even, combine="min") == pytest.approx(list(map(min, rows)), abs=1e-5)
    for loop in (True, False):
        with opened(models=parts, use_reward_loop=loop) as environment:
            found = environment.step(LOGS, INFOS)
            assert found.rewards.tolist() == pytest.approx(expected, abs=1e-5)
            assert environment.spec.judges == ("part" if loop else "batch")
            _, figures = environment.global_post_process_and_metrics(batch(found))
            for name, values in zip("abc", (*alone, right), strict=True):
                mean = figures[f"reward_model_env/part/{name}/mean"]
                assert mean == pytest.approx(sum(values) / 3, abs=1e-5)
                assert f"reward_model_env/part/{name}/std" in figures
            notes = json.loads(json.dumps(found.notes))
            assert notes[0]["parts"].keys() == {"a", "b", "c", "c/right", "c/pid"}


def test_a_member_of_several_without_statistics_is_told_before_anything_is_loaded(models):
    parts = [
        {"name": "a", "model_name": str(models / "first")},
        {"name": "b", "model_name": str(models / "foreign")},
    ]
    said: list[str] = []
    with pytest.raises(
        ConfigError, match=r"reward_model\.models\[1\]\.normalize=stored: .*foreign"
    ):
        opened(said, models=parts)
    assert said == []
    given = [parts[0], parts[1] | {"normalize": [0.0, 1.0]}]
    assert len(judged(models=given)) == 3


def test_errors_of_a_member_name_it(models, tmp_path):
    good = {"name": "a", "model_name": str(models / "first")}
    where = r"env\.reward_model\.models\[1\]\."
    with pytest.raises(UserError, match=f"{where}model_name"):
        opened(models=[good, {"name": "b", "model_name": str(tmp_path / "none")}])
    function = {"name": "b", "function": {"path": "nowhere:f"}, "normalize": "none"}
    with pytest.raises(UserError, match=f"{where}function.path"):
        opened(models=[good, function])
    key = {
        "name": "b",
        "urls": ["http://127.0.0.1:9"],
        "api_key_env": "NONE_OF_TEST",
        "normalize": "none",
    }
    with pytest.raises(UserError, match=f"{where}api_key_env=NONE_OF_TEST"):
        opened(models=[good, key])


def test_errors_of_what_all_members_have_do_not_name_one(models):
    parts = [{"name": name, "model_name": str(models / "first")} for name in "ab"]
    key = r"env\.reward_model\.dtensor_cfg\.tensor_parallel_size=2"
    with pytest.raises(ConfigError, match=key):
        opened(models=parts, dtensor_cfg={"tensor_parallel_size": 2})


def test_what_was_opened_is_ended_where_a_member_cannot_be(models, file, tmp_path, monkeypatch):
    ended: list[str] = []
    monkeypatch.setattr(
        "laurel.extensions.reward_functions.scorer.FunctionScorer.close",
        lambda self: ended.append("function"),
    )
    function = {"name": "a", "function": {"path": f"{file}:compute_score"}, "normalize": "none"}
    missing = {"name": "b", "model_name": str(tmp_path), "normalize": "none"}
    with pytest.raises(UserError):
        opened(models=[function, missing])
    assert ended == ["function"]


def test_a_scorer_that_is_given_goes_before_the_settings():
    with closing(WordScorerWithEnd()) as scorer:
        settings = {"urls": ["http://127.0.0.1:9"], "model_name": "nowhere"}
        environment = RewardModelEnvironment(settings, scorer=scorer)
        assert environment.step(LOGS, INFOS).failures == [None] * 3
        environment.shutdown()
        assert scorer.ended == 1


class WordScorerWithEnd(WordScorer):
    ended = 0

    def close(self) -> None:
        self.ended += 1


def refusal(**settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        RewardModelEnvironment(settings)
    return str(caught.value)


@pytest.mark.parametrize("key", ["model_name", "checkpoint_path"])
def test_a_path_that_reads_like_a_key_is_quoted_as_it_is(tmp_path, key):
    path = tmp_path / "policy.model_name=a" / "env.reward_model.model_name" / "policy.v2"
    path.mkdir(parents=True)
    said = refusal(**{key: str(path)})
    assert said.startswith(f"env.reward_model.{key}={path} holds neither a model")


def test_a_path_in_an_ensemble_is_quoted_as_it_is_and_the_key_is_the_members(tmp_path):
    path = tmp_path / "env.reward_model.model_name" / "policy.v2"
    path.mkdir(parents=True)
    both = [{"name": name, "model_name": str(path), "normalize": "none"} for name in ("a", "b")]
    said = refusal(models=both)
    assert said.startswith(f"env.reward_model.models[0].model_name={path} holds neither a model")


def test_what_a_template_says_is_quoted_as_it_is(models):
    """The failure of a completion, made when it is rendered, in the words of who opened it."""
    log = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}]
    with RewardModelEnvironment({"model_name": str(models / "first")}) as environment:
        rules = environment._with_contract().contract.tokenizer
        rules.chat_template = "{{ raise_exception('policy.x says no') }}"
        (failure,) = environment.step([log], [{}]).failures or [None]
    assert failure is not None
    assert "policy.x says no" in failure
    assert "env.reward_model.tokenizer.chat_template=chatml" in failure


def test_an_address_that_reads_like_a_key_is_quoted_as_it_is():
    said = refusal(urls=["http://127.0.0.1:9/in api_key_env"], connect_patience=0)
    assert said.startswith("env.reward_model: http://127.0.0.1:9/in%20api_key_env")
