import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.policy import RoleName
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.sft import SFTRun
from laurel.planning.plan import Mesh, Slot
from laurel.run.request import uses_reward_model
from planned import as_changes, planned, with_changes

REWARD = "env.reward_model.resources"
GENERATION = "policy.generation.colocated"


def grpo(*overrides):
    return load_config(GRPORun, None, overrides).config


def slots(nodes, indices):
    return tuple(Slot(node=n, index=i) for n in nodes for i in indices)


def fatal(plan):
    return [conflict.problem for conflict in plan.conflicts if conflict.is_fatal]


JUDGED = ("env.reward_model.enabled=true", "env.reward_model.model_name=judge")
JUDGE_MESH = "env.reward_model.dtensor_cfg"
SEED = (
    *JUDGED,
    "policy.max_total_sequence_length=2048",
    "cluster.gpus_per_node=8",
    "env.reward_model.dtensor_cfg.tensor_parallel_size=4",
    "policy.dtensor_cfg.tensor_parallel_size=2",
)
APART = (
    f"{REWARD}.gpus_per_node=8",
    f"{GENERATION}.enabled=False",
    f"{GENERATION}.resources.gpus_per_node=4",
    f"{GENERATION}.resources.num_nodes=1",
)


def test_the_colocated_run_of_the_seed():
    plan = planned(grpo(*SEED, f"{REWARD}.gpus_per_node=4"))
    assert plan.fits
    assert plan.conflicts == ()
    policy, generation, judge = plan.roles
    assert policy.slots == generation.slots == slots(range(1), range(4))
    assert generation.shares_with == "policy"
    assert judge.slots == slots(range(1), range(4, 8))
    assert policy.mesh == Mesh(dp=2, tp=2)
    assert generation.mesh == Mesh(dp=4)
    assert judge.mesh == Mesh(dp=1, tp=4)
    assert plan.num_idle == 0
    # 32 prompts x 16 completions = 512, for each of 2 ranks 256. A forward pass has
    # 4 x 2048 = 8192 tokens, so 4 completions of 2048.
    batch = plan.batch("policy")
    assert (batch.size, batch.per_share, batch.tokens) == (512, 256, 8192)
    assert batch.num_micro_batches == 64
    assert plan.batch("generation").per_share == 128
    assert plan.batch("reward_model").per_share == 512


def test_the_non_colocated_run_of_the_seed():
    plan = planned(grpo(*SEED, *APART, "cluster.num_nodes=2"))
    assert plan.fits
    assert plan.conflicts == ()
    policy, generation, judge = plan.roles
    assert policy.slots == slots(range(1), range(4))
    assert generation.slots == slots(range(1), range(4, 8))
    assert judge.slots == slots(range(1, 2), range(8))
    assert (policy.mesh, generation.mesh) == (Mesh(dp=2, tp=2), Mesh(dp=4))
    assert judge.mesh == Mesh(dp=2, tp=4)
    assert judge.groups == (slots(range(1, 2), range(4)), slots(range(1, 2), range(4, 8)))


def validation(config):
    return [
        (b.role, b.size, b.num_shares, b.per_share, b.tokens, b.num_micro_batches)
        for b in planned(config).batches
        if b.is_validation
    ]


def test_validation_of_pairs_is_divided_too():
    changes = [
        "cluster.gpus_per_node=4",
        "rm.val_global_batch_size=10",
        "policy.train_micro_batch_size=2",
        "policy.max_total_sequence_length=100",
        "policy.sequence_packing.enabled=false",
        "data.val_data_path=val.jsonl",
    ]
    config = load_config(RewardTrainingRun, None, changes).config
    # 10 pairs for 4 ranks: at most 3 each; 2 pairs of 2 x 100 tokens in a pass: 2 passes.
    assert validation(config) == [("policy", 10, 4, 3, 400, 2)]
    assert planned(config).batch("policy").tokens == 400, "of a step, too"
    never = ["rm.val_period=0", "rm.val_at_end=false"]
    assert validation(load_config(RewardTrainingRun, None, [*changes, *never]).config) == []
    assert validation(load_config(RewardTrainingRun, None, changes[:-1]).config) == []


