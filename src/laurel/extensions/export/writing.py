"""Write a model as a plain Hugging Face directory, load it without Laurel, and compare."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from laurel.errors import ModelError, ScoringContractError
from laurel.extensions.export.average import (
    MemberAgreement,
    average_reward_models,
    average_weights,
    facts_of_average,
    fill_weights,
)
from laurel.extensions.export.plain import largest_difference, plain_logprobs, plain_scores
from laurel.models.checkpoint.card import HERE, CardFacts, policy_card, reward_model_card
from laurel.models.checkpoint.export import save_policy, save_reward_model
from laurel.models.loading.policy import SHAPES, check_policy_paths, load_policy
from laurel.models.loading.pretrained import DTYPES, make_probe
from laurel.models.scoring import FORMAT, ScoringContract
from laurel.models.spec import ModelSpec, hub_name
from laurel.observe.console import format_parameters
from laurel.rewards.open import load_scorer, read_rules
from laurel.rewards.scorer import (
    GOLDEN_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    LocalScorer,
    conversation_group,
    golden_scores,
    golden_tolerance,
)
from laurel.rewards.spec import ModelPlace, Say, ScorerSpec
from laurel.training.state import library_versions
from laurel.types import Conversation, Message
from laurel.workers.process import choose_device

if TYPE_CHECKING:
    from laurel.extensions.export.options import ExportOptions
    from laurel.models.checkpoint.card import EvaluationTable


def write_policy(
    directory: Path,
    places: Sequence[ModelPlace],
    spec: ModelSpec,
    options: ExportOptions,
    say: Say,
) -> None:
    """Write a policy, reload it without Laurel, and compare log-probabilities.

    Raises:
        UserError: The model is not a policy, or the written one gives other log-probabilities.
    """
    device = choose_device(options.device)
    load = partial(load_policy, seed=0, max_length=1, device=device)
    weights = None
    if len(places) > 1:  # before the one that is written is loaded: one model at a time
        members = (replace(spec, name=place.name, precision="float32") for place in places)
        weights = average_weights(load(member).model.network for member in members)
    loaded = load(
        replace(spec, name=places[0].name, precision=options.dtype),
        weights_dtype=DTYPES[options.dtype],
    )
    model, name = loaded.model, places[0].source
    facts = facts_beside(places[0].name)
    if weights is not None:
        fill_weights(model.network, weights)
        del weights
        facts = facts_of_average([facts_beside(place.name) for place in places], places)
        name = f"the mean of {len(places)} models"
    difference = check_policy_paths(model)
    num_parameters = sum(p.numel() for p in model.parameters())
    say(
        f"model   {type(model.network).__name__} from {name}: "
        f"{format_parameters(num_parameters)} parameters, {options.dtype} on {device.type} "
        f"(self-check: {difference:.1e})"
    )
    for note in loaded.notes:
        say(f"note    {note}")
    # Random tokens: they reach weights that sentences would not, and need no data.
    probe = make_probe(model, SHAPES, seed=0)
    model.eval()
    with model.without_gradients(), model.in_full_precision():
        expected_M = model(probe.batch(model.path)).logprobs_M.float().cpu().numpy()
    card = policy_card(facts, place=options.push_to_hub or HERE)
    save_policy(directory, model, loaded.tokenizer, card=card)
    facts.save(directory)
    del model, loaded  # one model at a time
    gc.collect()
    found_M = plain_logprobs(
        directory, probe.sequences_N, probe.rows.starts_N.tolist(), device=device
    )
    worst = largest_difference(found_M, expected_M)
    tolerance = GOLDEN_TOLERANCE.get(options.dtype, LOW_PRECISION_TOLERANCE)
    if not worst <= tolerance:
        raise ModelError(
            f"plain transformers gives other log-probabilities from what was written (largest "
            f"difference {worst:.3g}, allowed {tolerance:.0e}). It was not kept; please report the "
            "model"
        )
    say(
        f"tested  plain transformers gives the same log-probabilities of {len(found_M)} tokens in "
        f"a padded batch (max difference {worst:.1e}, allowed {tolerance:.0e})"
    )


LONGEST_PROBE = 1024
"""The longest cut, in tokens, that a probe exceeds: a longer probe would be slow."""


def write_reward_model(
    directory: Path,
    places: Sequence[ModelPlace],
    spec: ScorerSpec,
    options: ExportOptions,
    tables: Sequence[EvaluationTable],
    say: Say,
) -> MemberAgreement | None:
    """Write a reward model, reload it both without Laurel and with it, and compare scores.

    Returns:
        How far the models whose mean is written agree; None where there is one model.

    Raises:
        UserError: The model is not a reward model, or the written one gives other scores.
    """
    facts, agreement = facts_beside(places[0].name), None
    weights = None
    if len(places) > 1:  # before the one that is written is loaded: one model at a time
        goldens = [r.golden for place in places if (r := read_rules(place)) is not None]
        conversations = dict.fromkeys(
            golden.messages for of_model in goldens for golden in of_model
        )
        weights, agreement = average_reward_models(
            places, spec, lambda contract: [*conversations] or probes_for(contract)
        )
    scorer = load_scorer(places[0], spec, say=say)
    if weights is not None:
        fill_weights(scorer.model.network, weights)
        del weights
        # The reference rows are not here; their scores would be those of the first member.
        scorer.contract = scorer.contract.with_rules(mean=None, std=None, num_reference=0)
        facts = facts_of_average([facts_beside(place.name) for place in places], places)
        facts = facts.model_copy(update={"notes": (*facts.notes, f"On them {agreement}.")})
        say(f"average {agreement}")
    # A token classifier of Hugging Face has a place for it.
    bias = 0.0 if scorer.contract.rules.steps is not None else _remove_bias(scorer)
    if bias:
        note = (
            f"The program that trained it adds {bias:.6g} to every score, the bias of its head. "
            "Hugging Face's classes have no place for that, and no comparison needs it."
        )
        say(f"note    {note}")
        facts = facts.model_copy(update={"notes": (*facts.notes, note)})
    contract = _contract(scorer, options, say)
    # Golden conversations alone may be of one length: padding would not be tested.
    # Other programs tokenise the control tokens that a message spells otherwise; the card says so.
    probes = [
        golden.messages
        for golden in contract.rules.golden
        if not any(contract.control_token_in(message.content) for message in golden.messages)
    ]
    probes += [probe for probe in probes_for(contract) if probe not in probes]
    expected_NK = _scores(scorer, probes)
    card = reward_model_card(facts, contract, evaluations=tables, place=options.push_to_hub or HERE)
    save_reward_model(directory, scorer.model, contract, card=card)
    facts.save(directory)
    device = scorer.model.device
    del scorer  # one model at a time
    gc.collect()
    tolerance = golden_tolerance(contract, options.dtype)
    # First without Laurel, as other programs read it; then with Laurel, by the saved contract.
    found_NK = plain_scores(directory, probes, device=device)
    worst = _compare("plain transformers", found_NK, expected_NK, tolerance)
    say(
        f"tested  plain transformers gives the same scores of {len(probes)} conversations in "
        f"padded batches (max difference {worst:.1e}, allowed {tolerance:.0e})"
    )
    whole = replace(spec, model=ModelSpec())
    again = load_scorer(ModelPlace(name=str(directory)), whole, say=lambda text: None)
    worst = _compare("Laurel", _scores(again, probes), expected_NK, tolerance)
    say(f"tested  Laurel gives the same, from what was written (max difference {worst:.1e})")
    return agreement


def probes_for(contract: ScoringContract) -> list[Conversation]:
    """Make conversations of several lengths to compare scores on.

    One is longer than the model's `max_length`, and so truncated, where that limit is small.
    """
    question = Message("user", "Where does the laurel grow?")
    if contract.rules.steps is not None:
        steps = ("Take 2 and add 3: 5.", "Add 4 to it.", "So it is 9.", "No, " * 20 + "it is.")
        joined = contract.rules.steps.separator.join
        answers: list[Conversation] = [
            (question, Message("assistant", joined(steps[first : first + count])))
            for first, count in ((0, 1), (0, 3), (1, 2), (0, 4))
        ]
        # A cut answer has no score.
        tokens = contract.encode([conversation_group(probe) for probe in answers])
        return [
            probe
            for probe, encoded in zip(answers, tokens, strict=True)
            if not encoded.truncated_G[0]
        ]
    probes: list[Conversation] = [
        (question, Message("assistant", "No.")),
        (question, Message("assistant", "By the western gate, under the old wall.")),
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
        text = "Over the hills, and over them again. " * contract.rules.max_length
        probes.append((question, Message("assistant", text[: 8 * contract.rules.max_length])))
    return probes


def facts_beside(name: str) -> CardFacts:
    """Read the facts for a model card from a model's directory; a hub name gives only the base."""
    facts = CardFacts.load(Path(name)) if Path(name).is_dir() else None
    if facts is not None:
        return facts
    on_hub = hub_name(name)
    return CardFacts(base_model=on_hub or "", hub_base=on_hub)


