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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    model_validator,
)
from pydantic_core import PydanticCustomError

from laurel.config.environments import UrlProtocol
from laurel.errors import ConfigError, DataError, ProtocolError
from laurel.models.scoring import ScoringContract
from laurel.rewards.preparing import Prepared, Preparing, Rendered, prepared_by, rendered_group
from laurel.rewards.remote.replica import ReplicaReply, failed
from laurel.rewards.remote.wire import (
    MOST_ROWS,
    SCORE_PATH,
    Body,
    List,
    Messages,
    ScoreReply,
    ScoreRequest,
    ScoringRequest,
    conversation_of,
    messages_of,
    validated,
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


def sigmoid(score: float) -> float:
    """Of any finite score, without an overflow."""
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    return math.exp(score) / (1.0 + math.exp(score))


# ----------------------------------------------------------------- what several of them have


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What an answer is made of."""

    scores: Sequence[float]
    num_tokens: Sequence[int]
    """Of each conversation."""
    model: str
    request_id: str
    created: int
    """Seconds since 1970."""


class ForeignRequest(ScoringRequest):
    """What a client of another project sends, and the form of the answer that it expects."""

    @abstractmethod
    def reply(self, scored: Scored) -> Any:
        """The answer: a body, a list of them, or a number.

        Raises:
            OverflowError: It wants float32, which has no such number.
        """


def _without_fractions(value: Any) -> Any:
    """JSON knows no difference between 7 and 7.0."""
    if isinstance(value, list) and float in set(map(type, value)):
        is_whole = [isinstance(one, float) and one.is_integer() for one in value]
        return [int(one) if whole else one for one, whole in zip(value, is_whole, strict=True)]
    return value


_Ids = Annotated[List[Annotated[int, Field(ge=0, lt=2**31)]], BeforeValidator(_without_fractions)]
_Rows = Annotated[
    str | _Ids | Annotated[List[str | _Ids], Field(max_length=MOST_ROWS)],
    Field(union_mode="left_to_right"),
]
_Texts = Annotated[List[str], Field(max_length=MOST_ROWS)]


def _rows_of(value: str | list[Any]) -> tuple[list[Rendered], bool]:
    """Rows from a text, ids, or a list of either; and whether it was a list of them."""
    if isinstance(value, str):
        return [value], False
    if value and isinstance(value[0], int):
        return [tuple(value)], False
    return [row if isinstance(row, str) else tuple(row) for row in value], True


def _answered(conversation: Conversation) -> list[Group]:
    completion = Completion(messages=conversation[-1:])
    return [Group(id="", prompt=conversation[:-1], completions_G=(completion,))]


def _exactly_one(*forms: tuple[str, ...]) -> ConfigDict:
    """Says in a schema that a body has all keys of exactly one of some forms."""
    keys = {key for form in forms for key in form}
    one_of: list[Any] = [
        {"required": list(form), "properties": dict.fromkeys(sorted(keys - {*form}), False)}
        for form in forms
    ]
    return ConfigDict(json_schema_extra={"oneOf": one_of})


class _OneForm(ForeignRequest):
    """A request of which exactly one of several keys holds what is to be scored."""

    @property
    def form(self) -> str:
        """The key."""
        return next(key for key in _FORMS if key in self.model_fields_set)

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        found = [key for key in _FORMS if key in self.model_fields_set]
        if len(found) != 1:
            wanted = [key for key in _FORMS if key in type(self).model_fields]
            has = f"has {' and '.join(found)}: send" if found else "has none of these: send"
            raise PydanticCustomError(
                "values", "{has} one of {wanted}", {"has": has, "wanted": ", ".join(wanted)}
            )
        return self

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """What is to be scored."""
        value = getattr(self, self.form)
        if self.form == "messages":
            return _answered(conversation_of(value, role="user"))
        return [rendered_group(_rows_of(value)[0])]


_FORMS = ("input", "messages", "text", "input_ids")
_ACTIVATION_KEYS = ("use_activation", "activation", "softmax")
_RAW: dict[str, Any] = dict.fromkeys(_ACTIVATION_KEYS, False)


class _Activated(ForeignRequest):
    """A request that is answered with the sigmoid of scores unless it says otherwise."""

    model: Any = Field(default=None, json_schema_extra={"type": "string"})
    use_activation: bool | None = None
    activation: bool | None = Field(default=None, description="`use_activation` of older vLLM")
    softmax: bool | None = Field(default=None, description="`use_activation` of older vLLM")

    def activated(self, scores: Sequence[float]) -> list[float]:
        """Scores as they are wanted."""
        named = (getattr(self, key) for key in _ACTIVATION_KEYS if key in self.model_fields_set)
        return list(scores) if next(named, None) is False else list(map(sigmoid, scores))


class _Encoded(ForeignRequest):
    """A request that can ask for base64, which is of float32, little-endian."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[1] | None = None
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"

    def encoded(self, score: float) -> list[float] | str:
        """A score as it is wanted."""
        if self.encoding_format == "float":
            return [score]
        return base64.b64encode(struct.pack("<f", score)).decode("ascii")


def _is_single(numbers: list[float]) -> list[float]:
    if len(numbers) != 1:
        raise PydanticCustomError(
            "values",
            "has {count} numbers; the one score of a reward model was expected",
            {"count": len(numbers)},
        )
    return numbers


_Single = Annotated[List[float], AfterValidator(_is_single)]
_Base64 = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class Usage(Body):
    """How many tokens were read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class _Answer(Body):
    """What the answers of vLLM's and OpenAI's endpoints have in common."""

    object: Literal["list"] = "list"
    model: str
    usage: Usage


class _VllmAnswer(_Answer):
    id: str
    created: int


def _about(kind: str, scored: Scored) -> dict[str, Any]:
    tokens = sum(scored.num_tokens)
    usage = Usage(prompt_tokens=tokens, total_tokens=tokens, completion_tokens=0)
    found: dict[str, Any] = {"model": scored.model, "usage": usage}
    if kind:
        found |= {"id": f"{kind}-{scored.request_id}", "created": scored.created}
    return found


def _in_order(entries: Iterable[tuple[int | None, Any]], *, count: int) -> list[float]:
    """The scores in the entries of an answer, which may come in another order.

    Raises:
        ProtocolError: Another count, or an index twice.
    """
    listed = list(entries)
    _check_count(len(listed), count)
    found: dict[int, float] = {}
    for position, (told, numbers) in enumerate(listed):
        index = position if told is None else told
        if index >= count or index in found:
            raise ProtocolError(f"'data' has an entry with the index {index!r}, or has it twice")
        found[index] = numbers[0]
    return [found[index] for index in range(count)]


def _check_count(found: int, wanted: int) -> None:
    if found != wanted:
        raise ProtocolError(f"{found} scores came back for {wanted} conversations", kind="count")


# -------------------------------------------------------------------------------------- /classify


class ClassifyEntry(Body):
    """The verdict on one conversation."""

    index: Annotated[int, Field(ge=0)] | None = None
    label: str | None = "LABEL_0"
    probs: _Single
    num_classes: int | None = 1


class ClassifyScores(Body):
    """What a client reads of vLLM's answer."""

    data: List[ClassifyEntry]

    def in_order(self, count: int) -> list[float]:
        """The scores of so many conversations.

        Raises:
            ProtocolError: Another count, or an index twice.
        """
        return _in_order(((one.index, one.probs) for one in self.data), count=count)


class ClassifyReply(_VllmAnswer, ClassifyScores):
    """vLLM's answer to `/classify`."""


class NativeScore(Body):
    """What a client reads of SGLang's answer."""

    embedding: _Single


class MetaInfo(Body):
    """What SGLang says besides a score."""

    prompt_tokens: int


class NativeReply(NativeScore):
    """SGLang's answer to `/classify`, or one of a list of them."""

    meta_info: MetaInfo


class ClassifyRequest(_OneForm, _Activated):
    """With `input` or `messages` it is vLLM's, with `text` or `input_ids` SGLang's."""

    model_config = _exactly_one(*((key,) for key in _FORMS))

    input: _Rows = Field(default_factory=str)
    messages: Messages = Field(default_factory=list, min_length=1)
    text: _Rows = Field(default_factory=str)
    input_ids: _Rows = Field(default_factory=list)
    add_special_tokens: Any = Field(default=None, description="Not read: none are ever added")
    add_generation_prompt: Any = Field(default=None, description="Not read")

    def reply(self, scored: Scored) -> ClassifyReply | NativeReply | list[NativeReply]:
        """The sigmoid of scores to vLLM's clients, the scores to SGLang's."""
        if self.form in ("input", "messages"):
            data = [
                ClassifyEntry(index=index, label="LABEL_0", probs=[score], num_classes=1)
                for index, score in enumerate(self.activated(scored.scores))
            ]
            return ClassifyReply(data=data, **_about("classify", scored))
        found = [
            NativeReply(embedding=[score], meta_info=MetaInfo(prompt_tokens=count))
            for score, count in zip(scored.scores, scored.num_tokens, strict=True)
        ]
        return found if _rows_of(getattr(self, self.form))[1] else found[0]


# -------------------------------------------------------------------- vLLM's /pooling and /score


class PoolingEntry(Body):
    """The score of one conversation, as the request wants it."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: _Single | _Base64


class PoolingReply(_VllmAnswer):
    """vLLM's answer to `/pooling`."""

    data: List[PoolingEntry]


class PoolingRequest(_OneForm, _Activated, _Encoded):
    """As `/classify` with `input` or `messages`."""

    model_config = _exactly_one(("input",), ("messages",))

    input: _Rows = Field(default_factory=str)
    messages: Messages = Field(default_factory=list, min_length=1)
    task: Literal["classify"] | None = None

    def reply(self, scored: Scored) -> PoolingReply:
        """The sigmoid of scores, unless the request says otherwise."""
        data = [
            PoolingEntry(index=index, object="pooling", data=self.encoded(score))
            for index, score in enumerate(self.activated(scored.scores))
        ]
        return PoolingReply(data=data, **_about("pool", scored))


PAIR_KEYS = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""What vLLM's clients call the two sides of `/score`."""
_SIDES = frozenset(key for keys in PAIR_KEYS for key in keys)


def names_pairs(value: Any) -> bool:
    """Whether a request to `/v1/score` is vLLM's: it has a key of `PAIR_KEYS` and no groups."""
    if not isinstance(value, dict):
        return isinstance(value, PairsRequest)
    return "groups" not in value and not _SIDES.isdisjoint(value)


class PairsEntry(Body):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class PairsReply(_VllmAnswer):
    """vLLM's answer to `/score`."""

    data: List[PairsEntry]


class PairsRequest(_Activated):
    """One query, which the user says, and its documents, which are answers; or as many of both."""

    model_config = _exactly_one(*PAIR_KEYS)

    queries: str | _Texts = Field(default_factory=str)
    documents: str | _Texts = Field(default_factory=str)
    items: str | _Texts = Field(default_factory=str)
    data_1: str | _Texts = Field(default_factory=str)
    data_2: str | _Texts = Field(default_factory=str)
    text_1: str | _Texts = Field(default_factory=str)
    text_2: str | _Texts = Field(default_factory=str)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        _ = self.as_groups
        return self

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """A group for each query."""
        named = _SIDES & self.model_fields_set
        keys = next((keys for keys in PAIR_KEYS if named == {*keys}), None)
        if keys is None:
            pairs = "; ".join(" and ".join(keys) for keys in PAIR_KEYS)
            raise PydanticCustomError(
                "values", "needs the two keys of one of: {pairs}", {"pairs": pairs}
            )
        sides = (getattr(self, key) for key in keys)
        queries, documents = ([side] if isinstance(side, str) else side for side in sides)
        if len(queries) not in (1, len(documents)):
            raise PydanticCustomError(
                "count",
                "{first} queries and {second} documents: send 1, or as many",
                {"first": len(queries), "second": len(documents)},
            )
        answers = [documents] if len(queries) == 1 else [[document] for document in documents]
        return [
            Group(
                id=str(index),
                prompt=(Message("user", query),),
                completions_G=tuple(
                    Completion(messages=(Message("assistant", one),)) for one in said
                ),
            )
            for index, (query, said) in enumerate(zip(queries, answers, strict=True))
        ]

    def reply(self, scored: Scored) -> PairsReply:
        """The sigmoid of scores, unless the request says otherwise."""
        data = [
            PairsEntry(index=index, object="score", score=score)
            for index, score in enumerate(self.activated(scored.scores))
        ]
        return PairsReply(data=data, **_about("score", scored))


# --------------------------------------------------------------------------------- /v1/embeddings


class EmbeddingsEntry(Body):
    """The score of one conversation, as the request wants it."""

    object: str | None = "embedding"
    index: Annotated[int, Field(ge=0)] | None = None
    embedding: _Single | _Base64


class EmbeddingsScores(Body):
    """What a client reads of the answer."""

    data: List[EmbeddingsEntry]

    def in_order(self, count: int) -> list[float]:
        """The scores of so many conversations; see `ClassifyScores`."""
        if any(isinstance(one.embedding, str) for one in self.data):
            raise ProtocolError("'embedding' is base64, which was not asked for")
        return _in_order(((one.index, one.embedding) for one in self.data), count=count)


class EmbeddingsReply(_Answer, EmbeddingsScores):
    """SGLang's form of OpenAI's answer."""


class EmbeddingsRequest(_Encoded):
    """SGLang's form of OpenAI's request."""

    model: Any = Field(default=None, json_schema_extra={"type": "string"})
    input: _Rows

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """What is to be scored."""
        return [rendered_group(_rows_of(self.input)[0])]

    def reply(self, scored: Scored) -> EmbeddingsReply:
        """The scores as embeddings of one number."""
        data = [
            EmbeddingsEntry(object="embedding", index=index, embedding=self.encoded(score))
            for index, score in enumerate(scored.scores)
        ]
        return EmbeddingsReply(data=data, **_about("", scored))


# ------------------------------------------------------------------------------------ /get_reward


class GetRewardScores(Body):
    """What a client reads of the answer."""

    rewards: List[float]

    def in_order(self, count: int) -> list[float]:
        """The scores of so many conversations; see `ClassifyScores`."""
        _check_count(len(self.rewards), count)
        return self.rewards


class GetRewardReply(GetRewardScores):
    """OpenRLHF's answer."""

    scores: List[float]
    extra_logs: dict[str, Any] = Field(default_factory=dict)


class GetRewardRequest(ForeignRequest):
    """OpenRLHF's: whole conversations that the client has rendered; the rest is not read."""

    query: _Texts
    prompts: Any = Field(default=None, json_schema_extra={"type": "array"})
    labels: Any = Field(default=None, json_schema_extra={"type": "array"})

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """What is to be scored."""
        return [rendered_group(self.query)]

    def reply(self, scored: Scored) -> GetRewardReply:
        """The scores, twice."""
        scores = list(scored.scores)
        return GetRewardReply(rewards=scores, scores=scores, extra_logs={})


# -------------------------------------------------------------------------------- slime's remote_rm


class RemoteRmRequest(ForeignRequest):
    """slime's: a prompt and its response; the label is not read."""

    prompt: str | Messages
    response: str
    label: Any = None
    _is_rendered: bool | None = PrivateAttr(default=None)

    def model_post_init(self, context: Mapping[str, Any] | None) -> None:
        """Take what the address says of a prompt that is a text: whether it was rendered."""
        self._is_rendered = (context or {}).get("rendered")

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """What is to be scored."""
        if isinstance(self.prompt, str):
            return [rendered_group([SentTurn(self.prompt, self.response, self._is_rendered)])]
        said = conversation_of(self.prompt, role="user")
        return _answered((*said, Message("assistant", self.response)))

    def reply(self, scored: Scored) -> float:
        """The score itself."""
        return scored.scores[0]


def read_remote_rm_reply(value: Any, *, key: str = "") -> float:
    """The score that came back.

    Args:
        value: Of the reply: a number, or an object of several.
        key: Which of an object's.

    Raises:
        ProtocolError: There is no finite number.
    """
    what = f"{key!r} of the reply" if key else "the reply"
    if key:
        if not isinstance(value, dict) or key not in value:
            raise ProtocolError(f"{what} is missing")
        value = value[key]
    return validated(_NUMBER.validate_python, value, what)


_NUMBER: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(strict=True, allow_inf_nan=False)])


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
        request = ScoreRequest.of(groups, request_id=request_id, version=version)

        def read(value: Any) -> ReplicaReply:
            reply = ScoreReply.read(value, "the reply")
            return ReplicaReply(scores=reply.scores_of(request), version=reply.model_version)

        return ForeignQuery(value=request.model_dump(exclude_unset=True), read=read)


