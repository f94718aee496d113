"""Loads reward models from any Hugging Face decoder or classifier, and checks them before use."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laurel.errors import ConfigError, DataError, ModelError, key_of
from laurel.models.forest.attention import register
from laurel.models.forest.decoder import RewardModel
from laurel.models.loading.adapters import with_adapters
from laurel.models.loading.pretrained import (
    REWARD_HEADS,
    Probe,
    agree_on_padding,
    check_batches,
    compute_dtype,
    finalize_model,
    find_tokenizer,
    inputs_alone,
    make_network,
    make_probe,
    num_positions,
    own_attention,
    read_config,
    read_weights,
    refuse_large_tokenizer,
    refuse_missing,
    refuse_other_sizes,
    start_of,
    take_path,
)
from laurel.models.loading.weight_names import HEAD_FILES, weight_names
from laurel.models.parallel.weights import refuse_unspreadable
from laurel.models.scoring import (
    FILE_NAME,
    FORMAT,
    OLD_CONTENTS,
    ScoringContract,
    ScoringRules,
    StepRules,
    check_rendering,
)
from laurel.models.spec import ModelSpec
from laurel.models.tokenizer import first_line, render, settle_padding
from laurel.types import Message

# Reward models of OpenRLHF, LLaMA-Factory and TRL, whose heads and rules differ from Laurel's.
#
# What they save, and how they score:
#
# - **OpenRLHF**: a decoder and a linear head without bias, under the name that `config.json` gives
#   as `value_head_prefix`. The text loses its last line breaks and ends with EOS, after a blank if
#   the template writes no EOS; longer texts are cut on the right and keep EOS.
# - **LLaMA-Factory**: a causal language model, and `value_head.safetensors` (or `.bin`) with
#   `v_head.summary.weight` and `v_head.summary.bias`. The template alone writes the text.
# - **TRL's value heads**: the same two tensors, among the weights of the language model.
#
# All of them read the score from the last token that is not padding, whatever its id.

Program = Literal["OpenRLHF", "LLaMA-Factory", "TRL"]

PICKLED = "pytorch_model.bin"
WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
UNDERSTOOD = (
    "Understood are: Hugging Face's classifiers (score.weight); OpenRLHF (value_head_prefix in "
    "config.json, and a weight of that name); LLaMA-Factory (value_head.safetensors or "
    f"value_head.bin with {WEIGHT} and {BIAS}); TRL (these two among the weights)"
)

_OPENRLHF_CLASS, _OPENRLHF_CRITIC = "RewardModel", "CriticModel"
_OPENRLHF_KEYS = ("value_head_prefix", "normalize_reward", "mean", "std")
_OPENRLHF_TEMPLATE = (
    "{{% set laurel_text %}}\n{}{{% endset %}}"
    "{{% if add_generation_prompt %}}{{{{ laurel_text }}}}{{% else %}}"
    "{{% set laurel_text = laurel_text.rstrip('\\n') %}}{{{{ laurel_text }}}}"
    "{{% if not laurel_text.endswith(eos_token) %}}{{{{ ' ' + eos_token }}}}{{% endif %}}"
    "{{% endif %}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueHead:
    """A reward head in a checkpoint that another framework (`program`) saved, such as TRL."""

    program: Program
    file: Path
    weight: str
    bias: str | None
    mean: float | None = None
    """The mean of the scores, as the framework measured it; None if unknown."""
    std: float | None = None

    @property
    def truncation_side(self) -> Literal["left", "right"] | None:
        """The side on which the framework that saved this head truncates long texts.

        None if it cuts out the middle.
        """
        return "right" if self.program == "OpenRLHF" else None

    @property
    def is_apart(self) -> bool:
        """Whether `put_into` copies the head; if not, transformers loads it with the model."""
        return self.file.name != PICKLED

    def describe(self) -> str:
        """Return a sentence for the user about this head.

        The sentence names the framework that saved the head, the file of the head, and the token at
        which the score is read.
        """
        where = f"{self.file.name}: {self.weight}" + (f" and {self.bias}" if self.bias else "")
        rule = {
            "OpenRLHF": "a text loses its last line breaks and ends with EOS, read there",
            "LLaMA-Factory": "the text is the saved template's, read from its last token",
            "TRL": "the text is the saved template's, read from its last token",
        }[self.program]
        return f"made by {self.program}; its head is from {where}; {rule}"

    def settle_tokenizer(self, tokenizer: Any, notes: list[str]) -> None:
        """Change a tokenizer so that it renders the text that the framework of this head scores.

        If padding is EOS, another padding token is chosen. These frameworks find the last token by
        the attention mask, so they can pad with EOS, and often do. Hugging Face's own classes find
        it by the id of the padding token.

        Args:
            tokenizer: The tokenizer, which is changed.
            notes: Receives a remark for the user if the padding token is changed.

        Raises:
            ModelError: There is no other padding token, no EOS, or the template cannot be adapted.
        """
        if tokenizer.pad_token == tokenizer.eos_token:
            settle_padding(tokenizer, "auto")
            notes.append(
                f"it padded with {tokenizer.eos_token!r}, which ends texts; padding is now "
                f"{tokenizer.pad_token!r}. No score depends on it"
            )
        if self.program == "OpenRLHF":
            _end_as_openrlhf(tokenizer)

    def put_into(self, classifier: Any, *, keeps_bias: bool) -> float:
        """Copy this head into a classifier.

        Args:
            classifier: A Hugging Face `...ForSequenceClassification`. Settings that only the
                framework of this head reads are removed from its configuration.
            keeps_bias: Whether the bias is copied too. Hugging Face's own classes have no bias in
                the head.

        Returns:
            The bias, which the framework adds to every score; 0 if there is none, or if
            transformers loads the head.

        Raises:
            ModelError: The head is not one linear layer with one output over the hidden states.
        """
        for key in _OPENRLHF_KEYS if self.program == "OpenRLHF" else ():
            if key in vars(classifier.config):
                delattr(classifier.config, key)
        if not self.is_apart:
            return 0.0
        tensors = _tensors(self.file, (self.weight, self.bias))
        weight = tensors[self.weight]
        bias = tensors[self.bias] if self.bias else None
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or weight.shape != head.weight.shape:
            wanted = list(head.weight.shape) if isinstance(head, nn.Linear) else "another layer"
            raise ModelError(
                f"{self.file}: {self.weight} is {list(weight.shape)}, and the head of "
                f"{type(classifier).__name__} is {wanted}: they do not belong together"
            )
        with torch.no_grad():
            head.weight.copy_(weight)
            if bias is not None and keeps_bias:
                head.bias = nn.Parameter(bias.reshape(1).to(head.weight))
        return 0.0 if bias is None else float(bias.reshape(()))

    def statistics(self) -> dict[str, float]:
        """Return the mean and the standard deviation of scores, as the checkpoint records them.

        The framework that trained the head measured them; they are not measured here. The keys are
        the field names of `ScoringRules`. The result is empty if the checkpoint records none.
        """
        if self.mean is None or self.std is None:
            return {}
        return {"mean": self.mean, "std": self.std}


def find_value_head(directory: Path, *, safetensors_only: bool = True) -> ValueHead | None:
    """Find the reward head that OpenRLHF, LLaMA-Factory or TRL saved in a directory.

    Only the names of weights are read, and no pickled file is opened.

    Args:
        safetensors_only: Whether pickled weights are refused.

    Returns:
        The head; None for any other model, including Laurel's, and for other directories.

    Raises:
        ModelError: One of these frameworks saved the model, but it is incomplete or gives no
            reward.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading reports it best
    if not isinstance(config, dict) or (directory / FILE_NAME).is_file():
        return None
    for name in HEAD_FILES:
        if (directory / name).is_file():
            return ValueHead(
                program="LLaMA-Factory", file=directory / name, weight=WEIGHT, bias=BIAS
            )
    architectures = config.get("architectures") or []
    if _OPENRLHF_CRITIC in architectures:
        raise ModelError(
            f"{directory} is a critic of OpenRLHF: it estimates what single tokens are worth, and "
            "gives no score of a conversation. Name the reward model of that run"
        )
    if "value_head_prefix" in config or _OPENRLHF_CLASS in architectures:
        return _of_openrlhf(directory, config, safetensors_only=safetensors_only)
    names = weight_names(directory)
    if WEIGHT in names:
        bias = BIAS if BIAS in names else None
        return ValueHead(program="TRL", file=names[WEIGHT], weight=WEIGHT, bias=bias)
    return None


