"""The process of a `SpawnedGroup`: does what is asked, one after the other, until nobody asks."""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any


def serve(asked: Connection) -> None:
    """Answer every call with its number; end with whoever asks."""
    from laurel.distributed.seat import Seat

    with suppress(EOFError, OSError):
        seat = Seat(0, asked.recv())
        while True:
            number, method, arguments = asked.recv()
            if method == "run":  # its shared values come as they were made ready
                arguments = (arguments[0], *map(pickle.loads, arguments[1:]))
            answer: Any = getattr(seat, method)(*arguments)
            asked.send((number, answer))
            if method == "close":
                return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
