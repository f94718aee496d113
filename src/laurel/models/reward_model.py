"""A Hugging Face sequence classifier as a reward model: token forests in, float32 scores out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from laurel.models.attention import PLAN_ARGUMENT, ForestPlan
from laurel.types import PaddedRows, TokenForest

Path = Literal["forest", "padded"]


class RewardModel(nn.Module):
    """The decoder, its reward head, and the one place where a score is read.

    The decoder's arithmetic is in `precision` (autocast over float32 master weights, or the
    weights' own dtype); the head always runs in float32, because the noise of bfloat16 is of the
    size of the differences that decide a comparison.
    """

    def __init__(
        self,
        classifier: nn.Module,
        *,
        head_name: str | None,
        path: Path,
        precision: torch.dtype,
    ) -> None:
        """Wrap a classifier.

        Args:
            classifier: A Hugging Face `...ForSequenceClassification`.
            head_name: Attribute of the linear head over the last hidden state; None where the
                model pools by itself (encoders), which only the padded path serves.
            path: How batches reach it.
            precision: Dtype of the decoder's arithmetic.
        """
        super().__init__()
        self.classifier: Any = classifier
        self.head_name = head_name
        self.path: Path = path
        self.precision = precision

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def weights_dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.parameters()).dtype

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Compute in the dtype of the weights for a while, whatever `precision` says.

        For the checks: the rounding of bfloat16 would hide the errors they look for.
        """
        precision, self.precision = self.precision, self.weights_dtype
        try:
            yield
        finally:
            self.precision = precision

    @property
    def num_outputs(self) -> int:
        """K: outputs of the head."""
        return int(self.classifier.config.num_labels)

    def forward(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Score every completion of a micro-batch.

        Returns:
            float32 `[N, K]` (float64 where the weights are), in the order of the batch.
        """
        if self.head_name is None:
            assert isinstance(batch, PaddedRows)
            return self._pooled_by_model(batch)
        return self.judge(self.last_hidden(batch))

    def last_hidden(self, batch: TokenForest | PaddedRows) -> Tensor:
        """The decoder's hidden state of the last token of every completion, `[N, D]`."""
        if isinstance(batch, TokenForest):
            return self._last_hidden_forest(batch)
        return self._last_hidden_padded(batch)

    def judge(self, hidden_ND: Tensor) -> Tensor:
        """The head: scores `[N, K]` of hidden states."""
        head = getattr(self.classifier, self.head_name or "")
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        with torch.autocast(self.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            return nn.functional.linear(hidden_ND.to(dtype), head.weight.to(dtype), bias)

    def _last_hidden_forest(self, forest: TokenForest) -> Tensor:
        plan = ForestPlan(forest.trees)
        with self._autocast():
            hidden_1TD = self.classifier.base_model(
                input_ids=forest.ids_T[None].to(self.device),
                position_ids=forest.positions_T[None].to(self.device),
                use_cache=False,
                **{PLAN_ARGUMENT: plan},
            ).last_hidden_state
        return hidden_1TD[0, forest.last_N]  # type: ignore[no-any-return]

    def _last_hidden_padded(self, rows: PaddedRows) -> Tensor:
        with self._autocast():
            hidden_NLD = self.classifier.base_model(
                **self._padded_inputs(rows), use_cache=False
            ).last_hidden_state
        index_N = torch.arange(rows.num_completions, device=self.device)
        return hidden_NLD[index_N, rows.lengths_N.to(self.device) - 1]  # type: ignore[no-any-return]

    def _pooled_by_model(self, rows: PaddedRows) -> Tensor:
        with self._autocast():
            logits_NK: Tensor = self.classifier(**self._padded_inputs(rows)).logits
        return logits_NK.float()

    def _padded_inputs(self, rows: PaddedRows) -> dict[str, Tensor]:
        column_L = torch.arange(rows.ids_NL.shape[1])
        mask_NL = column_L[None] < rows.lengths_N[:, None]
        return {
            "input_ids": rows.ids_NL.to(self.device),
            "attention_mask": mask_NL.long().to(self.device),
        }

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Lower precision where the weights are float32 masters and less was asked for."""
        is_master = self.weights_dtype == torch.float32
        if self.precision == torch.float32 or not is_master:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)
