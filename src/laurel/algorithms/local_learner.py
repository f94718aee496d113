"""The learner of one process: all of it, or one rank of many."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from laurel.algorithms.learner import (
    ELSEWHERE,
    NOTHING_TO_LEARN,
    Asked,
    Inputs,
    Label,
    Loss,
    MicroBatch,
    Step,
    Update,
    add_up,
    denominator_of,
    update_of,
    weights_of,
)
from laurel.algorithms.optimizers import build_optimizer, build_scheduler
from laurel.config.schema import Milestones, NamedCall
from laurel.models.across_ranks import AcrossRanks
from laurel.models.background import Background
from laurel.models.export import save_reward_model
from laurel.models.export_policy import save_policy
from laurel.models.outputs import TokenOutputs
from laurel.models.policy import PolicyModel, Reference
from laurel.models.resting import Resting
from laurel.models.scoring import ScoringContract
from laurel.models.sharded_weights import saved_weights
from laurel.models.training_state import load_training_state, save_training_state
from laurel.types import Weights


class LocalLearner:
    """The learner of this process: all of it, or one rank of many.

    One rank of many takes part in `take_step`, `outputs`, `named_weights`, `export`, `save_state`
    and `load_state` together with the others, in the same order; `update` is for one alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: NamedCall,
        scheduler: NamedCall | list[NamedCall | Milestones] | None = None,
        max_grad_norm: float | None = None,
        products: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
        reference: Reference | None = None,
        tokenizer: Any = None,
        ranks: AcrossRanks | None = None,
    ) -> None:
        """Build the optimizer over every parameter that takes gradients.

        Args:
            model: What is trained.
            optimizer: Its class and arguments.
            scheduler: Likewise.
            max_grad_norm: Larger gradients are scaled down.
            products: Put around forward and backward passes; see `engines.cpu_products`.
            reference: The policy before its training.
            tokenizer: Of a policy: what is saved with it.
            ranks: The others, where the model is spread over several processes.

        Raises:
            ConfigError: An optimizer or scheduler that torch does not have, or refuses.
        """
        self.model = model
        self.reference = reference
        self.tokenizer = tokenizer
        self.max_grad_norm = max_grad_norm
        self.ranks = ranks
        self._products = products
        _let_go(model)  # or some weights would be found whole, as a forward pass has left them
        self.named_parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizer = build_optimizer(optimizer, self.named_parameters)
        self.scheduler = build_scheduler(scheduler, self.optimizer)
        models = [model]
        if reference is not None and reference.model is not model:
            models.append(reference.model)
        self._resting = Resting(models, self.optimizer)
        self._writing = Background("laurel-writing")

    @property
    def learning_rate(self) -> float:
        """See `Learner`."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def num_places(self) -> int:
        """See `Learner`: one, as `update` is for one alone."""
        return 1

    # ------------------------------------------------------------------------------------- learning

    def update(self, batch: Sequence[MicroBatch[Label]], loss: Loss[Label]) -> Update:
        """See `Learner`."""
        denominator = denominator_of(batch, loss)
        if denominator == 0:
            self.optimizer.zero_grad(set_to_none=True)
            return Update(metrics={}, failure=NOTHING_TO_LEARN)
        return update_of([self.take_step(batch, loss, denominator=denominator)], loss)

    def take_step(
        self,
        batch: Sequence[MicroBatch[Label]],
        loss: Loss[Label],
        *,
        denominator: float,
        fillers: Collection[int] = (),
    ) -> Step:
        """This rank's part of `update`.

        Args:
            batch: Its micro-batches, as many as every other rank has.
            loss: Judges them.
            denominator: `loss.count` over the micro-batches of all ranks.
            fillers: Which of the batch only make up the number: they count for nothing.
        """
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        rate = self.learning_rate
        sums: dict[str, Tensor] = {}
        failure = self._accumulate(batch, loss, denominator, fillers, sums)
        if self.ranks is not None and not self.ranks.all_hold(failure is None):
            failure = failure or ELSEWHERE
        if failure is not None:
            self.optimizer.zero_grad(set_to_none=True)
            return Step(sums={}, learning_rate=rate, failure=failure)
        grad_norm = self._clip()
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            failure = f"the norm of the gradient is {grad_norm}"
        else:
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        return Step(sums=sums, learning_rate=rate, grad_norm=grad_norm, failure=failure)

    def _accumulate(
        self,
        batch: Sequence[MicroBatch[Label]],
        loss: Loss[Label],
        denominator: float,
        fillers: Collection[int],
        sums: dict[str, Tensor],
    ) -> str | None:
        """Gradients and sums of all micro-batches; why they are of no use, where they are not.

        With others, who wait for it in every pass, a rank goes on after a loss that is not finite.
        """
        failure: str | None = None
        with self._products(self.model) if self._products else nullcontext():
            for number, micro_batch in enumerate(batch):
                outputs = self.model(micro_batch.inputs)
                result = loss(outputs, micro_batch.labels, num_groups=denominator)
                if number in fillers:
                    (result.loss * 0.0).backward()  # type: ignore[no-untyped-call]
                    continue
                if not torch.isfinite(result.loss):
                    failure = failure or f"the loss is {float(result.loss.detach())}"
                    if self.ranks is None:
                        return failure
                result.loss.backward()  # type: ignore[no-untyped-call]
                add_up(sums, result.sums)
        return failure

    def _clip(self) -> float:
        parameters = [parameter for _, parameter in self.named_parameters]
        if self.ranks is not None:
            return self.ranks.clip(parameters, self.max_grad_norm)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return float(nn.utils.clip_grad_norm_(parameters, limit))

    # --------------------------------------------------------------------------------- being asked

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        of: Asked = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """See `Learner`."""
        asked: Any = self.model if of == "model" else self.reference
        assert asked is not None, "this run has no reference policy"
        network: Any = asked.model if isinstance(asked, Reference) else asked
        for batch in batches:
            # Nothing is open between two batches, when others compute.
            with ExitStack() as stack:
                if self._products is not None:
                    stack.enter_context(self._products(network))
                if in_full_precision:
                    stack.enter_context(network.in_full_precision())
                if temperature is not None:
                    stack.enter_context(network.at_temperature(temperature))
                if isinstance(asked, Reference | PolicyModel):
                    outputs = TokenOutputs(asked.logprobs(batch), None)
                else:
                    stack.enter_context(evaluating(network))
                    outputs = network(batch)
            yield outputs
        _let_go(network)

    def named_weights(self, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See `Learner`."""
        model: Any = self.model
        return saved_weights(model.network, changing_only=changing_only)

    def weights(self, version: int) -> Weights:
        """See `Learner`."""
        is_partly_frozen = any(not p.requires_grad for p in self.model.parameters())
        return weights_of(self, version, is_partly_frozen=is_partly_frozen)

    # ----------------------------------------------------------------------------- saving, resting

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """See `Learner`."""
        model: Any = self.model
        background = self._writing if in_background else None
        if contract is not None:
            save_reward_model(directory, model, contract, card=card, background=background)
        else:
            save_policy(directory, model, self.tokenizer, card=card, background=background)

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """See `Learner`."""
        save_training_state(
            directory, optimizer=self.optimizer, scheduler=self.scheduler, extra=extra,
            mesh=self._mesh, background=self._writing if in_background else None,
        )  # fmt: skip

    def written(self, *, is_awaited: bool = False) -> float | None:
        """See `Learner`; of this rank alone, and of no other."""
        return self._writing.outcome(is_awaited=is_awaited)

    def load_state(self, directory: Path) -> dict[str, Any]:
        """See `Learner`."""
        return load_training_state(
            directory, optimizer=self.optimizer, scheduler=self.scheduler, mesh=self._mesh
        )

    def sleep(self) -> None:
        """Give device memory back until `wake`."""
        self._resting.sleep()

    def wake(self) -> None:
        """Be ready to be asked again."""
        self._resting.wake()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """See `Learner`."""
        self.sleep()
        try:
            yield
        finally:
            self.wake()

    @property
    def _mesh(self) -> DeviceMesh | None:
        return None if self.ranks is None else self.ranks.mesh


def _let_go(model: nn.Module) -> None:
    """Drop weights that a forward pass has gathered from other ranks and kept."""
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout and gradients, and as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
