"""Calls that block, in threads that hold nothing and end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from laurel.grpo.grading import PatientThreads

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
