"""The bodies of other projects' reward servers and trainers, for both directions.

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

Texts are whole conversations that the client has rendered, except in `/score`: there a query is a
message of the user and a document the assistant's answer. None of the formats has a place for a
completion without a score, so one of those fails its request.

vLLM answers with the sigmoid of a score unless `use_activation` is false. The key was once called
`activation`, and before that `softmax`; a client that sends all three gets the score of every
version.
"""

from __future__ import annotations

import base64
import re
import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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

from laurel.errors import ProtocolError
from laurel.models.scoring import sigmoid
from laurel.rewards.preparing import Rendered, rendered_group
from laurel.rewards.remote.wire import (
    MOST_ROWS,
    Body,
    List,
    Messages,
    ScoringRequest,
    conversation_of,
    validated,
)
from laurel.types import Completion, Conversation, Group, Message, SentTurn

CLASSIFY_PATH = "/classify"
POOLING_PATH = "/pooling"
PAIRS_PATH = "/score"
"""Path of vLLM's pairs. vLLM answers the same at `/v1/score`, which is Laurel's own path: see
`names_pairs`.
"""
EMBEDDINGS_PATH = "/v1/embeddings"
GET_REWARD_PATH = "/get_reward"
REMOTE_RM_PATH = "/remote_rm"
"""Path at which Laurel's server answers slime, whose own servers take any path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Holds the scores of a request's conversations, and the facts of the answer."""

    scores: Sequence[float]
    num_tokens: Sequence[int]
    """Number of tokens of each conversation."""
    model: str
    request_id: str
    created: int
    """Unix time in seconds."""


class ForeignRequest(ScoringRequest):
    """A request of another project's client, which defines the form of its answer."""

    @abstractmethod
    def reply(self, scored: ScoredRows) -> Any:
        """Build the answer: a body, a list of them, or a number.

        Raises:
            OverflowError: The score exceeds float32, which the client asked for.
        """


def _without_fractions(value: Any) -> Any:
    # JSON has one type of numbers: a client may write 7 as 7.0.
    if isinstance(value, list) and float in set(map(type, value)):
        is_whole = [isinstance(number, float) and number.is_integer() for number in value]
        return [
            int(number) if whole else number for number, whole in zip(value, is_whole, strict=True)
        ]
    return value


_Ids = Annotated[List[Annotated[int, Field(ge=0, lt=2**31)]], BeforeValidator(_without_fractions)]
_Rows = Annotated[
    str | _Ids | Annotated[List[str | _Ids], Field(max_length=MOST_ROWS)],
    Field(union_mode="left_to_right"),
]
_Texts = Annotated[List[str], Field(max_length=MOST_ROWS)]


def _rows_of(value: str | list[Any]) -> tuple[list[Rendered], bool]:
    if isinstance(value, str):
        return [value], False
    if value and isinstance(value[0], int):
        return [tuple(value)], False
    return [row if isinstance(row, str) else tuple(row) for row in value], True


def _answered(conversation: Conversation) -> list[Group]:
    completion = Completion(messages=conversation[-1:])
    return [Group(id="", prompt=conversation[:-1], completions_G=(completion,))]


def _exactly_one(*forms: tuple[str, ...]) -> ConfigDict:
    """Return schema settings for a body with all keys of exactly one of some forms."""
    keys = {key for form in forms for key in form}
    one_of: list[Any] = [
        {"required": list(form), "properties": dict.fromkeys(sorted(keys - {*form}), False)}
        for form in forms
    ]
    return ConfigDict(json_schema_extra={"oneOf": one_of})


class _OneForm(ForeignRequest):
    """A request in which exactly one of several keys holds the conversations."""

    @property
    def form(self) -> str:
        """The key that holds the conversations."""
        return next(key for key in _FORMS if key in self.model_fields_set)

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        forms = [key for key in _FORMS if key in self.model_fields_set]
        if len(forms) != 1:
            choices = [key for key in _FORMS if key in type(self).model_fields]
            has = f"has {' and '.join(forms)}: send" if forms else "has none of these: send"
            raise PydanticCustomError(
                "values", "{has} one of {wanted}", {"has": has, "wanted": ", ".join(choices)}
            )
        return self

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """Groups to score."""
        value = getattr(self, self.form)
        if self.form == "messages":
            return _answered(conversation_of(value, role="user"))
        return [rendered_group(_rows_of(value)[0])]


