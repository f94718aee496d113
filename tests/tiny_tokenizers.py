"""Small tokenizers with the habits of well-known ones, made in the test."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from laurel.models.tokenizer import CHATML

LLAMA_31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start|>system\\n\\nToday Date: ' + date_string + '\\n\\n' + system_message + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n\\n' }}
{%- endif %}
"""
"""Writes BOS, the date of the day, and closes every turn with its EOS (`<|eot|>`)."""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Writes BOS, has no EOS, refuses a system message."""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
)
"""Asks for an answer at the end of the user's turn, and has no line breaks."""

QWEN_3 = """{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- set thought = '' %}
    {%- if message['role'] == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' and loop.last %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""Writes an empty thought into a last answer that has none, and forgets earlier thoughts."""

R1 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<\uff5cAssistant\uff5c>' + message['content'].split('</think>')[-1] + eos_token }}"
    "{% elif message['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + message['content'] }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}"
)
"""Opens a thought where it asks for an answer, and writes no thought of a given one."""

BARE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"
"""Neither BOS nor EOS."""


def make_tokenizer(
    *,
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    pad: str | None = "<pad>",
    more: tuple[str, ...] = (),
    template: str | None = CHATML,
    adds_bos: bool = False,
) -> Any:
    """A tokenizer of single bytes and special tokens; no text is out of its vocabulary.

    Args:
        bos: Begin of sequence.
        eos: End of sequence.
        pad: Padding; may be the same as `eos`.
        more: Further special tokens.
        template: Chat template.
        adds_bos: Whether plain tokenising puts BOS in front, as Llama's and Gemma's do.
    """
    special = list(dict.fromkeys(t for t in (pad, bos, eos, *more) if t is not None))
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, words.index(bos))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    )
    made.chat_template = template
    return made


def llama_31() -> Any:
    """Llama 3.1: adds BOS twice over, closes turns with a token of its own, knows the date."""
    return make_tokenizer(
        bos="<|begin|>",
        eos="<|eot|>",
        pad="<|finetune_right_pad_id|>",
        more=("<|start|>",),
        template=LLAMA_31,
        adds_bos=True,
    )


def gemma() -> Any:
    """Gemma: BOS by template and tokenizer, turns closed with a token that is not EOS."""
    return make_tokenizer(
        bos="<bos>",
        eos="<eos>",
        more=("<start_of_turn>", "<end_of_turn>"),
        template=GEMMA,
        adds_bos=True,
    )


def chatml() -> Any:
    """Qwen: no BOS, ChatML turns that end in EOS and a line break."""
    return make_tokenizer(bos=None, eos="<|im_end|>", more=("<|im_start|>",), template=CHATML)


def mistral() -> Any:
    """Mistral: BOS by template and tokenizer, turns of the assistant alone are closed."""
    return make_tokenizer(more=("[INST]", "[/INST]"), template=MISTRAL, adds_bos=True)


def qwen_3() -> Any:
    """Qwen 3: ChatML with thoughts, whose marks are added tokens but not special."""
    tokenizer = make_tokenizer(
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        more=("<|im_start|>",),
        template=QWEN_3,
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def r1() -> Any:
    """DeepSeek-R1: marks in full-width signs, thoughts that are not special."""
    tokenizer = make_tokenizer(
        bos="<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        eos="<\uff5cend\u2581of\u2581sentence\uff5c>",
        more=("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
        template=R1,
        adds_bos=True,
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer
