"""Export of trained models as plain Hugging Face directories with a card, also to the hub."""