_FORMS = ("input", "messages", "text", "input_ids")
_ACTIVATION_KEYS = ("use_activation", "activation", "softmax")
RAW: dict[str, Any] = dict.fromkeys(_ACTIVATION_KEYS, False)
"""Keys of a request for scores without an activation, for all versions of vLLM."""


class _Activated(ForeignRequest):
    """A request that is answered with sigmoids of scores, or with raw scores if it says so."""

    model: Any = Field(default=None, json_schema_extra={"type": "string"})
    use_activation: bool | None = None
    activation: bool | None = Field(default=None, description="`use_activation` of older vLLM")
    softmax: bool | None = Field(default=None, description="`use_activation` of older vLLM")

    def activated(self, scores: Sequence[float]) -> list[float]:
        """Return the sigmoid of each score, or the raw score if the request asks for it."""
        flags = (getattr(self, key) for key in _ACTIVATION_KEYS if key in self.model_fields_set)
        return list(scores) if next(flags, None) is False else list(map(sigmoid, scores))


class _Encoded(ForeignRequest):
    """A request that may ask for base64, of float32 in little-endian order."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[1] | None = None
    embed_dtype: Literal["float32"] = "float32"
    endianness: Literal["native", "little"] = "native"

    def encoded(self, score: float) -> list[float] | str:
        """Encode a score as the request asks."""
        if self.encoding_format == "float":
            return [score]
        return base64.b64encode(struct.pack("<f", score)).decode("ascii")


def _is_single(numbers: list[float]) -> list[float]:
    if len(numbers) != 1:
        raise PydanticCustomError(
            "values",
            "has {count} numbers, and a reward model gives one score",
            {"count": len(numbers)},
        )
    return numbers


_Single = Annotated[List[float], AfterValidator(_is_single)]
_Base64 = Annotated[str, Field(json_schema_extra={"contentEncoding": "base64"})]


class Usage(Body):
    """The number of tokens read."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class _Answer(Body):
    """The keys that the responses of vLLM's and OpenAI's endpoints share."""

    object: Literal["list"] = "list"
    model: str
    usage: Usage


class _VllmAnswer(_Answer):
    id: str
    created: int


def _about(kind: str, scored: ScoredRows) -> dict[str, Any]:
    tokens = sum(scored.num_tokens)
    usage = Usage(prompt_tokens=tokens, total_tokens=tokens, completion_tokens=0)
    facts: dict[str, Any] = {"model": scored.model, "usage": usage}
    if kind:
        facts |= {"id": f"{kind}-{scored.request_id}", "created": scored.created}
    return facts


def _in_order(entries: Iterable[tuple[int | None, Any]], *, count: int) -> list[float]:
    """Return the scores of an answer's entries, which may come in another order.

    Raises:
        ProtocolError: The count is wrong, or an index comes twice.
    """
    listed = list(entries)
    check_count(len(listed), count)
    scores: dict[int, float] = {}
    for position, (own_index, numbers) in enumerate(listed):
        index = position if own_index is None else own_index
        if index >= count or index in scores:
            raise ProtocolError(f"'data' has an entry with the index {index!r}, or has it twice")
        scores[index] = numbers[0]
    return [scores[index] for index in range(count)]


def check_count(num_scores: int, num_conversations: int) -> None:
    """Raise a `ProtocolError` unless there is one score for each conversation."""
    if num_scores != num_conversations:
        raise ProtocolError(
            f"{num_scores} scores came back for {num_conversations} conversations", kind="count"
        )


class ClassifyEntry(Body):
    """The score of one conversation."""

    index: Annotated[int, Field(ge=0)] | None = None
    label: str | None = "LABEL_0"
    probs: _Single
    num_classes: int | None = 1


class ClassifyScores(Body):
    """The part of vLLM's answer that a client reads."""

    data: List[ClassifyEntry]

    def in_order(self, count: int) -> list[float]:
        """Return the scores of `count` conversations.

        Raises:
            ProtocolError: The count is wrong, or an index comes twice.
        """
        return _in_order(((entry.index, entry.probs) for entry in self.data), count=count)


