"""Functions that the policy calls: what it is told, what is counted, and what ends."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import tiny_tokenizers as made
from environment_batches import batch_of, log_of, total
from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.environments.registry import create_environment, create_environments, shown_tools
from laurel.errors import ConfigError, EnvironmentFailedError, ModelError
from laurel.extensions.function_tools.environment import ToolEnvironment
from laurel.models.tool_calls import FORMS, ToolCall
from laurel.run.request import uses_reward_model
from laurel.run.tasks import needs_of
from tool_templates import FORM_OF, TOKENIZERS

NAMES = ("add", "convert", "choose", "look_up", "leave", "hang", "die")


def made_with(*names, most=4096, **settings):
    functions = [f"tool_functions.{name}" for name in names or NAMES]
    given = {"functions": functions, "num_workers": 2} | settings
    environment = ToolEnvironment(given, max_observation_chars=most)
    environment.use_tokenizer(TOKENIZERS["hermes"]())
    return environment


def call(name, **arguments):
    return FORMS["hermes"].write([ToolCall(name, arguments)])


def said(environment, *texts, metadata=None):
    """What an environment answers to one message."""
    returned = environment.step([log_of(*texts)], [metadata])
    (observation,), (failure,) = returned.observations, returned.failures
    assert failure is None
    assert total(returned) == [0.0]
    return observation, returned


@pytest.fixture(scope="module")
def tools():
    with made_with() as environment:
        yield environment


@pytest.mark.parametrize(
    ("text", "answer", "outcome"),
    [
        (call("add", left=2), "3", "answered"),
        (call("add", left=2, right=-5), "-3", "answered"),
        (
            call("convert", text="Ä", case="lower", parts=[1, 2.5]),
            '{"text": "ä", "parts": [1.0, 2.5], "kind": "tuple"}',
            "answered",
        ),
        (call("choose", color="red"), "chosen: red", "answered"),
        (call("choose", color="green"), "color: Input should be 'red' or 'blue'", "wrong_argum"),
        (call("convert", text="a", case="title"), "case: Input should be 'upper' or", "wrong_arg"),
        (call("add", left="2"), "left: Input should be a valid integer", "wrong_arguments"),
        (call("add", left=True), "left: Input should be a valid integer", "wrong_arguments"),
        (call("add", right=2), "left: Field required", "wrong_arguments"),
        (call("add", left=2, up=1), "up: Extra inputs are not permitted", "wrong_arguments"),
        (call("subtract", left=2), "there is no function 'subtract', only add, con", "unknown_n"),
        ("<tool_call>add(2)</tool_call>", "not valid JSON: Expecting value", "malformed"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name" of a function', "malformed"),
        (call("look_up", word="x"), "Error: KeyError: 'x'", "raised"),
        (call("look_up", word="surrogate"), "?", "answered"),
        (call("look_up", word="\ud800"), "half of a surrogate pair", "malformed"),
        (call("look_up", word=json.loads("[" * 64 + "]" * 64)), "more than 64 deep", "malformed"),
        (call("leave"), "Error: SystemExit: 3", "raised"),
    ],
)
def test_a_call_is_answered_and_counted(tools, text, answer, outcome):
    observation, returned = said(tools, text)
    (message,) = observation
    assert message["role"] == "tool"
    assert answer in message["content"]
    assert message["content"].startswith("Error: ") == (not outcome.startswith("answered"))
    ((name, count),) = returned.metadata[0]["tool_counts"].items()
    assert name.startswith(outcome)
    assert count == 1
    assert returned.notes == [{name: 1}]
    mistakes = ("malformed", "unknown_name", "wrong_arguments")
    assert returned.invalid_calls == [name in mistakes]
    assert not returned.terminateds.any()


def test_several_calls_are_answered_in_order_and_add_up(tools):
    text = f"First {call('add', left=1)} then {call('add')} and {call('add', left=5)}"
    observation, returned = said(tools, text, metadata={"tool_counts": {"answered": 1}, "a": 1})
    assert [one["content"] for one in observation][::2] == ["2", "6"]
    assert returned.metadata == [{"a": 1, "tool_counts": {"answered": 3, "wrong_arguments": 1}}]


def test_a_message_without_a_call_is_the_end(tools):
    observation, returned = said(tools, call("add", left=1), r"\boxed{2}")
    assert observation == {"role": "environment", "content": ""}
    assert returned.terminateds.all()
    assert returned.notes == [{}]


@pytest.mark.slow
def test_a_call_that_hangs_is_killed_and_the_next_one_runs():
    with (
        made_with("hang", "add", timeout_seconds=2.0) as environment,
        ThreadPoolExecutor(1) as thread,
    ):
        answering = thread.submit(said, environment, call("hang", seconds=60.0))
        busy: list[int] = []
        while not busy and not answering.done():
            busy = environment._pool.process_ids()[1:]
        observation, returned = answering.result()
        assert observation[0]["content"] == "Error: hang took more than 2 s"
        assert returned.notes == [{"timeout": 1}]
        assert busy
        assert said(environment, call("add", left=1))[0][0]["content"] == "2"
        assert not set(busy) & set(environment._pool.process_ids())
        alive = environment._pool.process_ids()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in alive) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in alive)


def test_a_process_that_dies_is_a_failure_and_harms_no_other(tools):
    texts = [call("die"), call("add", left=1), f"{call('add', left=1)}{call('die')}"]
    returned = tools.step([log_of(text) for text in texts], [None] * 3)
    assert [failure is not None for failure in returned.failures] == [True, False, True]
    assert "a tool failed: die: the pool of tools: the process died" in returned.failures[0]


def test_metadata_must_fit_the_conversations_before_any_call_begins(tools, monkeypatch):
    begun = []
    monkeypatch.setattr(tools._pool, "submit", begun.append)
    with pytest.raises(EnvironmentFailedError, match="2 conversations came with metadata for 1"):
        tools.step([log_of(call("add", left=1))] * 2, [None])
    assert not begun


def test_calls_end_at_the_limit():
    with made_with("add", max_calls=2) as environment:
        three = call("add", left=1) * 3
        observation, returned = said(environment, three)
        assert [one["content"] for one in observation][:2] == ["2", "2"]
        assert observation[2]["content"].startswith("Error: the 2 calls are used up")
        _, later = said(environment, call("add", left=1), metadata=returned.metadata[0])
        assert later.notes == [{"answered": 2, "over_limit": 2}]


def test_a_long_answer_loses_its_middle():
    with made_with("look_up", most=64) as environment:
        observation, _ = said(environment, call("look_up", word="long"))
        assert "9936 characters left out" in observation[0]["content"]


def test_metrics_are_shares_of_all_calls(tools):
    texts = [f"{call('add', left=1)}{call('add')}", call("leave"), "It is 2.", call("nothing")]
    logs = [log_of(text) for text in texts]
    _, metrics = tools.global_post_process_and_metrics(batch_of(logs, tools.step(logs, [None] * 4)))
    assert metrics["calls"] == 1.0
    assert metrics["calling_share"] == 0.75
    shares = {k.removeprefix("calls/"): v for k, v in metrics.items() if k.startswith("calls/")}
    assert {name: share for name, share in shares.items() if share} == dict.fromkeys(
        ("answered", "wrong_arguments", "raised", "unknown_name"), 0.25
    )
    assert set(shares) >= {"malformed", "timeout", "over_limit"}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_form_is_the_templates(name):
    form = FORMS[FORM_OF[name]]
    with ToolEnvironment({"functions": ["tool_functions.add"], "num_workers": 2}) as environment:
        with pytest.raises(EnvironmentFailedError, match="call use_tokenizer first"):
            environment.step([log_of("4")], [None])
        environment.use_tokenizer(TOKENIZERS[name]())
        observation, _ = said(environment, form.write([ToolCall("add", {"left": 4})]))
        assert observation == [{"role": "tool", "content": "5"}]


def test_a_template_without_tools_is_refused():
    with made_with("add") as environment, pytest.raises(ModelError, match="leaves out the tools"):
        environment.use_tokenizer(made.chatml())


@pytest.mark.parametrize(
    ("functions", "problem"),
    [
        ([], "env.tools.functions is empty"),
        (["add"], "'add' must be module.function"),
        (["a.b:c"], "'a.b:c' must be module.function"),
        (["tool_functions.add", "other.add"], "two have the same name"),
        (["no_such_module.add"], "no module 'no_such_module'"),
        (["tool_functions.ad"], "has no 'ad'; did you mean 'add'"),
        (["tool_functions.NUMBER"], "not a class|is no function"),
        (["tool_functions.undocumented"], "needs a docstring"),
        (["tool_functions.unhinted"], "needs a type hint"),
        (["tool_functions.open_ended"], "cannot be given by name"),
        (["tool_functions.strange"], "needs a type hint of plain values"),
        (["pathlib.Path"], "is no function, but a type"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(functions, problem):
    with pytest.raises(ConfigError, match=problem):
        ToolEnvironment({"functions": functions})


def config_of(judge="math", **more):
    tools = {"functions": ["tool_functions.add"], "graded_by": judge}
    return EnvironmentsConfig(tools=tools, math={"num_workers": 1}, **more)


def test_the_answer_is_graded_by_another():
    with create_environment("tools", config_of()) as environment:
        environment.use_tokenizer(TOKENIZERS["hermes"]())
        (schema,) = environment.spec.tools
        assert schema["function"]["name"] == "add"
        assert schema["function"]["parameters"]["required"] == ["left"]
        logs = [log_of(call("add", left=1)), log_of(r"\boxed{2}"), log_of(r"\boxed{3}")]
        returned = environment.step(logs, [{"ground_truth": "2"}] * 3)
        assert returned.observations[0] == [{"role": "tool", "content": "2"}]
        assert returned.terminateds.tolist() == [False, True, True]
        assert total(returned) == [0.0, 1.0, 0.0]
        assert returned.invalid_calls == [False, False, False]
        wrong = [log_of(call("add")), log_of(r"\boxed{2}")]
        assert returned_of(environment, wrong).invalid_calls == [True, False]
        answered = batch_of(logs[1:], returned_of(environment, logs[1:]))
        _, metrics = environment.global_post_process_and_metrics(answered)
        assert metrics["math/accuracy"] == 0.5
        assert metrics["tools/calls"] == 0.0


def test_math_reads_all_messages_of_the_policy():
    with create_environment("tools", config_of()) as environment:
        environment.use_tokenizer(TOKENIZERS["hermes"]())
        log = log_of(rf"I guess \boxed{{2}}. {call('add', left=1)}", "It is what I said.")
        assert total(returned_of(environment, [log])) == [1.0]


def returned_of(environment, logs):
    return environment.step(logs, [{"ground_truth": "2"}] * len(logs))


def test_tools_may_lead_a_composite():
    parts = [{"env": "tools"}, {"env": "math", "weight": 2.0}]
    config = config_of(None, composite={"sums": {"parts": parts, "conducted_by": "tools"}})
    with create_environment("sums", config) as environment:
        environment.use_tokenizer(TOKENIZERS["qwen"]())
        assert len(environment.spec.tools) == 1
        assert total(returned_of(environment, [log_of(r"\boxed{2}")])) == [2.0]
    (shown,) = shown_tools("sums", config)
    assert shown.where == "env.tools"
    assert [one["function"]["name"] for one in shown.schemas] == ["add"]
    assert not shown_tools("math", config)
    assert not shown_tools("tools", EnvironmentsConfig())


def test_a_composite_in_which_tools_lead_nothing_is_refused():
    parts = [{"env": "tools"}, {"env": "math"}]
    config = config_of(None, composite={"sums": {"parts": parts}})
    with pytest.raises(ConfigError, match=r"set env\.composite\.sums\.conducted_by=tools"):
        create_environment("sums", config)


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        (None, "env.tools grades nothing: set env.tools.graded_by"),
        ("maths", "no environment is called 'maths', as 'tools' names one; did you mean 'math'"),
        ("tools", "'tools' is part of itself"),
    ],
)
def test_a_judge_that_cannot_be_is_refused(judge, problem):
    with pytest.raises(ConfigError, match=problem):
        create_environments(["tools"], config_of(judge))


def test_what_tools_need_is_what_their_judge_needs():
    assert "tools" in needs_of(config_of()).answers
    assert "tools" not in needs_of(config_of("reward_model")).answers
    assert "tools" in needs_of(config_of("code")).tests


def run_of(*changes):
    base = ["data.env_name=tools", "env.tools.functions=[tool_functions.add]"]
    return load_config(GRPORun, None, [*base, "grpo.max_rollout_turns=2", *changes]).config


def test_a_loaded_reward_model_may_judge():
    model = ("env.reward_model.model_name=DIR", "env.tools.graded_by=reward_model")
    assert uses_reward_model(run_of(*model))
    assert not uses_reward_model(run_of(model[0], "env.tools.graded_by=math"))


def test_a_run_with_tools_needs_turns():
    with pytest.raises(ConfigError, match=r"grpo\.max_rollout_turns=1"):
        run_of("grpo.max_rollout_turns=1")