@pytest.mark.parametrize(
    ("tokens", "passes"), [(100, 6), (150, 6), (199, 6), (200, 3), (60, 12), (400, 2)]
)
def test_a_pair_larger_than_a_pass_takes_several(tokens, passes):
    """Of 12 pairs of 2 x 100 tokens each of 4 ranks has 3."""
    changes = [
        "cluster.gpus_per_node=4",
        "policy.train_global_batch_size=12",
        "policy.max_total_sequence_length=100",
        f"policy.sequence_packing.train_mb_tokens={tokens}",
    ]
    config = load_config(RewardTrainingRun, None, changes).config
    assert planned(config).batch("policy").num_micro_batches == passes


def test_validation_of_conversations_is_divided_too():
    changes = [
        "cluster.gpus_per_node=2",
        "sft.val_global_batch_size=9",
        "data.val_data_path=val.jsonl",
        "policy.max_total_sequence_length=64",
    ]
    config = load_config(SFTRun, None, changes).config
    # packing: a pass has room for one conversation of 64
    assert validation(config) == [("policy", 9, 2, 5, 64, 5)]


def test_validation_of_completions_is_divided_too():
    plan = grpo(
        *JUDGED,
        "cluster.gpus_per_node=4",
        f"{REWARD}.gpus_per_node=1",
        "grpo.max_val_samples=50",
        "grpo.val_batch_size=64",
        "grpo.val_num_generations_per_prompt=3",
        "data.val_data_path=val.jsonl",
        "env.reward_model.max_model_len=4096",
        "grpo.num_prompts_per_step=48",
        "policy.train_global_batch_size=768",
    )
    # 50 tasks x 3 = 150 completions: 50 for each of 3 engines, all for the one judge, of which two
    # fit into the 8,192 tokens of a pass. 512 tokens of each of 50 completions are under way.
    assert validation(plan) == [
        ("generation", 150, 3, 50, 50 * 512, 1),
        ("reward_model", 150, 1, 150, 8192, 75),
    ]


def test_training_alone_has_the_whole_cluster():
    changes = ["cluster.gpus_per_node=4", "cluster.num_nodes=2"]
    for schema in (RewardTrainingRun, SFTRun):
        plan = planned(load_config(schema, None, changes).config)
        (role,) = plan.roles
        assert role.slots == slots(range(2), range(4))
        assert role.mesh == Mesh(dp=8)
        assert plan.fits


def test_without_resources_the_reward_model_shares_the_slots_of_the_policy():
    plan = planned(grpo(*JUDGED, "cluster.gpus_per_node=2"))
    policy, _, judge = plan.roles
    assert judge.shares_with == "policy"
    assert judge.slots == policy.slots
    assert plan.fits


def test_a_reward_model_is_used_where_a_data_set_or_a_combination_names_it():
    assert not uses_reward_model(grpo())
    assert uses_reward_model(grpo("data.env_name=reward_model", "env.reward_model.model_name=x"))
    parts = "+env.composite={both: {parts: [{env: math}, {env: reward_model}]}}"
    assert uses_reward_model(grpo(parts, "data.env_name=both"))
    assert not uses_reward_model(grpo(parts))
    assert uses_reward_model(several_models())
    servers = [f"{{name: {n}, urls: ['http://{n}:1'], normalize: none}}" for n in "ab"]
    models = f"env.reward_model.models=[{', '.join(servers)}]"
    assert not uses_reward_model(grpo(models, "env.reward_model.enabled=true"))


def several_models(*overrides):
    models = "{name: a, model_name: x}, {name: b, model_name: y}"
    named = (
        f"env.reward_model.models=[{models}, {{name: c, urls: ['http://h:1'], normalize: none}}]"
    )
    return grpo(named, "env.reward_model.enabled=true", *overrides)


def test_several_models_have_the_slots_of_one():
    tp = "env.reward_model.dtensor_cfg.tensor_parallel_size=2"
    plan = planned(several_models("cluster.gpus_per_node=4", f"{REWARD}.gpus_per_node=2", tp))
    judge = plan.role("reward_model")
    assert judge is not None
    assert judge.slots == slots(range(1), range(2, 4))
    assert judge.mesh == Mesh(dp=1, tp=2)
    assert plan.fits


