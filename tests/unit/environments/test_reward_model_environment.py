"""A reward model as an environment. Defects of the anchors that each test rules out: D1 to D30."""

import asyncio
import copy
import gc
import importlib.util
import json
import math
import pickle
import shutil
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes import WordScorer
from laurel import plugins
from laurel.environments.interface import EnvironmentReturn
from laurel.environments.reward_model_environment import (
    RewardModelEnvironment,
    RewardModelEnvironmentConfig,
)
from laurel.errors import (
    ConfigError,
    DataError,
    EnvironmentFailedError,
    MissingDependencyError,
    ModelError,
)
from laurel.rewards.open import load_scorer
from laurel.rewards.spec import ScorerSpec, find_model
from laurel.types import Message, Task, group_of
from reward_models import write_foreign_model, write_run

HEAD = {"enabled": True, "reward_model_type": "bradley_terry"}


@pytest.fixture(scope="module")
def environment(checkpoint):
    with make(checkpoint) as made:
        yield made


def make(directory=None, **settings):
    settings = {"precision": "float32", **settings}
    if directory is not None:
        settings["model_name"] = str(directory)
    return RewardModelEnvironment(settings, device="cpu")


def local_scorer(directory):
    options = ScorerSpec(precision="float32", device="cpu")
    return load_scorer(find_model(str(directory)), options, say=lambda line: None)


def log(*texts, roles=("user", "assistant")):
    return [
        {"role": roles[index % len(roles)], "content": text} for index, text in enumerate(texts)
    ]


LOGS = [
    log("Where?", "By the gate."),
    log("Where is the laurel?", "In the river, old man."),
    log("Where?", "No."),
    log("Bread?", "Wine.", "And then?", "More wine."),
    log("Where?", ""),
    log("", "An answer to nothing"),
]


def judge(environment, logs, infos=None):
    return environment.step(logs, infos or [{}] * len(logs))


def rewards(environment, logs, infos=None):
    found = judge(environment, logs, infos)
    assert found.failures == [None] * len(logs)
    return found.rewards.tolist()


def test_d24_the_documented_settings_work_as_printed(tmp_path):
    """Only the hub's name is a directory here."""
    name = str(write_foreign_model(tmp_path))
    env_config = {
        "enabled": True,
        "model_name": name,
        "tokenizer": {"name": name},
        "precision": "bfloat16",
        "batch_size": 32,
        "resources": {"gpus_per_node": 1, "num_nodes": 1},
        "reward_model_cfg": {
            "enabled": True,
            "reward_model_type": "bradley_terry",
        },
    }
    reward_env = RewardModelEnvironment(env_config)
    found = reward_env.step([log("Where?", "By the gate.")], [{}])
    assert math.isfinite(found.rewards.item())
    env_config["reward_model_cfg"] = {"reward_model_type": "bradley_terry"}
    del env_config["batch_size"]  # which is NeMo RL's alone
    assert reward_env.config == RewardModelEnvironmentConfig(**env_config)
    reward_env.shutdown()


def test_keys_of_the_other_system_are_taken_and_named(checkpoint, caplog):
    settings = {
        "checkpoint_path": None,
        "max_model_len": 64,
        "logprob_batch_size": 8,
        "max_grad_norm": None,
        "generation": None,
        "offload_optimizer_for_logprob": False,
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": False},
        "dtensor_cfg": {
            "_v2": True,
            "enabled": True,
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "cpu_offload": False,
        },
        "batch_size": 4,
        "reward_model_cfg": HEAD,
        "processor": "math_hf_data_processor",
    }
    with make(checkpoint, **settings) as theirs, make(checkpoint) as ours:
        assert rewards(theirs, LOGS) == pytest.approx(rewards(ours, LOGS), abs=5e-6)
    (warning,) = [one.message for one in caplog.records if "mean nothing here" in one.message]
    names = ("logprob_batch_size", "max_grad_norm", "offload_optimizer_for_logprob", "processor")
    assert warning.startswith("env.reward_model: ")
    assert all(name in warning for name in names)


