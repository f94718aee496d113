"""The protocols of other projects' reward servers, and the servers of a run's own, as plug-ins."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from laurel.errors import MissingDependencyError
from laurel.plugins import AskedServers, ModelServing, ScorerServices, ServerDialect

if TYPE_CHECKING:
    from laurel.config.environments import ModelServerConfig
    from laurel.extensions.server.model_servers import ModelServers
    from laurel.rewards.remote.dialects import Dialect


class VllmClassify(ServerDialect):
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


class RoutedServers(ModelServing):
    """An engine's servers behind a router."""

    def make(self, section: ModelServerConfig, services: ScorerServices) -> ModelServers:
        """Start them."""
        if find_spec("uvicorn") is None:
            raise MissingDependencyError.of("uvicorn", extra="serve", purpose=services.where)
        from laurel.extensions.server.model_servers import ModelServers

        return ModelServers(section, services)
