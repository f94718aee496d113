"""Laurel's configuration in vLLM's words. Needs no vLLM."""

import asyncio
import multiprocessing
import os
import time
from types import SimpleNamespace

import pytest

from generators import request
from laurel.config.environments import JudgeConfig, ModelServerConfig
from laurel.config.grpo import GenerationConfig
from laurel.errors import ConfigError, DataError
from laurel.extensions.vllm.engine import check_limits, sampling_arguments
from laurel.extensions.vllm.plugin import Vllm
from laurel.extensions.vllm.processes import end_processes, yield_between_answers
from laurel.extensions.vllm.sections import ScoringVllmConfig
from laurel.extensions.vllm.settings import (
    cpu_environment,
    engine_arguments,
    engine_dtype,
    environment,
)

KNOWN = {"model", "kv_cache_memory_bytes", "block_size", "enforce_eager", "swap_space"}


def arguments(on_cpu=True, **settings):
    return engine_arguments(
        "directory",
        GenerationConfig(**settings),
        max_length=512,
        precision="float32",
        seed=3,
        on_cpu=on_cpu,
        known=KNOWN,
    )


def test_the_configuration_reaches_vllm():
    found = arguments(
        on_cpu=False,
        max_concurrent=7,
        vllm_cfg={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.4, "load_format": "dummy"},
    )
    assert found["max_num_seqs"] == 7
    assert found["max_model_len"] == 512
    assert found["tensor_parallel_size"] == 2
    assert found["gpu_memory_utilization"] == 0.4
    assert found["load_format"] == "auto"
    assert found["enable_sleep_mode"]
    assert not found["enforce_eager"]
    assert found["enable_prefix_caching"], "the turns before are not computed anew"
    with pytest.raises(ConfigError, match="enable_prefix_caching: Laurel sets this"):
        arguments(vllm_kwargs={"enable_prefix_caching": False})
    assert "enable_chunked_prefill" not in found
    assert "trust_remote_code" not in found
    assert found["distributed_executor_backend"] == "mp", "in an actor vLLM would start actors"
    assert "distributed_executor_backend" not in arguments()
    several = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match=r"distributed_executor_backend: Laurel sets this"):
        arguments(vllm_cfg=several, vllm_kwargs={"distributed_executor_backend": "ray"})


def test_a_judges_engine_has_every_setting_of_its_section():
    own = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.4}
    assert own.keys() == ScoringVllmConfig.model_fields.keys()
    judge = JudgeConfig()
    found = Vllm().for_judge(ScoringVllmConfig(**own), judge)
    assert {name: getattr(found, name) for name in own} == own


@pytest.mark.parametrize(("on_gpu", "rests"), [(True, True), (True, False), (False, False)])
def test_a_server_of_a_model_gets_its_settings(on_gpu, rests):
    section = ModelServerConfig(model_name="m", tensor_parallel_size=2, arguments=["--seed=3"])
    command, added = Vllm().serve_command(section, "127.0.0.2", 5, on_gpu=on_gpu, rests=rests)
    assert {"--model=m", "--host=127.0.0.2", "--port=5", "--tensor-parallel-size=2"} <= {*command}
    assert command[-1] == "--seed=3", "what the user gives comes last, and counts"
    # It can be put to sleep only with both.
    assert ("--enable-sleep-mode" in command) is rests
    assert (added.get("VLLM_SERVER_DEV_MODE") == "1") is rests
    assert ("--enforce-eager" in command) is not on_gpu
    assert "CUDA_VISIBLE_DEVICES" not in added, "the process sees the GPUs of its slots alone"


