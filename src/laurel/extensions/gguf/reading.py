"""Reads GGUF files, the format of llama.cpp, as Hugging Face directories. Imports no torch.

A file is read once, by transformers' own reader, and written with its tokenizer and chat template
into a cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laurel.errors import ConfigError, MissingDependencyError, ModelError, setting_of
from laurel.observe.console import message_console, quiet_libraries
from laurel.observe.files import delete_directory, is_disk_error, replace_directory
from laurel.observe.hub import check_fetchable, listed
from laurel.plugins import ReadModel

CACHE_VARIABLE = "LAUREL_CACHE"
"""Environment variable that names the cache. Default: `laurel` in `XDG_CACHE_HOME`, or in
`~/.cache`."""

_FACTS = "model_card.json"  # as `CardFacts` reads it: an export's card says what the weights are
_PLAIN_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# `tokenizer.ggml.pre` of vocabularies that are split as GPT-2's, which transformers falls back to.
# SmolLM's is split between digits too, and no token of it holds two.
_SPLIT_AS_GPT2 = {"default", "gpt-2", "phi-2", "mpt", "olmo", "smollm"}


def read_gguf(name: str, *, key: str = "policy.model_name") -> ReadModel:
    """Find a GGUF file, and write it as a Hugging Face directory unless the cache has it.

    Processes that ask at once wait for the first of them.

    Args:
        name: A path, or `owner/name/FILE.gguf` (also `owner/name:FILE.gguf`) of the hub.

    Raises:
        ModelError: There is no such file, it is broken, or transformers cannot read it.
        MissingDependencyError: The extra `gguf` is not installed.
        ConfigError: The cache cannot be written.
    """
    path = _find(name, key)
    asked = setting_of(key, name)
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{asked} cannot be read: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelError(
            f"{asked} is no GGUF file: it begins with {magic!r} in place of GGUF. If it was "
            "fetched, fetch it again"
        )
    found = path.stat()
    target = (
        cache_folder()
        / "gguf"
        / f"{path.stem}-{_digest(str(path), found.st_size, found.st_mtime_ns)[:16]}"
    )
    if not (target / "config.json").is_file():
        try:
            _make(path, target, asked)
        except OSError as error:
            raise ConfigError(
                f"{asked} is written as Hugging Face files into {target.parent}, and that failed: "
                f"{error.strerror or error}. Name another folder with {CACHE_VARIABLE}=DIR"
            ) from error
    facts = json.loads((target / _FACTS).read_text(encoding="utf-8"))
    first, *rest = facts["notes"]
    notes = (f"{first} (read from {target})", *rest)
    return ReadModel(directory=target, notes=notes, about=facts["base_model"])


def cache_folder() -> Path:
    """Return the folder of Laurel's cache, whether it exists or not."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder is None:
        folder = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "laurel")
    return Path(os.path.abspath(os.path.expanduser(folder)))


