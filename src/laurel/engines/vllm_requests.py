"""Requests and completions in vLLM's words and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from laurel.engines.text_stops import StopStringWatch
from laurel.errors import ConfigError, DataError
from laurel.models.tokenizer import plain_text
from laurel.types import FinishReason, Generated, GenerationRequest

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
COLDEST, HOTTEST = 0.01, 2.0
"""What vLLM takes, besides 0. It would warm up what is colder."""


def check_limits(request: GenerationRequest, *, max_length: int, reports_untruncated: bool) -> None:
    """Refuse what vLLM would draw differently from what was asked.

    Raises:
        DataError: The prompt fills the context.
        ConfigError: Sampling parameters that vLLM does not follow.
    """
    length, sampling = len(request.prompt_ids), request.sampling
    if length >= max_length:
        raise DataError(
            f"request {request.id!r}: the prompt has {length} tokens, which leaves no room for an "
            f"answer in a context of {max_length}"
        )
    if 0 < sampling.temperature < COLDEST or sampling.temperature > HOTTEST:
        raise ConfigError(
            f"request {request.id!r}: temperature={sampling.temperature:g}, but vLLM takes 0 and "
            f"{COLDEST:g} to {HOTTEST:g}"
        )
    if not reports_untruncated and (sampling.top_p < 1 or sampling.top_k is not None):
        raise ConfigError(
            f"request {request.id!r}: top_p={sampling.top_p:g} and top_k={sampling.top_k}, but the "
            "sampler of this vLLM cannot say the log-probabilities from before they cut; sample "
            "with top_p=1 and without top_k"
        )


def sampling_arguments(
    request: GenerationRequest, seed: int, *, max_length: int, end_ids: Sequence[int]
) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for one completion."""
    sampling = request.sampling
    return {
        "max_tokens": min(sampling.max_new_tokens, max_length - len(request.prompt_ids)),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "seed": seed % (1 << 63),
        "stop": list(sampling.stop_strings),
        "stop_token_ids": sorted({*end_ids, *sampling.stop_token_ids}),
        "include_stop_str_in_output": True,
        "ignore_eos": True,  # in favour of end_ids
        "logprobs": 0,
        "detokenize": bool(sampling.stop_strings),
        "skip_special_tokens": False,  # a stop string may name one
    }


def as_generated(
    completion: Any,
    *,
    index: int,
    tokenizer: Any,
    stop_strings: Sequence[str],
    weight_version: int,
) -> Generated:
    """A `CompletionOutput` of vLLM's that has ended."""
    ids = list(completion.token_ids)
    logprobs = [completion.logprobs[i][token].logprob for i, token in enumerate(ids)]
    return Generated(
        index=index,
        ids_L=np.asarray(ids, np.int32),
        logprobs_L=np.asarray(logprobs, np.float32),
        text=_text(tokenizer, ids, stop_strings),
        finish_reason=_FINISHES[completion.finish_reason],
        weight_version=weight_version,
    )


def _text(tokenizer: Any, ids: list[int], stop_strings: Sequence[str]) -> str:
    text = plain_text(tokenizer, ids)
    if not stop_strings:
        return text
    watch = StopStringWatch(tokenizer, stop_strings)
    rest = next((rest for token in ids if (rest := watch.ends_with(token)) is not None), "")
    is_special = bool(ids) and ids[-1] in tokenizer.all_special_ids
    # A special token at the end is not in the text, and neither is what it says.
    return text.removesuffix(rest) if not is_special else text
