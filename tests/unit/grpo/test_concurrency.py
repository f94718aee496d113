"""Calls that block, in threads that hold nothing and end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from laurel.grpo.judging import GivenUpError, PatientThreads

NAME = "patient-test"


class Result:
    """Something that can be seen to go."""


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.mark.slow
def test_a_thread_holds_nothing_of_what_it_called_and_ends_with_close() -> None:
    """What it let go of while Python ends would abort the process, where it is a tensor."""
    threads = PatientThreads(2, name=NAME)

    async def call_both() -> list[weakref.ref[Result]]:
        slots = asyncio.Semaphore(2)
        calls = [threads.call(slots, Result, timeout=60) for _ in range(2)]
        return [weakref.ref(result) for result in await asyncio.gather(*calls)]

    results = asyncio.run(call_both())
    assert len(alive()) == 2
    threads.close()
    assert alive() == []
    gc.collect()
    assert [result() for result in results] == [None, None]


def test_a_call_that_is_given_up_keeps_its_thread_and_nobody_waits_for_it() -> None:
    threads = PatientThreads(1, name=NAME)
    comes_back = threading.Event()

    async def give_up() -> None:
        slots = asyncio.Semaphore(1)
        with pytest.raises(GivenUpError, match="nothing within"):
            await threads.call(slots, comes_back.wait, timeout=0.01)
        assert await threads.call(slots, str, 1, timeout=60) == "1"

    asyncio.run(give_up())
    threads.close()
    (stuck,) = alive()
    comes_back.set()
    stuck.join()
