"""The run of the laptop on a Ray cluster: the same figures, whichever way its models are spread."""

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from laurel.observe.loggers import read_metrics
from policy_runs import (
    MATCHES,
    grpo,
    grpo_settings,
    metrics_of,
    rewritten_turns,
    sft,
    sft_settings,
)
from runs import DIALOGUES, dialogue_rows, series, settings, train, write_rows

pytestmark = pytest.mark.usefixtures("small_cluster")

DP_2_CP_2 = ("cluster.gpus_per_node=4", "policy.dtensor_cfg.context_parallel_size=2")
DP_2 = ("cluster.gpus_per_node=2",)
TP_2 = ("cluster.gpus_per_node=2", "policy.dtensor_cfg.tensor_parallel_size=2")
NO_SAVES = "checkpointing.enabled=false"
BOUND = 1e-5


def figures(directory, step, names):
    return {name: metrics_of(directory)[step][name] for name in names}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=BOUND, abs=BOUND), name


RM_FIGURES = (
    "train/loss",
    "train/grad_norm",
    "train/rewards_chosen_mean",
    "train/rewards_rejected_mean",
)
RM_VALIDATED = ("validation-default/loss", "validation-default/margin_mean")
PLAIN_STEPS = "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2, momentum: 0.9}}"
"""Adam divides by what rounding makes of gradients near zero: its steps say little of them."""