def test_a_step_unpacks_as_environments_of_the_other_system_do(environment):
    """Their own test calls it with an empty list of metadata."""
    found = environment.step(LOGS[:2], [])
    assert isinstance(found, EnvironmentReturn)
    observations, metadata, next_stop_strings, worth, terminateds, answers = found
    assert worth.tolist() == rewards(environment, LOGS[:2])
    assert (len(observations), metadata, next_stop_strings) == (2, [None, None], [None, None])
    assert terminateds.tolist() == [True, True]
    assert answers == [one[-1]["content"] for one in LOGS[:2]]
    for observation, reward in zip(observations, worth.tolist(), strict=True):
        word, number = observation["content"].split()
        assert (observation["role"], word) == ("environment", "Environment:")
        assert float(number) == pytest.approx(reward, rel=1e-5)
    given = [{"ground_truth": "By the gate."}, {"any": ["thing"]}]
    assert environment.step(LOGS[:2], given).metadata == given


def test_failures_travel_beside_the_six_fields():
    found = EnvironmentReturn([{}], [None], [None], torch.zeros(1), torch.ones(1), failures=["no"])
    assert len(found) == 6
    assert found.answers is None
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found._replace()):
        assert copied.failures == ["no"]
    assert found._replace(failures=None, answers=["a"]).failures is None
    assert "failures=['no']" in repr(found)


def test_settings_are_read_as_from_the_dictionary_that_they_were_given_as(environment, checkpoint):
    config = environment.config
    assert config["model_name"] == str(checkpoint) == config.get("model_name")
    assert config["dtensor_cfg"]["tensor_parallel_size"] == 1
    assert ("batch_tokens" in config, "batch" in config, config.get("batch", 3)) == (True, False, 3)
    with pytest.raises(KeyError, match="batch"):
        config["batch"]


def test_generation_in_vllm_computes_the_scores(checkpoint, monkeypatch):
    """What vLLM itself computes, `test_vllm_scorer` says."""
    asked = []

    def load(plugin, section, spec, say):
        asked.append((spec.found.name, spec.precision, section))
        return local_scorer(checkpoint)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(type(plugins.find(plugins.Engine, "vllm")), "open_scorer", load)
    block = {"backend": "vllm", "max_new_tokens": 1, "vllm_cfg": {"gpu_memory_utilization": 0.4}}
    with make(checkpoint, generation=block) as in_vllm:
        assert math.isfinite(rewards(in_vllm, LOGS[:1])[0])
    ((name, precision, section),) = asked
    assert (name, precision) == (str(checkpoint), "float32")
    assert (section.gpu_memory_utilization, section.tensor_parallel_size) == (0.4, 1)


def test_generation_in_vllm_is_refused_where_it_cannot_be(checkpoint, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="backend=vllm needs the package"):
        make(checkpoint, generation={"backend": "vllm"})
    with pytest.raises(ConfigError, match="num_replicas=2 with generation"):
        make(checkpoint, generation={"backend": "vllm"}, num_replicas=2)
    with pytest.raises(ConfigError, match="is for one model that this run loads"):
        make(urls=["http://localhost:1"], generation={"backend": "vllm"})
    with pytest.raises(ConfigError, match="backend"):
        make(checkpoint, generation={"backend": "megatron"})


def test_metadata_may_be_left_out_but_not_be_too_few(environment):
    assert environment.step(LOGS[:2]).rewards.tolist() == rewards(environment, LOGS[:2])
    with pytest.raises(ValueError, match="2 conversations came with 1 metadata"):
        environment.step(LOGS[:2], [{}])


def test_rewards_are_the_scores_of_the_model(environment):
    scorer = environment._scorer
    groups = [
        group_of((Message("user", entry[0]["content"]),), [entry[1]["content"]], group_id="g")
        for entry in LOGS
        if len(entry) == 2
    ]
    expected = [score.value for (score,) in scorer.score_now(groups)]
    found = rewards(environment, [entry for entry in LOGS if len(entry) == 2])
    assert found == pytest.approx(expected, abs=5e-6)
    assert len(set(found)) == 5


def test_d5_the_model_reads_its_own_template_on_the_raw_messages(environment):
    data = environment.preprocess_data(LOGS)
    tokenizer = environment.tokenizer
    for entry, ids_L, length in zip(
        LOGS, data["input_ids"], data["input_lengths"].tolist(), strict=True
    ):
        text = tokenizer.apply_chat_template(entry, tokenize=False)
        assert tokenizer.decode(ids_L[:length]) == text
        assert ids_L[:length].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert all(text.count(message["content"]) >= 1 for message in entry)


