"""Judges for tests: a real server on loopback that answers chat completions from a script, and a
tiny model whose verdicts are read by log-probability."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

import tiny
import tiny_tokenizers
from fakes import WordScorer
from laurel.config.environments import JudgeConfig, ScorerSource
from laurel.extensions.judges.loaded import ModelJudge
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.chat import ChatFormat
from laurel.rewards.spec import NamedSource
from laurel.types import Message
from reward_servers import Asked, Behaviour, RewardServer

Say = Callable[[Asked], str | None]


def chat_answer(text: str | None, *, finish_reason: str = "stop") -> dict[str, Any]:
    """What an OpenAI-compatible server answers with."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"id": "x", "object": "chat.completion", "model": "judge", "choices": [choice]}


def judge_server(say: Say, behave: Behaviour | None = None, **settings: Any) -> RewardServer:
    """A server that says what `say` makes of a request."""
    return RewardServer(behave, answer=lambda asked: chat_answer(say(asked)), **settings)


def question(asked: Asked) -> str:
    """What the judge was asked."""
    text: str = asked.value["messages"][-1]["content"]
    return text


def response_in(asked: Asked) -> str:
    """The response in a question of the template `ONLY_RESPONSE`."""
    return question(asked).removeprefix("judge:")


ONLY_RESPONSE = "judge:{{ response }}"


def judge_section(**settings: Any) -> dict[str, Any]:
    """The section of a judge: what says how it is asked stands in `judge`."""
    asked = {key: value for key, value in settings.items() if key in JudgeConfig.model_fields}
    return {key: value for key, value in settings.items() if key not in asked} | {"judge": asked}


def judge_config(*servers: RewardServer, **settings: Any) -> ScorerSource:
    """A judge at these servers, which is asked with the response alone."""
    given = {"url_model": "judge", "template": ONLY_RESPONSE, "connect_patience": 0.0}
    urls = {"urls": [server.url for server in servers]}
    return ScorerSource(**judge_section(**urls | given | settings))


def named_judge(source: ScorerSource) -> NamedSource:
    """What opens the judge of a section."""
    return NamedSource("judge", source.judge, within=source)


def word_judge(scorer: WordScorer) -> RewardServer:
    """A judge whose verdicts are those of a `WordScorer`; ask it with `word_judge_config`."""

    def say(asked: Asked) -> str:
        said = [Message(m["role"], m["content"]) for m in json.loads(question(asked))]
        score = scorer._score(tuple(said))
        return f"Score: {score.value!r}" if score.failure is None else f"I cannot: {score.failure}"

    return judge_server(say)


def word_judge_config(server: RewardServer) -> ScorerSource:
    """Any number is a verdict."""
    whole = "{{ (conversation + [{'role': 'assistant', 'content': response}]) | tojson }}"
    return judge_config(server, template=whole, score_range=(-math.inf, math.inf))


def by_length(asked: Asked) -> str:
    """A verdict: the length of the response, 10 at most."""
    return f"Long words.\nScore: {min(10, len(response_in(asked)))}"


def tiny_judge(*, weight: float = 1.0, poison: str = "") -> ModelJudge:
    """A random model that is asked about single responses, its head multiplied by `weight` and the
    token of one word made NaN."""
    torch.set_num_threads(1)
    tokenizer = tiny_tokenizers.chatml()
    policy = tiny.tiny_policy("qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096)
    with torch.no_grad():
        policy.head.weight.mul_(weight)
        if poison:
            (token,) = tokenizer(poison, add_special_tokens=False)["input_ids"]
            policy.causal_lm.get_input_embeddings().weight[token] = math.nan
    chat = ChatFormat(tokenizer)
    config = JudgeConfig(
        read_out="log_probability",
        words=("+", "-"),
        # As a chat template that knows no tools.
        template="{% for m in conversation %}{{ {}['no tools'] if m.role == 'tool' }}"
        "{{ m.content }}{% endfor %} // {{ response }}",
    )
    engine = TransformersEngine(policy, tokenizer, end_ids=chat.end_ids)
    return ModelJudge(config, engine, chat, max_length=4096, batch_tokens=512)
