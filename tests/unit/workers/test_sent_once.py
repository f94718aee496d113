"""What a driver sends to the ranks of a learner: each distinct micro-batch once, as arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("laurel.workers.ray_group", exc_type=ImportError)

from laurel.data.forest import MicroBatch, to_forest
from laurel.models.spec import ParallelShape
from laurel.training.learner import StepReport
from laurel.training.learner_group import LearnerGroup
from laurel.training.policy_loss import PolicyLabels
from laurel.types import TokenGroup
from laurel.workers.calls import GroupCalls, WorkerCall
from laurel.workers.ray_group import sent_once
from laurel.workers.worker_actor import Packed

LENGTH = 5_000


class Group(GroupCalls):
    """Keeps what its ranks are sent."""

    def __init__(self, size: int) -> None:
        self.role, self.size = "policy", size
        self.sent: list[Packed] = []
        self.of_ranks: list[int] = []

    def _submit(self, calls: Any) -> Any:
        def send(payload: Packed) -> int:
            self.sent.append(payload)
            return len(self.sent) - 1

        of_ranks = sent_once(calls, send)
        self.of_ranks = [of_ranks[rank][0] for rank in calls]
        if calls[0].method == "take_step":
            report = StepReport(sums={}, learning_rate=0.1, grad_norm=1.0)
            return SimpleNamespace(wait=lambda timeout=None: [(report, 0.1)] * len(calls))
        described = SimpleNamespace(num_trained=1, num_parameters=1)
        return SimpleNamespace(
            wait=lambda timeout=None: [described if calls[0].method == "describe" else 0.1]
        )

    def shutdown(self) -> None: ...


class Loss:
    """Counts completions."""

    def count(self, batch: Any) -> float:
        return float(len(batch))

    def metrics(self, sums: Any) -> dict[str, float]:
        return {}


def micro_batch(number: int) -> MicroBatch[PolicyLabels]:
    ids_L = np.arange(LENGTH, dtype=np.int32) + number
    group = TokenGroup(id=str(number), trunk_ids=ids_L[:3], branches_ids_G=(ids_L,))
    labels = PolicyLabels(
        masks_GL=(np.ones(LENGTH, dtype=bool),),
        advantages_G=(1.0,),
        used_G=(True,),
        behaviour_GL=(np.full(LENGTH, -float(number), dtype=np.float32),),
        rewards_G=(1.0,),
    )
    return MicroBatch(inputs=to_forest([group]), labels=[labels], num_tokens=LENGTH + 3)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (2, 3)])
def test_a_micro_batch_is_sent_once_whatever_tp_x_cp(tp: int, cp: int) -> None:
    shape = ParallelShape(dp_shard=2, tp=tp, cp=cp)
    group = Group(shape.num_ranks)
    learner = LearnerGroup(group, shape)
    group.sent.clear()
    learner.update([micro_batch(number) for number in range(4)], Loss())
    assert len(group.sent) == 2
    assert group.of_ranks == [0] * (tp * cp) + [1] * (tp * cp)
    firsts = []
    for payload in group.sent:
        _, call = payload.value()
        firsts += [int(one.inputs.ids_T[0]) for one in call.args[0]]
    assert sorted(firsts) == [0, 1, 2, 3]


def test_tokens_travel_as_arrays_beside_the_pickle() -> None:
    sent: list[Packed] = []
    sent_once({0: WorkerCall("take_step", ([micro_batch(7)],))}, sent.append)
    (payload,) = sent
    sizes = sorted(buffer.nbytes for buffer in payload.buffers)
    assert sizes == [LENGTH, 4 * LENGTH, 4 * (LENGTH + 3)], "masks, log-probabilities and tokens"
    assert len(payload.head) < 4096, "and no object for each of them"
    _, call = payload.value()
    (found,), wanted = call.args[0], micro_batch(7)
    assert torch.equal(found.inputs.ids_T, wanted.inputs.ids_T)
    assert found.inputs.ids_T.dtype == torch.int32
    np.testing.assert_array_equal(found.labels[0].behaviour_GL[0], wanted.labels[0].behaviour_GL[0])
    found.inputs.ids_T[0] = 1  # it is the worker's own
    found.labels[0].masks_GL[0][0] = False


def test_forests_and_labels_arrive_as_they_were_sent() -> None:
    ids = [np.arange(size, dtype=np.int32) for size in (3, 2, 5, 0, 4)]
    groups = [
        TokenGroup(id="0", trunk_ids=ids[0], branches_ids_G=(ids[1], ids[2])),
        TokenGroup(id="1", trunk_ids=ids[3], branches_ids_G=(ids[4],)),
    ]
    values = [np.arange(size, dtype=np.float32) for size in (2, 5)]
    labels = PolicyLabels(
        masks_GL=(np.array([True, False]), np.ones(5, dtype=bool)),
        advantages_G=(1.0, -1.0),
        used_G=(True, False),
        behaviour_GL=(values[0], values[1]),
        reference_GL=(-values[0], -values[1]),
        rewards_G=(1.0, None),
    )
    sent: list[Packed] = []
    forests = [to_forest(groups), to_forest(groups, share_prompts=False)]
    sent_once({0: WorkerCall("take", (forests, labels))}, sent.append)
    _, call = sent[0].value()
    found_forests, found = call.args
    for one, other in zip(found_forests, forests, strict=True):
        assert one.trees == other.trees
        assert torch.equal(one.ids_T, other.ids_T)
        assert torch.equal(one.positions_T, other.positions_T)
    for name in ("masks_GL", "behaviour_GL", "reference_GL"):
        for row, wanted in zip(getattr(found, name), getattr(labels, name), strict=True):
            np.testing.assert_array_equal(row, wanted)
            assert row.dtype == wanted.dtype
    assert found.old_GL is None
    assert found.advantages_G == labels.advantages_G
    assert (found.used_G, found.rewards_G) == (labels.used_G, labels.rewards_G)


def test_tensors_that_are_no_plain_arrays_travel_too() -> None:
    values = [
        torch.arange(6.0).view(2, 3).T,
        torch.ones(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.tensor(3.0),
    ]
    sent: list[Packed] = []
    sent_once({0: WorkerCall("take", (values,))}, sent.append)
    _, call = sent[0].value()
    for found, wanted in zip(call.args[0], values, strict=True):
        assert type(found) is type(wanted)
        assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
        assert torch.equal(found, wanted)