class ClassifyReply(_VllmAnswer, ClassifyScores):
    """The answer of vLLM to `/classify`."""


class NativeScore(Body):
    """The part of SGLang's answer that a client reads."""

    embedding: _Single


class MetaInfo(Body):
    """The facts that SGLang adds to a score."""

    prompt_tokens: int


class NativeReply(NativeScore):
    """The answer of SGLang to `/classify`, or one of a list of them."""

    meta_info: MetaInfo


class ClassifyRequest(_OneForm, _Activated):
    """A request of vLLM (`input` or `messages`) or of SGLang (`text` or `input_ids`)."""

    model_config = _exactly_one(*((key,) for key in _FORMS))

    input: _Rows = Field(default_factory=str)
    messages: Messages = Field(default_factory=list, min_length=1)
    text: _Rows = Field(default_factory=str)
    input_ids: _Rows = Field(default_factory=list)
    add_special_tokens: Any = Field(default=None, description="Not read: none are ever added")
    add_generation_prompt: Any = Field(default=None, description="Not read")

    def reply(self, scored: ScoredRows) -> ClassifyReply | NativeReply | list[NativeReply]:
        """Return sigmoids of scores to clients of vLLM, and raw scores to clients of SGLang."""
        if self.form in ("input", "messages"):
            data = [
                ClassifyEntry(index=index, label="LABEL_0", probs=[score], num_classes=1)
                for index, score in enumerate(self.activated(scored.scores))
            ]
            return ClassifyReply(data=data, **_about("classify", scored))
        replies = [
            NativeReply(embedding=[score], meta_info=MetaInfo(prompt_tokens=count))
            for score, count in zip(scored.scores, scored.num_tokens, strict=True)
        ]
        return replies if _rows_of(getattr(self, self.form))[1] else replies[0]


class PoolingEntry(Body):
    """The score of one conversation, encoded as the request asks."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: _Single | _Base64


class PoolingReply(_VllmAnswer):
    """The answer of vLLM to `/pooling`."""

    data: List[PoolingEntry]


class PoolingRequest(_OneForm, _Activated, _Encoded):
    """A request as of `/classify`, with `input` or `messages`."""

    model_config = _exactly_one(("input",), ("messages",))

    input: _Rows = Field(default_factory=str)
    messages: Messages = Field(default_factory=list, min_length=1)
    task: Literal["classify"] | None = None

    def reply(self, scored: ScoredRows) -> PoolingReply:
        """Return the sigmoid of each score, or the raw score if the request asks for it."""
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
"""Names that vLLM's clients give the two sides of `/score`."""
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
    """The answer of vLLM to `/score`."""

    data: List[PairsEntry]


class PairsRequest(_Activated):
    """Queries of the user, and documents, which are answers: one query, or as many of both."""

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
        """One group for each query."""
        present = _SIDES & self.model_fields_set
        keys = next((keys for keys in PAIR_KEYS if present == {*keys}), None)
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
                    Completion(messages=(Message("assistant", text),)) for text in documents_G
                ),
            )
            for index, (query, documents_G) in enumerate(zip(queries, answers, strict=True))
        ]

    def reply(self, scored: ScoredRows) -> PairsReply:
        """Return the sigmoid of each score, or the raw score if the request asks for it."""
        data = [
            PairsEntry(index=index, object="score", score=score)
            for index, score in enumerate(self.activated(scored.scores))
        ]
        return PairsReply(data=data, **_about("score", scored))


class EmbeddingsEntry(Body):
    """The score of one conversation, encoded as the request asks."""

    object: str | None = "embedding"
    index: Annotated[int, Field(ge=0)] | None = None
    embedding: _Single | _Base64


class EmbeddingsScores(Body):
    """The part of the answer that a client reads."""

    data: List[EmbeddingsEntry]

    def in_order(self, count: int) -> list[float]:
        """Return the scores of `count` conversations."""
        if any(isinstance(entry.embedding, str) for entry in self.data):
            raise ProtocolError("'embedding' is base64, which the request did not ask for")
        return _in_order(((entry.index, entry.embedding) for entry in self.data), count=count)


