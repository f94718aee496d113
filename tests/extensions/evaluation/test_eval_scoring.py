"""`laurel eval` with the address of a server that refuses: one sentence, and what to do."""

import io

import pytest
from rich.console import Console

from laurel.errors import ConfigError
from laurel.extensions.evaluation.run import EvalScorer, open_evaluation_scorer
from laurel.rewards.remote.wire import dump
from laurel.rewards.spec import ScorerSpec
from reward_servers import Answer, RewardServer


def refused(status, said, **settings):
    """The address that was asked, and what its refusal is told as."""
    answer = Answer(status=status, body=dump({"error": {"code": "x", "message": said}}))
    with RewardServer(lambda number, asked: answer) as server:
        model = EvalScorer(model=server.url, options=ScorerSpec(device="cpu"), **settings)
        with (
            pytest.raises(ConfigError) as caught,
            open_evaluation_scorer(model.resolved(), Console(file=io.StringIO())),
        ):
            pass
    return f"{server.url}/v1/score", str(caught.value)


def test_a_missing_key_is_told_in_one_sentence(monkeypatch):
    monkeypatch.delenv("LAUREL_API_KEY", raising=False)
    url, told = refused(401, "a key is needed: Authorization: Bearer KEY")
    assert told == (
        f"--model {url} refuses to score: answered 401: a key is needed: Authorization: Bearer "
        "KEY; name the variable that holds its key in --api-key-env (default LAUREL_API_KEY)"
    )


def test_a_wrong_key_is_told_in_one_sentence(monkeypatch):
    monkeypatch.setenv("LAUREL_API_KEY", "k" * 40)
    url, told = refused(401, "this key is not one of the server's")
    assert told == (
        f"--model {url} refuses to score: answered 401: this key is not one of the server's; "
        "does the variable of --api-key-env (default LAUREL_API_KEY) hold the key of this server?"
    )
