import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from laurel.errors import CheckpointError, ConfigError
from laurel.models.checkpoint.state import (
    STATE_NAME,
    TENSORS_NAME,
    load_training_state,
    random_states,
    save_training_state,
)


class Run:
    """A tiny training run that draws from every kind of randomness a real one draws from."""

    def __init__(self, make_optimizer, make_scheduler=None, *, dtype=torch.float32, width=6):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(5, width), nn.Tanh(), nn.Dropout(0.5), nn.Linear(width, 1)
        ).to(dtype)
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.dtype = dtype

    def train(self, num_steps):
        """Loss and learning rate of each step, exactly."""
        seen = []
        for _ in range(num_steps):
            noise = random.gauss(0, 1) + float(np.random.normal())
            inputs = torch.randn(7, 5, dtype=self.dtype) + noise

            def closure(inputs=inputs):
                self.optimizer.zero_grad()
                loss = self.model(inputs).square().mean()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler is not None:
                self.scheduler.step()
            seen.append((loss.item(), float(self.optimizer.param_groups[0]["lr"])))
        return seen

    def save(self, directory, **extra):
        save_training_state(
            directory, optimizer=self.optimizer, scheduler=self.scheduler, extra=extra
        )
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def resume(self, directory, weights):
        self.model.load_state_dict(weights)
        return load_training_state(directory, optimizer=self.optimizer, scheduler=self.scheduler)


