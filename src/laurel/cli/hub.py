"""Bringing a directory to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from laurel.errors import ConfigError, DataError
from laurel.models.tokenizer import first_line


class HubApi(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def whoami(self) -> dict[str, Any]:
        """Who is logged in; an error where nobody is."""
        ...

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> object:
        """Make a repository."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> object:
        """Add a directory to it as one commit."""
        ...


def connect() -> HubApi:
    """The hub that this machine is set up for."""
    from huggingface_hub import HfApi

    return cast("HubApi", HfApi())


def check_hub(api: HubApi, name: str) -> None:
    """Refuse to go on to the hub where nobody could be let in, before any work is done.

    Args:
        api: The hub.
        name: Of the repository.

    Raises:
        ConfigError: A name that the hub does not take, or no login.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"--push-to-hub {name}: {first_line(error)} Give USER/MODEL, or MODEL for your own"
        ) from error
    try:
        api.whoami()
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network
        raise ConfigError(
            f"--push-to-hub {name}: the hub does not say who you are ({first_line(error)}). Log in "
            "with `hf auth login`, or put a token that may write into HF_TOKEN"
        ) from error


def push(api: HubApi, name: str, directory: Path, *, private: bool) -> None:
    """Make the repository where it is missing, and add the files of a directory.

    Raises:
        DataError: The hub refuses; the directory stays as it is.
    """
    try:
        # One that is there stays as public as it is.
        api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=str(directory), commit_message="Written by laurel export"
        )
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network
        raise DataError(
            f"{directory} is written, but could not be brought to {name}: {first_line(error)}. "
            f"Try again with: hf upload {name} {directory}"
        ) from error