def rm_settings(directory, *changes, rows=None):
    kept = (f"+{PLAIN_STEPS}", "rm.max_num_epochs=3", "rm.max_num_steps=10")
    chosen = [c for c in settings(directory, rows=rows) if not c.startswith("policy.optimizer")]
    return [*chosen, *kept, *changes]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A run in this process."""
    directory = tmp_path_factory.mktemp("here")
    train(rm_settings(directory))
    return directory


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path, here):
    """With each of them it learns the same as here."""
    first = train(rm_settings(tmp_path, *DP_2, "rm.max_num_steps=3", "checkpointing.save_period=3"))
    assert "placed  policy: node 0, slots 0-1" in first.text
    train(rm_settings(tmp_path, *TP_2, "rm.max_num_steps=6", "checkpointing.save_period=3"))
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "saves" / "step_6")
    last = train(rm_settings(tmp_path))
    assert "resuming from" in last.text
    for step in (1, 3, 4, 6, 7, 10):
        assert_close(figures(tmp_path, step, RM_FIGURES), figures(here, step, RM_FIGURES))
    for step in (5, 10):
        assert_close(figures(tmp_path, step, RM_VALIDATED), figures(here, step, RM_VALIDATED))


@pytest.mark.slow
def test_rows_of_one_dialogue_meet_on_two_ranks(tmp_path):
    """They divide the trees of a step otherwise, and learn the same."""
    file, found = write_rows(tmp_path / "rows.jsonl", dialogue_rows()), []
    for place, mesh in (("one", ()), ("two", DP_2)):
        changes = (*DIALOGUES, "data.group_by_prefix=true", "rm.max_num_steps=3", *mesh, NO_SAVES)
        train(rm_settings(tmp_path / place, *changes, rows=file))
        found.append([series(tmp_path / place, f"train/{name}") for name in ("loss", "grad_norm")])
    assert found[1] == [pytest.approx(one, rel=BOUND) for one in found[0]]


SFT_FIGURES = ("train/loss", "train/grad_norm")


def sft_plain(directory, *changes):
    chosen = [c for c in sft_settings(directory) if not c.startswith("policy.optimizer")]
    return [*chosen, f"+{PLAIN_STEPS}", "sft.max_num_steps=6", "sft.max_num_epochs=2", *changes]


@pytest.mark.slow
def test_fine_tuning_is_the_same_spread(tmp_path):
    here, spread = tmp_path / "here", tmp_path / "spread"
    sft(sft_plain(here))
    sft(sft_plain(spread, *DP_2_CP_2))
    for step in (1, 3, 6):
        assert_close(figures(spread, step, SFT_FIGURES), figures(here, step, SFT_FIGURES))
    AutoModelForCausalLM.from_pretrained(spread / "saves" / "step_6")


GRPO_FIGURES = ("train/loss", "train/grad_norm", "train/reward", "train/approx_entropy")
GRPO = (
    "~policy.optimizer",
    "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2}}",
    "loss_fn.reference_policy_kl_penalty=0.05",
    "grpo.max_num_steps=2",
)


def own_slots(judge):
    return (
        "env.reward_model.enabled=true",
        f"env.reward_model.model_name={judge}",
        "env.reward_model.precision=float32",
        "data.env_name=reward_model",
    )


ROLES = {
    "slots of their own": (
        "cluster.gpus_per_node=4",
        "env.reward_model.resources.gpus_per_node=2",
        "env.reward_model.dtensor_cfg.tensor_parallel_size=2",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
    ),
    "tp 2 in turns, judged by two replicas": (
        "cluster.gpus_per_node=4",
        "env.reward_model.resources.gpus_per_node=2",
        "policy.dtensor_cfg.tensor_parallel_size=2",
    ),
}


@pytest.fixture(scope="module")
def grpo_here(tmp_path_factory, model, judge):
    directory = tmp_path_factory.mktemp("grpo_here")
    grpo(grpo_settings(directory, model, *GRPO, *own_slots(judge)))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("ways", ROLES.values(), ids=ROLES)
def test_grpo_is_the_same_with_roles_of_their_own(tmp_path, model, judge, grpo_here, ways, caplog):
    finished = grpo(grpo_settings(tmp_path, model, *GRPO, *own_slots(judge), *ways))
    assert "sampled by GeneratorReplicas, weights by broadcast" in finished.text
    assert "reward_model: node 0, slots 2-3" in finished.text
    own = "policy.generation.colocated.enabled=false" in ways
    generation = "slot 1" if own else "slots 0-1, in turns with policy"
    assert f"generation: node 0, {generation}" in finished.text
    assert "broke off" not in caplog.text
    lines = read_metrics(tmp_path / "logs" / "exp_001" / "metrics.jsonl")
    key = "performance/weight_transfer_fallbacks"
    assert [line[key] for line in lines if key in line] == [0.0, 0.0]
    for step in (1, 2):
        assert_close(figures(tmp_path, step, GRPO_FIGURES), figures(grpo_here, step, GRPO_FIGURES))
    AutoModelForCausalLM.from_pretrained(tmp_path / "saves" / "step_2")


@pytest.mark.slow
def test_rollouts_of_several_sequences_are_the_same_on_two_ranks(tmp_path, model):
    """They branch, too: the sequences of a rollout stay with one rank."""
    settled = (*GRPO, NO_SAVES, "grpo.val_period=0", "grpo.val_at_end=false")
    for place, mesh in (("one", ()), ("two", DP_2)):
        turns = rewritten_turns(tmp_path / place, 2)
        grpo(grpo_settings(tmp_path / place, model, *settled, *turns, *mesh))
    names = (*GRPO_FIGURES, "train/sequences_per_rollout", "train/tree/sampled_tokens")
    for step in (1, 2):
        expected = figures(tmp_path / "one", step, names)
        assert expected["train/sequences_per_rollout"] > 1.5
        assert expected["train/grad_norm"] > 0
        assert_close(figures(tmp_path / "two", step, names), expected)


def test_one_rank_on_ray_is_one_rank_here(tmp_path, model):
    """One of each, without a judge: the figures are equal to the last bit."""
    settled = ("grpo.max_num_steps=2", *MATCHES)
    grpo(grpo_settings(tmp_path / "here", model, *settled))
    through_ray = "policy.generation.weight_transfer=object_store"
    ray = grpo_settings(tmp_path / "ray", model, *settled, "cluster.backend=ray", through_ray)
    assert "sampled by GeneratorReplicas, weights by object_store" in grpo(ray).text
    expected, found = metrics_of(tmp_path / "here"), metrics_of(tmp_path / "ray")
    for step, row in expected.items():
        assert {k: v for k, v in found[step].items() if k in row} == row
