"""Hugging Face decoders that read forests or padded rows, and the reward model on top.

Policies, which make log-probabilities, are in `models/forest/policy.py`.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.models.forest.attention import PLAN_ARGUMENT, AttentionPlan, ForestPlan
from laurel.types import PaddedRows, TokenForest

Path = Literal["forest", "padded"]


class Decoder(nn.Module):
    """The layers below the head; batches are forests or padded rows.

    Their arithmetic is in `precision`: autocast over float32 master weights, or the weights' own
    dtype.
    """

    def __init__(self, *, path: Path, precision: torch.dtype) -> None:
        """Choose the batch layout (`path`) and the compute dtype (`precision`)."""
        super().__init__()
        self.path: Path = path
        self.precision = precision
        self.mesh: DeviceMesh | None = None
        """Mesh that `parallelise` spread it over; None: this process holds all of it."""
        self.gathered_dtype: torch.dtype | None = None
        """Dtype that weights of layers are rounded to when they are gathered; None: not rounded."""

    @property
    @abstractmethod
    def network(self) -> Any:
        """The Hugging Face model, head included."""

    @property
    def device(self) -> torch.device:
        """Device that computes. Weights of a spread model may lie elsewhere between uses."""
        if self.mesh is not None and self.mesh.device_type != "cpu":
            return torch.device(self.mesh.device_type, torch.cuda.current_device())
        return next(self.parameters()).device

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.parameters()).dtype

    @property
    def exact_dtype(self) -> torch.dtype:
        """Dtype that weights have even `in_full_precision`."""
        return self.gathered_dtype or self.weights_dtype

    def without_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Compute without gradients, and without inference mode where the model is spread."""
        # In inference mode a spread model could not write the weights that it gathers.
        return torch.inference_mode() if self.mesh is None else torch.no_grad()

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Compute in the dtype of the weights for the duration, whatever `precision` is.

        For checks: the rounding of bfloat16 would hide the errors they look for. Weights that
        are rounded on their way from other ranks stay so, but nothing else is.
        """
        precision, self.precision = self.precision, self.weights_dtype
        is_mixed = self.exact_dtype != self.weights_dtype
        try:
            with weights_as(self, self.weights_dtype) if is_mixed else contextlib.nullcontext():
                yield
        finally:
            self.precision = precision

    def hidden(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Compute every token's hidden state after the last norm: `[T, D]`, or `[N, L, D]` of
        rows.
        """
        with self.autocast():
            if isinstance(batch, TokenForest):
                ids_T, plan = batch.ids_T.long(), ForestPlan(batch.trees)
                return self.hidden_of_row(ids_T, batch.positions_T, plan)
            body = self.network.base_model
            rows: Tensor = body(**self.padded_inputs(batch), use_cache=False).last_hidden_state
            return rows

    def hidden_of_row(self, ids_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute `hidden` of tokens in one row, `[T, D]`; the plan decides which tokens attend.

        The surrounding precision holds: `hidden` puts `autocast` there.
        """
        hidden_1TD: Tensor = self.network.base_model(
            input_ids=ids_T[None].to(self.device, non_blocking=True),
            position_ids=positions_T[None].to(self.device, non_blocking=True),
            use_cache=False,
            **{PLAN_ARGUMENT: plan},
        ).last_hidden_state
        return hidden_1TD[0]

    def padded_inputs(self, rows: PaddedRows) -> dict[str, Tensor]:
        """Build the keyword arguments of transformers' models for padded rows."""
        column_L = torch.arange(rows.ids_NL.shape[1])
        mask_NL = column_L[None] < rows.lengths_N[:, None]
        return {
            "input_ids": rows.ids_NL.to(self.device, non_blocking=True),
            "attention_mask": mask_NL.long().to(self.device, non_blocking=True),
        }

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast to lower precision where the weights are float32 masters and less is
        configured.
        """
        is_master = self.weights_dtype == torch.float32
        if self.precision == torch.float32 or not is_master:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)


# --------------------------------------------------------------------------------------------------
# A model computed in a higher precision than its weights are held, or gathered, in.


class RewardModel(Decoder):
    """The decoder and its reward head, with the only code that reads scores.

    The head always runs in float32, because the noise of bfloat16 is of the size of the differences
    that decide a comparison.
    """

    def __init__(
        self,
        classifier: nn.Module,
        *,
        head_name: str | None,
        path: Path,
        precision: torch.dtype,
    ) -> None:
        """Wrap a classifier of transformers.

        Args:
            classifier: A Hugging Face `...ForSequenceClassification`.
            head_name: Attribute of the linear head over the last hidden state; None where the
                model pools by itself (encoders), which only the padded path serves.
            path: How batches reach it.
            precision: Dtype of the decoder's arithmetic.
        """
        super().__init__(path=path, precision=precision)
        self.classifier: Any = classifier
        self.head_name = head_name

    @property
    def network(self) -> Any:
        """The Hugging Face model, head included."""
        return self.classifier

    @property
    def num_outputs(self) -> int:
        """K: number of outputs of the head."""
        return int(self.classifier.config.num_labels)

    def forward(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Score every completion of a micro-batch.

        Returns:
            float32 `[N, K]` (float64 where the weights are), in the order of the batch.
        """
        if self.head_name is None:
            assert isinstance(batch, PaddedRows)
            with self.autocast():
                logits_NK: Tensor = self.classifier(**self.padded_inputs(batch)).logits
            return logits_NK.float()
        return self.judge(self.last_hidden(batch))

    def last_hidden(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Return the decoder's hidden state of the last token of every completion, `[N, D]`."""
        hidden = self.hidden(batch)
        if isinstance(batch, TokenForest):
            last_N = torch.tensor(batch.last_N).to(hidden.device, non_blocking=True)
            return hidden[last_N]
        index_N = torch.arange(batch.num_completions, device=self.device)
        return hidden[index_N, batch.lengths_N.to(self.device, non_blocking=True) - 1]

    def judge(self, hidden_ND: Tensor) -> Tensor:
        """Apply the head to hidden states: scores `[N, K]`."""
        head = getattr(self.classifier, self.head_name or "")
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        with torch.autocast(self.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            return nn.functional.linear(hidden_ND.to(dtype), head.weight.to(dtype), bias)


@contextmanager
def weights_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert the weights of each module to another dtype while it computes.

    Widening loses nothing, so the outputs are exactly those of these weights. Only the modules that
    compute at the moment hold their weights twice.
    """
    narrow: dict[nn.Module, dict[str, Any]] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        narrow[module] = dict(module._parameters)
        for name, parameter in narrow[module].items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = parameter.detach().to(dtype)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(narrow.pop(module, {}))

    with ExitStack() as stack:
        for module in model.modules():
            if module._parameters:
                stack.callback(restore, module)  # also where its computation raised
                stack.callback(module.register_forward_pre_hook(widen).remove)
                stack.callback(module.register_forward_hook(restore).remove)
        yield


# --------------------------------------------------------------------------------------------------
# Models and their optimizer on the host for a while, when others need the memory of the device.


class Resting:
    """Offloads a learner's device memory to the host and restores it; does nothing on CPUs."""

    def __init__(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Register the models and the optimizer; nothing is moved yet."""
        self._models = models
        self._optimizer = optimizer
        self._homes: list[tuple[nn.Module, torch.device]] = []
        self._states: list[tuple[dict[str, Any], str, torch.device]] = []

    def sleep(self) -> None:
        """Move everything to the host. Gradients are dropped."""
        self._optimizer.zero_grad(set_to_none=True)
        for model in self._models:
            device = next(model.parameters()).device
            if device.type != "cpu":
                self._homes.append((model, device))
                model.to("cpu")
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    self._states.append((state, name, value.device))
                    state[name] = value.to("cpu")
        if self._homes:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move everything back to where it was."""
        while self._homes:
            model, device = self._homes.pop()
            model.to(device)
        while self._states:
            state, name, device = self._states.pop()
            state[name] = state[name].to(device)
