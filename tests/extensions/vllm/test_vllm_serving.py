"""vLLM's servers that a run starts for a function which asks them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil
import pytest

import tiny_tokenizers
from laurel.config.environments import FunctionConfig, ModelServerConfig
from laurel.extensions.reward_functions.source import FunctionSource
from laurel.extensions.server.model_servers import LAUNCH
from laurel.plugins import ScorerServices
from laurel.types import Completion, Group, Message
from model_directories import save_model
from processes import descendants
from vllm_engines import random_model, require_vllm, scheduler_of, small_cache

GROUP = Group(
    id="g",
    prompt=(Message("user", "2 + 2?"),),
    completions_G=tuple(
        Completion(messages=(Message("assistant", text),)) for text in ("4", "five")
    ),
)
ASKS = """
import httpx2

async def compute_score(data_source, solution_str, ground_truth, extra_info,
                        reward_router_address, reward_model_tokenizer):
    words = reward_model_tokenizer.encode(solution_str, add_special_tokens=False)
    ask = {"model": MODEL, "messages": [{"role": "user", "content": solution_str}],
           "max_tokens": 3, "temperature": 0}
    async with httpx2.AsyncClient(timeout=600) as client:
        url = f"http://{reward_router_address}/v1/chat/completions"
        reply = await client.post(url, json=ask)
    reply.raise_for_status()
    used = reply.json()["usage"]["completion_tokens"]
    return {"score": used, "words": len(words)}
"""


def its_processes():
    """Those of a server that this process has started."""
    (launcher,) = [
        one for one in psutil.Process().children() if str(LAUNCH) in " ".join(one.cmdline())
    ]
    return descendants(launcher.pid)


@pytest.mark.slow
def test_a_function_asks_what_the_run_serves(tmp_path, warm_processes):
    require_vllm()
    tokenizer = tiny_tokenizers.chatml()
    model = random_model("qwen3", tied=True, seed=0, vocab_size=len(tokenizer))
    directory = save_model(tmp_path / "model", model, tokenizer)
    (tmp_path / "asks.py").write_text(f"MODEL = {str(directory)!r}\n{ASKS}", encoding="utf-8")
    said: list[str] = []
    services = ScorerServices(
        where="env.reward_model.function",
        device="cpu",
        say=said.append,
        server=ModelServerConfig(
            model_name=str(directory), arguments=["--dtype=float32", "--max-model-len=256"]
        ),
    )
    function = FunctionConfig(path=f"{tmp_path}/asks.py:compute_score", timeout=600)
    started = []
    with small_cache():
        scorer = FunctionSource().make(function, services)
        try:
            first = asyncio.run(scorer.score([GROUP]))[0]
            assert [one.failure for one in first] == [None, None]
            assert all(0 < one.value <= 3 and one.parts["words"] > 0 for one in first)
            # Its engine dies, and with it the server: an outage, until it is back.
            started += its_processes()
            engine = next(one for one in started if "spawn_main" in " ".join(one.cmdline()))
            scheduler_of([engine]).kill()
            again = asyncio.run(scorer.score([GROUP]))[0]
            assert again == first
            started += its_processes()
        finally:
            scorer.close()
            for one in started:  # forks are in another group than what is killed with the server
                with suppress(psutil.NoSuchProcess):
                    one.kill()
    assert any("is served at" in line for line in said)
    assert sum(" starts; " in line for line in said) == 2
