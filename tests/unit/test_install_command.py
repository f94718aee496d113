"""The command that a message gives for a missing package works where Laurel came from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laurel.errors import MissingDependencyError, install_command


def installed_from(noted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have pip's note say where Laurel was installed from; None leaves it out."""
    text = None if noted is None else json.dumps(noted)
    found = SimpleNamespace(read_text=lambda name: text if name == "direct_url.json" else None)
    monkeypatch.setattr(metadata, "distribution", lambda name: found)


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        (None, "pip install 'laurel-rl[ray]'"),
        ({"url": "file:///no/such/folder", "dir_info": {}}, "pip install 'laurel-rl[ray]'"),
        (
            {"url": "https://host.example/laurel.git", "vcs_info": {"vcs": "git"}},
            "pip install 'laurel-rl[ray] @ git+https://host.example/laurel.git'",
        ),
        (
            {"url": "https://host.example/laurel_rl-0.1.0.whl", "archive_info": {}},
            "pip install 'laurel-rl[ray] @ https://host.example/laurel_rl-0.1.0.whl'",
        ),
    ],
)
def test_what_pip_has_noted_is_used(
    noted: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(noted, monkeypatch)
    assert install_command("ray") == expected
    error = MissingDependencyError.of("ray", extra="ray", purpose="more than one worker")
    assert str(error).endswith(expected)


def test_a_source_tree_and_a_wheel_that_are_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "my laurel"
    tree.mkdir()
    installed_from({"url": tree.as_uri(), "dir_info": {"editable": True}}, monkeypatch)
    assert install_command("ray") == f"pip install -e '{tree}[ray]'"
    installed_from({"url": tree.as_uri(), "dir_info": {}}, monkeypatch)
    assert install_command() == f"pip install '{tree}'"
    wheel = tmp_path / "laurel_rl-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed_from({"url": wheel.as_uri(), "archive_info": {}}, monkeypatch)
    assert install_command("ray") == f"pip install '{wheel}[ray]'"


def test_laurel_that_was_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install_command() == "pip install laurel-rl"
