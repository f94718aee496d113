"""What reward servers and trainers of other projects say to each other, both ways.

::

    vLLM       POST /classify       {"input": text | [text] | [id] | [[id]],
                                     "use_activation": false}, or {"messages": [...], ...}
                                    -> {"data": [{"index", "label", "probs": [score], ...}]}
    vLLM       POST /pooling        as /classify, and "encoding_format"
                                    -> {"data": [{"index", "data": [score]}]}
    vLLM       POST /score          {"queries": text | [text], "documents": text | [text],
                                     "use_activation": false}; also `items`, `data_1` and `data_2`,
                                    `text_1` and `text_2`
                                    -> {"data": [{"index", "score": score}]}
    SGLang     POST /classify       {"text": text | [text]} or {"input_ids": [id] | [[id]]}
                                    -> {"embedding": [score], "meta_info"}, or a list of them
    SGLang     POST /v1/embeddings  {"input": as above, "encoding_format": "float" or "base64"}
                                    -> {"data": [{"index", "embedding": [score]}]}
    OpenRLHF   POST /get_reward     {"query": [text], "prompts": [text], "labels": [text]}
                                    -> {"rewards": [score], "scores": [score], "extra_logs": {}}
    slime      POST any path        {"prompt": text | messages, "response": text, "label": any}
                                    -> the score itself

Texts are whole conversations that the client has rendered, but those of `/score`: there a query is
what the user says and a document what the assistant answers. None of the formats has a place for a
completion without a score, so one of those fails its request.

vLLM answers with the sigmoid of a score unless `use_activation` is false. The key was once called
`activation`, and before that `softmax`; whoever sends all three gets the score of every version.
"""

from __future__ import annotations

import base64
import math
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from laurel.config.environments import UrlProtocol
from laurel.errors import ConfigError, DataError, ProtocolError
from laurel.models.scoring import ScoringContract
from laurel.rewards.preparing import Prepared, Preparing, Rendered, prepared_by, rendered_group
from laurel.rewards.remote.replica import ReplicaReply, failed
from laurel.rewards.remote.wire import (
    MISSING,
    SCORE_PATH,
    ScoreRequest,
    expect_list,
    expect_number,
    expect_object,
    expect_text,
    messages_json,
    read_messages,
    read_said,
    read_score_reply,
    score_request,
)
from laurel.types import Completion, Conversation, Group, Message, Score, SentTurn, TokenGroup

CLASSIFY_PATH = "/classify"
POOLING_PATH = "/pooling"
PAIRS_PATH = "/score"
"""vLLM answers the same at `/v1/score`, which is our own path: see `names_pairs`."""
EMBEDDINGS_PATH = "/v1/embeddings"
GET_REWARD_PATH = "/get_reward"
REMOTE_RM_PATH = "/remote_rm"
"""Where our server answers slime, which takes any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRequest:
    """What a client of another project wants scored: rendered rows, or groups of messages."""

    rows: tuple[Rendered, ...] = ()
    groups: tuple[Group, ...] = ()
    """Instead of rows."""
    is_list: bool = True
    """False: the client sent one thing and not a list of one."""
    squashed: bool = False
    """Whether it wants the sigmoid of the scores."""
    as_base64: bool = False
    """Whether it wants each score as the base64 text of its float32, little-endian."""
    is_native: bool = False
    """Whether it is in SGLang's form of `/classify` and not in vLLM's."""
    rendered: Group = field(init=False)
    """The rows as a group, which takes long where they are long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rendered", rendered_group(self.rows))