def refuse_hub_name(name: str, hf_config: Any) -> None:
    """Check that a hub name is not that of a model saved by OpenRLHF.

    Such a model must be downloaded first, because its head and its rules are found only in the
    files of a directory.

    Raises:
        ModelError: The name is such a hub name.
    """
    is_theirs = _OPENRLHF_CLASS in (hf_config.architectures or [])
    if not Path(name).is_dir() and (is_theirs or hasattr(hf_config, "value_head_prefix")):
        raise ModelError(
            f"{name} was made by OpenRLHF, which scores by rules of its own; its files have to be "
            f"here to follow them: hf download {name} --local-dir DIR, and name DIR"
        )


def foreign_heads(unexpected: Iterable[str]) -> list[str]:
    """Return the names of weights that may belong to another framework's reward head, sorted.

    An error names them if no reward head can be loaded.

    Args:
        unexpected: The names of the weights in a model's files that the network lacks, as
            transformers reports them. Those of a language-model head (`lm_head.`) are left out.
    """
    return sorted(key for key in unexpected if not key.startswith("lm_head."))


def _of_openrlhf(directory: Path, config: dict[str, Any], *, safetensors_only: bool) -> ValueHead:
    prefix = str(config.get("value_head_prefix", "score"))
    names = weight_names(directory)
    weight, bias = f"{prefix}.weight", f"{prefix}.bias"
    mean, std = config.get("mean"), config.get("std")
    if not names and prefix == "score" and not safetensors_only:
        names = {weight: directory / PICKLED}  # transformers knows the name, and reads the files
    if not names:
        raise ModelError(
            f"{directory} was made by OpenRLHF, and has no weights in safetensors. Pickled weights "
            "can run code when they are loaded: make safetensors of them, or, where the head is "
            f"called score, set {key_of('policy.safetensors_only')}=false if you trust them."
        )
    if weight not in names:
        heads = [name for name in names if name.count(".") == 1]
        raise ModelError(
            f"{directory} was made by OpenRLHF, and its weights have no {weight} "
            f"(value_head_prefix in config.json). Outside of the decoder they have: "
            f"{', '.join(sorted(heads)[:8]) or 'nothing'}. {UNDERSTOOD}"
        )
    return ValueHead(
        program="OpenRLHF",
        file=names[weight],
        weight=weight,
        bias=bias if bias in names else None,
        mean=float(mean) if isinstance(mean, int | float) else None,
        std=float(std) if isinstance(std, int | float) else None,
    )


