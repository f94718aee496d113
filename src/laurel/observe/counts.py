"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """E.g. `1 row`, `2,000 rows`.

    Args:
        number: How many.
        what: One of them; more take an s.
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def counted_that(number: int, what: str, verb: str) -> str:
    """E.g. `1 row has`, `2 rows have`.

    Args:
        number: How many.
        what: One of them.
        verb: What more than one do.
    """
    does = {"have": "has", "were": "was", "are": "is"}.get(verb, f"{verb}s")
    return f"{counted(number, what)} {does if number == 1 else verb}"
