"""Where scores come from, as a configuration says it: what is refused, and in which words."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from laurel.config.environments import (
    EnsemblePart,
    JudgeConfig,
    RewardModelEnvironmentConfig,
    ScorerSource,
)
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.environments.reward_model_environment import scorer_spec_of
from laurel.errors import ConfigError
from laurel.run.request import request_of, uses_reward_model

URL = "http://127.0.0.1:8000"
JUDGE = {"urls": [URL], "url_model": "judge", "judge": {}}
FUNCTION = {"path": "rewards.py:compute_score"}
TWO = [{"name": "a", "model_name": "x"}, {"name": "b", "model_name": "y"}]
SERVED = {"name": "served", "urls": [URL], "normalize": "none"}


def settings(**changes: Any) -> RewardModelEnvironmentConfig:
    return RewardModelEnvironmentConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"urls": []}, "urls is empty"),
        ({"urls": ["127.0.0.1:8000"]}, "is no address: write http://HOST:PORT"),
        ({"urls": ["ftp://x"]}, "is no address: write http://HOST:PORT"),
        ({"urls": ["http://x:port"]}, "is no address"),
        ({"urls": ["http://me:word@x:1"]}, "the address of x has a password in it"),
        ({"urls": [URL, URL]}, "an address is there twice"),
        ({"urls": [URL], "url_protocol": "sglang"}, "name the reward model (model_name)"),
        ({"urls": [URL], "url_protocol": "openrlhf"}, "name the reward model (model_name)"),
        ({"urls": [URL], "reward_key": "score"}, "reward_key is for url_protocol=slime"),
        ({"urls": [URL], "hedge": True}, "hedge asks a second server, and urls has only one"),
        ({"urls": [URL], "api_key_env": "sk-12 34"}, "is the name of an environment variable"),
        ({**JUDGE, "function": FUNCTION}, "judge and function cannot both give the score"),
        ({"model_name": "x", "url_model": "m"}, "url_model says how urls are asked, and there are"),
        ({"model_name": "x", "judge": {}, "api_key_env": "KEY"}, "says how urls are asked"),
        ({**JUDGE, "url_protocol": "sglang"}, "url_protocol is for a reward model"),
        ({"models": TWO, "urls": [URL]}, "models and urls cannot both give the score"),
        ({"models": TWO, "model_name": "x"}, "models and model_name cannot both give the score"),
        ({"models": [TWO[0], TWO[0]]}, "'a' is the name of two models"),
        ({"models": [{**TWO[0], "weight": 0}, {**TWO[1], "weight": 0}]}, "every weight is 0"),
        ({"models": [{**TWO[0], "weight": 2}, TWO[1]], "combine": "min"}, "the weight of 'a'"),
        ({"models": [{"name": "c"}, TWO[0]]}, "the model 'c' has no source"),
        ({"models": [{**TWO[0], "normalize": [1, 0]}, TWO[1]]}, "deviation must be above 0"),
        (
            {"models": [{"name": "c", **JUDGE}, TWO[0]]},
            "nothing is stored with what 'c' names; give its [mean, std], or normalize=none",
        ),
        ({"models": TWO, "transform": {"normalize": "stored"}}, "each is normalised by its own"),
        ({"model_name": "x", "combine": "min"}, "combine=min is for several models"),
        ({"models": TWO, "uncertainty_penalty": 2.0}, "uncertainty_penalty is for combine=mean"),
        ({"models": TWO, "max_model_len": 9}, "max_model_len: each of the models has its own"),
        ({"models": TWO, "hedge": True}, "hedge asks a second server, and there are no urls"),
        # Those of the models are not meant: each of them has its own key.
        ({"models": [SERVED, TWO[0]], "api_key_env": "KEY"}, "there are none beside it"),
        (
            {
                "models": [SERVED, SERVED | {"name": "b"}],
                "batch_tokens": 9,
                "server": {"model_name": "m"},
            },
            "server is for a function",
        ),
        ({"models": TWO, "num_replicas": 2}, "num_replicas=2 is for one model that this run"),
        ({"urls": [URL], "num_replicas": 2}, "num_replicas=2 is for one model that this run"),
        ({"enabled": True}, "model_name is missing: which reward model?"),
        ({"urls": [URL], "num_workers": 1}, "num_workers=1 is for processes that render"),
        ({"urls": [URL], "num_workers": 1, "model_name": "x"}, "what they are asked: leave it out"),
        ({**JUDGE, "num_workers": 2}, "num_workers=2 is for processes that render"),
        (
            {"urls": [URL], "url_protocol": "vllm", "num_workers": 1},
            "leave it out; or name the model whose tokens they are to be sent (model_name)",
        ),
        (
            {
                "models": [{"name": n, "normalize": "none", **JUDGE} for n in "ab"],
                "num_workers": 1,
            },
            "here servers render what they are asked: leave it out",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_is_loaded(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settings(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_pattern": "("}, "score_pattern is no regular expression"),
        ({"score_pattern": r"\d+"}, "score_pattern has 0 groups"),
        ({"score_pattern": r"(a)(b)"}, "score_pattern has 2 groups"),
        ({"num_samples": 2}, "num_samples=2 with temperature=0 are as many equal replies"),
        ({"min_samples": 2}, "min_samples=2 is more than num_samples=1"),
        ({"score_range": [5, 5]}, "score_range=[5.0, 5.0] must be [lowest, highest]"),
        ({"score_range": [0, math.inf]}, "template=null asks for a score in score_range"),
        ({"extra_body": {"messages": []}}, "extra_body must not hold messages"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        JudgeConfig(**changes)


@pytest.mark.parametrize("url", ["ftp://me:verysecret@x", "http://x:port/?key=verysecret"])
def test_secrets_in_an_address_are_not_repeated(url):
    with pytest.raises(ValueError, match="is no address") as caught:
        settings(urls=[url])
    assert "verysecret" not in str(caught.value.errors()[0]["msg"])


def test_a_key_that_was_written_instead_of_its_variable_is_not_repeated_by_the_loader(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"env: {{reward_model: {{urls: ['{URL}'], api_key_env: sk-verysecret}}}}\n")
    with pytest.raises(ConfigError, match="api_key_env") as caught:
        load_config(GRPORun, path, [])
    assert "verysecret" not in str(caught.value)


def test_errors_of_a_file_name_the_line_and_the_member(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "env:\n  reward_model:\n    enabled: true\n    models:\n"
        "      - {name: a, model_name: x}\n"
        "      - {name: b, model_name: m, judge: {words: [a, b]}, normalize: none}\n"
    )
    with pytest.raises(ConfigError, match=r"run.yaml:6: env.reward_model.models\[1\].judge"):
        load_config(GRPORun, path, [])


@pytest.mark.parametrize(
    ("changes", "loads", "groups"),
    [
        ({"model_name": "x"}, True, False),
        ({"urls": [URL]}, False, False),
        ({"urls": [URL], "url_protocol": "vllm", "model_name": "x"}, False, False),
        (JUDGE, False, False),
        ({"function": FUNCTION}, False, False),
        ({"function": FUNCTION | {"group": True}}, False, True),
        ({"models": TWO}, True, False),
        (
            {
                "models": [
                    TWO[0],
                    {"name": "f", "function": FUNCTION | {"group": True}, "normalize": "none"},
                ]
            },
            True,
            True,
        ),
        ({"models": [SERVED, SERVED | {"name": "other"}]}, False, False),
    ],
)
def test_slots_are_taken_for_models_that_are_loaded(changes, loads, groups):
    found = settings(enabled=True, **changes)
    assert (bool(found.loaded), found.judges_groups) == (loads, groups)
    assert found.loads_model == (loads and "models" not in changes), "alone"
    config = GRPORun()
    config = config.model_copy(
        update={"env": config.env.model_copy(update={"reward_model": found})}
    )
    assert uses_reward_model(config) == loads
    assert (request_of(config).role("reward_model") is not None) == loads


def test_every_key_of_a_source_is_one_of_the_environment():
    assert set(ScorerSource.model_fields) < set(RewardModelEnvironmentConfig.model_fields)


def test_what_members_have_no_key_for_is_said_once_for_all_of_them():
    """Each key of a source is a member's own or the environment's, and reaches every member."""
    of_all = {
        "precision": "float32",
        "compile": False,
        "trust_remote_code": True,
        "safetensors_only": False,
        "batch_tokens": 9,
        "request_timeout": 7.0,
        "hedge": True,
        "connect_patience": 5.0,
        "generation": None,
        "server": {"model_name": "m"},
        "max_concurrent": 3,
    }
    own = set(EnsemblePart.model_fields)
    assert set(ScorerSource.model_fields) - own == set(of_all)
    function = {"name": "c", "function": FUNCTION, "normalize": "none"}
    servers = SERVED | {"urls": [URL, "http://127.0.0.1:8001"], "api_key_env": "KEY"}
    found = settings(models=[TWO[0], servers, function], **of_all)
    for source, part in zip(found.sources, found.models, strict=True):
        assert {key: source[key] for key in of_all} == {key: found[key] for key in of_all}
        assert {key: source[key] for key in own & set(ScorerSource.model_fields)} == {
            key: part[key] for key in own & set(ScorerSource.model_fields)
        }
    spec = scorer_spec_of(found, device="cpu")
    assert {member.spec.precision for member in spec.members} == {"float32"}
    assert [one.spec.source and one.spec.source.server for one in spec.members] == [
        None,
        None,
        found.server,
    ]
