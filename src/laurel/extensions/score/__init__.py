"""`laurel score`: the scores of conversations."""
