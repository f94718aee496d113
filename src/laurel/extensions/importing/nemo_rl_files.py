"""Adapts files written for NeMo RL: translates, refuses or explains what Laurel does not have.

A tree goes through three steps before it is checked. Settings that NeMo RL has in another backend
or section are translated to Laurel's (`megatron_cfg`, `async_grpo`). A feature that Laurel lacks is
refused by name. All other keys without a meaning in Laurel stay in the tree: the sections accept
them (`keys_beside`), and `unread_keys` gives the reason, and whether something is lost.

The tables of these keys and features are in `nemo_rl.yaml`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import yaml

from laurel import plugins
from laurel.config.interpolation import Interpolations, UnresolvedError
from laurel.config.other_systems import Adapted, UnreadKey, foreign_keys
from laurel.config.schema_info import (
    Kinds,
    is_mapping,
    kind_that_fits,
    sections_of,
    step_into,
)
from laurel.config.yaml_tree import (
    MISSING,
    KeyPath,
    Section,
    YamlNode,
    all_of,
    dotted,
    find_node,
    graft,
    nearest,
    overlay,
    plain_values,
    split_key,
    with_key,
)
from laurel.environments.registry import OTHER_NAMES

_TABLES: Mapping[str, Any] = yaml.load(
    files(__package__).joinpath("nemo_rl.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
# Of a key that several reasons name, the first holds, and that something is lost before all.
_REASONS = {
    key: (why, block == "lost")
    for block in ("unneeded", "lost")
    for why, keys in reversed(_TABLES[block].items())
    for key in keys
}
_CARRIED = {f"{block}.{key}" for block, keys in _TABLES["carried"].items() for key in keys}
_ENVIRONMENTS = frozenset(_TABLES["foreign_keys"]["EnvironmentsConfig"])
_OFF: tuple[Any, ...] = (None, False, -1, 0, [], {})


def reason(key: str) -> tuple[str, bool] | None:
    """Return why Laurel ignores a NeMo RL key, and whether something may be lost; or None."""
    last = key.rpartition(".")[2]
    if key in _CARRIED:
        return "it is translated", False
    if last in _REASONS:
        return _REASONS[last]
    if ".megatron_cfg." in f".{key}":
        return "Megatron's kernels, checkpoints and communication", False
    if last in _ENVIRONMENTS:
        return "no task asks for this environment", False
    return None


@cache
def keys_beside(section: type[Section]) -> Mapping[str, str]:
    """Return the keys of NeMo RL that a section of Laurel's ignores, with the reasons."""
    named = {one.__name__ for one in section.__mro__ if one.__module__.startswith("laurel.")}
    found = {
        key: reason(key)
        for sections, keys in _TABLES["foreign_keys"].items()
        if not named.isdisjoint(sections.split(", "))
        for key in keys
    }
    return {key: why[0] if why else "it means nothing here" for key, why in found.items()}


def unread_keys(tree: YamlNode, ignored: Sequence[str]) -> list[UnreadKey]:
    """List the keys of a file that the sections accept but ignore, with reasons.

    Args:
        ignored: The ignored dotted keys. A block such as Megatron's is listed by its parts.
    """
    found: list[UnreadKey] = []
    for block in ignored:
        node = find_node(tree, split_key(block))
        if node is None:
            continue
        whole = plain_values(node)
        is_on = isinstance(whole, dict) and whole.get("enabled") is True
        is_looked_into = is_on and block in ("policy.megatron_cfg", "grpo.async_grpo")
        for key, value in _leaves_of(whole, block) if is_looked_into else [(block, whole)]:
            why, may_be_lost = reason(key) or ("not known to this version of Laurel", False)
            *above, last = split_key(key)
            holder = find_node(tree, above)
            beside = plain_values(holder) if holder is not None else {}
            is_off = (
                _is_disabled(beside)
                or (last == "dropout_position" and not beside.get("dropout"))
                or _is_off(value, _TABLES["same_here"].get(last, ()))
            )
            if may_be_lost and is_off:
                why, may_be_lost = "it is off, or says what Laurel does", False
            is_carried = key in _CARRIED
            found.append(
                UnreadKey(key=key, value=value, why=why, is_lost=may_be_lost, is_carried=is_carried)
            )
    return found


