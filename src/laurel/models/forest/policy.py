"""Wraps a Hugging Face language model as a policy, which computes float32 log-probabilities.

Its linear layers multiply otherwise than those of reward models: with rounded weights while
completions are sampled, and on some CPUs with another library.
"""

from __future__ import annotations

import copy
import functools
import pathlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from laurel.errors import ModelError, key_of
from laurel.models.forest.decoder import (
    Decoder,
    Path,
    UnreadTokens,
    adapted_layers,
    round_residual_stream,
)
from laurel.models.forest.outputs import (
    TokenOutputs,
    VocabularyShare,
    all_logits,
    completion_tokens,
    distinct_labels,
    local,
    predictors,
    token_logprobs,
)
from laurel.models.forest.parts import Readings
from laurel.models.loading.adapters import without_adapters
from laurel.models.parallel.weights import saved_weights
from laurel.types import PaddedRows, TokenForest


class PolicyModel(Decoder):
    """A decoder with a language-model head that computes log-probabilities of completion tokens.

    The head computes in float32, whatever the decoder's precision is.
    """

    def __init__(
        self,
        causal_lm: nn.Module,
        *,
        path: Path,
        precision: torch.dtype,
        temperature: float = 1.0,
    ) -> None:
        """Wrap a language model.

        Args:
            causal_lm: A Hugging Face `...ForCausalLM`, with or without adapters.
            temperature: The sampling temperature, at which log-probabilities are computed; 0
                (greedy sampling) counts as 1.

        Raises:
            ModelError: The head is not a linear layer over the vocabulary.
        """
        super().__init__(path=path, precision=precision)
        self.causal_lm: Any = causal_lm
        UnreadTokens.skip_in(causal_lm)
        round_residual_stream(causal_lm)
        self.temperature = temperature or 1.0
        self.with_entropy = False
        """Whether the entropy of each token's distribution is computed too."""
        self.rounded_head_VD: Tensor | None = None
        """The weights of the head in the decoder's precision while a generator holds them so."""
        if not isinstance(self.head, nn.Linear):
            raise ModelError(
                f"{type(causal_lm).__name__} has no linear head over a vocabulary, so it cannot be "
                f"a policy: {key_of('policy.model_name')} needs a model of the kind ...ForCausalLM"
            )
        self.logit_scale, self.softcap = _logit_rules(causal_lm)

    @property
    def network(self) -> Any:
        """The Hugging Face model, including its head."""
        return self.causal_lm

    @property
    def head(self) -> Any:
        """The linear layer from hidden states to logits."""
        return self.causal_lm.get_output_embeddings()

    @property
    def vocab_size(self) -> int:
        """The number of logits per token, V, which may exceed the tokenizer's number of tokens."""
        return int(self.head.weight.shape[0])

    def outputs(self, batch: TokenForest | PaddedRows) -> TokenOutputs:
        """Compute the log-probabilities of all completion tokens of a micro-batch.

        Raises:
            DataError: A completion has no prompt.
        """
        index_M, targets_M = predictors(batch)
        label_M: Tensor | None = None
        if isinstance(batch, TokenForest) and batch.ends is not None:
            index_M, targets_M, label_M = distinct_labels(index_M, targets_M)
        hidden_XD = self.hidden(batch, read_X=torch.unique(index_M)).flatten(0, -2)
        hidden_MD = hidden_XD.index_select(0, index_M.to(self.device, non_blocking=True))
        found = self.read(hidden_MD, targets_M)
        return found if label_M is None else found.gathered(label_M)

    def readings(self, forest: TokenForest) -> Readings:
        """Return the hidden states that predict completion tokens, each of these once.

        Equal tokens that follow the same one in several nodes, such as the first of completions,
        are several: each belongs to the part of its own completion.
        """
        index_M, place_M = completion_tokens(forest)
        index_X, place_X, label_M = distinct_labels(index_M, place_M)
        targets_X = forest.ids_T[place_X.to(forest.ids_T.device)].long()
        starts = [tree.starts for tree in forest.trees]
        lengths = [
            starts[end.tree][end.node] + forest.trees[end.tree].nodes[end.node].length - end.start
            for end in forest.ends_N
        ]
        return Readings(index_X, place_X, targets_X, label_M, lengths)

    def read(self, hidden_MD: Tensor, targets_M: Tensor) -> TokenOutputs:
        """Compute the log-probabilities of tokens from the hidden states that predict them."""
        hidden_MD, weight_VD = self._factors(hidden_MD)
        return token_logprobs(
            hidden_MD,
            targets_M.to(self.device, non_blocking=True),
            weight_VD,
            bias_V=self._bias,
            share=self._share,
            temperature=self.temperature,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            with_entropy=self.with_entropy,
        )

    def logprobs(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Compute log-probabilities of all completion tokens, float32 [M], without gradients.

        Dropout is disabled.
        """
        was_training, measures = self.training, self.with_entropy
        self.eval()
        self.with_entropy = False
        try:
            with torch.no_grad():
                return self(batch).logprobs_M  # type: ignore[no-any-return]
        finally:
            self.with_entropy = measures
            self.train(was_training)

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Compute log-probabilities at another temperature while the context is open."""
        usual, self.temperature = self.temperature, temperature or 1.0
        try:
            yield
        finally:
            self.temperature = usual

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Compute float32 logits `[X, V]` of hidden states, at temperature 1, without gradients."""
        if self.rounded_head_VD is None:
            hidden_XD, weight_VD = self._factors(hidden_XD)
        else:
            hidden_XD, weight_VD = hidden_XD.to(self.precision), self.rounded_head_VD
        is_plain = self.softcap is None and self.logit_scale == 1.0
        if is_plain and hidden_XD.dtype == weight_VD.dtype == torch.float32:
            # The layer itself is called, because a generator may have made its product faster.
            with torch.no_grad(), torch.autocast(hidden_XD.device.type, enabled=False):
                return self.head(hidden_XD)  # type: ignore[no-any-return]
        return all_logits(
            hidden_XD,
            weight_VD,
            bias_V=self._bias,
            share=self._share,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
        )

    def named_weights(self, *, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by the names that `from_pretrained` knows, with adapters merged.

        The values may be the tensors that the model trains, so copy values that you keep. If the
        model is sharded, each weight is gathered whole, so every rank must iterate to the end.

        Args:
            changing_only: Whether to yield only the modules that training changes, such as the
                attention of a layer, each with all its weights.
        """
        return saved_weights(self.causal_lm, changing_only=changing_only)

    @property
    def _share(self) -> VocabularyShare | None:
        weight = self.head.weight
        return VocabularyShare.of(weight) if isinstance(weight, DTensor) else None

    @property
    def _bias(self) -> Tensor | None:
        return None if self.head.bias is None else local(self.head.bias)

    def _factors(self, hidden_XD: Tensor) -> tuple[Tensor, Tensor]:
        # On a GPU, float32 products over a large vocabulary would take longer than the rest of the
        # model. So both factors are rounded to the decoder's precision there; sums and logits stay
        # float32.
        weight_VD = local(self.head.weight)
        if hidden_XD.is_cuda and self.precision.itemsize < 4:
            return hidden_XD.to(self.precision), weight_VD.to(self.precision)
        return hidden_XD, weight_VD


@contextmanager
def rounded_weights(model: PolicyModel) -> Iterator[None]:
    """Multiply with a copy of the linear weights, in the dtype that autocast would round them to.

    Autocast rounds a weight in every call of its layer. A decoding step multiplies every weight
    with a few rows, so that rounding from float32 moves four times the bytes of the product. The
    values are those of autocast, so completions do not change. The parameters themselves stay,
    because a checkpoint may be saved meanwhile. The copy ends with the context: training needs the
    memory, and changes the weights.

    Args:
        model: The policy. Nothing is rounded unless autocast lowers its precision, nor where its
            weights are sharded.
    """
    layers = _layers(model) if model.lowers_precision else []
    try:
        for layer in layers:
            layer.rounded = layer.weight.detach().to(model.precision)
            layer.__class__ = _RoundedLinear
        if model.lowers_precision and model.device.type != "cpu":
            model.rounded_head_VD = model.head.weight.detach().to(model.precision)
        yield
    finally:
        model.rounded_head_VD = None
        for layer in layers:
            layer.__class__ = nn.Linear
            layer.__dict__.pop("rounded", None)


def _layers(model: PolicyModel) -> list[nn.Linear]:
    return [
        layer
        for layer in model.causal_lm.modules()
        if type(layer) is nn.Linear
        and layer is not model.head
        and layer.weight.dtype == torch.float32
        and not isinstance(layer.weight, DTensor)
    ]


class _RoundedLinear(nn.Linear):
    rounded: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.rounded, self.bias)


