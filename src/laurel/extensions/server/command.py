"""The command `laurel serve`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laurel.extensions.server.options import ServeOptions
from laurel.plugins import Command


class Serve(Command):
    """Serve a reward model over HTTP."""

    after = "init"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return serve_command


def serve_command(options: ServeOptions) -> None:
    """Serve a reward model over HTTP.

    The server answers clients of Laurel, vLLM, SGLang, OpenRLHF and slime. With --json it prints
    one line of JSON with its address when it is ready.

    Example: laurel serve --model results/rm --replicas 2 --port 8000
    """
    from laurel.extensions.server.serve import run_serve

    run_serve(options)
