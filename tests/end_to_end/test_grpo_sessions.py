"""`laurel grpo` with servers of sessions: `make test-environments`, and `make test-openreward`."""

import random

import pytest

from laurel.models.tool_calls import HermesForm, ToolCall
from policy_runs import (
    grpo,
    grpo_settings,
    metrics_of,
    sft,
    sft_settings,
)
from runs import start, wait_until, write_rows
from sandbox_processes import wait_until as wait_for
from session_servers import ServerProcess

pytestmark = pytest.mark.slow
# How the policy is shown to guess, and what the server needs to be told.
GAMES = {
    "openenv": (str, "action_key: guess, observation_key: hint"),
    "openreward": (
        lambda number: HermesForm().write([ToolCall("submit", {"answer": int(number)})]),
        "environment: guesses",
    ),
}
LONG = ("policy.max_total_sequence_length=512", "policy.tokenizer.chat_template=hermes")


@pytest.mark.parametrize("kind", list(GAMES))
def test_a_server_dies_and_the_run_goes_on_as_if_it_had_not(tmp_path, kind):
    pytest.importorskip(kind, reason="make test-environments or test-openreward installs it")
    action, settings = GAMES[kind]
    drawn = random.Random(0)
    shown = [
        {"input": f"Guess a number from 1 to 9, game {n}.", "output": action(drawn.randint(1, 9))}
        for n in range(96)
    ]
    directory = tmp_path / "sft"
    directory.mkdir()
    write_rows(directory / "demonstrations.jsonl", shown)
    player = sft(sft_settings(directory, *LONG, "sft.max_num_epochs=12")).outcome.latest

    def changes_of(directory):
        own = [one for one in grpo_settings(directory, player) if not one.startswith("data.")]
        return [
            *own,
            *LONG,
            f"data.dataset_name={kind}",
            "data.env_name=game",
            "data.max_samples=40",
            "data.split_validation_size=0.2",
            f"env.{kind}={{game: {{url: '{server.url}', {settings}}}}}",
            "env.timeout_seconds=60",
            "policy.generation.max_new_tokens=48",
            "grpo.max_rollout_turns=2",
            "grpo.max_num_steps=6",
        ]

    with ServerProcess(f"{kind}_server.py", tmp_path) as server:
        straight, broken = tmp_path / "straight", tmp_path / "broken"
        grpo(changes_of(straight))
        figures = metrics_of(straight)[1]
        assert figures["env/game/num_failures"] == 0.0
        assert figures["env/game/ended"] > 0.0, "some guesses are right"
        assert figures["env/game/turns"] > 1.0, "and others are answered"
        begun = server.counts()[0]
        wait_for(lambda: server.counts() == (begun, begun))

        log = tmp_path / "out.txt"
        process = start(changes_of(broken), log=log, program=("-m", "laurel.cli.main", "grpo"))
        try:
            wait_until(lambda: (broken / "saves" / "step_2").is_dir(), process)
            server.kill()
            assert process.wait(timeout=120) == 75, log.read_text()
        finally:
            process.kill()
        said = log.read_text()
        assert f"env.{kind}.game: {server.url} has not answered for 6 s" in said
        assert "Traceback" not in said
        begun, ended = server.counts()
        server.start()
        done = grpo(changes_of(broken))
        assert "resuming from" in done.text
        expected, found = metrics_of(straight), metrics_of(broken)
        assert sorted(found) == sorted(expected)
        for step, figures in expected.items():
            # Which turns are sampled together depends on when the server answers: rounding.
            assert found[step] == pytest.approx(figures, rel=1e-5, abs=1e-6), f"step {step}"
        wait_for(lambda: server.counts()[0] - server.counts()[1] == begun - ended)
