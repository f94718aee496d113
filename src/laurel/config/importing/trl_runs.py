"""TRL's reward and supervised trainers; sources as in `trl.py`."""

from __future__ import annotations

from typing import Any

from laurel.config.importing.rules import Table, absent, same, together, unneeded
from laurel.config.importing.trl import COMMON_RULES
from laurel.config.importing.trl_names import COMMON_DEFAULTS, COMMON_REST, OTHER_NAMES
from laurel.config.importing.work import Work

UNLIMITED = 8192


def _max_length(work: Work) -> None:
    key = "max_length"
    if work[key] is None:
        work.put("policy.max_total_sequence_length", UNLIMITED, by=(key,))
        work.refuse(key, f"there is always a limit here: {UNLIMITED} tokens are written")
        return
    work.put("policy.max_total_sequence_length", work.whole(key), by=(key,))
    if work.run == "rm":
        work.put("data.overlong", "drop", by=(key,), how="longer pairs are left out, as there")


def _template(work: Work) -> None:
    path = work.text("chat_template_path")
    if path is not None and path.endswith((".jinja", ".jinja2")):
        work.put("policy.tokenizer.chat_template", path, by=("chat_template_path",))
    elif path is not None:
        work.refuse("chat_template_path", "save that tokenizer's template as a .jinja file and set "
                    "policy.tokenizer.chat_template")  # fmt: skip
    elif work.is_said("chat_template_path"):
        work.unneeded("chat_template_path", "the tokenizer's own is used")


_LENGTH = "policy.max_total_sequence_length"
_TEXT = (
    together(("chat_template_path",), ("policy.tokenizer.chat_template",), "only a .jinja file",
             _template),
    absent("the template and the tokenizer end a turn: policy.tokenizer.*", "eos_token"),
    same("pad_token", "policy.tokenizer.pad_token"),
)  # fmt: skip


def _centering(work: Work) -> None:
    value = work["center_rewards_coefficient"]
    work.put("rm.loss.center_rewards_coefficient", 0.0 if value is None else value,
             by=("center_rewards_coefficient",))  # fmt: skip


RM = Table(
    rules=(
        *COMMON_RULES,
        together(("max_length",), (_LENGTH, "data.overlong"),
                 "longer pairs are dropped, as there; null becomes a limit", _max_length),
        *_TEXT,
        together(("center_rewards_coefficient",), ("rm.loss.center_rewards_coefficient",),
                 "null is 0", _centering),
        *COMMON_REST,
    ),
    defaults={**COMMON_DEFAULTS, "learning_rate": 1e-4, "max_length": 1024,
              "center_rewards_coefficient": None},
    told_by=frozenset({"center_rewards_coefficient"}),
    other_names=OTHER_NAMES,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- sft


def _who_is_imitated(work: Work) -> None:
    if work.flag("assistant_only_loss"):
        work.put("sft.only_unmask_final", False, by=("assistant_only_loss",))
    else:
        work.refuse("assistant_only_loss", "Laurel learns what the assistant says, never the "
                    "prompt; there every token of a conversation is learned unless this is true "
                    "(rows of prompt and completion: the completion, as here)")  # fmt: skip


def _packing(work: Work) -> None:
    if work.flag("packing"):
        work.refuse("packing", "a batch counts conversations here, packed rows there: lower "
                    "policy.train_global_batch_size by the conversations of a row; nothing is "
                    "padded either way")  # fmt: skip
    elif work.is_said("packing"):
        work.unneeded("packing", "it is off; nothing is padded here anyway")


_SFT_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS, "learning_rate": 2e-5, "max_length": 1024, "assistant_only_loss": False,
    "packing": False, "shuffle_dataset": False, "completion_only_loss": None, "loss_type": None,
    "truncation_mode": "keep_start",
}  # fmt: skip

SFT = Table(
    rules=(
        *COMMON_RULES,
        together(("max_length",), (_LENGTH,), "the end is cut off, as there; null becomes a limit",
                 _max_length),
        *_TEXT,
        together(("assistant_only_loss",), ("sft.only_unmask_final",),
                 "only the assistant is imitated here", _who_is_imitated),
        together(("packing",), (), "not carried where it is on", _packing),
        unneeded("rows of an epoch are drawn in a new order anyway, as by its sampler",
                 "shuffle_dataset"),
        unneeded("only how rows are packed", "packing_strategy", "eval_packing"),
        absent("of prompt and completion, the completion is learned here", "completion_only_loss",
               off=(None, True)),
        absent("the end is cut off here", "truncation_mode", off=(None, "keep_start")),
        absent("the plain negative log-likelihood is learned here", "loss_type",
               off=(None, "nll", "chunked_nll")),
        absent("no auxiliary loss of mixtures of experts", "router_aux_loss_coef", off=(0, 0.001)),
        absent("rows of conversations, or of a question and an answer: data.input_key, "
               "data.output_key", "dataset_text_field", off=(None, "text")),
        absent("the template decides", "dataset_kwargs"),
        *COMMON_REST,
    ),
    defaults=_SFT_DEFAULTS,
    told_by=frozenset({"assistant_only_loss", "packing", "completion_only_loss",
                       "dataset_text_field", "packing_strategy", "truncation_mode",
                       "eval_packing"}),
    other_names=OTHER_NAMES,
)  # fmt: skip
