"""Provides the steps of loading that reward models and policies share, and the check of both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.config.policy import ScratchConfig, TokenizerConfig
from laurel.errors import ConfigError, ModelError, key_of, setting_of
from laurel.models.forest.attention import FOREST
from laurel.models.forest.decoder import Decoder, Path
from laurel.models.parallel.tensor import (
    decoder_layers,
    tensor_plan,
    token_styles,
    vocabulary_layers,
)
from laurel.models.parallel.weights import empty_network, is_empty, shard_model
from laurel.models.spec import ModelSpec
from laurel.models.tokenizer import CHATML, first_line, load_tokenizer, settle_template
from laurel.observe.hub import check_fetchable
from laurel.planning.memory import ModelShape
from laurel.types import PaddedRows, Span, TokenForest, Tree

REWARD_HEADS = ("score.", "classifier.")
"""The prefixes of the weights of reward heads, in decoders and in encoders."""
PLAIN_ATTENTION = {"full_attention", "sliding_attention"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def start_of(spec: ModelSpec) -> tuple[str, list[str]]:
    """Return the name of the model that training starts from, and remarks for the user.

    If `spec.scratch` asks for random weights, the name is `nothing (<architecture>)`, and a remark
    warns if `spec` also names a model.
    """
    if spec.scratch is None:
        return str(spec.name), []
    notes = []
    if spec.name is not None:
        notes.append(
            f"warning: {setting_of('policy.model_name', spec.name)} is not loaded: "
            f"{key_of('policy.scratch')} makes a new model of random weights. To train the named "
            "one, take it out: '~policy.scratch'"
        )
    return f"nothing ({spec.scratch.architecture})", notes


def find_tokenizer(
    spec: ModelSpec,
    texts: Iterable[str] = (),
    *,
    resume_from: os.PathLike[str] | None = None,
    pad_may_end: bool = False,
    notes: list[str] | None = None,
) -> Any:
    """Return the tokenizer of a model, with its chat template and padding token set.

    The tokenizer is that of the checkpoint `resume_from` if there is one. Otherwise, if
    `spec.scratch` is set, it is trained on `texts`; else it is that of the model.

    `pad_may_end` allows a loaded tokenizer to pad with its end-of-sequence token. A checkpoint's
    keeps its padding token; `notes` receives a remark if another one is picked.

    Raises:
        ModelError: `load_tokenizer` cannot load the tokenizer.
    """
    if spec.scratch is not None and resume_from is None:
        tokenizer = train_tokenizer(texts, vocab_size=spec.scratch.vocab_size)
        settle_template(tokenizer, spec.tokenizer.chat_template, day=spec.tokenizer.date)
        return tokenizer
    return load_tokenizer(
        spec.tokenizer if resume_from is None else TokenizerConfig(pad_token=None),
        model_name=str(resume_from or spec.files),
        trust_remote_code=spec.trust_remote_code,
        pad_may_end=pad_may_end,
        notes=notes,
    )


def make_network(
    factory: Any, spec: ModelSpec, tokenizer: Any, max_length: int, **special: Any
) -> Any:
    """Create a small network with random weights for a tokenizer.

    Args:
        spec: The specification of the model; `scratch` is set.
        tokenizer: The tokenizer, which gives the size of the vocabulary.
        max_length: The number of positions.
        special: Further settings of the network's configuration.

    Raises:
        ConfigError: transformers cannot create the model that `scratch` describes.
    """
    assert spec.scratch is not None
    hf_config = scratch_config(spec.scratch, tokenizer, max_length=max_length)
    for key, value in special.items():
        setattr(hf_config, key, value)
    try:
        return factory.from_config(hf_config, dtype=torch.float32)
    except ValueError as error:
        kind = "classifier" if "num_labels" in special else "language model"
        raise ConfigError(
            f"{key_of('policy.scratch')}: no {kind} can be made of this description: "
            f"{first_line(error)}"
        ) from error


def read_config(spec: ModelSpec, name: str) -> Any:
    """Read the configuration of a model, and apply the overrides of the specification.

    Raises:
        ModelError: The model has no readable configuration.
        ConfigError: `hf_config_overrides` names a setting that the configuration does not have.
    """
    from transformers import AutoConfig

    if not os.path.exists(name):
        check_fetchable(name, key="policy.model_name")
    try:
        hf_config = AutoConfig.from_pretrained(name, **_source(spec))
    except (OSError, ValueError) as error:
        raise ModelError(_not_loadable(name, error)) from error
    for key, value in spec.config_overrides.items():
        if not hasattr(hf_config, key):
            raise ConfigError(
                f"{key_of('policy.hf_config_overrides')}.{key}: {name} has no such setting"
            )
        setattr(hf_config, key, value)
    return hf_config


def read_weights(
    factory: Any,
    spec: ModelSpec,
    name: str,
    hf_config: Any,
    dtype: torch.dtype,
    *,
    may_be_empty: bool = False,
) -> tuple[Any, Any]:
    """Load a network; return it and transformers' report on its weights.

    The report lists missing, unexpected and mismatched weights.

    Args:
        may_be_empty: Whether the network may be one of `empty_network`, which has no memory for
            its weights.

    Raises:
        ModelError: The weights cannot be read, or `spec` does not allow reading them.
    """
    if may_be_empty:
        found = empty_network(factory, spec, name, hf_config, dtype)
        if found is not None:
            return found
    try:
        network, info = factory.from_pretrained(
            name,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True if spec.safetensors_only else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **_source(spec),
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(_not_loadable(name, error)) from error
    return network, info


def refuse_other_sizes(name: str, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Check that the weights in the files of a model have the sizes that its configuration implies.

    Args:
        mismatched: The name and both sizes of each mismatched weight.

    Raises:
        ModelError: There is a mismatched weight; the message names the first.
    """
    for key, found, expected in sorted(mismatched, key=lambda entry: entry[0]):
        raise ModelError(
            f"{name}: {key} is {list(found)} in the weights and {list(expected)} by the "
            "configuration: they do not belong together (config.json, "
            f"{key_of('policy.hf_config_overrides')})"
        )