def sigmoid(score: float) -> float:
    """Of any finite score, without an overflow."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    return math.exp(score) / (1.0 + math.exp(score))


# ------------------------------------------------------------------------------------------ input


def _read_rows(value: Any, what: str) -> tuple[tuple[Rendered, ...], bool]:
    """Rows from a text, ids, or a list of either; and whether it was a list of them."""
    if isinstance(value, str):
        return (value,), False
    rows = expect_list(value, what, must_be="a text, a list of token ids, or a list of either")
    if rows and all(_is_id(one) for one in rows):
        return (tuple(map(int, rows)),), False
    return tuple(_read_row(row, what) for row in rows), True


def _read_row(value: Any, what: str) -> Rendered:
    if isinstance(value, str):
        return value
    ids = expect_list(value, f"an entry of {what}", must_be="a text or a list of token ids")
    if not all(_is_id(one) for one in ids):
        raise ProtocolError(f"{what} has a list of something else than token ids from 0 up")
    return tuple(map(int, ids))


def _is_id(value: Any) -> bool:
    """A whole number; JSON knows no difference between 7 and 7.0."""
    if isinstance(value, float):
        return value.is_integer() and 0 <= value < 2**31
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _texts(value: Any, what: str) -> tuple[str, ...]:
    texts = expect_list(value, what, must_be="a list of texts")
    return tuple(expect_text(one, f"an entry of {what}") for one in texts)


def _rows_json(rows: Sequence[Rendered]) -> list[Any]:
    return [row if isinstance(row, str) else list(row) for row in rows]


def _answer(conversation: Conversation) -> tuple[Group, ...]:
    completion = Completion(messages=conversation[-1:])
    return (Group(id="", prompt=conversation[:-1], completions_G=(completion,)),)


# -------------------------------------------------------------------------------------- /classify


def classify_request(rows: Sequence[Rendered], *, model: str) -> dict[str, Any]:
    """To vLLM: rendered conversations, as they are: no token is added to them."""
    rest = {"input": _rows_json(rows), "add_special_tokens": False, **_RAW}
    return {**_named(model), **rest}


def classify_messages_request(conversation: Conversation, *, model: str) -> dict[str, Any]:
    """To vLLM: one conversation, which the server renders."""
    rest = {"messages": messages_json(conversation), "add_generation_prompt": False, **_RAW}
    return {**_named(model), **rest}


def _named(model: str) -> dict[str, str]:
    """Servers of one model need not be told which."""
    return {"model": model} if model else {}


_ACTIVATION_KEYS = ("use_activation", "activation", "softmax")
_RAW = dict.fromkeys(_ACTIVATION_KEYS, False)


def native_classify_request(rows: Sequence[Rendered]) -> dict[str, Any]:
    """To SGLang's own `/classify`; rows are all texts or all ids."""
    is_text = all(isinstance(row, str) for row in rows)
    return {"text" if is_text else "input_ids": _rows_json(rows)}


def is_native(value: Any) -> bool:
    """Whether a request to `/classify` is in SGLang's form and not in vLLM's."""
    return isinstance(value, dict) and ("text" in value or "input_ids" in value)


def read_classify_request(value: Any) -> ForeignRequest:
    """A request to `/classify` in any of its three forms.

    Raises:
        ProtocolError: It has none of them.
    """
    request = expect_object(value, "the request")
    forms = [key for key in ("input", "messages", "text", "input_ids") if key in request]
    if not forms:
        raise ProtocolError("the request has none of: input, messages, text, input_ids")
    if len(forms) > 1:
        raise ProtocolError(f"the request has {' and '.join(forms)}: send one of them")
    if is_native(value):
        rows, is_list = _read_rows(request[forms[0]], f"'{forms[0]}'")
        return ForeignRequest(rows=rows, is_list=is_list, is_native=True)
    return _read_vllm_rows(request)


def _read_vllm_rows(request: Mapping[str, Any]) -> ForeignRequest:
    """`input` or `messages`, one of which is there."""
    squashed = _read_squashed(request)
    if "messages" in request:
        conversation = read_messages(request["messages"], "'messages'")
        if not conversation:
            raise ProtocolError("'messages' is empty")
        return ForeignRequest(groups=_answer(conversation), is_list=False, squashed=squashed)
    rows, is_list = _read_rows(request["input"], "'input'")
    return ForeignRequest(rows=rows, is_list=is_list, squashed=squashed)


def _read_squashed(request: Mapping[str, Any]) -> bool:
    said = next((request[key] for key in _ACTIVATION_KEYS if key in request), None)
    if said is not None and not isinstance(said, bool):
        raise ProtocolError("'use_activation' is neither true nor false")
    return True if said is None else said


def classify_reply(
    scores: Sequence[float], *, request_id: str, created: int, model: str, num_tokens: int
) -> dict[str, Any]:
    """vLLM's answer."""
    data = [
        {"index": index, "label": "LABEL_0", "probs": [score], "num_classes": 1}
        for index, score in enumerate(scores)
    ]
    return _vllm_reply("classify", data, request_id, created, model, num_tokens)


def _vllm_reply(
    kind: str,
    data: list[dict[str, Any]],
    request_id: str,
    created: int,
    model: str,
    num_tokens: int,
) -> dict[str, Any]:
    return {
        "id": f"{kind}-{request_id}",
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": _usage(num_tokens),
    }


