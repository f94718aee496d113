"""What share of one GPU's peak does each phase of a step reach, and which kernels take the time?

    python benchmarks/gpu.py --markdown
    python benchmarks/gpu.py --phases training --ways forest --layers eager --profile

A reward model and a policy of 0.9G parameters in bfloat16 do each phase of a step. Scoring,
log-probabilities and training work three ways: as token forests; as the same rows with a copy of
the prompt for every completion; and, for scoring, as padded batches through the model's own
attention. Generation runs as `auto` says and with the other value of
`policy.generation.transformers_cfg.static_slots`. The ways alternate, and medians count. Shares of
the peak count the operations that each way needs, not more. `predicted` is what `laurel plan` says;
of the head, what its bytes and products take at the device's peaks, counted with meta tensors
(`counted.py`).

`--profile` adds the milliseconds and launches of one more call by kind of kernel. A phase that
fails is a row with its error, and the exit code is 1. Each row is appended to the file of `--json`
at once, a line for each: what is measured is not lost if the machine's time ends.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parent))

import torch
from counted import Counted, head
from plan_time import bandwidth, prediction
from rounds import table

from laurel.data.forest import to_padded
from laurel.extensions.doctor.checks import SIZES, peak_of, with_vocabulary
from laurel.extensions.doctor.phases import StepPhases
from laurel.extensions.plan.step_time import Efficiency
from laurel.generation.transformers.engine import chooses_static_slots
from laurel.models.forest.attention import FOREST
from laurel.observe.json_output import json_text
from laurel.planning.memory import ModelShape, Shapes
from laurel.planning.operations import (
    Device,
    Workload,
    forward_operations,
    known_devices,
    training_operations,
)
from laurel.planning.plan import TrainingRequest

WORKLOADS = ("8x8:512+512", "8x16:1024+256", "2x16:8192+512")
TINY = ("2x4:32+16",)
PHASES = ("head", "training", "scoring", "log-probs", "generation")
WAYS = ("forest", "copies", "padded", "static", "dynamic")
LAYERS: dict[str, Literal["auto"] | bool] = {
    "auto": "auto",
    "compiled": True,
    "eager": False,
    "liger": False,
}
"""What `StepPhases.compiles` is, by the option."""
HEADS = ((151_936, 1024), (151_936, 4096))
"""The vocabulary and the width of Qwen3-0.6B and Qwen3-8B."""

# The first that fits; names of fused kernels hold those of what they fuse.
KINDS = {
    "attention": r"flash|fmha|flex_attention|attention|sdpa",
    "compiled": r"^triton",
    "optimizer": r"adam|multi_tensor|foreach",
    "products": r"gemm|cutlass|cublas|nvjet|xmma|splitk|mkldnn|::addmm|::b?mm$|::linear",
    "copies": r"^mem(cpy|set)|::(copy_|fill_|zero_)$",
    "gather and scatter": r"index|gather|scatter|catarray|::cat$",
    "reductions": r"reduce|softmax|::sum$|::mean$",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device under measurement, the precision of the models, and their sizes."""

    device: torch.device
    precision: Any
    shapes: Mapping[str, list[ModelShape]]
    """The shapes of the models by phase."""
    rates: Device
    """Peak rates: of the datasheet, or measured where the device has none."""

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main() -> None:
    options = read_options()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: --device cpu tries the program in small")
    if options.layers == "liger":
        patch_with_liger()
    if options.attention:
        torch.nn.attention.activate_flash_attention_impl(options.attention)
    machine = machine_of(options)
    name = machine.rates.name
    facts = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else name,
        "torch": torch.__version__,
        "precision": machine.precision,
        "layers": options.layers,
        "attention": options.attention,
        "peak": machine.rates.flops[machine.precision],
    }
    print(", ".join(f"{key} {cell(value)}" for key, value in facts.items()), flush=True)
    rows: list[dict[str, Any]] = []
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for row in measured(options, machine):
        said = (f"{key} {cell(value)}" for key, value in row.items() if key != "kernels")
        print(", ".join(said), flush=True)
        for kind, (took, launches) in row.get("kernels", {}).items():
            print(f"    {kind}: {took:.3g} ms in {launches} launches", flush=True)
        rows.append(row)
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json_text({**facts, **row}, indent=None) + "\n")
    shown = [
        {key: row[key] for key in row if key not in ("kernels", "first", "spread")} for row in rows
    ]
    columns = list(dict.fromkeys(key for row in shown for key in row))
    cells = [[cell(row.get(key, "")) for key in columns] for row in shown]
    print(table(columns, cells, as_markdown=options.markdown))
    sys.exit(any("error" in row for row in rows))


