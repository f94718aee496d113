"""A server of OpenEnv with an environment of these tests: `python openenv_server.py PORT LOG`.

A number from 1 to 9 is to be guessed in three tries: 1 for the right one, -0.1 for a wrong one.
The log has a line for each session that begins or ends. What is said besides a number breaks it:
`raise`, `sleep`.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import field_validator

PORT, LOG = int(sys.argv[1]), Path(sys.argv[2])
MOST = int(sys.argv[3]) if len(sys.argv) > 3 else 64
DRIFTS = "--drift" in sys.argv


class Guess(Action):
    guess: int | Literal["raise", "sleep"]

    @field_validator("guess")
    @classmethod
    def _is_lucky(cls, guess: int | str) -> int | str:
        if guess == 13:
            raise ValueError("13 is no number")
        return guess


class Hint(Observation):
    hint: str
    tries: int = 0


class GuessEnvironment(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.tries = 0, 0
        self._write("begin")

    def _write(self, line: str) -> None:
        with LOG.open("a") as file:
            file.write(f"{line}\n")

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number, self.tries = random.Random(seed).randint(1, 9), 0
        said = f"Guess a number from 1 to 9, game {seed}."
        return Hint(hint=said + (f" {time.time()}" if DRIFTS else ""))

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.guess == "raise":
            raise ArithmeticError("the dice fell off the table")
        if action.guess == "sleep":
            time.sleep(4)
        self.tries += 1
        right = action.guess == self.number
        return Hint(
            hint="right" if right else "higher" if int(action.guess) < self.number else "lower",
            tries=self.tries,
            reward=1.0 if right else -0.1,
            done=right or self.tries == 3,
        )

    @property
    def state(self) -> State:
        return State(step_count=self.tries)

    def close(self) -> None:
        self._write("end")


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=MOST)
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
