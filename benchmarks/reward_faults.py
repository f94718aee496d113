"""How fast do rewards go on when a reward server is killed, and is any of them lost or doubled?

    python benchmarks/reward_faults.py

Reward servers without a model (`null_server`) as processes; groups stream through one client. A
random server is killed with SIGKILL again and again, and started anew after each time. A score that
is missing, comes twice or differs from the right one ends this program with exit code 1.

    python benchmarks/reward_faults.py --groups 20000 --kills 30 --seconds 60

What does each group wait while replicas of one server die? One server with `--replicas 3`; its
replicas are killed at random, at even intervals over so many seconds, and it starts them again.
Seconds are those of a group from its question to its scores, every try included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "null_server"))

import psutil
from null_server import ENVIRONMENT, NullScorer
from rounds import machine, table, write_json

from laurel.rewards.remote.dialects import dialect_of
from laurel.rewards.remote.http import HttpReplica
from laurel.rewards.remote.replica import ReplicaFault, ReplicaReply
from laurel.rewards.remote.router import Router, RouterOptions
from laurel.types import Group, Message, Score, group_of

START_SECONDS = 60.0
RECOVERY_SECONDS = 30.0
KEY_VARIABLE = "LAUREL_API_KEY"


class Server:
    """A reward server in a process of its own, always on the same port."""

    def __init__(self, key: str) -> None:
        self.port = 0
        self._environment = {**os.environ, **ENVIRONMENT, KEY_VARIABLE: key}
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        """Returns when it is ready."""
        command = [sys.executable, "-m", "laurel", "serve-null", "--access-log", "none"]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), *arguments],
            env=self._environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if line.startswith("ready"):
                self.port = int(line.rpartition(":")[2])
                # What it says from now on is read, or its pipe would fill.
                threading.Thread(target=self._process.stderr.read, daemon=True).start()
                return
        sys.exit(f"a reward server did not start: {''.join(said)}")

    @property
    def children(self) -> list[psutil.Process]:
        """Its replicas that live."""
        assert self._process is not None
        return [
            one
            for one in psutil.Process(self._process.pid).children()
            if one.status() != psutil.STATUS_ZOMBIE
        ]

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


@dataclass
class Ledger:
    """What became of every completion, and of every request that a death has cut short."""

    verdicts: Counter[tuple[int, int]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    groups: int = 0
    retried: int = 0
    cut_short: set[str] = field(default_factory=set)
    recovered: asyncio.Event = field(default_factory=asyncio.Event)
    answered: dict[str, asyncio.Event] = field(default_factory=dict)

    def take(self, index: int, scores_G: Sequence[Score], right_G: Sequence[Score]) -> None:
        for i, (score, right) in enumerate(zip(scores_G, right_G, strict=True)):
            self.verdicts[index, i] += 1
            if score.failure is not None:
                self.failures.append(score.failure)
            elif score.value != right.value:
                self.wrong += 1

    @property
    def doubled(self) -> int:
        return sum(count > 1 for count in self.verdicts.values())

    def lost(self, completions: int) -> int:
        return completions * self.groups - len(self.verdicts) + len(self.failures)


class WatchedReplica(HttpReplica):
    """Tells the ledger of attempts that a death has ended, and of their requests' next success."""

    def __init__(self, url: str, ledger: Ledger, **options: Any) -> None:
        super().__init__(url, dialect_of("laurel"), **options)
        self._ledger = ledger

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        try:
            reply = await super().attempt(groups, request_id=request_id, timeout=timeout)
        except ReplicaFault as fault:
            if fault.kind == "connection":
                self._ledger.cut_short.add(request_id)
            raise
        if request_id in self._ledger.cut_short:
            self._ledger.cut_short.discard(request_id)
            self._ledger.retried += 1
            self._ledger.recovered.set()
        self._ledger.answered.setdefault(self.name, asyncio.Event()).set()
        return reply


