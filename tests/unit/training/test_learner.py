"""One optimizer step: gradient accumulation, refused steps, optimizers and schedules by name."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laurel.config.policy import Milestones, NamedCall
from laurel.config.reward_model import LossConfig
from laurel.data.forest import MicroBatch
from laurel.errors import ConfigError
from laurel.models.forest.outputs import TokenOutputs
from laurel.training.learner import LocalLearner
from laurel.training.losses import LossOutput, RewardLoss
from laurel.types import Preference, group_of
from policy_batches import labels, loss_of

torch.set_num_threads(1)  # more only cost, at this size

ADAMW = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 0.1, "betas": [0.9, 0.98]})


def sgd(**kwargs):
    return NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0, **kwargs})


class Mean:
    """The mean of what the model gives; a label is the share that its row counts."""

    def __init__(self, change=lambda loss: loss):
        self.change = change
        self.calls = 0

    def count(self, batch, /):
        return math.fsum(batch)

    def __call__(self, outputs, batch, /, *, num_groups):
        self.calls += 1
        total = (outputs[:, 0] * outputs.new_tensor(batch)).sum()
        return LossOutput(
            loss=self.change(total / num_groups),
            sums={"loss": total.detach(), "rows": torch.tensor(float(len(batch)))},
        )

    def metrics(self, sums, /):
        return {name: float(value) for name, value in sums.items()}


def weights_only(*weights):
    """A model whose output is the product of its weights and its inputs."""
    model = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def batch_of(*rows, labels=()):
    inputs: Any = torch.tensor(rows)
    return MicroBatch(inputs=inputs, labels=labels or [1.0] * len(rows), num_tokens=len(rows))


def weights(learner):
    return [float(w) for _, p in learner.named_parameters for w in p.detach().flatten()]


@pytest.mark.parametrize("num_micro_batches", [1, 9])
def test_the_host_reads_back_twice_in_a_step(num_micro_batches):
    """Whether the step is sound, with the norm of the gradient; and the sums."""
    learner = LocalLearner(weights_only(1.0, 2.0), optimizer=sgd(), max_grad_norm=1.0)
    loss = Mean()
    with Reads() as reads:
        batch = [batch_of((1.0, 0.5))] * num_micro_batches
        step = learner.take_step(batch, loss, denominator=1.0)
    assert step.failure is None
    assert loss.calls == num_micro_batches
    assert reads.count == 2


class Reads(TorchFunctionMode):
    """Counts what a host would wait for a GPU for: numbers of tensors that Python is given."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in self.NAMES
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(type="davidson", use_margin=True)])
def test_the_loss_of_a_reward_model_reads_nothing_back(config):
    """On tensors that have shapes and no numbers, reading one back fails."""
    preferences = [preference for _, preference in ROWS]
    num_rows = sum(len(preference.ranks_G) for preference in preferences)
    scores_NK = torch.zeros(num_rows, 1, device="meta", requires_grad=True)
    found = RewardLoss(config)(scores_NK, preferences, num_groups=7.0)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert scores_NK.grad is not None
    assert {value.device.type for value in found.sums.values()} == {"meta"}


def test_the_loss_of_a_policy_reads_nothing_back():
    rows = [[-1.0, -2.0], [-0.5]]
    batch = [labels([1.0, -1.0], rows, old=rows, reference=rows, used=[True, False])] * 2
    loss = loss_of(reference_policy_kl_penalty=0.1, normalizer="sequences")
    logprobs_M = torch.zeros(6, device="meta", requires_grad=True)
    found = loss(TokenOutputs(logprobs_M, torch.zeros_like(logprobs_M)), batch, num_groups=2.0)
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs_M.grad is not None
    assert {value.device.type for value in found.sums.values()} == {"meta"}


def test_a_step_of_two_micro_batches_by_hand():
    learner = LocalLearner(weights_only(1.0, 2.0), optimizer=sgd(lr=0.5))
    loss = Mean()
    update = learner.update([batch_of((1.0, 0.0), (3.0, 2.0)), batch_of((2.0, 4.0))], loss)
    # Outputs 1, 7, 10: mean 6. Gradient: the mean row, (2, 2), of norm sqrt 8. Step: 0.5 of it.
    assert loss.calls == 2
    assert update.failure is None
    assert update.metrics == {
        "loss": 18.0,
        "rows": 3.0,
        "grad_norm": pytest.approx(math.sqrt(8)),
        "lr": 0.5,
    }
    assert weights(learner) == [0.0, 1.0]


def test_gradients_of_the_step_before_do_not_count():
    learner = LocalLearner(weights_only(0.0), optimizer=sgd())
    for _ in range(2):
        learner.update([batch_of((1.0,))], Mean())
    assert weights(learner) == [-2.0]


def scorer():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