def native_classify_reply(
    scores: Sequence[float], num_tokens: Sequence[int], *, is_list: bool
) -> Any:
    """SGLang's own answer."""
    found = [
        {"embedding": [score], "meta_info": {"prompt_tokens": count}}
        for score, count in zip(scores, num_tokens, strict=True)
    ]
    return found if is_list else found[0]


def read_classify_reply(value: Any, *, count: int) -> list[float]:
    """The scores that vLLM answers with, in order.

    Raises:
        ProtocolError: Another count, an index twice, or something that is not a finite number.
    """
    return _read_indexed(value, "probs", count=count)


def read_native_classify_reply(value: Any, *, count: int) -> list[float]:
    """The scores that SGLang answers with; see `read_classify_reply`."""
    found = [value] if isinstance(value, dict) else expect_list(value, "the reply")
    _check_count(len(found), count)
    return [
        _only(expect_object(one, "an entry of the reply").get("embedding", MISSING), "'embedding'")
        for one in found
    ]


# -------------------------------------------------------------------- vLLM's /pooling and /score


def read_pooling_request(value: Any) -> ForeignRequest:
    """A request to vLLM's `/pooling`.

    Raises:
        ProtocolError: It is none, or wants something else than scores.
    """
    request = expect_object(value, "the request")
    forms = [key for key in ("input", "messages") if key in request]
    if len(forms) != 1:
        raise ProtocolError("the request needs one of: input, messages")
    if request.get("task") not in (None, "classify"):
        raise ProtocolError("the only 'task' here is 'classify': this server gives scores")
    as_base64 = _read_encoding(request)
    return replace(_read_vllm_rows(request), as_base64=as_base64)


def pooling_reply(
    scores: Sequence[float],
    *,
    as_base64: bool,
    request_id: str,
    created: int,
    model: str,
    num_tokens: int,
) -> dict[str, Any]:
    """Its answer; see `embeddings_reply`."""
    data = [
        {"index": index, "object": "pooling", "data": _encoded(score, as_base64=as_base64)}
        for index, score in enumerate(scores)
    ]
    return _vllm_reply("pool", data, request_id, created, model, num_tokens)


PAIR_KEYS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""What vLLM's clients call the two sides of `/score`."""


def names_pairs(value: Any) -> bool:
    """Whether a request to `/v1/score` is vLLM's: it has a key of `PAIR_KEYS` and no groups."""
    if not isinstance(value, dict) or "groups" in value:
        return False
    return any(key in value for keys in PAIR_KEYS for key in keys)


def read_pairs_request(value: Any) -> ForeignRequest:
    """A request to vLLM's `/score`: one query and its documents, or as many of both.

    Raises:
        ProtocolError: It is none; of the kind `count` where the numbers do not fit.
    """
    request = expect_object(value, "the request")
    named = [keys for keys in PAIR_KEYS if all(key in request for key in keys)]
    if len(named) != 1 or len({key for keys in PAIR_KEYS for key in keys} & request.keys()) > 2:
        pairs = "; ".join(" and ".join(keys) for keys in PAIR_KEYS)
        raise ProtocolError(f"the request needs the two keys of one of: {pairs}")
    queries, documents = (_read_side(request[key], key) for key in named[0])
    squashed = _read_squashed(request)
    if len(queries) == 1:
        sides = [(queries[0], documents)]
    elif len(queries) == len(documents):
        sides = [(query, (one,)) for query, one in zip(queries, documents, strict=True)]
    else:
        first, second = named[0]
        message = f"{len(queries)} '{first}' and {len(documents)} '{second}': send 1, or as many"
        raise ProtocolError(message, kind="count")
    groups = tuple(
        Group(
            id=str(index),
            prompt=(Message("user", query),),
            completions_G=tuple(
                Completion(messages=(Message("assistant", one),)) for one in answers
            ),
        )
        for index, (query, answers) in enumerate(sides)
    )
    return ForeignRequest(groups=groups, squashed=squashed)


