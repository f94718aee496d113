"""The house as DESIGN.md draws it: its layers, its single importers, its names.

Each check is a function from sources to the violations it finds. One test runs it on src/laurel,
another on small sources with a violation planted in them, to prove that it would be seen.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from house import House

ROOT = Path(__file__).parents[1]

# Low to high. A room imports only rooms of lines above its own here, never one of its own line.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("laurel",),  # the package itself: its version
    ("errors",),
    ("types",),
    ("protocols", "sandbox"),
    ("plugins",),
    ("config",),
    ("observe", "planning"),
    ("workers",),
    ("data", "models"),
    ("generation",),
    ("rewards",),  # vLLM samples completions and scores them
    ("environments", "evaluation"),
    ("training",),
    ("grpo",),
    ("run",),
    ("demo",),
    ("cli",),
    ("api", "__main__"),
    ("extensions",),  # nothing imports them: they are found by name (plugins.py)
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# What only these files may import: the file, or the folder, relative to src/laurel.
HOMES = {
    "ray": "workers/ray_",
    "vllm": "extensions/vllm/",
    "fastapi": "extensions/server",
    "uvicorn": "extensions/server",
    "starlette": "extensions/server",
    "prometheus_client": "extensions/server",
    "wandb": "extensions/wandb/",
    "mlflow": "extensions/mlflow/",
    "tensorboard": "observe/",
    "torch.utils.tensorboard": "observe/",
}

NOT_AT_STARTUP = ("torch", "transformers", "ray", "vllm", "datasets")


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path below src/laurel, and its text."""

    path: str
    text: str

    @property
    def module(self) -> str:
        parts = ["laurel", *Path(self.path).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        return room_of(self.module)


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a file names, wherever in the file, and the line."""

    module: str
    line: int


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


@functools.cache
def imports_of(source: Source) -> tuple[Import, ...]:
    """Every import, also inside functions, under TYPE_CHECKING, and by `import_module("...")`."""
    return tuple(_imports_of(source))


def _imports_of(source: Source) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            for alias in node.names:
                # `from laurel import data` names a room, `from laurel.data import x` names x.
                yield Import(f"{base}.{alias.name}" if alias.name != "*" else base, node.lineno)
        elif isinstance(node, ast.Call) and node.args and _imports_by_name(node.func):
            first = node.args[0]
            yield Import(str(first.value) if isinstance(first, ast.Constant) else "", node.lineno)


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = ["laurel", *Path(source.path).parts[:-1]]
    parent = package[: len(package) - (node.level - 1)]
    return ".".join([*parent, *([node.module] if node.module else [])])


def _imports_by_name(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def broken_layers(sources: list[Source]) -> list[str]:
    found = []
    for source in sources:
        if source.room not in LEVEL:
            found.append(f"{source.path}: '{source.room}' is no room of the house")
            continue
        for imported in imports_of(source):
            room = room_of(imported.module)
            if imported.module.split(".")[0] != "laurel" or room == source.room:
                continue
            if room not in LEVEL and source.room != "laurel":
                room = "laurel"  # a name of the package itself, such as __version__
            if LEVEL.get(room, 0) >= LEVEL[source.room]:
                found.append(f"{source.path}:{imported.line}: {source.room} imports {room}")
    return found


def tangled_extensions(sources: list[Source]) -> list[str]:
    """Extensions that import another one, or a private name of the rest."""
    found = []
    for source in sources:
        if source.room != "extensions" or "/" not in source.path.removeprefix("extensions/"):
            continue
        own = ".".join(source.module.split(".")[:3])
        for imported in imports_of(source):
            parts = imported.module.split(".")
            if parts[0] != "laurel" or f"{imported.module}.".startswith(f"{own}."):
                continue
            if parts[1:2] == ["extensions"]:
                found.append(f"{source.path}:{imported.line}: imports {imported.module}")
            elif any(part.startswith("_") for part in parts[1:]) and parts[-1] != "__version__":
                found.append(f"{source.path}:{imported.line}: imports private {imported.module}")
    return found


def stray_imports(sources: list[Source]) -> list[str]:
    return [
        f"{source.path}:{imported.line}: {library} may be imported only in {home}"
        for source in sources
        for imported in imports_of(source)
        for library, home in HOMES.items()
        if f"{imported.module}.".startswith(f"{library}.") and not source.path.startswith(home)
    ]


_VAGUE = re.compile(
    r"(utils?|common|commons|helpers?|base|misc|miscellaneous|shared|stuff|lib|tools?|core)"
    r"|.*_(utils?|helpers?|common|base|misc|old|new|legacy|v\d+)|v\d+"
)


def vague_names(sources: list[Source]) -> list[str]:
    return [
        f"{source.path}: '{name}' does not say what is inside"
        for source in sources
        for name in Path(source.path).with_suffix("").parts
        if _VAGUE.fullmatch(name.lower())
    ]


_BANNER = re.compile(r"\s*#\s?[-=]{8,}")


def banners(sources: list[Source]) -> list[str]:
    return [
        f"{source.path}:{number}: a banner; a part that wants one wants a file"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), start=1)
        if _BANNER.match(line)
    ]


@pytest.fixture(scope="module")
def house() -> list[Source]:
    root = ROOT / "src" / "laurel"
    files = sorted(root.rglob("*.py"))
    assert len(files) > 10
    return [Source(f.relative_to(root).as_posix(), f.read_text(encoding="utf-8")) for f in files]


def test_rooms_import_only_rooms_below(house: list[Source]) -> None:
    assert broken_layers(house) == []


def test_extensions_stand_apart(house: list[Source]) -> None:
    assert tangled_extensions(house) == []


def test_each_library_has_one_home(house: list[Source]) -> None:
    assert stray_imports(house) == []


def test_names_say_what_is_inside(house: list[Source]) -> None:
    assert vague_names(house) == []


def test_no_file_is_divided_by_banners(house: list[Source]) -> None:
    assert banners(house) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_figure_shows_the_rooms_of_today(theme: str) -> None:
    """`python docs/make_figures.py` draws it anew."""
    figure = (ROOT / "docs" / "assets" / f"rooms-{theme}.svg").read_text(encoding="utf-8")
    shown = ([room for room in layer if room != "__main__"] for layer in LAYERS[1:])
    assert f"low to high: {'; '.join(', '.join(layer) for layer in shown)}</title>" in figure


def test_the_house_is_easy_to_find_ones_way_in() -> None:
    form = House()
    assert form.circles() == []
    assert len(form.skips()) <= 10


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_command_line_starts_light(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from laurel.cli.main import main\n"
        f"arguments = {arguments!r}\n"
        "if arguments:\n"
        "    sys.argv = ['laurel', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        f"print('loaded:', [name for name in {NOT_AT_STARTUP!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
    assert ("Usage" in done.stdout) == bool(arguments)


def test_a_room_above_is_seen() -> None:
    planted = [
        Source("models/a.py", "from laurel.training import learner\n"),
        Source("models/b.py", "def f():\n    import laurel.cli.main\n"),
        Source(
            "config/c.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from laurel import data\n",
        ),
        Source("data/d.py", "from laurel.models.loading.reward_model import load\n"),
        Source("data/e.py", "from ..models import load\n"),
        Source("errors.py", "from laurel.types import Group\n"),
        Source("__init__.py", "from laurel.config.load import load_config\n"),
        Source("rewards/f.py", "import importlib\nimportlib.import_module('laurel.evaluation')\n"),
        Source("kitchen/g.py", "import os\n"),
    ]
    assert broken_layers(planted) == [
        "models/a.py:1: models imports training",
        "models/b.py:2: models imports cli",
        "config/c.py:3: config imports data",
        "data/d.py:1: data imports models",
        "data/e.py:1: data imports models",
        "errors.py:1: errors imports types",
        "__init__.py:1: laurel imports config",
        "rewards/f.py:2: rewards imports evaluation",
        "kitchen/g.py: 'kitchen' is no room of the house",
    ]


def test_a_tangled_extension_is_seen() -> None:
    planted = [
        Source("extensions/__init__.py", "from laurel.plugins import _read\n"),
        Source(
            "extensions/a/x.py",
            "from laurel import __version__\nfrom laurel.extensions.a import y\n"
            "from laurel.extensions.b import z\nfrom laurel.config.load import _field\n"
            "def f():\n    from laurel.extensions import ab\n",
        ),
        Source("extensions/a/y.py", "from . import x\nfrom laurel.models import load\n"),
        Source("config/c.py", "from laurel.extensions.a import x\n"),
    ]
    assert tangled_extensions(planted) == [
        "extensions/a/x.py:3: imports laurel.extensions.b.z",
        "extensions/a/x.py:4: imports private laurel.config.load._field",
        "extensions/a/x.py:6: imports laurel.extensions.ab",
    ]
    assert broken_layers(planted) == ["config/c.py:1: config imports extensions"]


def test_a_second_importer_is_seen() -> None:
    planted = [
        Source("workers/ray_group.py", "import ray\nimport ray.util\n"),
        Source("training/a.py", "def f():\n    import ray\n"),
        Source("generation/b.py", "from vllm.sampling import Parameters\n"),
        Source("rewards/client.py", "from fastapi import FastAPI\n"),
        Source("training/c.py", "from torch.utils.tensorboard import SummaryWriter\n"),
        Source("training/d.py", "from torch.utils import tensorboard\n"),
        Source("extensions/wandb/e.py", "import wandb\n"),
        Source("cli/f.py", "import wandb\nimport raytracer\n"),
    ]
    assert [line.split(" may")[0] for line in stray_imports(planted)] == [
        "training/a.py:2: ray",
        "generation/b.py:1: vllm",
        "rewards/client.py:1: fastapi",
        "training/c.py:1: torch.utils.tensorboard",
        "training/d.py:1: torch.utils.tensorboard",
        "cli/f.py:1: wandb",
    ]


def test_a_banner_is_seen() -> None:
    text = f"x = 1\n\n# {'-' * 20} parts\n    #{'=' * 9}\ny = 2  # {'-' * 9}\n"
    found = [line.split(": ")[0] for line in banners([Source("data/a.py", text)])]
    assert found == ["data/a.py:3", "data/a.py:4"]


def test_a_vague_name_is_seen() -> None:
    vague = [
        "utils.py",
        "common/x.py",
        "helpers.py",
        "base.py",
        "load_v2.py",
        "data_utils.py",
        "loader_old.py",
        "misc.py",
    ]
    clear = ["loader.py", "baseline.py", "commonality.py", "helpsteer.py", "v.py", "news.py"]
    found = vague_names([Source(f"data/{name}", "") for name in [*vague, *clear]])
    assert [line.split(":")[0] for line in found] == [f"data/{name}" for name in vague]


def test_a_maze_is_seen(tmp_path: Path) -> None:
    sources = {
        "models/a.py": "from laurel.models import b\n",
        "models/b.py": "def f():\n    from laurel.models.c import g\n",
        "models/c.py": "import laurel.models.a\nx = [1,2]  # fmt: skip\n",
        "data/d.py": "from laurel.data.e import f\n",
        "data/e.py": "def f(run: GRPORun): ...\n",
        "data/g.py": "def f(policy: PolicyConfig | None = None): ...\nclass RunLength: ...\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    form = House(tmp_path)
    assert form.circles() == [["models/a.py", "models/b.py", "models/c.py"]]
    assert form.visited_by_the_run() == ["data/e.py", "data/g.py"]
    assert form.names_defined_twice() == ["f"]
    assert form.skips() == ["models/c.py:2"]