# The faster of torch's two matrix libraries, MKL and oneDNN, for linear layers on CPUs.
#
# torch multiplies float32 matrices with MKL, which uses the widest vector instructions only on
# Intel's processors. On other processors that have these instructions, oneDNN takes half the time
# (docs/benchmarks.md). Its sums round differently, by about 1e-6 of their size. That is within the
# tolerance of sampling and of policy updates, but not of scores, so reward models keep MKL. The
# choice depends only on the processor and the sizes, never on a timing.

LARGE = 2**22
"""The number of multiplications from which a product with gradients is faster with oneDNN."""


@contextmanager
def fast_matmul(model: nn.Module) -> Iterator[None]:
    """Let a model multiply with oneDNN while the context is open, if that is faster on this CPU.

    This affects plain linear layers that compute in float32 on the CPU. Where gradients are needed,
    only large products use oneDNN.
    """
    # The compiler chooses the products of compiled layers, and does not know this operation.
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    uses_onednn = prefers_onednn() and not is_compiled
    layers = [m for m in model.modules() if type(m) is nn.Linear] if uses_onednn else []
    for layer in layers:
        layer.__class__ = _OneDnnLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


class _OneDnnLinear(nn.Linear):
    """A linear layer that computes float32 products on the CPU with oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        if (
            not input.dtype == self.weight.dtype == torch.float32
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        ):
            return super().forward(input)
        if not torch.is_grad_enabled() or not (input.requires_grad or self.weight.requires_grad):
            return _product(input, self.weight, self.bias)
        if input.numel() * self.out_features < LARGE:
            return super().forward(input)
        product: Tensor = _LinearProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class _LinearProduct(torch.autograd.Function):
    """Computes a linear layer with oneDNN, in the forward and the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = by_output.flatten(0, -2)
        by_input = _product(by_output, weight.T.contiguous()) if needs_input else None
        by_weight = None
        if needs_weight:
            by_weight = _product(rows.T.contiguous(), input.flatten(0, -2).T.contiguous())
        return by_input, by_weight, rows.sum(0) if needs_bias else None


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`, computed by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


@functools.cache
def prefers_onednn() -> bool:
    """Return whether this machine's processor multiplies faster with oneDNN than with MKL."""
    is_built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return (
        is_built_in
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _vendor() == "AuthenticAMD"
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def _vendor() -> str:
    """Return the name by which the processor identifies its vendor; empty if unknown."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    description = platform.processor()
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in description), "")


class Reference:
    """The reference policy of the KL divergence: the policy as it was before training."""

    def __init__(self, model: PolicyModel, *, leaves_adapters_out: bool = False) -> None:
        """Wrap the model that computes the reference policy.

        Args:
            model: A frozen model, or the policy itself if `leaves_adapters_out`.
            leaves_adapters_out: Whether the adapters of `model` are disabled while it computes.
        """
        self.model = model
        self._leaves_adapters_out = leaves_adapters_out
        if not leaves_adapters_out:
            model.requires_grad_(requires_grad=False)
            model.eval()

    @classmethod
    def of(cls, model: PolicyModel) -> Reference:
        """Return the reference of a policy whose training begins now.

        A policy with adapters is its own reference, with the adapters disabled, which needs no more
        memory. Otherwise the reference is a copy of the current weights.
        """
        if adapted_layers(model.causal_lm):
            return cls(model, leaves_adapters_out=True)
        twin = copy.deepcopy(model)
        for parameter in twin.parameters():
            parameter.grad = None
        return cls(twin)

    @property
    def path(self) -> Path:
        """The batch layout that the model reads: `forest` or `padded`."""
        return self.model.path

    def logprobs(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Compute log-probabilities of all completion tokens, float32 [M], without gradients."""
        if not self._leaves_adapters_out:
            return self.model.logprobs(batch)
        with without_adapters(self.model.causal_lm):
            return self.model.logprobs(batch)


def _logit_rules(causal_lm: Any) -> tuple[float, float | None]:
    # Returns the factor and the cap of the logits. transformers has no common name for them; the
    # check at load refuses models whose names this does not know.
    config = causal_lm.config.get_text_config()
    scale = 1.0
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:  # Granite divides by it, HyperCLOVA X multiplies
        is_factor = config.model_type.startswith("hyperclovax")
        scale = float(scaling) if is_factor else 1.0 / float(scaling)
    factor = getattr(causal_lm, "logit_scale", None)  # Cohere
    if isinstance(factor, int | float):
        scale *= factor
    scale *= getattr(config, "output_multiplier", None) or 1.0  # Muse
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return scale, None if softcap is None else float(softcap)
