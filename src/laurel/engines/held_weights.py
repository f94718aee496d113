"""A copy of the policy for generation alone, and how it is brought up to date."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from laurel.errors import EngineError, ModelError
from laurel.models.adapters import adapted_layers
from laurel.models.policy import PolicyModel
from laurel.types import Weights


class HeldWeights:
    """The policy as it was at the last `take`, without adapters, gradients or dropout."""

    def __init__(self, model: PolicyModel, *, owns_model: bool = False) -> None:
        """Copy a model.

        Args:
            model: The learner's own, or one that nobody else has.
            owns_model: Nobody else has it: it need not be copied, unless it has adapters.

        Raises:
            ModelError: transformers saves its weights otherwise than it holds them.
        """
        is_taken = owns_model and not adapted_layers(model.causal_lm)
        self.model = model if is_taken else copy.deepcopy(model)
        for name, layer in adapted_layers(self.model.causal_lm).items():
            parent, _, child = name.rpartition(".")
            setattr(self.model.causal_lm.get_submodule(parent), child, layer.base_layer)
        for parameter in self.model.parameters():
            parameter.grad = None
            parameter.requires_grad_(False)
        self.model.eval()
        self._check_in_place()
        self._has_all = False
        """Of one version or another; those that training cannot change are the same in all."""
        if not is_taken:
            self.take(Weights(version=0, tensors=model.named_weights))

    def _check_in_place(self) -> None:
        held = {t.untyped_storage().data_ptr() for t in self.model.state_dict().values()}
        for name, tensor in self._targets().items():
            if tensor.untyped_storage().data_ptr() not in held:
                raise ModelError(
                    f"{name} is saved otherwise than it is held in memory, so a copy of this model "
                    "cannot be brought up to date: set grpo.max_staleness to 0, or "
                    "policy.generation.backend to vllm"
                )

    def _targets(self) -> dict[str, Tensor]:
        return dict(self.model.named_weights())

    def take(self, weights: Weights) -> None:
        """Copy weights in by name: when all have been copied before, those that change.

        Raises:
            EngineError: A name or shape is not that of this model, or a weight is missing. Some of
                the weights may be the new ones by then.
        """
        left = self._targets()
        changing = weights.changing if self._has_all else None
        self._has_all = False
        with torch.no_grad():
            for name, tensor in (changing or weights.tensors)():
                target = left.pop(name, None)
                if target is None:
                    raise EngineError(
                        f"version {weights.version} of the weights has {name!r} twice, or the "
                        "generator's model does not have it"
                    )
                if target.shape != tensor.shape:
                    raise EngineError(
                        f"version {weights.version} of the weights has {name!r} in the shape "
                        f"{tuple(tensor.shape)}; the generator's model has {tuple(target.shape)}"
                    )
                target.copy_(tensor)
        if left and changing is None:
            raise EngineError(
                f"version {weights.version} of the weights lacks {len(left)} of the model's, such "
                f"as {next(iter(left))!r}"
            )
        self._has_all = True
