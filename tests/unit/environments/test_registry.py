"""Environments by name."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from laurel import plugins
from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    method_name,
)
from laurel.environments.registry import (
    create_environment,
    create_environments,
    environment_names,
    imported,
    register_env,
)
from laurel.errors import ConfigError
from laurel.extensions.math.environment import MathEnvironment
from laurel.extensions.show_config.json_schema import schema_text

made = []


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The names that a test registers are its own."""
    monkeypatch.setattr(plugins, "REGISTERED", {})


def plain(data_source, solution_str, ground_truth, extra_info):
    """A reward function, which is no environment."""
    return 1.0


class Constant(EnvironmentInterface):
    """Gives every conversation the same."""

    def __init__(self, reward=1.0):
        self.reward = reward
        self.is_shut_down = False
        made.append(self)

    def step(self, message_log_batch, metadata):
        size = len(message_log_batch)
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * size,
            list(metadata),
            [None] * size,
            torch.full((size,), self.reward),
            torch.ones(size, dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}

    def shutdown(self):
        self.is_shut_down = True


class Broken(Constant):
    def __init__(self):
        raise ConfigError("this one never works")


class NoEnvironment:
    def step(self, message_log_batch, metadata):
        return None


def config_of(**sections):
    return EnvironmentsConfig.model_validate(sections)


def own(name="Constant", **kwargs):
    return {"name": f"{__name__}.{name}", "kwargs": kwargs}


@pytest.fixture(autouse=True)
def _none_made():
    made.clear()


@pytest.mark.parametrize("name", ["math", "math_default"])
def test_math(name):
    with create_environment(name, config_of(math={"num_workers": 2})) as environment:
        assert isinstance(environment, MathEnvironment)
        assert environment.config.num_workers == 2


def test_a_composite_and_its_parts():
    config = config_of(
        custom={"mine": own(reward=2.0)},
        composite={
            "inner": {"parts": [{"env": "mine", "weight": 3.0}]},
            "outer": {"parts": [{"env": "inner"}, {"env": "mine"}]},
        },
    )
    environment = create_environment("outer", config)
    assert isinstance(environment, CompositeEnvironment)
    returned = environment.step([[{"role": "assistant", "content": "a"}]], [{}])
    assert {k: v.tolist() for k, v in returned.rewards.items()} == {
        "inner/mine": [6.0],
        "mine": [2.0],
    }
    assert len(made) == 1
    environment.shutdown()
    assert made[0].is_shut_down


def test_what_is_named_twice_is_made_once():
    config = config_of(
        custom={"mine": own()}, composite={"both": {"parts": [{"env": "mine"}, {"env": "math"}]}}
    )
    environments = create_environments(["mine", "both", "mine"], config)
    assert list(environments) == ["mine", "both"]
    assert len(made) == 1


def test_what_was_made_is_shut_down_when_the_next_cannot_be():
    config = config_of(custom={"mine": own(), "broken": own("Broken")})
    with pytest.raises(ConfigError, match="never works"):
        create_environments(["mine", "broken"], config)
    assert made[0].is_shut_down


def test_a_name_can_be_registered_once():
    register_env("registered_in_a_test", f"{__name__}.Constant")
    assert isinstance(create_environment("registered_in_a_test", config_of()), Constant)
    given = config_of(custom={"registered_in_a_test": own(reward=5.0)})
    assert create_environment("registered_in_a_test", given).reward == 5.0
    with pytest.raises(ConfigError, match="already registered"):
        register_env("registered_in_a_test", "elsewhere.Constant")
    with pytest.raises(ValueError, match="'math' is already registered"):
        register_env("math", "elsewhere.Math")
    for path in ("Constant", ".Constant", "module:"):
        with pytest.raises(ConfigError, match=r"not of the form module\.Name or module:Name"):
            register_env("another", path)


class OfNemoRL(Constant):
    """Takes its section as one mapping."""

    def __init__(self, cfg):
        super().__init__(cfg["reward"])


class Six(NamedTuple):
    """What NeMo RL's environments return."""

    observations: list
    metadata: list
    next_stop_strings: list
    rewards: list
    terminateds: list
    answers: list


class ReturnsTuple(Constant):
    def step(self, message_log_batch, metadata):
        def inside():
            return 1, 2

        return [], [], inside(), [], [], []


class ReturnsName(Constant):
    def step(self, message_log_batch, metadata):
        found = [], [], [], [], [], []
        return found


class ReturnsOther(Constant):
    def step(self, message_log_batch, metadata):
        return Six([], [], [], [], [], [])


