"""The process of one replica: a reward server on a free port of loopback that its parent watches.

Its parent writes one line of JSON to its standard input and keeps that open: when it closes, the
parent has died, and so does the replica. What it has to say goes to its standard output, a line of
JSON each: `{"say": text}`, `{"port", "model", "version"}` when it is ready, `{"error", "message"}`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from typing import Any

from laurel.errors import LaurelError, Terms, spoken_in
from laurel.rewards.server.serving import RewardService, ServedModel
from laurel.rewards.server.serving_model import ModelSettings, open_served

_BROKEN_EXIT_CODE = 70
"""What sysexits.h calls an internal error. The parent starts it again."""


def main() -> None:
    """Serve until told to end."""
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
    os.dup2(2, 1)  # whatever libraries print must not look like what we say

    def tell(**said: Any) -> None:
        try:
            lines.write(json.dumps(said) + "\n")
        except OSError:
            os._exit(1)  # nobody reads any more

    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(order, tell)
    except LaurelError as error:
        tell(error=type(error).__name__, message=str(error))
        sys.exit(error.exit_code)
    gc.freeze()  # all is done: looking through what is left for garbage would take a second


def _serve(order: dict[str, Any], tell: Any) -> None:
    from laurel.rewards.server.app import make_app
    from laurel.rewards.server.gate import GateOptions
    from laurel.rewards.server.run import ServerRun, in_thread, listen

    settings = ModelSettings(**order["settings"])
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    service = RewardService(request_seconds=order["request_seconds"])
    app = make_app(service, GateOptions(api_key=order["api_key"], hosts=("127.0.0.1",)))

    def load() -> ServedModel:
        _choose_device(settings, order["index"])
        terms = [Terms(**one) for one in order["terms"]]
        return spoken_in(terms, open_served, settings, say=lambda text: tell(say=text))

    async def open_model() -> ServedModel:
        return await in_thread(load, name="loading")

    def on_ready(model: ServedModel) -> None:
        threading.Thread(target=_end_when_broken, args=(service,), daemon=True).start()
        tell(port=port, model=model.name, version=model.version)

    ServerRun(app, service, listener).run(open_model, on_ready=on_ready)


def _choose_device(settings: ModelSettings, index: int) -> None:
    """Of several GPUs each replica takes one, by turns. In the thread that loads."""
    if not settings.model or settings.device == "cpu":
        return
    import torch

    if (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(index % count)


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def _end_when_broken(service: RewardService) -> None:
    """A device that fails at everything comes back only with a new process."""
    while service.state != "broken":
        time.sleep(1.0)
    os._exit(_BROKEN_EXIT_CODE)


if __name__ == "__main__":
    main()
