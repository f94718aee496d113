"""What a checkpoint of a policy holds (supervised fine-tuning, GRPO)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from laurel.algorithms.learner import Learner
from laurel.algorithms.run_state import TRAINING_DATA, Position, RunState
from laurel.models.model_card import CardFacts, policy_card
from laurel.types import TokenGroup


class PolicyRunState(RunState):
    """Checkpoints that are causal language models."""

    def __init__(
        self,
        learner: Learner,
        *,
        identity: Mapping[str, object],
        data_fingerprint: str,
        config_yaml: str,
        card: CardFacts,
        run_dir: Path,
        save_optimizer: bool,
        saves_in_background: bool = False,
    ) -> None:
        super().__init__(
            learner,
            identity={**identity, TRAINING_DATA: data_fingerprint},
            config_yaml=config_yaml,
            run_dir=run_dir,
            save_optimizer=save_optimizer,
            saves_in_background=saves_in_background,
        )
        self._card = card

    def write_model(self, directory: Path, position: Position, *, in_background: bool) -> None:
        """See `RunState`."""
        facts = self._card.measured(position.metrics)
        self.learner.export(directory, policy_card(facts), in_background=in_background)
        facts.save(directory)


def fingerprint_of_tokens(groups: Sequence[TokenGroup]) -> str:
    """A hash of the tokens of a training set, in order."""
    return hash_of(
        "|".join(str(ids.tolist()) for ids in (group.trunk_ids, *group.branches_ids_G))
        for group in groups
    )


def hash_of(texts: Iterable[str]) -> str:
    """A hash of texts, in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()[:16]