def _read_side(value: Any, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    rows = expect_list(value, f"'{key}'", must_be="a text or a list of texts")
    return _texts(rows, f"'{key}'")


def pairs_reply(
    scores: Sequence[float], *, request_id: str, created: int, model: str, num_tokens: int
) -> dict[str, Any]:
    """Its answer."""
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return _vllm_reply("score", data, request_id, created, model, num_tokens)


# --------------------------------------------------------------------------------- /v1/embeddings


def embeddings_request(rows: Sequence[Rendered], *, model: str) -> dict[str, Any]:
    """To SGLang's form of OpenAI's endpoint."""
    return {**_named(model), "input": _rows_json(rows)}


def read_embeddings_request(value: Any) -> ForeignRequest:
    """A request to `/v1/embeddings`.

    Raises:
        ProtocolError: It is none.
    """
    request = expect_object(value, "the request")
    as_base64 = _read_encoding(request)
    rows, is_list = _read_rows(request.get("input", MISSING), "'input'")
    return ForeignRequest(rows=rows, is_list=is_list, as_base64=as_base64)


def _read_encoding(request: Mapping[str, Any]) -> bool:
    """Whether scores are to come in base64; refuses what else vLLM has for that."""
    wanted = request.get("encoding_format", "float")
    if wanted not in ("float", "base64"):
        raise ProtocolError("'encoding_format' must be 'float' or 'base64'")
    if request.get("dimensions") not in (None, 1):
        raise ProtocolError("'dimensions' must be left out: a score is one number")
    if request.get("embed_dtype", "float32") != "float32":
        raise ProtocolError("the only 'embed_dtype' here is 'float32'")
    if request.get("endianness", "native") not in ("native", "little"):
        raise ProtocolError("the only 'endianness' here is 'little'")
    return bool(wanted == "base64")


def _encoded(score: float, *, as_base64: bool) -> list[float] | str:
    """Raises OverflowError where float32 has no such number."""
    if not as_base64:
        return [score]
    return base64.b64encode(struct.pack("<f", score)).decode("ascii")


def embeddings_reply(
    scores: Sequence[float], *, model: str, num_tokens: int, as_base64: bool = False
) -> dict[str, Any]:
    """Its answer.

    Raises:
        OverflowError: In base64, where float32 has no such number.
    """
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(score, as_base64=as_base64),
            }
            for index, score in enumerate(scores)
        ],
        "model": model,
        "usage": _usage(num_tokens),
    }


def read_embeddings_reply(value: Any, *, count: int) -> list[float]:
    """The scores in it; see `read_classify_reply`."""
    return _read_indexed(value, "embedding", count=count)


# ------------------------------------------------------------------------------------ /get_reward


def get_reward_request(texts: Sequence[str]) -> dict[str, Any]:
    """To OpenRLHF's server."""
    empty = [""] * len(texts)
    return {"query": list(texts), "prompts": empty, "labels": empty}


def read_get_reward_request(value: Any) -> ForeignRequest:
    """A request to `/get_reward`; of no rows where its client had none for this server.

    Raises:
        ProtocolError: It is none.
    """
    request = expect_object(value, "the request")
    return ForeignRequest(rows=_texts(request.get("query", MISSING), "'query'"))


def get_reward_reply(scores: Sequence[float]) -> dict[str, Any]:
    """Its answer."""
    return {"rewards": list(scores), "scores": list(scores), "extra_logs": {}}


def read_get_reward_reply(value: Any, *, count: int) -> list[float]:
    """The rewards in it; see `read_classify_reply`."""
    rewards = expect_list(expect_object(value, "the reply").get("rewards", MISSING), "'rewards'")
    _check_count(len(rewards), count)
    return [expect_number(reward, "a reward") for reward in rewards]


# -------------------------------------------------------------------------------- slime's remote_rm


def remote_rm_request(prompt: Conversation, response: str, *, label: Any = None) -> dict[str, Any]:
    """To a server as slime's users write them."""
    return {"prompt": messages_json(prompt), "response": response, "label": label}


def read_remote_rm_request(value: Any, *, rendered: bool | None = None) -> ForeignRequest:
    """A request of slime.

    Args:
        value: Of the request.
        rendered: Whether a prompt that is a text was rendered by its client, so that prompt and
            response together are the conversation, or is what the user says. None: the model's
            contract tells it; see `SentTurn`.

    Raises:
        ProtocolError: It is none.
    """
    request = expect_object(value, "the request")
    response = expect_text(request.get("response", MISSING), "'response'")
    prompt = request.get("prompt", MISSING)
    if isinstance(prompt, str):
        return ForeignRequest(rows=(SentTurn(prompt, response, rendered),), is_list=False)
    said = read_said(prompt, "'prompt'", role="user")
    return ForeignRequest(groups=_answer((*said, Message("assistant", response))), is_list=False)


def read_remote_rm_reply(value: Any, *, key: str = "") -> float:
    """The score that came back.

    Args:
        value: Of the reply: a number, or an object of several.
        key: Which of an object's.

    Raises:
        ProtocolError: There is no finite number.
    """
    if key:
        value = expect_object(value, "the reply").get(key, MISSING)
    return expect_number(value, f"'{key}' of the reply" if key else "the reply")


