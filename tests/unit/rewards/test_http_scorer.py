"""A client over addresses: what it sends where, and what it makes of what comes back."""

from __future__ import annotations

import asyncio
import functools

import pytest

import scoring_groups
from laurel.rewards.remote.http import HttpScorer, endpoint
from laurel.rewards.remote.replica import failure_reason
from laurel.rewards.remote.router import RouterOptions
from reward_servers import RewardServer, misbehaving
from scripted_replicas import question, right_scores

GROUPS = [question(str(i), *("w" * (1 + i + j) for j in range(4))) for i in range(12)]


def scored(urls, groups=GROUPS, *, options=None, **rest):
    async def main():
        scorer = HttpScorer(urls, options=options, **rest)
        try:
            return await scorer.score(groups), scorer
        finally:
            await scorer.aclose()

    return asyncio.run(main())


@functools.cache
def contract():
    return scoring_groups.loaded(True).contract


@pytest.mark.parametrize(
    ("url", "path", "whole"),
    [
        ("http://h:1", "/classify", "http://h:1/classify"),
        ("http://h:1/", "/classify", "http://h:1/classify"),
        ("http://h:1/classify", "/classify", "http://h:1/classify"),
        ("http://h:1/rm/", "/v1/score", "http://h:1/rm/v1/score"),
        ("http://h:1/any/path?a=b", "", "http://h:1/any/path?a=b"),
    ],
)
def test_an_address_is_that_of_the_server_or_of_the_endpoint(url, path, whole):
    assert endpoint(url, path) == whole


def test_the_work_is_spread_over_the_servers():
    with RewardServer() as one, RewardServer() as other:
        scores, _ = scored([one.url, other.url, one.url])
        assert scores == right_scores(GROUPS)
        assert len(one.asked) + len(other.asked) == len(GROUPS)
        assert min(len(one.asked), len(other.asked)) >= 3
        ids = [asked.headers["x-request-id"] for asked in one.asked + other.asked]
    assert len(set(ids)) == len(GROUPS)


@pytest.mark.parametrize("fault", ["500", "429", "half a body", "NaN", "another group"])
def test_a_server_that_answers_wrongly_costs_nothing_beside_a_good_one(fault):
    bad = RewardServer(misbehaving(fault, share=1.0, seconds=0.0))
    slowly = misbehaving(fault, share=0.0, seconds=0.05)
    with bad, RewardServer(slowly) as good:
        options = RouterOptions(version="1", window=1)
        scores, scorer = scored([bad.url, good.url], options=options)
        assert scores == right_scores(GROUPS)
        assert bad.asked
    assert any(name.startswith("fault_") for name in scorer.counts)


@pytest.mark.slow_parameters("html-reply", "another version-version")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("html", "reply"), ("another version", "version"), ("429", "busy"), ("hang", "timeout")],
)
def test_alone_with_it_there_are_failures_and_never_numbers(fault, reason):
    attempt_timeout = 0.7 if fault == "hang" else 30.0
    options = RouterOptions(timeout=1.5, attempt_timeout=attempt_timeout, version="1")
    with RewardServer(misbehaving(fault, share=1.0, seconds=0.0)) as server:
        scores, scorer = scored(server.url, GROUPS[:1], options=options)
    assert all(one.value is None for one in scores[0])
    # On a busy machine the last try may be cut off by the deadline.
    assert {failure_reason(one.failure) for one in scores[0]} <= {reason, "timeout"}
    assert scorer.counts[f"fault_{reason}"] > 0


def test_odd_texts_are_scored_and_half_characters_fail_alone():
    odd = ["", "\x00", "caf\u00e9 \U0001f33f", "\ud800", "w" * 1_000_000, "\u2028\x1b[31m"]
    with RewardServer(max_length=10**9) as server:
        (row,), scorer = scored(server.url, [question("Q", *odd)])
    (right,) = right_scores([question("Q", *odd)])
    assert [one.failure is None for one in row] == [True, True, True, False, True, True]
    assert failure_reason(row[3].failure) == "text"
    assert [one.value for i, one in enumerate(row) if i != 3] == pytest.approx(
        [one.value for i, one in enumerate(right) if i != 3]
    )
    assert scorer.counts["splits"] == 0
    with RewardServer() as server:
        ((one,),), _ = scored(server.url, [question("\udfff", "x")])
        assert server.asked == []
    assert failure_reason(one.failure) == "text"


def test_one_key_for_all_and_none_where_none_is_given():
    with RewardServer() as server:
        scored(server.url, GROUPS[:1], api_key="abc")
        scored(server.url, GROUPS[:1])
        found = [asked.headers.get("authorization") for asked in server.asked]
    assert found == ["Bearer abc", None]