def _end_as_openrlhf(tokenizer: Any) -> None:
    eos, template = tokenizer.eos_token, tokenizer.chat_template
    if eos is None:
        raise ModelError(
            "the model was made by OpenRLHF, which ends every text with EOS, and its tokenizer "
            "names none: write its eos_token into tokenizer_config.json"
        )
    probe = (Message("user", "a"), Message("assistant", "b"))
    try:
        wanted = render(tokenizer, probe, {}).rstrip("\n")
        wanted += "" if wanted.endswith(eos) else f" {eos}"
        tokenizer.chat_template = _OPENRLHF_TEMPLATE.format(template.removesuffix("\n"))
        found = render(tokenizer, probe, {})
    except DataError as error:
        raise ModelError(str(error)) from error
    if found != wanted:
        raise ModelError(
            f"the chat template cannot be made to end as OpenRLHF ends texts: it gives {found!r}, "
            f"and should give {wanted!r}. Choose another: "
            f"{key_of('policy.tokenizer.chat_template')}=chatml, "
            "or a path ending in .jinja"
        )


def _tensors(path: Path, names: Iterable[str | None]) -> dict[str, Tensor]:
    wanted = [name for name in names if name is not None]
    if path.suffix != ".safetensors":
        raise ModelError(
            f"{path} is pickled, and Laurel reads no pickles: they can run code. If you trust it, "
            'make safetensors of it, in its directory: python -c "import torch, safetensors.torch '
            "as s; s.save_file(torch.load('value_head.bin', weights_only=True), "
            "'value_head.safetensors')\""
        )
    try:
        with safe_open(path, framework="pt") as file:
            held = list(file.keys())
            found = {name: file.get_tensor(name) for name in held if name in wanted}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    lacking = [name for name in wanted if name not in found]
    if lacking:
        raise ModelError(
            f"{path} holds no {' and no '.join(lacking)}. It holds: "
            f"{', '.join(sorted(held)[:8]) or 'nothing'}. {UNDERSTOOD}"
        )
    return found


