"""Writes the README of a checkpoint or export: the model, its training data, quality and use.

A card contains no date, so equal weights get equal cards. Unknown facts are omitted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from laurel.errors import CheckpointError
from laurel.models.scoring import ScoringContract, ScoringRules
from laurel.types import Message, group_of

if TYPE_CHECKING:
    from jinja2 import Environment

CARD = "README.md"
FACTS = "model_card.json"
"""The file with the facts that a checkpoint's card was written from, for later cards."""

HERE = "."
"""The default location of the model in a card's example programs: their working directory."""

_TAGS = {"reward model": "reward-model", "policy": "policy"}


class CardFacts(BaseModel):
    """The facts about a run that its model card shows, such as training data and metrics."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_model: str = ""
    """A description of the model that training started from."""
    hub_base: str | None = None
    """The hub name of the model that training started from; None if it has none."""
    method: str = ""
    """The training method, e.g. `GRPO`."""
    data: Mapping[str, str] = {}
    """A description of each data set, by its name."""
    settings: Mapping[str, str | int | float | bool | None] = {}
    """The settings of the training that shaped the model."""
    metrics: Mapping[str, float] = {}
    """The value of each metric, by its name."""
    before: Mapping[str, float] = {}
    """The values of the same metrics before training, where the model was validated then."""
    max_length: int | None = None
    """The number of tokens of the longest text that a policy was trained on."""
    notes: tuple[str, ...] = ()
    """Further paragraphs."""

    def measured(
        self,
        metrics: Mapping[str, float],
        *,
        before: Mapping[str, float] | None = None,
        num_steps: int | None = None,
    ) -> CardFacts:
        """Return a copy of the facts with these metrics; those that are not finite are omitted.

        Args:
            before: The metrics of the model that training started from.
        """
        steps = {} if num_steps is None else {"steps": num_steps}
        changed = {"metrics": _finite(metrics), "before": _finite(before or {})}
        return self.model_copy(update={**changed, "settings": {**self.settings, **steps}})

    def save(self, directory: Path) -> None:
        """Write the facts for the model card into a checkpoint."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        (directory / FACTS).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> CardFacts | None:
        """Read the facts for the model card from a checkpoint; None if it has none.

        Raises:
            CheckpointError: The file of the facts cannot be read.
        """
        path = directory / FACTS
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}. Delete it to write the card without it"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """A row of an evaluation table: a metric of the model.

    `longer_wins` is the same metric of a baseline that prefers the longer completion.
    """

    name: str
    value: float | None
    longer_wins: float | None
    num_rows: int
    num_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTable:
    """A table of a model card with the results of one evaluation."""

    title: str
    data: tuple[str, ...]
    num_rows: int
    rows: tuple[EvaluationRow, ...]
    notes: tuple[str, ...] = ()
    by_length: str = "if the longer answer won"
    """The heading of `longer_wins`."""

    @property
    def has_failures(self) -> bool:
        """Whether at least one row could not be scored."""
        return any(row.num_failures for row in self.rows)


def reward_model_card(
    facts: CardFacts,
    contract: ScoringContract,
    *,
    evaluations: Sequence[EvaluationTable] = (),
    place: str = HERE,
) -> str:
    """Write the README of a reward model.

    Args:
        place: The name by which example programs in the card load the model: a hub name or a
            directory.
    """
    rules, tokenizer = contract.rules, contract.tokenizer
    task = "text-classification" if rules.steps is None else "token-classification"
    return _render(
        "reward_model.md.j2",
        facts=facts,
        rules=rules,
        evaluations=evaluations,
        place=place,
        front=_front(
            facts,
            kind="reward model",
            task=task,
        ),
        beside=_beside_baseline(facts.metrics),
        figures=_figures(facts),
        eos=tokenizer.eos_token,
        pad=tokenizer.pad_token,
        pooled=_pooled_token(contract),
        cut=_cut(contract),
        keeps=_keeps(contract),
        versions=", ".join(f"{name} {version}" for name, version in rules.versions.items()),
    )


def policy_card(facts: CardFacts, *, place: str = HERE) -> str:
    """Write the README of a policy.

    Args:
        place: The name by which example programs in the card load the model: a hub name or a
            directory.
    """
    return _render(
        "policy.md.j2",
        facts=facts,
        place=place,
        front=_front(facts, kind="policy", task="text-generation"),
        figures=_figures(facts),
    )


def _render(template: str, **values: Any) -> str:
    return str(_environment().get_template(template).render(**values))


@cache
def _environment() -> Environment:
    # Kept with its compiled templates: a run writes a card at every save.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("laurel.models"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "figure": _figure,
        "cell": lambda value: _line(value).replace("|", "\\|"),
        "line": _line,
        "string_literal": json.dumps,
    }
    return environment


def _front(facts: CardFacts, *, kind: str, task: str) -> str:
    # The front matter that the hub reads.
    import yaml

    content: dict[str, object] = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": [_TAGS[kind], "laurel"],
    }
    if facts.hub_base is not None:
        content["base_model"] = facts.hub_base
    return str(yaml.safe_dump(content, sort_keys=False))


def _beside_baseline(metrics: Mapping[str, float]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for key in sorted(metrics):
        prefix = key.removesuffix("_accuracy")
        baseline = metrics.get(f"{prefix}_longer_wins_baseline")
        if prefix != key and prefix.startswith("validation-") and baseline is not None:
            rows.append(
                {
                    "name": prefix.removeprefix("validation-"),
                    "accuracy": metrics[key],
                    "longer_wins": baseline,
                    "bag_of_words": metrics.get(f"{prefix}_bag_of_words_baseline"),
                    "num_pairs": metrics.get(f"{prefix}_num_valid_samples"),
                }
            )
    return rows


def _figures(facts: CardFacts) -> list[tuple[str, float]]:
    # Metrics of a single batch of training say little about the model.
    return sorted(item for item in facts.metrics.items() if not item[0].startswith("train_"))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _pooled_token(contract: ScoringContract) -> str:
    # The pooled token is named only where the template always ends with the same one.
    last = []
    for answer in ("By the gate.", "No"):
        asked = group_of((Message("user", "Where?"),), (answer,), group_id="")
        (tokens,) = contract.encode([asked])
        last.append(int(tokens.branches_ids_G[0][-1]))
    if last[0] != last[1]:
        return " of the answer"
    text = contract.tokenizer.decode([last[0]])
    return f", which the template makes {text!r} (id {last[0]})".replace("'", "`")


def _keeps(contract: ScoringContract) -> str:
    kept = []
    if contract.opening_bos is not None and contract.rules.truncation_side == "left":
        kept.append("the first token")
    if contract.rules.truncation_side == "right" or contract.rules.pooled == "model":
        kept.append("the last token")
    return " and ".join(kept)


def _cut(contract: ScoringContract) -> str:
    # Python that cuts `ids` as `ScoringContract` does.
    rules: ScoringRules = contract.rules
    longest = rules.max_length
    if rules.truncation_side == "right" or rules.pooled == "model":
        return f"ids[:{longest - 1}] + ids[-1:]"
    if contract.opening_bos is not None:
        return f"ids[:1] + ids[{1 - longest}:]"
    return f"ids[-{longest}:]"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _line(value: object) -> str:
    return " ".join(str(value).split())
