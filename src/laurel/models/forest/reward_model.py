"""A Hugging Face sequence classifier as a reward model: token forests in, float32 scores out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laurel.models.forest.decoder import Decoder, Path
from laurel.types import PaddedRows, TokenForest


class RewardModel(Decoder):
    """The decoder, its reward head, and the one place where a score is read.

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
        """Wrap a classifier.

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
        """See `Decoder`."""
        return self.classifier

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
        hidden = self.hidden(batch)
        if isinstance(batch, TokenForest):
            last_N = torch.tensor(batch.last_N).to(hidden.device, non_blocking=True)
            return hidden[last_N]
        index_N = torch.arange(batch.num_completions, device=self.device)
        return hidden[index_N, batch.lengths_N.to(self.device, non_blocking=True) - 1]

    def judge(self, hidden_ND: Tensor) -> Tensor:
        """The head: scores `[N, K]` of hidden states."""
        head = getattr(self.classifier, self.head_name or "")
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        with torch.autocast(self.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            return nn.functional.linear(hidden_ND.to(dtype), head.weight.to(dtype), bias)

    def _pooled_by_model(self, rows: PaddedRows) -> Tensor:
        with self.autocast():
            logits_NK: Tensor = self.classifier(**self.padded_inputs(rows)).logits
        return logits_NK.float()
