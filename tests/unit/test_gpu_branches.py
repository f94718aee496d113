"""No branch for CUDA is without a test in tests/gpu, whether or not a GPU is here to run it."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests" / "gpu"


def table():
    spec = importlib.util.spec_from_file_location("branches", GPU / "branches.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_with_a_branch_names_a_test():
    branches = table()
    source = ROOT / "src" / "laurel"
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(branches.CUDA, path.read_text(encoding="utf-8"))
    }
    assert found == set(branches.BRANCHES)


def test_every_test_that_is_named_is_there():
    for place in table().BRANCHES.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (GPU / file).read_text(encoding="utf-8"), place
