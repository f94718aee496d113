"""`laurel demo`: every stage of training on generated data."""