def judged_rows(generator):
    rows = []
    for index, ranks in enumerate(
        [(0, 1), (0, 0), (1, 0), (0, 1, 2), (2, 0, 1, 1), (0, 1), (1, 0)]
    ):
        group = group_of([], [f"answer {i}" for i in ranks], group_id=str(index))
        preference = Preference(group=group, ranks_G=ranks, margin=0.1 * index)
        rows.append((torch.randn(len(ranks), 5, generator=generator), preference))
    return rows


ROWS = judged_rows(torch.Generator().manual_seed(1))
LOSSES = [
    LossConfig(),
    LossConfig(use_margin=True, label_smoothing=0.1, center_rewards_coefficient=0.2),
    LossConfig(type="davidson"),
    LossConfig(type="plackett_luce"),
]


def update_by_cut(config, cut):
    learner = LocalLearner(scorer(), optimizer=sgd(lr=0.1), max_grad_norm=0.5)
    batch = []
    for part in cut:
        inputs: Any = torch.cat([ROWS[i][0] for i in part])
        batch.append(MicroBatch(inputs=inputs, labels=[ROWS[i][1] for i in part], num_tokens=0))
    return learner, learner.update(batch, RewardLoss(config))


@st.composite
def cuts(draw):
    order = draw(st.permutations(range(len(ROWS))))
    borders = sorted(draw(st.sets(st.integers(1, len(ROWS) - 1))))
    return [order[a:b] for a, b in zip([0, *borders], [*borders, len(ROWS)], strict=True)]


@pytest.mark.parametrize("config", LOSSES, ids=lambda c: c.type + ("+" if c.use_margin else ""))
@given(cut=cuts())
@hypothesis_settings(max_examples=15, deadline=None)
def test_any_cut_into_micro_batches_is_the_same_step(config, cut):
    whole, expected = update_by_cut(config, [list(range(len(ROWS)))])
    parts, found = update_by_cut(config, cut)
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
    for (_, one), (_, other) in zip(whole.named_parameters, parts.named_parameters, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 1e-6 * torch.linalg.vector_norm(one)


def state_of(learner):
    scheduler = learner.scheduler and learner.scheduler.state_dict()
    return copy.deepcopy((learner.model.state_dict(), learner.optimizer.state_dict(), scheduler))


def assert_same(found, expected):
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


def warmed_up():
    """A learner whose optimizer and schedule have a state that a step would change."""
    schedule = NamedCall(name="torch.optim.lr_scheduler.ExponentialLR", kwargs={"gamma": 0.5})
    learner = LocalLearner(weights_only(1.0, 2.0), optimizer=ADAMW, scheduler=[schedule])
    learner.update([batch_of((1.0, 3.0))], Mean())
    return learner


def spoilt(by, *, at):
    """A loss whose micro-batch number `at` is not finite."""
    loss = Mean()
    loss.change = lambda value: value * by if loss.calls == at else value
    return loss


@pytest.mark.parametrize(
    ("by", "said"), [(math.nan, "the loss is nan"), (math.inf, "the loss is inf")]
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_loss_that_is_not_finite_changes_nothing(by, said, at):
    learner = warmed_up()
    before = state_of(learner)
    update = learner.update([batch_of((1.0, 1.0))] * 3, spoilt(by, at=at))
    assert update.failure == said
    assert "loss" not in update.metrics
    assert_same(state_of(learner), before)
    assert all(parameter.grad is None for _, parameter in learner.named_parameters)
    # And the next step is what it would have been.
    fresh = warmed_up()
    for each in (learner, fresh):
        assert each.update([batch_of((2.0, 1.0))], Mean()).failure is None
    assert_same(state_of(learner), state_of(fresh))


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(max_grad_norm):
    learner = warmed_up()
    learner.max_grad_norm = max_grad_norm
    before = state_of(learner)
    # The root is 0 and so finite; its slope at 0 is not.
    update = learner.update(
        [batch_of((1.0, 1.0))], Mean(lambda loss: (loss - loss.detach()).sqrt())
    )
    assert update.failure is not None
    assert update.failure.startswith("the norm of the gradient is ")
    assert not math.isfinite(update.metrics["grad_norm"])
    assert_same(state_of(learner), before)
    assert all(parameter.grad is None for _, parameter in learner.named_parameters)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, [-30.0, -40.0]),
        (100.0, [-30.0, -40.0]),
        (5.0, [pytest.approx(-3.0, rel=1e-6), pytest.approx(-4.0, rel=1e-6)]),
    ],
)
def test_gradients_are_scaled_down_to_the_limit(limit, expected):
    learner = LocalLearner(weights_only(0.0, 0.0), optimizer=sgd(), max_grad_norm=limit)
    update = learner.update([batch_of((30.0, 40.0))], Mean())
    assert update.metrics["grad_norm"] == 50.0
    assert weights(learner) == expected


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Adam", {"lr": 0.1, "foreach": False, "fused": False}),
        ("AdamW", {"lr": 0.1, "betas": [0.9, 0.98], "eps": 1e-5, "weight_decay": 0.1}),
        ("Adafactor", {}),
        ("Muon", {}),
    ],
)
def test_any_optimizer_of_torch(name, kwargs):
    learner = LocalLearner(
        weights_only(1.0, 2.0), optimizer=NamedCall(name=f"torch.optim.{name}", kwargs=kwargs)
    )
    assert type(learner.optimizer).__name__ == name
    for _ in range(2):
        assert learner.update([batch_of((1.0, 3.0))], Mean()).failure is None
    first, second = weights(learner)
    assert first < 1.0
    assert second < 2.0