def _find(name: str, key: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return Path(os.path.abspath(path))  # not where a link leads: the hub's cache has no names
    asked = setting_of(key, name)
    on_hub = re.fullmatch(r"(?P<model>[\w-][\w.-]*/[\w.-]+)[/:](?P<file>.+)", name)
    if on_hub and not Path(name.split("/")[0]).exists():
        from huggingface_hub import hf_hub_download

        check_fetchable(on_hub["model"], key=key)
        try:
            return Path(hf_hub_download(on_hub["model"], on_hub["file"]))
        except (OSError, ValueError) as error:  # those of huggingface_hub are among them
            raise ModelError(f"{asked} cannot be fetched from the hub: {_first(error)}") from error
    if not path.parent.is_dir():
        raise ModelError(f"{asked}: there is no such file, nor the folder {path.parent}")
    what = "it is a directory, not a file" if path.is_dir() else "there is no such file"
    raise ModelError(f"{asked}: {what}; {path.parent} holds: {listed(path.parent)}")


@functools.cache
def _digest(path: str, size: int, modified: int) -> str:
    # Size and time are arguments so that a file which changes is read again.
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(path: Path, target: Path, asked: str) -> None:
    check_has_gguf(asked)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        with suppress(OSError):  # without locks two processes may both do the work, and both finish
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "config.json").is_file():
            return
        for left in target.parent.glob(f".tmp-{target.name}-*"):  # by a process that was killed
            delete_directory(left)
        size = path.stat().st_size / 1e6
        message_console().print(
            f"reading {path.name} ({size:,.0f} MB) and writing it as Hugging Face files, once"
        )
        header = _read_header(path, asked)
        with replace_directory(target) as fresh:
            try:
                _write(path, fresh, header)
            except Exception as error:  # whatever the reader meets in an unusual file
                if is_disk_error(error):
                    raise
                raise ModelError(
                    f"{asked} cannot be read by transformers' GGUF reader: {_first(error)} It is "
                    f"{header.about}. Name the model that it was made from, by its hub name "
                    "or directory"
                ) from error
            facts = {"base_model": header.about, "notes": header.notes}
            (fresh / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def check_has_gguf(purpose: str) -> None:
    """Check that the packages that read GGUF files are installed.

    Raises:
        MissingDependencyError: One is not; the message says how to install it.
    """
    for package in ("gguf", "accelerate"):
        try:
            __import__(package)
        except ImportError:
            raise MissingDependencyError.of(package, extra="gguf", purpose=purpose) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """A checked header: what a card says of the file, and what writing it needs."""

    about: str
    notes: list[str]
    dtype: str
    num_tokens: int


def _read_header(path: Path, asked: str) -> _Header:
    import gguf
    import numpy as np

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # of numpy and of the reader, depending on where the file ends
        unknown = re.search(r"(\d+)\)? is not a valid GGMLQuantizationType", str(error))
        if unknown:
            raise ModelError(
                f"{asked} holds weights of the type {unknown[1]} of ggml, which the installed "
                "package 'gguf' does not know"
            ) from error
        raise ModelError(
            f"{asked} is broken or was cut short: {path.stat().st_size:,} bytes do not hold the "
            f"tensors that its header names ({_first(error)}). Fetch it again"
        ) from error

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    if field("split.count", 1) > 1:
        raise ModelError(
            f"{asked} is one of {field('split.count')} parts. Join them with llama.cpp's "
            "llama-gguf-split --merge, and name the file that comes out"
        )
    weights: Counter[str] = Counter()
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind.name not in weights and kind.name not in _PLAIN_TYPES:
            block = np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8)
            try:
                gguf.quants.dequantize(block, kind)
            except Exception as error:
                raise ModelError(
                    f"{asked} is quantised as {kind.name}, which cannot be dequantised "
                    f"({_first(error)}). Take another quantisation of the model (Q8_0, Q4_K_M), or "
                    "name the model by its hub name or directory"
                ) from error
        weights[kind.name] += int(tensor.n_elements)
    if not weights:
        raise ModelError(f"{asked} holds no weights: it is a vocabulary only")
    is_plain = weights.keys() <= _PLAIN_TYPES.keys()
    # Beside half ones, a file keeps in float32 the norms that every precision holds exactly.
    plain = next((t for t in ("BF16", "F16") if t in weights), "F32")
    dtype = _PLAIN_TYPES[plain] if is_plain else "float32"
    shown = plain if is_plain else weights.most_common(1)[0][0]
    notes = [f"{path.name} holds weights in {shown}; they were written as {dtype}"]
    if not is_plain:
        notes = [
            f"{path.name} holds weights quantised as {shown}; they were dequantised to {dtype}, "
            "which does not bring back those of the model that was quantised"
        ]
    if note := _split_note(str(field("tokenizer.ggml.model")), str(field("tokenizer.ggml.pre"))):
        notes.append(note)
    done = "" if is_plain else f", dequantised to {dtype}"
    tokens = reader.get_field("tokenizer.ggml.tokens")
    return _Header(
        about=f"{path.name} ({field('general.architecture')}, {shown}{done})",
        notes=notes,
        dtype=dtype,
        num_tokens=0 if tokens is None else len(tokens.data),
    )


def _split_note(kind: str, rule: str) -> str | None:
    """Say that transformers does not know how a byte-level vocabulary cuts texts into words."""
    with suppress(ImportError):
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

        if kind != "gpt2" or rule in _SPLIT_AS_GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
            return None
    return (
        f"warning: transformers does not know how its tokenizer ({rule}) cuts texts into words, "
        "and cuts them as GPT-2's: tokens may differ from the original's. If you have it, name "
        "it: policy.tokenizer.name"
    )


def _write(path: Path, directory: Path, header: _Header) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet_libraries()
    factory: Any = AutoModelForCausalLM
    dtype = getattr(torch, header.dtype)
    source: dict[str, Any] = {"gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    if hasattr(transformers, "GgufConfig"):  # else some architectures would stay quantised
        source["quantization_config"] = transformers.GgufConfig(path.name, dequantize=True)
    with _without_bars():
        read, info = factory.from_pretrained(
            path.parent, dtype=dtype, output_loading_info=True, **source
        )
    if info["missing_keys"]:
        raise ValueError(f"the weights lack {', '.join(sorted(info['missing_keys'])[:5])}.")
    # A model without the marks of its file: with them transformers takes it for a quantised one.
    said = read.config.to_dict()
    kept = {k: v for k, v in said.items() if k != "quantization_config" and not k.startswith("_")}
    with torch.device("meta"):
        network = factory.from_config(type(read.config)(**kept), dtype=dtype)
    network.load_state_dict(read.state_dict(), assign=True)
    network.tie_weights()
    network.generation_config = read.generation_config
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _drop_added(directory / "tokenizer.json", header.num_tokens)


def _drop_added(path: Path, num_tokens: int) -> None:
    # The reader's class adds its own <|endoftext|> to vocabularies that have none, as Llama 3's,
    # and the model embeds no such token.
    said = json.loads(path.read_text(encoding="utf-8"))
    said["added_tokens"] = [token for token in said["added_tokens"] if token["id"] < num_tokens]
    path.write_text(json.dumps(said, ensure_ascii=False, indent=2), encoding="utf-8")


@contextmanager
def _without_bars() -> Iterator[None]:
    # The reader's progress bar cannot be switched off, and is a line for each update in a file.
    with redirect_stderr(sys.stderr if sys.stderr.isatty() else io.StringIO()):
        yield


def _first(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