class ReturnsInside(Constant):
    def step(self, message_log_batch, metadata):
        def inside():
            return 1, 2

        found = (1, 2)
        found = super().step(message_log_batch, metadata)
        inside()
        return found


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("ReturnsTuple", "a tuple of 6"),
        ("ReturnsName", "a tuple of 6"),
        ("ReturnsOther", r"a tests.*\.Six"),
    ],
)
def test_a_tuple_of_six_is_refused_before_the_first_rollouts(kind, told):
    config = config_of(custom={"mine": own(kind)})
    with pytest.raises(ConfigError, match=rf"test_registry\.py:\d+ returns {told}"):
        create_environment("mine", config)


def test_what_returns_no_tuple_is_not_refused():
    assert create_environment("mine", config_of(custom={"mine": own("ReturnsInside")})) is made[0]


@pytest.mark.parametrize("kind", ["Constant", "OfNemoRL"])
@pytest.mark.parametrize("name", ["code_gen", "code_gym"])  # the second is one of NeMo RL's own
def test_a_registered_one_gets_its_section(kind, name):
    with pytest.raises(ConfigError):
        load_config(GRPORun, None, [f"data.env_name={name}", f"+env.{name}.reward=5"])
    register_env(name, f"{__name__}.{kind}")
    overrides = [f"data.env_name={name}", f"+env.{name}.reward=5"]
    config = load_config(GRPORun, None, overrides).config.env
    assert create_environment(name, config).reward == 5
    assert name in environment_names(config)
    assert name in json.loads(schema_text("grpo"))["$defs"]["EnvironmentsConfig"]["properties"]


@pytest.mark.parametrize("kind", ["verifiers", "openenv", "openreward"])
def test_one_of_several_may_have_the_name_of_its_kind(kind, monkeypatch):
    """As `laurel init --data openenv` writes it: `env.openenv.openenv`."""
    own_kind = type(plugins.plugin("environments", kind))
    monkeypatch.setattr(own_kind, "make", lambda self, section, services: Constant())
    settings = {"id": "a"} if kind == "verifiers" else {"url": "http://127.0.0.1:1"}
    assert create_environment(kind, config_of(**{kind: {kind: settings}})) is made[0]
    with pytest.raises(ConfigError, match=f"write one of them under env.{kind}"):
        create_environment(kind, config_of())


def test_an_unknown_name_lists_the_known_ones():
    config = config_of(custom={"mine": own()}, composite={"both": {"parts": [{"env": "mine"}]}})
    with pytest.raises(ConfigError) as caught:
        create_environment("maths", config)
    message = str(caught.value)
    assert "did you mean 'math'" in message
    for name in ("math", "math_default", "reward_model", "both", "mine"):
        assert name in environment_names(config)
        assert name in message


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"custom": {"mine": own("NoEnvironment")}},
            "lacks global_post_process_and_metrics; derive it from",
        ),
        ({"custom": {"mine": own("Constnt")}}, "did you mean 'Constant'"),
        ({"custom": {"mine": own(rewrd=1.0)}}, "cannot be called with rewrd=1.0"),
        ({"custom": {"mine": {"name": "no_such_module.Env"}}}, "no module 'no_such_module'"),
        ({"custom": {"mine": {"name": "Constant"}}}, "not of the form"),
        ({"custom": {"mine": {"name": "sys.path"}}}, "is list, not a class"),
        ({"custom": {"mine": own(), "math": own()}}, "call yours something else"),
        (
            {"custom": {"mine": own()}, "composite": {"mine": {"parts": [{"env": "math"}]}}},
            "both have mine",
        ),
        (
            {
                "composite": {
                    "mine": {"parts": [{"env": "other"}]},
                    "other": {"parts": [{"env": "mine"}]},
                }
            },
            "mine -> other -> mine",
        ),
        (
            {"composite": {"mine": {"parts": [{"env": "oter"}]}}},
            "no environment is called 'oter', as 'mine' names one",
        ),
    ],
)
def test_what_cannot_be_made_is_told(sections, message):
    with pytest.raises(ConfigError, match=message):
        create_environment("mine", config_of(**sections))


