"""What is plugged into Laurel and comes with it: each package here is one extension.

An extension brings its settings, code and commands, and its tests are in `tests/extensions/NAME`.
It is declared in `pyproject.toml` as one of anybody else's would be (`laurel.plugins`), so the rest
of Laurel imports none of them, and none of them imports another.
"""
