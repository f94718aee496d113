"""Losses and their gradients on fixed scores and log-probabilities, bit for bit in float32.

A change that means to leave the numbers alone must leave `losses.json` alone. One that means to
move them writes it anew and says why; the reason is kept in the file and belongs in the commit::

    python tests/golden/test_golden_losses.py --because "what changed, and why it is right"

Bits are promised where torch's own elementary functions give the bits they gave when the file was
written (they are in it too). On a processor or a torch where they do not, nothing of ours could,
and the numbers are compared to a few units in the last place instead.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from laurel.config.grpo import PolicyLossConfig
from laurel.config.reward_model import LossConfig
from laurel.extensions.reward_losses.losses import (
    davidson,
    plackett_luce,
    rao_kupper,
    regression,
)
from laurel.models.forest.outputs import TokenOutputs
from laurel.training.losses import (
    RewardLoss,
    bradley_terry,
    centering,
    ranked_pairs,
)
from laurel.training.policy_loss import (
    DemonstrationLabels,
    DemonstrationLoss,
    PolicyLabels,
    PolicyLoss,
)
from laurel.types import Preference, group_of

GOLDEN = Path(__file__).with_name("losses.json")

BETTER = (
    0.0,
    1.0,
    -1.0,
    0.3,
    2.71828,
    -0.0625,
    11.5,
    -7.25,
    1e-6,
    88.0,
    -103.0,
    1e4,
    -1e4,
    3.14159,
    -2.5,
    0.7,
    19.99,
    -20.01,
    0.1,
    5.0,
)
WORSE = (
    0.0,
    0.0,
    2.0,
    0.9,
    -1.41421,
    0.0625,
    -3.5,
    7.5,
    -1e-6,
    -1.0,
    4.0,
    -1e4,
    1e4,
    3.14158,
    2.25,
    -0.6,
    0.0,
    0.0,
    0.1,
    -15.5,
)
MARGIN = (0.0, 0.5, 1.0, 2.0, 3.0) * 4
TARGET = (1.0, 0.9, 0.75, 0.6, 0.5) * 4
IS_TIE = (True, False, False, True) * 5

RANKS = ((0, 1), (1, 0), (0, 1, 2), (2, 2, 1, 0), (0, 0), (0, 1, 1, 2, 5), (1, 0))
"""20 completions in 7 groups."""
RATINGS = ((0.5, math.nan), (math.nan, math.nan), (-1.0, 4.0), (math.nan, 0.25)) * 5


def single(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def batch() -> list[Preference]:
    """The groups of `RANKS`; the fifth, which is one tie, was rated by nobody."""
    preferences, start = [], 0
    for index, ranks in enumerate(RANKS):
        group = group_of([], ["answer"] * len(ranks), group_id=str(index))
        ratings = RATINGS[start : start + len(ranks)] if index != 4 else None
        preferences.append(
            Preference(group=group, ranks_G=ranks, margin=MARGIN[index], attributes_GK=ratings)
        )
        start += len(ranks)
    return preferences


def whole_loss(better: Tensor, worse: Tensor, **chosen: Any) -> Tensor:
    loss, preferences = RewardLoss(LossConfig(**chosen)), batch()
    columns = [better, worse] if chosen.get("type") == "regression" else [better]
    scores_NK = torch.stack(columns, dim=1)
    # Squeezed into (-4, 4): in a sum with 20000 the other terms would lose their digits.
    scores_NK = 4.0 * scores_NK / (1.0 + scores_NK.abs())
    return loss(scores_NK, preferences, num_groups=loss.count(preferences)).loss.view(1)


LENGTHS = (3, 5, 1, 4, 7)
"""20 tokens of 5 completions in 2 groups: three, and two."""
ADVANTAGES = (1.5, -0.75, 0.25, -2.0, 1.0)


def logprobs(better: Tensor) -> Tensor:
    """Squeezed into (-4, 0]."""
    return -4.0 * better.abs() / (1.0 + better.abs())


def policy_batch() -> list[PolicyLabels]:
    """Labels in which nearly every rule has something to do; the third completion is left out."""
    place = np.arange(20)
    current = logprobs(single(BETTER)).numpy()
    streams = {
        "behaviour": current - 0.3 * np.cos(3.0 * place),
        "old": current - 0.5 * np.sin(place),
        "reference": current + np.cos(place),
    }
    # Rounded, so that the labels do not hang on the bits of numpy's sine.
    cut = {
        name: np.split(np.round(v, 3).astype(np.float32), np.cumsum(LENGTHS)[:-1])
        for name, v in streams.items()
    }
    masks = np.split(place % 4 != 1, np.cumsum(LENGTHS)[:-1])
    return [
        PolicyLabels(
            masks_GL=tuple(masks[a:b]),
            advantages_G=ADVANTAGES[a:b],
            used_G=tuple(i != 2 for i in range(a, b)),
            behaviour_GL=tuple(cut["behaviour"][a:b]),
            old_GL=tuple(cut["old"][a:b]),
            reference_GL=tuple(cut["reference"][a:b]),
            rewards_G=(1.0, 0.0, None, -1.0, 1.0)[a:b],
        )
        for a, b in ((0, 3), (3, 5))
    ]


def policy_loss(better: Tensor, _worse: Tensor, **chosen: Any) -> Tensor:
    loss, labels = PolicyLoss(PolicyLossConfig(**chosen), max_length=9), policy_batch()
    outputs = TokenOutputs(logprobs(better), None)
    return loss(outputs, labels, num_groups=loss.count(labels)).loss.view(1)


def demonstration_loss(better: Tensor, _worse: Tensor) -> Tensor:
    labels = [DemonstrationLabels(masks_GL=row.masks_GL) for row in policy_batch()]
    loss, outputs = DemonstrationLoss(), TokenOutputs(logprobs(better), None)
    return loss(outputs, labels, num_groups=loss.count(labels)).loss.view(1)


def elementary(better: Tensor, worse: Tensor) -> Tensor:
    """What torch itself makes of these numbers."""
    logs = [torch.log(better.abs() + 0.5), torch.exp(-worse.abs()), torch.expm1(-worse.abs())]
    return torch.cat(
        [torch.nn.functional.logsigmoid(better), torch.logaddexp(better, worse), *logs]
    )


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bradley_terry": bradley_terry,
    "bradley_terry with everything": partial(
        bradley_terry, margin_P=single(MARGIN), target_P=single(TARGET), label_smoothing=0.1
    ),
    "davidson": partial(davidson, is_tie_P=torch.tensor(IS_TIE), nu=0.8),
    "davidson, smoothed": partial(
        davidson, is_tie_P=torch.tensor(IS_TIE), nu=0.8, label_smoothing=0.1
    ),
    "rao_kupper": partial(rao_kupper, is_tie_P=torch.tensor(IS_TIE), theta=1.5),
    "rao_kupper, smoothed": partial(
        rao_kupper, is_tie_P=torch.tensor(IS_TIE), theta=1.5, label_smoothing=0.1
    ),
    "centering": centering,
    "plackett_luce": lambda better, worse: plackett_luce(
        better - worse / 2, ranked_pairs(RANKS, with_ties=False).to(better)
    ),
    "regression": lambda better, worse: regression(
        torch.stack([better, worse], dim=1), torch.tensor(RATINGS, dtype=torch.float32)
    ),
    "rm.loss bradley_terry": partial(whole_loss, use_margin=True, label_smoothing=0.05),
    "rm.loss centred": partial(whole_loss, center_rewards_coefficient=0.01),
    "rm.loss plackett_luce": partial(whole_loss, type="plackett_luce"),
    "rm.loss davidson": partial(whole_loss, type="davidson"),
    "rm.loss rao_kupper": partial(whole_loss, type="rao_kupper", tie_parameter=0.5),
    "rm.loss regression": partial(whole_loss, type="regression"),
    "loss_fn ppo": policy_loss,
    "loss_fn ppo with everything": partial(
        policy_loss,
        ratio_clip_max=0.28,
        ratio_clip_c=1.5,
        positive_example_nll_weight=0.1,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.2,
        use_on_policy_kl_approximation=True,
    ),
    "loss_fn cispo": partial(policy_loss, loss_type="cispo", reference_policy_kl_type="k1"),
    "loss_fn reinforce": partial(
        policy_loss, loss_type="reinforce", token_level_loss=False, reference_policy_kl_type="k2"
    ),
    "loss_fn gspo": partial(
        policy_loss, sequence_level_importance_ratios=True, token_level_loss=False
    ),
    "loss_fn dr grpo": partial(policy_loss, normalizer="max_length"),
    "loss_fn icepop": partial(
        policy_loss,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=1.2,
        truncated_importance_sampling_ratio_min=0.8,
    ),
    "sft": demonstration_loss,
}


def measure(function: Callable[[Tensor, Tensor], Tensor]) -> dict[str, list[float]]:
    """The values of a function, and the gradient of their sum, as Python floats (exact)."""
    better, worse = (single(side).requires_grad_() for side in (BETTER, WORSE))
    values = function(better, worse)
    assert values.dtype == torch.float32
    gradients = torch.autograd.grad(values.sum(), (better, worse), materialize_grads=True)
    return {"values": values.tolist(), "gradient": torch.cat(gradients).tolist()}


def in_hex(measured: dict[str, list[float]]) -> dict[str, list[str]]:
    return {name: [number.hex() for number in numbers] for name, numbers in measured.items()}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return stored


@pytest.mark.parametrize("name", CASES)
def test_losses_are_what_they_were(name: str, golden: dict[str, Any]) -> None:
    found = measure(CASES[name])
    if in_hex(measure(elementary)) == golden["elementary"]:
        assert in_hex(found) == golden["cases"][name]
        return
    for part, numbers in golden["cases"][name].items():
        expected = [float.fromhex(number) for number in numbers]
        assert found[part] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_file_holds_these_cases_and_a_reason(golden: dict[str, Any]) -> None:
    assert list(golden["cases"]) == list(CASES)
    assert golden["because"]


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--because", required=True, help="why the numbers move")
    content = {
        "because": parser.parse_args().because,
        "torch": torch.__version__,
        "elementary": in_hex(measure(elementary)),
        "cases": {name: in_hex(measure(function)) for name, function in CASES.items()},
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
