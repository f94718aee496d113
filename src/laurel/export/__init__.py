"""Plain Hugging Face directories of trained models, with a card, here or on the hub."""
