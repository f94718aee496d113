"""Names the version of a reward model, by which replicas and clients distinguish it from others."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from laurel.models.scoring import ScoringRules

JOINED = " + "
"""Stands between the versions of an ensemble's members."""

_NAME = re.compile(r"[^/]*-(?=[0-9a-f]{16}$)")
_READ_BYTES = 2**20
_OF_THE_MODEL = (".json", ".safetensors", ".jinja", ".model", ".txt")


def model_version(name: str, rules: ScoringRules) -> str:
    """Name the version of a model's weights, tokenizer and scoring contract.

    It is the directory's own name and a hash, e.g. `rm-0123456789abcdef`; `content_of` leaves the
    hash alone. A name on the hub is its own version. A date that was pinned when the model was
    loaded is a part of it.

    Args:
        rules: The contract that it scores by.
    """
    directory = Path(name)
    if not directory.is_dir():
        day = rules.pinned_date
        return name if day is None else f"{name}+{_in_a_header(day)}"
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.iterdir()):
        if path.suffix in _OF_THE_MODEL and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
    measured = {"golden", "golden_dtype", "versions", "mean", "std", "num_reference"}
    digest.update(rules.model_dump_json(exclude=measured).encode())
    return f"{_in_a_header(os.path.basename(os.path.realpath(name)))}-{digest.hexdigest()}"


def content_of(version: str) -> str:
    """Return what a version says of the model's content, without the name of its directory.

    That is the hash of `model_version`, and any other version as it is; of the versions of an
    ensemble, those of its members.
    """
    return JOINED.join(_NAME.sub("", one) for one in version.split(JOINED))


def _in_a_header(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "_", text)
