"""The table of plug-ins: what is found without importing, and what is refused, with its package."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import laurel
from laurel import plugins
from laurel.errors import ConfigError
from packages import installed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path, where a test installs packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_each_of_our_own_is_declared_and_can_be_used(kind):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert plugins.names(kind) == sorted(declared[f"laurel.{kind}"])
    for name in plugins.names(kind):
        found = plugins.plugin(kind, name)
        assert isinstance(found, plugins.KINDS[kind])
        assert plugins.is_own(kind, name)
        assert type(found).__doc__


@pytest.mark.parametrize("kind", plugins.KINDS)
def test_a_package_is_found_without_importing_it(kind, site):
    installed(site, "theirs", {"loud": "raise SystemError('imported')"}, {kind: {"x": "loud:X"}})
    assert plugins.names(kind)[-1] == "x"
    assert not plugins.is_own(kind, "x")
    assert "loud" not in sys.modules


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("raise OSError('no disk')", "cannot be imported: OSError: no disk"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("", "AttributeError"),
        ("class X: ...", "no class that derives from laurel.plugins.Loss"),
        ("X = 3", "no class that derives from laurel.plugins.Loss"),
    ],
)
def test_what_cannot_be_used_names_its_package(text, what, site):
    module = f"broken_{abs(hash(text))}"
    installed(site, "their-losses", {module: text}, {"losses": {"x": f"{module}:X"}})
    with pytest.raises(ConfigError, match="their-losses") as caught:
        plugins.find(plugins.Loss, "x")
    assert what in str(caught.value)


@pytest.mark.parametrize("name", ["ppo", "theirs"])
def test_a_name_that_is_declared_twice_is_refused(name, site):
    for package in ("first-package", "second-package"):
        installed(site, package, {}, {"losses": {name: f"{package[:5]}:X"}})
    with pytest.raises(ConfigError, match="declared twice") as caught:
        plugins.find(plugins.Loss, name)
    assert "first-package" in str(caught.value)
    assert "second-package" in str(caught.value)


def test_a_wrong_name_says_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'cispo'"):
        plugins.find(plugins.Loss, "cipso")


def test_metadata_of_other_code_are_refused(tmp_path):
    """A copy of the code beside an older install must not lack its plug-ins without a word."""
    shutil.copytree(Path(laurel.__file__).parent, tmp_path / "laurel")
    everything = {kind: {"a": "b:C"} for kind in plugins.KINDS}
    for site, points, what in (
        ("old", everything, "is 1.0"),
        ("none", None, "is not installed"),
    ):
        (tmp_path / site).mkdir()
        if points is not None:
            installed(tmp_path / site, plugins.OWN, {}, points)
        program = "from laurel import plugins\nplugins.names('losses')"
        done = subprocess.run(
            [sys.executable, "-S", "-c", program],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": f"{tmp_path}:{tmp_path / site}"},
        )
        assert what in done.stderr.splitlines()[-1], done.stderr
        assert "pip install" in done.stderr


def test_an_installed_package_declares_its_own(tmp_path, monkeypatch):
    """Without a checkout the metadata of the install count."""
    points = {kind: {"one": "a:B"} for kind in plugins.KINDS}
    installed(tmp_path, plugins.OWN, {}, points)
    info = next(tmp_path.glob("*.dist-info"))
    text = f"Metadata-Version: 2.1\nName: {plugins.OWN}\nVersion: {laurel.__version__}\n"
    (info / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setattr(plugins, "__file__", str(tmp_path / "a" / "b" / "plugins.py"))
    assert plugins.names("losses") == ["one"]
