"""A Python function as a scorer: what it is given, what its results mean, and how it is ended."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_tokenizers
from judges import judge_server, question
from laurel.config.environments import FunctionConfig
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.extensions.reward_functions.scorer import (
    FunctionScorer,
    find_function,
    score_of_result,
)
from laurel.types import (
    IS_VALIDATION,
    PROMPT_MESSAGES,
    Completion,
    Group,
    Message,
    group_of,
)
from reward_servers import wait_until

GROUP = Group(
    id="g",
    prompt=(Message("system", "Be short."), Message("user", "2 + 2?")),
    completions_G=tuple(
        Completion(messages=(Message("assistant", text),)) for text in ("4", "five", "4")
    ),
    metadata={"ground_truth": "4", "level": 3, "extra_info": {"split": "test"}},
)


def scorer_of(function, max_concurrent=None, **config):
    config = FunctionConfig(path="given:function", **config)
    return FunctionScorer(config, function=function, max_concurrent=max_concurrent)


def score(scorer, *groups):
    async def all_of_them():
        return await scorer.score(list(groups or (GROUP,)))

    scores = asyncio.run(all_of_them())
    return scores if len(groups) > 1 else scores[0]


def written(tmp_path: Path, text: str, name: str = "rewards.py") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_it_is_called_as_verl_calls_it():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        calls.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return float(solution_str == ground_truth)

    scores = score(scorer_of(compute_score, kwargs={"strict": True}))
    assert [one.value for one in scores] == [1.0, 0.0, 1.0]
    data_source, _, ground_truth, extra_info, kwargs = calls[0]
    assert (data_source, ground_truth, kwargs) == ("", "4", {"strict": True})
    assert sorted(call[1] for call in calls) == ["4", "4", "five"]
    assert extra_info == {
        "split": "test",
        "level": 3,
        "num_turns": 2,
        "prompt": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "2 + 2?"},
        ],
    }


def test_the_data_source_is_that_of_the_task():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return float(data_source == "gsm8k" and ground_truth is None)

    group = replace(GROUP, metadata={"data_source": "gsm8k"})
    assert score(scorer_of(compute_score), group)[0].value == 1.0


def test_an_async_function_is_waited_for_beside_the_others():
    inside, most = 0, 0

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return len(solution_str)

    assert [one.value for one in score(scorer_of(compute_score))] == [1.0, 4.0, 1.0]
    assert most == 3


def test_a_group_function_sees_all_completions_of_a_prompt_at_once():
    calls = []

    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, scale):
        calls.append((data_sources, solution_strs, ground_truths, len(extra_infos)))
        return np.asarray([scale * solution_strs.count(one) for one in solution_strs])

    scorer = scorer_of(compute_score, group=True, kwargs={"scale": 0.5})
    assert scorer.judges_groups
    assert [one.value for one in score(scorer)] == [1.0, 0.5, 1.0]
    assert calls == [(["", "", ""], ["4", "five", "4"], ["4", "4", "4"], 3)]
    assert score(scorer, group_of(GROUP.prompt, (), group_id="none")) == ()


TURNS = Group(
    id="g",
    prompt=(Message("user", "2 + 2?"), Message("assistant", "Let me ask."), Message("tool", "4")),
    completions_G=(Completion(messages=(Message("assistant", "It is 4."),)),),
    metadata={PROMPT_MESSAGES: 1, IS_VALIDATION: True, "level": 3},
)


def test_of_a_rollout_of_several_turns_it_gets_what_it_asks_for():
    """verl counts the prompt as a turn, and gives the text of all turns after it."""
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info, num_turns, **kwargs):
        calls.append((solution_str, num_turns, kwargs, sorted(extra_info), extra_info["num_turns"]))
        return {"score": 1.0}

    def with_text(data_source, solution_str, ground_truth, extra_info, response_str, validate):
        calls.append((response_str, validate))
        return 1.0

    def of_group(
        data_sources, solution_strs, ground_truths, extra_infos, response_strs, num_turns, validate
    ):
        calls.append((response_strs, num_turns, validate))
        return [1.0]

    for function, options in ((compute_score, {}), (with_text, {}), (of_group, {"group": True})):
        assert score(scorer_of(function, **options), TURNS)[0].value == 1.0
    whole = "Let me ask.\n4\nIt is 4."
    assert calls == [
        ("It is 4.", 4, {}, ["level", "num_turns", "prompt"], 4),
        (whole, True),
        ([whole], [4], True),
    ]
    # What the settings give goes before it.
    calls.clear()
    score(scorer_of(with_text, kwargs={"validate": "never"}), TURNS)
    assert calls == [(whole, "never")]


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (torch.tensor(1.5), 1.5),
        ({"score": 2}, 2.0),
    ],
)
def test_numbers_of_any_kind_are_scores(result, value):
    verdict = score_of_result(result)
    assert (verdict.value, verdict.values_K, verdict.failure) == (value, (value,), None)


def test_other_numbers_of_a_dictionary_are_parts():
    verdict = score_of_result({"score": 1.0, "acc": True, "length": 12, "pred": "4", "bad": np.nan})
    assert verdict.parts == {"acc": 1.0, "length": 12.0}


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (None, "error: the function returned None, not a number"),
        ("1", "error: the function returned str, not a number"),
        (float("nan"), "nan: the function returned nan"),
        (10**400, "nan: the function returned inf"),
        ({"acc": 1.0}, "error: the function returned a dictionary without a 'score'"),
        ({"score": None}, "error: the function returned None, not a number"),
        (np.zeros(2), "error: the function returned ndarray, not a number"),
    ],
)
def test_anything_else_is_a_failure_with_its_reason(result, failure):
    verdict = score_of_result(result)
    assert (verdict.value, verdict.failure) == (None, failure)


@pytest.mark.parametrize("is_async", [False, True])
def test_one_that_raises_fails_alone(is_async):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "five":
            raise ValueError("no digits")
        return 1.0

    async def waited(data_source, solution_str, ground_truth, extra_info):
        return compute_score(data_source, solution_str, ground_truth, extra_info)

    scores = score(scorer_of(waited if is_async else compute_score))
    assert [one.value for one in scores] == [1.0, None, 1.0]
    said, _, place = scores[1].failure.partition(" (")
    assert said == "error: the function raised ValueError: no digits"
    file, _, line = place.removesuffix(")").rpartition(":")
    assert Path(file).name == Path(__file__).name
    assert 'ValueError("no digits")' in Path(file).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    "error", [SystemExit(3), StopIteration(), TimeoutError("of mine"), asyncio.CancelledError()]
)
def test_whatever_it_raises_is_a_failure_of_its_own(error):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        raise error

    async def waited(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0)
        raise error

    for one in (*score(scorer_of(compute_score)), *score(scorer_of(waited))):
        raised = type(error).__name__
        if "coroutine raised" not in one.failure:  # as Python says it of StopIteration
            assert one.failure.startswith(f"error: the function raised {raised}")


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        ([1.0], "count: the function returned 1 results for 3 completions"),
        (1.0, "error: the function returned float, not a list of results"),
        ({"score": [1, 2, 3]}, "error: the function returned dict, not a list of results"),
    ],
)
def test_a_group_function_must_return_one_result_each(result, failure):
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
        return result

    scores = score(scorer_of(compute_score, group=True))
    assert [one.failure for one in scores] == [failure] * 3


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_one_that_takes_too_long_fails_alone(is_async):
    release = threading.Event()

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "five":
            release.wait(30)
        return 1.0

    async def waited(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "five":
            await asyncio.Event().wait()
        return 1.0

    try:
        scores = score(scorer_of(waited if is_async else compute_score, timeout=3.0))
    finally:
        release.set()
    assert [one.value for one in scores] == [1.0, None, 1.0]
    assert scores[1].failure == "timeout: the function took more than 3 s"


@pytest.mark.slow
def test_when_too_many_hang_in_threads_no_more_are_begun(monkeypatch):
    monkeypatch.setattr("laurel.extensions.reward_functions.scorer.MAX_HUNG", 3)
    release, begun = threading.Event(), []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        begun.append(solution_str)
        release.wait(30)
        return 1.0

    scorer = scorer_of(compute_score, timeout=2.0)

    async def one_after_the_other():
        await scorer.score([GROUP])
        (refused,) = await scorer.score([GROUP])
        release.set()
        while scorer._hung:
            await asyncio.sleep(0.01)
        (after,) = await scorer.score([GROUP])
        return refused, after

    refused, after = asyncio.run(one_after_the_other())
    assert len(begun) == 6
    assert all("3 calls of the function hang in threads" in one.failure for one in refused)
    assert [one.value for one in after] == [1.0] * 3


TEXT = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        open(extra_info.get("began", os.devnull), "w").close()
        while True:
            pass
    if solution_str == "die":
        os._exit(3)
    if solution_str == "raise":
        raise ValueError("no digits")
    return {"score": float(solution_str == ground_truth), "pid": os.getpid(), "note": "text"}

async def waited(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

def counted(data_sources, solution_strs, ground_truths, extra_infos):
    return [solution_strs.count(one) for one in solution_strs]
"""


