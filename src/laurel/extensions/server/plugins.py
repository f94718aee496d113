"""The protocols of other projects' reward servers by name, as plug-ins (`laurel.dialects`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.plugins import AskedServers, ServerDialect

if TYPE_CHECKING:
    from laurel.rewards.remote.dialects import Dialect


class Vllm(ServerDialect):
    """vLLM's `/classify`."""

    rendered = "with_model"

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.extensions.server.other_dialects import vllm_dialect

        return vllm_dialect(servers)


class Sglang(ServerDialect):
    """SGLang's `/classify`."""

    rendered = "always"

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.extensions.server.other_dialects import sglang_dialect

        return sglang_dialect(servers)


class SglangEmbeddings(ServerDialect):
    """SGLang's `/v1/embeddings`."""

    rendered = "always"

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.extensions.server.other_dialects import embeddings_dialect

        return embeddings_dialect(servers)


class Openrlhf(ServerDialect):
    """OpenRLHF's `/get_reward`."""

    rendered = "always"

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.extensions.server.other_dialects import openrlhf_dialect

        return openrlhf_dialect(servers)


class Slime(ServerDialect):
    """slime's remote_rm."""

    keys = ("reward_key",)

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.extensions.server.other_dialects import slime_dialect

        return slime_dialect(servers)
