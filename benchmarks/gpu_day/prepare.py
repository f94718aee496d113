"""Gathers what `day.py` needs on a machine that has a GPU and no network: packages, model, pairs.

    python benchmarks/gpu_day/prepare.py gpu_day --python 3.12 --with-first 42

It writes DIRECTORY/1 and DIRECTORY/2, for the first and the second command. Packages are downloaded
for the other machine's Python and packed as one archive; the model is SmolLM2-135M-Instruct, which
`tools/real_model.py` brings, unless `--model` names another.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLATFORMS = ("2_28", "2_27", "2_17", "2014", "1")
"""The versions of manylinux that a wheel may be for; pip takes each exactly."""


def main() -> None:
    options = read_options()
    first, second = (options.directory / number for number in ("1", "2"))
    for folder in (first, second):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if options.wheels.name:
            shutil.move(site(options, scratch), first)
        whole = packed(options.model or real_model(), scratch)
    here = len(whole) if options.with_first is None else options.with_first * 2**20
    (first / "model.0").write_bytes(whole[:here])
    (second / "model.1").write_bytes(whole[here:])
    shutil.copyfile(options.pairs, first / "pairs.jsonl.gz")
    shutil.copyfile(options.validation, first / "validation.jsonl.gz")
    for folder in (first, second):
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder}: {size / 2**20:.0f} MiB beside the checkout")


def site(options: argparse.Namespace, scratch: Path) -> Path:
    """Return an archive of the installed packages; it is half as large as their wheels."""
    target = ["--python-version", options.python, "--implementation", "cp", "--only-binary=:all:"]
    for version in PLATFORMS:
        target += ["--platform", f"manylinux{'_' if '_' in version else ''}{version}_x86_64"]
    wheels, installed = scratch / "wheels", scratch / "site"
    asked = ["-r", options.wheels, "-c", ROOT / "constraints.txt", "-d", wheels]
    pip("download", "--no-deps", *target, *asked)
    files = sorted(wheels.iterdir())
    pip(
        "install", "--no-index", "--no-deps", "--no-compile", *target, "--target", installed, *files
    )
    whole = scratch / "site.tar.xz"
    with tarfile.open(whole, "w:xz", preset=6) as archive:
        archive.add(installed, ".")
    return whole


def packed(model: Path, scratch: Path) -> bytes:
    """Return a model as a GGUF file or as an archive of its directory."""
    if model.is_dir():
        whole = scratch / "model.tar"
        with tarfile.open(whole, "w") as archive:
            for file in sorted(model.iterdir()):
                archive.add(file.resolve(), file.name)
        return whole.read_bytes()
    return model.read_bytes()


def real_model() -> Path:
    """Return the GGUF file of the chat model that the project's own tests use."""
    command = [sys.executable, str(ROOT / "tools" / "real_model.py"), "--as-file"]
    return Path(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    )


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "-q", "--disable-pip-version-check"]
    subprocess.run(command, check=True)


def read_options() -> argparse.Namespace:
    data = Path(os.environ.get("LAUREL_DATA", "data")) / "ultrafeedback_1k"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("directory", type=Path)
    add("--python", default="3.12", help="the version of Python there")
    add(
        "--wheels",
        type=Path,
        default=HERE / "wheels.txt",
        help="names of the packages that are missing there; '' for none",
    )
    add("--model", type=Path, help="a directory or a GGUF file; else tools/real_model.py's")
    add(
        "--with-first",
        type=int,
        metavar="MIB",
        help="how much of the model goes with the first command, not with the second; else all",
    )
    add("--pairs", type=Path, default=data / "train.jsonl.gz", help="default: in LAUREL_DATA")
    add("--validation", type=Path, default=data / "validation.jsonl.gz")
    options = parser.parse_args()
    for file in (options.pairs, options.validation):
        if not file.is_file():
            parser.error(f"{file} is no file: --pairs and --validation name preference pairs")
    return options


if __name__ == "__main__":
    main()
