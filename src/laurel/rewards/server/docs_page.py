"""The page at /docs: the OpenAPI description for people, without scripts or a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

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
        description: See `description.describe`.
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
        allowed = _form(parameter["schema"])
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
    forms = [_form(one) for one in schema.get("anyOf", [schema])]
    return "".join(f"<pre>{escape(form)}</pre>" for form in forms)


def _form(schema: Mapping[str, Any]) -> str:
    """A schema in one line, as somebody would write it on a blackboard."""
    if "anyOf" in schema:
        return " or ".join(map(_form, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "const" in schema:
        return repr(schema["const"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"[{_form(schema['items'])}, ...]"
    if kind == "object":
        needed = schema.get("required", ())
        keys = (
            f'"{name}"{"" if name in needed else "?"}: {_form(one)}'
            for name, one in schema.get("properties", {}).items()
            if one is not False  # a key that must not be there
        )
        any_other = schema.get("additionalProperties")
        more = [f"name: {_form(any_other)}, ..."] if any_other else []
        return f"{{{', '.join([*keys, *more])}}}"
    kinds = [kind] if isinstance(kind, str) else kind
    return " or ".join(_NAMES.get(one, one) for one in kinds)
