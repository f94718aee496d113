"""Small models made here: a byte-level BPE tokenizer of the training texts, and a random decoder.

For demos, tests and learning from scratch, where no model can or need be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from laurel.config.schema import ScratchConfig
from laurel.errors import ConfigError, key_of, setting_of
from laurel.models.tokenizer import CHATML

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with ChatML tokens: no text is out of its vocabulary.

    Args:
        texts: What the merges are learned from.
        vocab_size: Entries, the 256 bytes and the special tokens included.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def scratch_config(config: ScratchConfig, tokenizer: Any, *, max_length: int) -> Any:
    """The Hugging Face configuration of the small model.

    Raises:
        ConfigError: transformers does not know the architecture or a key.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if config.architecture not in CONFIG_MAPPING:
        known = "qwen2, qwen3, llama, mistral, gemma, gemma2, gemma3_text, phi, phi3, olmo2"
        raise ConfigError(
            f"{setting_of('policy.scratch.architecture', repr(config.architecture))} is no "
            "model_type of transformers;"
            f" common ones: {known}"
        )
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "intermediate_size": config.intermediate_size or 4 * config.hidden_size,
        "max_position_embeddings": max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    known_keys = AutoConfig.for_model(config.architecture)
    for key in config.config_overrides:
        if not hasattr(known_keys, key):
            near = get_close_matches(key, vars(known_keys), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{key_of('policy.scratch.config_overrides')}.{key}: {config.architecture} has no "
                "such "
                f"setting{hint}"
            )
    return AutoConfig.for_model(config.architecture, **{**values, **config.config_overrides})
