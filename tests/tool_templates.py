"""Chat templates that show and write function calls with the habits of well-known ones."""

from __future__ import annotations

from typing import Any

from laurel.models.tokenizer import HERMES
from tiny_tokenizers import make_tokenizer

QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools>\\nName the call between <tool_call></tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (loop.first and tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Shows tools to the system, writes calls between tags, and answers in one turn of the user."""

LLAMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>system\\n\\n' + messages[0].content | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {{- '<|start|>user\\n\\nAnswer with JSON for a call of one of these functions.\\n\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n\\n' }}
    {%- endfor %}
    {{- messages[0].content | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant\\n\\nTAG{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- elif message.role in ('tool', 'ipython') %}
        {{- '<|start|>ipython\\n\\n' + message.content | tojson + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '\\n\\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n\\n' }}
{%- endif %}
"""
"""Shows tools to the user, writes one bare call, and tells what a tool says as a JSON string."""

BRACKETS = HERMES.replace("<tool_call>", "[CALLS] [").replace("</tool_call>", "]")
"""Writes calls in a form of its own."""


def chatml_like(template: str) -> Any:
    """A tokenizer of the family of ChatML."""
    return make_tokenizer(bos=None, eos="<|im_end|>", more=("<|im_start|>",), template=template)


def llama_like(tag: str = "") -> Any:
    """A tokenizer of the family of Llama 3, whose calls may begin with `<|python_tag|>`."""
    return make_tokenizer(
        bos="<|begin|>",
        eos="<|eot|>",
        pad="<|pad|>",
        more=("<|start|>", "<|python_tag|>"),
        template=LLAMA.replace("TAG", tag),
        adds_bos=True,
    )


TOKENIZERS = {
    "hermes": lambda: chatml_like(HERMES),
    "qwen": lambda: chatml_like(QWEN),
    "llama": llama_like,
    "llama with a tag": lambda: llama_like("<|python_tag|>"),
}
"""Makers of tokenizers whose templates call functions."""
FORM_OF = {"hermes": "hermes", "qwen": "hermes", "llama": "llama", "llama with a tag": "llama"}
"""The form that each of them writes."""
