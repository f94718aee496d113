"""Reads the address of a server of a reward model as a scorer."""

from __future__ import annotations

import os

from pydantic import ValidationError

from laurel.config.environments import ScorerSource
from laurel.errors import ConfigError, speaking
from laurel.rewards.spec import ScorerSpec

KEY_VARIABLE = "LAUREL_API_KEY"


def server_spec(url: str, *, api_key_env: str | None) -> ScorerSpec:
    """Return the scorer spec for a server whose address is the value of `--model`.

    Raises:
        ConfigError: The address or the variable's name is invalid.
    """
    section = "env.reward_model"
    names = {
        section: "--model",
        f"{section}.api_key_env": "--api-key-env",
        "urls": "--model",
        "api_key_env": f"--api-key-env (default {KEY_VARIABLE})",
    }
    variable = api_key_env or (KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None)
    try:
        with speaking(names):
            servers = ScorerSource(urls=[url], api_key_env=variable, connect_patience=0.0)
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise ConfigError(message) from error
    return ScorerSpec(servers=servers, names=(names,))
