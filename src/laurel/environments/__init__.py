"""What judges completions: against a known answer, by a reward model, by several at once, by you.

`interface.py` says what an environment is, `registry.py` makes one by name. Each is in a file of
its own, which nothing imports before it is asked for.
"""
