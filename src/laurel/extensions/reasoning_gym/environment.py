"""Adapts reasoning-gym: its generators make tasks without end, and its scorers grade the answers.

Row `n` is a pure function of `n`, the seed and the settings of the generators. Which prompts belong
to validation is decided by a hash of the question, so training never sees one of them.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import math
import os
import random
import re
import site
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from laurel.config.data import GeneratorConfig, TaskSetConfig
from laurel.config.yaml_tree import nearest
from laurel.data.tasks import MadeRows
from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    Memory,
    accuracy_metrics,
    mean_of,
    numbers,
    response_of,
    settings_of,
)
from laurel.errors import ConfigError, LaurelError, MissingDependencyError
from laurel.extensions.reasoning_gym.settings import ReasoningGymEnvironmentConfig
from laurel.observe.user_code import error_with_line
from laurel.protocols import MessageLog
from laurel.sandbox.inside import confinement, kernel, seccomp
from laurel.sandbox.limits import available_cores
from laurel.workers.process_pool import ProcessDiedError, ProcessPool, ProcessPoolSpec

CHUNK = 256
"""Rows that one data set of theirs makes; the seed of each chunk is derived from its number."""
VALIDATION_SHARE = 0.05
"""The share of all possible prompts that belong to validation, if `split_validation_size` is 0."""
ORDERED_BY_HASH = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note"}
)
"""The generators of 0.1.25 whose rows follow the order of a set, which differs in each process
unless PYTHONHASHSEED is set."""
SECONDS_OF_AN_ANSWER = 3.0
"""The longest that a scorer may work on an answer which it evaluates: scorers need a tenth of a
second for a known answer, and a batch of answers that never end must fit in `env.timeout_seconds`.
"""
MEMORY_OF_AN_ANSWER = 4 << 30
LONGEST_FAILURE = 1000  # characters
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
_KEY = "reasoning_gym"
# The generators of `random` and numpy belong to the whole process.
_SEEDING = threading.Lock()


def gym() -> Any:
    """Import the package.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise MissingDependencyError.of(
            "reasoning-gym", extra="reasoning-gym", purpose="dataset_name=reasoning_gym"
        ) from None


class Generators:
    """Their data sets by name and settings; a few are kept, since making one may read files."""

    def __init__(self) -> None:
        self._made: Memory[Any] = Memory(64)

    @contextmanager
    def using(self, name: str, config: Mapping[str, Any], seed: int) -> Iterator[Any]:
        """Return a data set of theirs while no other thread uses one.

        Some sample from the generators of `random` and numpy, which are seeded here and restored.

        Raises:
            ConfigError: There is no such generator, or it does not take these settings.
        """
        key = json.dumps([name, config, seed], sort_keys=True, default=repr).encode()
        with _SEEDING, _seeded(seed):
            made = self._made.get(key)
            if made is None:
                made = _create(name, {**config, "seed": seed, "size": CHUNK})
                self._made.put(key, made)
            yield made


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    before, before_numpy = random.getstate(), np.random.get_state()
    try:
        _seed_all(seed)
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _create(name: str, settings: Mapping[str, Any]) -> Any:
    where = f"data.tasks.{name}"
    package = gym()
    names = [
        generator for generator in sorted(package.factory.DATASETS) if generator != "composite"
    ]
    if name not in names:
        near = nearest(name, names)
        raise ConfigError(
            f"{where}: reasoning_gym has no such generator"
            + (f"; did you mean '{near}'?" if near else "")
            + f" It has {len(names)}: {', '.join(names)}"
        )
    if name in ORDERED_BY_HASH and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"{where}: its rows follow the order of a set of Python's, which differs each time; "
            "start the command with PYTHONHASHSEED=0, so that a resumed run reads the same rows"
        )
    try:
        return package.create_dataset(name, **settings)
    except Exception as error:  # its own checks, asserts among them
        raise ConfigError(
            f"{where}.config: reasoning_gym does not take it: {error_with_line(error)}"
        ) from error


