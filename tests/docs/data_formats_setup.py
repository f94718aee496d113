"""Makes what docs/data_formats.md names: `small-model`, a tiny language model with ChatML."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from laurel.models.loading.pretrained import train_tokenizer
from laurel.models.tokenizer import CHATML
from laurel.observe.console import quiet_libraries

TEXTS = [
    "Where is the laurel? The laurel stands by the gate.",
    "system user assistant What is 6 times 7? 6 times 7 is 42. Be brief.",
    "Write a function that returns its argument. I do not know.",
] * 4


def main() -> None:
    """Write it into the working directory."""
    quiet_libraries()
    tokenizer = train_tokenizer(TEXTS, vocab_size=420)
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        head_dim=8,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained("small-model")
    tokenizer.save_pretrained("small-model")


if __name__ == "__main__":
    main()