@dataclass(slots=True, kw_only=True)
class LoadedRewardModel:
    """A reward model and its scoring contract, with remarks on loading for the user."""

    model: RewardModel
    contract: ScoringContract
    notes: list[str] = field(default_factory=list)
    """Remarks for the user: a new head, the padded path, a pinned date."""
    has_new_head: bool = False
    base_model: str = ""
    strange_weights: tuple[str, ...] = ()
    """The weights in the files that the network lacks, except a language-model head."""


def load_reward_model(
    spec: ModelSpec,
    *,
    seed: int,
    max_length: int,
    truncation_side: Literal["left", "right"],
    device: torch.device,
    texts: Iterable[str] = (),
    weights_dtype: torch.dtype = torch.float32,
    resume_from: Path | None = None,
    mesh: DeviceMesh | None = None,
    keeps_bias: bool = False,
    for_training: bool = False,
) -> LoadedRewardModel:
    """Load a reward model, or create one with random weights.

    Args:
        seed: The seed of a new head and of random weights.
        max_length: The maximum number of tokens of a conversation, if the model has no contract.
        truncation_side: The side on which conversations are cut, if the model has no contract.
        texts: The texts on which a new tokenizer is trained if `spec.scratch` is set.
        weights_dtype: The dtype of the weights: float32 for training (master weights), lower to
            score in less memory.
        resume_from: A checkpoint of the same run, whose tokenizer, contract and weights are used.
        mesh: The mesh over which the model is sharded. All ranks then call this with the same
            arguments.
        keeps_bias: Whether to keep the bias of a head that another framework saved (`ValueHead`).
            The bias adds the same number to every score. Laurel's checkpoints cannot store it.
        for_training: Whether a run trains the model. Where it begins, the contract of a reward
            model that an earlier version saved becomes one of this version.

    Raises:
        ModelError: The model cannot give a reward, or is unsafe to load.
        ConfigError: The model cannot be sharded over the mesh.
    """
    register()
    if mesh is not None:
        refuse_unspreadable(spec, mesh)
    base, notes = start_of(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.weights_from(resume_from) is None:
            tokenizer = find_tokenizer(spec, texts, resume_from=resume_from)
            read = _Read(_make(spec, tokenizer, max_length, seed), has_new_head=True)
        else:
            tokenizer, read = _from_files(spec, resume_from, weights_dtype, mesh, seed, notes)
    _take_head(read, notes, keeps_bias=keeps_bias)
    refuse_large_tokenizer(read.classifier, tokenizer)
    agree_on_padding(read.classifier, tokenizer, teaches_padding=False)
    head_name = _head_name(read.classifier)
    path = take_path(read.classifier, spec, notes, pools_itself=head_name is None)
    name = str(resume_from or spec.weights_from(None) or spec.name)
    contract = _contract(
        spec,
        tokenizer,
        name,
        read,
        max_length,
        truncation_side,
        notes,
        begins_training=for_training and resume_from is None,
    )
    with torch.random.fork_rng(devices=[], enabled=mesh is not None):
        if mesh is not None:
            torch.manual_seed(seed)  # new adapters are alike on every rank
        classifier = read.classifier
        if spec.lora is not None:
            classifier = with_adapters(classifier, spec.lora, resume_from, trains_head=True)
    precision = compute_dtype(spec, weights_dtype)
    model = RewardModel(classifier, head_name=head_name, path=path, precision=precision)
    finalize_model(model, spec, device, mesh, notes)
    if read.has_new_head and resume_from is None:
        notes.append("the reward head is new and random: its scores mean nothing before training")
    return LoadedRewardModel(
        model=model,
        contract=contract,
        notes=notes,
        has_new_head=read.has_new_head,
        base_model=base,
        strange_weights=read.strange_weights,
    )


def load_contract(
    spec: ModelSpec,
    *,
    max_length: int,
    truncation_side: Literal["left", "right"],
    for_training: bool = False,
) -> tuple[ScoringContract, list[str]]:
    """Return the scoring contract of a reward model, and remarks for the user.

    The weights of the model are not read.

    Args:
        max_length: The maximum number of tokens of a conversation, if the model has no contract.
        truncation_side: The side on which conversations are cut, if the model has no contract.
        for_training: Whether a language model is accepted, since training gives it a reward head.

    Raises:
        ModelError: The model cannot give a reward, or is unsafe to load.
    """
    notes: list[str] = []
    name = spec.files
    foreign = find_value_head(Path(name), safetensors_only=spec.safetensors_only)
    if foreign is not None:
        raise ModelError(
            f"{name} was made by {foreign.program}, and other processes could not score with it. "
            "Write it as any program reads it, and name that: "
            f"laurel export --model {name} --output DIR"
        )
    tokenizer = find_tokenizer(spec)
    hf_config = read_config(spec, name)
    has_new_head = for_training and not _is_classifier(hf_config)
    pad_id = hf_config.get_text_config().pad_token_id
    hf_config.num_labels = _num_outputs(spec)
    factory = _factory(spec)
    with torch.device("meta"):  # its modules show how it pools
        classifier = factory.from_config(hf_config, trust_remote_code=spec.trust_remote_code)
    agree_on_padding(classifier, tokenizer, teaches_padding=False)
    read = _Read(classifier, has_new_head=has_new_head, pad_id=pad_id)
    contract = _contract(
        spec,
        tokenizer,
        name,
        read,
        max_length,
        truncation_side,
        notes,
        begins_training=for_training,
    )
    return contract, notes


@dataclass(frozen=True, slots=True)
class _Read:
    """A classifier that was created or loaded, and where its reward head comes from.

    `strange_weights` names the weights in the files that the classifier lacks, except those of a
    language-model head. `pad_id` is the padding token of the model's own configuration.
    """

    classifier: Any
    has_new_head: bool
    strange_weights: tuple[str, ...] = ()
    foreign: ValueHead | None = None
    pad_id: int | None = None


def _from_files(
    spec: ModelSpec,
    resume_from: Path | None,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    seed: int,
    notes: list[str],
) -> tuple[Any, _Read]:
    source = str(spec.weights_from(resume_from))
    foreign = find_value_head(Path(source), safetensors_only=spec.safetensors_only)
    if foreign is not None and mesh is not None:
        raise ConfigError(
            f"{source} was made by {foreign.program}, and such a model is not spread over ranks. "
            "Write it as any program reads it, and name that: "
            f"laurel export --model {source} --output DIR"
        )
    is_theirs = foreign is not None and resume_from is None
    tokenizer = find_tokenizer(spec, resume_from=resume_from, pad_may_end=is_theirs, notes=notes)
    if foreign is not None and resume_from is None:
        foreign.settle_tokenizer(tokenizer, notes)
    return tokenizer, _load(spec, source, dtype, mesh, seed, foreign)


def _take_head(read: _Read, notes: list[str], *, keeps_bias: bool) -> None:
    foreign = read.foreign
    if foreign is None:
        return
    bias = foreign.put_into(read.classifier, keeps_bias=keeps_bias)
    notes.append(foreign.describe())
    if bias and not keeps_bias:
        notes.append(
            f"the bias of its head, {bias:.6g}, is left out: it moves all scores alike, and "
            "Hugging Face's classes have no place for it"
        )
    if foreign.mean is not None:
        notes.append(
            f"{foreign.program} measured a mean of {foreign.mean:.4g} and a deviation of "
            f"{foreign.std:.4g}; scores are given as they are"
        )


def _make(spec: ModelSpec, tokenizer: Any, max_length: int, seed: int) -> Any:
    num_labels = _num_outputs(spec)
    classifier = make_network(_factory(spec), spec, tokenizer, max_length, num_labels=num_labels)
    _init_head(classifier, seed)
    return classifier


def _load(
    spec: ModelSpec,
    name: str,
    dtype: torch.dtype,
    mesh: DeviceMesh | None,
    seed: int,
    foreign: ValueHead | None,
) -> _Read:
    hf_config = read_config(spec, name)
    refuse_hub_name(name, hf_config)
    is_classifier = _is_classifier(hf_config)
    pad_id = hf_config.get_text_config().pad_token_id
    hf_config.num_labels = _num_outputs(spec)
    model, info = read_weights(
        _factory(spec), spec, name, hf_config, dtype, may_be_empty=mesh is not None
    )
    for key, found, expected in info["mismatched_keys"]:
        if key.startswith(REWARD_HEADS) and found[0] != expected[0]:
            raise ModelError(
                f"{name}: {key} has {found[0]} outputs and this run needs {_num_outputs(spec)}. "
                "A reward model has one label; for a model with several ratings set "
                f"{key_of('policy.reward_model_cfg.reward_model_type')}=regression and list "
                f"{key_of('policy.reward_model_cfg.attributes')}."
            )
    refuse_other_sizes(name, info["mismatched_keys"])
    lacks_head = any(key.startswith(REWARD_HEADS) for key in info["missing_keys"])
    may_lack_head = not is_classifier if foreign is None else foreign.is_apart
    refuse_missing(
        name,
        (k for k in info["missing_keys"] if not (may_lack_head and k.startswith(REWARD_HEADS))),
    )
    has_new_head = lacks_head and foreign is None
    if has_new_head:
        _init_head(model, seed)
    strange = tuple(foreign_heads(info["unexpected_keys"]))
    return _Read(model, has_new_head, strange, foreign, pad_id)


def _factory(spec: ModelSpec) -> Any:
    # The head of a process reward model is read at many tokens, as that of a token classifier.
    import transformers

    if spec.head.reward_model_type == "process":
        return transformers.AutoModelForTokenClassification
    return transformers.AutoModelForSequenceClassification


def _is_classifier(hf_config: Any) -> bool:
    endings = ("ForSequenceClassification", "ForTokenClassification")
    return any(n.endswith(endings) for n in hf_config.architectures or [])


def _num_outputs(spec: ModelSpec) -> int:
    return len(spec.head.attributes) if spec.head.reward_model_type == "regression" else 1


def _head_name(classifier: Any) -> str | None:
    head = getattr(classifier, "score", None)
    return "score" if isinstance(head, nn.Linear) else None


def _init_head(classifier: Any, seed: int) -> None:
    # A standard deviation of about `hidden ** -0.5` over conversations: small random scores.
    if _head_name(classifier) is None:
        return  # one that pools has a head of its own making
    head: nn.Linear = classifier.score
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = torch.randn(head.weight.shape, generator=generator) / (head.in_features + 1)
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()


def _step_rules(spec: ModelSpec) -> StepRules | None:
    head = spec.head
    if head.reward_model_type != "process":
        return None
    return StepRules(separator=head.step_separator, aggregate=head.step_aggregate)


def _check_asked(spec: ModelSpec, base: str, rules: ScoringRules) -> None:
    """Check that what is asked for is what a model was trained to give."""
    if rules.steps != _step_rules(spec):
        said = "no steps" if rules.steps is None else repr(rules.steps)
        raise ModelError(
            f"{base} was trained to read {said}, and {key_of('policy.reward_model_cfg')} asks "
            f"for {_step_rules(spec) or 'no steps'!r}; give the same"
        )
    if list(rules.attributes) != spec.head.attributes:
        raise ModelError(
            f"{base} gives the attributes {list(rules.attributes)} and "
            f"{key_of('policy.reward_model_cfg.attributes')} asks for "
            f"{spec.head.attributes}; give the same, in the same order"
        )


def _contract(
    spec: ModelSpec,
    tokenizer: Any,
    base: str,
    read: _Read,
    max_length: int,
    truncation_side: Literal["left", "right"],
    notes: list[str],
    *,
    begins_training: bool,
) -> ScoringContract:
    classifier, foreign = read.classifier, read.foreign
    if (Path(base) / FILE_NAME).is_file():
        contract = ScoringContract.load(Path(base), tokenizer)
        _check_asked(spec, base, contract.rules)
        rules = contract.rules
        if (rules.max_length, rules.truncation_side) != (max_length, truncation_side):
            notes.append(
                "the model brings its own contract: conversations of more than "
                f"{rules.max_length:,} tokens {rules.overlong}, as it was trained"
            )
        if begins_training:
            return contract.with_rules(format=FORMAT)
        if not rules.has_plain_contents:
            notes.append(OLD_CONTENTS)
        return contract
    positions = num_positions(classifier.config)
    if positions is not None and _head_name(classifier) is None:
        # Encoders like RoBERTa number from an offset, which their tokenizer takes into account.
        positions = min(positions, tokenizer.model_max_length)
    if positions is not None and max_length > positions:
        process = spec.head.reward_model_type == "process"
        outcome = "get no score" if process else "are cut to that"
        notes.append(f"the model has {positions:,} positions: longer conversations {outcome}")
        max_length = positions
    if foreign is not None:
        truncation_side = foreign.truncation_side or truncation_side
    if spec.head.reward_model_type == "process":
        if _head_name(classifier) is None:
            raise ModelError(
                f"{base}: {type(classifier).__name__} has no linear head named `score` that could "
                "be read at each step. A process reward model is made of a decoder"
            )
        if not tokenizer.is_fast:
            raise ModelError(
                f"{base}: {type(tokenizer).__name__} does not say which characters a token holds, "
                "so the ends of steps cannot be found. Name a fast tokenizer: "
                f"{key_of('policy.tokenizer.name')}"
            )
    contract = ScoringContract.create(
        tokenizer,
        max_length=max_length,
        truncation_side=truncation_side,
        append_eos=read.has_new_head,
        closes_ends=foreign is None,
        template_kwargs=spec.tokenizer.chat_template_kwargs,
        pooled="last" if _head_name(classifier) is not None else "model",
        attributes=spec.head.attributes,
        attribute_weights=spec.head.attribute_weights,
        steps=_step_rules(spec),
    )
    if contract.rules.pinned_date is not None:
        notes.append(
            f"the chat template prints the date; it is pinned to {contract.rules.pinned_date}: the "
            f"day in {key_of('policy.tokenizer.date')}, without one that on which the run or the "
            "server began, and in a template that Laurel saved the day of its training"
        )
    reads_by_padding = foreign is None and not read.has_new_head
    is_named = spec.tokenizer.pad_token not in (None, "auto")
    check_rendering(contract, own_pad=read.pad_id if reads_by_padding and not is_named else None)
    return contract if foreign is None else contract.with_rules(**foreign.statistics())


# The self-check at load: a batch must score as its sequences do one by one.

SHAPES = ((11, (5, 1, 8)), (0, (7,)))
"""Trunk and branch lengths of the probe that `make_probe` makes."""


def check_paths(model: RewardModel) -> float:
    """Compare a small batch on the model's path with the model's own forward pass, one by one.

    Returns:
        The largest relative difference found.

    Raises:
        ModelError: They disagree, so batches would give wrong scores.
    """
    # Hidden states are compared because a new head makes every score small; scores are then
    # compared with those that Hugging Face's class returns by itself.
    probe = make_probe(model, SHAPES, seed=0)
    return check_batches(
        model, lambda: _largest_difference(model, probe), what="score", role="reward model"
    )


def _largest_difference(model: RewardModel, probe: Probe) -> float | None:
    """Compare the batch with one-by-one passes; None where the latter are not finite."""
    batch = probe.batch(model.path)
    scores_NK = model(batch).double()
    if model.head_name is None:
        own_NK = torch.cat([_own_scores(model, ids) for ids in probe.sequences_N]).double()
        if not own_NK.isfinite().all():
            return None
        return float((scores_NK - own_NK).abs().max() / own_NK.abs().max().clamp_min(1e-12))
    hidden_ND = model.last_hidden(batch).double()
    with own_attention(model):
        own_NK = torch.cat([_own_scores(model, ids) for ids in probe.sequences_N]).double()
        base = model.classifier.base_model
        own_ND = torch.cat(
            [base(**inputs_alone(model, ids)).last_hidden_state[:, -1] for ids in probe.sequences_N]
        ).double()
    if not (own_NK.isfinite().all() and own_ND.isfinite().all()):
        return None
    size_N = own_ND.norm(dim=1).clamp_min(1e-12)
    head_K = getattr(model.classifier, model.head_name).weight.double().norm(dim=1)
    hidden = ((hidden_ND - own_ND).norm(dim=1) / size_N).max()
    scores = ((scores_NK - own_NK).abs() / (size_N[:, None] * head_K).clamp_min(1e-12)).max()
    return float(torch.maximum(hidden, scores))


def _own_scores(model: RewardModel, ids_L: Tensor) -> Tensor:
    logits: Tensor = model.classifier(**inputs_alone(model, ids_L)).logits
    # A token classifier gives the outputs of every token.
    return logits if logits.dim() == 2 else logits[:, -1]