def test_several_nodes():
    """16 nodes: 3 judge, 5 draw, 8 learn."""
    plan = planned(
        grpo(
            *JUDGED,
            "cluster.gpus_per_node=8",
            "cluster.num_nodes=16",
            f"{REWARD}.gpus_per_node=8",
            f"{REWARD}.num_nodes=3",
            f"{GENERATION}.enabled=false",
            f"{GENERATION}.resources.num_nodes=5",
            "policy.generation.vllm_cfg.tensor_parallel_size=4",
            "policy.generation.vllm_cfg.pipeline_parallel_size=2",
            "policy.dtensor_cfg.context_parallel_size=2",
        )
    )
    policy, generation, judge = plan.roles
    assert plan.fits
    assert policy.slots == slots(range(8), range(8))
    assert generation.slots == slots(range(8, 13), range(8))
    assert judge.slots == slots(range(13, 16), range(8))
    assert policy.mesh == Mesh(dp=32, cp=2)
    assert generation.mesh == Mesh(dp=5, tp=4, pp=2)


def test_what_draws_in_process_has_one_slot_whatever_is_said_of_vllm():
    for one in ("policy.generation.backend=transformers", "cluster.device=cpu"):
        plan = planned(grpo(*TWO_BY_SIX, f"{VLLM}.pipeline_parallel_size=2", one))
        assert plan.fits
        assert plan.role("generation").mesh == Mesh(dp=12)


VLLM = "policy.generation.vllm_cfg"


TWO_BY_SIX = (
    "cluster.gpus_per_node=6",
    "cluster.num_nodes=2",
    "grpo.num_prompts_per_step=48",
    "policy.train_global_batch_size=768",
)


THREE_BY_EIGHT = ("cluster.gpus_per_node=8", "cluster.num_nodes=3")


@pytest.mark.parametrize(
    ("overrides", "problem", "fix", "is_fatal"),
    [
        (  # a node more, before the reward model takes turns with the policy
            (*SEED, *APART),
            "reward model 8 + generation 4 + policy at least 2 = 14 slots",
            "cluster.num_nodes=2",
            True,
        ),
        (  # a node more is no help to one that is larger than a node: it shares the policy's
            (*SEED, *APART, "cluster.gpus_per_node=6", f"{JUDGE_MESH}.tensor_parallel_size=2"),
            "reward model 8 + generation 4 + policy at least 2 = 14 slots",
            f"{REWARD}.gpus_per_node=null",
            True,
        ),
        (
            (*JUDGED, *THREE_BY_EIGHT, f"{REWARD}.gpus_per_node=6"),
            "2 slots are left idle",
            f"{REWARD}.gpus_per_node=8",
            False,
        ),
        (
            (*TWO_BY_SIX, "policy.dtensor_cfg.tensor_parallel_size=4"),
            "reach over nodes",
            "policy.dtensor_cfg.tensor_parallel_size=3",
            False,
        ),
        (  # a replica of vLLM is on one node
            (*TWO_BY_SIX, f"{VLLM}.tensor_parallel_size=4"),
            "groups of 4 slots reach over nodes, of which each has 6 for generation",
            f"{VLLM}.tensor_parallel_size=3",
            True,
        ),
        (
            (*TWO_BY_SIX, f"{VLLM}.tensor_parallel_size=2", f"{VLLM}.pipeline_parallel_size=2"),
            "groups of 4 slots reach over nodes",
            f"{VLLM}.tensor_parallel_size=1",
            True,
        ),
        (  # 96 x 16 = 1536 = 2^9 x 3: of its divisors the one by 6 nearest to 512 is 384
            (
                "cluster.gpus_per_node=6",
                "grpo.num_prompts_per_step=96",
                "policy.train_global_batch_size=512",
            ),
            "cannot be split evenly among 6",
            "policy.train_global_batch_size=384",
            True,
        ),
        (  # 512 = 2^9 is no multiple of 24; of 16 completions each, prompts must be one of 3
            THREE_BY_EIGHT,
            "cannot be split evenly among 24",
            "grpo.num_prompts_per_step=33 policy.train_global_batch_size=528",
            True,
        ),
    ],
    ids=["too many", "too large", "idle", "over nodes", "replica", "pipeline", "batch", "step"],
)
def test_a_conflict_is_told_with_a_setting_without_it(overrides, problem, fix, is_fatal):
    plan = planned(grpo(*overrides))
    (conflict,) = plan.conflicts
    assert problem in conflict.problem
    assert conflict.fix == fix
    assert plan.fits == (not is_fatal)
    assert not planned(grpo(*overrides, *fix.split())).conflicts


