"""What ranks compute of groups larger than a pass: a step and outputs, alone or over a mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tiny
from laurel.config.policy import BatchLimits, LoraConfig, NamedCall
from laurel.config.reward_model import LossConfig
from laurel.data.forest import Batcher
from laurel.models.forest.outputs import whole
from laurel.models.loading.adapters import add_adapters
from laurel.models.loading.pretrained import recompute_activations
from laurel.models.parallel.mesh import AcrossRanks, parallelise
from laurel.models.spec import ParallelShape
from laurel.training.learner import LocalLearner
from laurel.training.learner_group import divide_micro_batches
from laurel.training.losses import RewardLoss
from laurel.training.policy_loss import (
    DemonstrationLabels,
    DemonstrationLoss,
    PolicyLabels,
)
from laurel.types import Preference, group_of
from policy_batches import labels, loss_of

SHAPES = [(20, [15, 9, 1, 12]), (4, [3, 2]), (5, [2, 4])]
"""Of groups: of three preferences one of two ranks has two, the other one and a filler."""

Case = tuple[str, str, dict[str, Any]]
"""Loss, architecture, and what else the model is."""


def build(kind: str, name: str, options: dict[str, Any]) -> Any:
    make = tiny.tiny_reward_model if kind == "pairs" else tiny.tiny_policy
    dtype = options.get("dtype", torch.float64)
    model: Any = make(
        name, std=0.05, seed=1, num_hidden_layers=2, dtype=dtype, precision=dtype, vocab_size=64
    )
    if options.get("lora"):
        torch.manual_seed(2)
        trains_head = kind == "pairs"
        add_adapters(model.network, LoraConfig(enabled=True, dim=4), trains_head=trains_head)
        tiny.draw_adapters(model.network, 0.3)
    if options.get("recomputes"):
        recompute_activations(model.network)
    return model


def numbers(outputs: Any) -> torch.Tensor:
    """Scores, or log-probabilities."""
    return torch.as_tensor(getattr(outputs, "logprobs_M", outputs)).flatten().clone()


def labelled(kind: str) -> tuple[list[Any], list[Any], Any, Any]:
    """Groups, labels, how labels are divided, and the loss."""
    groups = [
        replace(
            group,
            trunk_ids=[i % 60 for i in group.trunk_ids],
            branches_ids_G=[[i % 60 for i in ids] for ids in group.branches_ids_G],
        )
        for group in tiny.random_groups(3, SHAPES)
    ]
    rng, found = np.random.default_rng(3), []
    for group in groups:
        count = len(group.branches_ids_G)
        if kind == "pairs":
            asked = group_of([], ["a"] * count, group_id="a group")
            found.append(Preference(group=asked, ranks_G=tuple(range(count))))
            continue
        masks = [[True] * len(ids) for ids in group.branches_ids_G]
        if kind == "sft":
            rows = tuple(np.array(mask, bool) for mask in masks)
            found.append(DemonstrationLabels(masks_GL=rows))
            continue
        rows = [list(-rng.random(len(ids))) for ids in group.branches_ids_G]
        found.append(labels(list(rng.normal(size=count)), rows, masks=masks, old=rows))
    if kind == "pairs":
        return groups, found, None, RewardLoss(LossConfig())
    if kind == "sft":
        return groups, found, DemonstrationLabels.subset, DemonstrationLoss()
    return groups, found, PolicyLabels.subset, loss_of(token_level_loss=kind != "sequences")


def computed(
    sizes: dict[str, int] | None, cases: list[Case], budget: int | None
) -> list[dict[str, Any]]:
    """The loss, gradients and outputs of each case; with a budget in parts of so many tokens."""
    shape = ParallelShape(**(sizes or {}))
    mesh = None if sizes is None else shape.mesh("cpu")
    return [_computed(shape, mesh, case, budget) for case in cases]


def _computed(shape: ParallelShape, mesh: Any, case: Case, budget: int | None) -> dict[str, Any]:
    kind, name, options = case
    model, ranks = build(kind, name, options), None
    groups, of_groups, subset, loss = labelled(kind)
    limits = BatchLimits(forest_tokens=budget or 1000)
    batcher = Batcher("forest", limits, pad_id=0, dp_size=shape.dp)
    if subset is not None:
        groups, of_groups = batcher.divide(groups, of_groups, subset)
    batch = batcher.cut(groups, of_groups)
    share = divide_micro_batches([one.num_tokens for one in batch], shape.dp)
    place = 0 if mesh is None else dist.get_rank() // shape.each
    own = [batch[-1] if i is None else batch[i] for i in share[place]]
    fillers = [at for at, i in enumerate(share[place]) if i is None]
    in_one_pass = [replace(one.inputs, part_tokens=None) for one in own]
    with torch.no_grad():
        wanted = [numbers(model.eval()(inputs)) for inputs in in_one_pass]
    if mesh is not None:
        shares = options.get("shares_tokens", False)
        parallelise(model, mesh, cp=shape.cp, sequence_parallel=shares)
        ranks = AcrossRanks(mesh, cp=shape.cp)
    sgd = NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0})
    learner = LocalLearner(model, optimizer=sgd, ranks=ranks)
    in_step = mesh is not None
    computing = learner.outputs([one.inputs for one in own], in_step=in_step)
    said = [numbers(found) for found in computing]
    denominator = sum(loss.count(one.labels) for one in batch)
    losses: list[torch.Tensor] = []
    accumulate = learner._accumulate

    def noted(*given: Any) -> list[torch.Tensor]:
        losses.extend(accumulate(*given))
        return losses

    learner._accumulate = noted  # type: ignore[method-assign]
    step = learner.take_step(own, loss, denominator=denominator, fillers=fillers, in_step=in_step)
    assert step.failure is None, step.failure
    named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
    return {
        "outputs": (torch.cat(said), torch.cat(wanted)),
        "norm": step.grad_norm,
        "gradients": {n: whole(p.grad).clone() for n, p in named},
        "loss": float(torch.stack(losses).sum()),
        "in parts": [one.inputs.is_in_parts for one in own],
    }
