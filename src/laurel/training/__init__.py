"""What all training has in common, and the training of reward models and SFT."""
