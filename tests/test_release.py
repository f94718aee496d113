"""A release: which version may come next, what changes in the texts, what the wheel holds."""

from __future__ import annotations

import datetime
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DAY = datetime.date(2026, 12, 24)
CHANGES = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- New.\n\n## 0.1.0 (2026-11-01)\n\n- Old.\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_tool", ROOT / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load()


@pytest.mark.parametrize("wanted", ["0.1.1", "0.2.0rc1", "0.2.0", "1.0.0", "0.10.0"])
def test_versions_that_may_come_next(wanted: str) -> None:
    current = "0.1.1" if wanted == "0.1.1" else "0.2.0"
    found = tool.checked_version(wanted, current=current, changelog=CHANGES, tags=["v0.1.0"])
    assert found == wanted


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("new", "is no version"),
        ("v0.2.0", "normal form, 0.2.0"),
        ("0.2.0-rc1", "normal form, 0.2.0rc1"),
        ("0.2.0+cpu", "one's own machine"),
        ("0.2.0.dev1", "one's own machine"),
        ("0.1.0", "not above 0.1.0"),
        ("0.0.9", "not above 0.1.0"),
        ("0.1.1", "below 0.2.0"),
        ("0.3.0", "not above 0.3.0"),  # tagged
    ],
)
def test_versions_that_may_not(wanted: str, why: str) -> None:
    with pytest.raises(tool.Refused, match=why):
        tool.checked_version(
            wanted,
            current="0.2.0",
            changelog=CHANGES,
            tags=["v0.3.0"] if wanted == "0.3.0" else ["nightly"],
        )


def test_the_package_says_its_version_in_one_line() -> None:
    init = '"""A package."""\n\n__version__ = "0.1.0"\n'
    assert tool.with_version(init, "0.2.0") == '"""A package."""\n\n__version__ = "0.2.0"\n'
    with pytest.raises(tool.Refused, match="0 lines"):
        tool.with_version('"""A package."""\n', "0.2.0")


def test_the_section_of_the_release_gets_its_version_and_day() -> None:
    changed = tool.dated(CHANGES, "1.0.0", DAY)
    assert changed == CHANGES.replace("0.2.0 (unreleased)", "1.0.0 (2026-12-24)")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CHANGES.replace("unreleased", "2026-12-01"), "has to begin with"),
        ("# Changelog\n", "has to begin with"),
        (CHANGES.replace("- New.\n", ""), "is empty"),
        ("# Changelog\n\n## 0.2.0 (unreleased)\n", "is empty"),
    ],
)
def test_a_changelog_that_says_nothing_of_the_release(text: str, why: str) -> None:
    with pytest.raises(tool.Refused, match=why):
        tool.dated(text, "0.2.0", DAY)


def test_the_citation_is_of_the_release() -> None:
    first = tool.cited("type: software\nversion: 0.1.0\nlicense: x\n", "0.2.0", DAY)
    assert first == 'type: software\nversion: 0.2.0\ndate-released: "2026-12-24"\nlicense: x\n'
    later = tool.cited(first, "0.3.0", datetime.date(2027, 1, 2))
    assert later == first.replace("0.2.0", "0.3.0").replace("2026-12-24", "2027-01-02")
    with pytest.raises(tool.Refused, match="0 lines"):
        tool.cited("type: software\n", "0.2.0", DAY)


def test_the_texts_of_this_repository_can_be_released() -> None:
    init, changelog, citation = (
        (ROOT / name).read_text("utf-8") for name in (tool.INIT, tool.CHANGELOG, tool.CITATION)
    )
    assert '"99.0.0"' in tool.with_version(init, "99.0.0")
    assert "## 99.0.0 (2026-12-24)" in tool.dated(changelog, "99.0.0", DAY)
    cited = yaml.safe_load(tool.cited(citation, "99.0.0", DAY))
    assert (cited["version"], cited["date-released"]) == ("99.0.0", "2026-12-24")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in (tool.INIT, tool.CHANGELOG, tool.CITATION):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text("utf-8"), encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "all")
    return tmp_path


def git(place: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *arguments], cwd=place, check=True)


def files(place: Path) -> list[Path]:
    return [f for f in place.rglob("*") if f.is_file() and ".git" not in f.parts]


def test_a_tree_that_is_not_clean_is_not_released(repository: Path) -> None:
    before = {f: f.read_bytes() for f in files(repository)}
    assert set(tool.edits(repository, "99.0.0", DAY)) == {tool.INIT, tool.CHANGELOG, tool.CITATION}
    assert {f: f.read_bytes() for f in files(repository)} == before
    (repository / "stray.txt").touch()
    changelog = repository / tool.CHANGELOG
    changelog.write_text(changelog.read_text("utf-8") + "More.\n", "utf-8")
    with pytest.raises(tool.Refused, match=r"not clean(.|\n)*\n M CHANGELOG.md\n(.|\n)*stray\.txt"):
        tool.edits(repository, "99.0.0", DAY)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_asks_for_the_version_before_it_sets_anything_up(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "VERSION" and "MAKE" not in k}
    done = subprocess.run(
        ["make", "-f", ROOT / "Makefile", "release"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "which version? make release VERSION=x.y.z" in done.stderr
    assert done.stdout == ""
    assert not any(tmp_path.iterdir())


def test_a_version_that_is_tagged_is_not_released_again(repository: Path) -> None:
    git(repository, "tag", "v99.0.0")
    with pytest.raises(tool.Refused, match=r"not above 99\.0\.0"):
        tool.edits(repository, "99.0.0", DAY)


def test_what_is_built_is_what_is_committed_with_the_changes(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changes = tool.edits(repository, "99.0.0", DAY)
    source = tool.export(repository, tmp_path_factory.mktemp("place"), changes)
    assert (source / tool.INIT).read_text("utf-8") == changes[tool.INIT]
    assert (repository / tool.INIT).read_text("utf-8") != changes[tool.INIT]


def test_a_wheel_that_lacks_a_file_or_has_one_too_many() -> None:
    package = ["laurel/a.py", "laurel/templates/page.html"]
    whole = [*package, "laurel_rl-1.dist-info/METADATA"]
    assert tool.wheel_misfits(whole, package) == []
    assert tool.wheel_misfits(["laurel/a.py", "tests/b.py"], package) == [
        "missing: laurel/templates/page.html",
        "no part of the package: tests/b.py",
    ]


def test_the_wheel_holds_the_whole_package() -> None:
    # The list that the wheel is made from; making it is left to the release.
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling (extra test)")
    builder = wheel.WheelBuilder(str(ROOT))
    names = {one.distribution_path for one in builder.recurse_included_files()}
    package = [f.removeprefix("src/") for f in tool.tracked(ROOT) if f.startswith("src/laurel/")]
    assert any("/templates/" in name for name in package)
    assert any("/sandbox/inside/" in name for name in package)
    assert "laurel/py.typed" in package
    assert [name for name in package if name not in names] == []
