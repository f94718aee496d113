"""From a directory to a model that can be served: found, loaded, proven, and known by a version."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from laurel.config.schema import ClusterConfig
from laurel.engines.vllm_settings import check_has_vllm
from laurel.errors import ConfigError
from laurel.rewards.batch_jobs import Backend, BatcherLimits
from laurel.rewards.batcher import BatchingScorer
from laurel.rewards.load import (
    Precision,
    Say,
    ScorerOptions,
    check_at_once,
    check_files,
    find_model,
    load_scorer,
)
from laurel.rewards.null_scorer import NullScorer
from laurel.rewards.server.serving import ServedModel

NULL_NAME, NULL_VERSION = "null", "null"
_READ_BYTES = 2**20
_OF_THE_MODEL = (".json", ".safetensors", ".jinja", ".model", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """A model that is to be served, and how. It can travel as JSON."""

    model: str = ""
    """A directory or a hub name; empty: none, which scores trivially, to measure all the rest."""
    engine: Literal["laurel", "vllm"] = "laurel"
    precision: Precision = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_length: int | None = None
    """Of a model that brings no contract."""
    batch_tokens: int = 8192
    """Distinct tokens of a batch."""
    max_delay: float = 0.002
    """Seconds that an idle model waits for company."""
    max_waiting: int = 2000
    """Completions that may wait."""
    cpu_threads: int | None = None
    """None: one per core."""


def check_settings(settings: ModelSettings) -> None:
    """Refuse what cannot be served, as far as that can be told without loading anything.

    Raises:
        UserError: There is no such model, or no such engine.
    """
    if settings.engine == "vllm":
        if not settings.model:
            raise ConfigError("--engine vllm needs a model; --null computes nothing")
        check_has_vllm("--engine vllm")
    if settings.model:
        check_at_once(find_model(settings.model))


def open_batcher(settings: ModelSettings, *, say: Say) -> tuple[str, str, BatchingScorer]:
    """Load a model, make it prove itself, and put a batcher before it. Blocks.

    Returns:
        Its name, its version, and the scorer.

    Raises:
        UserError: Not a reward model, or not the one it was: see `load_scorer`.
    """
    limits = BatcherLimits(
        batch_tokens=settings.batch_tokens,
        max_delay=settings.max_delay,
        max_waiting=settings.max_waiting,
        cache_entries=65536 if settings.model else 0,
    )

    def batcher(backend: Backend, version: str) -> BatchingScorer:
        return BatchingScorer(backend, model_version=version, limits=limits)

    if not settings.model:
        return NULL_NAME, NULL_VERSION, batcher(NullScorer(), NULL_VERSION)
    check_settings(settings)
    from laurel.distributed.process import prepare

    prepare(ClusterConfig(device=settings.device, cpu_threads=settings.cpu_threads), seed=0)
    place = find_model(settings.model)
    for note in place.notes:
        say(note)
    check_files(place)
    options = ScorerOptions(
        max_length=settings.max_length, batch_tokens=settings.batch_tokens,
        precision=settings.precision, device=settings.device,
    )  # fmt: skip
    if settings.engine == "vllm":
        from laurel.rewards.vllm_scorer import load_vllm_scorer

        scorer: Backend = load_vllm_scorer(place, options, say=say)
    else:
        scorer = load_scorer(place, options, say=say)
    version = version_of(place.name)
    return settings.model, version, batcher(scorer, version)


def open_served(settings: ModelSettings, *, say: Say) -> ServedModel:
    """The same as what a service takes."""
    name, version, scorer = open_batcher(settings, say=say)
    return ServedModel(name=name, version=version, scorer=scorer)


def version_of(name: str) -> str:
    """What the weights, the tokenizer and the contract of a directory are known by.

    Equal files have equal versions, wherever they lie. Of a name on the hub it is the name.
    """
    directory = Path(name)
    if not directory.is_dir():
        return name
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.iterdir()):
        if path.suffix in _OF_THE_MODEL and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
    called = re.sub(r"[^A-Za-z0-9._+-]", "_", os.path.basename(os.path.realpath(name)))
    return f"{called}-{digest.hexdigest()}"  # it travels in a header