def _remove_bias(scorer: LocalScorer) -> float:
    """Remove the bias of the head, and return what it added to every score."""
    name = scorer.model.head_name
    head = None if name is None else getattr(scorer.model.classifier, name)
    if head is None or head.bias is None:
        return 0.0
    bias = float(head.bias.detach().reshape(-1)[0])
    head.bias = None
    return bias


def _contract(scorer: LocalScorer, options: ExportOptions, say: Say) -> ScoringContract:
    """Return the scoring contract with golden scores in the data type that is written."""
    contract = scorer.contract
    if not contract.rules.has_plain_contents:
        contract = contract.with_rules(format=FORMAT)
        say(
            "note    contents of messages are plain text from here on, as of format 2 of "
            "scoring.json: scores of conversations that spell a control token change"
        )
    # The golden scores are computed anew: those of the checkpoint are of its own precision.
    golden_messages = [golden.messages for golden in contract.rules.golden]
    if options.without_conversations:
        golden_messages = []
    elif golden_messages and options.push_to_hub is not None:
        say(
            f"note    scoring.json holds {len(golden_messages)} conversations of the data of the "
            "run, which go to the hub; --without-conversations puts others in their place"
        )
    conversations = golden_messages or probes_for(contract)[:3]
    golden = golden_scores(
        scorer.model, contract, [conversation_group(messages) for messages in conversations]
    )
    return contract.with_rules(
        golden=golden, golden_dtype=options.dtype, versions=library_versions()
    )


