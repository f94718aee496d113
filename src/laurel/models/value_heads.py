"""Reward models of OpenRLHF, LLaMA-Factory and TRL: their heads and rules, which ours are not.

What they save, and how they score:

- **OpenRLHF**: a decoder and a linear head without bias beside it, by the name that `config.json`
  gives as `value_head_prefix`. The text loses its last line breaks and ends with EOS, behind a
  blank where the template writes none; longer ones are cut on the right and keep EOS.
- **LLaMA-Factory**: a causal language model, and `value_head.safetensors` (or `.bin`) with
  `v_head.summary.weight` and `v_head.summary.bias`. The text is the template's.
- **TRL's value heads**: the same two tensors among the weights of the language model.

All of them read the score from the last token that is not padding, whatever its id.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laurel.errors import DataError, ModelError, key_of
from laurel.models.scoring import FILE_NAME
from laurel.models.tokenizer import first_line, render, settle_padding
from laurel.models.weight_names import HEAD_FILES, weight_names
from laurel.types import Message

Program = Literal["OpenRLHF", "LLaMA-Factory", "TRL"]

PICKLED = "pytorch_model.bin"
WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
UNDERSTOOD = (
    "Understood are: Hugging Face's classifiers (score.weight); OpenRLHF (value_head_prefix in "
    "config.json, and a weight of that name); LLaMA-Factory (value_head.safetensors or "
    f"value_head.bin with {WEIGHT} and {BIAS}); TRL (these two among the weights)"
)

_OPENRLHF_CLASS, _OPENRLHF_CRITIC = "RewardModel", "CriticModel"
_OPENRLHF_KEYS = ("value_head_prefix", "normalize_reward", "mean", "std")
_OPENRLHF_TEMPLATE = (
    "{{% set laurel_text %}}\n{}{{% endset %}}"
    "{{% if add_generation_prompt %}}{{{{ laurel_text }}}}{{% else %}}"
    "{{% set laurel_text = laurel_text.rstrip('\\n') %}}{{{{ laurel_text }}}}"
    "{{% if not laurel_text.endswith(eos_token) %}}{{{{ ' ' + eos_token }}}}{{% endif %}}"
    "{{% endif %}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHead:
    """A head that was found, and where."""

    program: Program
    file: Path
    weight: str
    bias: str | None
    mean: float | None = None
    """Of the scores that the program measured, with `std`."""
    std: float | None = None

    @property
    def truncation_side(self) -> Literal["left", "right"] | None:
        """Where the program cuts what is too long; None where it is not one side of the whole."""
        return "right" if self.program == "OpenRLHF" else None

    @property
    def is_apart(self) -> bool:
        """Whether it is read from its file here; else transformers reads it with the weights."""
        return self.file.name != PICKLED

    def describe(self) -> str:
        """What was found, in words."""
        where = f"{self.file.name}: {self.weight}" + (f" and {self.bias}" if self.bias else "")
        rule = {
            "OpenRLHF": "a text loses its last line breaks and ends with EOS, read there",
            "LLaMA-Factory": "the text is the saved template's, read from its last token",
            "TRL": "the text is the saved template's, read from its last token",
        }[self.program]
        return f"made by {self.program}; its head is from {where}; {rule}"

    def settle_tokenizer(self, tokenizer: Any, notes: list[str]) -> None:
        """Have the tokenizer write what the program scores, and pad with what ends no text.

        These programs find the last token by the attention mask, so that padding with EOS, which
        they often do, has no part in their scores; Hugging Face's own classes find it by its id.

        Raises:
            ModelError: No other padding token, no EOS, or a template that cannot be taken over.
        """
        if tokenizer.pad_token == tokenizer.eos_token:
            settle_padding(tokenizer, "auto")
            notes.append(
                f"it padded with {tokenizer.eos_token!r}, which ends texts; padding is now "
                f"{tokenizer.pad_token!r}. No score depends on it"
            )
        if self.program == "OpenRLHF":
            _end_as_openrlhf(tokenizer)

    def put_into(self, classifier: Any, *, keeps_bias: bool) -> float:
        """Give the classifier this head.

        Args:
            classifier: A Hugging Face `...ForSequenceClassification`; its configuration forgets
                what only the other program reads.
            keeps_bias: Put the bias there, too; Hugging Face's own classes have no place for it.

        Returns:
            The bias: what the program adds to every score.

        Raises:
            ModelError: The head is not one linear layer with one output over the hidden states.
        """
        for key in _OPENRLHF_KEYS if self.program == "OpenRLHF" else ():
            if key in vars(classifier.config):
                delattr(classifier.config, key)
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

    def statistics(self) -> dict[str, float]:
        """Mean and standard deviation as rules of a contract, where the program measured them."""
        if self.mean is None or self.std is None:
            return {}
        return {"mean": self.mean, "std": self.std}


def find_value_head(directory: Path, *, safetensors_only: bool = True) -> ValueHead | None:
    """The head of another program's reward model; None for anything else, also for ours.

    Only names are read, and no pickled file is opened.

    Args:
        directory: Of a model; any other gives None.
        safetensors_only: Refuse pickled weights.

    Raises:
        ModelError: It is one of these programs', but not a reward model, or not whole.
    """
    config = _config_of(directory)
    if config is None or (directory / FILE_NAME).is_file():
        return None
    for name in HEAD_FILES:
        if (directory / name).is_file():
            return ValueHead(
                program="LLaMA-Factory", file=directory / name, weight=WEIGHT, bias=BIAS
            )
    architectures = config.get("architectures") or []
    if _OPENRLHF_CRITIC in architectures:
        raise ModelError(
            f"{directory} is a critic of OpenRLHF: it estimates what single tokens are worth, and "
            "gives no score of a conversation. Name the reward model of that run"
        )
    if "value_head_prefix" in config or _OPENRLHF_CLASS in architectures:
        return _of_openrlhf(directory, config, safetensors_only=safetensors_only)
    names = weight_names(directory)
    if WEIGHT in names:
        bias = BIAS if BIAS in names else None
        return ValueHead(program="TRL", file=names[WEIGHT], weight=WEIGHT, bias=bias)
    return None


def refuse_hub_name(name: str, hf_config: Any) -> None:
    """Refuse a model of OpenRLHF that is named by its place on the hub.

    Raises:
        ModelError: It is one, and its files have to be looked at.
    """
    is_theirs = _OPENRLHF_CLASS in (hf_config.architectures or [])
    if not Path(name).is_dir() and (is_theirs or hasattr(hf_config, "value_head_prefix")):
        raise ModelError(
            f"{name} was made by OpenRLHF, which scores by rules of its own; its files have to be "
            f"here to follow them: hf download {name} --local-dir DIR, and name DIR"
        )


def foreign_heads(unexpected: Iterable[str]) -> list[str]:
    """Weights that a classifier has no place for, other than a language model's head."""
    return sorted(key for key in unexpected if not key.startswith("lm_head."))


