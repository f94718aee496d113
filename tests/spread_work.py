"""What the processes of the tests of spread models do: load, train, save and go on, over a mesh."""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from laurel.config.grpo import GRPOPolicyConfig
from laurel.config.policy import RewardPolicyConfig
from laurel.data.forest import to_forest
from laurel.errors import LaurelError
from laurel.models.checkpoint.export import save_policy, save_reward_model, write_model
from laurel.models.checkpoint.state import load_training_state, read_shares, save_training_state
from laurel.models.checkpoint.store import CheckpointStore
from laurel.models.forest import outputs
from laurel.models.forest.decoder import Decoder
from laurel.models.forest.outputs import whole
from laurel.models.loading.policy import check_policy_paths, load_policy
from laurel.models.loading.reward_model import check_paths, load_reward_model
from laurel.models.parallel.mesh import AcrossRanks, held_bytes, local, parallelise
from laurel.models.spec import ParallelShape
from laurel.rewards.scorer import golden_scores
from laurel.run.model import model_spec
from laurel.types import Message, group_of
from laurel.workers.process import give_back_freed_memory, trim_heap
from parallel_work import EPSILON, SHAPES, Allocations, loss_of, weight_of
from saved_steps import save_step

TEXTS = ("the laurel grows by the western gate", "bread and wine", "an old man of the river")
BATCH = tiny.random_groups(5, [(9, [5, 3]), (4, [2, 6])])
GOLDEN = [group_of([Message("user", "Where is it?")], ["By the gate.", "There."], group_id="g")]
TRAINING = "training"


def mesh_of(sizes: dict[str, int] | None) -> Any:
    """A mesh of gloo ranks; none of a single process."""
    return None if sizes is None else ParallelShape(**sizes).mesh("cpu")


def load(
    kind: str, directory: str | None, mesh: Any = None, *, resume: str | None = None, **changes: Any
) -> Any:
    """A policy or a reward model, over a mesh or in this process alone."""
    parallel = {"tensor_parallel_size": mesh["tp"].size()} if mesh else {}
    parallel |= changes.pop("dtensor_cfg", {})
    settings = {"model_name": directory, "precision": "float32", "dtensor_cfg": parallel, **changes}
    rest: dict[str, Any] = {
        "seed": 1,
        "max_length": 128,
        "device": torch.device("cpu"),
        "texts": TEXTS,
        "mesh": mesh,
        "resume_from": None if resume is None else Path(resume),
    }
    if kind == "policy":
        return load_policy(model_spec(GRPOPolicyConfig(**settings)), **rest)
    section = RewardPolicyConfig(**settings)
    torch.manual_seed(1)  # as a run does: new adapters of a reward model are drawn from it
    return load_reward_model(model_spec(section), truncation_side="left", **rest)


def save(kind: str, loaded: Any, directory: str) -> None:
    """All files of a model."""
    if kind == "policy":
        save_policy(Path(directory), loaded.model, loaded.tokenizer, card="of a policy")
    else:
        golden = golden_scores(loaded.model, loaded.contract, GOLDEN)
        contract = loaded.contract.with_rules(golden=golden)
        save_reward_model(Path(directory), loaded.model, contract, card="of a reward model")


def outputs_of(model: Decoder) -> torch.Tensor:
    """What a model says of a batch, without gradients."""
    model.eval()
    with torch.no_grad():
        found = model(to_forest(BATCH))
    return getattr(found, "logprobs_M", found).clone()


def state_of(model: Decoder) -> dict[str, Any]:
    """Weights, which of them are trained, and outputs."""
    named = list(model.network.named_parameters())
    return {
        "weights": {name: whole(parameter.detach()).clone() for name, parameter in named},
        "trained": [name for name, parameter in named if parameter.requires_grad],
        "outputs": outputs_of(model),
    }


Case = tuple[str, str | None, dict[str, Any]]
"""Kind, directory and what the section says otherwise."""


