"""Scores completions in environments: by known answers, tests, reward models, or several of these.

`interface.py` defines environments, and `registry.py` creates one by its name. Each environment has
its own file, which is imported only when the environment is created.
"""
