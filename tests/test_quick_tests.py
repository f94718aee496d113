"""What `make test` leaves out is more of the same, and never the last of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laurel.environments.registry import built_in
from site_commands import all_commands

TESTS = Path(__file__).parent

COMMANDS = {
    "config": "extensions/importing/test_import_config.py::",
    "data": "extensions/data_check/test_data_check.py::test_pairs_fit_three_commands",
    "demo": "extensions/demo/test_demo.py::test_the_policy_is_rewarded_by_the_reward_model",
    "doctor": "extensions/doctor/test_doctor.py::",
    "eval": "end_to_end/test_eval_reward_models.py::test_reward_bench_from_rows_to_files",
    "export": "extensions/export/test_export.py::test_plain_transformers_gives_the_scores",
    "grpo": "end_to_end/test_grpo_resume.py::test_kill_9_at_any_moment",
    "init": "extensions/starter/test_init.py::test_a_starter_from_scratch_runs_as_it_is",
    "plan": "extensions/plan/test_plan.py::",
    "report": "extensions/report/test_report_command.py::test_report",
    "rm": "end_to_end/test_reward_training.py::test_the_form_of_the_seeds",
    "sandbox": "extensions/code/test_sandbox_tiers.py::test_the_command_says_what_holds",
    "score": "extensions/score/test_score.py::",
    "serve": "extensions/server/test_serve.py::test_a_model_its_scores_and_another_one",
    "sft": "end_to_end/test_sft.py::test_it_learns_to_answer_and_to_stop",
    "sweep": "extensions/sweep/test_sweep_runs.py::test_a_grid_over_folds_names_the_better_rate",
}
ENVIRONMENTS = {
    "math": "end_to_end/test_grpo.py::test_with_the_math_environment",
    "math_default": "contracts/test_environment.py::test_any_number_of_conversations[math]",
    "code": "end_to_end/test_grpo_code.py::test_programs_are_graded_by_tests",
    "reward_model": "end_to_end/test_reward_model_as_environment.py::test_d29_rewards",
    "reasoning_gym": "extensions/reasoning_gym/test_reasoning_gym.py::test_answers_stand_in",
    "tools": "extensions/function_tools/test_tools.py::test_the_answer_is_graded_by_another",
    "composite": "contracts/test_environment.py::test_any_number_of_conversations[composite",
}
OTHERS = (
    "end_to_end/test_grpo_resume.py::test_kill_9_at_any_moment",
    "end_to_end/test_on_ray.py::test_one_rank_on_ray_is_one_rank_here",
    "extensions/server/test_serve.py::test_a_model_its_scores_and_another_one",
)


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> set[str]:
    """The names of all quick tests, from the folder `tests` on."""
    config = request.config
    collected = {Path(config.invocation_params.dir, name).resolve() for name in config.args}
    if not collected <= {TESTS, TESTS.parent} or config.option.keyword:
        pytest.skip("needs a run of all tests, which were not collected")
    return {
        f"{item.path.relative_to(TESTS).as_posix()}::{item.name}"
        for item in request.session.items
        if not item.get_closest_marker("slow")
    }


def missing(quick: set[str], named: Any) -> list[str]:
    return [name for name in named if not any(test.startswith(name) for test in quick)]


def test_every_command_is_run(quick: set[str]) -> None:
    assert set(COMMANDS) == {path[0] for path, _, _ in all_commands()}
    assert not missing(quick, COMMANDS.values())


def test_every_environment_judges(quick: set[str]) -> None:
    assert set(ENVIRONMENTS) == {*built_in(), "composite"}
    assert not missing(quick, ENVIRONMENTS.values())


def test_a_run_that_is_killed_a_run_on_ray_and_a_server_are_among_them(quick: set[str]) -> None:
    assert not missing(quick, OTHERS)


def test_every_slow_parameter_is_one_of_a_test(
    quick: set[str], slow_parameters: dict[str, bool]
) -> None:
    assert quick
    assert slow_parameters
    assert [name for name, is_in_an_id in slow_parameters.items() if not is_in_an_id] == []


def test_every_contract_suite_has_an_implementation(quick: set[str]) -> None:
    suites = [f"contracts/{path.name}::" for path in (TESTS / "contracts").glob("test_*.py")]
    assert suites
    assert not missing(quick, suites)
