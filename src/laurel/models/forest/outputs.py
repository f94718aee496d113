"""Computes log-probabilities of tokens from hidden states; only this module shifts tokens.

Entry t of every sequence of per-token values describes token t. Its log-probability is computed
from the hidden state of the token before it.

A vocabulary is so large that the logits of a micro-batch would need more memory than the model. So
logits are computed and dropped in chunks of tokens, and computed again in the backward pass. If the
vocabulary is sharded, each rank computes the logits of its own shard. The ranks exchange a few
numbers per token and, in the backward pass, the gradients of the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate

from laurel.errors import DataError
from laurel.planning.memory import CHUNK_LOGITS
from laurel.types import PaddedRows, SequenceEnd, TokenForest, Tree

CACHED_LOGITS = 2**20
"""The number of logits that are processed at a time, to stay in a processor's cache."""


class TokenOutputs(NamedTuple):
    """The log-probability and, if asked for, entropy of each completion token of a micro-batch."""

    logprobs_M: Tensor
    """float32 [M], differentiable: the log-probability of each token."""
    entropy_M: Tensor | None
    """float32 [M], without gradient: the entropy of each token's distribution, in nats."""

    def gathered(self, label_M: Tensor) -> TokenOutputs:
        """Return the outputs of the tokens at these indices; gradients are summed back."""
        label_M = label_M.to(self.logprobs_M.device, non_blocking=True)
        entropy_M = self.entropy_M
        return TokenOutputs(
            self.logprobs_M[label_M], None if entropy_M is None else entropy_M[label_M]
        )


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """This rank's shard of the vocabulary; the shards of all ranks have the same size."""

    group: dist.ProcessGroup
    """The process group of the ranks that have the shards."""
    start: int
    """The id of the first token of the shard."""
    size: int

    @classmethod
    def of(cls, weight_VD: DTensor) -> VocabularyShare:
        """Return this rank's shard of the vocabulary: its rows of a sharded weight `[V, D]`."""
        mesh = weight_VD.device_mesh
        size = weight_VD.shape[0] // mesh.size()
        return cls(mesh.get_group(), mesh.get_local_rank() * size, size)

    def mine(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mask of the tokens that are in this shard, and their indices in the shard.

        The index of a token in another shard is 0.
        """
        there = ids - self.start
        is_mine = (there >= 0) & (there < self.size)
        return is_mine, there.where(is_mine, 0)

    def reduce(self, values: Tensor, kind: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """All-reduce values over the vocabulary shards in place; all ranks get identical bits."""
        dist.all_reduce(values, op=kind, group=self.group)
        return values

    def gather(self, logits_XV: Tensor) -> Tensor:
        """Gather the logits of all shards, and return those of the whole vocabulary."""
        ranks = dist.get_world_size(self.group)
        parts_XV = [torch.empty_like(logits_XV) for _ in range(ranks)]
        dist.all_gather(parts_XV, logits_XV.contiguous(), group=self.group)
        return torch.cat(parts_XV, dim=1)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank, gathered if it is sharded.

    All ranks that have its shards call this together.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    # Its shard may rest on the host.
    gathered = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    placements: list[Placement] = list(gathered.placements)
    # Dimensions are gathered one after the other, because torch warns if it has to order them.
    for dimension in range(len(placements)):
        placements[dimension] = Replicate()
        gathered = gathered.redistribute(placements=placements)
    return gathered.to_local()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def predictors(batch: TokenForest | PaddedRows) -> tuple[Tensor, Tensor]:
    """Find the hidden state that predicts each completion token: that of the token before.

    For the first token of a completion (branch), this is the last token of its prompt (trunk).

    Returns:
        int64 [M], the indices of these hidden states in the micro-batch's hidden states, flattened
        except for the last dimension (in padded rows `row * L + column`); and int64 [M], the
        completion tokens.

    Raises:
        DataError: A completion has no prompt, so nothing predicts its first token.
    """
    if isinstance(batch, TokenForest):
        index_M, targets_M = completion_tokens(batch)
        return index_M, batch.ids_T[targets_M.to(batch.ids_T.device)].long()
    if bool((batch.starts_N < 1).any()):
        raise _no_prompt()
    column_L = torch.arange(batch.ids_NL.shape[1], device=batch.starts_N.device)
    is_target_NL = (column_L >= batch.starts_N[:, None]) & (column_L < batch.lengths_N[:, None])
    targets_M = is_target_NL.flatten().nonzero()[:, 0]
    return targets_M - 1, batch.ids_NL.flatten()[targets_M.to(batch.ids_NL.device)]


def completion_tokens(forest: TokenForest) -> tuple[Tensor, Tensor]:
    """Return the indices in the row of each completion token's predictor, and of the token.

    Both are int64 [M]; `predictors` describes them.
    """
    ends_N = forest.ends_N
    if any(end.start == 0 for end in ends_N):
        raise _no_prompt()
    starts = [tree.starts for tree in forest.trees]
    runs = [
        run
        for end in ends_N
        for run in _of_completion(forest.trees[end.tree], starts[end.tree], end)
    ]
    targets_M = torch.cat([torch.arange(first, last) for first, last, _ in runs])
    index_M = targets_M - 1
    begins = accumulate((last - first for first, last, _ in runs[:-1]), initial=0)
    index_M[list(begins)] = torch.tensor([before for _, _, before in runs])
    return index_M, targets_M


def _of_completion(
    tree: Tree, starts: Sequence[int], end: SequenceEnd
) -> list[tuple[int, int, int]]:
    # Returns the runs of tokens of one completion: the first, the end, and the predictor of the
    # first. The nodes above the one in which the completion begins are not looked at.
    runs = []
    node = end.node
    while True:
        span, parent = tree.nodes[node], tree.parents[node]
        skipped = max(0, end.start - starts[node])
        first = span.start + skipped
        if first < span.end:
            runs.append((first, span.end, first - 1 if skipped else tree.nodes[parent].end - 1))
        if starts[node] <= end.start:
            return runs[::-1]
        node = parent


def distinct_labels(index_M: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the distinct pairs of predictor and token, which several sequences may share.

    Args:
        index_M: The index of the hidden state that predicts each token, on the CPU.

    Returns:
        int64 [X], the predictors, and int64 [X], the tokens, each pair once; and int64 [M], the
        index of each completion token's pair.
    """
    pairs_M2 = torch.stack((index_M, targets_M.to(index_M.device)), dim=1)
    pairs_X2, label_M = torch.unique(pairs_M2, dim=0, return_inverse=True)
    return *pairs_X2.unbind(1), label_M


def _no_prompt() -> DataError:
    return DataError(
        "a completion has no prompt, so nothing predicts its first token: give the prompt at least "
        "one token, e.g. the tokenizer's beginning-of-sequence token"
    )


def token_logprobs(
    hidden_MD: Tensor,
    targets_M: Tensor,
    weight_VD: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    share: VocabularyShare | None = None,
) -> TokenOutputs:
    """Compute log-probabilities of tokens under `softmax(logits / temperature)`.

    The largest matrix in memory is `[chunk_size, V]`, never `[M, V]`, also in the backward pass,
    where tokens without a gradient cost nothing.

    Products and sums are float32 (float64 if the hidden states are). If both factors are bfloat16
    or float16 on a GPU, they are multiplied in that dtype, which is exact, and summed in float32.
    Logits rounded to bfloat16 would be wrong by several hundredths.

    Args:
        hidden_MD: The hidden state that predicts each token, after the last norm.
        targets_M: int64, the tokens.
        weight_VD: The weights of the language-model head, or this rank's shard of them.
        bias_V: The bias of the head, or this rank's shard of it.
        temperature: The temperature, above 0.
        softcap: The limit of the logits, which become `softcap * tanh(logits / softcap)`.
        logit_scale: The factor of the logits, before the softcap.
        chunk_size: The number of tokens whose logits are in memory at a time; None:
            `usual_chunk_size`.
        share: The shard of the vocabulary that the weight covers; None: all of it. With a shard,
            all ranks make this call and the backward pass together, with equal hidden states and
            tokens.
    """
    device: Literal["cpu", "cuda"] = "cpu" if weight_VD.device.type == "cpu" else "cuda"
    chunk_size = chunk_size or usual_chunk_size(len(weight_VD), device, num_tokens=len(targets_M))
    options = _Options(temperature, softcap, logit_scale, chunk_size, with_entropy, share)
    logprobs_M, entropy_M = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_MD, weight_VD, bias_V, targets_M, options
    )
    return TokenOutputs(logprobs_M, entropy_M)


