"""`laurel export`: a model as a plain Hugging Face directory that proved to give its scores."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from rich.text import Text

from laurel.config.policy import ClusterConfig, PolicyConfig
from laurel.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    ScoringContractError,
    key_of,
    speaking,
)
from laurel.export.directory import check_target, whole_directory
from laurel.models.checkpoint.card import HERE, CardFacts, hub_name, policy_card, reward_model_card
from laurel.models.checkpoint.export import (
    largest_difference,
    plain_logprobs,
    plain_scores,
    save_policy,
    save_reward_model,
)
from laurel.models.loading.policy import SHAPES, check_policy_paths, draw_probe, load_policy
from laurel.models.loading.pretrained import DTYPES
from laurel.models.scoring import ScoringContract
from laurel.models.tokenizer import first_line
from laurel.observe.console import message_console, visible
from laurel.observe.json_output import write_json
from laurel.rewards.open import (
    ModelPlace,
    Say,
    ScorerOptions,
    check_files,
    find_model,
    load_scorer,
    quiet_libraries,
    read_rules,
)
from laurel.rewards.scorer import (
    GOLDEN_TOLERANCE,
    LOW_PRECISION_TOLERANCE,
    LocalScorer,
    conversation_group,
    golden_scores,
    golden_tolerance,
)
from laurel.run.scorer import OPTIONS, policy_of_settings
from laurel.training.state import library_versions
from laurel.types import Conversation, Message
from laurel.workers.process import choose_device

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.models.checkpoint.card import EvaluationTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What the command line says."""

    model: str
    output: Path
    step: int | None = None
    """Of a run: this checkpoint, not its best."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    overwrite: bool = False
    evaluations: Sequence[Path] = ()
    """What `laurel eval ... --output` wrote."""
    without_conversations: bool = False
    """Leave no conversation of the data in `scoring.json`."""
    push_to_hub: str | None = None
    private: bool = False
    max_length: int | None = None
    """For a model without `scoring.json`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int | None = None
    settings: Sequence[str] = field(default_factory=tuple)
    """What `--set` says."""
    as_json: bool = False


def run_export(
    options: ExportOptions, *, hub: HubApi | None = None, messages: Console | None = None
) -> None:
    """Write a model as a directory that needs nothing of Laurel.

    What needs no model is checked first. What fails the test of what was written is not kept.

    Args:
        options: See there.
        hub: Stands in for the Hugging Face hub.
        messages: Told what is done and found; None is standard error.

    Raises:
        UserError: A model, a directory, a setting or a login that cannot be used; or a directory
            that would give other scores.
    """
    messages = messages or message_console()

    def say(text: str) -> None:
        messages.print(Text("\n".join(map(visible, text.split("\n")))), soft_wrap=True)

    place = _find(options)
    target = check_target(options.output, overwrite=options.overwrite, read_from=place.name)
    if options.push_to_hub is not None:
        hub = hub or connect()
        check_hub(hub, options.push_to_hub)
    tables = _tables(options, place, say)
    with messages.status("checking the files of the model"):
        for note in place.notes:
            say(note)
        check_files(place)
    with (
        messages.status("writing the model, and loading it with plain transformers"),
        speaking(OPTIONS),
        whole_directory(target) as directory,
    ):
        _write(directory, place, options, tables, say)
    say(f"written to {options.output}")
    if hub is not None and options.push_to_hub is not None:
        with messages.status(f"bringing it to {options.push_to_hub}"):
            push(hub, options.push_to_hub, target, private=options.private)
        say(f"pushed  to {options.push_to_hub}")
    if options.as_json:
        write_json({"model": place.name, "output": options.output, "hub": options.push_to_hub})


def _find(options: ExportOptions) -> ModelPlace:
    if not options.model:
        raise ConfigError(
            f"no model is named; add {key_of('--model')} with a directory (of a model, a "
            "checkpoint, or a run "
            "with checkpoints) or a name on the Hugging Face hub"
        )
    name = options.model
    if options.step is not None:
        root = Path(name).expanduser()
        if not (root / f"step_{options.step}").is_dir():
            from laurel.models.checkpoint.manifest import steps_in

            steps = ", ".join(map(str, steps_in(root))) if root.is_dir() else ""
            raise ConfigError(
                f"--step {options.step}: {name} has no step_{options.step}. "
                + (f"It has the steps {steps}" if steps else "It holds no checkpoints")
            )
        name = str(root / f"step_{options.step}")
    with speaking(OPTIONS):
        return find_model(name)


def _tables(options: ExportOptions, place: ModelPlace, say: Say) -> Sequence[EvaluationTable]:
    """The evaluations for the card; of other models they would be a lie, so that is said."""
    if not options.evaluations:
        return ()
    from laurel.run.cards import read_evaluations

    tables, models = read_evaluations(options.evaluations)
    known = {os.path.realpath(Path(options.model).expanduser()), place.name, options.model}
    for model in dict.fromkeys(models):
        if model not in known and os.path.realpath(Path(model).expanduser()) not in known:
            say(f"warning: an evaluation is of {model}, by its name not the model that is written")
    return tables


