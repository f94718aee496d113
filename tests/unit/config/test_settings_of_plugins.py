"""Settings of a plug-in that is not chosen, and keys that the chosen one does not read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from laurel import plugins
from laurel.cli.main import app
from laurel.config.load import check_tree, load_config, sections_below
from laurel.config.plugged import NameOf, OpenSection
from laurel.config.reward_model import LossConfig
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import graft


def choosers(kind: Kind) -> dict[type[OpenSection], str]:
    """The sections of a schema whose own key chooses a plug-in, with that key."""
    return {
        section: key
        for section, _ in sections_below(SCHEMAS[kind], plugged_in=True)
        if issubclass(section, OpenSection)
        for key, field in section.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, NameOf) and mark.kind == section.kind_of_plugin
    }


@pytest.mark.parametrize("kind", SCHEMAS)
def test_settings_of_a_plugin_that_is_not_chosen_are_named(kind: Kind) -> None:
    tried = 0
    for section, chooser in choosers(kind).items():
        for key, field in section.all_plugged_in():
            settings: Any = field.annotation
            name = key.removesuffix(section.suffix_of_plugins)
            if not settings.model_fields:
                continue
            set_by_hand = settings.model_construct(**{next(iter(settings.model_fields)): object()})
            for chosen in ("another", name, "auto"):
                given: Any = {chooser: chosen, key: set_by_hand}
                said = section.model_construct(**given).without_effect()
                assert said == ({key: f"{chooser} is another"} if chosen == "another" else {})
            tried += 1
    assert tried or kind != "grpo"


def warnings_of(kind: Kind, tree: dict[str, Any]) -> list[str]:
    return list(check_tree(SCHEMAS[kind], graft(tree, "settings"))[1].warnings())


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"loss_fn": {"gmpo": {"clip_low": 0.1}}}, "loss_fn.gmpo"),
        ({"grpo": {"adv_estimator": {"pass_at_k": {"k": 4}}}}, "grpo.adv_estimator.pass_at_k"),
        (
            {"policy": {"generation": {"backend": "transformers", "vllm_kwargs": {"seed": 1}}}},
            "policy.generation.vllm_kwargs",
        ),
        (
            {"policy": {"generation": {"backend": "vllm", "conversation_cache_gib": 1.0}}},
            "policy.generation.conversation_cache_gib",
        ),
    ],
)
def test_the_loader_says_so(tree: dict[str, Any], key: str) -> None:
    (line,) = warnings_of("grpo", tree)
    assert f"no effect beside the others: {key} (" in line


OURS = {"normalize_rewards": "divides", "use_leave_one_out_baseline": "mean"}


@pytest.mark.parametrize("name", plugins.names("advantages"))
@pytest.mark.parametrize("key", OURS)
def test_what_grpo_says_of_an_estimator_that_does_not_read_it_is_named(name: str, key: str) -> None:
    own = plugins.find(plugins.Advantage, name)
    overrides = [f"++grpo.{key}=true", f"grpo.adv_estimator.name={name}"]
    overrides += ["grpo.tree={}"] if own.compares_branches else []
    reads = {"divides": own.divides, "mean": own.baseline == "mean" and not own.whitens}
    said = [f"grpo.{key}=true has no effect beside grpo.adv_estimator.name={name}"]
    warnings = load_config(SCHEMAS["grpo"], None, overrides).warnings
    told = [line for line in warnings if "has no effect" in line]
    assert told == ([] if reads[OURS[key]] else said)


OTHER = {
    "use_margin": True,
    "label_smoothing": 0.1,
    "center_rewards_coefficient": 0.01,
    "tie_parameter": 2.0,
    "step_margin": 3.0,
}


@pytest.mark.parametrize("name", plugins.names("reward_losses"))
def test_a_key_that_a_reward_loss_does_not_read_is_refused(name: str) -> None:
    assert LossConfig.model_fields.keys() - {"type"} == OTHER.keys()
    for key, value in OTHER.items():
        given: dict[str, Any] = {"type": name, key: value}
        if key in plugins.find(plugins.PreferenceLoss, name).keys:
            assert LossConfig(**given)[key] == value
        else:
            with pytest.raises(ValidationError, match=f"{key} has no meaning for type={name}"):
                LossConfig(**given)


def test_shown_are_the_settings_of_the_plugins_that_a_run_uses() -> None:
    def shown(*overrides: str) -> dict[str, Any]:
        asked = ["config", "show", "--for", "grpo", "--json", *overrides]
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, asked).stdout)
        return found

    several = {"composite", "custom"}
    for name in plugins.names("environments"):
        if plugins.find(plugins.EnvironmentKind, name).several:
            continue
        kinds = set(plugins.names("environments")) & shown(f"data.env_name={name}")["env"].keys()
        assert kinds - several == {"reward_model", name}
    assert "math" in shown()["env"]
    assert {"code", "math"} <= shown("+env.code.num_workers=1")["env"].keys()
    for kind, section, key in (
        ("advantages", "grpo.adv_estimator", "name"),
        ("losses", "loss_fn", "loss_type"),
    ):
        for name in plugins.names(kind):
            needs = ["grpo.tree={}"] if name == "tree" else []
            needs += ["loss_fn.token_level_loss=false"] if name == "gmpo" else []
            there: Any = shown(f"{section}.{key}={name}", *needs)
            for part in section.split("."):
                there = there[part]
            has = plugins.plugin(kind, name).section is not None
            assert set(plugins.names(kind)) & there.keys() == ({name} if has else set())
