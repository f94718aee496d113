"""Keys spelled as other systems spell them."""

from pathlib import Path

import pytest

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config, to_yaml
from laurel.errors import ConfigError

SPELLINGS = ("use_reward_loop", "reward_model.use_reward_loop", "env.reward_model.use_reward_loop")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_sets_the_one_key(file: Path, name: str) -> None:
    *blocks, key = name.split(".")
    file.write_text(
        "".join(f"{'  ' * i}{b}:\n" for i, b in enumerate(blocks))
        + f"{'  ' * len(blocks)}{key}: false\n"
    )
    for loaded in (load_config(GRPORun, file), load_config(GRPORun, None, [f"{name}=false"])):
        assert loaded.config.env.reward_model.use_reward_loop is False
        assert loaded.warnings == ()
        assert "\nuse_reward_loop" not in to_yaml(loaded.config)
    assert load_config(GRPORun).config.env.reward_model.use_reward_loop is True


def test_an_override_in_one_spelling_changes_a_file_in_another(file: Path) -> None:
    file.write_text("env: {reward_model: {batch_size: 3}}\nreward_model: {use_reward_loop: false}")
    found = load_config(GRPORun, file, ["use_reward_loop=true"]).config.env.reward_model
    assert (found.use_reward_loop, found.batch_size) == (True, 3)


def test_both_spellings_in_a_file_and_their_neighbours_are_problems(file: Path) -> None:
    file.write_text("use_reward_loop: false\nenv: {reward_model: {use_reward_loop: true}}")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: use_reward_loop: is another name of"):
        load_config(GRPORun, file)
    file.write_text("reward_model: {use_reward_loop: false, enable: true}")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: reward_model: unknown key"):
        load_config(GRPORun, file)
    file.write_text("use_reward_loop: perhaps")
    with pytest.raises(ConfigError, match=r"run\.yaml:1: .*use_reward_loop: must be true or false"):
        load_config(GRPORun, file)
