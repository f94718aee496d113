"""The numbers that a score came about from, on their way from a server to a client."""

import asyncio
from dataclasses import replace

from laurel.rewards.remote.http import HttpScorer
from laurel.types import Message, group_of
from scripted_backend import ScriptedBackend
from served_scores import KEY, Running


async def scored(url):
    scorer = HttpScorer(url, api_key=KEY)
    try:
        return await scorer.score([group_of((Message("user", "q"),), ("a", "b"), group_id="g")])
    finally:
        await scorer.aclose()


def test_what_a_score_came_about_from_travels():
    class Members(ScriptedBackend):
        def score_tokens(self, tokens):
            parts = {"kind": 0.5, "brief": -1.0}
            return [
                tuple(replace(one, parts=parts) for one in row)
                for row in super().score_tokens(tokens)
            ]

    with Running(Members()) as it:
        told = it.score("a").json()["groups"][0]["scores"][0]
        assert told["parts"] == {"kind": 0.5, "brief": -1.0}
        ((one, other),) = asyncio.run(scored(it.url))
        assert one.parts == other.parts == {"kind": 0.5, "brief": -1.0}