def test_preprocessed_data_is_padded_on_the_right_with_the_models_padding(environment):
    data = environment.preprocess_data(LOGS)
    ids_BL, lengths_B = data["input_ids"], data["input_lengths"]
    assert ids_BL.dtype == lengths_B.dtype == torch.int64
    assert ids_BL.shape == (6, int(lengths_B.max()))
    assert len(set(lengths_B.tolist())) > 1
    for ids_L, length in zip(ids_BL, lengths_B.tolist(), strict=True):
        assert (ids_L[length:] == environment.tokenizer.pad_token_id).all()
        assert ids_L[length - 1] != environment.tokenizer.pad_token_id
    assert not data["truncated"].any()
    nothing = environment.preprocess_data([])
    assert nothing["input_ids"].shape == (0, 0)
    assert nothing["input_lengths"].shape == nothing["truncated"].shape == (0,)


def test_d7_what_is_too_long_is_cut_and_counted(environment):
    """The contract holds 64 tokens; the answer is kept, the prompt is cut on the left."""
    long = log("the old man " * 100, "By the gate.")
    data = environment.preprocess_data([long, LOGS[0]])
    assert data["truncated"].tolist() == [True, False]
    assert data["input_lengths"][0] == 64
    assert "By the gate." in environment.tokenizer.decode(data["input_ids"][0])
    found = judge(environment, [long, LOGS[0]])
    figures = environment.global_post_process_and_metrics(
        {"rewards": found.rewards, "notes": found.notes}
    )[1]
    assert figures["reward_model_env/num_truncated"] == 1


def test_a_model_without_a_contract_takes_its_length_and_template_from_the_settings(tmp_path):
    name = str(write_foreign_model(tmp_path))
    block = {"name": name, "chat_template": "plain"}
    with make(name, tokenizer=block, max_model_len=60) as made:
        data = made.preprocess_data([LOGS[0], log("old man " * 50, "No.")])
        text = made.tokenizer.decode(data["input_ids"][0])
        assert text.startswith("User: Where?\n\nAssistant: By the gate.")
        assert data["input_lengths"][1] == 60


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_tokens": 50},
    ],
    ids=["forest", "budget"],
)
def test_d6_every_number_of_conversations_is_scored_as_one_by_one(checkpoint, settings):
    logs = [
        log(("Where?", "Bread?", "Where is the man?")[i % 3], f"answer {'very ' * (i % 7)}{i}")
        for i in range(17)
    ]
    with make(checkpoint, **settings) as made:
        alone = [rewards(made, [entry])[0] for entry in logs]
        assert len(set(alone)) == 17
        for count in (1, 2, 5, 17):
            assert rewards(made, logs[:count]) == pytest.approx(alone[:count], abs=5e-6)


