"""The presets in `examples/configs/presets`: alone, behind a file, by hand and in runs."""

from pathlib import Path

import pytest

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.training.policy_loss import PolicyLoss
from policy_runs import MATCHES, grpo, grpo_settings, metrics_of

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
PRESETS = CONFIGS / "presets"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))

ONE_RIGHT, ONE_WRONG = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]
FIRST = {
    "cispo": [1.5, -0.5, -0.5, -0.5],  # mean 1/4, deviation 1/2
    "dapo": [1.5, -0.5, -0.5, -0.5],
    "dr_grpo": [0.75, -0.25, -0.25, -0.25],
    "gspo": [1.5, -0.5, -0.5, -0.5],
    "reinforce_plus_plus": [1.62019, -0.54006, -0.54006, -0.54006],  # over sqrt(1.5 / 7)
    "rloo": [1.0, -1 / 3, -1 / 3, -1 / 3],
}
"""Advantages of `ONE_RIGHT` in a batch with `ONE_WRONG`."""


def of(name):
    config = load_config(GRPORun, PRESETS / f"{name}.yaml", []).config
    assert isinstance(config, GRPORun)
    return config


def test_all_that_the_guide_names_are_there():
    assert sorted([*FIRST, "gdpo"]) == NAMES
    guide = (CONFIGS.parents[1] / "docs" / "grpo.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"presets/{name}.yaml" not in guide] == []


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_behind_a_file_and_changes_only_the_method(name, tmp_path):
    mine = tmp_path / "mine.yaml"
    base = CONFIGS / "grpo_math_1B.yaml"
    mine.write_text(f"defaults: [{base}, {PRESETS / name}.yaml]\n", encoding="utf-8")
    loaded, plain = load_config(GRPORun, mine, []), load_config(GRPORun, base, [])
    assert not loaded.warnings
    changed = {
        key
        for key, value in loaded.config.model_dump().items()
        if value != plain.config.model_dump()[key]
    }
    assert changed
    assert changed <= {"grpo", "loss_fn"}


@pytest.mark.parametrize("name", FIRST)
def test_its_advantages_by_hand(name):
    found = compute_advantages([ONE_RIGHT, ONE_WRONG], resolve(of(name).grpo))
    assert list(found.values_BG[0]) == pytest.approx(FIRST[name], rel=1e-4)


def test_gdpo_hears_each_component_by_hand():
    parts = [{"a": a, "b": b} for a, b in zip(ONE_RIGHT, [0.0, 0.0, 0.0, 10.0], strict=True)]
    found = compute_advantages(
        [[1.0, 0.0, 0.0, 10.0]], resolve(of("gdpo").grpo), components_BG=[parts]
    ).values_BG[0]
    # Each component alone is 3/2 and -1/2; their sums 1 and -1 have a deviation of sqrt(4/3).
    assert list(found) == pytest.approx(
        [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5], rel=1e-4
    )


def test_their_losses():
    expected = {
        "cispo": ("cispo", "tokens"),
        "dapo": ("ppo", "tokens"),
        "dr_grpo": ("ppo", "max_length"),
        "gdpo": ("ppo", "tokens"),
        "gspo": ("ppo", "sequences"),
        "reinforce_plus_plus": ("ppo", "tokens"),
        "rloo": ("reinforce", "max_length"),
    }
    for name, wanted in expected.items():
        loss = of(name).loss_fn
        assert (loss.loss_type, PolicyLoss(loss, max_length=8).normalizer) == wanted, name
    assert of("gspo").loss_fn.sequence_level_importance_ratios
    assert of("dapo").grpo.reward_shaping.enabled


@pytest.mark.slow_parameters("gdpo")
@pytest.mark.parametrize("name", ["dapo", "gdpo", "reinforce_plus_plus"])
def test_a_run_with_it_learns(name, tmp_path, model):
    """Those that change most of a run; what is left are loss and advantages, as above."""
    changes = ["grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_end=false", *MATCHES]
    if name == "gdpo":
        parts = "{as_components: true, parts: [{env: matches}, {env: math, weight: 2}]}"
        changes += ["data.env_name=both", f"+env.composite.both={parts}"]
    grpo(grpo_settings(tmp_path, model, *changes), path=PRESETS / f"{name}.yaml")
    figures = metrics_of(tmp_path)[1]
    assert figures["train/grad_norm"] > 0.0


@pytest.mark.slow
def test_gdpo_compares_the_parts_of_a_function_and_refuses_what_has_none(tmp_path, model):
    written = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
    both = "{'score': len(solution_str), 'long': len(solution_str), 'b': 'b' in solution_str}"
    changes = ["grpo.max_num_steps=1", "grpo.val_period=0", "grpo.val_at_end=false"]
    changes += ["env.reward_model.enabled=true", "data.env_name=reward_model"]
    for name, returned in (("parts", both), ("number", "float(len(solution_str))")):
        file = tmp_path / f"{name}.py"
        file.write_text(written + returned + "\n", encoding="utf-8")
        of_function = f"+env.reward_model.function={{path: '{file}:compute_score'}}"
        settings = grpo_settings(tmp_path / name, model, *changes, of_function)
        if name == "number":
            with pytest.raises(ConfigError, match=r"gdpo needs .*found: none"):
                grpo(settings, path=PRESETS / "gdpo.yaml")
        else:
            grpo(settings, path=PRESETS / "gdpo.yaml")
    figures = metrics_of(tmp_path / "parts")[1]
    assert figures["train/grad_norm"] > 0.0
    assert figures["train/rewards/long/mean"] == pytest.approx(figures["train/reward"])
    at_once = grpo_settings(tmp_path / "math", model, "grpo.max_num_steps=1")
    with pytest.raises(ConfigError, match="the environment math: "):
        grpo(at_once, path=PRESETS / "gdpo.yaml")