def test_nothing_is_imported_before_it_is_asked_for():
    program = (
        "import sys\n"
        "import laurel.environments.registry\n"
        "heavy = ('torch', 'math_verify', 'sympy', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "import laurel.extensions.math.environment\n"
        "print([name for name in heavy[1:] if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def x(:\n", r"SyntaxError: .* \(.*broken_module\.py:1\)"),
        (
            "\nimport no_such_module_here\n",
            r"ModuleNotFoundError: No module .*broken_module\.py:2\)",
        ),
        ("\n\nraise ValueError('boom')\n", r"ValueError: boom \(.*broken_module\.py:3\)"),
    ],
    ids=["syntax", "import", "raises"],
)
def test_a_module_of_ones_own_that_is_broken_is_told_with_its_line(
    tmp_path, monkeypatch, text, said
):
    (tmp_path / "broken_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    custom = {"mine": {"name": "broken_module.Mine"}}
    with pytest.raises(ConfigError, match="module 'broken_module' cannot be imported: " + said):
        create_environment("mine", EnvironmentsConfig(custom=custom))


def test_a_function_that_scores_is_told_where_functions_go():
    config = EnvironmentsConfig(custom={"mine": {"name": f"{__name__}.plain"}})
    with pytest.raises(ConfigError) as error:
        create_environment("mine", config)
    said = str(error.value)
    assert "An environment is a class; a function that scores goes under env.reward_model" in said
    assert "function.path=" in said


def test_a_class_of_ones_own_that_cannot_be_made_is_told_with_its_line(tmp_path, monkeypatch):
    text = "class Mine:\n    def __init__(self):\n        open('no/such/file')\n"
    (tmp_path / "failing_module.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentsConfig(custom={"mine": {"name": "failing_module.Mine"}})
    said = r"failing_module\.Mine cannot be made: FileNotFoundError: .*failing_module\.py:3\)"
    with pytest.raises(ConfigError, match=said):
        create_environment("mine", config)


def test_rays_own_decorator_is_seen_through(monkeypatch):
    ray = pytest.importorskip("ray")
    for found in (ray.remote(Constant), ray.remote(num_cpus=2)(Constant), Constant):
        monkeypatch.setattr(sys.modules[__name__], "Found", found, raising=False)
        assert imported(f"{__name__}.Found", "a test") is Constant


class Counting(Constant):
    """Learns something from batches."""

    spec = EnvironmentSpec(has_state=True)

    def end_batch(self, batch):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Wrapping(Constant):
    """Passes on `step`, and nothing that is remembered."""

    def __init__(self):
        self.inside = Counting()

    def step(self, message_log_batch, metadata):
        return self.inside.step(message_log_batch, metadata)


class Forgetful(Constant):
    spec = EnvironmentSpec(has_state=True)

    def state_dict(self):
        return {}


class Silent(Counting):
    spec = EnvironmentSpec()


class Older(Constant):
    judges = "completion"
    noise_floor = 0.5


class TwoMethods:
    """As the environments of NeMo RL: nothing is derived from, and nothing else is said."""

    def step(self, message_log_batch, metadata):
        return Constant().step(message_log_batch, metadata)

    def global_post_process_and_metrics(self, batch):
        return batch, {"own": 1.0}


class ThreeMethods(TwoMethods):
    is_shut_down = False

    def shutdown(self):
        self.is_shut_down = True


class PlainWrapping(TwoMethods):
    def __init__(self):
        self.inside = Counting()


class PlainAndMore(TwoMethods):
    spec = EnvironmentSpec(judges="completion")

    def validate(self, tasks):
        return []


class NoSpec(Constant):
    spec = {"judges": "completion"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Wrapping, r"Wrapping wraps a Counting \(inside\), and does not pass on its state"),
        (PlainWrapping, r"PlainWrapping wraps a Counting \(inside\)"),
        (Forgetful, "Forgetful has a state, .* but not all of state_dict, load_state_dict, end_ba"),
        (
            Silent,
            r"Silent has state_dict, load_state_dict, end_batch, but no state.*has_state=True",
        ),
        (Older, "Older has judges, noise_floor, which would be ignored: .* EnvironmentSpec"),
        (PlainAndMore, "PlainAndMore has validate, spec, which would be ignored: derive it from"),
        (NoSpec, "its spec is {'judges': 'completion'}, and must be an EnvironmentSpec"),
    ],
)
def test_what_would_be_ignored_or_lost_without_a_word_is_told(kind, said):
    with pytest.raises(ConfigError, match=said):
        create_environment("mine", config_of(custom={"mine": own(kind.__name__)}))


def test_a_class_of_two_methods_has_the_defaults():
    environment = create_environment("mine", config_of(custom={"mine": own("TwoMethods")}))
    assert environment.spec == EnvironmentSpec()
    assert (environment.spec.judges, environment.spec.has_state) == ("group", False)
    assert environment.step([[{"role": "assistant", "content": "a"}]], [{}]).rewards.tolist() == [1]
    assert environment.global_post_process_and_metrics({}) == ({}, {"own": 1.0})
    assert method_name(environment.step).startswith(f"{__name__}.TwoMethods.step (")
    assert (environment.validate([]), environment.noise_floor()) == ([], 0.0)
    with environment, environment.resting():
        environment.end_batch({})


def test_a_class_of_three_methods_is_shut_down():
    environment = create_environment("mine", config_of(custom={"mine": own("ThreeMethods")}))
    environment.shutdown()
    assert environment.step.__self__.is_shut_down
