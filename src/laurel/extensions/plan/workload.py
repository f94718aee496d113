"""Determines the conversations of one training step, whose time is estimated."""

from __future__ import annotations

from laurel.config.schemas import Run
from laurel.errors import ConfigError
from laurel.planning.request import Workload


def workload_of(
    config: Run,
    *,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    alike_tokens: int = 0,
) -> Workload:
    """Return the number and lengths of the conversations in one training step.

    Args:
        config: The run.
        prompt_tokens: The length of each prompt; None is what a completion leaves of the longest
            conversation.
        completion_tokens: The length of each completion; None is half of the longest conversation,
            or less if the run allows no more.
        alike_tokens: How many of them the completions of a prompt begin with alike.

    Raises:
        ConfigError: A conversation would be longer than the run allows, or completions would not
            differ.
    """
    longest = config.policy.max_total_sequence_length
    most = config.policy.generation.max_new_tokens if config.command == "grpo" else None
    if completion_tokens is None:
        room = longest // 2 if prompt_tokens is None else longest - prompt_tokens
        completion_tokens = max(1, min(room, most or room))
    if prompt_tokens is None:
        prompt_tokens = longest - completion_tokens
    if prompt_tokens + completion_tokens > longest or prompt_tokens < 1:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens and a completion of {completion_tokens} do not "
            f"fit into policy.max_total_sequence_length={longest}"
        )
    if alike_tokens >= completion_tokens:
        raise ConfigError(
            f"completions of {completion_tokens} tokens cannot begin with {alike_tokens} alike and "
            "differ: give --alike-tokens fewer"
        )
    if config.command == "grpo":
        num_prompts = config.grpo.num_prompts_per_step
        per_prompt = config.grpo.num_generations_per_prompt
    else:
        num_prompts = config.policy.train_global_batch_size
        per_prompt = 2 if config.command == "rm" else 1
    return Workload(
        num_prompts=num_prompts,
        per_prompt=per_prompt,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        alike_tokens=alike_tokens,
    )
