"""Makes the calls of a function that scores: at a limited rate, or through a class for verl."""