class Counting:
    """A scorer that keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.inner = WordScorer(poison="~")

    async def score(self, groups):
        self.asked.append(groups)
        await asyncio.sleep(0)
        return await self.inner.score(groups)


def test_conversations_with_one_prompt_are_one_group_and_equal_ones_one_completion():
    scorer = Counting()
    logs = [log("A?", "x"), log("B?", "y"), log("A?", "zz"), log("A?", "x")]
    with RewardModelEnvironment({}, scorer=scorer) as made:
        found = rewards(made, logs)
    (groups,) = scorer.asked
    assert [[c.messages[0].content for c in g.completions_G] for g in groups] == [
        ["x", "zz"],
        ["y"],
    ]
    assert found[0] == found[3] != found[2]
    with RewardModelEnvironment({}, scorer=WordScorer()) as made:
        assert [rewards(made, [entry])[0] for entry in logs] == found


def test_a_scorer_from_elsewhere_is_asked_from_threads_and_from_a_running_loop():
    made = RewardModelEnvironment({}, scorer=Counting())

    async def all_at_once():
        here = rewards(made, LOGS)
        there = await asyncio.gather(*(asyncio.to_thread(rewards, made, LOGS) for _ in range(5)))
        return here, there

    here, there = asyncio.run(all_at_once())
    assert there == [here] * 5
    with pytest.raises(ConfigError, match="its tokens are not seen"):
        made.preprocess_data(LOGS)
    made.shutdown()


BROKEN = [
    ([], "has no message"),
    (log("Where?"), "ends with a message of 'user'"),
    ([*log("Where?"), {"role": "assistant", "content": None}], "message 2 has no role or no conte"),
    ([*log("Where?"), {"role": "assistant"}], "message 2 has no role or no content"),
    ([*log("Where?"), "By the gate."], "message 2 has no role or no content"),
    (log("Where?", "half \ud800 a character"), "an unpaired UTF-16 surrogate"),
]


@pytest.mark.parametrize(("broken", "why"), BROKEN)
def test_what_cannot_be_judged_fails_alone(environment, broken, why):
    found = judge(environment, [LOGS[0], broken, LOGS[1]])
    assert found.failures[0] is found.failures[2] is None
    assert why in found.failures[1]
    assert found.rewards[1].isnan(), "never 0.0"
    assert "no reward" in found.observations[1]["content"]
    assert found.terminateds.all()
    expected = rewards(environment, [LOGS[0], LOGS[1]])
    assert found.rewards[[0, 2]].tolist() == pytest.approx(expected, abs=5e-6)
    with pytest.raises(DataError, match=f"conversation 1: .*{why}"):
        environment.preprocess_data([LOGS[0], broken])


def test_a_reward_that_leaves_the_range_of_float32_is_a_failure():
    with RewardModelEnvironment({"transform": {"scale": 1e39}}, scorer=WordScorer()) as made:
        assert judge(made, LOGS[:1]).failures == ["the reward is not finite"]


def test_transforms_reach_the_rewards(checkpoint):
    with make(checkpoint) as plain:
        raw = rewards(plain, LOGS)
    settings = {"normalize": "stored", "scale": 3.0, "shift": 1.0, "clip": [-1.0, 2.0]}
    with make(checkpoint, transform=settings) as made:
        expected = [min(max((r - 0.5) / 2.0 * 3.0 + 1.0, -1.0), 2.0) for r in raw]
        judged = judge(made, LOGS)
        assert judged.rewards.tolist() == pytest.approx(expected, abs=2e-5)
        found = made.global_post_process_and_metrics(
            {"rewards": judged.rewards, "notes": judged.notes}
        )[1]
    assert found["reward_model_env/mean_score"] == pytest.approx(sum(raw) / 6, abs=1e-5)
    assert "reward_model_env/std_score" in found


def test_the_score_of_the_reference_is_subtracted(environment, checkpoint):
    logs = [LOGS[0], LOGS[2], LOGS[1], LOGS[0]]
    infos = [{"ground_truth": "In the river"}, {"ground_truth": "No."}, {}, None]
    with make(checkpoint, transform={"subtract_reference": True}) as made:
        found = judge(made, logs, infos)
        tasks = [
            Task(id=str(i), prompt=(), environment="e", metadata=info or {})
            for i, info in enumerate(infos)
        ]
        assert [rejected.task.id for rejected in made.validate(tasks)] == ["2", "3"]
    one, reference = rewards(environment, [LOGS[0], log("Where?", "In the river")])
    assert found.rewards[0].item() == pytest.approx(one - reference, abs=1e-5)
    assert found.rewards[1].item() == 0.0, "the reference itself"
    assert [failure is None for failure in found.failures] == [True, True, False, False]
    assert "no text 'ground_truth'" in found.failures[2]
    assert found.rewards[2:].isnan().all()


def test_d25_the_figures_are_those_of_the_batch_under_the_documented_names():
    batch = {"rewards": torch.tensor([1.0, 2.0, 6.0]), "num_failures": 2}
    with RewardModelEnvironment({}, scorer=WordScorer()) as made:
        same, figures = made.global_post_process_and_metrics(batch)
    assert same is batch
    # mean 3, squares 4 + 1 + 9 = 14, divided by 2
    assert figures == {
        "reward_model_env/num_samples": 3.0,
        "reward_model_env/mean_reward": 3.0,
        "reward_model_env/std_reward": pytest.approx(math.sqrt(7.0)),
        "reward_model_env/min_reward": 1.0,
        "reward_model_env/max_reward": 6.0,
        "reward_model_env/num_failures": 2.0,
    }


def test_running_normalisation_is_of_scores_less_those_of_references():
    settings = {"transform": {"normalize": "running", "subtract_reference": True}}
    infos = [{"ground_truth": "In the river"}] * 2 + [{}]
    with RewardModelEnvironment(settings, scorer=WordScorer()) as made:
        found = judge(made, LOGS[:3], infos)
        made.end_batch({"notes": found.notes})
        assert made.transform.seen.count == 2, "one has no reference, and no reward"
        assert made.transform.seen.mean == pytest.approx(found.rewards[:2].mean().item())
        # Those that a checkpoint before the first release held were counted when they came.
        made.end_batch({"notes": [{"score": 7.0, "truncated": False, "parts": {}}]})
        assert made.transform.seen.count == 2


def test_figures_of_nothing_are_absent():
    with RewardModelEnvironment({}, scorer=WordScorer()) as made:
        none = made.global_post_process_and_metrics({"rewards": [], "num_failures": 4})[1]
        one = made.global_post_process_and_metrics({"rewards": [2.0]})[1]
        unrewarded = made.global_post_process_and_metrics({"message_log": LOGS[:3]})[1]
    assert unrewarded["reward_model_env/num_samples"] == 3.0
    assert "reward_model_env/mean_reward" not in unrewarded
    assert none == {"reward_model_env/num_samples": 0.0, "reward_model_env/num_failures": 4.0}
    assert one["reward_model_env/mean_reward"] == 2.0
    assert "reward_model_env/std_reward" not in one


def test_d18_what_the_settings_get_wrong_is_told_before_anything_is_loaded(tmp_path, checkpoint):
    wrong = [
        ({"batch_tokns": 4}, ConfigError, "did you mean 'batch_tokens'"),
        ({"transform": {"clip": [2, 1]}}, ConfigError, "must be .lowest, highest"),
        ({"precision": "int8"}, ConfigError, "one of float32, bfloat16, float16"),
        ({"reward_model_cfg": {"enabled": False}}, ConfigError, "enabled: must be true"),
        (
            {"model_name": None, "models": [{"name": "a", "reward_model_cfg": {"enabled": False}}]},
            ConfigError,
            r"models\[0\]\.reward_model_cfg\.enabled: must be true",
        ),
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, ConfigError, "parallel_size=2.*one process"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, ConfigError, "Laurel has no context par"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True}}}, ConfigError, "merged weights"),
        ({"model_name": None}, ConfigError, "model_name is missing"),
        ({"model_name": str(tmp_path / "no")}, ModelError, r"env\.reward_model\.model_name=.*no"),
        ({"checkpoint_path": str(tmp_path / "no")}, ModelError, r"\.checkpoint_path=.*no such"),
        ({"tokenizer": {"name": str(tmp_path / "no")}}, ModelError, r"tokenizer\.name=.*no such"),
        ({"reward_model_cfg": {**HEAD, "attributes": ["x"]}}, ConfigError, "gives one score"),
    ]
    said = []
    for settings, kind, message in wrong:
        with pytest.raises(kind, match=message):
            RewardModelEnvironment(
                {"model_name": str(checkpoint), **settings}, device="cpu", say=said.append
            )
    assert said == [], "no model was loaded"


def test_stored_statistics_are_asked_for_before_the_model_is_loaded(tmp_path):
    said = []
    settings = {
        "model_name": str(write_foreign_model(tmp_path)),
        "transform": {"normalize": "stored"},
    }
    with pytest.raises(ConfigError, match="normalize=stored: the model was saved without the mean"):
        RewardModelEnvironment(settings, device="cpu", say=said.append)
    assert said == []


def test_a_language_model_is_refused_at_once(tmp_path):
    write_foreign_model(tmp_path, head=False)
    with pytest.raises(ModelError, match=r"without a reward head.*laurel rm policy\.model_name="):
        make(tmp_path)


def test_the_tokenizer_of_a_run_is_that_of_its_best_checkpoint(tmp_path):
    """Files repeat the model's name in the tokenizer block, whatever it means."""
    run = write_run(tmp_path / "run", {1: 0.6, 2: 0.9})
    with make(run, tokenizer={"name": str(run)}) as made, make(run / "step_2") as best:
        assert rewards(made, LOGS) == rewards(best, LOGS)