# ---------------------------------------------------------------------------------------- OpenRLHF


def _of_openrlhf(directory: Path, config: dict[str, Any], *, safetensors_only: bool) -> ValueHead:
    prefix = str(config.get("value_head_prefix", "score"))
    names = weight_names(directory)
    weight, bias = f"{prefix}.weight", f"{prefix}.bias"
    mean, std = config.get("mean"), config.get("std")
    if not names and prefix == "score" and not safetensors_only:
        names = {weight: directory / PICKLED}  # transformers knows the name, and reads the files
    if not names:
        raise ModelError(
            f"{directory} was made by OpenRLHF, and has no weights in safetensors. Pickled weights "
            "can run code when they are loaded: make safetensors of them, or, where the head is "
            f"called score, set {key_of('policy.safetensors_only')}=false if you trust them."
        )
    if weight not in names:
        heads = [name for name in names if name.count(".") == 1]
        raise ModelError(
            f"{directory} was made by OpenRLHF, and its weights have no {weight} "
            f"(value_head_prefix in config.json). Outside of the decoder they have: "
            f"{', '.join(sorted(heads)[:8]) or 'nothing'}. {UNDERSTOOD}"
        )
    return ValueHead(
        program="OpenRLHF",
        file=names[weight],
        weight=weight,
        bias=bias if bias in names else None,
        mean=float(mean) if isinstance(mean, int | float) else None,
        std=float(std) if isinstance(std, int | float) else None,
    )


def _end_as_openrlhf(tokenizer: Any) -> None:
    """Have the template end a conversation as OpenRLHF ends it.

    Raises:
        ModelError: There is no EOS, or the template does not do as it is told.
    """
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
            f"the chat template cannot be made to end as OpenRLHF ends texts: it gives {found!r}, "
            f"and should give {wanted!r}. Choose another: "
            f"{key_of('policy.tokenizer.chat_template')}=chatml, "
            "or a path ending in .jinja"
        )


# ------------------------------------------------------------------------------------------- files


def _config_of(directory: Path) -> dict[str, Any] | None:
    """What `config.json` says; None where that is no model's, which loading it will tell best."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _tensors(path: Path, names: Iterable[str | None]) -> dict[str, Tensor]:
    """Some tensors of a file.

    Raises:
        ModelError: It cannot be read, must not be, or holds others.
    """
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
            f"{', '.join(sorted(held)[:8]) or 'nothing'}. {UNDERSTOOD}"
        )
    return found
