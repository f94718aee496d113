"""`env.reward_model.url_protocol=plain`: servers that read and write `{"text"}`, `{"score"}`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.plugins import AskedServers, ServerDialect

if TYPE_CHECKING:
    from laurel.rewards.remote.dialects import Dialect


class Plain(ServerDialect):
    """One answer in, one number out."""

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.rewards.remote.dialects import SingleDialect
        from laurel.rewards.remote.wire import Body

        class Request(Body):
            text: str

        class Reply(Body):
            score: float

        return SingleDialect(
            "/plain",
            make=lambda conversation: Request(text=conversation[-1].content),
            read=lambda value: Reply.read(value, "the reply").score,
        )
