"""`lf` of docs/export.md: a reward model in the form that LLaMA-Factory leaves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "models"))
from test_value_heads import llama_factory

llama_factory(Path("lf"))