@pytest.fixture
def in_processes(tmp_path):
    made = []

    def make(name="compute_score", num_workers=2, **config):
        path = written(tmp_path, TEXT)
        scorer = FunctionScorer(
            FunctionConfig(path=f"{path}:{name}", **config), num_workers=num_workers
        )
        made.append(scorer)
        return scorer

    yield make
    for scorer in made:
        scorer.close()


def asked(*answers):
    return Group(
        id="g",
        prompt=GROUP.prompt,
        metadata={"ground_truth": "4"},
        completions_G=tuple(Completion(messages=(Message("assistant", a),)) for a in answers),
    )


def test_processes_give_the_same_verdicts_as_threads(in_processes, tmp_path):
    apart = score(in_processes(), asked("4", "five", "raise"))
    here = score(
        FunctionScorer(FunctionConfig(path=f"{tmp_path}/rewards.py:compute_score")),
        asked("4", "five", "raise"),
    )
    assert [(one.value, one.failure) for one in apart] == [(one.value, one.failure) for one in here]
    assert here[0].parts["pid"] == os.getpid() != apart[0].parts["pid"]
    assert [one.value for one in score(in_processes("waited"), asked("a", "bcd"))] == [1.0, 3.0]
    grouped = score(in_processes("counted", group=True), asked("a", "b", "a"))
    assert [one.value for one in grouped] == [2.0, 1.0, 2.0]


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_and_another_goes_on(in_processes):
    scorer = in_processes(num_workers=1, timeout=4.0)
    first = score(scorer, asked("4"))
    scores = score(scorer, asked("hang", "4"))
    assert scores[0].failure == "timeout: the function took more than 4 s"
    assert scores[1].value == 1.0
    assert scores[1].parts["pid"] != first[0].parts["pid"]
    assert scorer._processes.process_ids()[1:] == [scores[1].parts["pid"]]
    with pytest.raises(ProcessLookupError):
        os.kill(int(first[0].parts["pid"]), 0)


