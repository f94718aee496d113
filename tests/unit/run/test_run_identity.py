"""What must be the same when a GRPO run goes on, of whatever gives its scores."""

from typing import Any

import pytest

from laurel.config.environments import (
    CodeEnvironmentConfig,
    EnvironmentsConfig,
    RewardModelEnvironmentConfig,
)
from laurel.config.grpo import GRPORun
from laurel.run.grpo import grpo_identity
from laurel.training.state import leaves

URL, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:9000"
JUDGE: dict[str, Any] = {"judge": {"urls": [URL], "model": "m"}}
WRITTEN: dict[str, Any] = {"judge": {"model": "m"}}
LOADED: dict[str, Any] = {"judge": {"model": "m", "read_out": "log_probability"}}
FUNCTION: dict[str, Any] = {"function": {"path": "m:f"}}
MODELS: dict[str, Any] = {
    "models": [{"name": "a", "model_name": "x"}, {"name": "b", "urls": [URL], "normalize": "none"}]
}


def identity(settings):
    reward_model = RewardModelEnvironmentConfig(**settings)
    config = GRPORun()
    env = config.env.model_copy(update={"reward_model": reward_model})
    return dict(leaves("", grpo_identity(config.model_copy(update={"env": env}))))


def changed(settings, path, value):
    key, _, rest = path.partition(".")
    if isinstance(settings, list):
        index = int(key)
        return [*settings[:index], changed(settings[index], rest, value), *settings[index + 1 :]]
    inner = changed(settings.get(key, {}), rest, value) if rest else value
    return settings | {key: inner}


@pytest.mark.parametrize(
    ("settings", "path", "value"),
    [
        (JUDGE, "judge.urls", [OTHER]),
        (JUDGE, "judge.api_key_env", "KEY"),
        (LOADED, "judge.backend", "vllm"),
        (
            changed(LOADED, "judge.backend", "vllm"),
            "judge.vllm_cfg",
            {"gpu_memory_utilization": 0.5},
        ),
        (WRITTEN, "judge.max_concurrent", 3),
        (LOADED, "judge.batch_tokens", 4096),
        (FUNCTION, "function.timeout", 3.0),
        (FUNCTION, "num_workers", 2),
        ({"urls": [URL]}, "urls", [OTHER]),
        ({"urls": [URL]}, "connect_patience", 3.0),
        (MODELS, "models.1.urls", [OTHER]),
        ({"model_name": "x"}, "use_reward_loop", False),
    ],
)
def test_where_and_how_fast_may_change(settings, path, value):
    assert identity(changed(settings, path, value)) == identity(settings)


@pytest.mark.parametrize(
    ("settings", "path", "value"),
    [
        (JUDGE, "judge.model", "n"),
        (JUDGE, "judge.template", "{{ response }}"),
        (JUDGE, "judge.seed", 1),
        (LOADED, "judge.read_out", "written"),
        (LOADED, "judge.precision", "float32"),
        (LOADED, "judge.max_model_len", 512),
        (LOADED, "judge.words", ["good", "bad"]),
        (FUNCTION, "function.path", "m:g"),
        (FUNCTION, "function.kwargs", {"a": 1}),
        ({"urls": [URL]}, "url_protocol", "slime"),
        ({"model_name": "x"}, "model_name", "y"),
        (MODELS, "models.0.weight", 2.0),
        (MODELS, "combine", "min"),
        (MODELS, "models.0.model_name", "y"),
    ],
)
def test_what_decides_scores_may_not(settings, path, value):
    assert identity(changed(settings, path, value)) != identity(settings)


def of_code(**settings):
    env = GRPORun().env.model_copy(update={"code": CodeEnvironmentConfig(**settings)})
    return dict(leaves("", grpo_identity(GRPORun().model_copy(update={"env": env}))))


@pytest.mark.parametrize(
    "settings",
    [
        {"reward": "fraction"},
        {"max_attempts": 2},
        {"comparison": "apps"},
        {"stop_strings": None},
        {"sandbox": {"cpu_seconds": 1.0}},
        {"sandbox": {"memory_mb": 64}},
    ],
)
def test_what_a_program_earns_may_not_change_and_where_it_runs_may(settings):
    assert of_code(**settings) != of_code()
    sandbox = {"min_tier": "A", "backlog": 3}
    assert of_code(num_workers=1, deadline_seconds=9.0, sandbox=sandbox) == of_code()


@pytest.mark.parametrize("kind", ["openenv", "openreward"])
def test_a_server_of_sessions_may_move_and_its_rewards_may_not_change(kind):
    def of_server(**settings):
        env = EnvironmentsConfig(**{kind: {"x": {"url": URL, **settings}}})
        return dict(leaves("", grpo_identity(GRPORun().model_copy(update={"env": env}))))

    assert of_server(url=OTHER, connect_patience=1.0, step_timeout=2.0) == of_server()
    assert of_server(max_observation_chars=64) != of_server()
