"""OpenRLHF's reward models and its fine-tuning; sources as in `openrlhf.py`."""

from __future__ import annotations

from laurel.config.importing.openrlhf import (
    COMMON_REST,
    COMMON_RULES,
    optimizer_rules,
    rows,
    validation,
)
from laurel.config.importing.openrlhf_names import (
    COMMON_DEFAULTS,
    COMMON_NAMES,
    MODEL_NAMES,
    OPTIMIZER_DEFAULTS,
)
from laurel.config.importing.rules import Rule, Table, absent, same, together, unneeded
from laurel.config.importing.work import Work


def _model(work: Work) -> None:
    key = "model.model_name_or_path"
    if work.text(key) is None:
        work.refuse(key, "not said: set policy.model_name")
    else:
        work.put("policy.model_name", work[key], by=(key,))


def _pairs(work: Work) -> None:
    rows(work, "data.dataset", "data.dataset_probs")
    if work.is_said("data.dataset_split"):
        work.put("data.train_split", work["data.dataset_split"], by=("data.dataset_split",))
    if work.run == "sft":
        work.put("data.input_key", work["data.input_key"], by=("data.input_key",))
        if work.text("data.output_key") is not None:
            work.put("data.output_key", work["data.output_key"], by=("data.output_key",))
        work.put("data.split_validation_size", 0.0, by=())
        return
    if work.text("data.prompt_key") is not None:
        work.put("data.prompt_key", work["data.prompt_key"], by=("data.prompt_key",))
        work.put("data.dataset_name", "BinaryPreferenceDataset", by=("data.prompt_key",))
    for side in ("chosen", "rejected"):
        work.put(f"data.{side}_key", work[f"data.{side}_key"], by=(f"data.{side}_key",))


def _max_length(work: Work) -> None:
    work.put("policy.max_total_sequence_length", work.whole("data.max_len"), by=("data.max_len",))
    if work.run == "rm":
        work.put("data.truncation_side", "right", by=("data.max_len",),
                 how="cut on the right, as there; left keeps the answer")  # fmt: skip


def _pair_loss(work: Work) -> None:
    work.put("rm.loss.type", "bradley_terry", by=("model.loss_type",),
             how="sigmoid and its other form are the same")  # fmt: skip
    work.put("rm.loss.use_margin", work.flag("model.margin_loss_enable"),
             by=("model.margin_loss_enable",))  # fmt: skip
    if work.flag("model.margin_loss_enable"):
        work.put("data.margin_key", "margin", by=("model.margin_loss_enable",))


_LENGTH = "policy.max_total_sequence_length"
_MODEL_RULES: tuple[Rule, ...] = (
    together(("model.model_name_or_path",), ("policy.model_name",), "as it is", _model),
    same("model.gradient_checkpointing_enable", "policy.dtensor_cfg.activation_checkpointing"),
    same("train.max_epochs", "{run}.max_num_epochs"),
    same("train.batch_size", "policy.train_global_batch_size"),
    same("train.micro_batch_size", "policy.train_micro_batch_size"),
    *optimizer_rules(),
    together(("eval.dataset", "eval.split", "eval.steps"),
             ("{run}.val_period", "{run}.val_at_start", "{run}.val_at_end", "data.val_data_path",
              "data.val_split"), "-1: at the end", validation),
    absent("no auxiliary loss of mixtures of experts", "model.aux_loss_coef"),
    unneeded("only how memory is used", "model.gradient_checkpointing_reentrant"),
)  # fmt: skip

RM = Table(
    rules=(
        *_MODEL_RULES,
        together(("data.max_len",), (_LENGTH, "data.truncation_side"),
                 "cut on the right; an end-of-sequence token is forced there", _max_length),
        together(("data.dataset", "data.dataset_probs", "data.dataset_split", "data.prompt_key",
                  "data.chosen_key", "data.rejected_key"),
                 ("data.train_data_path", "data.train", "data.train_split", "data.prompt_key",
                  "data.dataset_name", "data.chosen_key", "data.rejected_key"),
                 "several, with commas, are a list; probabilities are not carried", _pairs),
        together(("model.loss_type", "model.margin_loss_enable"),
                 ("rm.loss.type", "rm.loss.use_margin", "data.margin_key"),
                 "margins are read from the column `margin`", _pair_loss),
        unneeded("head and loss are always float32", "model.compute_fp32_loss_enable"),
        absent("the head is called `score` here; heads of other names are read by laurel export",
               "ds.value_head_prefix", off=(None, "score")),
        *COMMON_RULES,
        *COMMON_REST,
    ),
    defaults={**COMMON_DEFAULTS, **OPTIMIZER_DEFAULTS, "adam.lr": 9e-6, "data.max_len": 512,
              "data.chosen_key": "chosen", "data.rejected_key": "rejected", "data.prompt_key": None,
              "model.loss_type": "sigmoid", "model.margin_loss_enable": False,
              "model.gradient_checkpointing_enable": False,
              "logger.wandb.project": "openrlhf_train_rm"},
    told_by=frozenset({"data.chosen_key", "data.rejected_key", "model.loss_type",
                       "model.margin_loss_enable", "model.compute_fp32_loss_enable"}),
    other_names={**COMMON_NAMES, **MODEL_NAMES},
)  # fmt: skip

SFT = Table(
    rules=(
        *_MODEL_RULES,
        together(("data.max_len",), (_LENGTH,), "cut on the right", _max_length),
        together(("data.dataset", "data.dataset_probs", "data.dataset_split", "data.input_key",
                  "data.output_key"),
                 ("data.train_data_path", "data.train", "data.train_split", "data.input_key",
                  "data.output_key", "data.split_validation_size"),
                 "several, with commas, are a list; probabilities are not carried", _pairs),
        unneeded("whole conversations are read as they are", "data.multiturn"),
        absent("Laurel learns what the assistant says, never the prompt",
               "model.pretrain_mode_enable"),
        *COMMON_RULES,
        *COMMON_REST,
    ),
    defaults={**COMMON_DEFAULTS, **OPTIMIZER_DEFAULTS, "adam.lr": 5e-6, "train.max_epochs": 2,
              "train.micro_batch_size": 8, "data.max_len": 2048, "data.input_key": "input",
              "data.output_key": None, "data.input_template": "User: {}\nAssistant: ",
              "model.gradient_checkpointing_enable": False,
              "logger.wandb.project": "openrlhf_train_sft"},
    told_by=frozenset({"data.output_key", "data.multiturn", "model.pretrain_mode_enable"}),
    other_names={**COMMON_NAMES, **MODEL_NAMES},
)  # fmt: skip