class RenderedDialect(Dialect):
    """Whole conversations, rendered here by the model's own contract."""

    takes_long = True

    def __init__(
        self,
        path: str,
        contract: ScoringContract,
        *,
        as_text: bool,
        make: Callable[[Sequence[Any]], Body],
        read: Callable[[Any, int], list[float]],
        preparers: Preparing | None = None,
    ) -> None:
        """Describe a protocol.

        Args:
            path: See `Dialect`.
            contract: Renders, and cuts what is too long.
            as_text: Send text, which the server tokenizes without adding to it; else token ids.
            make: The request for rows: texts, or lists of ids.
            read: The scores of so many conversations, in the value of an answer.
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
            values = iter(self._read(value, len(rows)) if rows else ())
            return ReplicaReply(
                scores=[
                    tuple(
                        _filled(about, values) if row is not None else about for row, about in line
                    )
                    for line in lines
                ]
            )

        asked = self._make(rows).model_dump(exclude_unset=True) if rows else None
        return ForeignQuery(value=asked, read=read)

    def _prepared(self, groups: Sequence[Group]) -> list[Prepared]:
        if self._preparers is not None:
            return self._preparers.prepare(groups)
        with self._one_at_a_time:
            return prepared_by(self._contract, groups)

    def _line(self, group: Group, prepared: Prepared) -> list[tuple[Any, Score]]:
        """Of each completion: what is sent, and the score without its number; or the failure."""
        tokens, failures = prepared
        line: list[tuple[Any, Score]] = [(None, failed(failure or "")) for failure in failures]
        if tokens is None:
            return line
        sound = [i for i, failure in enumerate(failures) if failure is None]
        rows: Sequence[Any] = self._texts(group, sound) if self._as_text else _id_rows(tokens)
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
        make: Callable[[Conversation], Body],
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
            request = self._make(group.conversation(0)).model_dump(exclude_unset=True)
        except DataError as error:
            verdict = ReplicaReply(scores=[(failed(str(error)),)])
            return ForeignQuery(value=None, read=lambda _: verdict)

        def read(value: Any) -> ReplicaReply:
            score = self._read(value)
            return ReplicaReply(scores=[(Score(value=score, values_K=(score,)),)])

        return ForeignQuery(value=request, read=read)


def _id_rows(tokens: TokenGroup) -> list[list[int]]:
    trunk = tokens.trunk_ids.tolist()
    return [[*trunk, *branch.tolist()] for branch in tokens.branches_ids_G]


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
    # Servers of one model need not be told which.
    named: dict[str, Any] = {"model": model} if model else {}
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
                make=lambda conversation: ClassifyRequest(
                    messages=messages_of(conversation),
                    add_generation_prompt=False,
                    **_RAW,
                    **named,
                ),
                read=lambda value: ClassifyScores.read(value, "the reply").in_order(1)[0],
            )
        raise ConfigError(
            f"url_protocol={protocol}: its servers take rendered conversations, so name the reward "
            "model (model_name), whose template and tokenizer are used"
        )
    rendered = partial(RenderedDialect, contract=contract, preparers=preparers)
    if protocol == "openrlhf":
        return rendered(
            GET_REWARD_PATH,
            as_text=True,
            make=_get_reward,
            read=lambda value, count: GetRewardScores.read(value, "the reply").in_order(count),
        )
    if protocol == "vllm":
        return rendered(
            CLASSIFY_PATH,
            as_text=False,
            make=lambda rows: ClassifyRequest(
                input=list(rows), add_special_tokens=False, **_RAW, **named
            ),
            read=lambda value, count: ClassifyScores.read(value, "the reply").in_order(count),
        )
    if protocol == "sglang":
        return rendered(
            CLASSIFY_PATH,
            as_text=False,
            make=lambda rows: ClassifyRequest(input_ids=list(rows)),
            read=_read_native,
        )
    return rendered(
        EMBEDDINGS_PATH,
        as_text=False,
        make=lambda rows: EmbeddingsRequest(input=list(rows), **named),
        read=lambda value, count: EmbeddingsScores.read(value, "the reply").in_order(count),
    )


def _remote_rm(conversation: Conversation) -> RemoteRmRequest:
    if not conversation or conversation[-1].role != "assistant":
        raise DataError("the conversation ends with no answer of the assistant to judge")
    said = messages_of(conversation[:-1])
    return RemoteRmRequest(prompt=said, response=conversation[-1].content, label=None)


def _get_reward(texts: Sequence[str]) -> GetRewardRequest:
    empty = [""] * len(texts)
    return GetRewardRequest(query=list(texts), prompts=empty, labels=empty)


def _read_native(value: Any, count: int) -> list[float]:
    """SGLang answers one conversation without a list."""
    found = [value] if isinstance(value, dict) else value
    scores = validated(_NATIVE.validate_python, found, "the reply")
    _check_count(len(scores), count)
    return [one.embedding[0] for one in scores]


_NATIVE = TypeAdapter(List[NativeScore])
