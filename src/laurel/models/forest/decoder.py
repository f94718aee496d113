"""Wraps Hugging Face models to read either layout of batches, and defines the reward model.

The layouts are token forests, packed rows in which completions share their prompt, and padded rows.
Policies, which compute log-probabilities, are in `models/forest/policy.py`.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.models.forest.attention import (
    PLAN_ARGUMENT,
    AttentionPlan,
    ForestPlan,
    as_computed,
)
from laurel.models.forest.parts import Readings, outputs_in_parts
from laurel.types import PaddedRows, TokenForest

Path = Literal["forest", "padded"]
Batch = TokenForest | PaddedRows | Callable[[], Any]


class Passes:
    """Keeps the passes of models apart from the capture of a CUDA graph in another thread.

    In its first passes a compiled layer measures its kernels, for which it waits for the whole
    device. While any thread captures, that fails, and it ends the capture.
    """

    def __init__(self) -> None:
        """Begin without a pass."""
        self._changed = threading.Condition()
        self._count = 0
        self._captures_in: int | None = None
        """The thread that captures."""

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Let no other thread capture while the context is open; wait for one that does."""
        mine = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._captures_in in (None, mine))
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1

    @contextmanager
    def kept_out(self) -> Iterator[bool]:
        """Let passes of other threads wait; yield False if one, or a capture, is under way."""
        with self._changed:
            is_alone = not self._count and self._captures_in is None
            if is_alone:
                self._captures_in = threading.get_ident()
        try:
            yield is_alone
        finally:
            with self._changed:
                if is_alone:
                    self._captures_in = None
                    self._changed.notify_all()


PASSES = Passes()
"""Those of this process."""


