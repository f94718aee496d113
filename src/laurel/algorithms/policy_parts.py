"""What a GRPO run works with, and who rests where they have the same devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from laurel.algorithms.batches import Batcher
from laurel.algorithms.learner import Learner
from laurel.algorithms.policy_validation import PolicyValidation
from laurel.algorithms.rollout_source import RolloutSource
from laurel.observe.timers import Timers
from laurel.protocols import Environment, Generator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyParts:
    """What a GRPO run works with."""

    learner: Learner
    has_reference: bool = False
    """The learner has one, as the divergence from it has a weight."""
    batcher: Batcher
    generator: Generator
    source: RolloutSource
    environments: dict[str, Environment]
    validation: PolicyValidation | None
    pad_id: int
    generator_rests: bool = False
    """The generator gives its memory back while the learner works on the same device."""
    learner_rests: bool = False
    """And the learner while the generator draws."""
    judges_rest: bool = False
    """And reward models while the learner takes its steps."""

    def noise_of(self, environment: str) -> float:
        """Standard deviation of the own noise of an environment's rewards."""
        return float(getattr(self.environments[environment], "noise_floor", 0.0))

    @property
    def noise(self) -> float:
        """That of the worst of them."""
        return max((self.noise_of(name) for name in self.environments), default=0.0)

    def transfer_figures(self) -> dict[str, float]:
        """What went wrong between learner and generator, where weights travel in several ways."""
        number = getattr(self.generator, "num_weight_fallbacks", None)
        return {} if number is None else {"performance/weight_transfer_fallbacks": float(number)}

    # ------------------------------------------------------------------------------------ at rest

    @contextmanager
    def generator_at_rest(self, timers: Timers) -> Iterator[None]:
        """Nothing is drawn meanwhile."""
        if not self.generator_rests:
            yield
            return
        with timers.time("training_prep"):
            self.source.wait_for(self.generator.sleep())
        try:
            yield
        finally:
            with timers.time("prepare_for_generation/wake"):
                self.source.wait_for(self.generator.wake())

    def learner_at_rest(self) -> AbstractContextManager[None]:
        """Nothing is learned meanwhile."""
        return self.learner.resting() if self.learner_rests else nullcontext()

    @contextmanager
    def judges_at_rest(self) -> Iterator[None]:
        """Nothing is judged meanwhile, by models that can rest."""
        with ExitStack() as stack:
            for environment in self.environments.values() if self.judges_rest else ():
                resting = getattr(environment, "resting", None)
                if resting is not None:
                    stack.enter_context(resting())
            yield