def refuse_missing(name: str, missing: Iterable[str]) -> None:
    """Check that the files of model `name` contain all weights.

    Raises:
        ModelError: `missing` is not empty; the message names the first few weights.
    """
    names = sorted(missing)
    if names:
        raise ModelError(
            f"{name}: the weights lack {', '.join(names[:5])}"
            f"{' ...' if len(names) > 5 else ''}, which would be left random. "
            "The directory is not a complete model of the architecture it names."
        )


def _source(spec: ModelSpec) -> dict[str, Any]:
    return {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}


def _not_loadable(name: str, error: Exception) -> str:
    first = first_line(error)
    hint = ""
    if "safetensors" in str(error):
        hint = (
            " Pickled weights can run code when they are loaded: convert them to safetensors, or "
            f"set {key_of('policy.safetensors_only')}=false if you trust them."
        )
    elif "trust_remote_code" in str(error):
        hint = (
            f" It brings Python code: read it, then set {key_of('policy.trust_remote_code')}=true."
        )
    elif not os.path.exists(name):
        hint = " It is no local directory; a hub name needs the network and, where gated, a login."
    return f"{setting_of('policy.model_name', name)} cannot be loaded: {first}{hint}"


def refuse_large_tokenizer(network: Any, tokenizer: Any) -> None:
    """Check that the network has an embedding for every token of the tokenizer.

    Raises:
        ModelError: The tokenizer has more tokens.
    """
    size = network.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model embeds {size}: they do not "
            f"belong together ({key_of('policy.tokenizer.name')})"
        )


def agree_on_padding(network: Any, tokenizer: Any, *, teaches_padding: bool) -> None:
    """Set the padding token of a network to that of its tokenizer.

    Hugging Face's own reward heads use the padding token to find the last token of a text.

    Args:
        network: The network, whose configuration and embeddings are changed.
        tokenizer: The tokenizer, which is not changed.
        teaches_padding: Whether the embedding of the padding token is trained; False: it gets no
            gradient. By default transformers decides by the configuration with which the network is
            created, so a resumed run might differ.
    """
    for hf_config in (network.config, network.config.get_text_config()):
        hf_config.pad_token_id = tokenizer.pad_token_id
    embeddings = network.get_input_embeddings()
    embeddings.padding_idx = None if teaches_padding else tokenizer.pad_token_id


