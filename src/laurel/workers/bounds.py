"""Bounds counts of threads, processes and calls by what this machine has."""

from __future__ import annotations

from collections.abc import Iterator

from laurel.config.plugged import fields_in
from laurel.config.yaml_tree import OfMachine, Section
from laurel.errors import ConfigError, counted, setting_of
from laurel.sandbox.limits import available_cores

PER_CORE = {"threads": 16, "processes": 16, "calls": 1024}
"""How many of each a core may carry; more would only wait, or take the machine down."""


def bound_count(key: str, count: int, bound: OfMachine) -> None:
    """Check that this machine can carry a count.

    Raises:
        ConfigError: It cannot; the message has the key, and the largest count.
    """
    if count <= PER_CORE[bound.what]:  # one core carries them
        return
    cores = available_cores()
    most = PER_CORE[bound.what] * cores
    if count > most:
        raise ConfigError(
            f"{setting_of(key, count)}: this process may use {counted(cores, 'core')}, on which at "
            f"most {most} {bound.what} are started; lower it"
        )


def check_counts(config: Section) -> None:
    """Check every count of a configuration that this machine has to carry.

    Raises:
        ConfigError: One of them is too large.
    """
    for key, count, bound in counts_in(config):
        if not bound.is_lowered:
            bound_count(key, count, bound)


def counts_in(config: Section, path: str = "") -> Iterator[tuple[str, int, OfMachine]]:
    """Yield the counts that are marked with `OfMachine`, by dotted key, and their marks."""
    for name, field in fields_in(config).items():
        value, here = getattr(config, name), f"{path}{name}"
        bound = next((one for one in field.metadata if isinstance(one, OfMachine)), None)
        if bound is not None and value is not None:
            yield here, value, bound
        if isinstance(value, Section):
            yield from counts_in(value, f"{here}.")
        elif isinstance(value, dict | list):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                behind = f".{key}." if isinstance(value, dict) else f"[{key}]."
                if isinstance(one, Section):
                    yield from counts_in(one, f"{here}{behind}")
