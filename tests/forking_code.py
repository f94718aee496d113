"""A user's functions, tools and environments that fork, and processes that come back from a call.

A right answer is "4 exit"; the word after the answer says how the forked process ends.
"""

import asyncio
import os
import sys

from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    batch_metrics,
    response_of,
)

ENDS = ("raise", "exit", "return", "leave")
ANSWERS = [f"{answer} {end}" for end in ENDS for answer in ("4", "five")]


def expected(answer: str) -> float:
    """The score of an answer: of what returns or raises, nothing has said that it is right."""
    answer, end = answer.split()
    return float(answer == "4" and end in ("exit", "leave"))


def check(answer: str) -> float:
    """Ask a forked process whether an answer is right; its exit code says it."""
    said, end = answer.split()
    pid = os.fork()
    if pid == 0:
        is_right = said == "4"
        if end == "return":
            return 1.0
        if end == "raise":
            raise ValueError("in the forked process")
        if end == "exit":
            sys.exit(0 if is_right else "wrong")
        os._exit(0 if is_right else 1)
    return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0)


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return check(solution_str)


def prepare(settings):
    """Make the function of a pool."""
    return lambda: check


async def awaited_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    value = check(solution_str)
    await asyncio.sleep(0)
    return value


def group_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [check(solution) for solution in solution_strs]


class LateNumber:
    """A number that forks when it is read."""

    shape = ()

    def __init__(self, value):
        self.value = value

    def item(self):
        if os.fork() == 0:
            return 1.0
        return self.value


def late_score(data_source, solution_str, ground_truth, extra_info):
    return LateNumber(0.25)


async def awaited_late_score(data_source, solution_str, ground_truth, extra_info):
    return LateNumber(0.25)


def tool(answer: str) -> float:
    """Check an answer.

    Args:
        answer: The answer.
    """
    return check(answer)


async def awaited_tool(answer: str) -> float:
    """Check an answer.

    Args:
        answer: The answer.
    """
    return await awaited_score("", answer, "", None)


class Checked(EnvironmentInterface):
    """Scores with a forked process for each conversation."""

    def step(self, message_log_batch, metadata):
        import torch  # not needed by the processes of functions and tools

        size = len(message_log_batch)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * size,
            metadata=list(metadata),
            next_stop_strings=[None] * size,
            rewards=torch.tensor([check(response_of(log)) for log in message_log_batch]),
            terminateds=torch.ones(size, dtype=torch.bool),
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {**batch_metrics(batch), "checked": check("4 exit")}


class Worker:
    """A worker of a group."""

    def __init__(self, place):
        self.place = place

    def check(self, answer):
        return check(answer)
