"""Other projects' reward servers from the client's side; `foreign` has the bodies of both sides."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import TypeAdapter

from laurel.errors import DataError
from laurel.extensions.server.foreign import (
    CLASSIFY_PATH,
    EMBEDDINGS_PATH,
    GET_REWARD_PATH,
    RAW,
    ClassifyRequest,
    ClassifyScores,
    EmbeddingsRequest,
    EmbeddingsScores,
    GetRewardRequest,
    GetRewardScores,
    NativeScore,
    RemoteRmRequest,
    check_count,
    read_remote_rm_reply,
)
from laurel.plugins import AskedServers
from laurel.rewards.remote.dialects import Dialect, SingleDialect, rendered
from laurel.rewards.remote.wire import List, messages_of, validated
from laurel.types import Conversation


def _model_key(servers: AskedServers) -> dict[str, Any]:
    # Servers of one model do not need its name.
    return {"model": servers.model} if servers.model else {}


def vllm_dialect(servers: AskedServers) -> Dialect:
    """Return that of vLLM's `/classify`."""
    model = _model_key(servers)
    if servers.contract is None:
        return SingleDialect(
            CLASSIFY_PATH,
            make=lambda conversation: ClassifyRequest(
                messages=messages_of(conversation), add_generation_prompt=False, **RAW, **model
            ),
            read=lambda value: ClassifyScores.read(value, "the reply").in_order(1)[0],
        )
    return rendered(
        servers,
        CLASSIFY_PATH,
        as_text=False,
        make=lambda rows: ClassifyRequest(
            input=list(rows), add_special_tokens=False, **RAW, **model
        ),
        read=lambda value, count: ClassifyScores.read(value, "the reply").in_order(count),
    )


def sglang_dialect(servers: AskedServers) -> Dialect:
    """Return that of SGLang's `/classify`."""
    return rendered(
        servers,
        CLASSIFY_PATH,
        as_text=False,
        make=lambda rows: ClassifyRequest(input_ids=list(rows)),
        read=_read_native,
    )


def embeddings_dialect(servers: AskedServers) -> Dialect:
    """Return that of SGLang's `/v1/embeddings`."""
    model = _model_key(servers)
    return rendered(
        servers,
        EMBEDDINGS_PATH,
        as_text=False,
        make=lambda rows: EmbeddingsRequest(input=list(rows), **model),
        read=lambda value, count: EmbeddingsScores.read(value, "the reply").in_order(count),
    )


def openrlhf_dialect(servers: AskedServers) -> Dialect:
    """Return that of OpenRLHF's `/get_reward`."""
    return rendered(
        servers,
        GET_REWARD_PATH,
        as_text=True,
        make=lambda texts: GetRewardRequest(
            query=list(texts), prompts=[""] * len(texts), labels=[""] * len(texts)
        ),
        read=lambda value, count: GetRewardScores.read(value, "the reply").in_order(count),
    )


def slime_dialect(servers: AskedServers) -> Dialect:
    """Return that of slime's remote_rm."""
    read = partial(read_remote_rm_reply, key=servers.reward_key)
    return SingleDialect("", make=_remote_rm, read=read)


def _remote_rm(conversation: Conversation) -> RemoteRmRequest:
    if not conversation or conversation[-1].role != "assistant":
        raise DataError("the conversation does not end with an answer of the assistant")
    prompt = messages_of(conversation[:-1])
    return RemoteRmRequest(prompt=prompt, response=conversation[-1].content, label=None)


def _read_native(value: Any, count: int) -> list[float]:
    # SGLang answers a single conversation without a list.
    values = [value] if isinstance(value, dict) else value
    scores = validated(_NATIVE.validate_python, values, "the reply")
    check_count(len(scores), count)
    return [score.embedding[0] for score in scores]


_NATIVE = TypeAdapter(List[NativeScore])
