"""Whether the Hugging Face hub answers, found out in seconds.

Its libraries ask again and again, for half a minute and for every file, before they say that it
does not. So it is asked once before they are.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from typing import Literal

from laurel.errors import ModelError, setting_of

WITHOUT_ASKING = (
    "What was fetched before is used without asking where HF_HUB_OFFLINE=1 is set, and found in "
    "HF_HOME"
)
CONNECT_SECONDS = 5.0
"""Longest wait for a connection; `HF_HUB_ETAG_TIMEOUT` changes it, as it does for the library."""
_AT_ONCE_SECONDS = 1.0
_PAUSE_SECONDS = 0.5
_NOT_CONNECTED = ("ConnectError", "ConnectTimeout", "ProxyError", "ConnectionError", "SSLError")
"""How HTTP libraries call it that there is no connection; which of them huggingface_hub uses is a
matter of its version. A connected hub that is slow to answer is none of these."""

Kind = Literal["model", "dataset"]


def check_fetchable(name: str, *, key: str, instead: str = "") -> None:
    """Refuse the name of a model on the hub where it is not here and the hub does not answer.

    Args:
        name: Of the model. It is no local directory.
        key: What named it.
        instead: What else could be done, with a comma before it.

    Raises:
        ModelError: It cannot be fetched now.
    """
    why = why_not_fetched(name)
    if why is not None:
        raise ModelError(
            f"{setting_of(key, name)}: it is no directory here, and cannot be fetched from the "
            "Hugging Face "
            f"hub ({why}). Go online, or give a directory that holds the model{instead}. "
            f"{WITHOUT_ASKING}"
        )


def why_not_fetched(name: str, kind: Kind = "model") -> str | None:
    """Why a repository of the hub cannot be had here; None where it is worth trying.

    Args:
        name: Of the repository. What cannot be one is left to those who load it, and so is what is
            in the cache.
        kind: Of the repository.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if (folder / "snapshots").is_dir():
        return None
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it is not among what was fetched before"
    is_said = "HF_HUB_ETAG_TIMEOUT" in os.environ
    seconds = constants.HF_HUB_ETAG_TIMEOUT if is_said else CONNECT_SECONDS
    return why_no_answer(constants.ENDPOINT, seconds=seconds)


def why_no_answer(url: str, *, seconds: float = CONNECT_SECONDS) -> str | None:
    """Why there is no connection to a server; None where it answers, whatever it says.

    A server that lets itself be connected to and is slow to answer counts as one that answers. What
    fails at once is tried a second time: a lost packet is no lost network.

    Args:
        url: Of the server.
        seconds: Longest wait for a connection, and for an answer. With several addresses, of which
            none can be reached, it is twice that.
    """
    for is_last in (False, True):
        started = time.monotonic()
        problem = _asked(url, seconds)
        if problem is None or is_last or time.monotonic() - started > _AT_ONCE_SECONDS:
            return problem
        time.sleep(_PAUSE_SECONDS)
    return None


def _asked(url: str, seconds: float) -> str | None:
    """What one question comes to; in a thread, since a name with many addresses has no limit."""
    said: list[str | None] = []
    thread = threading.Thread(target=lambda: said.append(_ask(url, seconds)), daemon=True)
    thread.start()
    thread.join(2 * seconds)
    return said[0] if said else f"no connection to {url} within {2 * seconds:g} s"


def _ask(url: str, seconds: float) -> str | None:
    # It knows proxies and certificates.
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    try:
        get_session().head(url, timeout=seconds)
    except Exception as error:
        # The classes differ by version, and any other failure is the library's to tell.
        names = {kind.__name__ for kind in type(error).__mro__}
        if names.isdisjoint(_NOT_CONNECTED):
            return None
        return f"no connection to {url}: {' '.join(str(error).split()) or type(error).__name__}"
    return None


# --------------------------------------------------------------------------------------------------
# Lines of code as messages name them: whose they are, and where they lie.

_LAUREL = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep


def line_of(file: str, line: int | None) -> str:
    """A line of a file, from the working directory where the file is below it."""
    near = os.path.relpath(file)
    return f"{file if near.startswith(os.pardir) else near}:{line}"


def is_ours(file: str) -> bool:
    """Whether a file is one of Laurel's."""
    return file.startswith(_LAUREL)


def is_installed(file: str) -> bool:
    """Whether a file is Laurel's, Python's or of a package: nobody's who writes for a run."""
    return is_ours(file) or file.startswith(_PYTHON) or "site-packages" in file


def own_line_of(error: BaseException) -> str | None:
    """The innermost line of what is the user's own that an exception came through, if any."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not is_installed(f.filename)]
    return line_of(own[-1].filename, own[-1].lineno) if own else None


def told_with_line(error: Exception) -> str:
    """An error in anybody's program: what it is, and the line that raised it, or cannot be read."""
    place: tuple[str, int | None] | None = None
    if isinstance(error, SyntaxError) and error.filename is not None:
        place, said = (error.filename, error.lineno), error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        written = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        place = (written[-1].filename, written[-1].lineno) if written else None
        said = str(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if place is None else f"{text} ({line_of(*place)})"
