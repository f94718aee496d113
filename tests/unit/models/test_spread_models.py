"""Models loaded into shares and saved from shares: the same as in one process, in less memory."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import spread_work
import threads
import tiny
from laurel.errors import CheckpointError
from laurel.models.checkpoint.state import load_training_state
from model_directories import edit_weights, save_model
from parallel_runs import together

SIZES = [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}]
SHARED = {"dtensor_cfg": {"sequence_parallel": True}}
LORA = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}
TOLERANCE = 1e-5


def name_of(sizes):
    return " ".join(f"{key}={value}" for key, value in sizes.items())


one_thread_of_module = threads.one_thread_of_module


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    networks = {
        "untied": tiny.tiny_policy("llama", std=0.05, path="padded").causal_lm,
        "tied": tiny.tiny_policy("qwen3-tied", std=0.05, path="padded").causal_lm,
        "rewards": tiny.tiny_classifier("qwen3", std=0.05),
        "decoder": tiny.tiny_language_model("gemma2"),
        "experts": tiny.mixtral(),
    }
    return {name: str(save_model(root / name, network)) for name, network in networks.items()}


def cases_of(models):
    """What is loaded, and whether straight into shares."""
    return [
        (("policy", models["untied"], SHARED), True),
        (("policy", models["tied"], LORA), True),
        (("reward", models["decoder"], LORA), True),
        (("policy", None, {"scratch": {"hidden_size": 32, "vocab_size": 400}}), False),
    ]


@pytest.mark.slow
def test_a_loaded_model_is_that_of_one_process_and_no_rank_holds_it_whole(models):
    cases, sizes = cases_of(models), {"dp_shard": 2, "tp": 2}
    alone = spread_work.load_all(None, [case for case, _ in cases])
    ranks = together(spread_work.load_all, 4, sizes, [case for case, _ in cases])
    for number, ((_, is_straight), wanted) in enumerate(zip(cases, alone, strict=True)):
        whole = sum(weight.nbytes for weight in wanted["weights"].values())
        largest = max(weight.nbytes for weight in wanted["weights"].values())
        for found in (rank[number] for rank in ranks):
            for key in ("notes", "trained", "training"):
                assert found[key] == wanted[key], key
            assert found["weights"].keys() == wanted["weights"].keys()
            for name, weight in wanted["weights"].items():
                assert torch.equal(found["weights"][name], weight), name
            torch.testing.assert_close(found["outputs"], wanted["outputs"], rtol=0, atol=TOLERANCE)
            assert found["difference"] < 5e-6
            # Every weight is divided over dp; of norms and adapters, tp has all on each rank.
            assert found["bytes"] < 0.6 * whole / 2
            if is_straight:
                assert found["largest"] <= largest / 2, found["by"]


@pytest.mark.slow
def test_what_cannot_be_read_straight_is_loaded_whole_and_spread_then(models, tmp_path):
    tied = AutoModelForCausalLM.from_pretrained(models["tied"])
    torch.save(tied.state_dict(), tmp_path / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(Path(models["tied"], name).read_bytes())
    both = save_model(tmp_path / "both", tied)
    embeddings = tied.get_input_embeddings().weight.detach()
    edit_weights(both, lambda w: w.update({"lm_head.weight": 2 * embeddings}))
    cases = [
        ("policy", models["experts"], {}),
        ("policy", str(tmp_path), {"safetensors_only": False}),
        ("policy", str(both), {}),  # transformers does not tie what differs
    ]
    alone = spread_work.load_all(None, cases)
    assert not torch.equal(alone[1]["outputs"], alone[2]["outputs"])
    for rank in together(spread_work.load_all, 2, {"dp_shard": 2}, cases):
        for found, wanted in zip(rank, alone, strict=True):
            assert found["weights"].keys() == wanted["weights"].keys()
            torch.testing.assert_close(found["outputs"], wanted["outputs"], rtol=0, atol=TOLERANCE)


def test_what_is_refused_in_one_process_is_refused_over_a_mesh(models, tmp_path):
    directories = {}
    for name, change in {
        "torn": lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
        "other size": lambda w: w.update({"model.norm.weight": torch.ones(31)}),
        "headless": lambda w: w.pop("lm_head.weight"),
        "scored": lambda w: w.update({"score.weight": torch.ones(1, 32)}),
    }.items():
        directories[name] = save_model(
            tmp_path / name, AutoModelForCausalLM.from_pretrained(models["untied"])
        )
        edit_weights(directories[name], change)
    directories["cut"] = save_model(
        tmp_path / "cut", AutoModelForCausalLM.from_pretrained(models["untied"])
    )
    file = directories["cut"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    cases = [("policy", str(path), {}) for path in directories.values()]
    cases += [
        ("policy", models["rewards"], {}),
        ("policy", str(tmp_path / "nowhere"), {}),
        ("policy", models["untied"], {"hf_config_overrides": {"atention_dropout": 0.25}}),
        ("reward", models["rewards"], {"hf_config_overrides": {"hidden_size": 64}}),
    ]
    wanted = spread_work.refused(None, cases)
    assert "nothing" not in wanted
    only_over_a_mesh = [
        ("policy", models["untied"], {"dtensor_cfg": {"tensor_parallel_size": 2}}),
    ]
    for said in together(spread_work.refused, 2, {"dp_shard": 2}, cases + only_over_a_mesh):
        assert said[:-1] == wanted
        assert "tensor_parallel_size=2 and a mesh with 1" in said[-1]


@pytest.mark.slow
def test_memory_at_its_highest_falls_with_the_ranks(tmp_path):
    """Of the process, as the kernel counts it."""
    wide = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "vocab_size": 4000,
    }
    network = tiny.tiny_policy("llama", path="padded", **wide).causal_lm
    directory = str(save_model(tmp_path / "model", network))
    whole = sum(p.numel() * p.element_size() for p in network.parameters())
    del network
    (alone,) = together(spread_work.peak_of_loading, 1, None, directory)
    ranks = together(spread_work.peak_of_loading, 4, {"dp_shard": 4}, directory)
    constant = 8e6  # objects of Python, and one weight's share on its way
    assert whole <= alone
    for peak in ranks:
        assert whole / 4 <= peak <= whole / 4 + constant < whole / 2


@pytest.mark.slow_parameters("dp_shard=2 tp=2")
@pytest.mark.parametrize("sizes", SIZES, ids=name_of)
def test_what_is_saved_from_shares_is_what_one_process_saves(sizes, models, tmp_path):
    cases = [("policy", models["untied"], {}), ("reward", models["rewards"], LORA)]
    if "tp" not in sizes:
        cases = [
            ("policy", models["tied"], LORA),
            ("reward", models["decoder"], {}),
            ("policy", models["experts"], {}),
        ]
    alone = [str(tmp_path / f"alone-{i}") for i in range(len(cases))]
    spread = [str(tmp_path / f"spread-{i}") for i in range(len(cases))]
    for path in (*alone, *spread):
        Path(path, "small").mkdir(parents=True)
    spread_work.save_all(None, cases, alone)
    together(spread_work.save_all, math.prod(sizes.values()), sizes, cases, spread)
    for wanted, found in zip(map(Path, alone), map(Path, spread), strict=True):
        names = {p.relative_to(wanted) for p in wanted.rglob("*") if "small" not in p.parts}
        assert names == {p.relative_to(found) for p in found.rglob("*") if "small" not in p.parts}
        for name in sorted(name for name in names if (wanted / name).is_file()):
            if name.suffix == ".safetensors":
                assert_same_tensors(load_file(found / name), load_file(wanted / name))
            elif name.name == "scoring.json":
                assert_same_scores(found / name, wanted / name)
            else:
                assert (found / name).read_bytes() == (wanted / name).read_bytes(), name
        check_small_files(found / "small", load_file(wanted / "model.safetensors"))


def assert_same_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def assert_same_scores(found, wanted):
    found, wanted = json.loads(found.read_text()), json.loads(wanted.read_text())
    scores = [rules.pop("golden") for rules in (found, wanted)]
    assert found == wanted
    assert len(scores[1]) == 2
    for one, other in zip(*scores, strict=True):
        assert one["messages"] == other["messages"]
        assert one["values_K"] == pytest.approx(other["values_K"], abs=TOLERANCE)


def check_small_files(directory, wanted):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    assert len(files) > 1
    assert {*files} == {path.name for path in directory.glob("*.safetensors*")} - {
        "model.safetensors.index.json"
    }
    held = {name: load_file(directory / name) for name in files}
    for tensors in held.values():
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 30_000 or len(tensors) == 1
    assert_same_tensors({n: t for tensors in held.values() for n, t in tensors.items()}, wanted)
    assert {n: f for f, tensors in held.items() for n in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())


RUN = [None, {"dp_shard": 2}, None, {"dp_shard": 2, "tp": 2}, {"tp": 2}]
"""Meshes of the parts of a run, each from the checkpoint of the one before; the first is straight
through in one process."""


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """A run that never stops, and one that goes from mesh to mesh, a step on each."""
    cases = [("policy", models["tied"], {}), ("reward", models["decoder"], LORA)]
    root = tmp_path_factory.mktemp("runs")
    straight = spread_work.go_on(None, cases, len(RUN[1:]))
    parts, before = [], None
    for number, sizes in enumerate(RUN[1:]):
        target = str(root / str(number))
        ranks = math.prod((sizes or {}).values())
        if sizes is None:
            found = [spread_work.go_on(None, cases, 1, resume=before, target=target)]
        else:
            found = together(spread_work.resumed, ranks, sizes, cases, 1, before, target)
        parts.append(found)
        before = target
    return root, cases, straight, parts


@pytest.mark.slow
def test_a_run_goes_on_over_any_mesh_as_if_it_had_never_stopped(runs):
    _, cases, straight, parts = runs
    for case in range(len(cases)):
        for rank in range(2):
            losses = [loss for found in parts for loss in found[rank % len(found)][case]["losses"]]
            assert losses == pytest.approx(straight[case]["losses"], abs=TOLERANCE)
        for found in parts[-1]:
            moments = found[case]["moments"]
            assert moments.keys() == straight[case]["moments"].keys()
            for name, wanted in straight[case]["moments"].items():
                torch.testing.assert_close(moments[name], wanted, rtol=1e-3, atol=1e-6)
    # A run that forgot its moments, or its schedule, would be another.
    assert len({round(loss, 4) for loss in straight[0]["losses"]}) == 4


@pytest.mark.slow
def test_ranks_hold_and_write_their_shares_of_the_state_of_the_optimizer(runs):
    root, cases, straight, parts = runs
    for case in range(len(cases)):
        whole = straight[case]["held"]
        for found in parts[0]:
            assert found[case]["held"] <= whole / 2 + 4 * len(straight[case]["moments"]) + 512
        folder = root / "0" / str(case) / spread_work.TRAINING
        files = sorted(path.name for path in (folder / "optimizer").iterdir())
        assert len(files) == 2
        written = [
            sum(t.nbytes for t in load_file(folder / "optimizer" / f).values()) for f in files
        ]
        assert sum(written) == sum(t.nbytes for t in straight[case]["moments"].values())
        assert max(written) <= 0.6 * sum(written)


@pytest.mark.slow
def test_a_part_that_is_missing_is_refused(runs, tmp_path):
    root, cases, _, _ = runs
    kind, directory, changes = cases[0]
    model = spread_work.load(kind, directory, **changes).model
    optimizer = spread_work.make_optimizer(model)
    folder = tmp_path / "training"
    copy(root / "0" / "0" / spread_work.TRAINING, folder)
    for lost in ("shard-00002", "shard-00001"):
        (file,) = (folder / "optimizer").glob(f"{lost}*")
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match="file is missing"):
            load_training_state(folder, optimizer=optimizer, scheduler=None)
        assert not optimizer.state
        file.write_bytes(content)


def copy(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


@pytest.mark.slow
def test_every_rank_gets_its_random_numbers_back_where_there_are_as_many(tmp_path):
    drawn = together(spread_work.draw_and_save, 2, {"dp_shard": 2}, str(tmp_path))
    assert drawn[0] != drawn[1]
    assert together(spread_work.restore_and_draw, 2, {"tp": 2}, str(tmp_path)) == drawn
    assert together(spread_work.restore_and_draw, 1, {}, str(tmp_path)) == drawn[:1]
    assert spread_work.restore_and_draw(None, str(tmp_path)) == drawn[0]


@pytest.mark.slow
def test_a_rank_that_cannot_save_leaves_no_torn_checkpoint(models, tmp_path):
    first, second = together(
        spread_work.fail_to_save, 2, {"dp_shard": 2}, models["tied"], str(tmp_path / "run")
    )
    for said in (first, second):
        assert "good" not in said
        for name in ("good", "odd", "full"):
            assert [n for n in said[f"{name}/there"] if n.startswith("step")] == ["step_1"]
            assert not [n for n in said[f"{name}/there"] if ".tmp" in n]
    assert "rank 1 failed" in first["odd"]
    assert second["odd"].startswith("ConfigError: this run cannot be saved: extra/odd")
    assert first["full"].startswith("IsADirectoryError")
    assert "could not be saved" in first["full/store"]
    assert "rank 0 failed" in second["full"]


@pytest.mark.slow
def test_nothing_that_is_written_can_run_code(runs, tmp_path):
    root, _, _, _ = runs
    suffixes = {path.suffix for path in root.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".jinja", ".md", ".safetensors"}
    written = root / "0" / "0" / spread_work.TRAINING
    assert together(spread_work.classes_unpickled, 1, written, tmp_path) == [[0, 1]]
