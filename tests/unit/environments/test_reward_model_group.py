"""The model of a reward-model environment in processes of its own."""

import functools

import pytest

from laurel.config.environments import EnvironmentsConfig, RewardModelEnvironmentConfig
from laurel.environments.registry import create_environments
from laurel.environments.reward_model_environment import gpus_of_actor, ranks_of, scorer_spec_of
from laurel.errors import CheckpointError, ConfigError, WorkerError
from laurel.models.spec import ParallelShape
from laurel.rewards.open import ScorerPlacement, open_local, open_scorer
from laurel.types import Message, group_of
from local_group import LocalGroup
from process_group import ProcessGroup
from reward_models import write_run

ONE = ParallelShape()
GROUPS = [
    group_of((Message("user", "Where?"),), ("By the gate.", "No.", "In the river"), group_id="a"),
    group_of((Message("user", "Bread?"),), ("Wine.", "Bread and wine."), group_id="b"),
]


def config_of(**settings):
    return RewardModelEnvironmentConfig.model_validate({"precision": "float32", **settings})


def in_this_process(*args, **kwargs):
    return LocalGroup("reward_model", *args, **kwargs)


def values(scorer):
    return [score.value for scores in scorer.score_now(GROUPS) for score in scores]


def placed(make_group=in_this_process, shape=ONE):
    """All ranks in one group."""
    return ScorerPlacement(
        make_group=lambda name, ranks: make_group, shape=shape, is_one_group=True
    )


def opened(config, make_group=in_this_process, *, shape=ONE, said=None):
    tell = (said if said is not None else []).append
    spec = scorer_spec_of(config, device="cpu")
    return open_scorer(spec, say=tell, placement=placed(make_group, shape))


def here(config, say=lambda _: None):
    return open_local(scorer_spec_of(config, device="cpu"), say=say)


def test_a_torn_checkpoint_is_told_before_there_is_a_group(tmp_path):
    def never(*_args, **_kwargs):
        raise AssertionError("a group was made")

    run = write_run(tmp_path / "run", {1: 0.5})
    weights = run / "step_1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors has"):
        opened(config_of(model_name=str(run)), never)


@pytest.mark.slow
def test_what_the_ranks_find_wrong_with_the_model_is_the_users_error(checkpoint):
    plan = {"custom_parallel_plan": {"no.such": "rowwise"}}
    config = config_of(model_name=str(checkpoint), dtensor_cfg=plan)
    two = functools.partial(ProcessGroup, "reward_model", 2)
    with pytest.raises(ConfigError, match=r"env\.reward_model\.dtensor_cfg\.custom_parallel_plan"):
        opened(config, two, shape=ParallelShape(tp=2))


def test_a_group_whose_workers_do_not_answer_is_ended(checkpoint):
    class Silent:
        is_open = True

        def call_one(self, *_args):
            raise WorkerError("no answer")

        def shutdown(self):
            self.is_open = False

    group = Silent()
    with pytest.raises(WorkerError, match="no answer"):
        opened(config_of(model_name=str(checkpoint)), lambda *_args, **_kwargs: group)
    assert not group.is_open


def test_the_registry_opens_models_elsewhere(checkpoint):
    asked = []

    def make_group(name, ranks):
        asked.append((name, ranks))
        return in_this_process

    opening = ScorerPlacement(make_group=make_group, is_one_group=True)

    config = EnvironmentsConfig.model_validate(
        {
            "reward_model": {"model_name": str(checkpoint), "precision": "float32"},
            "composite": {"both": {"parts": [{"env": "reward_model"}, {"env": "math"}]}},
        }
    )
    made = create_environments(["math"], config, opening=opening)
    assert asked == [], "nobody asked for a reward model"
    made["math"].shutdown()
    made = create_environments(["both", "reward_model"], config, opening=opening)
    assert asked == [("", None)], "one scorer for both"
    log = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "No."}]
    local = here(config.reward_model)
    asked_for = group_of((Message("user", "Where?"),), ("No.",), group_id="x")
    expected = [local.score_now([asked_for])[0][0].value]
    assert made["reward_model"].step([log], [None]).rewards.tolist() == expected
    group = made["reward_model"]._scorer._group
    for environment in made.values():
        environment.shutdown()
    assert group.alive() == [False]


@pytest.mark.parametrize(
    ("tp", "resources", "shape"),
    [
        (1, {}, ParallelShape()),
        (4, {}, ParallelShape(tp=4)),
        (1, {"gpus_per_node": 1, "num_nodes": 1}, ParallelShape()),
        (4, {"gpus_per_node": 4, "num_nodes": 1}, ParallelShape(tp=4)),
        (4, {"gpus_per_node": 8, "num_nodes": 2}, ParallelShape(tp=4, dp_replicate=4)),
        (2, {"num_nodes": 2}, ParallelShape(tp=2, dp_replicate=2)),
    ],
)
def test_the_ranks_that_settings_ask_for(tp, resources, shape):
    settings = {"model_name": "m", "dtensor_cfg": {"tensor_parallel_size": tp}}
    config = config_of(**settings, resources=resources)
    assert ranks_of(config) == shape
    # One rank is the actor itself, which then has the GPU.
    assert gpus_of_actor(config) == (1 if shape.num_ranks == 1 else 0)
    assert gpus_of_actor(config, device="cpu") == 0


@pytest.mark.parametrize(("urls", "gpus"), [(None, 1), (["http://127.0.0.1:1"], 0)])
def test_a_judge_that_the_actor_loads_has_its_gpu(urls, gpus):
    judge = {"judge": {}, **({"urls": urls, "url_model": "m"} if urls else {"model_name": "m"})}
    models = [{"name": name, "normalize": "none", **judge} for name in "ab"]
    for source in (judge, {"models": models}):
        config = RewardModelEnvironmentConfig.model_validate(source)
        assert gpus_of_actor(config) == gpus
        assert gpus_of_actor(config, device="cpu") == 0


def test_slots_that_make_no_whole_replicas():
    settings = {"dtensor_cfg": {"tensor_parallel_size": 3}, "resources": {"gpus_per_node": 4}}
    with pytest.raises(ConfigError, match="tensor_parallel_size=3 does not divide the 4 slots"):
        ranks_of(config_of(model_name="m", **settings))
