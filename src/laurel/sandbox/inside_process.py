"""Starts modules that run alone in a process of their own, without the rest of Laurel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LAUREL = Path(__file__).parents[1]
# Packages are empty stand-ins: nothing of Laurel is imported but the files in folders `inside`.
_BOOT = """\
import sys, types
for name, path in {packages}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from {module} import main
main({arguments})
"""


class SandboxStartError(RuntimeError):
    """Raised if a zygote does not start."""


def inside_command(interpreter: str, module: str, arguments: str) -> list[str]:
    """Return the command that runs a module of a folder `inside` by itself.

    Args:
        module: Its full name. Beside those of its own folder it may import the modules of
            `laurel.sandbox.inside`.
        arguments: The arguments of its `main`, in Python.
    """
    packages: dict[str, list[str]] = {}
    for room in ("laurel.sandbox", module.rpartition(".inside.")[0]):
        parts = room.split(".")
        for count in range(1, len(parts)):
            packages.setdefault(".".join(parts[:count]), [])
        packages[room] = [str(_LAUREL.joinpath(*parts[1:]))]
    boot = _BOOT.format(packages=packages, module=module, arguments=arguments)
    # Like -I, but with the caller's hash seed: there are no variables but the caller's.
    return [interpreter, "-P", "-s", "-S", "-B", "-c", boot]


def own_interpreter() -> str:
    """Return the Python that runs this, without its virtual environment."""
    base = getattr(sys, "_base_executable", None)
    return os.path.realpath(base or sys.executable)