def machine_of(options: argparse.Namespace) -> Machine:
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    precision: Any = "bfloat16" if on_gpu else "float32"
    sizes = SIZES[options.device]
    shape = sizes.large if on_gpu else sizes.small
    # The head's share of a policy's time grows with the vocabulary; a reward model has none.
    both = [shape, with_vocabulary(shape, sizes.vocabulary if on_gpu else 2 * shape.vocab_size)]
    peak, _ = peak_of(device, precision)
    known = [
        one
        for one in known_devices().values()
        if on_gpu and one.name in torch.cuda.get_device_name()
    ]
    rates = (
        known[0]
        if known
        else Device(
            name="this machine, measured",
            flops={precision: peak},
            bandwidth=bandwidth(2**26),
            memory=0,
            link=1.0,
            network=1.0,
            source="measured",
        )
    )
    return Machine(
        device=device,
        precision=precision,
        shapes={phase: both if phase == "training" else [shape] for phase in PHASES},
        rates=rates,
    )


def measured(options: argparse.Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase, model, workload and way, or one with the error of a phase."""
    for phase in options.phases:
        try:
            if phase == "head":
                yield from heads(options, machine)
                continue
            for work in options.workload:
                for shape in machine.shapes[phase]:
                    yield from phase_rows(phase, shape, work, options, machine)
                    if machine.device.type == "cuda":
                        torch.cuda.empty_cache()
        except Exception as error:  # whatever a phase meets, the others still have figures
            traceback.print_exc()
            yield {"phase": phase, "error": f"{type(error).__name__}: {error}"[:500]}


def heads(options: argparse.Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a row for each head: forward and backward for a group of 16 x 256 tokens."""
    on_gpu = machine.device.type == "cuda"
    for vocabulary, width in HEADS if on_gpu else ((2000, 64),):
        counted = Counted()
        run = head(vocabulary, width, chunk_size=None)
        with counted:
            run()
        predicted = sum(counted.bytes.values()) / machine.rates.bandwidth
        predicted += counted.operations / machine.rates.flops["bfloat16" if on_gpu else "float32"]
        run = head(vocabulary, width, chunk_size=None, device=machine.device)
        timing = alternated({"head": run}, options.repeats, machine)["head"]
        yield {
            "phase": "head",
            "vocabulary": vocabulary,
            "width": width,
            **timing,
            "predicted": predicted,
            "share_of_peak": counted.operations / timing["seconds"] / peak_rate(machine),
            **profiled(run, options, machine),
        }


def peak_rate(machine: Machine) -> float:
    return machine.rates.flops[machine.precision]


def phase_rows(
    phase: str, shape: ModelShape, work: Workload, options: argparse.Namespace, machine: Machine
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to do a phase; all work with models of the same weights."""
    forest, ways = ways_of(phase, shape, work, options, machine)
    ways = {way: ways[way] for way in options.ways if way in ways}
    planned = prediction(
        Shapes(policy=shape, reward_models=(shape,)),
        work,
        machine.rates,
        Efficiency(),
        precision=machine.precision,
        kind=machine.device.type,
        compiles=str(LAYERS[options.layers]).lower(),
    )
    costs = {one.name: one.shared.seconds for one in planned.phases}
    for way, timing in alternated(ways, options.repeats, machine).items():
        counted = work if way == "forest" else alone(work)
        operations = forward_operations(shape, counted, has_logits=phase != "scoring")
        needed = operations.total
        if phase == "training":
            needed = training_operations(operations, TrainingRequest(precision=machine.precision))
        completions = work.num_prompts * work.per_prompt
        row = {
            "phase": phase,
            "vocabulary": shape.vocab_size,
            "groups": f"{work.num_prompts} x {work.per_prompt}",
            "tokens": f"{work.prompt_tokens} + {work.completion_tokens}",
            "way": way,
            **timing,
            "completion_tokens_per_second": completions
            * work.completion_tokens
            / timing["seconds"],
            "share_of_peak": needed / timing["seconds"] / peak_rate(machine),
        }
        if way == "forest" or phase == "generation":
            row |= {"predicted": costs[phase], **profiled(ways[way], options, machine)}
        yield row
    forest.close()


def ways_of(
    phase: str, shape: ModelShape, work: Workload, options: argparse.Namespace, machine: Machine
) -> tuple[StepPhases, dict[str, Callable[[], Any]]]:
    """Return the phases of a step, and one call for each way to do the one that is asked for."""
    forest, copies = (
        StepPhases(
            shape,
            work,
            machine.device,
            machine.precision,
            shares_prompts=shares,
            compiles=LAYERS[options.layers],
        )
        for shares in (True, False)
    )
    if phase == "generation":
        is_static = chooses_static_slots("auto", forest.policy)
        other = replace(forest, static_slots=not is_static)
        other.__dict__["policy"] = forest.policy
        name = "dynamic" if is_static else "static"
        return forest, {"forest": forest.generate, name: other.generate}
    if phase in ("training", "log-probs"):
        copies.__dict__["policy"] = forest.policy
        copies.__dict__["learner"] = forest.learner
        does = {"training": "train", "log-probs": "logprobs"}[phase]
        return forest, {"forest": getattr(forest, does), "copies": getattr(copies, does)}
    copies.__dict__["reward_model"] = forest.reward_model
    model = forest.reward_model

    def padded() -> list[Any]:
        model.classifier.set_attn_implementation("sdpa")
        try:
            with model.without_gradients():
                return [
                    model(to_padded([group], pad_id=0)).cpu().numpy() for group in forest.groups
                ]
        finally:
            model.classifier.set_attn_implementation(FOREST)

    return forest, {"forest": forest.score, "copies": copies.score, "padded": padded}


def patch_with_liger() -> None:
    """Put Liger's norms, rotary positions and SwiGLU into Qwen 3, in the whole process."""
    if find_spec("liger_kernel") is None:
        raise SystemExit("--layers liger: liger-kernel is not installed: pip install liger-kernel")
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3

    apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )


def alone(work: Workload) -> Workload:
    """Return the same completions, each with a prompt of its own."""
    return replace(work, num_prompts=work.num_prompts * work.per_prompt, per_prompt=1)


def alternated(
    ways: Mapping[str, Callable[[], Any]], repeats: int, machine: Machine
) -> dict[str, dict[str, float]]:
    """Return the median seconds of each way; the first call compiles, and counts apart."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = dict.fromkeys(ways, 0)
    on_gpu = machine.device.type == "cuda"
    for _ in range(repeats + 1):
        for way, call in ways.items():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            machine.wait()
            started = time.perf_counter()
            call()
            machine.wait()
            times[way].append(time.perf_counter() - started)
            if on_gpu:
                peaks[way] = torch.cuda.max_memory_allocated() // 2**20
    return {
        way: {
            "seconds": statistics.median(taken),
            "spread": max(taken) - min(taken),
            "first": first,
            **({"peak_mib": peaks[way]} if on_gpu else {}),
        }
        for way, (first, *taken) in times.items()
    }


def profiled(
    call: Callable[[], Any], options: argparse.Namespace, machine: Machine
) -> dict[str, Any]:
    """Return the milliseconds and launches of one call by kind of kernel, if they are asked for.

    On a CPU, operations of torch are what kernels are on a GPU.
    """
    if not options.profile:
        return {}
    on_gpu = machine.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, *([activity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as seen:
        call()
        machine.wait()
    kernels: dict[str, tuple[float, int]] = {}
    for one in seen.key_averages():
        took = (one.self_device_time_total if on_gpu else one.self_cpu_time_total) / 1e3
        if took and on_gpu == (one.device_type.name == "CUDA"):
            before, launches = kernels.get(kind := kind_of(one.key), (0.0, 0))
            kernels[kind] = (before + took, launches + one.count)
    return {"kernels": dict(sorted(kernels.items(), key=lambda pair: -pair[1][0]))}


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if re.search(words, name)), "elementwise")


def cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def workload(text: str) -> Workload:
    """Read `PROMPTSxCOMPLETIONS:PROMPT_TOKENS+COMPLETION_TOKENS`."""
    found = re.fullmatch(r"(\d+)x(\d+):(\d+)\+(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: wanted is something like {WORKLOADS[0]}")
    prompts, each, prompt, completion = map(int, found.groups())
    return Workload(
        num_prompts=prompts, per_prompt=each, prompt_tokens=prompt, completion_tokens=completion
    )


def listed(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{unknown.pop()}: there are {', '.join(known)}")
        return text.split(",")

    return read


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: small sizes, as a trial")
    add("--phases", type=listed(PHASES), default=list(PHASES), help=",".join(PHASES))
    add("--ways", type=listed(WAYS), default=list(WAYS), help=",".join(WAYS))
    add("--layers", default="auto", choices=list(LAYERS), help="auto: as policy.compile")
    add("--attention", metavar="NAME", help="torch's switch of flash kernels, such as FA4")
    add(
        "--workload",
        type=workload,
        action="append",
        metavar="8x16:1024+256",
        help="prompts x completions : tokens of a prompt + of a completion; may be repeated",
    )
    add("--repeats", type=int, default=5)
    add("--profile", action="store_true", help="milliseconds and launches by kind of kernel")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/gpu.jsonl"))
    options = parser.parse_args()
    if options.workload is None:
        options.workload = [
            workload(one) for one in (WORKLOADS if options.device == "cuda" else TINY)
        ]
    return options


if __name__ == "__main__":
    main()