def _leaves_of(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value or _is_disabled(value):
        yield key, value
        return
    for name, child in value.items():
        yield from _leaves_of(child, f"{key}.{name}")


def _is_disabled(value: Any) -> bool:
    return isinstance(value, dict) and value.get("enabled") is False


def _is_off(value: Any, same: Sequence[Any] = ()) -> bool:
    """Report whether a value (or all values of a block) disables its feature."""
    if isinstance(value, dict):
        return _is_disabled(value) or all(_is_off(child) for child in value.values())
    return any(
        # To Python 0 equals False, and a number is no switch.
        value == off and isinstance(value, bool) == isinstance(off, bool)
        for off in (*_OFF, *same)
    )


def adapt(schema: type[Section], work: Adapted, problems: list[str]) -> None:
    """Translate the settings of a file from NeMo RL's keys to Laurel's.

    Problems of the translation are added to `problems`.

    Raises:
        ConfigError: The file asks for features that Laurel does not have; all of them are named.
    """
    if not isinstance(work.tree.value, dict):
        return
    values = _Values(schema, work.tree)
    is_megatron = values.get(_MEGATRON + "enabled") is True
    missing = [
        *_missing(schema, values, is_megatron=is_megatron),
        *_asked_environments(schema, values),
    ]
    if missing:
        raise all_of(missing)
    if is_megatron and "policy" in schema.model_fields:
        _translate_megatron(work, values, problems)
    if values.get("grpo.async_grpo.enabled") is True and "grpo" in schema.model_fields:
        _translate_async(work, values, problems)
    if "grpo" in schema.model_fields:
        _name_estimator(work, values, problems)
    if "loss_fn" in schema.model_fields:
        _name_loss(work, values, problems)
        _leave_out_inherited_clips(work, schema, values)
    if "data" in schema.model_fields:
        _name_validation_sets(work, schema, values, problems)
        _fill_sets(work, schema, values, problems)
        _give_own_keywords(work, schema, values)
    problems += _heads_out_of_place(schema, values)
    if "policy" in schema.model_fields:
        _pack_where_rows_are_divided(work)
        _take_budget_of_padded_rows(work, values)


class _Values:
    """Gives access to the values of a tree, with references resolved."""

    def __init__(self, schema: type[Section], tree: YamlNode) -> None:
        self.schema, self.tree = schema, tree

    @cached_property
    def interpolations(self) -> Interpolations:
        """Its references, of which most files have none."""
        return Interpolations(self.tree, self.schema)

    def get(self, key: str, default: Any = None) -> Any:
        found = _at(self.tree, key)
        return default if found is None else self._of(found, tuple(key.split(".")))

    def leaves(self, pattern: str) -> Iterator[tuple[str, YamlNode, Any]]:
        """Yield the keys that match a pattern, with their values."""

        def below(node: YamlNode, path: KeyPath, parts: Sequence[str]) -> Iterator[KeyPath]:
            if not parts:
                yield path
            elif isinstance(node.value, dict):
                for key, child in node.value.items():
                    if fnmatch.fnmatchcase(key, parts[0]):
                        yield from below(child, (*path, key), parts[1:])
            elif isinstance(node.value, list):  # several sets
                for index, child in enumerate(node.value):
                    yield from below(child, (*path, index), parts)

        for path in below(self.tree, (), pattern.split(".")):
            node = find_node(self.tree, path)
            assert node is not None
            yield dotted(path), node, self._of(node, path)

    def _of(self, node: YamlNode, path: KeyPath) -> Any:
        try:
            is_reference = node.reference
            return (
                self.interpolations.value(path, node.value) if is_reference else plain_values(node)
            )
        except UnresolvedError:  # reported where the key is checked, if it is needed
            return node.value


def _missing(schema: type[Section], values: _Values, *, is_megatron: bool) -> Iterator[str]:
    """Yield a line for each feature that the file asks for and Laurel does not have."""
    reported: set[str] = set()
    for feature in _TABLES["features"] + (_TABLES["megatron_features"] if is_megatron else []):
        for pattern in feature["keys"]:
            # The run may not read the section: `env` means nothing to `laurel sft`.
            first, dot, _ = pattern.partition(".")
            is_foreign = step_into((schema,), first).standing == "foreign"
            is_of_run = not (is_foreign and (dot or first == "env"))
            for key, node, value in values.leaves(pattern) if is_of_run else ():
                if feature["name"] in reported or not _asks(feature, value):
                    continue
                reported.add(feature["name"])
                hint = f"; {feature['hint']}" if "hint" in feature else ""
                shown = "" if isinstance(value, dict | list) else f"={value}"
                yield f"{node.place}: {key}{shown}: Laurel has no {feature['name']}{hint}"


def _asks(feature: Mapping[str, Any], value: Any) -> bool:
    if "is" in feature:
        return str(value) in feature["is"]
    if "begins" in feature:
        return str(value).lower().startswith(feature["begins"])
    if "above" in feature:
        return isinstance(value, int) and value > feature["above"]
    return "always" in feature or (value is not MISSING and not _is_off(value))


def _asked_environments(schema: type[Section], values: _Values) -> Iterator[str]:
    """Yield a line for each environment of NeMo RL that tasks ask for and Laurel lacks."""
    if "env" not in schema.model_fields:
        return
    own = {key for kind in ("custom", "composite") for key in values.get(f"env.{kind}") or {}}
    own |= {*plugins.REGISTERED, *OTHER_NAMES}
    reported: set[str] = set()
    for pattern in ("data.env_name", "data.*.env_name", "data.*.*.env_name"):
        for key, node, name in values.leaves(pattern):
            if name in reported | own or name not in _ENVIRONMENTS:
                continue
            reported.add(name)
            what = "NeMo Gym" if name == "nemo_gym" else f"environment {name}"
            what = "multimodal environments" if name in _TABLES["images"] else what
            yield (
                f"{node.place}: {key}={name}: Laurel has no {what}; write one of your own: "
                "env.custom, or env.composite for several rewards of one sample"
            )


MEGATRON_SENTENCE = (
    "policy.megatron_cfg is translated: Laurel trains the same model with the same optimizer, "
    "schedule, parallel sizes and adapters on its own backend (FSDP2, tensor and context "
    "parallelism); policy.optimizer, policy.scheduler and policy.dtensor_cfg have no effect "
    "besides, as in NeMo RL"
)
BACKEND_SENTENCE = (
    "policy.megatron_cfg.enabled without an optimizer of its own: Laurel trains on its own backend "
    "(FSDP2, tensor and context parallelism), with policy.optimizer and policy.scheduler"
)
_MEGATRON = "policy.megatron_cfg."
_WHOLE_BUDGET = "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
_DTENSOR = "policy.dtensor_cfg."
_SIMPLE: Mapping[str, str] = {
    "tensor_model_parallel_size": _DTENSOR + "tensor_parallel_size",
    "context_parallel_size": _DTENSOR + "context_parallel_size",
    "sequence_parallel": _DTENSOR + "sequence_parallel",
    "activation_checkpointing": _DTENSOR + "activation_checkpointing",
}
# Megatron's linear layers, and the layers of Hugging Face's decoders that they stand for.
_LAYERS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_SCHEDULERS = "torch.optim.lr_scheduler."
_FOREVER = 10_000_000_000
# torch's LinearLR cannot begin at 0.
_LEAST_FACTOR = 1e-8
_TRANSLATED = ("policy.optimizer", "policy.scheduler", *_SIMPLE.values(), _DTENSOR + "lora_cfg")


def _translate_megatron(work: Adapted, values: _Values, problems: list[str]) -> None:
    """Translate the optimizer, schedule, sizes and adapters of a Megatron policy."""
    switch = _at(work.tree, _MEGATRON + "enabled")
    place = switch.place if switch is not None else work.tree.place
    if values.get(_DTENSOR + "enabled") is True:
        problems.append(
            f"{place}: policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true; "
            "which of the two sections holds? Set the other to false"
        )
        return
    # A section without an optimizer chooses the backend, and what stands beside it holds.
    trains = any(values.get(_MEGATRON + key) is not None for key in ("optimizer", "scheduler"))
    for key in _TRANSLATED if trains else ():
        there = _at(work.tree, key)
        override = _override_in(there) if there is not None else None
        if override is not None:
            problems.append(
                f"{override}: {key}: has no effect beside policy.megatron_cfg.enabled=true; change "
                "the key of policy.megatron_cfg, or set policy.megatron_cfg.enabled=false"
            )
    if trains and not isinstance(values.get(_MEGATRON + "optimizer"), dict):
        problems.append(
            f"{place}: policy.megatron_cfg.optimizer is missing, and its scheduler changes the "
            "learning rate of that; give its optimizer, lr and weight_decay, or leave both out"
        )
        return
    for key, ours in _SIMPLE.items():
        if (value := values.get(_MEGATRON + key)) is not None:
            work.set(ours, value, by=_MEGATRON + key, was=value)
    try:
        if trains:
            _set_optimizer(work, values)
            _set_schedule(work, values)
        if trains or values.get(_MEGATRON + "peft") is not None:
            _set_adapters(work, values)
    except _UntranslatableError as error:
        found = _at(work.tree, error.key)
        problems.append(f"{found.place if found else place}: {error.key}: {error}")
        return
    work.sentences.append(MEGATRON_SENTENCE if trains else BACKEND_SENTENCE)


class _UntranslatableError(Exception):
    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _set_optimizer(work: Adapted, values: _Values) -> None:
    at = _MEGATRON + "optimizer."
    name = str(values.get(at + "optimizer", "adam"))
    lr, decay = _number(values, at + "lr"), _number(values, at + "weight_decay", 0.01)
    if name == "adam":
        betas = [_number(values, at + "adam_beta1", 0.9), _number(values, at + "adam_beta2", 0.999)]
        eps = _number(values, at + "adam_eps", 1e-8)
        call = _call("torch.optim.AdamW", lr=lr, weight_decay=decay, betas=betas, eps=eps)
    elif name == "sgd":
        momentum = _number(values, at + "sgd_momentum", 0.9)
        call = _call("torch.optim.SGD", lr=lr, weight_decay=decay, momentum=momentum)
    else:
        raise _UntranslatableError(at + "optimizer", f"{name} is neither adam nor sgd")
    work.set("policy.optimizer", call, by=at + "optimizer", was=name)
    if (clip := values.get(at + "clip_grad", MISSING)) is not MISSING:
        work.set("policy.max_grad_norm", clip or None, by=at + "clip_grad", was=clip)


def _set_schedule(work: Adapted, values: _Values) -> None:
    # Megatron's schedule rises from `lr_warmup_init`, then is constant or falls to `min_lr`.
    at = _MEGATRON + "scheduler."
    lr = _number(values, _MEGATRON + "optimizer.lr")
    least = _number(values, _MEGATRON + "optimizer.min_lr", 0.0)
    style = str(values.get(at + "lr_decay_style", "constant"))
    warmup = int(_number(values, at + "lr_warmup_iters", 0))
    begin = _number(values, at + "lr_warmup_init", 0.0)
    start, end = (values.get(at + f"{word}_weight_decay") for word in ("start", "end"))
    if start != end:
        raise _UntranslatableError(
            at + "end_weight_decay",
            f"the weight decay changes from {start} to {end}; here it stays the same",
        )
    if start is not None:  # Megatron's schedule sets it, whatever its optimizer was made with
        kwargs = dict(plain_values(_at(work.tree, "policy.optimizer.kwargs")))  # type: ignore[arg-type]
        kwargs["weight_decay"] = _number(values, at + "start_weight_decay")
        work.set("policy.optimizer.kwargs", kwargs, by=at + "start_weight_decay", was=start)
    stages: list[dict[str, Any]] = []
    milestones: list[int] = []
    if warmup and begin <= lr:
        stages.append(_linear(max(begin / lr, _LEAST_FACTOR), 1.0, warmup))
        milestones.append(warmup)
    elif warmup:
        raise _UntranslatableError(
            at + "lr_warmup_init", f"{begin} is above the learning rate {lr}: no warm-up begins so"
        )
    if style == "constant":
        stages.append(_constant(1.0))
    elif style in ("linear", "cosine"):
        until = values.get(at + "lr_decay_iters") or values.get(_MEGATRON + "train_iters")
        if not isinstance(until, int) or until <= warmup:
            raise _UntranslatableError(
                at + "lr_decay_iters", f"must be a whole number above the {warmup} steps of warm-up"
            )
        rest = until - warmup
        # After the warm-up the rate falls to `least` and stays there.
        if style == "linear":
            stages.append(_linear(1.0, least / lr, rest))
        else:
            stages.append(_call(_SCHEDULERS + "CosineAnnealingLR", T_max=rest, eta_min=least))
        stages.append(_constant(least / lr))
        milestones.append(until)
    else:
        raise _UntranslatableError(
            at + "lr_decay_style", f"{style} is none of constant, linear and cosine"
        )
    call: Any = stages[0] if len(stages) == 1 else [*stages, {"milestones": milestones}]
    work.set("policy.scheduler", call, by=at + "lr_decay_style", was=style)


def _call(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": name, "kwargs": kwargs}


def _constant(factor: float) -> dict[str, Any]:
    return _call(_SCHEDULERS + "ConstantLR", factor=factor, total_iters=_FOREVER)


def _linear(start: float, end: float, steps: int) -> dict[str, Any]:
    return _call(_SCHEDULERS + "LinearLR", start_factor=start, end_factor=end, total_iters=steps)


def _set_adapters(work: Adapted, values: _Values) -> None:
    at, ours = _MEGATRON + "peft.", _DTENSOR + "lora_cfg."
    if values.get(at + "enabled") is not True:
        work.set(ours + "enabled", False, by=at + "enabled", was=False)
        return
    found: dict[str, Any] = {"enabled": True}
    for key in ("dim", "alpha", "dropout"):
        found[key] = values.get(at + key)
        if found[key] is None and key != "dropout":
            raise _UntranslatableError(at + key, "is missing, and adapters are enabled")
    found["dropout"] = found["dropout"] or 0.0
    for key in ("target_modules", "exclude_modules"):
        names: list[str] = []
        for name in values.get(at + key) or []:
            if name not in _LAYERS:
                raise _UntranslatableError(
                    at + key,
                    f"'{name}' is none of Megatron's layers that Laurel knows: "
                    f"{', '.join(_LAYERS)}",
                )
            names += _LAYERS[name]
        found[key] = names
    for key, value in found.items():
        work.set(ours + key, value, by=at + key, was=values.get(at + key))


def _translate_async(work: Adapted, values: _Values, problems: list[str]) -> None:
    at = "grpo.async_grpo.max_trajectory_age_steps"
    age = values.get(at, 1)
    written = _at(work.tree, "grpo.max_staleness")
    if written is not None and written.value != age:
        problems.append(
            f"{written.place}: grpo.max_staleness={written.value} and {at}={age} say the same "
            "thing; keep one"
        )
        return
    by = at if _at(work.tree, at) is not None else "grpo.async_grpo.enabled"
    work.set("grpo.max_staleness", age, by=by, was=age)
    work.sentences.append(
        f"grpo.async_grpo is translated: grpo.max_staleness={age}, the steps that generation may "
        "run ahead of training"
    )


def _name_estimator(work: Adapted, values: _Values, problems: list[str]) -> None:
    """Say what `grpo` says of its estimator by the estimator's own keys."""
    at = "grpo.adv_estimator."
    name = values.get(f"{at}name", "grpo")
    is_known = name in plugins.names("advantages")
    own = plugins.find(plugins.Advantage, name) if is_known else None
    for keys, ours, off, is_read in (
        (
            (f"{at}normalize_rewards", "grpo.normalize_rewards"),
            *(f"{at}scale", "none"),
            own is None or own.divides,
        ),
        (
            ("grpo.use_leave_one_out_baseline",),
            *(f"{at}use_leave_one_out_baseline", False),
            own is None or (own.baseline == "mean" and not own.whitens),
        ),
    ):
        key = next((key for key in keys if values.get(key) is not None), None)
        if key is None:
            continue
        value, there = values.get(key), values.get(ours)
        if not isinstance(value, bool):
            found = _at(work.tree, key)
            place = found.place if found else work.tree.place
            problems.append(f"{place}: {key}: must be true or false, not {value!r}")
        elif not value and there is None:
            work.set(ours, off, by=key, was=False)
        elif there is None and not is_read:
            work.sentences.append(f"{key}=true has no effect beside {at}name={name}")
        elif there is not None and value == (there == off):
            work.sentences.append(f"{key}={str(value).lower()} has no effect beside {ours}={there}")


def _name_loss(work: Adapted, values: _Values, problems: list[str]) -> None:
    """Name the policy loss by one key, `loss_fn.loss_type`."""
    ours = "loss_fn.loss_type"
    loss = values.get(ours, "ppo")
    for key, name in (("loss_fn.use_cispo", "cispo"), ("loss_fn.disable_ppo_ratio", "reinforce")):
        found, value = _at(work.tree, key), values.get(key)
        if found is None or value in (None, False):
            continue
        if value is not True:
            problems.append(f"{found.place}: {key}: must be true or false, not {value!r}")
            continue
        if loss not in ("ppo", name):
            problems.append(
                f"{found.place}: {key}=true is {ours}={name}, and has no effect beside {loss}; "
                "keep one"
            )
            continue
        loss = name
        work.set(ours, name, by=key, was=True)


def _leave_out_inherited_clips(work: Adapted, schema: type[Section], values: _Values) -> None:
    """Leave out bounds of ratios that a file inherits and makes ineffective, as NeMo RL does.

    They are refused where they stand beside `force_on_policy_ratio`.
    """
    force = "loss_fn.force_on_policy_ratio"
    decides = _at(work.tree, force)
    if decides is None or values.get(force) is not True:
        return
    kinds = step_into((schema,), "loss_fn").kinds
    for name in ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"):
        key, field = f"loss_fn.{name}", step_into(kinds, name).field
        assert field is not None
        found, default, was = _at(work.tree, key), field.get_default(), values.get(key)
        if found is None or was == default or _file(found) == _file(decides):
            continue
        work.set(key, default, by=key, was=was)
        work.sentences.append(
            f"{key}={was} of {found.place} has no effect beside {force}=true, and is left out"
        )


def _file(node: YamlNode) -> str:
    return node.place.rpartition(":")[0]


def _name_validation_sets(
    work: Adapted, schema: type[Section], values: _Values, problems: list[str]
) -> None:
    """Add the sets of `data.val_data_paths` to those of `data.validation`, by their names."""
    paths = _section_at(work, values, "data.val_data_paths", problems)
    if paths is None:
        return
    there, split = _block_at(work, values, "data.validation"), _at(work.tree, "data.val_split")
    if there is not None and isinstance(there.value, list):
        problems.append(
            f"{there.place}: data.validation: name its sets, beside those of data.val_data_paths"
        )
        return
    is_named = there is not None and _are_named(there, _kinds_of_sets(schema, "validation"))
    named = {} if there is None else dict(there.value) if is_named else {"default": there}
    base = {} if split is None else {"split": split}
    for name, one in paths.value.items():
        if name in named:
            problems.append(
                f"{one.place}: data.val_data_paths and data.validation both have a set called "
                f"{name}"
            )
        block = one.value if isinstance(one.value, dict) else {"data_path": one}
        is_benchmark = "benchmark" in block
        named[name] = YamlNode(block if is_benchmark else {**base, **block}, one.place)
    work.tree = with_key(work.tree, ["data", "validation"], YamlNode(named, paths.place))


def _fill_sets(work: Adapted, schema: type[Section], values: _Values, problems: list[str]) -> None:
    """Fill the blocks of data sets from `data.default`, and so the sets that flat keys name."""
    default = _section_at(work, values, "data.default", problems)
    if default is None:
        return
    for name in ("train", "validation"):
        if (block := _block_at(work, values, f"data.{name}")) is not None:
            filled = _filled(block, default, _kinds_of_sets(schema, name))
            work.tree = with_key(work.tree, ["data", name], filled)
    is_named = [values.get(f"data.{key}") for key in ("val_data_path", "val_split")]
    if values.get("data.train") and not any(is_named):
        return  # flat keys name no set, and would be settings of the run that nothing reads
    flat, of_sets = step_into((schema,), "data").kinds, _kinds_of_sets(schema, "train")
    for key, value in default.value.items():
        is_of_all = key in ("max_samples", "split_validation_size")  # not of a validation set
        is_field = step_into(flat, key).standing == "field"
        is_unknown = step_into(of_sets, key).standing == "unknown"  # reported where it is put
        if (is_field or is_unknown) and not is_of_all and _at(work.tree, f"data.{key}") is None:
            work.tree = with_key(work.tree, ["data", key], value)


def _give_own_keywords(work: Adapted, schema: type[Section], values: _Values) -> None:
    """Move what Laurel does not know in the block of a class of the user's own to `kwargs`."""
    for name in ("train", "validation"):
        if (block := _block_at(work, values, f"data.{name}")) is not None:
            kinds = _kinds_of_sets(schema, name)
            work.tree = with_key(work.tree, ["data", name], _with_keywords(block, kinds, kinds))


def _with_keywords(block: YamlNode, kinds: Kinds, of_sets: Kinds) -> YamlNode:
    if isinstance(block.value, list):
        return YamlNode([_with_keywords(one, (), of_sets) for one in block.value], block.place)
    if _are_named(block, kinds):
        named = {name: _with_keywords(one, (), of_sets) for name, one in block.value.items()}
        return YamlNode(named, block.place)
    said = block.value.get("dataset_name") if isinstance(block.value, dict) else None
    if said is None or not re.search(r"[.:]", str(said.value)):
        return block
    known = [key for one in sections_of(of_sets) for key in (*one.model_fields, *foreign_keys(one))]
    own = {
        key: value
        for key, value in block.value.items()
        if key not in known and nearest(key, known) is None
    }
    if not own:
        return block
    kept = {key: value for key, value in block.value.items() if key not in own}
    given = kept.get("kwargs", YamlNode({}, block.place))
    return YamlNode({**kept, "kwargs": overlay(YamlNode(own, block.place), given)}, block.place)


def _block_at(work: Adapted, values: _Values, key: str) -> YamlNode | None:
    """Return what is written at a key, or what it refers to; None if it is null or empty."""
    found = _at(work.tree, key)
    if found is not None and found.reference:
        found = graft(values.get(key), found.place)
    return found if found is not None and found.value else None


def _section_at(work: Adapted, values: _Values, key: str, problems: list[str]) -> YamlNode | None:
    """Return a section that is translated as a whole, likewise."""
    found = _block_at(work, values, key)
    if found is not None and not isinstance(found.value, dict):
        problems.append(f"{found.place}: {key}: must be a section with keys of its own")
        return None
    return found


def _kinds_of_sets(schema: type[Section], name: str) -> Kinds:
    return step_into(step_into((schema,), "data").kinds, name).kinds


def _filled(block: YamlNode, default: YamlNode, kinds: Kinds) -> YamlNode:
    if isinstance(block.value, list):
        return YamlNode([_filled(one, default, ()) for one in block.value], block.place)
    if _are_named(block, kinds):
        named = {name: _filled(one, default, ()) for name, one in block.value.items()}
        return YamlNode(named, block.place)
    is_set = isinstance(block.value, dict) and "benchmark" not in block.value
    return overlay(default, block) if is_set else block


def _are_named(block: YamlNode, kinds: Kinds) -> bool:
    """Report whether a mapping has several sets, by names of their own."""
    return isinstance(block.value, dict) and is_mapping(kind_that_fits(kinds, block))


def _heads_out_of_place(schema: type[Section], values: _Values) -> Iterator[str]:
    """Yield a line for each model that a file makes a reward model, or none, in another's place."""
    is_trained = "rm" in schema.model_fields
    for at, is_one, why in (
        ("policy", is_trained, "laurel rm trains reward models, the other commands policies"),
        ("env.reward_model", True, "what scores is a reward model"),
        ("env.reward_model.models", True, "what scores is a reward model"),
    ):
        is_of_run = at.partition(".")[0] in schema.model_fields
        for key, node, value in values.leaves(f"{at}.reward_model_cfg.enabled"):
            if is_of_run and value is (not is_one):
                yield f"{node.place}: {key}: must be {str(is_one).lower()}: {why}"


def _take_budget_of_padded_rows(work: Adapted, values: _Values) -> None:
    """Say by `sequence_packing` alone whether padded rows have a token budget, and which."""
    at, packing = "policy.dynamic_batching.", "policy.sequence_packing."
    switch, is_on = _at(work.tree, at + "enabled"), values.get(at + "enabled")
    now = _at(work.tree, packing + "enabled")
    if switch is None or now is None or values.get(packing + "enabled") is not False:
        return
    budget: Any = None
    if is_on is True:
        said = (values.get(at + "train_mb_tokens"), values.get(packing + "train_mb_tokens"))
        budget = next((one for one in said if one is not None), _WHOLE_BUDGET)
    elif now.value is True:  # they are packed
        return
    node = YamlNode(budget, switch.place)
    work.tree = with_key(work.tree, [*packing.split(".")[:-1], "train_mb_tokens"], node)


def _pack_where_rows_are_divided(work: Adapted) -> None:
    """Enable packing if a file divides padded rows over context-parallel ranks.

    Laurel divides token forests, which give the same sums as rows, so the run is the same.
    """
    size = _at(work.tree, _DTENSOR + "context_parallel_size")
    key = "policy.sequence_packing.enabled"
    packing = _at(work.tree, key)
    if size is None or packing is None or packing.value is not False or _override_in(packing):
        return
    if not isinstance(size.value, int) or size.value < 2:
        return
    work.set(key, True, by=key, was=False)
    work.sentences.append(
        f"policy.sequence_packing.enabled is true: {_DTENSOR}context_parallel_size={size.value} "
        "divides token forests here, which give the same sums as padded rows"
    )


def _number(values: _Values, key: str, default: float | None = None) -> float:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _UntranslatableError(key, f"must be a number, not {value!r}")
    return float(value)


def _at(tree: YamlNode, key: str) -> YamlNode | None:
    return find_node(tree, key.split("."))


def _override_in(node: YamlNode) -> str | None:
    """Find the override that wrote a part of a node, if one did."""
    if isinstance(node.value, dict):
        return next((o for child in node.value.values() if (o := _override_in(child))), None)
    if isinstance(node.value, list):
        return next((o for child in node.value if (o := _override_in(child))), None)
    return node.place if node.place.startswith("override '") else None