def made_rows(set_config: TaskSetConfig, config: ReasoningGymEnvironmentConfig) -> MadeRows:
    """Return the rows of the generators that `data.tasks` names.

    Raises:
        ConfigError: No generator is named, or one cannot be made.
        MissingDependencyError: The package is not installed.
    """
    if set_config.data_path is not None or set_config.subset is not None:
        raise ConfigError("dataset_name=reasoning_gym makes its rows: leave out path and subset")
    if not set_config.tasks:
        raise ConfigError(
            "dataset_name=reasoning_gym: which generators? data.tasks names them with their "
            "weights, such as {chain_sum: 0.5, leg_counting: 0.5}"
        )
    if set_config.split not in (None, "train", "validation"):
        raise ConfigError(f"split={set_config.split}: reasoning_gym has train and validation")
    configs = {
        name: value if isinstance(value, GeneratorConfig) else GeneratorConfig(weight=value)
        for name, value in set_config.tasks.items()
    }
    system = _system_prompt(config)
    share = set_config.split_validation_size or VALIDATION_SHARE
    generators, is_validation = Generators(), set_config.split == "validation"
    for name, generator in configs.items():
        with generators.using(name, generator.config, 0):
            pass

    def make(index: int, attempt: int) -> dict[str, Any] | None:
        side = "validation" if is_validation else "train"
        chunk, offset = divmod(index, CHUNK)
        mixed = random.Random(_number(set_config.seed, side, "mixture", index))
        name = mixed.choices(list(configs), [each.weight for each in configs.values()])[0]
        settings = configs[name].config
        seed = _number(set_config.seed, side, name, chunk, attempt)
        with generators.using(name, settings, seed) as dataset:
            _seed_all(seed + offset)
            entry = dataset[offset]
        question = str(entry["question"])
        # Two sets of one run may differ in their settings, and must agree on the sides.
        sampled = _number(set_config.seed, question) / 2**31
        if (sampled < share) != is_validation:
            return None
        messages = [{"role": "user", "content": question}]
        return {
            "prompt": [{"role": "system", "content": system}, *messages] if system else messages,
            "answer": None if entry["answer"] is None else str(entry["answer"]),
            "metadata": {_KEY: {"task": name, "config": settings, "seed": seed, "entry": entry}},
        }

    return MadeRows(origin=f"reasoning_gym: {', '.join(configs)}", make=make)


def _number(*parts: Any) -> int:
    """Return a number below 2**31 that depends on all parts."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**31


def _system_prompt(config: ReasoningGymEnvironmentConfig) -> str | None:
    if config.system_prompt is None:
        return None
    gym()
    prompts = importlib.import_module("reasoning_gym.utils").SYSTEM_PROMPTS
    if config.system_prompt not in prompts:
        raise ConfigError(
            f"env.reasoning_gym.system_prompt={config.system_prompt} is none of "
            f"{', '.join(prompts)}; a text of your own goes into data.system_prompt_file"
        )
    return str(prompts[config.system_prompt])


@cache
def evaluates_answers(name: str) -> bool:
    """Report whether the scorer of a generator may run an answer as a program.

    Some pass it to `eval`, or to a parser of sympy, which does.
    """
    kind = gym().factory.DATASETS[name][0]
    try:
        return _EVALUATES.search(inspect.getsource(inspect.getmodule(kind) or kind)) is not None
    except OSError:  # without its source nobody knows
        return True


def score_of(generators: Generators, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return `score`, or `failure` with the line of the scorer's error.

    If the scorer raises at an answer and scores the known one, the answer is to blame: its score is
    0, and `broke` says why. Were it a failure, the policy could choose to have no reward.
    """
    name = item["task"]

    def score(answer: Any) -> float:
        with generators.using(name, item["config"], item["seed"]) as dataset:
            value = float(dataset.score_answer(answer, item["entry"]))
        if not math.isfinite(value):
            raise ValueError(f"the score is {value}")
        return value

    try:
        return {"score": score(item["answer"])}
    except (MemoryError, RecursionError):  # an answer's doing: most scorers do not evaluate it
        return {"score": 0.0, "broke": "crashes"}
    except Exception as error:  # a scorer's own code: anything can come out of it
        failure = f"error: reasoning_gym's {name}: {error_with_line(error)}"
    try:
        score(item["entry"]["answer"])
    except Exception:
        return {"failure": failure}
    return {"score": 0.0, "broke": "unreadable"}


