"""Who gives completions their scores: models, judges, functions, or several of them."""