# ---------------------------------------------------------------------------------------- replies


def _read_indexed(value: Any, key: str, *, count: int) -> list[float]:
    data = expect_list(expect_object(value, "the reply").get("data", MISSING), "'data'")
    _check_count(len(data), count)
    found: dict[int, float] = {}
    for position, item in enumerate(data):
        entry = expect_object(item, "an entry of 'data'")
        index = entry.get("index", position)
        if not _is_id(index) or index >= count or index in found:
            raise ProtocolError(f"'data' has an entry with the index {index!r}, or has it twice")
        found[index] = _only(entry.get(key, MISSING), f"'{key}'")
    return [found[index] for index in range(count)]


def _only(value: Any, what: str) -> float:
    numbers = expect_list(value, what)
    if len(numbers) != 1:
        raise ProtocolError(
            f"{what} has {len(numbers)} numbers; the one score of a reward model was expected"
        )
    return expect_number(numbers[0], f"the number in {what}")


def _check_count(found: int, wanted: int) -> None:
    if found != wanted:
        raise ProtocolError(f"{found} scores came back for {wanted} conversations", kind="count")


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}


# --------------------------------------------------------------------------------------------------
# The protocols that reward servers speak, as seen by one who asks.


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignQuery:
    """A request, and how its answer is to be read."""

    value: Any
    """JSON; None where nothing is left to be asked."""
    read: Callable[[Any], ReplicaReply]
    """Raises `ProtocolError`."""


class Dialect(ABC):
    """One protocol."""

    path: str
    """Of the endpoint, if the address does not name one; empty: the address is whole."""
    max_completions: int | None = None
    """Of one request."""
    takes_long: bool = False
    """Whether making a request would hold up an event loop: then it is made in a thread."""

    @abstractmethod
    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ForeignQuery:
        """The request for the scores of groups."""


class LaurelDialect(Dialect):
    """Our own: whole groups of messages, and a verdict on each completion."""

    path = SCORE_PATH

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ForeignQuery:
        """See `Dialect`."""
        request = ScoreRequest(groups=tuple(groups), request_id=request_id, model_version=version)

        def read(value: Any) -> ReplicaReply:
            reply = read_score_reply(value, request)
            return ReplicaReply(scores=list(reply.scores), version=reply.model_version)

        return ForeignQuery(value=score_request(request), read=read)


class RenderedDialect(Dialect):
    """Whole conversations, rendered here by the model's own contract."""

    takes_long = True

    def __init__(
        self,
        path: str,
        contract: ScoringContract,
        *,
        as_text: bool,
        make: Callable[[Sequence[Rendered]], Any],
        read: Callable[..., list[float]],
        preparers: Preparing | None = None,
    ) -> None:
        """Describe a protocol.

        Args:
            path: See `Dialect`.
            contract: Renders, and cuts what is too long.
            as_text: Send text, which the server tokenizes without adding to it; else token ids.
            make: The request for rows.
            read: The scores in the value of an answer; called with `count`.
            preparers: Tokenise instead; None: this process does.
        """
        self.path = path
        self._contract = contract
        self._one_at_a_time = threading.Lock()  # tokenizers are not for several threads
        self._as_text = as_text
        self._make = make
        self._read = read
        self._preparers = preparers

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ForeignQuery:
        """See `Dialect`. A conversation that cannot be rendered has failed, and is not sent.

        Raises:
            WorkerError: Too many of those who tokenise were lost.
        """
        lines = list(map(self._line, groups, self._prepared(groups)))
        rows = [row for line in lines for row, _ in line if row is not None]

        def read(value: Any) -> ReplicaReply:
            values = iter(self._read(value, count=len(rows)) if rows else ())
            return ReplicaReply(
                scores=[
                    tuple(
                        _filled(about, values) if row is not None else about for row, about in line
                    )
                    for line in lines
                ]
            )

        return ForeignQuery(value=self._make(rows) if rows else None, read=read)

    def _prepared(self, groups: Sequence[Group]) -> list[Prepared]:
        if self._preparers is not None:
            return self._preparers.prepare(groups)
        with self._one_at_a_time:
            return prepared_by(self._contract, groups)

    def _line(self, group: Group, prepared: Prepared) -> list[tuple[Rendered | None, Score]]:
        """Of each completion: what is sent, and the score without its number; or the failure."""
        tokens, failures = prepared
        line: list[tuple[Rendered | None, Score]] = [
            (None, failed(failure or "")) for failure in failures
        ]
        if tokens is None:
            return line
        sound = [i for i, failure in enumerate(failures) if failure is None]
        rows: Sequence[Rendered] = self._texts(group, sound) if self._as_text else _rows(tokens)
        facts = zip(sound, rows, tokens.lengths_G, tokens.truncated_G, strict=True)
        for i, row, num_tokens, is_cut in facts:
            line[i] = row, Score(value=None, num_tokens=num_tokens, truncated=is_cut)
        return line

    def _texts(self, group: Group, sound: Sequence[int]) -> list[str]:
        with self._one_at_a_time:
            return [self._contract.render(group.conversation(i)) for i in sound]


