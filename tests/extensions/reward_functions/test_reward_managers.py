"""What makes the calls of a function that scores: when, how often, and through which class."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import tiny_tokenizers
from laurel import plugins
from laurel.config.environments import FunctionConfig
from laurel.errors import ConfigError
from laurel.extensions.reward_functions.scorer import FunctionScorer
from laurel.types import Completion, Group, Message
from packages import installed
from virtual_time import in_virtual_time, now

GROUP = Group(
    id="g",
    prompt=(Message("user", "2 + 2?"),),
    completions_G=tuple(
        Completion(messages=(Message("assistant", text),)) for text in ("4", "five 5 5", "4")
    ),
    metadata={"ground_truth": "4", "data_source": "sums", "extra_info": {"split": "test"}},
)

CLASS = """
import asyncio, inspect

class Mine:
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None,
                 reward_model_tokenizer=None):
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop, self.address = asyncio.get_running_loop(), reward_router_address

    async def run_single(self, data):
        data = data[-1:]
        item = data[0]
        assert len(data) == 1 and data.batch["responses"].shape[0] == 1
        assert data.non_tensor_batch["data_source"][0] == "sums"
        ids = item.batch["responses"]
        length = item.batch["attention_mask"][-ids.shape[-1]:].sum()
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        given = dict(data_source=item.non_tensor_batch["data_source"], solution_str=text,
                     ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                     extra_info=item.non_tensor_batch["extra_info"])
        if inspect.iscoroutinefunction(self.compute_score):
            result = await self.compute_score(**given)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**given))
        options = self.config.reward.get("reward_kwargs")
        over = max(0, int(length) - options.free)
        return {"reward_score": result - over, "reward_extra_info": {"raw": result, "over": over}}

class NoManager:
    pass

class TakesNothing:
    async def run_single(self, data):
        return {}
"""
PLAIN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""
VERL = {"reward": {"reward_kwargs": {"free": 2}}}


def scored(config: FunctionConfig, function, group=GROUP):
    async def all_of_them():
        return (await FunctionScorer(config, function=function).score([group]))[0]

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(("limit", "interval"), [(5, 12.0), (2, 30.0)])
def test_calls_begin_no_faster_than_a_service_allows(limit, interval):
    begun = []

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        begun.append(now())
        await asyncio.sleep(7.0)
        return 1.0

    # The last call waits for longer than the timeout of one.
    config = FunctionConfig(
        path="a:b", timeout=8, manager="rate_limited", rate_limited={"max_rpm": limit}
    )
    scorer = FunctionScorer(config, function=compute_score)

    async def all_of_them():
        return [await scorer.score([GROUP]), await scorer.score([GROUP])]

    found = in_virtual_time(all_of_them())
    assert [one.value for scores in found for one in scores[0]] == [1.0] * 6
    assert [at - begun[0] for at in begun] == [n * interval for n in range(6)]


def test_calls_that_a_slow_one_held_up_do_not_come_all_at_once():
    begun = []

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        begun.append(now())
        await asyncio.sleep(100.0 if len(begun) == 1 else 1.0)
        return 1.0

    config = FunctionConfig(
        path="a:b",
        timeout=200,
        manager="rate_limited",
        rate_limited={"max_rpm": 6},
    )
    scorer = FunctionScorer(config, function=compute_score, max_concurrent=1)
    in_virtual_time(scorer.score([GROUP]))
    assert [at - begun[0] for at in begun] == [0.0, 100.0, 110.0]


def test_calls_in_processes_do_not_wait_for_one_after_their_turn(tmp_path):
    (tmp_path / "mine.py").write_text(PLAIN, encoding="utf-8")
    limits = {"manager": "rate_limited", "rate_limited": {"max_rpm": 6}}
    config = FunctionConfig(path=f"{tmp_path}/mine.py:compute_score", **limits)
    scorer = FunctionScorer(config, num_workers=2)

    async def free():
        return scorer._gate()._value

    try:
        assert asyncio.run(free()) == 2
    finally:
        scorer.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_class_that_was_written_for_verl(tmp_path, is_async):
    (tmp_path / "mine.py").write_text(CLASS, encoding="utf-8")
    tiny_tokenizers.chatml().save_pretrained(tmp_path / "policy")

    def plain(data_source, solution_str, ground_truth, extra_info, scale):
        assert (data_source, extra_info["split"]) == ("sums", "test")
        return scale * float(solution_str == ground_truth)

    async def slow(**given):
        return plain(**given)

    own = {"path": f"{tmp_path}/mine.py:Mine", "tokenizer": f"{tmp_path}/policy", "config": VERL}
    config = FunctionConfig(path="a:b", kwargs={"scale": 100}, manager="verl", verl=own)
    found = scored(config, slow if is_async else plain)
    length = len(tiny_tokenizers.chatml().encode("five 5 5", add_special_tokens=False))
    assert length > 2
    assert [one.value for one in found] == [100.0, float(2 - length), 100.0]
    assert found[1].parts == {"raw": 0.0, "over": float(length - 2)}
    # A failure is no number.
    failures = scored(config, slow if is_async else plain, replace(GROUP, metadata={"x": 1}))
    assert {one.failure.partition(":")[0] for one in failures} == {"error"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"manager": "rate_limited"}, "max_rpm"),
        ({"rate_limited": {"max_rpm": 3}}, "manager=rate_limited"),
        ({"manager": "verl"}, "verl.path"),
        ({"manager": "dapo"}, "'naive' or 'rate_limited' or 'verl'"),
        ({"manager": "verl", "verl": {"path": "a:B", "tokenizer": "t"}, "group": True}, "group"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, told):
    with pytest.raises((ConfigError, ValueError), match=told):
        FunctionConfig(path="a:b", **config)


@pytest.mark.parametrize(
    ("name", "told"), [("NoManager", "run_single"), ("TakesNothing", "cannot be made")]
)
def test_a_class_that_is_no_manager_is_refused_before_it_is_used(tmp_path, name, told):
    (tmp_path / "mine.py").write_text(CLASS, encoding="utf-8")
    tiny_tokenizers.chatml().save_pretrained(tmp_path / "policy")
    own = {"path": f"{tmp_path}/mine.py:{name}", "tokenizer": f"{tmp_path}/policy"}
    with pytest.raises(ConfigError, match=told):
        FunctionScorer(FunctionConfig(path="a:b", manager="verl", verl=own), function=len_of)


def len_of(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)


def test_a_manager_of_another_package_may_call_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = """
from laurel.plugins import RewardManager

class Twice(RewardManager):
    "Calls a second time where the first has failed."

    def make(self, section, function):
        async def scored(arguments, call):
            first = await call(arguments)
            return first if first[0].failure is None else await call(arguments)
        return scored

class Lost(RewardManager):
    "Returns nothing."

    def make(self, section, function):
        async def scored(arguments, call):
            return ()
        return scored
"""
    points = {
        "reward_managers": {"twice": "managers_of_theirs:Twice", "lost": "managers_of_theirs:Lost"}
    }
    installed(tmp_path, "theirs", {"managers_of_theirs": text}, points)
    assert "twice" in plugins.names("reward_managers")
    seen: dict[str, int] = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen[solution_str] = seen.get(solution_str, 0) + 1
        if seen[solution_str] == 1:
            raise OSError("busy")
        return 1.0

    found = scored(FunctionConfig(path="a:b", manager="twice"), compute_score)
    assert [one.value for one in found] == [1.0] * 3
    lost = scored(FunctionConfig(path="a:b", manager="lost"), compute_score)
    assert all("did not return 1 scores" in one.failure for one in lost)
