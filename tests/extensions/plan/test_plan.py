import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.sft import SFTRun
from laurel.errors import ConfigError
from laurel.extensions.plan.options import PlanOptions
from laurel.extensions.plan.plan import command_of_file, run_plan
from laurel.models.checkpoint.store import CheckpointStore
from laurel.models.loading.pretrained import count_parameters, read_shape
from laurel.models.parallel.tensor import tensor_plan
from laurel.models.spec import ModelSpec
from laurel.planning.memory import Shapes
from laurel.run.model import read_shapes
from laurel.run.request import judge_notes, sampling_notes
from laurel.run.train import trained
from model_directories import save_model
from planned import fitted
from saved_steps import save_step
from tiny import tiny_language_model

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"
POLICY = (
    "num_parameters=1.54B,hidden_size=1536,num_layers=28,intermediate_size=8960,num_heads=12,"
    "num_kv_heads=2,vocab_size=151936"
)
JUDGE = (
    "hidden_size=1024,num_layers=28,intermediate_size=3072,num_heads=16,num_kv_heads=8,"
    "head_dim=128,vocab_size=151936"
)
LLAMA_70B = (
    "hidden_size=8192,num_layers=80,intermediate_size=28672,num_heads=64,num_kv_heads=8,"
    "vocab_size=128256"
)
SEED = [
    "policy.max_total_sequence_length=2048",
    "cluster.gpus_per_node=8",
    "env.reward_model.dtensor_cfg.tensor_parallel_size=4",
    "policy.dtensor_cfg.tensor_parallel_size=2",
    "env.reward_model.resources.gpus_per_node=4",
]


def options(**given):
    return PlanOptions(policy_shape=POLICY, reward_shape=JUDGE, **given)  # type: ignore[arg-type]


