"""The first row of a data file as a command learns from it: rendered, in tokens, with its roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from laurel.cli.data_reading import Reading
from laurel.cli.token_pieces import Piece, pieces_of
from laurel.data.demonstrations import Dialogue
from laurel.errors import DataError
from laurel.types import Conversation, Preference, Task

if TYPE_CHECKING:
    from laurel.config.grpo_training import GRPORun
    from laurel.config.reward_training import RewardTrainingRun
    from laurel.config.sft_training import SFTRun
    from laurel.models.chat import ChatFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stretch of the row: what all answers share, one of them, a whole conversation."""

    title: str
    messages: Conversation
    """What is said in it."""
    pieces: tuple[Piece, ...] = ()
    """Its tokens; empty without a model."""
    was_cut: bool = False
    """Whether the conversation was too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRow:
    """The first row that a command would use."""

    source: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    """What should be known of its tokens."""


def plain_row(reading: Reading) -> FirstRow:
    """The row without tokens."""
    row = reading.first
    assert row is not None
    if isinstance(row, Preference):
        answers = tuple(
            Part(title=_answer_title(row, index), messages=completion.messages)
            for index, completion in enumerate(row.group.completions_G)
        )
        return FirstRow(
            source=row.source, parts=(Part(title="prompt", messages=row.group.prompt), *answers)
        )
    if isinstance(row, Dialogue):
        parts: tuple[Part, ...] = (Part(title="conversation", messages=row.messages),)
        return FirstRow(source=row.source, parts=parts)
    return FirstRow(
        source=row.source,
        parts=(Part(title="prompt", messages=row.prompt),),
        notes=_about_task(row),
    )


def tokenised_row(reading: Reading, model: str) -> FirstRow:
    """The row in the tokens of a model.

    Args:
        reading: With a first row.
        model: A directory or hub name; of its weights nothing is read.

    Raises:
        ModelError: No tokenizer or template that could be used.
        DataError: The template cannot render the row.
    """
    from laurel.rewards.load import quiet_libraries

    quiet_libraries()
    row = reading.first
    if isinstance(row, Preference):
        return _scored(row, reading.config, model)
    if isinstance(row, Dialogue):
        return _imitated(row, cast("SFTRun", reading.config), model)
    assert row is not None
    return _asked(row, cast("GRPORun", reading.config), model)


def _answer_title(row: Preference, index: int) -> str:
    rank = row.ranks_G[index]
    best, worst = min(row.ranks_G), max(row.ranks_G)
    word = "answer"
    if len(row.ranks_G) == 2 and best != worst:
        word = "better answer" if rank == best else "worse answer"
    return f"{word}, {index + 1} of {len(row.ranks_G)}, rank {rank}"


def _scored(row: Preference, config: Any, model: str) -> FirstRow:
    from laurel.models.load import load_contract

    run = cast("RewardTrainingRun", config)
    policy = run.policy.model_copy(update={"model_name": model})
    contract, notes = load_contract(
        policy,
        max_length=run.data.max_input_seq_length or run.policy.max_total_sequence_length,
        truncation_side=run.data.truncation_side,
        for_training=True,
    )
    (tokens,) = contract.encode([row.group], sources=[row.source])
    pools_last = contract.rules.pooled == "last"
    num_shared = len(tokens.trunk_ids)
    parts: list[Part] = []
    for index, branch in enumerate(tokens.branches_ids_G):
        ids_L = np.concatenate((tokens.trunk_ids, branch))
        pieces = pieces_of(
            contract.tokenizer, ids_L, row.group.conversation(index), contract.render,
            pools_last=pools_last,
        )  # fmt: skip
        shared, own = _split(pieces, num_shared)
        if index == 0 and shared:
            title = "prompt, computed once for all answers"
            parts.append(Part(title=title, messages=row.group.prompt, pieces=shared))
        parts.append(
            Part(
                title=_answer_title(row, index),
                messages=row.group.completions_G[index].messages,
                pieces=own,
                was_cut=bool(tokens.truncated_G[index]),
            )
        )
    if not pools_last:
        notes.append("this model pools by itself: the score is read from no single token")
    return FirstRow(source=row.source, parts=tuple(parts), notes=tuple(notes))


def _split(pieces: list[Piece], num_tokens: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of the first tokens, and the others."""
    seen = 0
    for place, piece in enumerate(pieces):
        if seen >= num_tokens:
            return tuple(pieces[:place]), tuple(pieces[place:])
        seen += len(piece.ids)
    return tuple(pieces), ()


def _imitated(row: Dialogue, config: SFTRun, model: str) -> FirstRow:
    chat = _chat(config, model)
    longest = config.data.max_input_seq_length or config.policy.max_total_sequence_length
    learned = chat.demonstration(
        row.messages, demonstration_id=row.source, max_length=longest,
        only_final=config.sft.only_unmask_final,
    )  # fmt: skip
    if learned is None:
        raise DataError(
            f"{row.source}: nothing of the answer is within {longest} tokens; raise "
            "policy.max_total_sequence_length"
        )
    (branch,) = learned.tokens.branches_ids_G
    trunk = learned.tokens.trunk_ids
    pieces = pieces_of(
        chat.tokenizer, np.concatenate((trunk, branch)), row.messages, chat.render,
        learned_L=np.concatenate((np.zeros(len(trunk), dtype=bool), learned.mask_L)),
    )  # fmt: skip
    part = Part(
        title="conversation", messages=row.messages, pieces=tuple(pieces), was_cut=learned.truncated
    )
    return FirstRow(source=row.source, parts=(part,))


def _asked(row: Task, config: GRPORun, model: str) -> FirstRow:
    chat = _chat(config, model)
    ids_L = chat.prompt_ids(row.prompt)
    pieces = pieces_of(
        chat.tokenizer, ids_L, row.prompt, lambda said: chat.render(said, prompt=True)
    )
    part = Part(title="prompt", messages=row.prompt, pieces=tuple(pieces))
    room = config.policy.max_total_sequence_length - len(ids_L)
    notes = (
        f"what the policy writes next counts in the loss: up to {max(room, 0):,} tokens of "
        f"policy.max_total_sequence_length={config.policy.max_total_sequence_length}",
        *_about_task(row),
    )
    return FirstRow(source=row.source, parts=(part,), notes=notes)


def _about_task(row: Task) -> tuple[str, ...]:
    said = []
    if "ground_truth" in row.metadata:
        said.append(f"the known answer is {str(row.metadata['ground_truth'])!r:.200}")
    tests = [key for key in ("test_code", "test_list", "stdio_tests", "call_tests")
             if key in row.metadata]  # fmt: skip
    if tests:
        by = row.metadata.get("comparison")
        compared = f", compared as {by}" if by is not None else ""
        said.append(f"it brings tests: {', '.join(tests)}{compared}")
    return tuple(said)


def _chat(config: SFTRun | GRPORun, model: str) -> ChatFormat:
    from laurel.models.chat import ChatFormat
    from laurel.models.tokenizer import load_tokenizer

    policy = config.policy
    tokenizer = load_tokenizer(
        policy.tokenizer, model_name=model, trust_remote_code=policy.trust_remote_code,
        pad_may_end=True,
    )  # fmt: skip
    return ChatFormat(tokenizer, policy.tokenizer.chat_template_kwargs)
