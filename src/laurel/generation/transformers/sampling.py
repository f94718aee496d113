"""Samples the next token of every row from its logits and its own random number.

The number of a row comes from the seed of its completion. The token is the one at which the row's
cumulative distribution passes the number (inverse transform sampling), so a completion does not
depend on the rest of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

CANDIDATES = 256
"""The number of most likely tokens that top-p sorts first. It sorts the whole vocabulary, which is
slow, only if their probabilities do not reach the share."""
CHUNK = 1 << 22
"""The maximum number of float64 numbers in memory at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The sampling parameters of each row, on the device of the logits."""

    temperature_N: Tensor
    """float32 [N]; 0 selects the most likely token."""
    top_p_N: Tensor
    """float32 [N]; 1 keeps every token."""
    top_k_N: Tensor
    """int64 [N]; 0 keeps every token."""
    filtered: tuple[int, ...]
    """Indices of the rows with a `top_p` below 1 or a `top_k` above 0."""
    has_greedy: bool
    """Whether any row has temperature 0."""

    def to(self, device: torch.device) -> SamplingRows:
        """Return the same parameters on another device."""
        return replace(
            self,
            temperature_N=self.temperature_N.to(device),
            top_p_N=self.top_p_N.to(device),
            top_k_N=self.top_k_N.to(device),
        )


class Sampled(NamedTuple):
    """The sampled token of each row and its log-probability."""

    tokens_N: Tensor
    """int64 [N]: the id of each row's token."""
    logprobs_N: Tensor
    """float32 [N]: log-probabilities under `softmax(logits / temperature)`; NaN if logits are."""

    def joined(self) -> Tensor:
        """Return both as one float64 tensor [2, N], for a single copy to the host."""
        return torch.stack((self.tokens_N.double(), self.logprobs_N.double()))


def sample_tokens(logits_NV: Tensor, rows: SamplingRows, uniform_N: Tensor) -> Sampled:
    """Sample the next token of every row.

    Args:
        logits_NV: float32 [N, V], the logits, which are overwritten.
        uniform_N: float64 [N] in [0, 1): the random number that decides each row's token.
    """
    step = max(1, CHUNK // logits_NV.shape[1])
    parts = [
        _sample(logits_NV[start : start + step], rows, uniform_N[start : start + step], start)
        for start in range(0, len(logits_NV), step)
    ]
    if len(parts) == 1:
        return parts[0]
    return Sampled(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _sample(logits_NV: Tensor, rows: SamplingRows, uniform_N: Tensor, start: int) -> Sampled:
    end = start + len(logits_NV)
    temperature_N1 = rows.temperature_N[start:end, None]
    weights_NV = logits_NV.sub_(logits_NV.amax(dim=1, keepdim=True))
    if rows.has_greedy:
        is_greedy_N1 = temperature_N1 == 0
        likeliest_N = weights_NV.argmax(dim=1)
        temperature_N1 = temperature_N1.masked_fill(is_greedy_N1, 1.0)
    weights_NV = weights_NV.div_(temperature_N1).exp_()
    cumulative_NV = weights_NV.cumsum(dim=1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:].clone()
    filtered = [row - start for row in rows.filtered if start <= row < end]
    if filtered:
        index = torch.tensor(filtered, device=logits_NV.device)
        kept_FV = keep_likeliest(
            weights_NV[index], rows.top_k_N[start:end][index], rows.top_p_N[start:end][index]
        )
        cumulative_NV[index] = kept_FV.cumsum(dim=1, dtype=torch.float64)
    tokens_N = _where_it_passes(cumulative_NV, uniform_N[:, None])
    if rows.has_greedy:
        tokens_N = torch.where(is_greedy_N1[:, 0], likeliest_N, tokens_N)
    chosen_N1 = weights_NV.gather(1, tokens_N[:, None]).double()
    logprobs_N1 = torch.log(chosen_N1) - torch.log(total_N1)
    return Sampled(tokens_N, logprobs_N1[:, 0].float())


def _where_it_passes(cumulative_NV: Tensor, uniform_N1: Tensor) -> Tensor:
    """Return the first index of each row whose cumulative weight exceeds its share of the total.

    An entry of weight 0 is never returned.
    """
    total_N1 = cumulative_NV[:, -1:]
    # A share that rounds up to the total would point past the end.
    below_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    share_N1 = torch.minimum(uniform_N1 * total_N1, below_N1)
    passed_N1 = torch.searchsorted(cumulative_NV, share_N1.contiguous(), right=True)
    # The index is beyond the end only if weights are NaN, which the caller reports.
    return passed_N1[:, 0].clamp_max(cumulative_NV.shape[1] - 1)


def keep_likeliest(weights_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor) -> Tensor:
    """Set the weights of all but the most likely tokens to 0 (top-k, then top-p).

    Top-p applies to the tokens that top-k keeps: it keeps the smallest number of most likely tokens
    that together reach the share. Tokens as likely as the last one are kept too.

    Args:
        weights_FV: float32 [F, V], not negative, of any sum; each row has one above 0.
        top_k_F: int64 [F]; 0 keeps all.
        top_p_F: float32 [F]; 1 keeps all.
    """
    count = min(max(CANDIDATES, int(top_k_F.max())), weights_FV.shape[1])
    best_FC = weights_FV.topk(count, dim=1).values
    total_F1 = weights_FV.sum(dim=1, keepdim=True, dtype=torch.float64)
    share_F1 = top_p_F[:, None].double()
    is_short_F1 = best_FC.sum(dim=1, keepdim=True, dtype=torch.float64) < share_F1 * total_F1
    if bool(((is_short_F1[:, 0] | (top_p_F >= 1)) & (top_k_F == 0)).any()):
        best_FC = weights_FV.sort(dim=1, descending=True).values
    has_k_F1 = top_k_F[:, None] > 0
    edge_F1 = best_FC.gather(1, (top_k_F[:, None] - 1).clamp(0, best_FC.shape[1] - 1))
    left_FC = best_FC.masked_fill(has_k_F1 & (best_FC < edge_F1), 0.0)
    cumulative_FC = left_FC.cumsum(dim=1, dtype=torch.float64)
    total_F1 = torch.where(has_k_F1, cumulative_FC[:, -1:], total_F1)
    # A token is kept while the likelier ones do not make up the share yet. To a share of 1 the
    # least likely would add less than a float64 can tell.
    is_short_FC = (cumulative_FC - left_FC < share_F1 * total_F1) | (share_F1 >= 1)
    is_kept_FC = is_short_FC & (left_FC > 0)
    last_F1 = is_kept_FC.sum(dim=1, keepdim=True) - 1
    return weights_FV.masked_fill(weights_FV < left_FC.gather(1, last_F1.clamp_min(0)), 0.0)
