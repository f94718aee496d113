"""The OpenAPI description of a reward server: what `wire` and `foreign_wire` read and write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from laurel import __version__
from laurel.rewards.remote import foreign
from laurel.rewards.remote.wire import SCORE_PATH, VERSION_HEADER

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SCORES: Schema = {"type": "array", "items": _NUMBER}
_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS: Schema = {"type": "array", "items": _ID}


def _object(
    properties: Mapping[str, Schema | bool], *optional: str, closed: bool = False
) -> Schema:
    """An object; closed: it has no other keys."""
    found: Schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }
    return {**found, "additionalProperties": False} if closed else found


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_MESSAGE = _object({"role": _TEXT, "content": _TEXT}, closed=True)
_MESSAGES = _list(_MESSAGE)
_GROUP = _object(
    {
        "id": _TEXT,
        "prompt": {"anyOf": [_TEXT, _MESSAGES]},
        "completions": _list({"anyOf": [_TEXT, _list(_MESSAGE, minItems=1)]}),
    },
    closed=True,
)
_SCORE = _object(
    {
        "value": {"type": ["number", "null"]},
        "values": _SCORES,
        "num_tokens": _COUNT,
        "truncated": {"type": "boolean"},
        "failure": {"type": ["string", "null"]},
        "parts": {
            "type": "object",
            "description": "Numbers that the value came about from, by name",
            "additionalProperties": _NUMBER,
        },
    },
    "parts",
)
_ROWS: Schema = {"anyOf": [_TEXT, _list(_TEXT), _IDS, _list(_IDS)]}
_FLAG: Schema = {"type": "boolean", "default": True}
_USAGE = _object({"prompt_tokens": _COUNT, "total_tokens": _COUNT, "completion_tokens": _COUNT})
_ERROR = _object({"error": _object({"code": _TEXT, "message": _TEXT})})
_STATE = _object(
    {
        "state": {"enum": ["loading", "ready", "asleep", "draining", "broken"]},
        "model": _TEXT,
        "model_version": _TEXT,
    },
    "model",
    "model_version",
)

_ACTIVATION = dict.fromkeys(("use_activation", "activation", "softmax"), _FLAG)
_FORMS: dict[str, Schema] = {
    "input": _ROWS,
    "messages": {**_MESSAGES, "minItems": 1},
    "text": {"anyOf": [_TEXT, _list(_TEXT)]},
    "input_ids": {"anyOf": [_IDS, _list(_IDS)]},
}


def _form(name: str) -> Schema:
    """What `/classify` reads if the request has this key, and so no other key of a form."""
    more = {"model": _TEXT, **_ACTIVATION} if name in ("input", "messages") else {}
    others = {other: False for other in _FORMS if other != name}
    return _object({name: _FORMS[name], **more, **others}, *more, *others)


_CLASSIFY: Schema = {"anyOf": [_form(name) for name in _FORMS]}
_ENCODING: dict[str, Schema] = {
    "encoding_format": {"enum": ["float", "base64"]},
    "dimensions": {"enum": [1, None]},
}
_BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_VLLM: dict[str, Schema] = {
    "id": _TEXT,
    "object": {"const": "list"},
    "created": _COUNT,
    "model": _TEXT,
}


def _pooled(name: str) -> Schema:
    other = "messages" if name == "input" else "input"
    more = {"model": _TEXT, **_ACTIVATION, **_ENCODING, "task": {"enum": ["classify", None]}}
    return _object({name: _FORMS[name], **more, other: False}, *more, other)


_POOL: Schema = {"anyOf": [_pooled("input"), _pooled("messages")]}
_POOLED = _object(
    {
        **_VLLM,
        "data": _list(
            _object({"index": _COUNT, "object": _TEXT, "data": {"anyOf": [_SCORES, _BASE64]}})
        ),
        "usage": _USAGE,
    }
)


def _pair(keys: tuple[str, str]) -> Schema:
    more = {"model": _TEXT, **_ACTIVATION}
    others = {key: False for pair in foreign.PAIR_KEYS for key in pair if key not in keys}
    side = {"anyOf": [_TEXT, _list(_TEXT)]}
    named = dict.fromkeys(keys, side)
    return _object({**named, **more, **others, "groups": False}, *more, *others, "groups")


_PAIRS = [_pair(keys) for keys in foreign.PAIR_KEYS]
_PAIRS_SCORED = _object(
    {
        **_VLLM,
        "data": _list(_object({"index": _COUNT, "object": _TEXT, "score": _NUMBER})),
        "usage": _USAGE,
    }
)
_NATIVE = _object({"embedding": _SCORES, "meta_info": _object({"prompt_tokens": _COUNT})})
_CLASSIFIED: Schema = {
    "anyOf": [
        _object(
            {
                "id": _TEXT,
                "object": {"const": "list"},
                "created": _COUNT,
                "model": _TEXT,
                "data": _list(
                    _object(
                        {"index": _COUNT, "label": _TEXT, "probs": _SCORES, "num_classes": _COUNT}
                    )
                ),
                "usage": _USAGE,
            }
        ),
        _NATIVE,
        _list(_NATIVE),
    ]
}
_EMBEDDED = _object(
    {
        "object": {"const": "list"},
        "data": _list(
            _object({"object": _TEXT, "index": _COUNT, "embedding": {"anyOf": [_SCORES, _BASE64]}})
        ),
        "model": _TEXT,
        "usage": _USAGE,
    }
)

_SCORING = {
    SCORE_PATH: (
        "Scores of whole groups",
        "A prompt and its completions are one group. A completion without a score has a failure "
        "that says why, and the others are not affected. A list of nothing, here and wherever a "
        "path takes a list to score, is answered with a list of nothing. A `request_id` that "
        "comes again with the same request gets the same answer. A `model_version` is the only "
        "one that is wanted.",
        {
            "anyOf": [
                _object(
                    {"groups": _list(_GROUP), "request_id": _TEXT, "model_version": _TEXT},
                    "request_id",
                    "model_version",
                    closed=True,
                ),
                *_PAIRS,
            ]
        },
        {
            "anyOf": [
                _object(
                    {
                        "groups": _list(_object({"id": _TEXT, "scores": _list(_SCORE)})),
                        "model": _TEXT,
                        "model_version": _TEXT,
                        "request_id": _TEXT,
                    },
                    "request_id",
                ),
                _PAIRS_SCORED,
            ]
        },
    ),
    foreign.PAIRS_PATH: (
        "vLLM's /score",
        "A query is what the user says, a document the answer that is judged; one query and its "
        "documents, or as many of both. The answer is the sigmoid of the score unless "
        "`use_activation` is false. The same is answered at `/v1/score`, where `groups` tells our "
        "own form from this one.",
        {"anyOf": _PAIRS},
        _PAIRS_SCORED,
    ),
    foreign.POOLING_PATH: (
        "vLLM's /pooling",
        "As `/classify` with `input` or `messages`: the sigmoid of the score unless "
        "`use_activation` is false. `base64` is of float32, little-endian.",
        _POOL,
        _POOLED,
    ),
    foreign.CLASSIFY_PATH: (
        "vLLM's and SGLang's /classify",
        "With `input` or `messages` it is vLLM's, whose answer is the sigmoid of the score unless "
        "`use_activation` (once `activation`, and before that `softmax`) is false. With `text` or "
        "`input_ids` it is SGLang's, whose answer is the score.",
        _CLASSIFY,
        _CLASSIFIED,
    ),
    foreign.EMBEDDINGS_PATH: (
        "SGLang's and OpenAI's /v1/embeddings",
        "The embedding of a conversation is its score. OpenAI's client asks for `base64`, which is "
        "of float32, little-endian.",
        _object({"input": _ROWS, "model": _TEXT, **_ENCODING}, "model", *_ENCODING),
        _EMBEDDED,
    ),
    foreign.GET_REWARD_PATH: (
        "OpenRLHF's remote reward model",
        "`query` has whole conversations that the client has rendered; the rest is not read.",
        _object(
            {"query": _list(_TEXT), "prompts": _list(_TEXT), "labels": _list({})},
            "prompts",
            "labels",
        ),
        _object({"rewards": _SCORES, "scores": _SCORES, "extra_logs": {"type": "object"}}),
    ),
    foreign.REMOTE_RM_PATH: (
        "slime's remote_rm",
        "The answer is the score. A prompt that is a text counts as rendered where it ends as the "
        "model's chat template asks for an answer, and else as what the user says; with marks of a "
        "template elsewhere it is refused, unless `?rendered=1` or `?rendered=0` says what it is.",
        _object({"prompt": {"anyOf": [_TEXT, _MESSAGES]}, "response": _TEXT, "label": {}}, "label"),
        _NUMBER,
    ),
}

_LOOKS: dict[str, tuple[str, Schema]] = {
    "/health": ("That the process lives; needs no key", {"type": "object"}),
    "/ready": ("Whether it takes requests", _STATE),
    "/v1/models": (
        "The model that is served",
        _object(
            {
                "object": {"const": "list"},
                "data": _list(
                    _object({"id": _TEXT, "object": _TEXT, "owned_by": _TEXT, "version": _TEXT})
                ),
            }
        ),
    ),
}

_ADMIN: dict[str, tuple[str, Schema | None]] = {
    "/admin/sleep": ("Finish what was accepted, and give the memory of devices back", None),
    "/admin/wake": ("Take requests again", None),
    "/admin/load": (
        "Serve the model of another directory once it has given its golden scores",
        _object({"model": _TEXT}),
    ),
}

_REFUSALS = {
    "400": "Not the JSON that is described here",
    "401": "No key, or one that is not the server's; the message says which",
    "403": "Another host name, or what only this machine and the admin key may ask",
    "405": "Another method",
    "408": "The body did not come in time",
    "409": "Not the version that was asked for, or another change is under way",
    "413": "Too large",
    "415": "Not `application/json`, or compressed",
    "422": "A conversation that cannot be scored where the format has no place for that, a request "
    "id that another request had, or a model that cannot be used",
    "429": "The queue is full: see `Retry-After`",
    "503": "Not ready, or not in time: see `Retry-After`",
}


def _json(schema: Schema, description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _responses(schema: Schema, *statuses: str) -> dict[str, Any]:
    errors = {status: _json(_ERROR, _REFUSALS[status]) for status in statuses}
    found = _json(schema, "Done")
    found["headers"] = {VERSION_HEADER: {"schema": _TEXT, "required": False}}
    return {"200": found, **errors}


def _posted(schema: Schema) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


_ALWAYS = ("401", "403")
_OF_BODIES = ("400", "408", "413", "415", "422")


def openapi_document(*, needs_key: bool) -> dict[str, Any]:
    """The description of version 3.1, as JSON."""
    paths: dict[str, Any] = {}
    for path, (title, text, asked, answered) in _SCORING.items():
        responses = _responses(answered, *_ALWAYS, *_OF_BODIES, "409", "429", "503")
        paths[path] = {
            "post": {
                "tags": ["scores"],
                "summary": title,
                "description": text,
                "requestBody": _posted(asked),
                "responses": responses,
            }
        }
    paths[foreign.REMOTE_RM_PATH]["post"]["parameters"] = [
        {"name": "rendered", "in": "query", "schema": {"enum": ["0", "1"]}}
    ]
    for path, (title, schema) in _LOOKS.items():
        responses = _responses(schema, *_ALWAYS)
        if path == "/ready":
            responses["503"] = _json(schema, "It does not")
        paths[path] = {"get": {"tags": ["looks"], "summary": title, "responses": responses}}
    paths["/health"]["get"]["security"] = []
    paths["/metrics"] = {
        "get": {
            "tags": ["looks"],
            "summary": "Figures for Prometheus",
            "responses": {
                "200": {"description": "Done", "content": {"text/plain": {"schema": _TEXT}}},
                **{status: _json(_ERROR, _REFUSALS[status]) for status in _ALWAYS},
            },
        }
    }
    for path, (title, body) in _ADMIN.items():
        more = ("400", "408", "413", "415", "409", "422", "503")
        operation: dict[str, Any] = {
            "tags": ["admin"],
            "summary": title,
            "responses": _responses(_STATE, *_ALWAYS, *more),
        }
        if body is not None:
            operation["requestBody"] = _posted(body)
        paths[path] = {"post": operation}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Laurel reward server", "version": __version__},
        "paths": paths,
    }
    if needs_key:
        bearer = {"type": "http", "scheme": "bearer"}
        found["components"] = {"securitySchemes": {"key": bearer}}
        found["security"] = [{"key": []}]
    return found


# --------------------------------------------------------------------------------------------------
# The page at /docs: the OpenAPI description for people, without scripts or a network.

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:54em;margin:2em auto;padding:0 1em}"
    "code,pre{font:14px/1.4 monospace;background:#8882}pre{padding:.6em;white-space:pre-wrap}"
    "h2{margin-top:2em;border-top:1px solid #888}"
)
_NAMES = {"string": "text", "number": "number", "integer": "whole number", "boolean": "true/false"}
_PREAMBLE = """<p>Bodies are JSON (<code>Content-Type: application/json</code>).{key}
Keys with a question mark may be left out. For programs, the same as OpenAPI:
<code>/openapi.json</code>.</p><pre>{curl}</pre>"""
_KEY = (
    " All but <code>/health</code> and, from the server's own machine, this page need the API key, "
    "in the header <code>Authorization: Bearer KEY</code>; the server says at its start where it "
    "is. Where there is an admin key, <code>/admin</code> needs that one. "
    "Addresses that <code>--allow-from</code> opened need no key for scores."
)
_ASK = """{"groups": [{"id": "1", "prompt": "2 + 2?", "completions": ["4", "5"]}]}"""


def docs_page(description: Mapping[str, Any]) -> bytes:
    """HTML that says what an OpenAPI description says.

    Args:
        description: See `openapi_document`.
    """
    needs_key = "security" in description
    header = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    curl = f"curl $URL/v1/score{header} -H 'Content-Type: application/json' \\\n  -d '{_ASK}'"
    title = escape(description["info"]["title"])
    lines = [
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>',
        f"<style>{_STYLE}</style><h1>{title}</h1>",
        _PREAMBLE.format(key=_KEY if needs_key else "", curl=escape(curl)),
    ]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    return "\n".join(lines).encode()


def _operation(name: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2><p>{escape(operation['summary'])}."
    yield f"{_marked(operation.get('description', ''))}</p>"
    for parameter in operation.get("parameters", ()):
        allowed = _schema_text(parameter["schema"])
        yield f"<p>In the address: <code>?{escape(parameter['name'])}=</code>{escape(allowed)}</p>"
    if "requestBody" in operation:
        yield f"<p>Asks</p>{_body(operation['requestBody'])}"
    refusals = []
    for status, response in operation["responses"].items():
        if status == "200":
            yield f"<p>Answers</p>{_body(response)}"
        else:
            refusals.append(f"<li>{status}: {_marked(response['description'])}</li>")
    if refusals:
        yield f"<details><summary>Refusals</summary><ul>{''.join(refusals)}</ul></details>"


def _marked(text: str) -> str:
    """Text whose code stands between backticks."""
    parts = escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))


def _body(content: Mapping[str, Any]) -> str:
    (media,) = content["content"].values()
    schema = media["schema"]
    forms = [_schema_text(one) for one in schema.get("anyOf", [schema])]
    return "".join(f"<pre>{escape(form)}</pre>" for form in forms)


def _schema_text(schema: Mapping[str, Any]) -> str:
    """A schema in one line, as somebody would write it on a blackboard."""
    if "anyOf" in schema:
        return " or ".join(map(_schema_text, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"[{_schema_text(schema['items'])}, ...]"
    if kind == "object":
        needed = schema.get("required", ())
        keys = (
            f'"{name}"{"" if name in needed else "?"}: {_schema_text(one)}'
            for name, one in schema.get("properties", {}).items()
            if one is not False  # a key that must not be there
        )
        any_other = schema.get("additionalProperties")
        more = [f"name: {_schema_text(any_other)}, ..."] if any_other else []
        return f"{{{', '.join([*keys, *more])}}}"
    kinds = [kind] if isinstance(kind, str) else kind
    return " or ".join(_NAMES.get(one, one) for one in kinds)
