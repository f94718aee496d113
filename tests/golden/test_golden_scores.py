"""Scores of fixed weights on fixed tokens, for one model of each kind of attention.

The expected numbers come from transformers itself, each sequence alone in its own forward pass in
float64, so what is kept here is not what the forest once computed. They move when a version of
transformers computes a model differently, and then every reward model of that kind scores
differently too: that should be known. To write them anew, with the reason that belongs in the
commit::

    python tests/golden/test_golden_scores.py --because "what changed, and why it is right"
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

GOLDEN = Path(__file__).with_name("scores.json")
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny  # noqa: E402
from laurel.data.forest import to_forest  # noqa: E402
from laurel.models.forest.decoder import RewardModel  # noqa: E402
from laurel.types import TokenGroup  # noqa: E402

NAMES = (
    "qwen2-sliding",
    "qwen3",
    "llama",
    "mistral-sliding",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "olmo2",
    "gpt-oss",
)
SHAPES = ((31, (4, 1, 22)), (0, (9,)), (2, (3, 3)))


def fixed_groups() -> list[TokenGroup]:
    """Tokens by a formula, so that they are these for good."""

    def ids(start: int, length: int) -> Any:
        number = np.arange(start, start + length, dtype=np.int64)
        return (3 + (7 * number * number + 11 * number) % (tiny.VOCABULARY - 3)).astype(np.int32)

    return [
        TokenGroup(
            id="",
            trunk_ids=ids(100 * i, trunk),
            branches_ids_G=tuple(ids(100 * i + 37 * j + 5, n) for j, n in enumerate(branches)),
        )
        for i, (trunk, branches) in enumerate(SHAPES)
    ]


def fixed_model(name: str, dtype: torch.dtype) -> RewardModel:
    """Weights from the bit generator alone, whose stream numpy promises to keep."""
    model = tiny.tiny_reward_model(name, dtype=dtype)
    with torch.no_grad():
        for key, parameter in sorted(model.classifier.named_parameters()):
            bits = np.random.PCG64(zlib.crc32(f"{name} {key}".encode()))
            drawn = (bits.random_raw(parameter.numel()) >> np.uint64(11)) * 2.0**-53
            spread = torch.from_numpy(drawn - 0.5).view(parameter.shape)
            parameter.copy_(spread * 0.5 + (parameter.ndim == 1 and "norm" in key))
    return model


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_what_they_were(name: str, golden: dict[str, Any]) -> None:
    expected = golden["scores"][name]
    with torch.inference_mode():
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 5e-6)):
            scores_NK = fixed_model(name, dtype)(to_forest(fixed_groups()))
            assert scores_NK[:, 0].tolist() == pytest.approx(expected, abs=tolerance)


def test_the_file_holds_these_models_and_a_reason(golden: dict[str, Any]) -> None:
    assert list(golden["scores"]) == list(NAMES)
    assert golden["because"]
    for scores in golden["scores"].values():
        assert len({round(score, 3) for score in scores}) == 6  # they tell sequences apart


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--because", required=True, help="why the numbers move")
    because = parser.parse_args().because
    scores = {}
    for name in NAMES:
        model = fixed_model(name, torch.float64)
        with torch.inference_mode():
            own_NK = tiny.one_by_one(model, fixed_groups(), tiny.own_attention(model.classifier))
        scores[name] = own_NK[:, 0].tolist()
    content = {"because": because, "transformers": transformers.__version__, "scores": scores}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
