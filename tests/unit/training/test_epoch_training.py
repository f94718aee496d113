"""How long a run over a training set is, which rows its steps read, and what it is validated on."""

import signal
from dataclasses import dataclass
from unittest.mock import MagicMock

import numpy as np
import pytest

from laurel.config.reward_model import RewardTrainingConfig
from laurel.config.sft import SFTConfig
from laurel.training.epochs import (
    EpochParts,
    EpochTraining,
    StepOrder,
    rows_to_validate,
    total_steps,
)
from laurel.training.loop import Interrupted
from laurel.types import TokenGroup

SECTIONS = {"rm": RewardTrainingConfig, "sft": SFTConfig}


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("rows", "epochs", "limit", "steps"),
    [(8, 1, -1, 2), (9, 1, -1, 3), (9, 3, -1, 9), (9, 3, 7, 7), (9, 3, 99, 9), (9, 3, 0, 0)],
)
def test_steps_of_all_epochs_or_the_limit(section, rows, epochs, limit, steps):
    chosen = SECTIONS[section].model_validate({"max_num_epochs": epochs, "max_num_steps": limit})
    order = StepOrder(rows, 4, shuffle=False, seed=0)
    assert total_steps(chosen, order) == steps


@dataclass(frozen=True)
class Row:
    tokens: TokenGroup


ROWS = [
    Row(TokenGroup(id=str(i), trunk_ids=np.array([1], dtype=np.int32), branches_ids_G=()))
    for i in range(4)
]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("batches", "size", "used"), [(-1, 2, 4), (0, 2, 4), (1, 2, 2), (1, 3, 3), (9, 2, 4)]
)
def test_a_limit_of_validation_batches(section, batches, size, used):
    limits = {"val_batches": batches, "val_global_batch_size": size}
    assert rows_to_validate(ROWS, SECTIONS[section].model_validate(limits)) == ROWS[:used]


class Validated(EpochTraining):
    """Validates row by row; a signal comes after the second."""

    def validate(self, samples, micro_batches, on_rows):
        for number, _ in enumerate(samples, 1):
            self.number = number
            if number == 2:
                self.services.stop.signal = signal.SIGTERM
            on_rows(1)

    def label(self, sample):
        return sample.tokens.id

    def report(self, *args, **kwargs):
        raise AssertionError

    count_bad_steps = report


def test_a_signal_breaks_a_validation_off_between_its_rows():
    services = MagicMock()
    services.stop.signal = None
    parts = EpochParts(
        learner=MagicMock(),
        batcher=MagicMock(),
        train=ROWS,
        order=StepOrder(len(ROWS), 2, shuffle=False, seed=0),
        validation={"default": ROWS},
    )
    run = Validated(RewardTrainingConfig(), services, parts, loss=MagicMock())
    with pytest.raises(Interrupted):
        run.measure(1)
    assert run.number == 2
