"""A vLLM engine in processes of its own, and the thread from which this process talks to it.

Written against vLLM 0.32, whose engine core is watched by vLLM itself: the engine is `errored` from
the moment that a process of it is gone. An engine cannot be started again within its process, so
there is no restart here: the `Supervisor` of the replicas starts a process with another engine.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import itertools
import multiprocessing
import os
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, TypeVar

from laurel import plugins
from laurel.errors import EngineError, LaurelError
from laurel.extensions.vllm.settings import (
    ENVIRONMENT,
    cpu_environment,
    environment,
)
from laurel.workers.threads import BackgroundLoop

Result = TypeVar("Result")
WATCH_SECONDS = 0.2
"""Seconds between two checks of whether vLLM is alive."""
SEGMENTS = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
"""Path prefixes of vLLM's shared-memory files: of its queues, and of its all-reduce on a CPU."""
DIED = "vLLM died; what it wrote is above. Without a word: most likely out of memory (see dmesg)"


class Lifeline:
    """The record of whether an engine is alive, for the tasks of one event loop.

    When the engine fails, the tasks that wait for it end with its error.
    """

    def __init__(self) -> None:
        self.failure: LaurelError | None = None
        """The first error that made the engine unusable; None while it works."""
        self._is_cut = asyncio.Event()

    def cut(self, failure: LaurelError) -> None:
        """Record a failure and wake the waiting tasks with it; later failures are ignored."""
        self.failure = self.failure or failure
        self._is_cut.set()

    async def hold(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await a coroutine that uses the engine, unless the engine fails first.

        Raises:
            LaurelError: The engine's failure (`cut`), which came before the result.
        """
        doing = asyncio.ensure_future(work)
        cut = asyncio.ensure_future(self._is_cut.wait())
        try:
            await asyncio.wait({doing, cut}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            assert self.failure is not None
            raise self.failure
        finally:
            doing.cancel()
            cut.cancel()


class VllmProcesses:
    """The life of an engine of vLLM: start, liveness, errors and end.

    What waits for an engine that dies or is closed gets an `EngineError`.
    """

    def __init__(self, purpose: str) -> None:
        """Import vLLM; `_start` starts it.

        Raises:
            MissingDependencyError: vLLM is not installed.
        """
        with environment(ENVIRONMENT):
            self._vllm = import_vllm(purpose)
            self._on_cpu = bool(self._vllm.current_platform.is_cpu())
        self._num_requests = itertools.count()
        self._life = Lifeline()
        self._llm: Any = None
        self._processes: list[Any] = []
        self._segments: set[str] = set()

    def _start(self, name: str, model: str, arguments: Callable[[], dict[str, Any]]) -> None:
        """Start vLLM and prepare it, or leave nothing of it behind.

        Raises:
            EngineError: vLLM does not start; the message has the reason that vLLM gives.
        """
        self._background = BackgroundLoop(name)
        atexit.register(self.close)
        try:
            self._background.wait_for(self._begin(arguments()))
        except BaseException as error:
            self.close()
            if isinstance(error, LaurelError) or not isinstance(error, Exception):
                raise
            raise EngineError(
                f"vLLM did not start {model}: {error}. What it wrote itself is above; "
                "VLLM_LOGGING_LEVEL=INFO makes it say more"
            ) from error

    async def _begin(self, arguments: dict[str, Any]) -> None:
        stages = arguments.get("pipeline_parallel_size", 1)
        num_workers = arguments["tensor_parallel_size"] * stages
        self._has_sleep_mode = bool(arguments["enable_sleep_mode"])
        added = cpu_environment(num_workers, is_eager=arguments["enforce_eager"])
        with environment(ENVIRONMENT | (added if self._on_cpu else {})):
            settings = self._vllm.AsyncEngineArgs(**arguments)
            self._llm = self._vllm.AsyncLLM.from_engine_args(settings)
        yield_between_answers(self._llm)
        self._watcher = asyncio.create_task(self._watch())
        self._processes = processes_of(self._llm)
        self._segments = segments_of(self._processes)
        await self._ask("laurel_end_with", os.getpid())
        await self._prepare()

    async def _prepare(self) -> None:
        """Do what comes before the first request."""

    async def _watch(self) -> None:
        while not self._llm.errored:
            await asyncio.sleep(WATCH_SECONDS)
        self._fail(EngineError(DIED))

    def _fail(self, failure: LaurelError) -> None:
        """Fail permanently; the first failure wins."""
        self._life.cut(failure)

    def close(self) -> None:
        """Stop vLLM and all its processes; what waits gets an `EngineError`. Idempotent."""
        atexit.unregister(self.close)
        if not self._background.close(self._end()):
            return
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(Exception):
                llm.shutdown()
                llm.engine_core.resources.ctx.term()  # its sockets are closed by now
        end_processes(self._processes)  # those that still run: their parent died before them
        remove(self._segments)  # vLLM 0.32 leaves some of them behind

    async def _end(self) -> None:
        self._fail(EngineError("the engine was closed"))
        await asyncio.sleep(0)  # waiting tasks get the error first

    async def _ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker."""
        answer = self._llm.collective_rpc(method, args=arguments)
        return list(await self._life.hold(answer))

    async def _answer(
        self,
        ask: Callable[[Any, Any, str], AsyncIterator[Any]],
        ids: Sequence[int],
        parameters: Any,
    ) -> Any:
        """Ask vLLM about one prompt, and return the last of its answers."""
        if self._life.failure is not None:
            raise self._life.failure
        prompt = self._vllm.tokens_input(list(ids))
        name = f"laurel-{next(self._num_requests)}"

        async def last() -> Any:
            return [output async for output in ask(prompt, parameters, name)][-1]

        return await self._life.hold(last())

    async def _set_memory(self, *, is_given_back: bool) -> None:
        """Release device memory and keep the weights on the host, or allocate it again."""
        if self._has_sleep_mode and is_given_back != await self._llm.is_sleeping():
            change = self._llm.sleep(level=1) if is_given_back else self._llm.wake_up()
            await self._life.hold(change)

    def _as_error(self, error: BaseException) -> LaurelError:
        if isinstance(error, LaurelError):
            return error
        if self._llm is None or self._llm.errored:
            self._fail(EngineError(DIED))
            return self._life.failure or EngineError(DIED)
        failed = EngineError(f"vLLM failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        return failed


def import_vllm(purpose: str) -> SimpleNamespace:
    """Import what Laurel uses of vLLM; without import warnings.

    Raises:
        MissingDependencyError: vLLM is not installed.
    """
    plugins.find(plugins.Engine, "vllm").check_installed(purpose)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.config import PoolerConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.platforms import current_platform
        from vllm.pooling_params import PoolingParams
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM
    return SimpleNamespace(
        AsyncEngineArgs=AsyncEngineArgs,
        AsyncLLM=AsyncLLM,
        FINAL_ONLY=RequestOutputKind.FINAL_ONLY,
        PoolerConfig=PoolerConfig,
        PoolingParams=PoolingParams,
        SamplingParams=SamplingParams,
        VLLMClientError=VLLMClientError,
        current_platform=current_platform,
        tokens_input=tokens_input,
    )


def yield_between_answers(llm: Any) -> None:
    """Let the other tasks of the loop run between two answers of the engine.

    vLLM's client takes answers without a pause as long as some are ready. An engine of a small
    model gives them faster than that, and whatever else happens in the loop, such as an abort, new
    weights or the end, would wait until everything is generated.
    """
    socket = llm.engine_core.resources.output_socket
    receive = socket.recv_multipart

    async def receive_in_turn(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return await receive(*arguments, **options)

    socket.recv_multipart = receive_in_turn


def end_processes(processes: Iterable[Any]) -> None:
    """Kill processes of psutil that still run, and wait for their end."""
    children = {child.pid: child for child in multiprocessing.active_children()}
    for process in processes:
        with suppress(Exception):
            process.kill()
            # psutil would take away the exit status of a child of multiprocessing, for which it
            # would run for ever.
            child = children.get(process.pid)
            process.wait(5) if child is None else child.join(5)


def processes_of(llm: Any) -> list[Any]:
    """Return all processes of a vLLM engine, with their descendants, as psutil's processes."""
    psutil: Any = importlib.import_module("psutil")  # vLLM needs it too
    started = [psutil.Process(p.pid) for p in llm.engine_core.resources.engine_manager.processes]
    return started + [child for process in started for child in process.children(recursive=True)]


def segments_of(processes: Iterable[Any]) -> set[str]:
    """Return the paths of vLLM's shared-memory files that these processes map now."""
    paths: set[str] = set()
    for process in processes:
        with suppress(Exception):  # it has ended
            paths.update(mapping.path for mapping in process.memory_maps())
    return {path for path in paths if path.startswith(SEGMENTS)}


def remove(segments: Iterable[str]) -> None:
    """Unlink those shared-memory files that still exist.

    The system frees their memory when no process maps them any more.
    """
    for path in segments:
        with suppress(OSError):
            os.unlink(path)
