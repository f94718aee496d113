"""Explicit placements: what each role gets, worked out by hand, and what is told otherwise."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.policy import RolePlacement, RolesConfig
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError
from laurel.extensions.plan.plan import plan_text
from laurel.planning.memory import Shapes, decoder_shape
from laurel.planning.plan import Conflict, Slot, grid, placed_requirements
from laurel.run.model import ReadShapes
from laurel.run.request import request_of
from planned import as_changes, fitted, planned, with_changes

JUDGED = ("env.reward_model.enabled=true", "env.reward_model.model_name=judge")
FOUR_BY_EIGHT = ("cluster.num_nodes=4", "cluster.gpus_per_node=8", *JUDGED)


def placed(placement, *changes):
    """A run on 4 nodes of 8 slots, with a reward model."""
    overrides = [*FOUR_BY_EIGHT, f"cluster.placement={placement}", *changes]
    return planned(load_config(GRPORun, None, overrides).config)


def role(plan, name):
    found = plan.role(name)
    assert found is not None, plan.conflicts
    return found


def told(plan, text):
    """The setting that is named by the one conflict that says so."""
    (conflict,) = [conflict for conflict in plan.conflicts if text in conflict.problem]
    return conflict.fix


def test_particular_slots_of_particular_nodes():
    plan = placed(
        "{policy: {nodes: [0, 1], slots: [0, 1, 2, 3]}, reward_model: {nodes: [3]},"
        " generation: {nodes: [0, 1], slots: [4, 5, 6, 7]}}"
    )
    assert plan.conflicts == ()
    assert role(plan, "policy").slots == grid([0, 1], range(4))
    assert role(plan, "generation").slots == grid([0, 1], range(4, 8))
    assert role(plan, "reward_model").slots == grid([3], range(8))
    assert role(plan, "policy").shares_with is None
    assert plan.num_idle == 8  # node 2


def test_partial_nodes_are_packed_and_the_policy_has_the_rest():
    plan = placed(
        "{generation: {nodes: 1, slots: 4}, reward_model: {nodes: 1, slots: 2}}",
        "policy.train_global_batch_size=416",
        "grpo.num_prompts_per_step=26",
    )
    # The reward model takes the last 2 slots of the last node; generation the 4 before, as that
    # node is fuller than the others. 32 - 6 = 26 are left.
    assert plan.conflicts == ()
    assert role(plan, "reward_model").slots == grid([3], [6, 7])
    assert role(plan, "generation").slots == grid([3], [2, 3, 4, 5])
    assert role(plan, "policy").slots == (*grid(range(3), range(8)), *grid([3], [0, 1]))
    assert plan.num_idle == 0


def test_whole_nodes_are_not_those_that_somebody_has_a_part_of():
    plan = placed(
        "{generation: {nodes: 2}, reward_model: {nodes: 1, slots: 2}, policy: {nodes: 1, slots: 4}}"
    )
    # Numbers of slots first: the reward model on node 3, the policy beside it (the fullest with
    # room for 4, the first slots); of the whole nodes 0 to 2 generation has the last two.
    assert role(plan, "reward_model").slots == grid([3], [6, 7])
    assert role(plan, "policy").slots == grid([3], range(4))
    assert role(plan, "generation").slots == grid([1, 2], range(8))


def test_nodes_by_their_labels():
    labels = "cluster.labels={pool=train: [0, 2], pool=judge: [1, 3], fast=yes: [3]}"
    plan = placed(
        "{policy: {labels: [pool=train]}, generation: {shares: policy},"
        " reward_model: {labels: [pool=judge, fast=yes], slots: 4}}",
        labels,
    )
    assert plan.conflicts == ()
    assert role(plan, "policy").slots == grid([0, 2], range(8))
    assert role(plan, "generation").slots == role(plan, "policy").slots
    assert role(plan, "reward_model").slots == grid([3], [4, 5, 6, 7])


def test_parts_of_slots_lie_side_by_side():
    plan = placed(
        "{policy: {nodes: [0, 1]}, generation: {nodes: [2], fraction: 0.5},"
        " reward_model: {nodes: 1, slots: 4, fraction: 0.5}}"
    )
    # The reward model (a number) comes before generation (what is left of node 2), so it is on
    # the last of the nodes, which are all free; generation has node 2 for itself.
    assert role(plan, "reward_model").slots == grid([3], [4, 5, 6, 7])
    assert role(plan, "generation").slots == grid([2], range(8))
    plan = placed(
        "{policy: {nodes: [0, 1]}, generation: {nodes: [2], slots: 8, fraction: 0.5},"
        " reward_model: {nodes: 1, slots: 4, fraction: 0.5}}"
    )
    # Generation names its node and comes first: node 2 is half full then, and fullest.
    assert plan.conflicts == ()
    assert role(plan, "reward_model").slots == grid([2], [4, 5, 6, 7])
    assert (role(plan, "generation").fraction, role(plan, "policy").fraction) == (0.5, 1.0)
    assert plan.num_idle == 8


def test_turns_on_all_slots_or_on_some():
    plan = placed(
        "{policy: {nodes: [0, 1]}, generation: {nodes: [2]},"
        " reward_model: {shares: generation, slots: 2}}"
    )
    assert plan.conflicts == ()
    assert role(plan, "reward_model").slots == grid([2], [0, 1])
    assert role(plan, "reward_model").shares_with == "generation"
    plan = placed("{reward_model: {shares: generation, nodes: [3]}, generation: {shares: policy}}")
    assert role(plan, "reward_model").slots == grid([3], range(8))
    assert role(plan, "reward_model").shares_with == "policy", "whose they are in the end"


def test_the_example_of_the_documentation():
    text = (Path(__file__).parents[3] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    cluster = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["cluster"]
    picture = text.split("```yaml\n")[1].split("```")[2].removeprefix("text").strip()
    judge = EnvironmentsConfig.model_validate(
        {"reward_model": {"enabled": True, "model_name": "judge"}}
    )
    config = GRPORun(cluster=RolesConfig.model_validate(cluster), env=judge)
    changes = {"grpo.num_prompts_per_step": 33, "policy.train_global_batch_size": 528}
    found = fitted(with_changes(config, changes), Shapes())
    assert found.fits, found.conflicts
    assert picture in plan_text(
        request_of(config), found, ReadShapes(shapes=Shapes(), unknown={}), device_memory=None
    )


def test_who_is_not_named_shares_the_slots_of_the_policy():
    plan = placed("{policy: {nodes: 2}}")
    assert [r.shares_with for r in plan.roles] == [None, "policy", "policy"]
    assert {r.slots for r in plan.roles} == {grid([0, 1], range(8))}


def test_a_run_of_one_role():
    changes = ["cluster.num_nodes=2", "cluster.gpus_per_node=4", "cluster.placement.policy.slots=2"]
    plan = planned(load_config(RewardTrainingRun, None, changes).config)
    assert role(plan, "policy").slots == grid([0, 1], [0, 1])
    judged = [*changes, "cluster.placement.reward_model.slots=1"]
    with pytest.raises(ConfigError, match="only laurel grpo has such a role"):
        load_config(RewardTrainingRun, None, judged)
    plan = planned(load_config(GRPORun, None, judged).config)
    assert told(plan, "this run has no reward model") == "cluster.placement.reward_model=null"
    assert plan.fits


@pytest.mark.parametrize(
    ("placement", "problem", "fix"),
    [
        (
            "{policy: {slots: [0, 1, 2, 3]}, generation: {slots: [2, 3, 4]}}",
            "policy (1) and generation (1) together have 2 of each slot of nodes 0-3, slots 2-3 of "
            "each",
            "cluster.placement.generation.slots=[5,6,7]",
        ),
        (
            "{policy: {nodes: [0, 1, 2, 3, 4]}}",
            "cluster.placement.policy.nodes=[0,1,2,3,4]: there is no node 4; cluster.num_nodes=4",
            "cluster.placement.policy.nodes=[0,1,2,3]",
        ),
        (
            "{reward_model: {slots: [6, 7, 8]}}",
            "slots=[6,7,8]: a node has no slot 8; cluster.gpus_per_node=8 are counted from 0 to 7",
            "cluster.placement.reward_model.slots=[6,7]",
        ),
        (
            "{policy: {nodes: [0], slots: 6}, reward_model: {nodes: [0], slots: 4}}",
            # The reward model chose first; 4 of 6 are left.
            "cluster.placement.policy.slots=6 of each node: node 0 has 4 that are free",
            "cluster.placement.policy.slots=4",
        ),
        (
            "{reward_model: {nodes: 5, slots: 2}}",
            "cluster.placement.reward_model.nodes=5: 4 of the nodes have 2 slots free",
            "cluster.placement.reward_model.nodes=4",
        ),
        (
            "{reward_model: {nodes: [0, 1, 2, 3]}, generation: {}}",
            "no slot is left for policy: of 4 x 8 slots are taken: reward model 32",
            "cluster.placement.generation.shares=policy "
            "cluster.placement.reward_model.shares=policy",
        ),
        (
            "{policy: {nodes: 1, slots: 9}, generation: {slots: [0, 1, 2, 3, 4, 5, 6, 7]}}",
            "cluster.placement.policy.nodes=1: none of the nodes has all 9 slots free",
            "cluster.placement.generation.shares=policy cluster.placement.policy.slots=8",
        ),
        (
            "{reward_model: {labels: [pool=jugde]}}",
            "no node has the label pool=jugde; cluster.labels knows fast=yes, pool=judge",
            "cluster.placement.reward_model.labels=[pool=judge]",
        ),
        (
            "{reward_model: {nodes: [2, 3], labels: [pool=judge]}}",
            "cluster.placement.reward_model.labels=[pool=judge]: node 2 lacks one of them",
            "cluster.placement.reward_model.nodes=[3]",
        ),
        (
            "{policy: {nodes: [0]}, reward_model: {shares: policy, nodes: [0, 1]}}",
            "cluster.placement.reward_model.nodes=[0,1] with shares=policy: "
            "policy has not got them",
            "cluster.placement.reward_model.nodes=null",
        ),
        (
            "{policy: {fraction: 0.5}, generation: {fraction: 0.6, slots: 8}}",
            "no slot is left for policy: of 4 x 8 slots are taken: generation 32",
            "cluster.placement.policy.fraction=0.4",
        ),
    ],
)
def test_what_is_told(placement, problem, fix):
    labels = "cluster.labels={pool=judge: [1, 3], fast=yes: [3]}"
    assert told(placed(placement, labels), problem) == fix


def test_everything_is_told_at_once():
    wishes = "{policy: {nodes: [0, 9]}, generation: {slots: [8]}, reward_model: {labels: [a=x]}}"
    plan = placed(wishes, "cluster.labels={fast=yes: [7]}")
    kinds = (
        "there is no node 9",
        "has no slot 8",
        "no node has the label a=x",
        "cluster.labels gives fast=yes to node 7",
    )
    assert not plan.fits
    for kind in kinds:
        assert told(plan, kind)


def test_slots_that_are_asked_for_elsewhere_are_not_forgotten():
    plan = placed(
        "{}",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=4",
        "env.reward_model.resources.gpus_per_node=2",
    )
    assert told(plan, "does not name generation") == (
        "cluster.placement.generation.nodes=1 cluster.placement.generation.slots=4"
    )
    assert told(plan, "does not name reward model") == (
        "cluster.placement.reward_model.nodes=1 cluster.placement.reward_model.slots=2"
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("policy: {fraction: 1.5}", "must be a number greater than 0 and of at most 1"),
        ("policy: {slots: 0}", "a list like [0]"),
        ("policy: {nodes: []}", "an empty list is no place"),
        ("policy: {slots: [1, 1]}", "names one of them twice"),
        ("policy: {slots: [-1]}", "there is no -1"),
        ("policy: {shares: generation}", "it belongs at cluster.placement.generation.shares"),
        ("generation: {shares: generation}", "it cannot share its own slots"),
        ("generation: {shares: policy, fraction: 0.5}", "take turns, each with the whole"),
    ],
)
def test_what_can_never_be_is_refused_where_it_is_written(written, said):
    with pytest.raises(ConfigError) as refused:
        placed(f"{{{written}}}")
    assert said in str(refused.value)


SMALL = decoder_shape(hidden_size=8, num_layers=1, intermediate_size=16, num_heads=2, vocab_size=32)


def memory(placement, *changes):
    """The phases, by their names and the slots that they are on."""
    overrides = [*JUDGED, "cluster.gpus_per_node=4", f"cluster.placement={placement}", *changes]
    config = load_config(GRPORun, None, overrides).config
    shapes = Shapes(policy=SMALL, reward_models=(SMALL,))
    return {(p.name, p.slots_of): p for p in fitted(config, shapes).phases}


def test_a_reward_model_in_turns_with_generation_lies_beside_its_weights():
    phases = memory(
        "{policy: {slots: 2}, generation: {slots: 2}, reward_model: {shares: generation}}"
    )
    assert phases.keys() == {
        ("training", "policy"),
        ("generation", "generation"),
        ("judging", "generation"),
    }
    judging, drawing = phases["judging", "generation"], phases["generation", "generation"]
    assert judging.parts["reward model"] == 2 * SMALL.num_parameters
    assert judging.parts["weights"] == drawing.parts["weights"]
    assert judging.total > drawing.total
    assert "reward model" not in phases["training", "policy"].parts


def test_a_part_of_a_slot_is_that_part_of_its_memory():
    placement = "{policy: {slots: [0]}, generation: {slots: [1], fraction: 0.25}, reward_model: "
    placement += "{slots: [1], fraction: 0.75}}"
    changes = ("policy.generation.backend=transformers", "cluster.device=cpu")
    drawing = memory(placement, *changes)["generation", "generation"]
    assert drawing.fraction == 0.25
    assert drawing.fits(4 * drawing.total)
    assert not drawing.fits(4 * drawing.total - 4)
    config = load_config(
        GRPORun,
        None,
        [*JUDGED, "cluster.gpus_per_node=2", f"cluster.placement={placement}", *changes],
    ).config
    shapes = Shapes(policy=SMALL, reward_models=(SMALL,))
    found = fitted(config, shapes, device_memory=4 * drawing.total - 4)
    crowded = [m.problem for m in found.conflicts if m.problem.startswith("generation takes")]
    assert len(crowded) == 1
    assert " for it (" in crowded[0]


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4))
CHOICE = st.none() | st.integers(1, 4) | st.lists(st.integers(0, 4), min_size=1, unique=True)
WISH = st.fixed_dictionaries(
    {},
    optional={
        "nodes": CHOICE,
        "slots": CHOICE,
        "fraction": st.sampled_from([0.25, 0.5, 1.0]),
        "labels": st.lists(st.sampled_from(["a=1", "b=1", "c=1"]), max_size=2, unique=True),
    },
)
SHARING = WISH.map(lambda wish: {k: v for k, v in wish.items() if k != "fraction"})


@st.composite
def runs(draw):
    nodes, slots = draw(SIZES)
    generation = draw(WISH | SHARING.map(lambda wish: wish | {"shares": "policy"}))
    owners = st.sampled_from(["policy", "generation"])
    judge = draw(WISH | st.builds(lambda wish, o: wish | {"shares": o}, SHARING, owners))
    wishes = {"policy": draw(WISH), "generation": generation, "reward_model": judge}
    change = {
        "env.reward_model.enabled": True,
        "env.reward_model.model_name": "judge",
        "cluster.num_nodes": nodes,
        "cluster.gpus_per_node": slots,
        "cluster.labels": {"a=1": [0, 1], "b=1": [nodes - 1]},
        "policy.dtensor_cfg.tensor_parallel_size": draw(st.sampled_from([1, 2])),
        "grpo.num_prompts_per_step": 60,
        "policy.train_global_batch_size": 960,
    }
    change["cluster.placement"] = {
        name: RolePlacement.model_validate(wish) for name, wish in wishes.items()
    }
    return with_changes(BASE, change)


BASE = GRPORun()


def claims_of(config):
    request, conflicts = request_of(config), list[Conflict]()
    assert request.placement is not None
    return placed_requirements(request, request.placement, conflicts), conflicts


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(runs())
def test_no_slot_is_given_out_more_than_once_and_none_that_is_not_there(config):
    found, conflicts = claims_of(config)
    requirements = {requirement.role.name: requirement for requirement in found}
    placement, cluster = config.cluster.placement, config.cluster
    assert placement is not None
    everything = set(grid(range(cluster.num_nodes), range(cluster.gpus_per_node)))
    load: dict[Slot, float] = {}
    for name, requirement in requirements.items():
        assert set(requirement.slots) <= everything
        assert sorted(set(requirement.slots)) == list(requirement.slots), "in order, none twice"
        if requirement.shares_with is not None:
            assert set(requirement.slots) <= set(requirements[requirement.shares_with].slots)
            continue
        for slot in requirement.slots:
            load[slot] = load.get(slot, 0) + requirement.fraction
        wish = placement[name]
        assert wish is not None
        nodes = {slot.node for slot in requirement.slots}
        if not any(conflict.is_fatal for conflict in conflicts):
            _as_asked(wish, nodes, requirement.slots, cluster.labels)
    is_whole = not any(conflict.is_fatal for conflict in conflicts)
    assert not is_whole or len(requirements) == 3
    assert not is_whole or max(load.values()) <= 1


def _as_asked(wish, nodes, slots, labels):
    """Of a placement that fits."""
    assert all(nodes <= set(labels[label]) for label in wish.labels)
    if isinstance(wish.nodes, list):
        assert nodes == set(wish.nodes) or (wish.slots is None and nodes < set(wish.nodes))
    elif isinstance(wish.nodes, int):
        assert len(nodes) == wish.nodes
    if isinstance(wish.slots, list):
        assert set(slots) == set(grid(nodes, wish.slots))
    elif isinstance(wish.slots, int):
        assert len(slots) == wish.slots * len(nodes)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(runs())
def test_the_setting_that_is_named_fits(config):
    _, conflicts = claims_of(config)
    for conflict in conflicts:
        changes = as_changes(conflict.fix)
        left = {_kind(other.problem) for other in claims_of(with_changes(config, changes))[1]}
        in_words = conflict.fix.startswith("take node") or "cluster.labels=" in conflict.fix
        assert bool(changes) != in_words, conflict
        assert in_words or _kind(conflict.problem) not in left, conflict


def _kind(problem):
    """A problem without its numbers and choices, which a change may alter."""
    if "no node has the label" in problem:
        return problem.split(";")[0]
    for part in (" together have", ": there is no node", ": a node has no slot"):
        if part in problem:
            return re.sub(r"[\d.,]+", "#", problem.split(part)[0].split("=")[0]) + part
    is_full = "none of the nodes" in problem or re.search(r"ha(s|ve) 0 ", problem)
    return problem.split("=")[0].split(": of ")[0] + (" full" if is_full else "")
