"""What verl judges with: its keys `reward.*`, and those of their older places."""

from __future__ import annotations

from laurel.config.importing.rules import absent, together, unneeded
from laurel.config.importing.work import Work

_FUNCTION = "reward.custom_reward_function."
_MODEL = "reward.reward_model."
_OVERLONG = "reward.reward_kwargs.overlong_buffer."
_LIMIT = "reward.reward_kwargs.max_resp_len"


def _judge(work: Work) -> None:
    path, name = work.text(_FUNCTION + "path"), work[_FUNCTION + "name"]
    is_model = work.flag(_MODEL + "enable")
    env = "env.reward_model."
    if path is not None and is_model:
        work.refuse(_MODEL + "enable", "its own function calls the model there: let the function "
                    "ask `laurel serve`, or weigh both with env.reward_model.models")  # fmt: skip
    if path is not None:
        function = path.removeprefix("pkg://").removeprefix("file://")
        work.put(env + "function", {"path": f"{function}:{name}"},
                 by=(_FUNCTION + "path", _FUNCTION + "name"),
                 how="called with the same arguments")  # fmt: skip
        if work[_FUNCTION + "reward_kwargs"]:
            work.put(
                env + "function",
                {"path": f"{function}:{name}", "kwargs": work[_FUNCTION + "reward_kwargs"]},
                by=tuple(_FUNCTION + k for k in ("path", "name", "reward_kwargs")),
            )
        work.put(env + "enabled", True, by=(_FUNCTION + "path",))
        work.put("data.env_name", "reward_model", by=())
        return
    if is_model:
        work.put(env + "enabled", True, by=(_MODEL + "enable",))
        work.put("data.env_name", "reward_model", by=())
        if work.text(_MODEL + "model_path") is None:
            raise work.problem(_MODEL + "model_path", f"{_MODEL}enable is true: which model?")
        work.put(env + "model_name", work[_MODEL + "model_path"], by=(_MODEL + "model_path",))
        _longest(work)
        return
    for key in work.said_of((_MODEL + "model_path", _MODEL + "enable")):
        work.unneeded(key, "it is off")
    work.put("data.env_name", "math", by=(), how="for verl's scores of mathematics by data_source")
    work.refuse(_FUNCTION + "path", "not said: verl scores by each row's data_source; env.math is "
                "written, right for mathematics; code: data.env_name=code")  # fmt: skip


_LENGTHS = tuple(f"{_MODEL}rollout.{key}" for key in ("max_model_len", "prompt_length",
                                                     "response_length"))  # fmt: skip


def _longest(work: Work) -> None:
    """The longest conversation that is judged: said, or the sum of two lengths that are."""
    whole, *parts = _LENGTHS
    if work[whole] is not None:
        work.put("env.reward_model.max_model_len", work.whole(whole), by=(whole,))
    elif work.is_said(*parts):
        work.put("env.reward_model.max_model_len", sum(work.whole(key) for key in parts), by=parts)


def _manager(work: Work) -> None:
    key = "reward.reward_manager.name"
    known = ("naive", "dapo", "batch", "prime", "remote", "rate_limited")
    if work[key] not in known:
        work.refuse(key, "a manager of your own: write an environment, env.custom")
    elif work.is_said(key):
        work.unneeded(key, "completions are judged as they end")
    shaping = "grpo.reward_shaping."
    if not work.flag(_OVERLONG + "enable"):
        for one in work.said_of((_OVERLONG + "enable", _OVERLONG + "len",
                                 _OVERLONG + "penalty_factor", _LIMIT)):  # fmt: skip
            work.unneeded(one, "it is off")
        return
    work.put(shaping + "enabled", True, by=(_OVERLONG + "enable",))
    work.put(shaping + "overlong_buffer_length", work.whole(_OVERLONG + "len"),
             by=(_OVERLONG + "len",))  # fmt: skip
    if work.is_said(_OVERLONG + "penalty_factor"):
        work.put(shaping + "overlong_buffer_penalty",
                 float(work.number(_OVERLONG + "penalty_factor")),
                 by=(_OVERLONG + "penalty_factor",))  # fmt: skip
    limit = _LIMIT if work[_LIMIT] is not None else "data.max_response_length"
    work.put(shaping + "max_response_length", work.whole(limit), by=(limit,))


def _filtering(work: Work) -> None:
    said = "algorithm.filter_groups."
    on = work.flag(said + "enable")
    work.put("grpo.use_dynamic_sampling", on, by=(said + "enable",))
    if not on:
        for key in work.said_of((said + "max_num_gen_batches", said + "metric")):
            work.unneeded(key, "it is off")
        return
    most = work.whole(said + "max_num_gen_batches")
    work.put("grpo.dynamic_sampling_max_gen_batches", most if most > 0 else 1_000_000,
             by=(said + "max_num_gen_batches",), how="0 is no limit")  # fmt: skip
    if work.is_said(said + "metric"):
        work.unneeded(said + "metric", "groups are kept whose rewards differ; of 0 and 1 the same")


REWARD_RULES = (
    together((_FUNCTION + "path", _FUNCTION + "name", _FUNCTION + "reward_kwargs",
              _MODEL + "enable", _MODEL + "model_path", *_LENGTHS),
             ("env.reward_model.enabled", "env.reward_model.function",
              "env.reward_model.model_name", "env.reward_model.max_model_len", "data.env_name"),
             "functions run unchanged; without either, `math`", _judge),
    together(("reward.reward_manager.name", _OVERLONG + "enable", _OVERLONG + "len",
              _OVERLONG + "penalty_factor", _LIMIT),
             ("grpo.reward_shaping.enabled", "grpo.reward_shaping.overlong_buffer_length",
              "grpo.reward_shaping.overlong_buffer_penalty",
              "grpo.reward_shaping.max_response_length"), "DAPO's penalty for length", _manager),
    together(("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches",
              "algorithm.filter_groups.metric"),
             ("grpo.use_dynamic_sampling", "grpo.dynamic_sampling_max_gen_batches"),
             "0 batches is no limit", _filtering),
    unneeded("figures of functions and penalties are always logged", _OVERLONG + "log",
             "algorithm.filter_groups.max_inflight_gen_batches"),
    unneeded("env.reward_model.num_workers, .resources and cluster.placement say where it runs",
             "reward.num_workers", _MODEL + "enable_resource_pool", _MODEL + "n_gpus_per_node",
             _MODEL + "nnodes", _MODEL + "rollout.*", "reward_model.rollout.*",
             "reward_model.enable_resource_pool", "reward_model.n_gpus_per_node",
             "reward_model.nnodes", "reward_model.micro_batch_size_per_gpu",
             "reward_model.micro_batch_size", "reward_model.forward_max_token_len_per_gpu",
             "reward_model.use_dynamic_bsz", "reward_model.strategy", "reward_model.model.*",
             "reward._target_"),
    absent("write an environment, env.custom", "reward.reward_manager.source",
           "reward.reward_manager.module.*", "reward_model.reward_loop_source",
           "reward_model.reward_loop_module_path", "reward_model.reward_loop_class_name",
           off=(None, "register", "custom_reward_manager")),
    absent("programs run in Laurel's own sandbox: env.code, or sandbox.url",
           "reward.sandbox_fusion.url", "sandbox_fusion.url", "reward_model.sandbox_fusion.url"),
    unneeded("only with sandbox_fusion.url", "reward.sandbox_fusion.*", "sandbox_fusion.*",
             "reward_model.sandbox_fusion.*"),
)  # fmt: skip
