"""A taskset whose user is a program: it says whether a guess is too low or too high."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward(weight=0.5)
    async def found(self, trace: vf.Trace) -> float:
        if "explode" in trace.last_reply:
            raise KeyError("no such thing")
        if "exit" in trace.last_reply:
            raise SystemExit(3)
        return float(str(self.data.number) in trace.last_reply)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    opening: str = "Guess my number."


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        if self.config.opening == "none":
            raise LookupError("nobody is there")
        opening = None if task.data.prompt else self.config.opening
        async with agents.player.interaction(task) as chat:
            said = await chat.turn(opening)
            while not said.terminated and str(task.data.number) not in said.last_reply:
                if said.last_reply == "insult":
                    raise LookupError("the user has left")
                guess = next((int(w) for w in said.last_reply.split() if w.isdigit()), None)
                if guess is None:
                    hint = "A number, please."
                else:
                    hint = "Higher." if guess < task.data.number else "Lower."
                said = await chat.turn(hint)
        if "again" in said.last_reply:
            await agents.player.run(task)


class GuessConfig(vf.TasksetConfig):
    num_tasks: int = 4
    user_opens: bool = True


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        return [
            GuessTask(
                GuessData(
                    prompt=None if self.config.user_opens else f"Guess number {number}.",
                    system_prompt="Play.",
                    number=number,
                ),
                self.config.task,
            )
            for number in range(self.config.num_tasks)
        ]


__all__ = ["GuessEnv", "GuessTaskset"]
