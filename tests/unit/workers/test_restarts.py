"""How often replicas that are lost may be started again."""

from __future__ import annotations

from dataclasses import dataclass

from laurel.workers.supervisor import EndlessRestarts, Restarts


@dataclass
class Replica:
    name: str = "generation replica 1"
    last_failure: str | None = None


def test_a_loss_is_told_by_its_first_line_and_counted() -> None:
    told: list[str] = []
    restarts = Restarts(2, told.append)
    loss = restarts.after(RuntimeError("signal 9\nits traceback"), Replica())
    assert loss.refused is None
    assert restarts.number == 1
    assert told == [
        "generation replica 1 was lost (signal 9); it is started again, restart 1 of 2 at most"
    ]


def test_the_limit_is_that_of_all_together() -> None:
    told: list[str] = []
    restarts = Restarts(2, told.append)
    for index in range(2):
        assert restarts.after(RuntimeError("signal 9"), Replica(f"r{index}")).refused is None
    loss = restarts.after(RuntimeError("signal 9"), Replica("r2"))
    assert str(loss) == ("r2 was lost (signal 9); no restart: 2 restarts are the limit of a run")
    assert restarts.number == len(told) == 2


def test_what_fails_as_before_is_no_accident_unless_it_worked_in_between() -> None:
    restarts = Restarts(8, lambda _: None)
    replica = Replica()
    assert restarts.after(RuntimeError("no memory"), replica).refused is None
    again = restarts.after(RuntimeError("no memory"), replica)
    assert again.refused == "it failed in the same way when it had just been started again"
    assert restarts.after(RuntimeError("another reason"), replica).refused is None
    replica.last_failure = None  # it brought something
    assert restarts.after(RuntimeError("another reason"), replica).refused is None
    assert restarts.number == 3


def test_one_that_works_in_between_is_started_again_however_often() -> None:
    told: list[str] = []
    restarts = EndlessRestarts(2, told.append)
    replica = Replica("replica 0")
    for _ in range(30):
        loss = restarts.after(RuntimeError("its process is gone (signal 9)"), replica)
        assert (loss.refused, loss.pause) == (None, 0.0)
        replica.last_failure = None  # it did something
    assert told == ["warning: replica 0 died (signal 9); it is started again"] * 30


def test_one_that_does_nothing_in_between_is_given_up_after_pauses() -> None:
    restarts = EndlessRestarts(8, lambda _: None)
    replica = Replica("replica 0")
    losses = [restarts.after(RuntimeError("exit code 70"), replica) for _ in range(9)]
    assert [loss.pause for loss in losses[:8]] == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert str(losses[8]) == (
        "warning: replica 0 died (exit code 70); no restart: it died 9 times in a row"
    )
