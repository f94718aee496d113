"""What becomes of the errors of coroutines in a loop of another thread."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from laurel.workers.threads import BackgroundLoop


@pytest.fixture
def background():
    loop = BackgroundLoop("test-background")
    yield loop
    loop.close(asyncio.sleep(0))


def test_an_error_of_what_was_cancelled_is_nobodys(background, caplog):
    begun = threading.Event()

    async def fail_when_cancelled():
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError from None

    future = background.submit(fail_when_cancelled())
    assert begun.wait(60)
    assert future.cancel()
    for _ in range(3):  # the coroutine has ended
        background.wait_for(asyncio.sleep(0))
    del future  # and with it its task
    gc.collect()
    assert not caplog.records


def test_other_errors_that_nobody_asks_for_are_printed(background, caplog):
    async def fail():
        raise ValueError

    async def begin():
        asyncio.create_task(fail())  # noqa: RUF006 (it is forgotten on purpose)

    background.wait_for(begin())
    for _ in range(3):
        background.wait_for(asyncio.sleep(0))
    gc.collect()
    assert ["never retrieved" in record.message for record in caplog.records] == [True]
