"""Defines `env.openenv` and `env.openreward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from laurel.config.environments import checked_urls
from laurel.config.yaml_tree import MAY_CHANGE, Removed, Section


class SessionsConfig(Section):
    """A server of environments, which has a session for each rollout."""

    removed: ClassVar[Mapping[str, Removed]] = {
        "system_prompt": Removed("data.system_prompt_file, also of one data set, holds it"),
        "max_observation_chars": Removed("env.max_observation_chars holds for all", 4096),
        "connect_patience": Removed("it is a tenth of env.timeout_seconds"),
        "step_timeout": Removed("it is a tenth of env.timeout_seconds"),
    }

    url: Annotated[str, MAY_CHANGE]
    """Its address, `http://HOST:PORT`."""

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        checked_urls([url])
        return url.rstrip("/")


class OpenEnvConfig(SessionsConfig):
    """A server of OpenEnv. `data.max_samples` says how many tasks it has: one for each seed."""

    removed: ClassVar[Mapping[str, Removed]] = {
        **SessionsConfig.removed,
        "first_seed": Removed("seeds count from 0; rows of your own name theirs", 0),
        "instruction": Removed("data.prompt_file, also of one data set, holds it, before {}"),
    }

    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of every `reset`."""
    action_key: str | None = None
    """The field of the action that takes the policy's text. Null: the text is a JSON object, which
    is the action."""
    action_fields: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every action, whatever the policy says in them."""
    action_tag: str | None = Field(default=None, pattern=r"^\w+$")
    """The text is what stands in the last `<TAG>...</TAG>` of the message. Null: all of it, after
    its thoughts."""
    observation_key: str | None = None
    """The field of an observation that the policy sees. Null: all of them, as JSON."""
    role: Literal["user", "tool", "environment"] = "user"
    """The role of the message with the observation."""

    @model_validator(mode="after")
    def _leaves_the_action_to_the_policy(self) -> OpenEnvConfig:
        if self.action_key in self.action_fields:
            raise ValueError(f"action_fields has {self.action_key} (action_key): leave one out")
        return self


class OpenRewardConfig(SessionsConfig):
    """A server of the Open Reward Standard, whose tools the policy calls."""

    removed: ClassVar[Mapping[str, Removed]] = {
        **SessionsConfig.removed,
        "split": Removed("split of the data set holds it (data.train_split)"),
        "form": Removed("calls are read as policy.tokenizer.chat_template writes them", "auto"),
    }

    environment: str | None = None
    """The environment on the server. Null: its first."""
    api_key_env: Annotated[str | None, MAY_CHANGE] = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"
    )
    """Name of the environment variable with the API key; never the key itself. Null: none, as for
    a server of your own."""