def load_all(sizes: dict[str, int] | None, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """What comes of loading: the model, what it says, and the memory that it took."""
    mesh = mesh_of(sizes)
    results = []
    for kind, directory, changes in cases:
        with Allocations() as made:
            found = load(kind, directory, mesh, **changes)
        check = check_policy_paths if kind == "policy" else check_paths
        results.append(
            {
                "bytes": held_bytes(found.model),
                "largest": made.largest,
                "by": made.by,
                "notes": found.notes,
                "difference": check(found.model),
                **state_of(found.model),
                "training": found.model.network.training,
            }
        )
    return results


def refused(sizes: dict[str, int] | None, cases: Sequence[Case]) -> list[str]:
    """What is said of models that cannot be loaded so."""
    mesh, said = mesh_of(sizes), []
    for kind, directory, changes in cases:
        try:
            load(kind, directory, mesh, **changes)
        except LaurelError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return said


def save_all(sizes: dict[str, int] | None, cases: Sequence[Case], targets: Sequence[str]) -> None:
    """Load and save; what is spread also in files that are small."""
    mesh = mesh_of(sizes)
    for (kind, directory, changes), target in zip(cases, targets, strict=True):
        found = load(kind, directory, mesh, **changes)
        save(kind, found, target)
        write_model(Path(target, "small"), found.model, lambda: None, max_file_bytes=30_000)


def go_on(
    sizes: dict[str, int] | None,
    cases: Sequence[Case],
    steps: int,
    *,
    resume: str | None = None,
    target: str | None = None,
) -> list[dict[str, Any]]:
    """Train for some steps, from a checkpoint and into one."""
    mesh, results = mesh_of(sizes), []
    for number, (kind, directory, changes) in enumerate(cases):
        start = None if resume is None else f"{resume}/{number}"
        found = load(kind, directory, mesh, resume=start, **changes)
        optimizer = make_optimizer(found.model)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        done = 0
        if start is not None:
            extra = load_training_state(
                Path(start, TRAINING), optimizer=optimizer, scheduler=scheduler, mesh=mesh
            )
            done = extra["done"]
        losses = [
            step(kind, found.model, optimizer, scheduler, mesh, number)
            for number in range(done, done + steps)
        ]
        if target is not None:
            path = Path(target, str(number), TRAINING)
            path.mkdir(parents=True, exist_ok=True)
            save(kind, found, str(path.parent))
            save_training_state(
                path,
                optimizer=optimizer,
                scheduler=scheduler,
                mesh=mesh,
                extra={"done": done + steps},
            )
        moments = {
            f"{name}/{key}": whole(value)
            for name, p in found.model.named_parameters()
            if p in optimizer.state
            for key, value in optimizer.state[p].items()
        }
        held = sum(
            local(value).untyped_storage().nbytes()
            for entries in optimizer.state.values()
            for value in entries.values()
        )
        results.append(
            {"losses": losses, "moments": moments, "held": held, **state_of(found.model)}
        )
    return results


def resumed(
    sizes: dict[str, int],
    cases: Sequence[Case],
    steps: int,
    resume: str | None,
    target: str,
) -> list[dict[str, Any]]:
    """`go_on`, as processes are told it."""
    return go_on(sizes, cases, steps, resume=resume, target=target)


def make_optimizer(model: Decoder) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return torch.optim.AdamW(named, lr=5e-3, eps=EPSILON)


def step(
    kind: str, model: Decoder, optimizer: Any, scheduler: Any, mesh: Any, number: int
) -> float:
    """One optimizer step over the places of a mesh; the loss of all of them."""
    groups = tiny.random_groups(10 + number, SHAPES)
    mine = groups
    if mesh is not None:
        each = mesh["tp"].size()
        mine = groups[dist.get_rank() // each :: mesh.size() // each]
    denominator = sum(weight_of(group, kind) for group in groups)
    model.train()
    loss = loss_of(model(to_forest(mine)), denominator)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return float(AcrossRanks(mesh).total(loss) if mesh else loss.detach())


def draws() -> list[float]:
    """From each generator that a run draws from."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def draw_and_save(sizes: dict[str, int], directory: str) -> list[float]:
    """Rank by rank other random numbers; saved; then what comes next."""
    mesh, rank = mesh_of(sizes), dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    save_training_state(Path(directory), optimizer=None, scheduler=None, extra={}, mesh=mesh)
    return draws()


def restore_and_draw(sizes: dict[str, int] | None, directory: str) -> list[float]:
    load_training_state(Path(directory), optimizer=None, scheduler=None, mesh=mesh_of(sizes))
    return draws()


def classes_unpickled(written: Path, folder: Path) -> list[int]:
    """How many come of saving and loading a state, also one that ranks have written.

    The second number shows that the first would have told. This process hears of it until it ends.
    """
    found: list[Any] = []
    sys.addaudithook(lambda event, data: found.append(data) if "find_class" in event else None)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    save_training_state(folder, optimizer=optimizer, scheduler=None, extra={})
    load_training_state(folder, optimizer=optimizer, scheduler=None)
    load_training_state(written, optimizer=None, scheduler=None)
    assert read_shares(written / "optimizer", lambda _: None)
    numbers = [len(found)]
    pickle.loads(pickle.dumps(OrderedDict()))
    return [*numbers, len(found)]


def fail_to_save(sizes: dict[str, int], source: str, root: str) -> dict[str, Any]:
    """Saving goes wrong on one rank: every rank hears of it, and earlier checkpoints stay."""
    mesh, rank = mesh_of(sizes), dist.get_rank()
    found = load("policy", source, mesh)
    optimizer = make_optimizer(found.model)
    said = {}

    def attempt(name: str, folder: str, extra: dict[str, Any]) -> None:
        try:
            save_policy(Path(folder), found.model, found.tokenizer, card="")
            save_training_state(
                Path(folder), optimizer=optimizer, scheduler=None, extra=extra, mesh=mesh
            )
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
            if rank == 0:
                raise

    def commit(name: str, number: int, extra: dict[str, Any], *, spoils: bool = False) -> None:
        """The first rank commits what all have written into its temporary directory."""
        folders = [None]

        def write(folder: Path) -> None:
            dist.broadcast_object_list([str(folder)])
            if spoils:
                (folder / "README.md").mkdir()  # where the card goes, which is written last
            attempt(name, str(folder), extra)

        if rank == 0:
            try:
                with CheckpointStore(root) as store:
                    save_step(store, number, write)
            except Exception as error:
                said[f"{name}/store"] = f"{type(error).__name__}: {error}"
        else:
            dist.broadcast_object_list(folders)
            attempt(name, str(folders[0]), extra)
        dist.barrier()
        said[f"{name}/there"] = sorted(os.listdir(root))
        dist.barrier()  # the first rank's next save begins when both have looked

    commit("good", 1, {})
    commit("odd", 2, {"odd": {1}} if rank == 1 else {})
    commit("full", 3, {}, spoils=True)
    return said


class Peak(TorchDispatchMode):
    """The most memory of its own that this process has after any operation of torch.

    As the kernel counts it. Pages of files are not in it: they are given up when others need room.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before = self.highest = own_memory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, own_memory())
        return result


def own_memory() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_of_loading(sizes: dict[str, int] | None, directory: str) -> int:
    """Bytes by which the memory of this process rose at most while it loaded a model."""
    mesh = mesh_of(sizes)
    trim_heap()  # else the model takes what imports had freed, and less rises
    with Peak() as memory:
        load("policy", directory, mesh)
    return memory.highest - memory.before


def peak_of_step(sizes: dict[str, int], changes: dict[str, Any]) -> dict[str, int]:
    """Of a policy with a large vocabulary: what a rank holds of it, and the most that it takes.

    The second step is measured: the first makes the states of the optimizer.
    """
    give_back_freed_memory()
    mesh = mesh_of(sizes)
    torch.zeros(1).add_(1)
    before = own_memory()
    model = tiny.tiny_policy("qwen3", std=0.05, num_hidden_layers=2, **changes)
    outputs.usual_chunk_size = lambda *_, **__: 4  # in this process, which ends after it
    parallelise(model, mesh)
    optimizer = make_optimizer(model)
    peaks = []
    for number in range(2):
        with Peak() as memory:
            step("policy", model, optimizer, _Constant(), mesh, number)
        peaks.append(memory.highest - before)
    return {"held": held_bytes(model), "peak": peaks[1], "first": peaks[0]}


class _Constant:
    """A schedule that changes nothing."""

    def step(self) -> None:
        """Nothing."""