def test_checkpoint_path_takes_the_place_of_the_model(tmp_path, checkpoint):
    run = write_run(tmp_path / "run", {3: 0.9})
    settings = {"checkpoint_path": str(run), "tokenizer": {"name": str(checkpoint)}}
    with make(checkpoint, **settings) as made, make(run / "step_3") as direct:
        assert rewards(made, LOGS) == rewards(direct, LOGS)
        with make(checkpoint) as other:
            assert rewards(other, LOGS) != rewards(direct, LOGS)


def test_checkpoint_path_without_a_tokenizer_uses_that_of_the_model(tmp_path):
    name = write_foreign_model(tmp_path / "model")
    weights = write_foreign_model(tmp_path / "weights")
    for file in weights.glob("*token*"):
        file.unlink()
    (weights / "chat_template.jinja").unlink()
    with make(name, checkpoint_path=str(weights)) as made, make(name) as plain:
        assert rewards(made, LOGS) == rewards(plain, LOGS)


def test_the_noise_is_that_of_the_precision_in_units_of_the_reward(checkpoint):
    with make(checkpoint) as exact, make(checkpoint, transform={"scale": -10.0}) as scaled:
        assert 0 < exact.noise_floor() < 5e-6
        assert scaled.noise_floor() == pytest.approx(10 * exact.noise_floor())
        assert exact.state_dict()["noise"] == exact.noise_floor()


