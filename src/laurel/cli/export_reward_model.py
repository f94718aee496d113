"""A reward model as a plain Hugging Face directory, and the test of what was written."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from laurel.algorithms.reward_run_state import library_versions
from laurel.errors import ScoringContractError
from laurel.models.export import save_reward_model
from laurel.models.model_card import HERE, CardFacts, hub_name, reward_model_card
from laurel.models.plain_check import largest_difference, plain_scores
from laurel.models.scoring import ScoringContract
from laurel.rewards.load import ModelPlace, Say, ScorerOptions, load_scorer
from laurel.rewards.local import (
    LocalScorer,
    conversation_group,
    golden_scores,
    golden_tolerance,
)
from laurel.types import Conversation, Message

if TYPE_CHECKING:
    from laurel.cli.export import ExportOptions
    from laurel.models.model_card import EvaluationTable

LONGEST_PROBE = 1024
"""Where conversations of more tokens are cut, no probe is made longer than that."""


def write_reward_model(
    directory: Path,
    place: ModelPlace,
    loaded_with: ScorerOptions,
    options: ExportOptions,
    tables: Sequence[EvaluationTable],
    say: Say,
) -> None:
    """Write it, load it anew without Laurel and with it, and compare.

    Args:
        directory: Exists and is empty.
        place: What is written.
        loaded_with: How it is loaded.
        options: What the command line says.
        tables: Evaluations for its card.
        say: Told what was found.

    Raises:
        UserError: It is no reward model, or what was written gives other scores.
    """
    scorer = load_scorer(place, loaded_with, say=say)
    bias = _leave_out_bias(scorer)
    facts = _facts(place, scorer, bias, say)
    contract = _contract(scorer, options, say)
    probes = [golden.messages for golden in contract.rules.golden]
    probes += [probe for probe in probes_for(contract) if probe not in probes]
    expected_NK = _scores(scorer, probes)
    card = reward_model_card(facts, contract, evaluations=tables, place=options.push_to_hub or HERE)
    save_reward_model(directory, scorer.model, contract, card=card)
    facts.save(directory)
    device = scorer.model.device
    del scorer  # one model at a time
    gc.collect()
    tolerance = golden_tolerance(contract, options.dtype)
    found_NK = plain_scores(directory, probes, device=device)
    worst = _compare("plain transformers", found_NK, expected_NK, tolerance)
    say(
        f"tested  plain transformers gives the same scores of {len(probes)} conversations in "
        f"padded batches (max difference {worst:.1e}, allowed {tolerance:.0e})"
    )
    again = load_scorer(
        ModelPlace(name=str(directory)),
        replace(loaded_with, policy=None),
        say=lambda text: None,
    )
    worst = _compare("Laurel", _scores(again, probes), expected_NK, tolerance)
    say(f"tested  Laurel gives the same, from what was written (max difference {worst:.1e})")


def probes_for(contract: ScoringContract) -> list[Conversation]:
    """Conversations of several lengths, nobody's data, and one too long where that is cheap."""
    asked = Message("user", "Where does the laurel grow?")
    probes: list[Conversation] = [
        (asked, Message("assistant", "No.")),
        (asked, Message("assistant", "By the western gate, under the old wall.")),
        (
            Message("user", "Name three rivers."),
            Message("assistant", "The Rhine, the Po and the Ebro."),
            Message("user", "And a lake?"),
            Message("assistant", "Como. It is deep, and the road along it is narrow."),
        ),
        (
            Message("user", "Why is the sky blue? Answer in a paragraph."),
            Message("assistant", "Air scatters short waves of light more than long ones. " * 4),
        ),
    ]
    if contract.rules.max_length <= LONGEST_PROBE:
        said = "Over the hills, and over them again. " * contract.rules.max_length
        probes.append((asked, Message("assistant", said[: 8 * contract.rules.max_length])))
    return probes


def _leave_out_bias(scorer: LocalScorer) -> float:
    """Take the bias from a head; what it added to every score."""
    name = scorer.model.head_name
    head = None if name is None else getattr(scorer.model.classifier, name)
    if head is None or head.bias is None:
        return 0.0
    bias = float(head.bias.detach().reshape(-1)[0])
    head.bias = None
    return bias


def _facts(place: ModelPlace, scorer: LocalScorer, bias: float, say: Say) -> CardFacts:
    """What is known of the model, and what was changed."""
    facts = CardFacts.load(Path(place.name)) if Path(place.name).is_dir() else None
    if facts is None:
        on_hub = hub_name(place.name)
        facts = CardFacts(base_model=on_hub or "", hub_base=on_hub)
    if not bias:
        return facts
    note = (
        f"The program that trained it adds {bias:.6g} to every score, the bias of its head. "
        "Hugging Face's classes have no place for that, and no comparison needs it."
    )
    say(f"note    {note}")
    return facts.model_copy(update={"notes": (*facts.notes, note)})


def _contract(scorer: LocalScorer, options: ExportOptions, say: Say) -> ScoringContract:
    """The contract with golden scores of the weights as they are written."""
    contract = scorer.contract
    kept = [golden.messages for golden in contract.rules.golden]
    if options.without_conversations:
        kept = []
    elif kept and options.push_to_hub is not None:
        say(
            f"note    scoring.json holds {len(kept)} conversations of the data of the run, which "
            "go to the hub; --without-conversations puts others in their place"
        )
    conversations = kept or probes_for(contract)[:3]
    golden = golden_scores(
        scorer.model, contract, [conversation_group(messages) for messages in conversations]
    )
    return contract.with_rules(
        golden=golden, golden_dtype=options.dtype, versions=library_versions()
    )


def _scores(scorer: LocalScorer, conversations: Sequence[Conversation]) -> np.ndarray:
    """Scores `[N, K]`, each conversation by itself.

    Raises:
        ScoringContractError: One has no score.
    """
    groups = [conversation_group(messages) for messages in conversations]
    scores = [score for (score,) in scorer.score_now(groups)]
    for score in scores:
        if score.failure is not None:
            raise ScoringContractError(f"a conversation of the test has no score: {score.failure}")
    return np.asarray([score.values_K for score in scores], dtype=np.float64)


def _compare(who: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> float:
    """The largest difference.

    Raises:
        ScoringContractError: It is beyond the tolerance.
    """
    worst = largest_difference(found, expected)
    if not worst <= tolerance:
        row = int(np.argmax(np.nan_to_num(np.abs(found - expected).max(axis=1), nan=np.inf)))
        raise ScoringContractError(
            f"{who} gives other scores from what was written: {found[row, 0]:.6g} where "
            f"{expected[row, 0]:.6g} was expected (largest difference {worst:.3g}, allowed "
            f"{tolerance:.0e}). It was not kept. Most likely it is pooled from another token, or "
            "the architecture reads padding; please report the model"
        )
    return worst
