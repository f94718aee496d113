"""Does a trained reward model give the same scores wherever it is asked?

    python benchmarks/same_scores.py --model results/rm/best --vllm-python VLLM/bin/python

Conversations of a preference set are scored by `laurel score`, by `laurel serve`, by plain
transformers and by `vllm serve` after `laurel export`, in float32 and in bfloat16. transformers
gets them one by one, without padding, rendered by the template of the exported tokenizer, and vLLM
as messages. The program fails where a score differs from that of transformers in float32 by more
than the bound of the dtype.

A score is the last hidden state along one direction, so of few scores chance decides
whose rounding looks smaller. So bfloat16 is put beside float32 by the whole state, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import DATA_SETS, choose, data_set, load_rows
from reward_server import KEY, free_port, laurel_serve, server
from rounds import machine, table, write_json

from laurel.types import Group

LAUREL = (sys.executable, "-m", "laurel.cli.main")
BOUNDS = {"float32": 1e-4, "bfloat16": 0.1}
"""The largest difference from plain float32: rounding of sums in float32, and of weights and
activations to 8 bits of mantissa in bfloat16, whose share of a score grows with its depth."""


def main() -> None:
    options = read_options()
    dataset = data_set(options.data)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    exported = work / "exported"
    if not exported.is_dir():
        command = [*LAUREL, "export", "--model", str(options.model), "--output", str(exported)]
        subprocess.run(command, check=True)
    chosen = choose(load_rows(dataset), options.pairs)
    groups = [
        {
            "id": str(index),
            "prompt": [{"role": m.role, "content": m.content} for m in row.group.prompt],
            "completions": [one.messages[-1].content for one in row.group.completions_G],
        }
        for index, row in enumerate(chosen)
    ]
    scores: dict[tuple[str, str], list[float]] = {}
    for dtype in BOUNDS:
        scores["laurel score", dtype] = by_command(groups, dtype, work, options)
        scores["laurel serve", dtype] = by_server(groups, dtype, work, options)
        scores["transformers", dtype] = by_transformers(groups, exported, dtype, options)
        if options.vllm_python:
            scores["vllm serve", dtype] = by_vllm(groups, exported, dtype, work, options)
    plain = scores["transformers", "float32"]
    spread = math.sqrt(sum((s - sum(plain) / len(plain)) ** 2 for s in plain) / len(plain))
    differences = {
        key: [abs(a - b) for a, b in zip(found, plain, strict=True)]
        for key, found in scores.items()
    }
    lines = [
        [
            way,
            dtype,
            f"{max(found):.1e}",
            f"{sum(found) / len(found):.1e}",
            f"{BOUNDS[dtype]:g}",
        ]
        for (way, dtype), found in differences.items()
    ]
    header = ["asked", "dtype", "largest difference", "mean difference", "bound"]
    print(f"{len(plain)} conversations, standard deviation of their scores {spread:.3f}\n")
    print(table(header, lines, as_markdown=options.markdown))
    states = state_errors([row.group for row in chosen], groups, exported, options)
    print()
    header = ["last hidden state in bfloat16", "relative error, rms", "largest"]
    lines = [[way, f"{error[0]:.4f}", f"{error[1]:.4f}"] for way, error in states.items()]
    print(table(header, lines, as_markdown=options.markdown))
    result = {
        "machine": machine(),
        "options": vars(options),
        "standard_deviation": spread,
        "state_errors": states,
        "scores": {" ".join(key): found for key, found in scores.items()},
    }
    write_json(options.json, result)
    wrong = [key for key, found in differences.items() if not max(found) <= BOUNDS[key[1]]]
    if wrong:
        raise SystemExit(f"beyond the bound: {', '.join(map(' in '.join, wrong))}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a checkpoint of laurel rm")
    add("--vllm-python", help="interpreter of an environment with vLLM, to ask it as well")
    add("--data", default="ukp_convarg1", choices=list(DATA_SETS))
    add("--pairs", type=int, default=32)
    add("--threads", type=int, default=1)
    add("--work", type=Path, default=Path("benchmark_results/same_scores"))
    add("--markdown", action="store_true", help="print a table for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/same_scores.json"))
    return parser.parse_args()


def values(groups: list[dict[str, Any]]) -> list[float]:
    return [one["value"] for group in groups for one in group["scores"]]


def by_command(
    groups: list[dict[str, Any]], dtype: str, work: Path, options: argparse.Namespace
) -> list[float]:
    rows, written = work / "rows.jsonl", work / f"score_{dtype}.jsonl"
    rows.write_text("".join(json.dumps(group) + "\n" for group in groups), encoding="utf-8")
    command = [*LAUREL, "score", str(rows), "-m", str(options.model), "-o", str(written)]
    settings = ["--precision", dtype, "--device", "cpu", "--cpu-threads", str(options.threads)]
    subprocess.run([*command, *settings], check=True)
    lines = written.read_text(encoding="utf-8").splitlines()
    return [score for line in lines for score in json.loads(line)["scores"]]


def by_server(
    groups: list[dict[str, Any]], dtype: str, work: Path, options: argparse.Namespace
) -> list[float]:
    command = laurel_serve(
        *("--model", str(options.model), "--precision", dtype, "--device", "cpu"),
        *("--cpu-threads", str(options.threads), "--access-log", "none"),
        *("--request-seconds", "600"),
    )
    with server(command, work) as (url, _):
        answer = [post(f"{url}/v1/score", {"groups": [group]})["groups"][0] for group in groups]
    return values(answer)


def by_transformers(
    groups: list[dict[str, Any]], exported: Path, dtype: str, options: argparse.Namespace
) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(options.threads)
    make: Any = AutoModelForSequenceClassification
    model = make.from_pretrained(exported, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    found = []
    with torch.inference_mode():
        for conversation in conversations(groups):
            text = tokenizer.apply_chat_template(conversation, tokenize=False)
            rows = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            found.append(float(model(input_ids=rows["input_ids"]).logits[0, 0]))
    return found


def state_errors(
    rows: list[Group], groups: list[dict[str, Any]], exported: Path, options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """How far the states that the head reads are from those of transformers in float32."""
    import torch

    from laurel.data.forest import to_forest
    from laurel.models.spec import ModelSpec
    from laurel.rewards.open import open_local
    from laurel.rewards.spec import ScorerSpec

    torch.set_num_threads(options.threads)
    exact = states_of_transformers(groups, exported, "float32")
    found = {"transformers": states_of_transformers(groups, exported, "bfloat16")}
    spec = ScorerSpec(
        model=ModelSpec(name=str(exported)),
        precision="bfloat16",
        device="cpu",
    )
    alone = [replace(group, completions_G=(one,)) for group in rows for one in group.completions_G]
    with open_local(spec, say=lambda _: None) as scorer, torch.inference_mode():
        for way, asked in (("Laurel, pairs share their prompt", rows), ("Laurel, alone", alone)):
            forests = [to_forest([tokens]) for tokens in scorer.encode(asked)]
            found[way] = torch.cat([scorer.model.last_hidden(one).float() for one in forests])
    errors = {
        way: (states - exact).norm(dim=1) / exact.norm(dim=1) for way, states in found.items()
    }
    return {
        way: (float(error.square().mean().sqrt()), float(error.max()))
        for way, error in errors.items()
    }


def states_of_transformers(groups: list[dict[str, Any]], exported: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    make: Any = AutoModelForSequenceClassification
    model = make.from_pretrained(exported, dtype=getattr(torch, dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    texts = [tokenizer.apply_chat_template(one, tokenize=False) for one in conversations(groups)]
    with torch.inference_mode():
        states = [
            model.base_model(
                input_ids=tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            ).last_hidden_state[0, -1]
            for text in texts
        ]
    return torch.stack(states).float()


def by_vllm(
    groups: list[dict[str, Any]],
    exported: Path,
    dtype: str,
    work: Path,
    options: argparse.Namespace,
) -> list[float]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        *(options.vllm_python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(exported), "--runner", "pooling", "--dtype", dtype),
        *("--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port)),
    ]
    found = []
    with server(command, work, url=url, threads=options.threads) as _:
        for conversation in conversations(groups):
            body = {"model": str(exported), "messages": conversation, "use_activation": False}
            asked = {**body, "add_generation_prompt": False}
            found.append(post(f"{url}/classify", asked)["data"][0]["probs"][0])
    return found


def conversations(groups: list[dict[str, Any]]) -> list[list[dict[str, str]]]:
    return [
        [*group["prompt"], {"role": "assistant", "content": text}]
        for group in groups
        for text in group["completions"]
    ]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    with contextlib.closing(urllib.request.urlopen(request, timeout=600)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    main()