def test_every_conflict_is_told_at_once():
    plan = planned(
        grpo(
            *JUDGED,
            "cluster.gpus_per_node=8",
            f"{REWARD}.gpus_per_node=3",
            f"{REWARD}.num_nodes=2",
            "env.reward_model.dtensor_cfg.tensor_parallel_size=2",
            f"{GENERATION}.enabled=false",
            f"{GENERATION}.resources.gpus_per_node=2",
            f"{GENERATION}.resources.num_nodes=4",
            "policy.generation.vllm_cfg.tensor_parallel_size=4",
        )
    )
    said = "\n".join(fatal(plan))
    for part in (
        "resources.num_nodes=2: there is one node",
        "colocated.resources.num_nodes=4: there is one node",
        "groups of 4 do not divide the 2 slots of generation",
        "groups of 2 do not divide the 3 slots of reward_model",
        "train_global_batch_size=512 completions cannot be split evenly among 3",
    ):
        assert part in said
    assert len(fatal(plan)) == 5


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{GENERATION}.resources.gpus_per_node=null"], "gpus_per_node is not said"),
        (["cluster.num_nodes=4", f"{GENERATION}.resources.num_nodes=null"], "num_nodes is not"),
        (["cluster.num_nodes=4"], "gets whole nodes of 8 slots"),
        (["cluster.num_nodes=4", f"{REWARD}.num_nodes=4"], "reward model 4 + generation 1 + pol"),
        (
            [
                "cluster.num_nodes=4",
                f"{GENERATION}.resources.num_nodes=3",
                f"{GENERATION}.resources.gpus_per_node=8",
            ],
            "reward model 1 + generation 3 + policy at",
        ),
        (["cluster.num_nodes=2", f"{REWARD}.gpus_per_node=16"], "more than a node has: 8 slots"),
        (
            ["cluster.num_nodes=2", f"{GENERATION}.resources.gpus_per_node=8"],
            "generation 8 + policy at least 2 = 10 slots",
        ),
    ],
)
def test_what_cannot_be_placed(overrides, said):
    plan = planned(grpo(*SEED, *APART, *overrides))
    assert any(said in problem for problem in fatal(plan)), fatal(plan)


small = st.integers(1, 5)
wanted = st.fixed_dictionaries(
    {
        "nodes": small,
        "slots": small,
        "judges": st.booleans(),
        "colocated": st.booleans(),
        "R": small,
        "Rn": small,
        "I": st.none() | small,
        "In": st.none() | small,
        "tp": st.sampled_from([1, 2, 3]),
        "judge_tp": st.sampled_from([1, 2]),
        "drawing_tp": st.sampled_from([1, 2]),
        "batch": st.sampled_from([4, 6, 12, 16]),
    }
)


BASE = GRPORun()


def configuration(want):
    env = EnvironmentsConfig.model_validate(
        {
            "reward_model": {
                "enabled": want["judges"],
                "model_name": "judge",
                "resources": {"gpus_per_node": want["R"], "num_nodes": want["Rn"]},
                "dtensor_cfg": {"tensor_parallel_size": want["judge_tp"]},
            }
        }
    )
    own = "policy.generation.colocated"
    changed = {
        "env": env,
        "cluster.num_nodes": want["nodes"],
        "cluster.gpus_per_node": want["slots"],
        f"{own}.enabled": want["colocated"],
        f"{own}.resources.gpus_per_node": want["I"],
        f"{own}.resources.num_nodes": want["In"],
        "policy.dtensor_cfg.tensor_parallel_size": want["tp"],
        "policy.generation.vllm_cfg.tensor_parallel_size": want["drawing_tp"],
        "policy.train_global_batch_size": want["batch"],
        "grpo.num_prompts_per_step": 3,
        "grpo.num_generations_per_prompt": 16,
    }
    return with_changes(BASE, changed)


