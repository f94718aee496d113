"""Checks quickly whether the Hugging Face hub answers.

The hub's libraries retry each file for half a minute before they give up. So this module tests the
connection once before they are called.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Literal

from laurel.errors import ModelError, about, no_file_at, setting_of

WITHOUT_ASKING = (
    "What was fetched before is used without asking where HF_HUB_OFFLINE=1 is set, and found in "
    "HF_HOME"
)
CONNECT_SECONDS = 5.0
"""The timeout of a connection; `HF_HUB_ETAG_TIMEOUT` changes it, as it does for the library."""
_AT_ONCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.5
_NOT_CONNECTED = ("ConnectError", "ConnectTimeout", "ProxyError", "ConnectionError", "SSLError")
"""The names of connection errors of the HTTP libraries that huggingface_hub uses, depending on its
version. A connected hub that is slow to answer raises none of these."""

Kind = Literal["model", "dataset"]


def check_not_missing(name: str, *, key: str) -> None:
    """Raise an error for a name that looks like a directory and is none.

    Raises:
        ModelError: The name looks local; the message lists what is there instead.
    """
    if (problem := no_file_at(name)) is not None:
        raise ModelError(f"{about(key)}{problem}; a model is a directory")
    path = Path(name).expanduser()
    folder = path.parent
    # Names of the hub have one slash.
    looks_local = (
        name.startswith((".", "/", "~"))
        or len(path.parts) > 2
        or (folder != Path() and folder.is_dir())
    )
    if path.is_dir() or not looks_local:
        return
    if not folder.is_dir():
        raise ModelError(
            f"{setting_of(key, name)}: there is no such directory, nor {folder}; a relative path "
            f"begins at the working directory, {Path.cwd()}"
        )
    raise ModelError(
        f"{setting_of(key, name)}: there is no such directory; {folder} holds: {listed(folder)}"
    )


def listed(directory: Path) -> str:
    """Return the first names in a directory, for an error message."""
    return ", ".join(sorted(os.listdir(directory))[:8]) or "nothing"


def check_fetchable(name: str, *, key: str, instead: str = "") -> None:
    """Refuse a directory that is not there, or a model that the hub cannot give now.

    Args:
        name: The name of the model, which is no directory.
        instead: An alternative for the error message, with a comma before it.

    Raises:
        ModelError: The name is that of a directory, or the model is not in the cache and the hub
            does not answer.
    """
    check_not_missing(name, key=key)
    why = why_not_fetched(name)
    if why is not None:
        raise ModelError(
            f"{setting_of(key, name)}: it is no directory here, and cannot be fetched from the "
            f"Hugging Face hub ({why}). Go online, or give a directory that holds the "
            f"model{instead}. {WITHOUT_ASKING}"
        )


def why_not_fetched(name: str, kind: Kind = "model") -> str | None:
    """Return the reason why a repository of the hub cannot be fetched; None if it can be tried.

    Args:
        name: The name of the repository. The result is None if the name is invalid, or if the
            repository is in the cache, because the loader handles these cases.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    # For a cached repository the library decides by itself, even without a network.
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if (folder / "snapshots").is_dir():
        return None
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it is not among what was fetched before"
    is_said = "HF_HUB_ETAG_TIMEOUT" in os.environ
    seconds = constants.HF_HUB_ETAG_TIMEOUT if is_said else CONNECT_SECONDS
    return why_no_answer(constants.ENDPOINT, seconds=seconds)


def why_no_answer(url: str, *, seconds: float = CONNECT_SECONDS) -> str | None:
    """Return the reason why a server cannot be reached; None if it answers anything.

    A server that accepts the connection counts as answering, even if it is slow. An attempt that
    fails immediately is repeated, because a single packet may have been lost.

    Args:
        seconds: The timeout of the connection, and of the answer. It doubles if the server has
            several addresses and none can be reached.
    """
    # An immediate failure may be chance; after a timeout, another attempt would only time out too.
    for is_last in (False, True):
        started = time.monotonic()
        problem = _asked(url, seconds)
        if problem is None or is_last or time.monotonic() - started > _AT_ONCE_SECONDS:
            return problem
        time.sleep(_PAUSE_SECONDS)
    return None


def _asked(url: str, seconds: float) -> str | None:
    # A thread enforces the limit, because the library's own does not hold for many addresses.
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(_ask(url, seconds)), daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return said[0] if said else f"no connection to {url} within {2 * seconds:g} s"


def _ask(url: str, seconds: float) -> str | None:
    # The library handles proxies and certificates.
    from huggingface_hub.utils import get_session

    try:
        get_session().head(url, timeout=seconds)
    except Exception as error:
        # The classes differ by version, and any other failure is the library's to report.
        names = {kind.__name__ for kind in type(error).__mro__}
        if names.isdisjoint(_NOT_CONNECTED):
            return None
        return f"no connection to {url}: {' '.join(str(error).split()) or type(error).__name__}"
    return None
