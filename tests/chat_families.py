"""Small tokenizers with the control tokens and the habits of six families of chat templates."""

from __future__ import annotations

from typing import Any, NamedTuple

from laurel.models.tokenizer import CHATML
from tiny_tokenizers import make_tokenizer

_PROMPT = "{% if add_generation_prompt %}"
_LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}" + _PROMPT + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    + _PROMPT
    + "<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    " {{ m.content | trim }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set said = m.content %}{% if '</think>' in said %}{% set said = said.split('</think>')[-1] "
    "%}{% endif %}<\uff5cAssistant\uff5c>{{ said }}{{ eos_token }}"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}<\uff5cUser\uff5c>{{ m.content }}"
    "{% endif %}{% endfor %}" + _PROMPT + "<\uff5cAssistant\uff5c>{% endif %}"
)
_QWEN_3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set said = m.content %}"
    "{% set thought = '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.last %}{{ '<think>\\n' + thought.strip('\\n') + "
    "'\\n</think>\\n\\n' }}{% endif %}{{ said }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + _PROMPT
    + "<|im_start|>assistant\n{% endif %}"
)


class Family(NamedTuple):
    """Marks that a template writes, and added tokens that messages hold by right."""

    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    written: tuple[str, ...] = ()
    """Added tokens that are not special, and that the template writes around messages."""
    honest: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """All control tokens."""
        ends = (self.eos,) if self.bos is None else (self.bos, self.eos)
        return (*self.special, *self.written, *ends)

    def tokenizer(self) -> Any:
        """A tokenizer of single bytes besides."""
        made = make_tokenizer(bos=self.bos, eos=self.eos, more=self.special, template=self.template)
        made.add_tokens([*self.written, *self.honest])
        return made


_THOUGHTS = ("<think>", "</think>")
_CALLS = ("<tool_call>", "</tool_call>")
FAMILIES = {
    "ChatML": Family(CHATML, ("<|im_start|>", "<|endoftext|>"), None, "<|im_end|>", (), _CALLS),
    "Llama 3": Family(
        _LLAMA_3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_7|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "Gemma": Family(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>"),
    "Mistral": Family(
        _MISTRAL, ("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), "<s>", "</s>"
    ),
    "R1": Family(
        _R1,
        (),
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
        _THOUGHTS,
    ),
    "Qwen 3": Family(
        _QWEN_3,
        ("<|im_start|>", "<|endoftext|>"),
        None,
        "<|im_end|>",
        ("<tool_response>", "</tool_response>"),
        (*_THOUGHTS, *_CALLS),
    ),
}
"""Families by name. A tokenizer is made anew each time: who uses it may change its template."""