def usual_chunk_size(vocabulary: int, device: Literal["cpu", "cuda"], *, num_tokens: int) -> int:
    """Return how many tokens have their logits in memory at a time: `CHUNK_LOGITS` at most.

    On a GPU all chunks are equally long.

    Args:
        vocabulary: The number of logits of a token on one rank.
        device: `cpu` or `cuda`.
        num_tokens: The number of tokens in all.
    """
    most = max(1, CHUNK_LOGITS[device] // vocabulary)
    if device == "cpu":
        return most
    num_chunks = -(-num_tokens // most)
    return max(1, -(-num_tokens // max(1, num_chunks)))


def all_logits(
    hidden_XD: Tensor,
    weight_VD: Tensor,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    share: VocabularyShare | None = None,
) -> Tensor:
    """Compute the logits `[X, V]` of X tokens at temperature 1, without gradients, for sampling.

    `token_logprobs` describes the arguments.
    """
    options = _Options(1.0, softcap, logit_scale, len(hidden_XD), with_entropy=False, share=share)
    with torch.no_grad(), _no_autocast(hidden_XD):
        logits_XV = _Head(weight_VD, bias_V, hidden_XD.dtype, options).logits(hidden_XD)
        return logits_XV if share is None else share.gather(logits_XV)


@dataclass(frozen=True, slots=True)
class _Options:
    temperature: float
    softcap: float | None
    logit_scale: float
    chunk_size: int
    with_entropy: bool
    share: VocabularyShare | None


class _Head:
    def __init__(
        self, weight_VD: Tensor, bias_V: Tensor | None, hidden: torch.dtype, options: _Options
    ) -> None:
        self.precise = torch.promote_types(
            torch.promote_types(weight_VD.dtype, hidden), torch.float32
        )
        is_gpu = weight_VD.device.type != "cpu"  # meta tensors stand for those of a GPU
        self.is_low = is_gpu and weight_VD.dtype == hidden and hidden != self.precise
        self.softcap, self.temperature = options.softcap, options.temperature
        # Without a cap, the temperature is one more factor of the logits.
        self.factor = options.logit_scale / (1.0 if self.softcap else self.temperature)
        self.weight_VD = weight_VD if self.is_low else weight_VD.to(self.precise)
        self.bias_V = None if bias_V is None else bias_V.to(self.precise) * self.factor
        self._chunk_size = options.chunk_size
        self._space: Tensor | None = None

    def chunk(self, hidden_CD: Tensor) -> Tensor:
        # The logits `[C, V]` are valid until the next call overwrites them.
        if self._space is None:
            size = (min(self._chunk_size, len(hidden_CD)), len(self.weight_VD))
            self._space = hidden_CD.new_empty(size, dtype=self.precise)
        space = None if self._space is None else self._space[: len(hidden_CD)]
        return self._multiply(hidden_CD, space)

    def logits(self, hidden_XD: Tensor) -> Tensor:
        return self.finish(self._multiply(hidden_XD, None))

    def finish(self, logits_CV: Tensor) -> Tensor:
        # This caps the logits and divides them by the temperature, in place.
        if self.softcap is None:
            return logits_CV
        return logits_CV.div_(self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slopes(self, logits_CV: Tensor) -> Tensor | None:
        # Derivatives of the finished logits by those before the cap; None where all are 1.
        if self.softcap is None:
            return None
        share_CV = logits_CV * (self.temperature / self.softcap)  # what tanh gave
        return share_CV.square_().neg_().add_(1.0).div_(self.temperature)

    def factors(self, by_logits_CV: Tensor) -> Tensor:
        # The gradients by the bare products, as both products with them take them.
        return by_logits_CV.to(self.weight_VD.dtype)

    def gradient_by_hidden(self, by_logits_CV: Tensor) -> Tensor:
        # `[C, D]`, from `factors`.
        if self.is_low:
            return torch.mm(by_logits_CV, self.weight_VD, out_dtype=torch.float32)
        return by_logits_CV @ self.weight_VD

    def add_gradient_by_weight(
        self, total_VD: Tensor, by_logits_CV: Tensor, hidden_CD: Tensor
    ) -> None:
        if self.is_low:  # summed in place: the product alone would be another matrix [V, D]
            torch.addmm(total_VD, by_logits_CV.T, hidden_CD, out_dtype=torch.float32, out=total_VD)
        else:
            total_VD.addmm_(by_logits_CV.T, hidden_CD.to(self.precise))

    def _multiply(self, hidden_CD: Tensor, space: Tensor | None) -> Tensor:
        if self.is_low:
            logits = torch.mm(hidden_CD, self.weight_VD.T, out_dtype=torch.float32, out=space)
            if self.factor != 1.0:  # a pass over all logits
                logits.mul_(self.factor)
            return logits if self.bias_V is None else logits.add_(self.bias_V)
        hidden_CD = hidden_CD.to(self.precise) * self.factor
        if self.bias_V is None:
            return torch.mm(hidden_CD, self.weight_VD.T, out=space)
        return torch.addmm(self.bias_V, hidden_CD, self.weight_VD.T, out=space)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_M: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:
        with _no_autocast(hidden_MD):
            head = _Head(weight_VD, bias_V, hidden_MD.dtype, options)
            logprobs_M = hidden_MD.new_empty(len(targets_M), dtype=head.precise)
            logsum_M = torch.empty_like(logprobs_M)
            entropy_M = torch.empty_like(logprobs_M) if options.with_entropy else None
            for chunk in _slices(len(targets_M), options.chunk_size):
                logits_CV = head.finish(head.chunk(hidden_MD[chunk]))
                entropy_C = None if entropy_M is None else entropy_M[chunk]
                if options.share is None and logits_CV.device.type != "cpu":
                    logprobs_M[chunk], logsum_M[chunk] = reduce_on_gpu(
                        logits_CV, targets_M[chunk], entropy_C
                    )
                    continue
                if options.share is None:
                    chosen_C = logits_CV.gather(1, targets_M[chunk, None])[:, 0]
                    peak_C, rest_C = _reduce(logits_CV, entropy_C)
                else:
                    chosen_C, peak_C, rest_C = _reduce_shared(
                        logits_CV, targets_M[chunk], entropy_C, options.share
                    )
                logprobs_M[chunk] = (chosen_C - peak_C) - rest_C
                logsum_M[chunk] = peak_C + rest_C
        ctx.options = options
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, targets_M, logsum_M)
        if entropy_M is not None:
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprobs_M: Tensor, _by_entropy_M: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden_MD, weight_VD, bias_V, targets_M, logsum_M = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        options: _Options = ctx.options
        # On a device all tokens are used, because the host would wait for it to know which are not.
        is_here = by_logprobs_M.device.type == "cpu"
        taught_M = (
            by_logprobs_M.nonzero()[:, 0]
            if is_here
            else torch.arange(len(targets_M), device=targets_M.device)
        )
        with _no_autocast(hidden_MD):
            head = _Head(weight_VD, bias_V, hidden_MD.dtype, options)
            by_hidden_MD = torch.zeros_like(hidden_MD) if needs_hidden else None
            by_weight_VD = torch.zeros_like(weight_VD, dtype=head.precise) if needs_weight else None
            by_bias_V = torch.zeros_like(bias_V, dtype=head.precise) if needs_bias else None
            for chunk in _slices(len(taught_M), options.chunk_size):
                tokens_C = taught_M[chunk]
                hidden_CD = hidden_MD[tokens_C]
                by_logits_CV = _by_logits(
                    head,
                    head.finish(head.chunk(hidden_CD)),
                    targets_M[tokens_C],
                    logsum_M[tokens_C],
                    by_logprobs_M[tokens_C],
                    options.share,
                )
                if by_bias_V is not None:
                    by_bias_V += by_logits_CV.sum(0)
                by_logits_CV = head.factors(by_logits_CV)
                if by_hidden_MD is not None:
                    by_hidden_CD = head.gradient_by_hidden(by_logits_CV)
                    if options.share is not None:
                        options.share.reduce(by_hidden_CD)
                    by_hidden_MD[tokens_C] = by_hidden_CD.to(hidden_MD.dtype)
                if by_weight_VD is not None:
                    head.add_gradient_by_weight(by_weight_VD, by_logits_CV, hidden_CD)
        if by_weight_VD is not None:
            by_weight_VD = by_weight_VD.to(weight_VD.dtype)
        if by_bias_V is not None:
            by_bias_V = by_bias_V.to(bias_V.dtype)
        return by_hidden_MD, by_weight_VD, by_bias_V, None, None


def _reduce(logits_CV: Tensor, entropy_C: Tensor | None) -> tuple[Tensor, Tensor]:
    # Returns the largest logit of each token, and by how much the log-sum-exp is larger. It
    # overwrites the logits, and writes the entropy into `entropy_C`, if that is given.
    peak_C = logits_CV.new_empty(len(logits_CV))
    rest_C = torch.empty_like(peak_C)
    for part in _cached(logits_CV):
        rows = logits_CV[part]
        torch.amax(rows, dim=1, out=peak_C[part])
        rows.sub_(peak_C[part, None])
        if entropy_C is None:
            total = rows.exp_().sum(1)
        else:
            powers = rows.exp()
            total = powers.sum(1)
            mean = torch.linalg.vecdot(powers, rows, dim=1) / total
            torch.sub(total.log(), mean, out=entropy_C[part])
        torch.log(total, out=rest_C[part])
    return peak_C, rest_C


def reduce_on_gpu(
    logits_CV: Tensor, targets_C: Tensor, entropy_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability and the log-sum-exp of each token, both [C].

    The time on a GPU is that of the bytes that each pass over the logits moves, and log_softmax is
    one kernel.

    Args:
        logits_CV: The finished logits, which are overwritten.
        targets_C: int64, the tokens.
        entropy_C: Where the entropies are written; None: they are not computed.
    """
    chosen_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
    scaled_CV = logits_CV.log_softmax(dim=1)
    logprobs_C = scaled_CV.gather(1, targets_C[:, None])[:, 0]
    if entropy_C is not None:
        powers_CV = torch.exp(scaled_CV, out=logits_CV)
        torch.linalg.vecdot(powers_CV, scaled_CV, dim=1, out=entropy_C).neg_()
    return logprobs_C, chosen_C - logprobs_C


def gradients_on_gpu(
    logits_CV: Tensor, targets_C: Tensor, weights_C: Tensor, slopes_CV: Tensor | None
) -> Tensor:
    """Return the gradients [C, V] by the bare products of hidden states and weights.

    Args:
        weights_C: The gradients by the log-probabilities, times the factor of the logits.
        slopes_CV: The derivatives of the cap; None where all are 1.
    """
    by_CV = logits_CV.softmax(dim=1).mul_(-weights_C[:, None])
    by_CV.scatter_add_(1, targets_C[:, None], weights_C[:, None])
    return by_CV if slopes_CV is None else by_CV.mul_(slopes_CV)


def _reduce_shared(
    logits_CV: Tensor, targets_C: Tensor, entropy_C: Tensor | None, share: VocabularyShare
) -> tuple[Tensor, Tensor, Tensor]:
    # Returns what `_reduce` returns over all shards of the vocabulary, after each target's logit.
    is_mine_C, there_C = share.mine(targets_C)
    chosen_C = logits_CV.gather(1, there_C[:, None])[:, 0].masked_fill_(~is_mine_C, 0.0)
    peak_C = share.reduce(logits_CV.amax(dim=1), dist.ReduceOp.MAX)
    total_C, mean_C = torch.empty_like(peak_C), torch.zeros_like(peak_C)
    for part in _cached(logits_CV):
        rows = logits_CV[part].sub_(peak_C[part, None])
        if entropy_C is None:
            torch.sum(rows.exp_(), dim=1, out=total_C[part])
        else:
            powers = rows.exp()
            torch.sum(powers, dim=1, out=total_C[part])
            torch.linalg.vecdot(powers, rows, dim=1, out=mean_C[part])
    chosen_C, total_C, mean_C = share.reduce(torch.stack((chosen_C, total_C, mean_C)))
    rest_C = total_C.log()
    if entropy_C is not None:
        torch.sub(rest_C, mean_C / total_C, out=entropy_C)
    return chosen_C, peak_C, rest_C


def _by_logits(
    head: _Head,
    logits_CV: Tensor,
    targets_C: Tensor,
    logsum_C: Tensor,
    by_logprobs_C: Tensor,
    share: VocabularyShare | None,
) -> Tensor:
    # Gradients by the bare products of hidden states and weights; overwrites the logits. The
    # derivative of a log-probability by a finished logit is 1 for the token's own, less the
    # probability of that logit's token.
    weights_C = by_logprobs_C.to(logits_CV.dtype) * head.factor
    own_C = weights_C
    if share is not None:
        is_mine_C, targets_C = share.mine(targets_C)
        own_C = weights_C.where(is_mine_C, 0.0)
    if share is None and logits_CV.device.type != "cpu":
        return gradients_on_gpu(logits_CV, targets_C, weights_C, head.slopes(logits_CV))
    for part in _cached(logits_CV):
        rows, weights = logits_CV[part], weights_C[part, None]
        slopes = head.slopes(rows)
        rows.sub_(logsum_C[part, None]).exp_().mul_(-weights)
        rows.scatter_add_(1, targets_C[part, None], own_C[part, None])
        if slopes is not None:
            rows.mul_(slopes)
    return logits_CV


def _no_autocast(like: Tensor) -> torch.autocast:
    # Meta tensors, which stand for those of a GPU where bytes are counted, have no autocast.
    kind = like.device.type
    return torch.autocast("cpu" if kind == "meta" else kind, enabled=False)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def _cached(logits_CV: Tensor) -> Iterator[slice]:
    # A CPU gets as many rows as its cache holds, a GPU all of them.
    length, width = logits_CV.shape
    return _slices(length, length if logits_CV.is_cuda else max(1, CACHED_LOGITS // width))