class EmbeddingsReply(_Answer, EmbeddingsScores):
    """The answer to OpenAI's embeddings in SGLang's form."""


class EmbeddingsRequest(_Encoded):
    """The request of OpenAI's embeddings in SGLang's form."""

    model: Any = Field(default=None, json_schema_extra={"type": "string"})
    input: _Rows

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """Groups to score."""
        return [rendered_group(_rows_of(self.input)[0])]

    def reply(self, scored: ScoredRows) -> EmbeddingsReply:
        """Answer with the scores as embeddings of one number."""
        data = [
            EmbeddingsEntry(object="embedding", index=index, embedding=self.encoded(score))
            for index, score in enumerate(scored.scores)
        ]
        return EmbeddingsReply(data=data, **_about("", scored))


class GetRewardScores(Body):
    """The part of the answer that a client reads."""

    rewards: List[float]

    def in_order(self, count: int) -> list[float]:
        """Return the scores of `count` conversations."""
        check_count(len(self.rewards), count)
        return self.rewards


class GetRewardReply(GetRewardScores):
    """The answer of OpenRLHF's server."""

    scores: List[float]
    extra_logs: dict[str, Any] = Field(default_factory=dict)


class _FromTrainer(ForeignRequest):
    """A request of a trainer, whose prompts may have been rendered."""

    _is_rendered: bool | None = PrivateAttr(default=None)

    def model_post_init(self, context: Mapping[str, Any] | None) -> None:
        """Store whether the URL says that the prompts are rendered."""
        self._is_rendered = (context or {}).get("rendered")


# Tokenizers write BOS, and padding, in front of the prompt of a decoded conversation.
_SPECIAL_TOKENS = re.compile(r"(?:<[^<>\s]{1,40}>|\[[A-Z]{2,8}\])*")


class GetRewardRequest(_FromTrainer):
    """A request of OpenRLHF: whole conversations, and the prompts that they begin with.

    A conversation that does not begin with its prompt counts as rendered. The labels are not read.
    """

    query: _Texts
    prompts: Any = Field(default=None, json_schema_extra={"type": "array"})
    labels: Any = Field(default=None, json_schema_extra={"type": "array"})

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """Groups to score."""
        prompts = self.prompts if isinstance(self.prompts, list) else []
        if len(prompts) != len(self.query):
            prompts = [None] * len(self.query)
        return [rendered_group(list(map(self._row, self.query, prompts)))]

    def _row(self, query: str, prompt: Any) -> Rendered:
        if not isinstance(prompt, str) or not prompt:
            return query
        before, match, response = query.partition(prompt)
        if not match or _SPECIAL_TOKENS.fullmatch(before) is None:
            return query
        turn = prompt if self._is_rendered is False else before + prompt
        return SentTurn(turn, response, self._is_rendered)

    def reply(self, scored: ScoredRows) -> GetRewardReply:
        """Answer with the scores under both keys."""
        scores = list(scored.scores)
        return GetRewardReply(rewards=scores, scores=scores, extra_logs={})


class RemoteRmRequest(_FromTrainer):
    """A request of slime: a prompt and its response; the label is not read."""

    prompt: str | Messages
    response: str
    label: Any = None

    @cached_property
    def as_groups(self) -> Sequence[Group]:
        """Groups to score."""
        prompt = self.prompt
        turn = prompt if isinstance(prompt, str) else conversation_of(prompt, role="user")
        return [rendered_group([SentTurn(turn, self.response, self._is_rendered)])]

    def reply(self, scored: ScoredRows) -> float:
        """Answer with the score itself."""
        return scored.scores[0]


_NUMBER: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(strict=True, allow_inf_nan=False)])


def read_remote_rm_reply(value: Any, *, key: str = "") -> float:
    """Read the score of a reply.

    Raises:
        ProtocolError: There is no finite number.
    """
    what = f"{key!r} of the reply" if key else "the reply"
    if key:
        if not isinstance(value, dict) or key not in value:
            raise ProtocolError(f"{what} is missing")
        value = value[key]
    return validated(_NUMBER.validate_python, value, what)
