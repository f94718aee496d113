"""Every implementation of `Generator`, made on the same tiny policy, for the suites that ask them.

Another one joins by an entry in `MAKERS`.
"""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ray_engines
import tiny
import tiny_tokenizers
import vllm_engines
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.replicas import GeneratorReplicas
from laurel.generation.transformers.engine import TransformersEngine
from laurel.generation.weights.probe import model_logprobs
from laurel.generation.weights.routes import WeightTransfer
from laurel.models.forest.policy import PolicyModel
from laurel.protocols import Generator
from laurel.types import Generated, GenerationRequest, SamplingParams, Weights
from local_group import LocalGroup

MAX_CONCURRENT = 16
"""So few that requests of the suite have to wait for each other."""
CONVERSATION_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A generator, and the policy whose completions it must draw."""

    generator: Generator
    policy: PolicyModel
    """The learner's: the generator has its weights, or a copy of them."""
    tokenizer: Any
    end_id: int
    tolerance: float
    """Of log-probabilities in float32."""

    def weights(self, version: int) -> Weights:
        return Weights(version=version, tensors=self.policy.named_weights)


def policy_and_tokenizer(seed: int = 0, **changes: Any) -> tuple[PolicyModel, Any]:
    """A policy whose tokens are the bytes and the special tokens of ChatML."""
    tokenizer = tiny_tokenizers.chatml()
    policy = tiny.tiny_policy(
        "qwen3", vocab_size=len(tokenizer), tie_word_embeddings=True, seed=seed, **changes
    )
    return policy, tokenizer


@contextmanager
def transformers(shares_weights: bool, **options: Any) -> Iterator[Setup]:
    policy, tokenizer = policy_and_tokenizer()
    engine = TransformersEngine(
        policy,
        tokenizer,
        end_ids=[tokenizer.eos_token_id],
        max_concurrent=MAX_CONCURRENT,
        conversation_bytes=CONVERSATION_BYTES,
        shares_weights=shares_weights,
        **options,
    )
    try:
        yield Setup(
            generator=engine,
            policy=policy,
            tokenizer=tokenizer,
            end_id=tokenizer.eos_token_id,
            tolerance=1e-5,
        )
    finally:
        engine.close()


@contextmanager
def vllm() -> Iterator[Setup]:
    vllm_engines.require_vllm()
    policy, tokenizer = policy_and_tokenizer(head_dim=vllm_engines.HEAD_DIM)

    def probe(ids: Sequence[int]) -> np.ndarray[Any, Any]:
        logprobs = full_logits(policy, request(ids[:1]), ids[1:]).log_softmax(-1)
        found: np.ndarray[Any, Any] = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[
            :, 0
        ].numpy()
        return found

    with vllm_engines.started(
        policy.causal_lm, probe, max_concurrent=MAX_CONCURRENT, tokenizer=tokenizer
    ) as engine:
        yield Setup(
            generator=engine,
            policy=policy,
            tokenizer=tokenizer,
            end_id=tokenizer.eos_token_id,
            tolerance=1e-4,
        )


@contextmanager
def replicas(num_replicas: int) -> Iterator[Setup]:
    """Several engines in this process, each behind a group of its own."""
    policy, tokenizer = policy_and_tokenizer()

    def make_engine() -> Generator:
        return TransformersEngine(
            policy,
            tokenizer,
            end_ids=[tokenizer.eos_token_id],
            max_concurrent=MAX_CONCURRENT,
            conversation_bytes=CONVERSATION_BYTES,
            shares_weights=False,
        )

    def make_group(index: int) -> LocalGroup:
        return LocalGroup("generation", EngineWorker, make_engine)

    with closing(
        GeneratorReplicas(make_group, num_replicas, probe=functools.partial(model_logprobs, policy))
    ) as generator:
        yield Setup(
            generator=generator,
            policy=policy,
            tokenizer=tokenizer,
            end_id=tokenizer.eos_token_id,
            tolerance=1e-5,
        )


