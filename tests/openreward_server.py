"""A server of the Open Reward Standard with an environment of these tests: `... PORT LOG [MOST]`.

A sum is to be found with a tool that adds, and submitted; `boom` raises. The log has a line for
each session that begins or ends, and for each prompt that is read. With `MOST` it has no more
sessions at a time, and first answers the statuses in `LOST` to those that read its prompts. The
client itself asks three times after a 429.
"""

import random
import sys
from pathlib import Path

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from openreward.environments import (
    Environment,
    ListToolsOutput,
    Server,
    TextBlock,
    ToolOutput,
    ToolSpec,
    terminal,
    tool,
)
from pydantic import BaseModel, Field

PORT, LOG = int(sys.argv[1]), Path(sys.argv[2])
MOST = int(sys.argv[3]) if len(sys.argv) > 3 else None
LOST = {} if MOST is None else {12: [410], 4: [429] * 3}


class Two(BaseModel):
    a: int
    b: int


class Answer(BaseModel):
    answer: int


def _write(line: str) -> None:
    with LOG.open("a") as file:
        file.write(f"{line}\n")


def _text(text: str) -> list[TextBlock]:
    return [TextBlock(text=text)]


class Sums(Environment):
    @classmethod
    def list_splits(cls):
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split):
        return [{"a": n, "b": n + 1} for n in range(14 if split == "train" else 2)]

    def setup(self):
        _write("begin")

    def teardown(self):
        _write("end")

    def get_prompt(self):
        _write(f"read {self.task_spec['a']}")
        if statuses := LOST.get(self.task_spec["a"]):
            raise HTTPException(statuses.pop(), "the line is dead", {"Retry-After": "0"})
        return _text(f"What is {self.task_spec['a']} + {self.task_spec['b']}?")

    @tool
    async def add(self, two: Two) -> ToolOutput:
        """Add two numbers."""
        return ToolOutput(blocks=_text(str(two.a + two.b)), reward=0.25)

    @tool
    async def submit(self, answer: Answer) -> ToolOutput:
        """Submit the answer."""
        right = answer.answer == self.task_spec["a"] + self.task_spec["b"]
        return ToolOutput(blocks=_text("done"), reward=float(right), finished=True)

    @tool
    async def boom(self, answer: Answer) -> ToolOutput:
        """Break."""
        raise ArithmeticError("the abacus broke")


class Own(Sums):
    """Its second task has a tool more than the others."""

    def list_task_tools(self):
        more = ToolSpec(name="more", description="", input_schema=None)
        return ListToolsOutput(tools=[more] if self.task_spec["a"] == 1 else [])


class Guesses(Environment):
    """A number is to be guessed, as in `openenv_server`."""

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{"seed": n} for n in range(40)]

    def setup(self):
        _write("begin")

    def teardown(self):
        _write("end")

    def get_prompt(self):
        return _text(f"Guess a number from 1 to 9, game {self.task_spec['seed']}.")

    @tool
    async def submit(self, answer: Answer) -> ToolOutput:
        """Guess."""
        number = random.Random(self.task_spec["seed"]).randint(1, 9)
        right = answer.answer == number
        hint = "right" if right else "higher" if answer.answer < number else "lower"
        return ToolOutput(blocks=_text(hint), reward=1.0 if right else -0.1, finished=right)


class Word(BaseModel):
    word: str = Field(max_length=3)


class Words(Environment):
    """One plain message is the answer."""

    @classmethod
    def list_splits(cls):
        return ["train"]

    @classmethod
    def list_tasks(cls, split):
        return [{}]

    def get_prompt(self):
        return _text("Say yes.")

    @terminal
    @tool
    async def grade(self, word: Word) -> ToolOutput:
        """Grade the answer."""
        return ToolOutput(blocks=[], reward=float(word.word == "yes"), finished=True)


def limit_sessions(app):
    """Answer 429 where a session more than `MOST` is asked for."""
    held = set()

    @app.middleware("http")
    async def limit(request, call_next):
        session, path = request.headers.get("x-session-id"), request.url.path
        if path == "/create" and len(held | {session}) > MOST:
            return JSONResponse({"detail": "no room"}, 429, {"Retry-After": "0"})
        if path == "/create":
            held.add(session)
        answer = await call_next(request)
        if path == "/delete":
            held.discard(session)
        return answer


if __name__ == "__main__":
    server = Server([Sums, Words, Own, Guesses])
    if MOST is not None:
        limit_sessions(server.app)
    server.run(host="127.0.0.1", port=PORT)
