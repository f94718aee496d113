"""Which benchmark a file is of."""

import json

import pytest

from laurel.errors import DataError
from laurel.extensions.evaluation.rows import ON_HUB, benchmark_in


def test_files_and_places_on_the_hub(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    assert benchmark_in(str(path), split=None) == "pairs"
    for name, form in ON_HUB.items():
        assert benchmark_in(form.hub[0].name, split=None) == name, "without a look at the hub"
    path.write_text(json.dumps({"prompt": "q", "completions": ["a"], "labels": [True]}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: These label each step: laurel rm trains"):
        benchmark_in(str(path), split=None)
    path.write_text(json.dumps({"text": "a", "label": 1}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1: the columns \(text, label\) are those of"):
        benchmark_in(str(path), split=None)
