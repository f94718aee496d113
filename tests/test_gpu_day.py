"""Fifteen minutes on a GPU, rehearsed on a CPU with tiny models: nothing of a day is lost."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from laurel.extensions.doctor.phases import saved_model
from laurel.planning.memory import decoder_shape
from runs import pairs

FOLDER = Path(__file__).parents[1] / "benchmarks"
DAY = FOLDER / "gpu_day"
SHAPE = decoder_shape(
    hidden_size=32,
    num_layers=1,
    intermediate_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=400,
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def prepared(tmp_path):
    """What `prepare.py` makes of a tiny model and of pairs, in two pieces, without packages."""
    (tmp_path / "model").mkdir()
    saved_model(tmp_path / "model", SHAPE)
    for name, count in (("pairs", 16), ("held_out", 4)):
        with gzip.open(tmp_path / f"{name}.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in pairs(count))
    asked = ["--wheels", "", "--model", tmp_path / "model", "--with-first", "0"]
    asked += ["--pairs", tmp_path / "pairs.gz", "--validation", tmp_path / "held_out.gz"]
    subprocess.run(
        [sys.executable, DAY / "prepare.py", tmp_path / "prepared", *asked],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return tmp_path / "prepared"


@pytest.fixture
def begin(tmp_path, prepared):
    """Begins a command of the day; the rest of its words are those of the steps."""

    def begun(number: int, *only: str) -> subprocess.Popen[bytes]:
        places = ["--prepared", prepared, "--out", tmp_path / "out", "--work", tmp_path / "work"]
        command = [sys.executable, DAY / "day.py", str(number), *places]
        command += ["--device", "cpu", "--tiny", "--seconds", "600", "--only", *only]
        environment = {**os.environ, "LAUREL_WARM_COMMANDS": "laurel gpu.py"}
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

    return begun


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_a_day_is_kept_when_it_is_cut_off_and_goes_on(tmp_path, begin):
    out = tmp_path / "out"
    assert begin(1, "attention and head").wait() == 0
    tested = {line["outcome"] for line in lines(out / "tests.jsonl")}
    assert "skipped" in tested or "passed" in tested
    assert tested <= {"passed", "skipped"}

    cut = begin(2, "speed")
    while not lines(out / "speed.jsonl"):
        assert cut.poll() is None
        time.sleep(0.05)
    cut.send_signal(signal.SIGTERM)
    assert cut.wait() == 128 + signal.SIGTERM
    ended = lines(out / "steps.jsonl")[-1]
    assert (ended["step"], ended["status"]) == ("speed", "stopped by signal 15")
    measured = lines(out / "speed.jsonl")
    assert all(row["seconds"] > 0 and row["predicted"] > 0 for row in measured)
    assert measured[0]["kernels"]["products"][0] > 0

    assert begin(2, "sampling", "reward model", "GRPO").wait() == 0
    report = subprocess.run(
        [sys.executable, DAY / "report.py", out], check=True, capture_output=True, text=True
    ).stdout
    log = (out / "log-2.txt").read_text()
    for row in (
        "| speed | stopped by signal 15 |",
        "| reward model | done |",
        "| GRPO | done |",
        "| tests/gpu/test_cascade_gpu.py |",
        "| training | auto | V 512, 2 x 2 of 16 + 4, forest |",
        "| generation | auto | V 512, 2 x 2 of 16 + 4, static |",
        "| GRPO | timing/train/",
    ):
        assert row in report, log[-3000:]


def test_a_report_tells_what_is_news_and_what_is_missing(tmp_path):
    def write(name: str, *rows: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    same = {"device": "H100", "torch": "2.11", "precision": "bfloat16", "attention": None}
    same |= {"layers": "auto", "vocabulary": 512, "groups": "4 x 16", "tokens": "8 + 8"}
    same |= {"way": "forest", "first": 9.0, "completion_tokens_per_second": 1234.0}
    write("steps.jsonl", {"step": "speed", "status": "begun"})
    write(
        "speed.jsonl",
        {**same, "phase": "training", "seconds": 1.0, "predicted": 0.9, "share_of_peak": 0.2},
        {**same, "phase": "generation", "seconds": 1.0, "predicted": 0.5, "share_of_peak": 0.1},
        {**same, "phase": "scoring", "error": "OutOfMemoryError: of no avail"},
    )
    with (tmp_path / "speed.jsonl").open("a") as file:
        file.write('{"phase": "sco')
    write(
        "tests.jsonl",
        {"test": "tests/gpu/a.py::one", "outcome": "passed", "text": ""},
        {"test": "tests/gpu/a.py::two", "outcome": "failed", "text": "many\nE  wrong by 3"},
    )
    found = subprocess.run(
        [sys.executable, DAY / "report.py", tmp_path], check=True, capture_output=True, text=True
    )
    assert "speed.jsonl:4 is cut off" in found.stderr
    for text in (
        "| speed | cut off with the machine |",
        "| tests/gpu/a.py | 1 | 1 | 0 | 0 |",
        "- `tests/gpu/a.py::two`: E  wrong by 3",
        "| 1.1 | 20% (goal 40%) |",
        "| 2 (news) | 10% | 1,234 (goal 10,000) |",
        "OutOfMemoryError: of no avail",
    ):
        assert text in found.stdout


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Traits<cutlass::bfloat16_t>>", "attention"),
        ("triton_tem_fused_flex_attention_backward_0", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "compiled"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "products"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, SiluFunctor>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float>>", "reductions"),
        ("void at::native::index_put_with_sort_kernel", "gather and scatter"),
    ],
)
def test_kernels_are_counted_by_kind(kernel, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    assert importlib.import_module("gpu").kind_of(kernel) == kind