def assert_same_bits(a, b):
    """Equality of nested optimizer states, types included."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor | np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert bool((a == b).all())
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_bits(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same_bits(left, right)
    else:
        assert a == b


def check_resume_is_exact(tmp_path, make_optimizer, make_scheduler=None, **options):
    straight = Run(make_optimizer, make_scheduler, **options)
    whole = straight.train(10)
    generators = random_states()

    first = Run(make_optimizer, make_scheduler, **options)
    before = first.train(4)
    weights = first.save(tmp_path, position=4)

    second = Run(make_optimizer, make_scheduler, **options)
    random.random()  # the new process has drawn other numbers before it resumes
    torch.rand(11)
    assert second.resume(tmp_path, weights) == {"position": 4}
    after = second.train(6)

    assert before + after == whole
    for name, value in straight.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name
    assert_same_bits(second.optimizer.state_dict(), straight.optimizer.state_dict())
    if make_scheduler:
        assert_same_bits(second.scheduler.state_dict(), straight.scheduler.state_dict())
    assert_same_bits(random_states(), generators)


def adamw(model):
    return torch.optim.AdamW(model.named_parameters(), lr=0.05, betas=(0.9, 0.98), eps=1e-5)


def warm_up_then_constant(optimizer):
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6),
            lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=10_000_000_000),
        ],
        milestones=[6],
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.03)),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_dense_optimizer_resumes_bit_for_bit(tmp_path, name):
    check_resume_is_exact(tmp_path, lambda model: OPTIMIZERS[name](model.named_parameters()))


@pytest.mark.parametrize("name", ["adamw", "nadam", "adafactor"])
def test_float32_state_of_bfloat16_parameters_is_not_rounded(tmp_path, name):
    make = {"adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}.get(name, torch.optim.Adafactor)
    check_resume_is_exact(
        tmp_path, lambda model: make(model.named_parameters(), lr=0.01), dtype=torch.bfloat16
    )


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5, 5, 7]),
    "numpy lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: np.float32(0.9) ** step),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.7),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum=False),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LinearLR(o, total_iters=5)]
    ),
    "warm up": warm_up_then_constant,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_resumes_bit_for_bit(tmp_path, name):
    check_resume_is_exact(tmp_path, adamw, SCHEDULERS[name])


def test_every_group_of_parameters_keeps_its_settings_and_its_state(tmp_path):
    def make():
        model = nn.Linear(2, 1)
        groups = [
            {"params": [("weight", model.weight)], "lr": 0.1},
            {"params": [("bias", model.bias)], "lr": 0.2},
        ]
        return model, torch.optim.SGD(groups, momentum=0.9)

    model, optimizer = make()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_training_state(tmp_path, optimizer=optimizer, scheduler=None, extra={})
    state = json.loads((tmp_path / STATE_NAME).read_text())
    assert list(state["optimizer"]["state"]) == ["weight", "bias"]

    model, optimizer = make()
    optimizer.param_groups[0]["lr"] = 5.0
    load_training_state(tmp_path, optimizer=optimizer, scheduler=None)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], torch.ones(1, 2))


def test_a_changed_model_is_refused_by_name_and_nothing_is_touched(tmp_path):
    Run(adamw, width=6).save(tmp_path)
    other = Run(adamw, width=8)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError) as error:
        other.resume(tmp_path, other.model.state_dict())
    assert "only in the checkpoint: '0.weight' [6, 5], '0.bias' [6], '3.weight' [1, 6]" in str(
        error.value
    )
    assert "only in this run: '0.weight' [8, 5], '0.bias' [8], '3.weight' [1, 8]" in str(
        error.value
    )
    assert not other.optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_in_another_order_are_refused(tmp_path):
    Run(adamw).save(tmp_path)

    def reordered(model):
        return torch.optim.AdamW(list(model.named_parameters())[::-1])

    other = Run(reordered)
    with pytest.raises(CheckpointError, match=r"another order, '0.weight' \[6, 5\] where .*'3.bia"):
        other.resume(tmp_path, other.model.state_dict())


def test_another_optimizer_or_schedule_is_refused(tmp_path):
    Run(adamw, warm_up_then_constant).save(tmp_path)
    sgd = Run(lambda model: torch.optim.SGD(model.named_parameters()), warm_up_then_constant)
    with pytest.raises(CheckpointError, match=r"state of AdamW, and this run uses SGD"):
        sgd.resume(tmp_path, sgd.model.state_dict())
    cosine = Run(adamw, SCHEDULERS["cosine"])
    with pytest.raises(
        CheckpointError,
        match=r"SequentialLR\[LinearLR, ConstantLR\], and this run uses CosineAnnealingLR",
    ):
        cosine.resume(tmp_path, cosine.model.state_dict())
    constant = Run(adamw)
    with pytest.raises(CheckpointError, match="this run uses no scheduler"):
        constant.resume(tmp_path, constant.model.state_dict())


def test_without_optimizer_state_only_the_generators_and_extra_come_back(tmp_path):
    random.seed(5)
    save_training_state(tmp_path, optimizer=None, scheduler=None, extra={"epoch": 3})
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    extra = load_training_state(tmp_path, optimizer=None, scheduler=None)
    assert extra == {"epoch": 3}
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected

    run = Run(adamw)
    with pytest.raises(CheckpointError, match="save_optimizer was false"):
        run.resume(tmp_path, run.model.state_dict())


def test_state_that_cannot_be_saved_is_a_configuration_error(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            self.state[self.param_groups[0]["params"][0]]["hook"] = len

    run = Run(lambda model: Odd(model.named_parameters()))
    run.optimizer.step()
    with pytest.raises(ConfigError, match=r"optimizer/state/0\.weight/hook is a builtins\.builtin"):
        run.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"extra/rows is a builtins\.set"):
        save_training_state(tmp_path, optimizer=None, scheduler=None, extra={"rows": {1}})


@pytest.mark.parametrize("name", [STATE_NAME, TENSORS_NAME])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other"])
def test_damaged_files_are_checkpoint_errors(tmp_path, name, damage):
    run = Run(adamw)
    run.train(1)
    weights = run.save(tmp_path)
    file = tmp_path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        changed = {"empty": b"", "cut": content[: len(content) // 2], "other": b'{"a": 1}'}
        file.write_bytes(changed[damage])
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        run.resume(tmp_path, weights)


def test_a_newer_format_is_refused(tmp_path):
    save_training_state(tmp_path, optimizer=None, scheduler=None, extra={})
    file = tmp_path / STATE_NAME
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(CheckpointError, match="format version 9"):
        load_training_state(tmp_path, optimizer=None, scheduler=None)


def test_tensors_that_share_memory_are_saved_apart(tmp_path):
    both = torch.arange(6.0)
    extra = {"all": both, "tail": both[3:], "columns": both.reshape(2, 3).T}
    save_training_state(tmp_path, optimizer=None, scheduler=None, extra=extra)
    loaded = load_training_state(tmp_path, optimizer=None, scheduler=None)
    for name, value in extra.items():
        assert torch.equal(loaded[name], value)


def test_nothing_of_a_resumed_run_lies_in_the_file(tmp_path):
    run = Run(adamw)
    run.train(2)
    weights = run.save(tmp_path)
    run.resume(tmp_path, weights)
    mapped = Path("/proc/self/maps")
    if not mapped.exists():
        pytest.skip("no /proc on this system")
    assert str(tmp_path) not in mapped.read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_generator_and_state_come_back(tmp_path):
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([("w", parameter)], lr=torch.tensor(0.1), capturable=True)
    parameter.sum().backward()
    optimizer.step()
    save_training_state(tmp_path, optimizer=optimizer, scheduler=None, extra={})
    expected = torch.rand(3, device="cuda")
    load_training_state(tmp_path, optimizer=optimizer, scheduler=None)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert optimizer.state[parameter]["exp_avg"].is_cuda