@pytest.mark.parametrize(
    ("chosen", "fused"),
    [({}, True), ({"fused": False}, False), ({"foreach": True}, None), ({"foreach": False}, None)],
)
def test_the_fused_kernel_unless_the_configuration_chooses(chosen, fused):
    call = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 0.1, **chosen})
    assert LocalLearner(weights_only(1.0), optimizer=call).optimizer.defaults["fused"] is fused


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.AdmW", {}, r"no such class\. Did you mean torch\.optim\.AdamW\?.*SGD"),
        ("torch.nn.Linear", {}, "torch.nn.Linear is not a"),
        ("no.such.module.Adam", {}, "no such class"),
        ("torch.optim.AdamW", {"lrr": 1}, r"refuses these kwargs .*lrr.*It takes: lr, betas, eps"),
        ("torch.optim.AdamW", {"lr": -1.0}, "refuses these kwargs .*Invalid learning rate"),
        ("torch.optim.LBFGS", {}, "compute the loss several times"),
        ("torch.optim.SparseAdam", {}, "sparse gradients"),
        ("torch.optim.Optimizer", {}, "policy.optimizer"),
    ],
)
def test_optimizers_that_cannot_be_used(name, kwargs, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        LocalLearner(weights_only(1.0), optimizer=NamedCall(name=name, kwargs=kwargs))
    assert str(refusal.value).startswith("policy.optimizer")


def scheduler(name, **kwargs):
    return NamedCall(name=f"torch.optim.lr_scheduler.{name}", kwargs=kwargs)


HALVING = scheduler("ExponentialLR", gamma=0.5)


WARMED_UP = [
    scheduler("LinearLR", start_factor=0.25, end_factor=1.0, total_iters=3),
    scheduler("ConstantLR", factor=1.0, total_iters=1),
    HALVING,
    Milestones(milestones=[3, 5]),
]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (None, [1.0, 1.0, 1.0]),
        ([scheduler("StepLR", step_size=2, gamma=0.1)], [1.0, 1.0, 0.1, 0.1, 0.01]),
        ([HALVING], [1.0, 0.5, 0.25]),
        ([HALVING, Milestones(milestones=[])], [1.0, 0.5, 0.25]),
        (WARMED_UP, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.25]),
    ],
    ids=["none", "one", "list", "list with milestones", "hands over"],
)
def test_rates_of_schedules(schedule, rates):
    learner = LocalLearner(weights_only(1.0), optimizer=sgd(), scheduler=schedule)
    found = [learner.update([batch_of((1.0,))], Mean()).metrics["lr"] for _ in rates]
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([scheduler("CosinAnnealingLR")], r"Did you mean torch\.optim\.lr_scheduler\.CosineAnn"),
        (
            [scheduler("CosineAnnealingLR")],
            "refuses these kwargs .*T_max.*It takes: T_max, eta_min",
        ),
        ([scheduler("StepLR", step_size=2, gama=1)], "refuses these kwargs .*gama"),
        ([scheduler("ReduceLROnPlateau")], "needs a metric at every step"),
        ([NamedCall(name="torch.optim.AdamW")], "is not a"),
        (
            [*[scheduler("ConstantLR")] * 2, Milestones(milestones=[1, 2])],
            "a list of 2 schedulers needs one entry `milestones` with 1 step",
        ),
        (
            [*[scheduler("ConstantLR")] * 3, Milestones(milestones=[5, 2])],
            "milestones.*rising",
        ),
        ([*[scheduler("ConstantLR")] * 2, Milestones(milestones=[0])], "milestones.*above 0"),
        ([Milestones(milestones=[])], "a list of 0 schedulers .*and a scheduler"),
    ],
)
def test_schedules_that_cannot_be_used(schedule, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        LocalLearner(weights_only(1.0), optimizer=sgd(), scheduler=schedule)
    assert str(refusal.value).startswith("policy.scheduler")


def test_outputs_have_no_dropout_and_no_gradients_and_leave_the_model_as_it_was():
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(4, 1))
    learner = LocalLearner(model, optimizer=ADAMW)
    model.train()
    inputs: Any = torch.ones(3, 4)
    asked = learner.outputs([inputs, inputs])
    first = next(asked)
    # Whoever looks at the first output before the second is computed finds all as usual.
    assert model.training
    assert torch.is_grad_enabled()
    assert torch.equal(first, next(asked))
    assert not first.requires_grad
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        list(learner.outputs([torch.ones(1, 3)]))
    assert model.training
    assert torch.is_grad_enabled()
    model.eval()
    list(learner.outputs([inputs]))
    assert not model.training
