"""The templates of `examples/clusters`: the batch script is run, the others are checked."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import psutil
import pytest
import yaml
from packaging.requirements import Requirement

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from planned import planned

pytest.importorskip("ray")

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "examples" / "clusters"
SCRIPT = TEMPLATES / "slurm.sbatch"


SCONTROL = """#!/bin/bash
echo "$@" >> "$CALLS"
if [ "$1 $2" = "show hostnames" ]; then printf '127.0.0.1\\nother\\n'; fi
"""
# Every node is this machine: one process for each task, which ends when srun is told to.
SRUN = """#!/bin/bash
echo "srun $*" >> "$CALLS"
while [[ "$1" == --* ]]; do shift; done
if [ "$1" = ray ]; then set -- "$@" --object-store-memory=80000000; fi
exec "$@"
"""
ENDING = """#!/bin/bash
echo "laurel $*" >> "$CALLS"
sleep 0.5
if [ -n "${WAITS:-}" ]; then
  trap 'echo told >> "$CALLS"; stop=1' TERM
  while [ -z "${stop:-}" ]; do sleep 0.05; done
fi
exit "${STATUS:-0}"
"""
RAY = """#!/bin/bash
echo "ray $*" >> "$CALLS"
if [ "$1" = start ]; then exec sleep 600; fi
"""


@pytest.fixture
def make_job(tmp_path):
    """Makes the environment of a Slurm job of two nodes, each of which is this machine."""

    def make(**others):
        shims = tmp_path / "bin"
        shims.mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, **others}.items():
            (shims / name).write_text(text)
            (shims / name).chmod(0o755)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
        scripts = Path(sys.executable).parent
        return kept | {
            "PATH": f"{shims}:{scripts}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_CPUS_PER_TASK": "2",
            "CALLS": str(tmp_path / "calls"),
        }

    return make


def submit(job, *command):
    return subprocess.Popen(
        ["bash", str(SCRIPT), *(command or ("grpo", "cluster.gpus_per_node=2"))],
        env=job,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ended(process, job):
    """Exit status, output, and what was called."""
    said, _ = process.communicate(timeout=120)
    return process.returncode, said, Path(job["CALLS"]).read_text().splitlines()


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_a_job_of_two_nodes_trains_on_both_and_leaves_nothing(make_job, tmp_path):
    rows = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": "no"} for i in range(16)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = make_job() | {"LAUREL_WARM_COMMANDS": "rm"}
    status, said, calls = ended(
        submit(
            job,
            "rm",
            "cluster.gpus_per_node=1",
            "cluster.device=cpu",
            "cluster.cpu_threads=1",
            "policy.model_name=null",
            "policy.scratch.hidden_size=32",
            "policy.precision=float32",
            "policy.train_global_batch_size=8",
            "policy.max_total_sequence_length=64",
            "rm.max_num_steps=2",
            f"data.train_data_path={pairs}",
            f"checkpointing.checkpoint_dir={tmp_path}/saves",
            f"logger.log_dir={tmp_path}/logs",
        ),
        job,
    )
    assert status == 0, said
    assert "placed  policy: nodes 0-1, slot 0 of each" in said
    assert "finished after step 2" in said
    assert (tmp_path / "saves" / "step_2" / "model.safetensors").is_file()
    first, second, last = (line for line in calls if line.startswith("srun"))
    assert "--nodes=1 --ntasks=1 --nodelist=127.0.0.1 ray start --head" in first
    assert "--nodes=1 --ntasks=1 --exclude=127.0.0.1 ray start --address=127.0.0.1:" in second
    assert not [line for line in calls if line.startswith("requeue")]
    mark = f"laurel-{job['SLURM_JOB_ID']}"
    assert last.endswith(f"--nodes=2 --ntasks=2 rm -rf /tmp/{mark}")
    assert not Path(f"/tmp/{mark}").exists()
    deadline = time.monotonic() + 20
    while left := [p for p in psutil.process_iter(["cmdline"]) if mark in str(p.info["cmdline"])]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_what_the_script_adds_comes_before_what_is_typed(make_job):
    job = make_job(laurel=ENDING, ray=RAY) | {"SLURM_GPUS_ON_NODE": "8"}
    status, said, calls = ended(submit(job), job)
    assert status == 0, said
    (laurel,) = (shlex.split(line) for line in calls if line.startswith("laurel"))
    address = f"127.0.0.1:{20000 + os.getpid() % 20000}"
    assert laurel[1:] == [
        "grpo",
        "cluster.backend=ray",
        f"cluster.address={address}",
        "cluster.num_nodes=2",
        "cluster.patience_seconds=300",
        "cluster.gpus_per_node=8",
        "cluster.gpus_per_node=2",
    ]
    assert load_config(GRPORun, None, laurel[2:]).config.cluster.gpus_per_node == 2
    starts = [line for line in calls if line.startswith("ray start")]
    assert all("--num-gpus=8 --num-cpus=2" in line for line in starts)
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("status", "restarts", "goes_back"),
    [(75, 0, True), (75, 3, False), (2, 0, False), (1, 0, False)],
)
def test_only_what_may_go_better_goes_back_into_the_queue(make_job, status, restarts, goes_back):
    job = make_job(laurel=ENDING, ray=RAY) | {
        "STATUS": str(status),
        "SLURM_RESTART_COUNT": str(restarts),
        "LAUREL_MAX_RESTARTS": "3",
    }
    found, said, calls = ended(submit(job), job)
    assert found == status
    assert (f"requeue {job['SLURM_JOB_ID']}" in calls) == goes_back
    assert (f"goes back into the queue (restart {restarts + 1})" in said) == goes_back


@pytest.mark.slow
def test_the_warning_before_the_time_is_up_reaches_the_run_once(make_job):
    job = make_job(laurel=ENDING, ray=RAY) | {"WAITS": "1"}
    process, calls, deadline = submit(job), Path(job["CALLS"]), time.monotonic() + 60
    while not calls.exists() or "laurel grpo" not in calls.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)  # until it listens
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    status, said, found = ended(process, job)
    assert status == 0, said
    assert found.count("told") == 1
    assert f"requeue {job['SLURM_JOB_ID']}" in found


def test_without_a_command_it_says_how():
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "which command?" in done.stderr


def test_the_pods_are_what_the_configuration_asks_for():
    files = list(yaml.safe_load_all((TEMPLATES / "kuberay.yaml").read_text()))
    config_map, job = files
    assert (job["apiVersion"], job["kind"], config_map["kind"]) == (
        "ray.io/v1",
        "RayJob",
        "ConfigMap",
    )
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    (head,), (worker,) = (pod["containers"] for pod in pods)

    name, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (name, arguments[0], arguments[1]) == ("laurel", "grpo", "--config")
    folder, _, file = arguments[2].rpartition("/")
    config, plan = _planned(config_map["data"][file])
    assert plan.fits, plan.conflicts
    assert plan.num_idle == 0
    assert config.cluster.num_nodes == workers["replicas"] == workers["minReplicas"]
    assert workers["maxReplicas"] == workers["replicas"]
    for amounts in worker["resources"].values():
        assert amounts["nvidia.com/gpu"] == str(config.cluster.gpus_per_node)
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert (config.cluster.backend, config.cluster.address) == ("ray", "auto")
    assert config.cluster.patience_seconds is not None

    assert head["image"] == worker["image"], "the same versions everywhere"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (needed,) = (one for one in map(Requirement, extras["ray"]) if one.name == "ray")
    assert needed.specifier.contains(cluster["rayVersion"])
    assert config.checkpointing.resume == "auto"
    for pod, container in zip(pods, (head, worker), strict=True):
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts.values()) == set(volumes)
        assert volumes[mounts[folder]]["configMap"]["name"] == config_map["metadata"]["name"]
        written = Path(config.checkpointing.checkpoint_dir).parent
        assert "persistentVolumeClaim" in volumes[mounts[str(written)]]


def _planned(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text)
        config = load_config(GRPORun, path).config
    return config, planned(config)


def test_ray_takes_the_cluster_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    written = yaml.safe_load((TEMPLATES / "ray_up.yaml").read_text())
    prepared = prepare_config(dict(written))
    validate_config(prepared)
    assert prepared["max_workers"] == len(written["provider"]["worker_ips"]) == 2
    starts = (*written["head_start_ray_commands"], *written["worker_start_ray_commands"])
    for command in (line for line in starts if " start " in line):
        assert "RAY_AUTH_MODE=token laurel/bin/ray start" in command
    # What its heading types: as many nodes as there are machines, and the folder that is made.
    text = (TEMPLATES / "ray_up.yaml").read_text()
    assert "cluster.num_nodes=3" in text
    assert "source laurel/bin/activate" in text
    assert written["setup_commands"][0].endswith("venv laurel")