def compute_dtype(spec: ModelSpec, weights_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a model computes.

    For float32 weights this is the configured one, for others that of the weights.
    """
    return DTYPES[spec.precision] if weights_dtype == torch.float32 else weights_dtype


def finalize_model(
    model: Decoder,
    spec: ModelSpec,
    device: torch.device,
    mesh: DeviceMesh | None,
    notes: list[str],
) -> None:
    """Move a model to its device, or shard it over a mesh if there is one, and compile its layers.

    Activation checkpointing is enabled if `spec` asks for it.

    Args:
        model: The model, whose weights are loaded.
        mesh: The mesh over which the model is sharded; None: this process has the whole model.
        notes: Receives whether the layers are compiled, and the reason if they cannot be.
    """
    _place(model, spec, device, mesh)
    if chooses_to_compile(spec.compile, device, is_sharded=mesh is not None):
        from laurel.models.forest.compiled import compile_layers

        reason = compile_layers(model)
        notes.append(
            "the first steps take longer, because they compile the layers"
            if reason is None
            else f"{key_of('policy.compile')}: the layers are not compiled, because {reason}"
        )


def chooses_to_compile(
    asked: Literal["auto"] | bool, device: torch.device, *, is_sharded: bool
) -> bool:
    """Return whether the layers of a model on this device are compiled.

    `auto` compiles on GPUs where torch's compiler finds what it needs: Triton and a C compiler. It
    does not compile on CPUs, nor sharded models, which no GPU has tried.
    """
    if asked != "auto":
        return asked
    is_known = device.type == "cuda" and not is_sharded
    return is_known and _has_triton() and any(map(shutil.which, ("cc", "gcc")))


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return bool(has_triton())


def _place(model: Decoder, spec: ModelSpec, device: torch.device, mesh: DeviceMesh | None) -> None:
    network = model.network
    if spec.activation_checkpointing:
        recompute_activations(network)
    if mesh is not None:
        if not is_empty(network):
            _leave_file(network)
        shard_model(model, spec, mesh, device)
        return
    network.to(device=device)
    if device.type == "cpu":
        _leave_file(network)


def recompute_activations(network: Any) -> None:
    """Let each layer recompute its activations in the backward pass instead of storing them.

    Raises:
        ConfigError: The architecture does not support activation checkpointing.
    """
    enable = getattr(network, "activation_checkpointing_enable", None)
    if enable is None:  # before transformers 5.23
        enable = network.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"{key_of('policy.dtensor_cfg.activation_checkpointing')}: {error}"
        ) from error


def _leave_file(network: nn.Module) -> None:
    # In the mapped file weights lie at any multiple of 8 bytes, and the last bits of a product
    # depend on the alignment of its factors: a resumed run would drift from the original. Also, a
    # checkpoint that is deleted or replaced meanwhile must not change the model.
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone()


def take_path(
    network: Any, spec: ModelSpec, notes: list[str], *, pools_itself: bool = False
) -> Path:
    """Choose the layout of batches, and prepare the network for it.

    Args:
        notes: Receives the reason if the network cannot read token forests.
        pools_itself: Whether the network itself chooses the token whose hidden state is scored; it
            then needs padded rows.

    Returns:
        `forest` or `padded`.
    """
    reason = _why_padded(network, spec, pools_itself=pools_itself)
    if reason is not None:
        notes.append(f"padded path: {reason}")
        return "padded"
    network.set_attn_implementation(FOREST)
    return "forest"


def _why_padded(network: Any, spec: ModelSpec, *, pools_itself: bool) -> str | None:
    if not spec.reads_forests:
        return "policy.sequence_packing.enabled is false"
    kind = type(network).__name__
    if pools_itself:
        return f"{kind} pools by itself"
    if not getattr(network, "_supports_attention_backend", False):
        return f"{kind} does not take an attention implementation"
    layer_types = set(getattr(network.config.get_text_config(), "layer_types", None) or ())
    if layer_types - PLAIN_ATTENTION:
        return f"{kind} has layers of type {', '.join(sorted(layer_types - PLAIN_ATTENTION))}"
    causal = [module.is_causal for module in network.modules() if hasattr(module, "is_causal")]
    if not causal or not all(causal):
        return f"{kind} looks at later tokens"
    return None


def num_positions(hf_config: Any) -> int | None:
    """Return the maximum number of positions by a configuration; None if there is no limit.

    Rotary embeddings of type `longrope` (Phi-3) change for a whole batch as soon as one text is
    longer than the original training length. The output for a text must not depend on the rest of
    its batch, so the limit of such models is that length.
    """
    hf_config = hf_config.get_text_config()
    positions: int | None = getattr(hf_config, "max_position_embeddings", None)
    rotary = getattr(hf_config, "rope_parameters", None) or {}
    by_layer_type = [entry for entry in rotary.values() if isinstance(entry, dict)]
    for parameters in by_layer_type or [rotary]:
        if parameters.get("rope_type") == "longrope" and positions is not None:
            positions = min(positions, parameters["original_max_position_embeddings"])
    return positions


# The shape of a Hugging Face model, read from its configuration; no weight is loaded.


def read_shape(spec: ModelSpec, *, has_language_head: bool) -> ModelShape:
    """Read the sizes of a model from its configuration; no weights are read.

    Args:
        spec: The specification of the model. Its parallel plan decides how ranks split its layers.
        has_language_head: Whether the model is a language model; otherwise it is a reward model,
            whose head has one row.

    Raises:
        ModelError: There is no configuration, or the model is not a decoder of a known form.
    """
    hf_config = read_config(spec, spec.files)
    text_config = hf_config.get_text_config()
    network = _on_meta(hf_config, spec, has_language_head=has_language_head)
    try:
        _, layers = decoder_layers(network)
    except ConfigError as error:
        raise ModelError(f"{spec.name}: {error}") from error
    heads = int(text_config.num_attention_heads)
    hidden = int(text_config.hidden_size)
    names = {key.rsplit(".", 1)[-1] for key, _ in network.named_modules()}
    # A plan for one rank is refused for the same reasons as one for any number of ranks.
    refusal: str | None = None
    try:
        splits = tensor_plan(network, 1, spec.parallel_plan)
        if spec.sequence_parallel:
            token_styles(network, splits)
    except ConfigError as error:
        refusal = str(error)
    return ModelShape(
        hidden_size=hidden,
        num_layers=len(layers),
        intermediate_size=int(getattr(text_config, "intermediate_size", None) or 4 * hidden),
        num_heads=heads,
        num_kv_heads=int(getattr(text_config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text_config, "head_dim", None) or hidden // heads),
        vocab_size=int(text_config.vocab_size),
        num_parameters=_count(network),
        layer_parameters=max(_count(layer) for layer in layers),
        normalises_heads="q_norm" in names,
        divides_vocabulary=len(vocabulary_layers(network, 1)) == (2 if has_language_head else 1),
        refuses_tensor_parallel=refusal,
    )


def count_parameters(spec: ModelSpec) -> int:
    """Count the parameters of a causal language model; 0 for anything else, which loading refuses.

    Raises:
        ModelError: The model has no readable configuration.
    """
    hf_config = read_config(spec, spec.files)
    try:
        return _count(_on_meta(hf_config, spec, has_language_head=True))
    except ModelError:
        return 0


def _on_meta(hf_config: Any, spec: ModelSpec, *, has_language_head: bool) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    factory: Any = AutoModelForCausalLM
    if not has_language_head:
        factory = AutoModelForSequenceClassification
        hf_config.num_labels = 1
    with torch.device("meta"):
        try:
            return factory.from_config(hf_config, trust_remote_code=spec.trust_remote_code)
        except ValueError as error:
            kind = "language model" if has_language_head else "reward model"
            raise ModelError(
                f"no {kind} can be made of {type(hf_config).__name__}: transformers has no such "
                "class for it. Name a model that is one, or was made from one"
            ) from error


def _count(module: Any) -> int:
    return int(sum(parameter.numel() for parameter in module.parameters()))


# Small new models: a byte-level BPE tokenizer of the training texts, and a random decoder. They
# serve demos, tests and training from scratch, where no model is loaded.

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer with the tokens and the template of ChatML.

    Args:
        vocab_size: The size of the vocabulary, including the 256 bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def scratch_config(config: ScratchConfig, tokenizer: Any, *, max_length: int) -> Any:
    """Return the Hugging Face configuration of a small model with random weights.

    Raises:
        ConfigError: transformers does not know the architecture or a key.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    if config.architecture not in CONFIG_MAPPING:
        known = "qwen2, qwen3, llama, mistral, gemma, gemma2, gemma3_text, phi, phi3, olmo2"
        raise ConfigError(
            f"{setting_of('policy.scratch.architecture', repr(config.architecture))} is no "
            "model_type of transformers;"
            f" common ones: {known}"
        )
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.hidden_size // config.num_heads,
        "intermediate_size": 4 * config.hidden_size,
        "max_position_embeddings": max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    known_keys = AutoConfig.for_model(config.architecture)
    for key in config.config_overrides:
        if not hasattr(known_keys, key):
            near = get_close_matches(key, vars(known_keys), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{key_of('policy.scratch.config_overrides')}.{key}: {config.architecture} has no "
                "such "
                f"setting{hint}"
            )
    return AutoConfig.for_model(config.architecture, **{**values, **config.config_overrides})


# A small batch for which every loaded model must give the results of its sequences one by one.

TOLERANCE = 1e-4
"""The allowed relative difference between hidden states in a batch and alone.

Rounding in float32 gives about 1e-6. One key too many, or a position wrong by one, gives at least
1e-3, even in an untrained model."""
LOW_PRECISION_TOLERANCE = 0.1
"""The `TOLERANCE` of bfloat16 and float16 weights, whose rounding gives a few hundredths."""

WINDOW = 6
"""The sliding window during the check, which is shorter than the sequences of the check."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """The same random sequences as a token forest, as padded rows, and one by one.

    A model is correct if its outputs for the three agree.
    """

    forest: TokenForest
    rows: PaddedRows
    sequences_N: tuple[Tensor, ...]
    """The sequences, each int64 [L]."""

    def batch(self, path: Path) -> TokenForest | PaddedRows:
        """Return the batch of all sequences: the token forest or the padded rows."""
        return self.forest if path == "forest" else self.rows


def make_probe(model: Decoder, shapes: Sequence[tuple[int, Sequence[int]]], *, seed: int) -> Probe:
    """Return random sequences to check a model; no token is the padding token.

    Args:
        shapes: For each prompt, its length, and the lengths of its completions, of which every
            second goes on from the one before it: so the tree has three levels.
    """
    pad_id = int(model.network.config.get_text_config().pad_token_id or 0)
    num_tokens = model.network.get_input_embeddings().num_embeddings
    total = sum(trunk + sum(branches) for trunk, branches in shapes)
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(0, num_tokens - 1, (total,), generator=generator)
    ids_T += ids_T >= pad_id
    trees, sequences, starts, end = [], [], [], 0
    for trunk_length, branch_lengths in shapes:
        edges = list(accumulate((trunk_length, *branch_lengths), initial=end))
        nodes = tuple(map(Span, edges, edges[1:]))
        parents = (-1, *(i if i % 2 else 0 for i in range(len(branch_lengths))))
        tree, end = Tree(nodes, parents), edges[-1]
        for node in range(1, len(nodes)):
            path = [ids_T[slice(*nodes[above])] for above in tree.path(node)]
            sequences.append(torch.cat(path))
            starts.append(trunk_length)
        trees.append(tree)
    rows = PaddedRows(
        ids_NL=torch.nn.utils.rnn.pad_sequence(
            sequences, batch_first=True, padding_value=float(pad_id)
        ),
        lengths_N=torch.tensor([len(ids) for ids in sequences]),
        starts_N=torch.tensor(starts),
    )
    forest = TokenForest(ids_T=ids_T.int(), trees=tuple(trees))
    return Probe(forest=forest, rows=rows, sequences_N=tuple(sequences))


def check_batches(
    model: Decoder, difference: Callable[[], float | None], *, what: str, role: str
) -> float:
    """Check that a model computes a batch as it computes single sequences.

    The difference is measured in full precision, without dropout, and with sliding windows that are
    shorter than the sequences, so that wrong windows are found too.

    Args:
        model: The model, whose settings are restored afterwards.
        difference: Returns the relative difference between the results of a batch and of single
            sequences; None if the latter are not finite.
        what: The name of the model's output, for error messages.

    Returns:
        The difference.

    Raises:
        ModelError: The difference is too large, or the model cannot compute a batch.
    """
    kind = type(model.network).__name__
    was_training, dtype = model.training, model.weights_dtype
    remedy = f"It cannot be used as a {role}; please report it."
    if model.path == "forest":
        remedy = (
            "This architecture needs the padded path: set "
            f"{key_of('policy.sequence_packing.enabled')}=false, "
            "and please report the model."
        )
    model.eval()
    try:
        with model.without_gradients(), model.in_full_precision(), _narrow_windows(model):
            found = difference()
    except (TypeError, ModelError) as error:
        raise ModelError(f"{kind} cannot be given a batch ({error}). {remedy}") from error
    finally:
        model.train(was_training)
    if found is None:
        raise ModelError(
            f"{kind} gives {what}s that are NaN or infinite: its weights are damaged, or its "
            f"numbers leave the range of {str(dtype).removeprefix('torch.')}"
        )
    tolerance = LOW_PRECISION_TOLERANCE if dtype.itemsize < 4 else TOLERANCE
    if not found <= tolerance:
        raise ModelError(
            f"{kind} gives a conversation another {what} in a batch than alone (relative "
            f"difference {found:.3g}, allowed {tolerance:.3g}). {remedy}"
        )
    return found


def logits_alone(model: Decoder, ids_L: Tensor) -> Tensor:
    """Return the logits of one sequence as transformers' model computes them."""
    logits: Tensor = model.network(**_inputs_alone(model, ids_L)).logits
    return logits


def outputs_alone(model: Decoder, ids_L: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one sequence as transformers' model does, in one pass.

    Returns:
        Its logits, and the hidden states `[L, D]` from which the head has computed them.
    """
    base, seen = model.network.base_model, list[Tensor]()
    hook = base.register_forward_hook(lambda module, given, outputs: seen.append(outputs[0]))
    try:
        logits = logits_alone(model, ids_L)
    finally:
        hook.remove()
    if not seen:  # a class that calls the layers of its base model by itself
        seen.append(base(**_inputs_alone(model, ids_L)).last_hidden_state)
    return logits, seen[-1][0]


def _inputs_alone(model: Decoder, ids_L: Tensor) -> dict[str, Tensor]:
    ids_1L = ids_L[None].to(model.device)
    return {"input_ids": ids_1L, "attention_mask": torch.ones_like(ids_1L)}


@contextmanager
def own_attention(model: Decoder) -> Iterator[None]:
    """Let a model use the eager attention of transformers while the context is open.

    Models that read token forests otherwise use Laurel's attention.
    """
    implementation = model.network.config._attn_implementation
    if model.path == "forest":
        model.network.set_attn_implementation("eager")
    try:
        yield
    finally:
        if model.path == "forest":
            model.network.set_attn_implementation(implementation)


@contextmanager
def _narrow_windows(model: Decoder) -> Iterator[None]:
    # A model that narrows only its masks, and does not pass the window to its attention, would
    # otherwise pass, and be wrong on the first text longer than its window.
    holders: list[Any] = [model.network.config.get_text_config(), *model.network.modules()]
    wide = [(h, vars(h)["sliding_window"]) for h in holders if "sliding_window" in vars(h)]
    wide = [(holder, window) for holder, window in wide if type(window) is int and window > WINDOW]
    try:
        if model.path == "forest":
            for holder, _ in wide:
                holder.sliding_window = WINDOW
        yield
    finally:
        for holder, window in wide:
            holder.sliding_window = window