def test_the_noise_of_the_first_conversations_is_kept_and_resumed():
    class InSteps(WordScorer):
        def _score(self, conversation):
            score = super()._score(conversation)
            return replace(score, values_K=tuple(3 * value for value in score.values_K))

    made = RewardModelEnvironment({}, scorer=InSteps())
    before = made.noise_floor()
    assert made.state_dict()["noise"] is None, "nothing of the run was measured"
    rewards(made, LOGS)
    floor = made.noise_floor()
    assert 0 < floor < 1e-5
    assert before > 0
    kept = made._noise_probe.all()
    rewards(made, [log("Another?", "Not kept.")])
    assert made._noise_probe.all() == kept, "what is measured needs no more conversations"
    of_steps = made.step_noise_floor()
    assert of_steps == pytest.approx(3 * floor), "of the conversations that were kept"
    other = RewardModelEnvironment({}, scorer=WordScorer())
    other.load_state_dict(made.state_dict())
    assert (other.noise_floor(), other.step_noise_floor()) == (floor, of_steps)
    for one in (made, other):
        one.shutdown()


def test_a_resumed_run_hears_of_another_reward_model(checkpoint, tmp_path):
    """Replaced files in the same directory, with the version that `laurel serve` names too."""
    directory, lines = tmp_path / "rm", []
    shutil.copytree(checkpoint, directory)
    options = {"model_name": str(directory), "precision": "float32"}
    with RewardModelEnvironment(options, device="cpu", say=lines.append) as first:
        state, before = first.state_dict(), first._scorer.version
        first.load_state_dict(state)
    copied = {**options, "model_name": str(shutil.copytree(directory, tmp_path / "copied"))}
    with RewardModelEnvironment(copied, device="cpu", say=lines.append) as elsewhere:
        assert elsewhere._scorer.version != before, "it has the directory's name"
        elsewhere.load_state_dict(state)
    weights = load_file(directory / "model.safetensors")
    save_file({name: 1.01 * one for name, one in weights.items()}, directory / "model.safetensors")
    (directory / "scoring.json").write_text(
        json.dumps(json.loads((directory / "scoring.json").read_bytes()) | {"golden": []})
    )
    assert not any("another reward model" in line for line in lines)
    with RewardModelEnvironment(options, device="cpu", say=lines.append) as second:
        second.load_state_dict(state)
        second.load_state_dict({**state, "version": ""})
        after = second._scorer.version
    (told,) = [line for line in lines if "another reward model" in line]
    assert before != after
    assert before in told
    assert after in told


@pytest.mark.slow
def test_shutdown_lets_go_of_the_model(checkpoint):
    made = make(checkpoint)
    model = weakref.ref(made._scorer.model)
    made.shutdown()
    made.shutdown()
    gc.collect()
    assert model() is None
    with pytest.raises(EnvironmentFailedError, match="was shut down"):
        made.step(LOGS, [{}] * 6)


@pytest.mark.slow
def test_an_environment_that_is_forgotten_lets_go_of_the_model_and_its_thread(checkpoint):
    made = make(checkpoint)
    model = weakref.ref(made._scorer.model)
    del made
    gc.collect()
    assert model() is None
    before = threading.active_count()
    fake = RewardModelEnvironment({}, scorer=WordScorer())
    assert threading.active_count() == before + 1
    del fake
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.slow
def test_a_constructor_that_failed_leaves_nothing_to_complain_about():
    with pytest.raises(ConfigError):
        RewardModelEnvironment({})
    gc.collect()  # an exception in __del__ would be a warning, and warnings are errors
