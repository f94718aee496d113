"""The protocols of reward servers by name, as plug-ins; `dialects` has what they send and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.plugins import AskedServers, ServerDialect

if TYPE_CHECKING:
    from laurel.rewards.remote.dialects import Dialect


class Laurel(ServerDialect):
    """`laurel serve`."""

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.rewards.remote.dialects import LaurelDialect

        return LaurelDialect()