def test_a_process_that_dies_fails_that_completion_alone(in_processes):
    scores = score(in_processes(num_workers=1), asked("4", "die", "4"))
    assert [one.value for one in scores] == [1.0, None, 1.0]
    assert scores[1].failure == "error: the process died while it ran the function"


def test_what_cannot_be_sent_to_a_process_is_a_failure(in_processes):
    group = Group(
        id="g",
        prompt=GROUP.prompt,
        completions_G=GROUP.completions_G,
        metadata={"extra_info": {"what": object()}},
    )
    assert "set num_workers=0" in score(in_processes(), group)[0].failure


def test_closing_kills_the_processes_in_mid_call(in_processes, tmp_path):
    scorer = in_processes(num_workers=1)
    began = tmp_path / "began"
    hanging = replace(asked("hang"), metadata={"began": str(began)})
    raised = []

    def ask():
        try:
            score(scorer, hanging)
        except EnvironmentFailedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(began.exists, seconds=30)
    scorer.close()
    thread.join(30)
    (said,) = raised
    assert said.endswith("the process for the function has been shut down")
    assert scorer._processes.process_ids() == []
    scorer.close()


@pytest.mark.parametrize(
    ("path", "message", "num_workers"),
    [
        ("os.:f", "'os.:f' is not of the form module.Name or module:Name", 0),
        ("os.path:jion", "os.path:jion: posixpath has no 'jion'; did you mean 'join'?", 0),
        ("os.path:sep", "'sep' is str, not a function", 0),
        ("{dir}/nothing.py:f", "there is no file", 0),
        ("{dir}/short.py:ff", "/short.py has no 'ff'; did you mean 'f'?", 0),
        # A process of its own looks for it as this one does, and says what it has found.
        *(
            (path, message, num_workers)
            for path, message in (
                ("no_such_module_here:f", "or name a file (path/to/file.py:function)"),
                ("{dir}/broken.py:f", "cannot be run: ZeroDivisionError"),
                (
                    "{dir}/short.py:f",
                    "cannot be called with data_source, solution_str, ground_truth",
                ),
            )
            for num_workers in (0, 1)
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_once(tmp_path, path, message, num_workers):
    written(tmp_path, "1 / 0", "broken.py")
    written(tmp_path, "def f(answer):\n    return 1", "short.py")
    config = FunctionConfig(path=path.format(dir=tmp_path))
    with pytest.raises(ConfigError, match=r"env\.reward_model\.function") as caught:
        FunctionScorer(config, num_workers=num_workers)
    assert message in str(caught.value)


def test_an_argument_of_ours_cannot_be_given():
    config = FunctionConfig(path="x:f", kwargs={"ground_truth": "5"})
    with pytest.raises(ConfigError, match="'ground_truth' is given by Laurel"):
        FunctionScorer(config, function=lambda **_: 1.0)


@pytest.mark.parametrize("path", ["rewards.py", "module.function", ":f", "m:1f"])
def test_a_path_must_name_a_module_and_a_function(path):
    with pytest.raises(ValueError, match="must be module:function"):
        FunctionConfig(path=path)


def test_a_file_is_run_once(tmp_path):
    path = written(tmp_path, "import time\nat = time.monotonic_ns()\ndef f(): return at\n")
    first = find_function(f"{path}:f", where="here")
    time.sleep(0)
    assert find_function(f"{path}:f", where="here")() == first()


def test_the_example_scores():
    path = Path(__file__).parents[3] / "examples" / "reward_function.py"
    config = FunctionConfig(path=f"{path}:compute_score", kwargs={"length_penalty": 0.25})
    scores = score(FunctionScorer(config), asked("It is 4.", "five"))
    assert [one.value for one in scores] == [0.25, -0.25]
    assert scores[0].parts == {"right": 1.0, "words": 3.0}
    scores = score(FunctionScorer(FunctionConfig(path=f"{path}:brevity")), asked("It is 4.", ""))
    assert 0 < scores[0].value < scores[1].value == 1.0


def test_a_call_that_ends_as_it_is_given_up_has_not_hung():
    may_end = threading.Event()

    def slow(**arguments):
        assert may_end.wait(20)
        return 1.0

    async def check():
        loop = asyncio.get_running_loop()
        scorer = scorer_of(slow)
        calling = asyncio.ensure_future(scorer._in_thread({}, 1))
        await asyncio.sleep(0)
        may_end.set()
        for thread in threading.enumerate():
            if thread.name == "laurel-function":
                thread.join(20)  # its result waits in the loop now, in front of what comes next
        loop.call_soon(calling.cancel)
        with pytest.raises(asyncio.CancelledError):
            await calling
        return scorer._hung

    assert asyncio.run(check()) == 0


GENRM = '''
import asyncio, json, urllib.request

def _post(address, path, body):
    request = urllib.request.Request(
        f"http://{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)

async def compute_score(
    data_source, solution_str, ground_truth, extra_info,
    reward_router_address, reward_model_tokenizer, model_name="judge",
):
    """A rule and a model's word together."""
    messages = [*extra_info["prompt"], {"role": "assistant", "content": solution_str}]
    text = reward_model_tokenizer.apply_chat_template(messages, tokenize=False)
    body = {"model": model_name, "messages": [{"role": "user", "content": text}]}
    path = "/v1/chat/completions"
    reply = await asyncio.to_thread(_post, reward_router_address, path, body)
    said = reply["choices"][0]["message"]["content"]
    return {"score": float(said) + (solution_str == ground_truth), "said": float(said)}
'''


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.slow_parameters("1")
def test_a_function_of_verl_gets_the_address_and_the_tokenizer_that_it_asks_for(
    tmp_path, num_workers
):
    name = tmp_path / "model"
    tokenizer = tiny_tokenizers.chatml()
    tokenizer.save_pretrained(name)
    path = written(tmp_path, GENRM)
    with judge_server(lambda asked: str(len(question(asked)))) as judge:
        config = FunctionConfig(
            path=f"{path}:compute_score", router=f"{judge.url}/", tokenizer=str(name)
        )
        with closing(FunctionScorer(config, num_workers=num_workers)) as scorer:
            scores = score(scorer)
    wanted = []
    for completion in GROUP.completions_G:
        conversation = [*GROUP.prompt, *completion.messages]
        messages = [{"role": one.role, "content": one.content} for one in conversation]
        said = len(tokenizer.apply_chat_template(messages, tokenize=False))
        wanted.append(said + (completion.messages[-1].content == "4"))
    assert [one.value for one in scores] == wanted
    assert scores[0].parts == {"said": wanted[0] - 1}


def test_what_a_function_asks_for_must_be_said_and_what_is_said_be_asked_for():
    def asks(data_source, solution_str, ground_truth, extra_info, reward_router_address):
        return 1.0

    def can_do_without(
        data_source, solution_str, ground_truth, extra_info, reward_router_address=None
    ):
        return float(reward_router_address is None)

    def takes_anything(data_source, solution_str, ground_truth, extra_info, **more):
        return float(more == {"reward_router_address": "host:1"})

    def plain(data_source, solution_str, ground_truth, extra_info):
        return 1.0

    with pytest.raises(ConfigError, match="asks for reward_router_address; set env"):
        scorer_of(asks)
    with pytest.raises(ConfigError, match="router is for a function that takes"):
        scorer_of(plain, router="host:1")
    with pytest.raises(ValueError, match="HOST:PORT"):
        scorer_of(asks, router="host")
    given = {"kwargs": {"reward_router_address": "elsewhere:1"}}
    for function, settings in (
        (asks, given),
        (asks, {"router": "host:1"}),
        (can_do_without, {}),
        (takes_anything, {"router": "host:1"}),
    ):
        assert score(scorer_of(function, **settings))[0].value == 1.0


def test_no_more_calls_at_a_time_than_were_allowed():
    now, most, lock = [0], [0], threading.Lock()

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return 1.0

    score(scorer_of(compute_score, max_concurrent=1), GROUP, replace(GROUP, id="h"))
    assert most == [1]
