"""A taskset with a tool, which a server adds for each task or one for all."""

import verifiers.v1 as vf


class AdderState(vf.State):
    calls: int = 0


class Adder(vf.Toolset[vf.ToolsetConfig, AdderState]):
    TOOL_PREFIX = "adder"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.calls += 1
        return str(a + b)


class AdderData(vf.TaskData):
    answer: str


class AdderTaskConfig(vf.TaskConfig):
    served: bool = False


class AdderTask(vf.Task[AdderData, AdderState, AdderTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if config.served else []

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def sums(self, trace: vf.Trace) -> float:
        return float(trace.state.calls)


class AdderConfig(vf.TasksetConfig):
    task: AdderTaskConfig = AdderTaskConfig()
    num_tasks: int = 4


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    @classmethod
    def toolsets(cls, config):
        return [] if config.task.served else [Adder(vf.ToolsetConfig())]

    def load(self):
        return [
            AdderTask(AdderData(prompt=f"{i} + {i}?", answer=str(2 * i)), self.config.task)
            for i in range(self.config.num_tasks)
        ]


__all__ = ["AdderTaskset"]

if __name__ == "__main__":
    Adder.run()