def _scores(scorer: LocalScorer, conversations: Sequence[Conversation]) -> np.ndarray:
    """Return the scores `[N, K]` of conversations, each scored by itself.

    Those of a process reward model are the values of all steps, `[S, 1]`.

    Raises:
        ScoringContractError: A conversation has no score.
    """
    groups = [conversation_group(messages) for messages in conversations]
    scores = [score for (score,) in scorer.score_now(groups)]
    for score in scores:
        if score.failure is not None:
            raise ScoringContractError(f"a conversation of the test has no score: {score.failure}")
    if scorer.contract.rules.steps is not None:
        return np.asarray([[value] for score in scores for value in score.values_K])
    return np.asarray([score.values_K for score in scores], dtype=np.float64)


def _compare(who: str, computed: np.ndarray, expected: np.ndarray, tolerance: float) -> float:
    """Return the largest difference of scores.

    Raises:
        ScoringContractError: The difference is beyond the tolerance.
    """
    worst = largest_difference(computed, expected)
    if not worst <= tolerance:
        row = int(np.argmax(np.nan_to_num(np.abs(computed - expected).max(axis=1), nan=np.inf)))
        raise ScoringContractError(
            f"{who} gives other scores from what was written: {computed[row, 0]:.6g} where "
            f"{expected[row, 0]:.6g} was expected (largest difference {worst:.3g}, allowed "
            f"{tolerance:.0e}). It was not kept. Most likely it is pooled from another token, or "
            "the architecture reads padding; please report the model"
        )
    return worst