def divisions(want):
    """Every way to give whole numbers of slots to policy, generation and reward model.

    Tried, not computed: slots of one node, or whole nodes of several, are handed out in all ways,
    and those stay in which each role has what it asked for and the policy has the rest.
    """
    nodes, g = want["nodes"], want["slots"]
    judge_nodes = want["Rn"] if want["judges"] else 0
    units = range(g + 1) if nodes == 1 else range(nodes + 1)
    for policy, drawing, judging in itertools.product(units, repeat=3):
        if nodes == 1:
            asked_judging = want["R"] if want["judges"] else 0
            asked_drawing = 0 if want["colocated"] else want["I"]
            if (
                policy + drawing + judging == g
                and policy > 0
                and judging == asked_judging
                and drawing == asked_drawing
                and (want["colocated"] or want["In"] in (None, 1))
                and (not want["judges"] or want["Rn"] == 1)
            ):
                yield policy, drawing, judging
        elif policy + drawing + judging == nodes and judging == judge_nodes and policy > 0:
            judge_slots = judging * want["R"]
            if judging and want["R"] > g:
                continue
            if want["colocated"] and drawing == 0:
                yield policy * g, 0, judge_slots
            elif not want["colocated"] and policy + drawing == 1:
                if want["In"] in (None, 1) and want["I"] and want["I"] < g:
                    yield g - want["I"], want["I"], judge_slots
            elif not want["colocated"] and 0 < drawing == want["In"] and want["I"] in (None, g):
                yield policy * g, drawing * g, judge_slots


def feasible(want):
    for policy, drawing, judging in divisions(want):
        drawn_on = policy if want["colocated"] else drawing
        if (
            policy % want["tp"] == 0
            and min(drawn_on, want["slots"]) % want["drawing_tp"] == 0  # of each node
            and judging % want["judge_tp"] == 0
            and want["batch"] % (policy // want["tp"]) == 0
        ):
            return policy, drawing, judging
    return None


@settings(max_examples=200, deadline=None)
@given(wanted)
def test_a_plan_fits_where_trying_everything_finds_one_and_then_it_is_that_one(want):
    plan = planned(configuration(want))
    found = feasible(want)
    assert plan.fits == (found is not None)
    if found is not None:
        own: dict[RoleName, int] = {
            role.name: len(role.slots) for role in plan.roles if role.shares_with is None
        }
        assert found == tuple(own.get(n, 0) for n in ("policy", "generation", "reward_model"))


@settings(max_examples=300, deadline=None)
@given(wanted)
def test_every_slot_is_there_and_none_is_given_twice(want):
    plan = planned(configuration(want))
    everything = set(slots(range(want["nodes"]), range(want["slots"])))
    given_out: list[Slot] = []
    for role in plan.roles:
        assert set(role.slots) <= everything
        assert len(set(role.slots)) == len(role.slots) == role.mesh.size
        if role.shares_with is None:
            given_out += role.slots
        else:
            owner = plan.role(role.shares_with)
            assert owner is None or owner.slots == role.slots
        per_node = len([slot for slot in role.slots if slot.node == role.slots[0].node])
        if per_node % role.mesh.group_size == 0:
            for group in role.groups:
                assert len({slot.node for slot in group}) == 1
                indices = [slot.index for slot in group]
                assert indices == list(range(indices[0], indices[0] + len(group)))
    assert len(set(given_out)) == len(given_out)
    assert plan.num_idle == len(everything) - len(given_out)


def kind(problem):
    return re.sub(r"\d+", "#", problem)


@settings(max_examples=300, deadline=None)
@given(wanted)
def test_the_setting_that_is_named_fits(want):
    config = configuration(want)
    for conflict in (m for m in planned(config).conflicts if m.is_fatal):
        changes = as_changes(conflict.fix)
        assert changes or conflict.fix.startswith("a multiple of "), conflict
        left = {kind(m.problem) for m in planned(with_changes(config, changes)).conflicts}
        assert kind(conflict.problem) not in left or not changes, conflict
