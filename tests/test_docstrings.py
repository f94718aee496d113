"""Every key of a section has a docstring: `laurel config --describe` prints them.

Ruff's D1 holds the same of modules, classes, functions and methods.
"""

from laurel.config.yaml_tree import Section
from test_docs import sections


def test_every_key_has_a_docstring():
    undescribed = [
        f"{section.__name__}.{name}"
        for section in sections(Section)
        if section.__module__.startswith("laurel.")  # tests make sections of their own
        for name, field in section.model_fields.items()
        # A key that is a section has the docstring of its class.
        if not field.description
        and not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    assert undescribed == []