class Decoder(nn.Module):
    """A Hugging Face model that reads token forests (packed, with shared prompts) or padded rows.

    If the weights are float32, the layers below the head compute in `precision` by autocast, and in
    bfloat16 the residual stream between them is bfloat16, too; otherwise they compute in the dtype
    of the weights.
    """

    def __init__(self, *, path: Path, precision: torch.dtype) -> None:
        """Set the options of the decoder.

        Args:
            path: The layout of batches: `forest` (packed rows with shared prompts) or `padded`.
            precision: The dtype in which the layers compute, by autocast, if the weights are
                float32.
        """
        super().__init__()
        self.path: Path = path
        self.precision = precision
        self.mesh: DeviceMesh | None = None
        """The mesh over which the model is sharded; None: this process has the whole model."""
        self.gathered_dtype: torch.dtype | None = None
        """The dtype to which gathered weights of layers are rounded; None: they are not rounded."""
        self.skips_unread = True
        """Whether the last layer may skip tokens whose hidden states are not read. Ranks that
        divide a layer or its tokens compute all of them."""

    def __call__(self, batch: Batch) -> Any:
        """Compute the outputs of a micro-batch, while no other thread captures a CUDA graph.

        Args:
            batch: The inputs, in parts if they are larger than a pass; or a function that computes
                with the model, whose hooks, such as those that gather its weights, run around it.

        Returns:
            What `outputs` returns, or the function.
        """
        with PASSES.under_way():
            if isinstance(batch, TokenForest) and batch.is_in_parts:
                return outputs_in_parts(self, batch)
            return super().__call__(batch)

    def forward(self, batch: Batch) -> Any:
        """Compute what `__call__` describes, in one pass."""
        return batch() if callable(batch) else self.outputs(batch)

    @abstractmethod
    def outputs(self, batch: TokenForest | PaddedRows) -> Any:
        """Compute the outputs of a micro-batch in one pass."""

    @property
    @abstractmethod
    def network(self) -> Any:
        """The Hugging Face model, including its head."""

    @abstractmethod
    def readings(self, forest: TokenForest) -> Readings:
        """Return which hidden states of a forest the head reads."""

    @abstractmethod
    def read(self, hidden_XD: Tensor, targets_X: Tensor) -> Any:
        """Apply the head to hidden states, which predict the tokens `targets_X`."""

    @property
    def device(self) -> torch.device:
        """The device that computes.

        A sharded model may keep its weights on the host between uses.
        """
        if self.mesh is not None and self.mesh.device_type != "cpu":
            return torch.device(self.mesh.device_type, torch.cuda.current_device())
        return next(self.parameters()).device

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.parameters()).dtype

    @property
    def exact_dtype(self) -> torch.dtype:
        """The lowest precision to which weights are rounded inside `in_full_precision`.

        It is the dtype of the weights, unless a sharded model gathers them in a lower one. The
        tolerance of checks depends on it.
        """
        return self.gathered_dtype or self.weights_dtype

    @property
    def lowers_precision(self) -> bool:
        """Whether autocast computes with float32 weights in a lower precision."""
        return self.weights_dtype == torch.float32 and self.precision != torch.float32

    def without_gradients(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context without gradients; on a CPU, inference mode."""
        # In inference mode a sharded model could not write the weights that it gathers. What a GPU
        # compiles would have a third variant, beside those with and without gradients.
        is_plain = self.mesh is None and self.device.type == "cpu"
        return torch.inference_mode() if is_plain else torch.no_grad()

    @contextlib.contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Compute in the dtype of the weights, whatever `precision` is, while the context is open.

        Checks use this, because rounding to bfloat16 would hide the errors that they look for. If a
        sharded model gathers its weights in a lower dtype, they are still rounded to it.
        """
        precision, self.precision = self.precision, self.weights_dtype
        is_mixed = self.exact_dtype != self.weights_dtype
        try:
            wide = weights_as(self, self.weights_dtype) if is_mixed else contextlib.nullcontext()
            with uncompiled(self), wide:
                yield
        finally:
            self.precision = precision

    def hidden(self, batch: TokenForest | PaddedRows, *, read_X: Tensor | None = None) -> Tensor:
        """Compute the hidden states of tokens after the last norm.

        Args:
            read_X: int64, the indices in a forest of the tokens whose hidden states are read, each
                once; None for all. The hidden states of others may be wrong.

        Returns:
            `[T, D]` for a token forest, and `[N, L, D]` for padded rows.
        """
        with self.autocast():
            if isinstance(batch, TokenForest):
                plan = ForestPlan(batch.trees, read_X=read_X if self.skips_unread else None)
                ids_T = batch.ids_T.long()
                return self.hidden_of_row(ids_T, batch.positions_T, plan)
            body = self.network.base_model
            rows: Tensor = body(**self.padded_inputs(batch), use_cache=False).last_hidden_state
            return rows

    def hidden_of_row(self, ids_T: Tensor, positions_T: Tensor, plan: AttentionPlan) -> Tensor:
        """Compute the hidden states `[T, D]` of one row of tokens.

        The caller enables autocast, as `hidden` does.
        """
        with PASSES.under_way():
            hidden_1TD: Tensor = self.network.base_model(
                input_ids=ids_T[None].to(self.device, non_blocking=True),
                position_ids=positions_T[None].to(self.device, non_blocking=True),
                use_cache=False,
                **{PLAN_ARGUMENT: plan},
            ).last_hidden_state
        return hidden_1TD[0]

    def padded_inputs(self, rows: PaddedRows) -> dict[str, Tensor]:
        """Return the keyword arguments of transformers' models for padded rows."""
        column_L = torch.arange(rows.ids_NL.shape[1])
        mask_NL = column_L[None] < rows.lengths_N[:, None]
        return {
            "input_ids": rows.ids_NL.to(self.device, non_blocking=True),
            "attention_mask": mask_NL.long().to(self.device, non_blocking=True),
        }

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that autocasts float32 weights to a lower `precision`, if configured."""
        if not self.lowers_precision:
            return contextlib.nullcontext()
        # torch has one cache of casts for all threads, and any of them empties it: a CUDA graph of
        # a decoding step would go on reading what was in it. A pass uses each weight once anyway.
        return torch.autocast(self.device.type, dtype=self.precision, cache_enabled=False)


class RewardModel(Decoder):
    """A decoder with a reward head. All scores are computed here.

    The head always computes in float32, because the rounding noise of bfloat16 is as large as the
    differences that decide a comparison.
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
            classifier: A Hugging Face `...ForSequenceClassification`, or of a process reward model
                a `...ForTokenClassification`.
            head_name: The attribute of the linear head over the last hidden state; None for an
                encoder, which pools by itself and reads only padded rows.
        """
        super().__init__(path=path, precision=precision)
        self.classifier: Any = classifier
        self.head_name = head_name
        UnreadTokens.skip_in(classifier)
        if head_name is not None:  # an encoder goes on with norms of its embeddings
            round_residual_stream(classifier)

    @property
    def network(self) -> Any:
        """The Hugging Face model, including its head."""
        return self.classifier

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the head, K."""
        return int(self.classifier.config.num_labels)

    def outputs(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Score every completion of a micro-batch.

        Returns:
            float32 `[N, K]` (float64 if the weights are): K outputs of the head for each of the N
            completions, in the order of the batch; or for each token in the `reads` of the batch.
        """
        if self.head_name is None:
            assert isinstance(batch, PaddedRows)
            with self.autocast():
                logits_NK: Tensor = self.classifier(**self.padded_inputs(batch)).logits
            return logits_NK.float()
        return self.apply_head(self.last_hidden(batch))

    def last_hidden(self, batch: TokenForest | PaddedRows) -> Tensor:
        """Return the hidden state of every token that is read: the last of every completion.

        If the batch has `reads`, these are the tokens instead. The result is `[N, D]`.
        """
        if isinstance(batch, TokenForest):
            read_N = _read_tokens(batch)
            # Completions may share a step, or be equal, and so share the token.
            is_distinct = batch.reads is None and batch.ends is None
            distinct_X = read_N if is_distinct else torch.unique(read_N)
            hidden_TD = self.hidden(batch, read_X=distinct_X)
            return hidden_TD[read_N.to(hidden_TD.device, non_blocking=True)]
        hidden = self.hidden(batch)
        if batch.reads is not None:
            place_N2 = torch.tensor(batch.reads, dtype=torch.int64, device=self.device)
            row_N, column_N = place_N2.view(-1, 2).unbind(1)
            return hidden[row_N, column_N]
        index_N = torch.arange(batch.num_completions, device=self.device)
        return hidden[index_N, batch.lengths_N.to(self.device, non_blocking=True) - 1]

    def readings(self, forest: TokenForest) -> Readings:
        """Return the hidden states that the head reads, each once."""
        read_N = _read_tokens(forest)
        read_X, label_N = torch.unique(read_N, return_inverse=True)
        return Readings(read_X, read_X, read_X, label_N, [1] * len(read_N))

    def read(self, hidden_XD: Tensor, targets_X: Tensor) -> Tensor:
        """Compute the scores of hidden states; a reward head predicts no tokens."""
        return self.apply_head(hidden_XD)

    def apply_head(self, hidden_ND: Tensor) -> Tensor:
        """Apply the head to hidden states `[N, D]`, and return the scores `[N, K]`."""
        head = getattr(self.classifier, self.head_name or "")
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        with torch.autocast(self.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            return nn.functional.linear(hidden_ND.to(dtype), head.weight.to(dtype), bias)


def _read_tokens(forest: TokenForest) -> Tensor:
    reads = forest.last_N if forest.reads is None else forest.reads
    return torch.tensor(reads, dtype=torch.int64)


# The residual stream.


def round_residual_stream(network: Any) -> None:
    """Keep the residual stream of a Hugging Face decoder in bfloat16 where autocast computes in it.

    Autocast leaves embeddings in float32, and with them the sums, norms and rotary positions of all
    layers, and casts the input of each product anew. So the embeddings are rounded once, and a norm
    in a layer, which computes in float32 inside, returns the dtype that it was given. The last norm
    gives float32 to the head. In float32 and in float16, whose range is too small for the streams
    of some models, nothing changes.
    """
    layers = getattr(network.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or hasattr(network, "rounds_residual_stream"):
        return
    network.rounds_residual_stream = True  # a copy of it does, too
    network.get_input_embeddings().register_forward_hook(_round_embeddings)
    for norm in filter(_is_norm, layers.modules()):
        norm.register_forward_hook(_keep_dtype)
    for norm in filter(_is_norm, network.base_model.children()):
        norm.register_forward_pre_hook(_widen_hidden)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 1


def _round_embeddings(_: nn.Module, _given: Any, made: Tensor) -> Tensor:
    (rounded,) = as_computed(made)
    return rounded if rounded.dtype == torch.bfloat16 else made


def _keep_dtype(_: nn.Module, given: tuple[Any, ...], made: Any) -> Any:
    is_rounded = given and isinstance(given[0], Tensor) and given[0].dtype == torch.bfloat16
    return made.to(torch.bfloat16) if is_rounded and isinstance(made, Tensor) else None


def _widen_hidden(norm: Any, given: tuple[Any, ...]) -> Any:
    # A model whose own weights are bfloat16 stays as it is.
    dtype = torch.promote_types(given[0].dtype, norm.weight.dtype)
    return (given[0].to(dtype), *given[1:])


# The last layer of a decoder, for the tokens whose hidden states are read.


class UnreadTokens:
    """Lets the last layer of a decoder skip the tokens whose hidden states nobody reads.

    Other tokens attend to the keys and values of all tokens. But queries, the projection of the
    attention's output, and the feed-forward block serve only the token that they are computed for.
    They compute the tokens of `ForestPlan.read_X` alone and give zeros for the others, which
    changes neither the hidden states that are read nor the gradients.
    """

    def __init__(self) -> None:
        self._read_X: Tensor | None = None
        self._num_tokens = 0

    @classmethod
    def skip_in(cls, network: Any) -> None:
        """Skip unread tokens in every forward pass of a Hugging Face model with a `ForestPlan`.

        A model whose last layer has other names than those of Llama computes all tokens.
        """
        layers = getattr(network.base_model, "layers", None)
        layer: Any = layers[-1] if isinstance(layers, nn.ModuleList) and layers else None
        attention, feed_forward = (getattr(layer, name, None) for name in ("self_attn", "mlp"))
        if not (isinstance(attention, nn.Module) and isinstance(feed_forward, nn.Module)):
            return
        if hasattr(layer, "unread_tokens"):  # wrapped before, or a copy of such a model
            return
        layer.unread_tokens = skipping = cls()
        # Attention comes first. Hooks of the layer itself do not run where a backward pass
        # recomputes it, those of its parts do.
        attention.register_forward_pre_hook(skipping._begin, with_kwargs=True)
        products = (getattr(attention, name, None) for name in ("q_proj", "o_proj"))
        for module in (*products, feed_forward):
            if isinstance(module, nn.Module):
                module.register_forward_pre_hook(skipping._take)
                module.register_forward_hook(skipping._put)
        feed_forward.register_forward_hook(skipping._end)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plan = kwargs.get(PLAN_ARGUMENT)
        self._read_X = None
        if isinstance(plan, ForestPlan) and plan.read_X is not None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._read_X = plan.read_X.to(hidden.device, non_blocking=True)

    def _end(self, *_: Any) -> None:
        self._read_X = None

    def _take(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._read_X is None:
            return None
        self._num_tokens = args[0].shape[1]
        return (args[0].index_select(1, self._read_X), *args[1:])

    def _put(self, _: nn.Module, _args: Any, output: Any) -> Any:
        if self._read_X is None:
            return None
        # A mixture of experts may return the logits of its router too.
        found, *rest = output if isinstance(output, tuple) else (output,)
        rows = found.new_zeros(found.shape[0], self._num_tokens, *found.shape[2:])
        rows = rows.index_copy(1, self._read_X, found)
        return (rows, *rest) if isinstance(output, tuple) else rows


# A model computed in a higher precision than its weights are held, or gathered, in.


@contextmanager
def weights_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert the weights of each module to another dtype while the module computes.

    Converting to a wider dtype loses nothing, so the outputs are exact for these weights. Only the
    module that computes at the moment holds its weights twice.
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


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Compute without the compiled layers while the context is open.

    Checks compute in other precisions, which would each be compiled for one pass.
    """
    layers = [m for m in model.modules() if m._compiled_call_impl is not None]
    compiled = [layer._compiled_call_impl for layer in layers]
    for layer in layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        for layer, call in zip(layers, compiled, strict=True):
            layer._compiled_call_impl = call


# Offloading models and their optimizer to the host while others need the memory of the device.


class Offloader:
    """Offloads a learner's models and optimizer from the device to the host; no-op on CPUs."""

    def __init__(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Remember the models and the optimizer that `sleep` offloads; nothing is moved yet."""
        self._models = models
        self._optimizer = optimizer
        self._homes: list[tuple[nn.Module, torch.device]] = []
        self._states: list[tuple[dict[str, Any], str, torch.device]] = []

    def sleep(self) -> None:
        """Move models and optimizer state to the host, and drop the gradients."""
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
        """Move models and optimizer state back to the devices on which they were."""
        while self._homes:
            model, device = self._homes.pop()
            model.to(device)
        while self._states:
            state, name, device = self._states.pop()
            state[name] = state[name].to(device)


def adapted_layers(network: nn.Module) -> dict[str, Any]:
    """Return the layers that have adapters, by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer")
    }
