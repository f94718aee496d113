"""Counts of threads, processes and calls are bounded by what the machine has."""

import pytest

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config, sections_below
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import OfMachine
from laurel.errors import ConfigError, speaking
from laurel.run.specs import OPTIONS
from laurel.sandbox.limits import available_cores
from laurel.workers.process import PER_CORE, check_counts, counts_in, prepare

COUNTS = ("cpu_threads", "num_workers", "num_replicas", "max_concurrent")
MEMORY = {("GenerationConfig", "max_concurrent")}
"""Completions side by side in one forward pass: they start neither a thread nor a process."""


def fields_that_count():
    """Yield every field of a configuration whose name says that it counts what runs at a time."""
    sections = {
        one for schema in SCHEMAS.values() for one, _ in sections_below(schema, plugged_in=True)
    }
    for section in sections:
        for name, field in section.model_fields.items():
            if name in COUNTS and (section.__name__, name) not in MEMORY:
                yield section.__name__, name, field


def test_every_count_says_what_it_counts():
    found = list(fields_that_count())
    assert len(found) >= 8
    for section, name, field in found:
        assert any(isinstance(one, OfMachine) for one in field.metadata), (section, name)


WHERE = {
    "env.reward_model.num_workers": ["env.reward_model.function={path: 'm:f'}"],
    "env.reward_model.num_replicas": ["env.reward_model.model_name=x"],
    "env.reward_model.max_concurrent": ["env.reward_model.function={path: 'm:f'}"],
}


def test_each_is_refused_beyond_a_small_multiple_of_the_cores_with_key_and_limit():
    base = [one for key in WHERE if key != "env.reward_model.num_replicas" for one in WHERE[key]]
    everything = load_config(
        GRPORun,
        None,
        [
            "cluster.cpu_threads=1",
            *base[:1],
            "env.reward_model.max_concurrent=1",
            "env.tools.num_workers=1",
        ],
    ).config
    keys = [key for key, _, bound in counts_in(everything) if not bound.is_lowered]
    assert len(keys) >= 5
    for key, _, bound in counts_in(everything):
        if bound.is_lowered:
            continue
        most = PER_CORE[bound.what] * available_cores()
        more = WHERE.get(key, [])
        check_counts(load_config(GRPORun, None, [*more, f"{key}={most}"]).config)
        with pytest.raises(ConfigError, match=rf"^{key}={most + 1}: .* {most} {bound.what}"):
            check_counts(load_config(GRPORun, None, [*more, f"{key}={most + 1}"]).config)


def test_counts_of_several_models_and_defaults_pass():
    models = "[{name: a, model_name: x}, {name: b, normalize: none, function: {path: 'm:f'}}]"
    settings = [f"env.reward_model.models={models}", "env.reward_model.max_concurrent=1000000"]
    config = load_config(GRPORun, None, settings).config
    with pytest.raises(ConfigError, match=r"env\.reward_model\.max_concurrent=1000000"):
        check_counts(config)
    for schema in SCHEMAS.values():
        check_counts(load_config(schema, None, []).config)


def test_threads_are_refused_before_torch_starts_them():
    with pytest.raises(ConfigError, match=r"cluster\.cpu_threads=1000000"):
        prepare("cpu", cpu_threads=1_000_000, seed=0)
    with speaking(OPTIONS), pytest.raises(ConfigError, match=r"^--cpu-threads 1000000: "):
        prepare("cpu", cpu_threads=1_000_000, seed=0)


@pytest.mark.parametrize("size", ["cluster.num_nodes=100000000", "cluster.gpus_per_node=1000000"])
def test_a_cluster_has_a_size_that_can_be_planned(size):
    with pytest.raises(ConfigError, match="of at most"):
        load_config(GRPORun, None, [size])
    with pytest.raises(ConfigError, match="slots"):
        load_config(GRPORun, None, ["cluster.num_nodes=16384", "cluster.gpus_per_node=1024"])