def _write(
    directory: Path,
    place: ModelPlace,
    options: ExportOptions,
    tables: Sequence[EvaluationTable],
    say: Say,
) -> None:
    from laurel.workers.process import prepare

    prepare(ClusterConfig(device=options.device, cpu_threads=options.cpu_threads), seed=0)
    quiet_libraries()
    rules = read_rules(place)
    policy = policy_of_settings(options.settings, rules=rules, say=say)
    kind = _kind(place, safetensors_only=policy.safetensors_only)
    if kind == "policy":
        if tables:
            raise ConfigError(
                f"--eval is for reward models, and {place.name} writes text; leave it out"
            )
        write_policy(directory, place, policy, options, say)
        return

    scorer_options = ScorerOptions(
        max_length=options.max_length,
        precision=options.dtype,
        device=options.device,
        policy=policy,
    )
    write_reward_model(directory, place, scorer_options, options, tables, say)


def _kind(place: ModelPlace, *, safetensors_only: bool) -> Literal["reward model", "policy"]:
    """What lies there, told by its files."""
    from laurel.models.loading.reward_model import find_value_head
    from laurel.models.scoring import FILE_NAME

    directory = Path(place.name)
    if (directory / FILE_NAME).is_file():
        return "reward model"
    if find_value_head(directory, safetensors_only=safetensors_only) is not None:
        return "reward model"
    try:
        if directory.is_dir():
            said = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            architectures = said.get("architectures") or []
        else:
            from transformers import AutoConfig

            architectures = AutoConfig.from_pretrained(place.name).architectures or []
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the configuration of {place.name} cannot be read: {error}"
        ) from error
    is_classifier = any(name.endswith("ForSequenceClassification") for name in architectures)
    return "reward model" if is_classifier else "policy"


# --------------------------------------------------------------------------------------------------
# A policy as a plain Hugging Face directory, and the test of what was written.


def write_policy(
    directory: Path, place: ModelPlace, policy: PolicyConfig, options: ExportOptions, say: Say
) -> None:
    """Write it, load it anew without Laurel, and compare log-probabilities.

    Args:
        directory: Exists and is empty.
        place: What is written.
        policy: Its section, from `--set`.
        options: What the command line says.
        say: Told what was found.

    Raises:
        UserError: It writes no text, or what was written says other words.
    """
    config = policy.model_copy(update={"model_name": place.name, "precision": options.dtype})
    device = choose_device(options.device)
    loaded = load_policy(
        config, seed=0, max_length=1, device=device, weights_dtype=DTYPES[options.dtype]
    )
    model = loaded.model
    found = check_policy_paths(model)
    say(
        f"model   {type(model.network).__name__} from {place.name}: "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {options.dtype} on "
        f"{device.type} (self-check: {found:.1e})"
    )
    for note in loaded.notes:
        say(f"note    {note}")
    facts = CardFacts.load(Path(place.name)) if Path(place.name).is_dir() else None
    if facts is None:
        on_hub = hub_name(place.name)
        facts = CardFacts(base_model=on_hub or "", hub_base=on_hub)
    probe = draw_probe(model, SHAPES, seed=0)
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


# --------------------------------------------------------------------------------------------------
# A reward model as a plain Hugging Face directory, and the test of what was written.

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


# --------------------------------------------------------------------------------------------------
# Bringing a directory to the Hugging Face hub.


class HubApi(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    def whoami(self) -> dict[str, Any]:
        """Who is logged in; an error where nobody is."""
        ...

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> object:
        """Make a repository."""
        ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> object:
        """Add a directory to it as one commit."""
        ...


def connect() -> HubApi:
    """The hub that this machine is set up for."""
    from huggingface_hub import HfApi

    return cast("HubApi", HfApi())


def check_hub(api: HubApi, name: str) -> None:
    """Refuse to go on to the hub where nobody could be let in, before any work is done.

    Args:
        api: The hub.
        name: Of the repository.

    Raises:
        ConfigError: A name that the hub does not take, or no login.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"--push-to-hub {name}: {first_line(error)} Give USER/MODEL, or MODEL for your own"
        ) from error
    try:
        api.whoami()
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network
        raise ConfigError(
            f"--push-to-hub {name}: the hub does not say who you are ({first_line(error)}). Log in "
            "with `hf auth login`, or put a token that may write into HF_TOKEN"
        ) from error


def push(api: HubApi, name: str, directory: Path, *, private: bool) -> None:
    """Make the repository where it is missing, and add the files of a directory.

    Raises:
        DataError: The hub refuses; the directory stays as it is.
    """
    try:
        # One that is there stays as public as it is.
        api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=str(directory), commit_message="Written by laurel export"
        )
    except Exception as error:  # of huggingface_hub, of its HTTP client, of the network
        raise DataError(
            f"{directory} is written, but could not be brought to {name}: {first_line(error)}. "
            f"Try again with: hf upload {name} {directory}"
        ) from error