class SingleDialect(Dialect):
    """One conversation at a time, which the server renders."""

    max_completions = 1

    def __init__(
        self,
        path: str,
        *,
        make: Callable[[Conversation], Any],
        read: Callable[[Any], float],
    ) -> None:
        """Describe a protocol; see `RenderedDialect`."""
        self.path = path
        self._make = make
        self._read = read

    def ask(self, groups: Sequence[Group], *, request_id: str, version: str) -> ForeignQuery:
        """See `Dialect`."""
        (group,) = groups
        try:
            request = self._make(group.conversation(0))
        except DataError as error:
            verdict = ReplicaReply(scores=[(failed(str(error)),)])
            return ForeignQuery(value=None, read=lambda _: verdict)

        def read(value: Any) -> ReplicaReply:
            score = self._read(value)
            return ReplicaReply(scores=[(Score(value=score, values_K=(score,)),)])

        return ForeignQuery(value=request, read=read)


def _rows(tokens: TokenGroup) -> list[tuple[int, ...]]:
    trunk = tokens.trunk_ids.tolist()
    return [(*trunk, *branch.tolist()) for branch in tokens.branches_ids_G]


def _filled(about: Score, values: Any) -> Score:
    value = next(values)
    return replace(about, value=value, values_K=(value,))


def dialect_of(
    protocol: UrlProtocol,
    *,
    contract: ScoringContract | None = None,
    model: str = "",
    reward_key: str = "",
    preparers: Preparing | None = None,
) -> Dialect:
    """A protocol by its name.

    Args:
        protocol: The name.
        contract: Renders conversations, for servers that take them as text or tokens. vLLM takes
            messages as well, one conversation in a request, and renders by its own template.
        model: What the server calls the model, where it asks for that.
        reward_key: The key of the score, where slime's server answers with an object.
        preparers: Tokenise instead, where a contract renders.

    Raises:
        ConfigError: It needs a contract.
    """
    if protocol == "laurel":
        return LaurelDialect()
    if protocol == "slime":
        return SingleDialect(
            "", make=_remote_rm, read=partial(read_remote_rm_reply, key=reward_key)
        )
    if contract is None:
        if protocol == "vllm":
            return SingleDialect(
                CLASSIFY_PATH,
                make=partial(classify_messages_request, model=model),
                read=_only_classified,
            )
        raise ConfigError(
            f"url_protocol={protocol}: its servers take rendered conversations, so name the reward "
            "model (model_name), whose template and tokenizer are used"
        )
    rows = partial(RenderedDialect, contract=contract, preparers=preparers)
    if protocol == "openrlhf":
        return rows(
            GET_REWARD_PATH,
            as_text=True,
            make=_get_reward,
            read=read_get_reward_reply,
        )
    make: Callable[[Sequence[Rendered]], Any]
    if protocol == "vllm":
        make = partial(classify_request, model=model)
        path, read = CLASSIFY_PATH, read_classify_reply
    elif protocol == "sglang":
        make = native_classify_request
        path, read = CLASSIFY_PATH, read_native_classify_reply
    else:
        make = partial(embeddings_request, model=model)
        path, read = EMBEDDINGS_PATH, read_embeddings_reply
    return rows(path, as_text=False, make=make, read=read)


def _only_classified(value: Any) -> float:
    return read_classify_reply(value, count=1)[0]


def _remote_rm(conversation: Conversation) -> dict[str, Any]:
    if not conversation or conversation[-1].role != "assistant":
        raise DataError("the conversation ends with no answer of the assistant to judge")
    return remote_rm_request(conversation[:-1], conversation[-1].content)


def _get_reward(rows: Sequence[Rendered]) -> dict[str, Any]:
    return get_reward_request([row for row in rows if isinstance(row, str)])
