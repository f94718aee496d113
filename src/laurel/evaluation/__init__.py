"""How good a model is, told from what it was given: figures, and how sure they are."""