def main() -> None:
    options = read_options()
    key = secrets.token_hex(32)
    if options.groups:
        return measure_groups(key, options)
    servers = [Server(key) for _ in range(options.replicas)]
    try:
        for server in servers:
            server.start()
        ledger, deaths, seconds = asyncio.run(measure(servers, key, options))
    finally:
        for server in servers:
            server.kill()
    print(report(ledger, deaths, seconds, options), flush=True)
    bad = {
        "lost": ledger.lost(options.completions),
        "doubled": ledger.doubled,
        "wrong": ledger.wrong,
    }
    raw = {**bad, "deaths": deaths, "groups": ledger.groups, "failures": ledger.failures[:20]}
    write_json(options.json, {"machine": machine(), "options": vars(options), **raw})
    if any(bad.values()):
        sys.exit(f"{bad}; failures: {ledger.failures[:5]}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--kills", type=int, default=200)
    add("--groups", type=int, default=0, help="what each of so many waits; see above")
    add("--seconds", type=float, default=60.0, help="over which --groups spreads the kills")
    add("--replicas", type=int, default=3)
    add("--completions", type=int, default=8, help="of a group")
    add("--at-once", type=int, default=48, help="groups on their way at any time")
    add("--seed", type=int, default=0, help="of who is killed, and when")
    add("--quick", action="store_true", help="three kills: does it run")
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/reward_faults.json"))
    options = parser.parse_args()
    if options.replicas < 2:
        parser.error("--replicas: at least 2, so that somebody is left")
    if options.quick:
        options.kills, options.seconds = 3, 6.0
        options.groups = min(options.groups, 500)
    return options


def group_number(index: int, completions: int) -> Group:
    """A different one for each index."""
    drawn = random.Random(index)
    words = [f"word{drawn.randrange(1000)}" for _ in range(60)]
    answers = [f"{' '.join(words[i : i + 30])} {index} {i}" for i in range(completions)]
    return group_of((Message("user", " ".join(words)),), answers, group_id=str(index))


async def measure(
    servers: Sequence[Server], key: str, options: argparse.Namespace
) -> tuple[Ledger, list[dict[str, float]], float]:
    """Kill while groups stream; seconds are those of everything."""
    ledger = Ledger()
    replicas = [WatchedReplica(server.url, ledger, api_key=key) for server in servers]
    router = Router(replicas, RouterOptions(window=options.at_once, timeout=RECOVERY_SECONDS))
    done, began = asyncio.Event(), time.monotonic()
    streams = [
        asyncio.create_task(stream(router, ledger, done, options.completions))
        for _ in range(options.at_once)
    ]
    try:
        deaths = await kill_again_and_again(servers, replicas, ledger, options)
        done.set()
        await asyncio.gather(*streams)
    finally:
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await router.aclose()
    return ledger, deaths, time.monotonic() - began


async def stream(router: Router, ledger: Ledger, done: asyncio.Event, completions: int) -> None:
    """One group after the other."""
    null = NullScorer()
    while not done.is_set():
        index = ledger.groups
        ledger.groups += 1
        group = group_number(index, completions)
        ((tokens, _),) = null.prepare([group])
        assert tokens is not None
        (right_G,) = null.score_tokens([tokens])
        (scores_G,) = await router.score([group])
        ledger.take(index, scores_G, right_G)


async def kill_again_and_again(
    servers: Sequence[Server],
    replicas: Sequence[WatchedReplica],
    ledger: Ledger,
    options: argparse.Namespace,
) -> list[dict[str, float]]:
    """Of each death: milliseconds to the first score of a request that it had cut short, and
    seconds until the server, which starts anew, gives scores again."""
    drawn = random.Random(options.seed)
    deaths = []
    for replica in replicas:  # the death of one that nobody asks yet cuts nothing short
        async with asyncio.timeout(START_SECONDS):
            await ledger.answered.setdefault(replica.name, asyncio.Event()).wait()
    while len(deaths) < options.kills:
        await asyncio.sleep(drawn.uniform(0.0, 0.3))
        victim = drawn.randrange(len(servers))
        ledger.recovered.clear()
        began = time.monotonic()
        await asyncio.to_thread(servers[victim].kill)
        async with asyncio.timeout(RECOVERY_SECONDS):
            await ledger.recovered.wait()
        recovery = time.monotonic() - began
        await asyncio.to_thread(servers[victim].start)
        again = ledger.answered[replicas[victim].name] = asyncio.Event()
        async with asyncio.timeout(START_SECONDS):
            await again.wait()
        deaths.append(
            {"recovery_ms": recovery * 1e3, "back_after_seconds": time.monotonic() - began}
        )
        if sys.stderr.isatty():
            print(f"\r{len(deaths)} of {options.kills}", end="", file=sys.stderr, flush=True)
    return deaths