def test_processes_on_a_cpu_have_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 2, 3, 9, 4})
    assert cpu_environment(1, is_eager=False) == {}
    assert cpu_environment(1, is_eager=True) == {"TORCH_COMPILE_DISABLE": "1"}
    assert cpu_environment(2, is_eager=False) == {"VLLM_CPU_OMP_THREADS_BIND": "2,3|4,7"}
    assert cpu_environment(5, is_eager=True)["VLLM_CPU_OMP_THREADS_BIND"] == "2|3|4|7|9"
    assert cpu_environment(6, is_eager=True)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_on_a_cpu_prompts_are_computed_in_one_piece():
    found = arguments(vllm_kwargs={"kv_cache_memory_bytes": 5})
    assert found["kv_cache_memory_bytes"] == 5
    assert found["enforce_eager"]
    assert found["enable_chunked_prefill"] is False
    assert found["max_num_batched_tokens"] >= found["max_model_len"]
    assert not found["enable_sleep_mode"]
    assert not arguments(vllm_kwargs={"enforce_eager": False})["enforce_eager"]
    assert engine_dtype(GenerationConfig(), "float32") == "float32"
    named = GenerationConfig(vllm_cfg={"precision": "bfloat16"})
    assert engine_dtype(named, "float32") == "bfloat16", "the policy's unless it is named"


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"model": "x"}, "vllm_kwargs.model: Laurel sets"),
        ({"blok_size": 16}, r"vllm_kwargs.blok_size .* did you mean block_size\?"),
        ({"zzz": 1}, "vllm_kwargs.zzz is no argument"),
    ],
)
def test_arguments_that_cannot_be_given(kwargs, says):
    with pytest.raises(ConfigError, match=says):
        arguments(vllm_kwargs=kwargs)


def test_variables_of_the_user_are_kept(monkeypatch):
    monkeypatch.setenv("LAUREL_TEST_GIVEN", "1")
    with environment({"LAUREL_TEST_GIVEN": "2", "LAUREL_TEST_NEW": "3"}):
        assert os.environ["LAUREL_TEST_GIVEN"] == "1"
        assert os.environ["LAUREL_TEST_NEW"] == "3"
    assert os.environ["LAUREL_TEST_GIVEN"] == "1"
    assert "LAUREL_TEST_NEW" not in os.environ


def test_a_request_in_vllms_words():
    asked = request([5] * 10, max_new_tokens=90, top_k=4, stop_token_ids=(7, 3))
    found = sampling_arguments(asked, 2**63 + 5, max_length=40, end_ids=[3, 9])
    assert found["max_tokens"] == 30
    assert found["seed"] == 5
    assert found["stop_token_ids"] == [3, 7, 9]
    assert found["ignore_eos"]  # end_ids decide, not what vLLM reads in the model's directory
    assert not found["detokenize"]


@pytest.mark.parametrize(
    ("asked", "reports", "error", "says"),
    [
        (request([5] * 40), True, DataError, "40 tokens"),
        (request(temperature=0.001), True, ConfigError, "0.01 to 2"),
        (request(temperature=2.5), True, ConfigError, "0.01 to 2"),
        (request(top_p=0.5), False, ConfigError, "before they cut"),
        (request(top_k=5), False, ConfigError, "before they cut"),
    ],
)
def test_what_vllm_would_draw_differently_is_refused(asked, reports, error, says):
    with pytest.raises(error, match=says):
        check_limits(asked, max_length=40, reports_untruncated=reports)
    check_limits(request([5] * 39, temperature=0.0), max_length=40, reports_untruncated=False)
    check_limits(request(top_p=0.5), max_length=40, reports_untruncated=True)


def test_a_process_of_vllm_that_is_killed_does_not_count_as_running():
    """psutil takes the exit status: a run with vLLM said that an environment left a process."""
    psutil = pytest.importorskip("psutil")
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    end_processes([psutil.Process(process.pid)])
    assert process not in multiprocessing.active_children()


def test_answers_that_are_always_ready_keep_no_other_task_waiting():
    async def ready():
        return "answer"

    socket = SimpleNamespace(recv_multipart=ready)
    llm = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace()))
    llm.engine_core.resources.output_socket = socket
    yield_between_answers(llm)

    async def take_until(other):
        taken = []
        while not other.done():
            taken.append(await socket.recv_multipart())
            assert len(taken) < 10
        return taken

    async def both():
        return await take_until(asyncio.create_task(asyncio.sleep(0)))

    assert set(asyncio.run(both())) == {"answer"}