@contextmanager
def ray_replicas() -> Iterator[Setup]:
    """Two engines in processes of their own, which load the policy from a directory."""
    policy, tokenizer = policy_and_tokenizer()
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_engines.cluster())
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        maker = ray_engines.maker(directory, policy, tokenizer, max_concurrent=MAX_CONCURRENT)
        generator = GeneratorReplicas(
            ray_engines.groups(cluster, maker, 2),
            2,
            probe=functools.partial(model_logprobs, policy),
            transfer=WeightTransfer(name="object_store", bucket_bytes=20_000),
        )
        stack.callback(generator.close)
        yield Setup(
            generator=generator,
            policy=policy,
            tokenizer=tokenizer,
            end_id=tokenizer.eos_token_id,
            tolerance=1e-5,
        )


MAKERS: dict[str, Callable[[], Any]] = {
    "transformers": functools.partial(transformers, True),
    "transformers-own-weights": functools.partial(transformers, False),
    "static": functools.partial(transformers, True, static_slots=True),
    "vllm": vllm,
    "replicas-1": functools.partial(replicas, 1),
    "replicas-2": functools.partial(replicas, 2),
    "replicas-ray": ray_replicas,
}


def request(
    prompt: str | Sequence[int] = "Where is the laurel?",
    *,
    seeds: Sequence[int] = (1, 2, 3),
    request_id: str = "r",
    conversations: Sequence[str] = (),
    **sampling: Any,
) -> GenerationRequest:
    ids = [ord(c) % 200 + 3 for c in prompt] if isinstance(prompt, str) else prompt
    return GenerationRequest(
        id=request_id,
        prompt_ids=np.array(ids, np.int32),
        seeds_G=tuple(seeds),
        sampling=SamplingParams(**{"max_new_tokens": 20, **sampling}),
        conversations_G=tuple(conversations),
    )


def endless(**sampling: Any) -> GenerationRequest:
    """A request that no engine ends before this process goes on, however long it is held up."""
    return request(seeds=range(200), max_new_tokens=900, **sampling)


ENDS = tuple(range(3, 203, 8))
"""Tokens that end a turn of `talk`, an eighth of them."""
HEARD = [7, 11, 13, 17]
"""What each turn of `talk` is answered."""


def talk(
    generator: Generator,
    prompt: Sequence[int],
    *,
    name: str | None,
    num_turns: int,
    seed: int = 0,
) -> list[tuple[GenerationRequest, Generated]]:
    """Hold a conversation of several turns, under a name or as requests that nothing connects."""
    ids, found = list(prompt), []
    for turn in range(num_turns):
        wanted = request(
            ids,
            seeds=(100 * seed + turn,),
            request_id=f"{name}-{turn}",
            conversations=() if name is None else (name,),
            stop_token_ids=ENDS,
            max_new_tokens=100,
        )
        ((said,),) = draw(generator, wanted)
        found.append((wanted, said))
        ids += [*said.ids_L.tolist(), *HEARD]
    return found


async def collect(generator: Generator, wanted: GenerationRequest) -> list[Generated]:
    """All completions, by index."""
    found = [generated async for generated in generator.generate(wanted)]
    return sorted(found, key=lambda generated: generated.index)


def run(coroutine: Any) -> Any:
    """The result of a coroutine, which must come soon."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def draw(generator: Generator, *requests: GenerationRequest) -> list[list[Generated]]:
    """The completions of requests that are made at the same time."""

    async def together() -> list[list[Generated]]:
        return await asyncio.gather(*(collect(generator, wanted) for wanted in requests))

    found: list[list[Generated]] = run(together())
    return found


def full_logits(policy: PolicyModel, wanted: GenerationRequest, ids: Sequence[int]) -> torch.Tensor:
    """Of each token of a completion, by transformers' own forward over the whole sequence."""
    model = policy.causal_lm
    before = model.config._attn_implementation
    model.set_attn_implementation(tiny.own_attention(model))
    whole = torch.tensor([*wanted.prompt_ids.tolist(), *ids])[None]
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model.eval()(input_ids=whole).logits[0]
    finally:
        model.set_attn_implementation(before)
    return logits[len(wanted.prompt_ids) - 1 : -1].float()


def full_logprobs(
    policy: PolicyModel, wanted: GenerationRequest, generated: Generated
) -> np.ndarray[Any, Any]:
    """What `Generated.logprobs_L` must be."""
    ids_L = generated.ids_L.tolist()
    logits = full_logits(policy, wanted, ids_L) / (wanted.sampling.temperature or 1.0)
    found = logits.log_softmax(-1).gather(1, torch.tensor(ids_L)[:, None])[:, 0]
    values: np.ndarray[Any, Any] = found.numpy()
    return values