def report(
    ledger: Ledger, deaths: Sequence[dict[str, float]], seconds: float, options: argparse.Namespace
) -> str:
    recovery = sorted(death["recovery_ms"] for death in deaths)
    back = [death["back_after_seconds"] for death in deaths]
    p99 = recovery[min(len(recovery) - 1, int(0.99 * len(recovery)))]
    given = len(ledger.verdicts)
    rows = [
        ["kills (SIGKILL), one of so many servers", f"{len(deaths)}, {options.replicas}"],
        ["kill to first retried score, median", f"{statistics.median(recovery):.0f} ms"],
        ["kill to first retried score, p99", f"{p99:.0f} ms"],
        ["kill to scores of the restarted server, median", f"{statistics.median(back):.1f} s"],
        ["requests that were cut short and asked again", f"{ledger.retried:,}"],
        ["scores", f"{given:,} ({given / seconds:,.0f} per second, all the while)"],
        ["lost", str(ledger.lost(options.completions))],
        ["doubled", str(ledger.doubled)],
        ["wrong", str(ledger.wrong)],
    ]
    return table(["what", "how much"], rows, as_markdown=options.markdown)


def measure_groups(key: str, options: argparse.Namespace) -> None:
    """Seconds of every group while replicas are killed."""
    server = Server(key)
    try:
        server.start("--replicas", str(options.replicas))
        ledger, seconds = asyncio.run(groups_through_kills(server, key, options))
    finally:
        server.kill()
    seconds.sort()
    found = {name: quantile(seconds, share) for name, share in QUANTILES.items()}
    bad = {
        "lost": ledger.lost(options.completions),
        "doubled": ledger.doubled,
        "wrong": ledger.wrong,
    }
    rows = [
        ["groups of so many completions", f"{ledger.groups:,}, {options.completions}"],
        ["replicas", str(options.replicas)],
        ["kills (SIGKILL), over", f"{options.kills}, {options.seconds:g} s"],
        *([f"seconds of a group, {name}", f"{value:.2f} s"] for name, value in found.items()),
        *([name, str(count)] for name, count in bad.items()),
    ]
    print(table(["what", "how much"], rows, as_markdown=options.markdown), flush=True)
    raw = {**bad, **found, "groups": ledger.groups, "failures": ledger.failures[:20]}
    write_json(options.json, {"machine": machine(), "options": vars(options), **raw})
    if any(bad.values()):
        sys.exit(f"{bad}; failures: {ledger.failures[:5]}")


QUANTILES = {"median": 0.5, "p99": 0.99, "longest": 1.0}


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def groups_through_kills(
    server: Server, key: str, options: argparse.Namespace
) -> tuple[Ledger, list[float]]:
    """At least so many groups, and more until the last kill."""
    ledger, seconds = Ledger(), []
    router = Router(
        [HttpReplica(server.url, dialect_of("laurel"), api_key=key)],
        RouterOptions(window=options.at_once, timeout=START_SECONDS),
    )
    null = NullScorer()
    killing = asyncio.create_task(asyncio.to_thread(kill_replicas, server, options))

    async def one_after_the_other() -> None:
        while ledger.groups < options.groups or not killing.done():
            index = ledger.groups
            ledger.groups += 1
            group = group_number(index, options.completions)
            ((tokens, _),) = null.prepare([group])
            assert tokens is not None
            (right_G,) = null.score_tokens([tokens])
            began = time.monotonic()
            (scores_G,) = await router.score([group])
            seconds.append(time.monotonic() - began)
            ledger.take(index, scores_G, right_G)

    async with asyncio.TaskGroup() as streams:
        for _ in range(options.at_once):
            streams.create_task(one_after_the_other())
    await killing
    await router.aclose()
    return ledger, seconds


def kill_replicas(server: Server, options: argparse.Namespace) -> None:
    """One at a time, ready or not: whichever lives."""
    drawn = random.Random(options.seed)
    began = time.monotonic()
    for number in range(options.kills):
        due = began + (number + 1) * options.seconds / options.kills
        time.sleep(max(0.0, due - time.monotonic()))
        while not (alive := server.children):
            time.sleep(0.05)
        drawn.choice(alive).kill()


if __name__ == "__main__":
    main()
