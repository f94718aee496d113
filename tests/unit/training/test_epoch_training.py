"""How long a run over a training set is, which rows its steps read, and what it is validated on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.training.epochs import rows_to_validate, section_of, step_order, total_steps
from laurel.types import TokenGroup


def run_of(section: str, *, shuffle: bool = False, **changes: int) -> RewardTrainingRun | SFTRun:
    """A run of four rows a step."""
    policy = {"train_global_batch_size": 4}
    rest = {section: changes, "data": {"shuffle": shuffle}}
    if section == "sft":
        return SFTRun.model_validate({"policy": policy, **rest})
    reward_model = {"reward_model_cfg": {"enabled": True}}
    return RewardTrainingRun.model_validate({"policy": policy | reward_model, **rest})


@pytest.mark.parametrize("section", ["rm", "sft"])
@pytest.mark.parametrize(
    ("rows", "epochs", "limit", "steps"),
    [(8, 1, -1, 2), (9, 1, -1, 3), (9, 3, -1, 9), (9, 3, 7, 7), (9, 3, 99, 9), (9, 3, 0, 0)],
)
def test_steps_of_all_epochs_or_the_limit(
    section: str, rows: int, epochs: int, limit: int, steps: int
) -> None:
    config = run_of(section, max_num_epochs=epochs, max_num_steps=limit)
    assert total_steps(config, rows) == steps


@pytest.mark.parametrize("section", ["rm", "sft"])
def test_the_order_is_that_of_the_file_or_of_the_seed(section: str) -> None:
    in_order = step_order(run_of(section), 9)
    assert [in_order.rows(step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]

    def shuffled(seed: int) -> list[int]:
        order = step_order(run_of(section, shuffle=True, seed=seed), 9)
        return [row for step in range(3) for row in order.rows(step)]

    assert sorted(shuffled(1)) == list(range(9))
    assert shuffled(1) == shuffled(1) != shuffled(2)


@dataclass(frozen=True)
class Row:
    tokens: TokenGroup


ROWS = [
    Row(TokenGroup(id=str(i), trunk_ids=np.array([1], dtype=np.int32), branches_ids_G=()))
    for i in range(4)
]


@pytest.mark.parametrize("section", ["rm", "sft"])
@pytest.mark.parametrize(
    ("batches", "size", "used"), [(-1, 2, 4), (0, 2, 4), (1, 2, 2), (1, 3, 3), (9, 2, 4)]
)
def test_a_limit_of_validation_batches(section: str, batches: int, size: int, used: int) -> None:
    config = run_of(section, val_batches=batches, val_global_batch_size=size)
    assert rows_to_validate(ROWS, section_of(config)) == ROWS[:used]
