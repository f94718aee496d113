"""The protocols of other projects' reward servers, and the servers of a run's own, as plug-ins."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from laurel.errors import MissingDependencyError
from laurel.plugins import AskedServers, ModelServing, ScorerServices, ServerDialect

if TYPE_CHECKING:
    from laurel.config.environments import ModelServerConfig
    from laurel.extensions.server.model_servers import ModelServers
    from laurel.rewards.remote.dialects import Dialect


class _Dialect(ServerDialect):
    function: ClassVar[str]
    """That which makes it, in `other_dialects`."""

    def make(self, section: None, servers: AskedServers) -> Dialect:
        """Return the dialect."""
        from laurel.extensions.server import other_dialects

        dialect: Dialect = getattr(other_dialects, self.function)(servers)
        return dialect


class VllmClassify(_Dialect):
    """vLLM's `/classify`."""

    function = "vllm_dialect"
    rendered = "with_model"


class Sglang(_Dialect):
    """SGLang's `/classify`."""

    function = "sglang_dialect"
    rendered = "always"


class SglangEmbeddings(_Dialect):
    """SGLang's `/v1/embeddings`."""

    function = "embeddings_dialect"
    rendered = "always"


class Openrlhf(_Dialect):
    """OpenRLHF's `/get_reward`."""

    function = "openrlhf_dialect"
    rendered = "always"


class Slime(_Dialect):
    """slime's remote_rm."""

    function = "slime_dialect"
    keys = ("reward_key",)


class RoutedServers(ModelServing):
    """An engine's servers behind a router."""

    def make(self, section: ModelServerConfig, services: ScorerServices) -> ModelServers:
        """Start them."""
        if find_spec("uvicorn") is None:
            raise MissingDependencyError.of("uvicorn", extra="serve", purpose=services.where)
        from laurel.extensions.server.model_servers import ModelServers

        return ModelServers(section, services)
