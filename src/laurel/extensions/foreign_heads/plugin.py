"""The programs whose reward models are read, each by what it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laurel.errors import ModelError, key_of
from laurel.models.loading.weight_names import HEAD_FILES, weight_names
from laurel.plugins import HeadFormat, SavedModel

if TYPE_CHECKING:
    from laurel.extensions.foreign_heads.heads import OpenRLHFHead, ValueHead

WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
_CLASS, _CRITIC = "RewardModel", "CriticModel"


class LlamaFactoryForm(HeadFormat):
    """LLaMA-Factory: a value head in a file beside the language model."""

    understood = f"LLaMA-Factory ({' or '.join(HEAD_FILES)} with {WEIGHT} and {BIAS})"

    def make(self, section: None, saved: SavedModel) -> ValueHead | None:
        """Return the head of the first such file."""
        from laurel.extensions.foreign_heads.heads import ValueHead

        for name in HEAD_FILES:
            if (saved.directory / name).is_file():
                return ValueHead("LLaMA-Factory", saved.directory / name, WEIGHT, BIAS)
        return None


class OpenRLHFForm(HeadFormat):
    """OpenRLHF: a head under a name that `config.json` says, and texts that end with EOS."""

    understood = "OpenRLHF (value_head_prefix in config.json, and a weight of that name)"

    def check_hub_name(self, name: str, hf_config: Any) -> None:
        """Refuse a model whose rules are found only in the files of a directory."""
        if _CLASS in (hf_config.architectures or []) or hasattr(hf_config, "value_head_prefix"):
            raise ModelError(
                f"{name} was made by OpenRLHF, which scores by rules of its own; its files have to "
                f"be here to follow them: hf download {name} --local-dir DIR, and name DIR"
            )

    def make(self, section: None, saved: SavedModel) -> OpenRLHFHead | None:
        """Return the head that the configuration names.

        Raises:
            ModelError: The model is a critic, lacks the head, or has pickled weights alone.
        """
        from laurel.extensions.foreign_heads.heads import PICKLED, OpenRLHFHead
        from laurel.models.loading.reward_model import understood

        directory, config = saved.directory, saved.config
        architectures = config.get("architectures") or []
        if _CRITIC in architectures:
            raise ModelError(
                f"{directory} is a critic of OpenRLHF: it estimates what single tokens are worth, "
                "and gives no score of a conversation. Name the reward model of that run"
            )
        if "value_head_prefix" not in config and _CLASS not in architectures:
            return None
        prefix = str(config.get("value_head_prefix", "score"))
        names = weight_names(directory)
        weight, bias = f"{prefix}.weight", f"{prefix}.bias"
        mean, std = config.get("mean"), config.get("std")
        if not names and prefix == "score" and not saved.safetensors_only:
            names = {weight: directory / PICKLED}  # transformers knows the name, reads the files
        if not names:
            raise ModelError(
                f"{directory} was made by OpenRLHF, and has no weights in safetensors. Pickled "
                "weights can run code when they are loaded: make safetensors of them, or, where "
                f"the head is called score, set {key_of('policy.safetensors_only')}=false if you "
                "trust them."
            )
        if weight not in names:
            heads = [name for name in names if name.count(".") == 1]
            raise ModelError(
                f"{directory} was made by OpenRLHF, and its weights have no {weight} "
                f"(value_head_prefix in config.json). Outside of the decoder they have: "
                f"{', '.join(sorted(heads)[:8]) or 'nothing'}. {understood()}"
            )
        return OpenRLHFHead(
            "OpenRLHF",
            names[weight],
            weight,
            bias if bias in names else None,
            mean=float(mean) if isinstance(mean, int | float) else None,
            std=float(std) if isinstance(std, int | float) else None,
        )


class TRLForm(HeadFormat):
    """TRL: a value head among the weights of the language model."""

    understood = f"TRL ({WEIGHT} and {BIAS} among the weights)"

    def make(self, section: None, saved: SavedModel) -> ValueHead | None:
        """Return the head that is among the weights."""
        from laurel.extensions.foreign_heads.heads import ValueHead

        names = weight_names(saved.directory)
        if WEIGHT not in names:
            return None
        return ValueHead("TRL", names[WEIGHT], WEIGHT, BIAS if BIAS in names else None)