def prepare_scoring(settings: None) -> Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Prepare a process for answers that scorers evaluate, as `ProcessPoolSpec.prepare` requires.

    Each process reads nothing but Python's own files, writes none, and starts none and connects to
    none. Without that (other systems than Linux, kernels before 5.13) it evaluates nothing.
    """
    logging.disable(logging.CRITICAL)
    # Not `sys.path`, which may begin with the home directory.
    packages = [*importlib.import_module("laurel").__path__, *gym().__path__]
    readable = {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        site.getusersitepackages(),
        *packages,
    }

    def confined() -> Callable[[dict[str, Any]], dict[str, Any]]:
        generators = Generators()
        try:
            kernel.renounce_privileges()
            kernel.drop_capabilities()
            confinement.restrict((*sorted(readable), "/usr/lib", "/lib"), confinement.DEVICES, ())
            seccomp.install(os.getpid(), without=seccomp.ON_FOREIGN_FILES)
        except OSError as error:
            refusal = (
                "error: this scorer evaluates answers as programs, and this machine cannot confine "
                f"them ({error}). Leave its generator out of data.tasks, or run on Linux 5.13 or "
                "newer"
            )
            return lambda item: {"failure": refusal}
        return lambda item: score_of(generators, item)

    return confined


def _reply(future: Future[Any]) -> dict[str, Any]:
    # What a process found, which an answer can write: `failure` is a short text, `score` is valid.
    try:
        reply = future.result()
        if "failure" in reply:
            return {"failure": str(reply["failure"])[:LONGEST_FAILURE]}
        if 0 <= reply["score"] <= 1:  # scores of scorers are
            return dict(reply)
    except LaurelError:  # no process can be started
        raise
    # The answer took too long, ended its process twice, or wrote no reply of ours. Were it a
    # failure, which teaches nothing, the policy could choose to have no reward.
    except TimeoutError:
        return {"score": 0.0, "broke": "timeouts"}
    except (ProcessDiedError, LookupError, TypeError, ValueError):
        pass
    return {"score": 0.0, "broke": "crashes"}


class ReasoningGymEnvironment(EnvironmentInterface):
    """Gives the score of the generator that made the task, under the name of that generator."""

    spec = EnvironmentSpec(judges="completion", components=())

    def __init__(self, env_config: ReasoningGymEnvironmentConfig | Mapping[str, Any]) -> None:
        """Read the settings, and import the package.

        Raises:
            ConfigError: Settings are unknown or invalid.
            MissingDependencyError: The package is not installed.
        """
        self.config = settings_of(
            ReasoningGymEnvironmentConfig, env_config, where="env.reasoning_gym"
        )
        gym()
        self._generators = Generators()
        self._pool = ProcessPool(
            ProcessPoolSpec(
                name="the scorers of reasoning_gym",
                prepare="laurel.extensions.reasoning_gym.environment:prepare_scoring",
                num_workers=available_cores(),
                timeout_seconds=SECONDS_OF_AN_ANSWER,
                attempts=2,  # another process may have killed it
                items_of_a_life=1,  # an answer can change how its process scores the next one
                memory_limit=MEMORY_OF_AN_ANSWER,
                environment={key: os.environ[key] for key in _KEPT_VARIABLES if key in os.environ},
            )
        )

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Score one answer to each task; an error of a scorer is a failure with its line."""
        import torch  # not needed by the processes that evaluate answers

        answers = [self._answer_of(response_of(log)) for log in message_log_batch]
        tasks = [(entry or {}).get(_KEY) for entry in metadata]
        names = sorted({task["task"] for task in tasks if task is not None}) or [_KEY]
        rewards = {name: torch.zeros(len(tasks)) for name in names}
        failures: list[str | None] = [None] * len(tasks)
        broke: list[str | None] = [None] * len(tasks)
        pending: dict[int, tuple[Any, Future[Any]]] = {}
        scored: dict[int, dict[str, Any]] = {}
        failed: list[tuple[int, Any]] = []
        generator_of: dict[int, str] = {}
        for i, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if task is None:
                failures[i] = "error: the task was not made by reasoning_gym, which would score it"
                continue
            generator_of[i], item = task["task"], {**task, "answer": answer}
            if answer is not None and evaluates_answers(task["task"]):
                pending[i] = task, self._pool.submit(item)
            else:
                scored[i] = score_of(self._generators, item)
        for i, (task, future) in pending.items():
            scored[i] = _reply(future)
            if "failure" in scored[i]:
                failed.append((i, task))
        # An answer can write its process's reply, and change how that scores the known one: whether
        # the scorer fails is for a process to say that never saw the answer.
        checks = [
            (i, self._pool.submit({**task, "answer": task["entry"]["answer"]}))
            for i, task in failed
        ]
        for i, future in checks:
            reply = _reply(future)
            if "failure" in reply:
                scored[i] = reply
            elif "broke" not in reply:  # if it did break, the scorer fails at the known answer too
                scored[i] = {"score": 0.0, "broke": "unreadable"}
        for i, reply in scored.items():
            failures[i], broke[i] = reply.get("failure"), reply.get("broke")
            rewards[generator_of[i]][i] = reply.get("score", 0.0)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in tasks],
            metadata=list(metadata),
            next_stop_strings=[None] * len(tasks),
            rewards=rewards,
            terminateds=torch.ones(len(tasks), dtype=torch.bool),
            answers=answers,
            failures=failures,
            notes=[
                [None if task is None else task["task"], answer is not None, how]
                for task, answer, how in zip(tasks, answers, broke, strict=True)
            ],
        )

    def _answer_of(self, response: str) -> str | None:
        if self.config.answer_tag is None:
            return response.strip()
        extract = importlib.import_module("reasoning_gym.utils").extract_answer
        answer: str | None = extract(response, tag_name=self.config.answer_tag)
        return answer

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute `accuracy`, `pass@...`, the mean score of each generator, and counts.

        `without_answer` counts answers without the tag. `timeouts` and `crashes` count answers
        that took too long to evaluate, or ended the process that did; `unreadable` counts those at
        which the scorer raised, or was made to say so, though it scores the known answer. Their
        score is 0.
        """
        figures, _ = accuracy_metrics(batch)
        # Behind tools, a rollout may end before it is scored: then it has no note.
        noted = [
            (reward, note)
            for reward, note in zip(
                numbers(batch["rewards"]), batch.get("notes") or [], strict=False
            )
            if note is not None
        ]
        by_name: dict[str, list[float]] = {}
        for reward, (name, *_) in noted:
            by_name.setdefault(name, []).append(reward)
        for name, scores in sorted(by_name.items()):
            figures |= mean_of(f"score/{name}", scores)
        figures["without_answer"] = float(sum(not answered for _, (_, answered, _) in noted))
        for how in ("timeouts", "crashes", "unreadable"):
            figures[how] = float(sum(outcome == how for _, (*_, outcome) in noted))
        return batch, figures

    def shutdown(self) -> None:
        """End the processes that evaluate answers."""
        self._pool.close()
