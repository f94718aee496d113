"""`train_mb_tokens: auto`: the largest that fit, chosen once, and kept by a run that resumes."""

import io
from contextlib import ExitStack

import pytest
from rich.console import Console

from laurel.config.load import load_config, to_yaml
from laurel.config.schemas import SCHEMAS
from laurel.plugins import Engine
from laurel.run import model
from laurel.run.context import RunContext
from laurel.run.model import read_shapes
from laurel.run.request import request_of

GIB = 2**30
KEY = "policy.sequence_packing.train_mb_tokens"
DEFAULT = 1024
MODEL = (
    "policy.model_name=null",
    "policy.scratch={hidden_size: 1024, num_layers: 12, num_heads: 16, vocab_size: 32768}",
    f"policy.max_total_sequence_length={DEFAULT}",
    "policy.train_global_batch_size=64",
    "cluster.device=auto",
)


def config_of(command, *overrides):
    wanted = [*MODEL, f"{KEY}=auto", *overrides]
    if command == "grpo":
        wanted += ["grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=8"]
    return load_config(SCHEMAS[command], None, wanted).config


def resolved(config, resume_from=None):
    """The tokens that a run takes, and what it prints."""
    console = Console(file=io.StringIO(), width=300)
    with ExitStack() as stack:
        context = RunContext(config=config, console=console, stack=stack, resume_from=resume_from)
        context = model.resolve_micro_batches(context)
    return context.config.policy.sequence_packing.train_mb_tokens, console.file.getvalue()


@pytest.fixture
def gpu(monkeypatch):
    """Gives the run a GPU of so much memory."""

    def give(gib):
        monkeypatch.setattr(model, "_device_memory", lambda _: int(gib * GIB))

    return give


@pytest.mark.parametrize("command", sorted(SCHEMAS))
def test_auto_is_the_largest_that_fits_a_gpu_and_null_on_a_cpu(command, gpu):
    config = config_of(command)
    on_cpu = config_of(command, "cluster.device=cpu")
    default = config.policy.token_budget
    assert resolved(on_cpu)[0] == default
    found = {}
    for gib in (6, 8, 24, 80):
        gpu(gib)
        found[gib], said = resolved(config)
        assert f"{KEY}=auto: {found[gib]:,} tokens" in said
        if found[gib] > default:  # all phases fit with it, and no larger one is better
            wanted = model.with_tokens(config, found[gib])
            assert (
                model.largest_tokens(wanted, read_shapes(config).shapes, gib * GIB) == (found[gib])
            )
            assert request_of(wanted).role("policy").batches[0].tokens == found[gib]
    assert found[6] <= found[8] <= found[24] <= found[80]
    assert found[80] > default
    gpu(0.5)
    tokens, said = resolved(config)
    assert tokens == default
    assert "do not fit" in said


def test_a_number_or_null_stays_as_it_is(gpu):
    gpu(80)
    assert resolved(config_of("rm", f"{KEY}=500")) == (500, "")
    assert resolved(config_of("rm", f"{KEY}=null")) == (None, "")


def test_padded_rows_stay_as_they_are(gpu):
    gpu(80)
    tokens, said = resolved(config_of("sft", "policy.sequence_packing.enabled=false"))
    assert tokens == DEFAULT
    assert "policy.sequence_packing.enabled is false" in said


def test_a_run_that_resumes_keeps_what_it_began_with(gpu, tmp_path):
    config = config_of("sft")
    gpu(24)
    first, _ = resolved(config)
    (tmp_path / "config.yaml").write_text(to_yaml(model.with_tokens(config, first)))
    gpu(80)
    assert resolved(config)[0] > first
    again, said = resolved(config, tmp_path)
    assert again == first
    assert "began" in said
    # One that began before there was `auto` goes on with what null means.
    (tmp_path / "config.yaml").write_text(to_yaml(config_of("sft", f"{KEY}=null")))
    assert resolved(config, tmp_path)[0] == DEFAULT


@pytest.mark.parametrize(("is_installed", "engine"), [(True, "vllm"), (False, "transformers")])
def test_a_run_counts_the_engine_that_it_uses(is_installed, engine, gpu, monkeypatch):
    """`auto` takes vLLM where it is installed; a plan, which is for other machines, always."""
    monkeypatch.setattr(Engine, "is_installed", property(lambda _: is_installed))
    counted = []
    monkeypatch.setattr(model, "largest_tokens", lambda config, *_: counted.append(config))
    gpu(80)
    config = config_of("grpo")
    resolved(config)
    assert [one.policy.generation.backend for one in counted] == [engine]
    assert request_of(config).drawing.has_own_weights
    assert request_of(counted[0]).drawing.has_own_weights is (engine == "vllm")
