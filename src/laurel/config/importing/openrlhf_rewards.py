"""What OpenRLHF's PPO trainer judges with; sources as in `openrlhf_ppo.py`."""

from __future__ import annotations

from urllib.parse import urlsplit

from laurel.config.importing.work import Work


def pair_of(work: Work, key: str) -> tuple[float, float]:
    """A value that is two numbers.

    Raises:
        ConfigError: It is not.
    """
    value = work[key]
    if not (isinstance(value, list | tuple) and len(value) == 2
            and all(isinstance(one, int | float) for one in value)):  # fmt: skip
        raise work.problem(key, "it must be two numbers")
    return float(value[0]), float(value[1])


def rewards(work: Work) -> None:
    """What judges, and what is done to its scores."""
    url, model = work.text("reward.remote_url"), work.text("reward.model_name_or_path")
    agent = work.text("train.agent_func_path")
    env = "env.reward_model."
    if agent is not None:
        work.refuse("train.agent_func_path", "write it as an environment: "
                    "env.custom, data.env_name; until then env.math judges")  # fmt: skip
    elif url is not None and all(urlsplit(one).scheme for one in url.split(",")):
        urls = [one.strip().removesuffix("/get_reward") for one in url.split(",")]
        work.put(env + "urls", urls, by=("reward.remote_url",))
        work.put(env + "url_protocol", "openrlhf", by=("reward.remote_url",))
        work.put(
            env + "model_name",
            work["actor.model_name_or_path"],
            by=("reward.remote_url",),
            how="its template renders, as there; name the reward model's if that is better",
        )
        work.put(env + "enabled", True, by=("reward.remote_url",))
    elif url is not None:
        work.refuse("reward.remote_url", "a function of queries, prompts and labels: rewrite it as "
                    "one of one answer, env.reward_model.function.path (data_source, solution_str, "
                    "ground_truth, extra_info); until then env.math judges")  # fmt: skip
    elif model is not None and "," in model:
        work.refuse("reward.model_name_or_path", "several: env.reward_model.models, with weights")
    elif model is not None:
        work.put(env + "model_name", model, by=("reward.model_name_or_path",))
        work.put(env + "enabled", True, by=("reward.model_name_or_path",))
    else:
        work.refuse(
            "reward.model_name_or_path",
            "not said: name what judges, data.env_name, env.*; until then env.math does",
        )
    if work.flag("reward.normalize_enable") and model is not None and url is None:
        work.put(env + "transform.normalize", "stored", by=("reward.normalize_enable",))
    elif work.flag("reward.normalize_enable"):
        work.refuse("reward.normalize_enable", "of a server or a function nothing is stored: "
                    "env.reward_model.transform.normalize=running")  # fmt: skip
    elif work.is_said("reward.normalize_enable"):
        work.unneeded("reward.normalize_enable", "it is off")
    low, high = pair_of(work, "reward.clip_range")
    work.put("grpo.advantage_clip_low", low, by=("reward.clip_range",),
             how="there, too, what is clipped has been compared")  # fmt: skip
    work.put("grpo.advantage_clip_high", high, by=("reward.clip_range",))


def shaping(work: Work) -> None:
    """Penalties for long and unfinished completions."""
    buffer, factor = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
    stop = "reward.stop_properly_penalty_coef"
    ours = "grpo.reward_shaping."
    if work[buffer] is not None:
        work.put(ours + "enabled", True, by=(buffer,))
        work.put(ours + "overlong_buffer_length", work.whole(buffer), by=(buffer,))
        work.put(ours + "overlong_buffer_penalty", float(work.number(factor)), by=(factor,))
        longest = work["rollout.max_new_tokens"] or work["generate_max_len"]
        if longest is not None:
            work.put(ours + "max_response_length", longest, by=(buffer,))
    elif work.is_said(factor):
        work.unneeded(factor, f"there is no {buffer}")
    if work[stop] is None:
        return
    if work.number(stop) < 0:
        work.refuse(stop, "a fixed reward for cut-off completions; here they keep a share of "
                    "theirs, 0 to 1, or grpo.overlong_filtering leaves them out")  # fmt: skip
        return
    work.put(ours + "enabled", True, by=(stop,))
    work.put(ours + "stop_properly_penalty_coef", float(work.number(stop)), by=(stop,))
    if work[buffer] is not None:
        work.refuse(buffer, f"with {stop} it has no effect here: one of the two")


def filtering(work: Work) -> None:
    """Groups that are left out."""
    on, limits = "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"
    work.put("grpo.use_dynamic_sampling", work.flag(on), by=(on,))
    if not work.is_said(limits):
        return
    if not work.flag(on):
        work.unneeded(limits, "it is off")
    elif pair_of(work, limits) == (0.0, 1.0):
        work.unneeded(limits, "of rewards 0 and 1, groups that differ are those inside")
    else:
        work.refuse(limits, "groups whose rewards differ are kept, whatever their mean")
