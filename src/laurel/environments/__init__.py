"""Environments, which score completions: by a known answer, a reward model, or several parts.

`interface.py` defines an environment, `registry.py` makes one by name. Each is in a file of its
own, which is imported only when the environment is created.
"""
