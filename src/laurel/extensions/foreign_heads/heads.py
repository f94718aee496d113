"""Reward heads of other programs: copied into a classifier, with the texts that they score."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laurel.errors import DataError, ModelError, key_of
from laurel.models.loading.reward_model import understood
from laurel.models.tokenizer import first_line, render, settle_padding
from laurel.plugins import ForeignHead
from laurel.types import Message

PICKLED = "pytorch_model.bin"

_OPENRLHF_KEYS = ("value_head_prefix", "normalize_reward", "mean", "std")
_OPENRLHF_TEMPLATE = (
    "{{% set laurel_text %}}\n{}{{% endset %}}"
    "{{% if add_generation_prompt %}}{{{{ laurel_text }}}}{{% else %}}"
    "{{% set laurel_text = laurel_text.rstrip('\\n') %}}{{{{ laurel_text }}}}"
    "{{% if not laurel_text.endswith(eos_token) %}}{{{{ ' ' + eos_token }}}}{{% endif %}}"
    "{{% endif %}}"
)


class ValueHead(ForeignHead):
    """The linear head of LLaMA-Factory and TRL, which score the text of the saved template."""

    rule = "the text is the saved template's, read from its last token"

    def __init__(
        self,
        program: str,
        file: Path,
        weight: str,
        bias: str | None,
        *,
        mean: float | None = None,
        std: float | None = None,
    ) -> None:
        self.program, self.file, self.weight, self.bias = program, file, weight, bias
        self.mean, self.std = mean, std
        self.is_apart = file.name != PICKLED

    def describe(self) -> str:
        """Return a sentence with the program, the file, and the token at which a score is read."""
        where = f"{self.file.name}: {self.weight}" + (f" and {self.bias}" if self.bias else "")
        return f"made by {self.program}; its head is from {where}; {self.rule}"

    def settle_tokenizer(self, tokenizer: Any, notes: list[str]) -> None:
        """Choose another padding token if padding is EOS.

        These programs find the last token by the attention mask, so they can pad with EOS, and
        often do. Hugging Face's own classes find it by the id of the padding token.
        """
        if tokenizer.pad_token == tokenizer.eos_token:
            settle_padding(tokenizer, "auto")
            notes.append(
                f"it padded with {tokenizer.eos_token!r}, which ends texts; padding is now "
                f"{tokenizer.pad_token!r}. No score depends on it"
            )

    def put_into(self, classifier: Any, *, keeps_bias: bool) -> float:
        """Copy the head, which must be one linear layer with one output over the hidden states."""
        if not self.is_apart:
            return 0.0
        tensors = _tensors(self.file, (self.weight, self.bias))
        weight = tensors[self.weight]
        bias = tensors[self.bias] if self.bias else None
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or weight.shape != head.weight.shape:
            wanted = list(head.weight.shape) if isinstance(head, nn.Linear) else "another layer"
            raise ModelError(
                f"{self.file}: {self.weight} is {list(weight.shape)}, and the head of "
                f"{type(classifier).__name__} is {wanted}: they do not belong together"
            )
        with torch.no_grad():
            head.weight.copy_(weight)
            if bias is not None and keeps_bias:
                head.bias = nn.Parameter(bias.reshape(1).to(head.weight))
        return 0.0 if bias is None else float(bias.reshape(()))


class OpenRLHFHead(ValueHead):
    """A head of OpenRLHF, which ends every text with EOS."""

    rule = "a text loses its last line breaks and ends with EOS, read there"
    truncation_side = "right"

    def put_into(self, classifier: Any, *, keeps_bias: bool) -> float:
        """Copy the head, and remove from the configuration what only OpenRLHF reads."""
        for key in _OPENRLHF_KEYS:
            if key in vars(classifier.config):
                delattr(classifier.config, key)
        return super().put_into(classifier, keeps_bias=keeps_bias)

    def settle_tokenizer(self, tokenizer: Any, notes: list[str]) -> None:
        """Choose another padding token if padding is EOS, and end the template's texts with EOS.

        Raises:
            ModelError: There is no EOS, or the template cannot be adapted.
        """
        super().settle_tokenizer(tokenizer, notes)
        eos, template = tokenizer.eos_token, tokenizer.chat_template
        if eos is None:
            raise ModelError(
                "the model was made by OpenRLHF, which ends every text with EOS, and its tokenizer "
                "names none: write its eos_token into tokenizer_config.json"
            )
        probe = (Message("user", "a"), Message("assistant", "b"))
        try:
            wanted = render(tokenizer, probe, {}).rstrip("\n")
            wanted += "" if wanted.endswith(eos) else f" {eos}"
            tokenizer.chat_template = _OPENRLHF_TEMPLATE.format(template.removesuffix("\n"))
            found = render(tokenizer, probe, {})
        except DataError as error:
            raise ModelError(str(error)) from error
        if found != wanted:
            raise ModelError(
                f"the chat template cannot be made to end as OpenRLHF ends texts: it gives "
                f"{found!r}, and should give {wanted!r}. Choose another: "
                f"{key_of('policy.tokenizer.chat_template')}=chatml, "
                "or a path ending in .jinja"
            )


def _tensors(path: Path, names: Iterable[str | None]) -> dict[str, Tensor]:
    wanted = [name for name in names if name is not None]
    if path.suffix != ".safetensors":
        raise ModelError(
            f"{path} is pickled, and Laurel reads no pickles: they can run code. If you trust it, "
            'make safetensors of it, in its directory: python -c "import torch, safetensors.torch '
            "as s; s.save_file(torch.load('value_head.bin', weights_only=True), "
            "'value_head.safetensors')\""
        )
    try:
        with safe_open(path, framework="pt") as file:
            held = list(file.keys())
            found = {name: file.get_tensor(name) for name in held if name in wanted}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise ModelError(
            f"{path} holds no {' and no '.join(lacking)}. It holds: "
            f"{', '.join(sorted(held)[:8]) or 'nothing'}. {understood()}"
        )
    return found
