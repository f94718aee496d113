"""Loads policies: any Hugging Face causal language model, checked before it is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laurel.errors import ConfigError, ModelError, setting_of
from laurel.models.forest.attention import register
from laurel.models.forest.outputs import predictors, whole
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.adapters import with_adapters
from laurel.models.loading.pretrained import (
    REWARD_HEADS,
    Probe,
    agree_on_padding,
    check_batches,
    compute_dtype,
    finalize_model,
    find_tokenizer,
    make_network,
    make_probe,
    num_positions,
    outputs_alone,
    own_attention,
    read_config,
    read_weights,
    refuse_large_tokenizer,
    refuse_missing,
    refuse_other_sizes,
    start_of,
    take_path,
)
from laurel.models.parallel.weights import refuse_unspreadable
from laurel.models.spec import ModelSpec

SHAPES = ((11, (5, 1, 8)), (1, (7,)))
"""The lengths that `make_probe` takes, of the check of a policy."""


@dataclass(slots=True, kw_only=True)
class LoadedPolicy:
    """A policy and its tokenizer, with remarks on loading for the user."""

    model: PolicyModel
    tokenizer: Any
    notes: list[str] = field(default_factory=list)
    """Remarks for the user: random weights, the padded path."""
    base_model: str = ""


def load_policy(
    spec: ModelSpec,
    *,
    seed: int,
    max_length: int,
    device: torch.device,
    texts: Iterable[str] = (),
    weights_dtype: torch.dtype = torch.float32,
    resume_from: Path | None = None,
    temperature: float = 1.0,
    mesh: DeviceMesh | None = None,
) -> LoadedPolicy:
    """Load a policy, or create one with random weights.

    Args:
        seed: The seed of adapters and of random weights.
        max_length: The maximum number of tokens of a prompt with its completion.
        texts: The texts on which a new tokenizer is trained if `spec.scratch` is set.
        weights_dtype: The dtype of the weights; float32 for training (master weights).
        resume_from: A checkpoint of the same run, whose tokenizer and weights are used.
        temperature: The sampling temperature, at which log-probabilities are computed.
        mesh: The mesh over which the model is sharded. All ranks then call this with the same
            arguments.

    Raises:
        ModelError: The model does not generate text, or is unsafe to load.
        ConfigError: The model cannot read texts of `max_length` tokens, or cannot be sharded over
            the mesh.
    """
    register()
    if mesh is not None:
        refuse_unspreadable(spec, mesh)
    base, notes = start_of(spec)
    is_random = spec.scratch is not None and resume_from is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        causal_lm, tokenizer = _fitted(spec, max_length, texts, weights_dtype, resume_from, mesh)
        path = take_path(causal_lm, spec, notes)
        if spec.lora is not None:
            causal_lm = with_adapters(causal_lm, spec.lora, resume_from, trains_head=False)
    model = PolicyModel(
        causal_lm,
        path=path,
        precision=compute_dtype(spec, weights_dtype),
        temperature=temperature,
    )
    finalize_model(model, spec, device, mesh, notes)
    if is_random:
        notes.append("the weights are new and random: the policy writes noise before training")
    return LoadedPolicy(
        model=model,
        tokenizer=tokenizer,
        notes=notes,
        base_model=base,
    )


def _fitted(
    spec: ModelSpec,
    max_length: int,
    texts: Iterable[str],
    weights_dtype: torch.dtype,
    resume_from: Path | None,
    mesh: DeviceMesh | None,
) -> tuple[Any, Any]:
    tokenizer = find_tokenizer(spec, texts, resume_from=resume_from, pad_may_end=True)
    source = spec.weights_from(resume_from)
    if source is None:
        from transformers import AutoModelForCausalLM

        causal_lm = make_network(AutoModelForCausalLM, spec, tokenizer, max_length)
    else:
        causal_lm = _load(spec, source, weights_dtype, mesh)
    name = source or "policy.scratch"
    is_causal = [m.is_causal for m in causal_lm.modules() if hasattr(m, "is_causal")]
    if causal_lm.config.is_encoder_decoder or not all(is_causal):
        raise ModelError(
            f"{setting_of('policy.model_name', name)}: {type(causal_lm).__name__} looks at later "
            "tokens, so it cannot write one after the other. A policy is a causal language model."
        )
    positions = num_positions(causal_lm.config)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"{setting_of('policy.max_total_sequence_length', max_length)}: {name} has "
            f"{positions:,} positions; set it no higher"
        )
    refuse_large_tokenizer(causal_lm, tokenizer)
    agree_on_padding(causal_lm, tokenizer, teaches_padding=True)
    return causal_lm, tokenizer


def _load(spec: ModelSpec, name: str, dtype: torch.dtype, mesh: DeviceMesh | None) -> Any:
    from transformers import AutoModelForCausalLM

    hf_config = read_config(spec, name)
    architectures: list[str] = hf_config.architectures or []
    if any(
        a.endswith(("ForSequenceClassification", "ForTokenClassification")) for a in architectures
    ):
        raise ModelError(_is_reward_model(name, architectures[0]))
    causal_lm, info = read_weights(
        AutoModelForCausalLM, spec, name, hf_config, dtype, may_be_empty=mesh is not None
    )
    refuse_other_sizes(name, info["mismatched_keys"])
    foreign = sorted(key for key in info["unexpected_keys"] if key.startswith(REWARD_HEADS))
    if foreign:
        raise ModelError(_is_reward_model(name, f"its weights hold {foreign[0]}"))
    head = causal_lm.get_output_embeddings()
    names = {f"{n}.weight" for n, module in causal_lm.named_modules() if module is head}
    lacking = sorted(names & set(info["missing_keys"]))
    if lacking:
        raise ModelError(
            f"{name}: the weights lack {lacking[0]}, the head that turns hidden states into words, "
            "and the configuration does not say that it is the embeddings' (tie_word_embeddings). "
            "It is a decoder without its head: name the language model it was taken from."
        )
    refuse_missing(name, info["missing_keys"])
    return causal_lm


def _is_reward_model(name: str, evidence: str) -> str:
    return (
        f"{setting_of('policy.model_name', name)} is a reward model or classifier ({evidence}), "
        "which gives scores and writes no text. A policy is a causal language model; to train "
        "against this reward model, name it in env.reward_model.model_name."
    )


def check_policy_paths(model: PolicyModel) -> float:
    """Check that the model computes a batch as Hugging Face's class computes single sequences.

    Log-probabilities and hidden states are compared, because the log-probabilities of an untrained
    head are all nearly equal.

    Returns:
        The largest relative difference.

    Raises:
        ModelError: The results differ, so training would compute wrong gradients.
    """
    probe = make_probe(model, SHAPES, seed=0)
    return check_batches(
        model, lambda: _largest_difference(model, probe), what="log-probability", role="policy"
    )


def _largest_difference(model: PolicyModel, probe: Probe) -> float | None:
    batch = probe.batch(model.path)
    logprobs_M = model(batch).logprobs_M.double()
    index_M, _ = predictors(batch)
    hidden_MD = model.hidden(batch).flatten(0, -2)[index_M.to(model.device)].double()
    with own_attention(model):
        alone = [
            _alone(model, ids, int(start))
            for ids, start in zip(probe.sequences_N, probe.rows.starts_N, strict=True)
        ]
    own_MD = torch.cat([hidden for hidden, _ in alone])
    own_M = torch.cat([logprobs for _, logprobs in alone])
    if not (own_MD.isfinite().all() and own_M.isfinite().all()):
        return None
    size_M = own_MD.norm(dim=1).clamp_min(1e-12)
    rows_V = whole(model.head.weight.detach().double().norm(dim=1))
    reach = rows_V.max() * model.logit_scale / model.temperature
    hidden = ((hidden_MD - own_MD).norm(dim=1) / size_M).max()
    logprobs = ((logprobs_M - own_M).abs() / (size_M * reach).clamp_min(1e-12)).max()
    return float(torch.maximum(hidden, logprobs))


def _alone(model: PolicyModel, ids_L: Tensor, start: int) -> tuple[Tensor, Tensor]:
    # Returns the hidden states that predict one completion, and its log-probabilities, both as
    # Hugging Face's class computes them.
    logits, hidden_LD = outputs_alone(model, ids_L)
    logits_LV = logits[0, start - 1 : -1].double() / model.temperature
    targets_L = ids_L[start:, None].to(model.device)
    logprobs_L = logits_LV.log_softmax(dim=-1).gather(1, targets_L)[:, 0]
    return hidden_LD[start - 1 : -1].double(), logprobs_L