def saved_config(directory, model_type, **own):
    """A configuration in a directory without weights, which are not read."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type, **sizes | own)
    config.save_pretrained(directory)
    return config


def test_the_page_of_the_seeds_colocated_run_and_the_facts_of_one_on_two_nodes(capsys):
    assert run_plan(EXAMPLES / "grpo_rm_1B.yaml", SEED, options(device_memory="80GiB"))
    page = capsys.readouterr().out
    assert "cluster  1 node x 8 slots = 8, 0 idle" in page
    assert "node 0          | PG PG | PG PG | R  R  R  R  |" in page
    assert "dp 2 x tp 2" in page
    assert "512 completions / 2 = 256 each" in page
    assert "1.54G parameters x 4 bytes / 4 ranks = 1.4 GiB" in page
    assert page.endswith("it fits\n")
    given = options(as_json=True, num_nodes=2, slots_per_node=4, device_memory="80GiB")
    changes = ["policy.train_global_batch_size=256"]
    assert run_plan(EXAMPLES / "grpo_rm_1B.yaml", changes, given)
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is True
    assert (facts["cluster"]["idle"], facts["cluster"]["device_memory"]) == (3, 80 * 2**30)
    roles = {role["name"]: role for role in facts["roles"]}
    assert roles["policy"]["slots"] == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert roles["reward_model"]["slots"] == [[1, 0]]
    (waste,) = facts["misfits"]  # one slot of a whole node
    assert not waste["is_fatal"]


LENGTHS = {"prompt_tokens": 512, "completion_tokens": 1024}


def test_the_seconds_of_a_step_are_one_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert run_plan(EXAMPLES / "grpo_rm_1B.yaml", SEED, options(device="H100", **LENGTHS))
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("seconds of a step on H100"))
    lines = lines[start : lines.index("", start)]
    table = [line.split() for line in lines]
    names = [row[0] for row in table]
    assert names[names.index("phase") + 1 :] == (
        ["generation", "scoring", "log-probs", "training", "weight", "step"]
    )
    assert float(table[-1][-1]) > 1  # padded rows take longer
    assert max(map(len, lines)) <= 60


def test_a_device_has_its_own_memory_and_its_seconds_are_facts(capsys):
    given = options(device="h200", efficiency=0.5, as_json=True, **LENGTHS)
    assert run_plan(EXAMPLES / "grpo_rm_1B.yaml", SEED, given)
    facts = json.loads(capsys.readouterr().out)
    assert facts["cluster"]["device_memory"] == 141_000_000_000
    time = facts["time"]
    assert time["device"]["name"] == "H200"
    assert time["efficiency"] == {"products": 0.5, "memory": 0.7}
    assert time["seconds"] < time["padded_seconds"]
    assert time["phases"][0]["name"] == "generation"
    run_plan(EXAMPLES / "grpo_rm_1B.yaml", SEED, options(as_json=True))
    assert "time" not in json.loads(capsys.readouterr().out)


def test_larger_micro_batches_that_fit_are_named_until_their_size_is_said(capsys):
    def notes(*changes):
        given = options(device="H100", as_json=True)
        assert run_plan(EXAMPLES / "grpo_rm_1B.yaml", [*SEED, *changes], given)
        facts = json.loads(capsys.readouterr().out)
        return facts, [n for n in facts["notes"] if "train_mb_tokens" in n]

    facts, (said,) = notes()
    (setting,) = (word for word in said.split() if word.startswith("policy.sequence_packing"))
    larger, none = notes(setting)
    assert none == []
    before, now = (one["batches"][0]["num_micro_batches"] for one in (facts, larger))
    assert f"at most {now} passes instead of {before}" in said
    (training,) = (p["total"] for p in larger["memory"] if p["phase"] == "training")
    assert training <= 0.9 * 80e9
    assert notes("cluster.device=cpu")[1] == []
    automatic, (chosen,) = notes("policy.sequence_packing.train_mb_tokens=auto")
    assert automatic["memory"] == larger["memory"]
    assert chosen.endswith(f"auto: {int(setting.partition('=')[2]):,} tokens")


@pytest.mark.parametrize(("is_used", "urls"), [(True, None), (False, None), (True, ["http://j"])])
def test_a_judge_beside_the_policy_is_said_to_be_left_out(is_used, urls):
    asked = {"urls": urls, "url_model": "judge"} if urls else {"model_name": "results/judge"}
    judge = {**asked, "judge": {}}
    parts = [{"name": name, "normalize": "none", **judge} for name in "ab"]
    for source, times in ((judge, 1), ({"models": parts}, 2)):
        section = {"policy": {"model_name": "p"}, "env": {"reward_model": source}}
        section["env"]["reward_model"]["enabled"] = is_used
        notes = judge_notes(GRPORun.model_validate(section), on_cluster=False)
        said = [note for note in notes if "the judge results/judge is not counted" in note]
        assert len(said) == (times if is_used and urls is None else 0)


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_judge_that_the_run_would_refuse_on_a_cluster_is_a_note_of_the_plan(backend, capsys):
    judge = ["env.reward_model.enabled=true", "env.reward_model.model_name=results/judge"]
    judge += ["env.reward_model.judge={}"]
    given = options(kind="grpo", as_json=True)
    assert run_plan(None, [*judge, "policy.model_name=p", f"cluster.backend={backend}"], given)
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    refused = "the run is refused. env.reward_model.judge: on a cluster"
    assert note.startswith(refused if backend == "ray" else "the judge results/judge is not")


def test_what_does_not_fit_is_a_page_too(capsys):
    changes = [*SEED, "env.reward_model.resources.gpus_per_node=8"]
    assert not run_plan(EXAMPLES / "grpo_rm_1B.yaml", changes, options())
    page = capsys.readouterr().out
    assert "CONFLICT  the roles of a node need reward model 8 + policy at least 2 = 10" in page
    assert "  fix     env.reward_model.resources.gpus_per_node=4" in page
    assert page.endswith("it does not fit\n")


def test_a_model_in_a_directory_tells_its_own_shape(tmp_path, capsys):
    config = saved_config(tmp_path, "qwen3", num_hidden_layers=3, head_dim=16)
    config.num_labels = 1
    network = AutoModelForSequenceClassification.from_config(config)
    parameters = sum(p.numel() for p in network.parameters())
    shape = read_shape(ModelSpec(name=str(tmp_path)), has_language_head=False)
    assert shape.num_parameters == parameters
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (3, 4, 2)
    assert (shape.intermediate_size, shape.head_dim, shape.normalises_heads) == (96, 16, True)
    # the language head is tied to the embedding or as large as it
    language = count_parameters(ModelSpec(name=str(tmp_path)))
    tied = config.tie_word_embeddings
    assert language == parameters - 64 + (0 if tied else 500 * 64)
    changes = [f"policy.model_name={tmp_path}"]
    assert run_plan(EXAMPLES / "rm.yaml", changes, PlanOptions(as_json=True))
    facts = json.loads(capsys.readouterr().out)
    assert facts["models"]["policy"]["num_parameters"] == parameters
    assert facts["memory"][0]["parts"]["weights"] == 4 * parameters


def test_a_model_that_cannot_be_read_leaves_the_rest_of_the_plan(tmp_path, capsys):
    changes = [f"policy.model_name={tmp_path}/nowhere"]
    assert run_plan(EXAMPLES / "rm.yaml", changes, PlanOptions(slots_per_node=2))
    page = capsys.readouterr().out
    assert "| P | P |" in page
    assert "memory of the policy is not estimated: policy.model_name=" in page
    assert "--policy-shape would tell it" in page
    assert page.splitlines()[-1].startswith("slots and batches fit; whether the memory does is not")
    assert run_plan(EXAMPLES / "rm.yaml", changes, PlanOptions(as_json=True))
    facts = json.loads(capsys.readouterr().out)
    assert "no such directory" in facts["memory_not_estimated"]["policy"]
    assert facts["memory"] == []


def test_a_run_is_planned_by_its_checkpoint(tmp_path, capsys):
    run = tmp_path / "run"
    with CheckpointStore(run) as store:
        save = lambda directory: save_model(directory, tiny_language_model("qwen3"))  # noqa: E731
        save_step(store, 3, save, metric=None)
    changes = [f"policy.model_name={run}"]
    assert run_plan(EXAMPLES / "rm.yaml", changes, PlanOptions(as_json=True))
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory_not_estimated"] == {}
    assert facts["models"]["policy"]["num_layers"] > 0
    assert facts["notes"] == [f"{run} holds checkpoints, none marked best; the newest is step_3"]


def test_a_file_says_which_command_it_is_for():
    found = {
        name: command_of_file(EXAMPLES / f"{name}.yaml") for name in ("rm", "sft", "grpo_rm_1B")
    }
    assert found == {"rm": "rm", "sft": "sft", "grpo_rm_1B": "grpo"}
    assert command_of_file(None) == "rm"


def test_bad_options_are_told():
    with pytest.raises(ConfigError, match="no amount of memory"):
        run_plan(EXAMPLES / "rm.yaml", [], PlanOptions(device_memory="lots"))
    with pytest.raises(ConfigError, match="lacks num_layers"):
        run_plan(EXAMPLES / "rm.yaml", [], PlanOptions(policy_shape="hidden_size=8"))
    with pytest.raises(ConfigError, match="--device V100: the peaks of"):
        run_plan(EXAMPLES / "rm.yaml", [], PlanOptions(device="V100"))


def test_the_exit_code_is_2_where_it_does_not_fit_and_torch_is_not_loaded():
    program = (
        "import sys\nfrom laurel.cli.main import main\n"
        "sys.argv = ['laurel', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules, 'torch is loaded'\n"
    )
    arguments = ["plan", "-c", str(EXAMPLES / "rm.yaml"), "--policy-shape", LLAMA_70B]
    for changes, status in (([], 0), (["--gpus-per-node", "3"], 2)):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments, *changes],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model_type", "own"),
    [("mixtral", {"num_local_experts": 4}), ("qwen3_moe", {"num_experts": 4, "head_dim": 16})],
)
def test_what_loading_would_not_split_is_a_conflict_and_never_proposed(
    tmp_path, capsys, model_type, own
):
    config = saved_config(tmp_path, model_type, **own)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError) as refused:
        tensor_plan(network, 2)
    changes = [f"policy.model_name={tmp_path}"]
    key = "policy.dtensor_cfg.tensor_parallel_size"
    given = PlanOptions(kind="sft", slots_per_node=4)
    assert not run_plan(None, [*changes, f"{key}=2"], given)
    page = capsys.readouterr().out
    assert f"CONFLICT  {key}=2 is refused when the model of policy is loaded: " in page
    assert str(refused.value) in page
    assert f"  fix     {key}=1" in page
    assert run_plan(None, changes, given)
    capsys.readouterr()
    # Where memory is short, two tensor-parallel ranks would do, if loading took them.
    recomputes = "policy.dtensor_cfg.activation_checkpointing=true"
    settings = ["cluster.device=cpu", "cluster.gpus_per_node=4", recomputes]
    run = load_config(SFTRun, None, settings).config
    shape = read_shape(ModelSpec(name=str(tmp_path)), has_language_head=True)
    assert shape.refuses_tensor_parallel == str(refused.value)
    taken = fitted(run, Shapes(policy=shape)).phases[0].total
    for refusal, proposes in ((None, True), (shape.refuses_tensor_parallel, False)):
        known = Shapes(policy=replace(shape, refuses_tensor_parallel=refusal))
        (conflict,) = fitted(run, known, device_memory=int(0.9 * taken)).conflicts
        assert (f"{key}=" in conflict.fix) == proposes
    # A plan of one's own is asked for likewise.
    plan = "policy.dtensor_cfg.custom_parallel_plan={'model.layers.*.self_attn.o_proj': rowwise}"
    assert run_plan(None, [*changes, f"{key}=2", plan], given)


def test_a_teacher_tells_its_own_shape(tmp_path):
    saved_config(tmp_path / "teacher", "qwen3", hidden_size=128)
    key = "loss_fn.distillation.model_name"

    def found(name):
        settings = ["policy.scratch={}", f"+{key}={tmp_path / name}"]
        return read_shapes(load_config(GRPORun, None, settings).config)

    teacher = found("teacher").shapes.teacher
    assert teacher is not None
    assert (teacher.hidden_size, teacher.vocab_size) == (128, 500)
    missing = found("nowhere")
    assert missing.shapes.teacher is None
    (note,) = missing.notes
    assert note.startswith(f"the teacher is left out of memory: {key}=")


def test_several_judges_in_directories_tell_their_own_shapes(tmp_path):
    saved_config(tmp_path, "mixtral", num_local_experts=4)
    judges = f"[{{name: a, model_name: {tmp_path}}}, {{name: b, model_name: {tmp_path}}}]"
    settings = [f"env.reward_model.models={judges}", "env.reward_model.enabled=true"]
    found = read_shapes(load_config(GRPORun, None, settings).config)
    assert len(found.shapes.reward_models) == 2
    assert all(shape.refuses_tensor_parallel for shape in found.shapes.reward_models)
    plan = "env.reward_model.dtensor_cfg.custom_parallel_plan={'*.o_proj': rowwise}"
    found = read_shapes(load_config(GRPORun, None, [*settings, plan]).config)
    assert not any(shape.refuses_tensor_parallel for shape in found.shapes.reward_models)


def test_a_cut_distribution_is_said():
    def notes(**generation):
        return sampling_notes(GRPORun.model_validate({"policy": {"generation": generation}}))

    assert notes() == notes(top_p=1.0, val_top_p=0.5) == []
    (both,) = notes(top_p=0.9, top_k=50)
    assert both.startswith("policy.generation.top_p=0.9 and policy.generation.top_k=50: ")


@pytest.mark.parametrize("kind", ["rm", "sft", "grpo"])
def test_the_plan_and_the_run_refuse_the_same_metric_and_name_what_switches_it_off(kind):
    named = ["data.train_data_path=t.jsonl", "data.val_data_path=v.jsonl", "policy.scratch={}"]
    metric = {"rm": "validation-default_loss", "sft": "val_loss", "grpo": "val:accuracy"}[kind]
    asked = [*named, f"checkpointing.metric_name={metric}"]
    off = [*asked, f"{kind}.val_period=0", f"{kind}.val_at_end=false"]
    options = PlanOptions(kind=kind, as_json=True)
    words = rf"Validation is off: {kind}\.val_period=0, {kind}\.val_at_end=false"
    with pytest.raises(ConfigError, match=words):
        run_plan(None, off, options)
    with pytest.raises(ConfigError, match=words):
        trained(kind, None, off, Console(file=io.StringIO()))
    assert run_plan(None, asked, options)
    # Nobody asks for the metric of a run that saves nothing.
    assert run_plan(None, [*off, "checkpointing.enabled=false"], options)
