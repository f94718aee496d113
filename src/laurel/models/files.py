"""Models in one file of another format, which a plug-in writes as a Hugging Face directory.

Code that loads a model asks `local_files` where its files are; all other code keeps the name that
the user wrote.
"""

from __future__ import annotations

from laurel import plugins
from laurel.plugins import ModelFiles, NamedFile, ReadModel


def is_model_file(name: str) -> bool:
    """Report whether a model's name has the ending of a file that a plug-in reads."""
    return _ending(name) in plugins.names("model_files")


def read_model_file(name: str, *, key: str = "policy.model_name") -> ReadModel:
    """Find such a file, and write it as a Hugging Face directory unless that was done.

    Args:
        key: The key with the name, for messages.

    Raises:
        UserError: There is no such file, or it cannot be read or written.
    """
    file = NamedFile(name=name, key=key)
    return plugins.find(ModelFiles, _ending(name)).make(None, file)


def local_files(name: str, *, key: str = "policy.model_name") -> str:
    """Return what transformers loads for a model's name: a directory, or the name itself.

    Raises:
        UserError: `read_model_file` cannot read the file.
    """
    return str(read_model_file(name, key=key).directory) if is_model_file(name) else name


def _ending(name: str) -> str:
    _, dot, ending = name.rpartition(".")
    return ending.lower() if dot else ""
