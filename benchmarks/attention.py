"""Attention of one layer, forward and backward: the cascade against segment by segment.

    python benchmarks/attention.py --threads 1 --clock cpu
    python benchmarks/attention.py --host

Both see the same tensors and take turns in one process; the ratio is the median over the pairs.
`--host` asks something else: the processor time of the host for one call of the flash kernels of
GPUs, through torch's private operator, as the cascade calls it, and through its public function
`varlen_attn`. The kernel behind both is one for CPUs that computes nothing, so no GPU is needed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rounds import add_clock, machine, spread, table, write_json
from torch import Tensor, nn

from laurel.models.forest.attention import AttentionOptions, ForestPlan
from laurel.types import Span, Tree

SHAPES = ((256, 64, 8), (1024, 64, 16), (2048, 128, 16), (2048, 64, 64), (2048, 256, 8))
"""Tokens of the prompt, tokens of a completion, completions."""
PLAIN = AttentionOptions(scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None)


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    if options.host:
        print(host_time(options.repeats))
        return
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    rows = [
        measure(*shape, options=options, clock=clock)
        for shape in SHAPES
        if options.only is None or f"{shape[0]}x{shape[1]}x{shape[2]}" in options.only
    ]
    header = ["prompt", "completion", "group", "segments ms", "cascade ms", "times as fast", "diff"]
    cells = [
        [
            *(str(row[name]) for name in ("prompt", "completion", "group")),
            *(spread([1e3 * s for s in row[name]], 1) for name in ("segments", "cascade")),
            spread(
                [one / other for one, other in zip(row["segments"], row["cascade"], strict=True)]
            ),
            f"{row['difference']:.1e}",
        ]
        for row in rows
    ]
    print(table(header, cells, as_markdown=options.markdown))
    write_json(options.json, {"machine": machine(), "options": vars(options), "rows": rows})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--heads", type=int, nargs=3, default=[8, 2, 64], help="H, H_kv, width")
    parser.add_argument("--only", nargs="*", help="shapes, like 1024x64x16")
    parser.add_argument("--host", action="store_true", help="the host's time of a call on GPUs")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/attention.json"))
    add_clock(parser)
    return parser.parse_args()


def measure(
    prompt: int,
    completion: int,
    group: int,
    *,
    options: argparse.Namespace,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Seconds of every repeat, and the largest relative difference of output and gradients."""
    heads, kv_heads, width = options.heads
    starts = range(prompt, prompt + group * completion, completion)
    tree = Tree.of(Span(0, prompt), [Span(s, s + completion) for s in starts])
    tokens = prompt + group * completion
    torch.manual_seed(0)
    # As a layer has them: tokens first, heads side by side.
    query, key, value = (
        torch.randn(1, tokens, h, width).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    pull = torch.randn(1, tokens, heads, width).transpose(1, 2)
    # A step makes its indices and masks once for all layers: here a first call, not measured, does.
    plan = ForestPlan([tree])
    forms: dict[str, Callable[[], Tensor]] = {
        "segments": lambda: plan.attend_by_segments(query, key, value, PLAIN),
        "cascade": lambda: plan.attend(nn.Identity(), query, key, value, PLAIN),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    found: dict[str, list[Tensor]] = {}
    for repeat in range(options.repeats + 1):
        for name in forms if repeat % 2 else reversed(forms):
            started = clock()
            out = forms[name]()
            gradients = torch.autograd.grad(out, (query, key, value), pull)
            took = clock() - started
            found[name] = [out.detach(), *gradients]
            if repeat:
                seconds[name].append(took)
    difference = max(
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(found["segments"], found["cascade"], strict=True)
    )
    ratio = statistics.median(
        one / other for one, other in zip(seconds["segments"], seconds["cascade"], strict=True)
    )
    print(f"  {prompt} + {group} x {completion}: {ratio:.2f}", file=sys.stderr)
    shape = {"prompt": prompt, "completion": completion, "group": group}
    return {**shape, **seconds, "ratio": ratio, "difference": difference}


def host_time(repeats: int, calls: int = 500) -> str:
    """Return the microseconds of a call, least of the repeats, through either way."""
    from torch.library import Library
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    query, key = torch.randn(64, 4, 16), torch.randn(64, 2, 16)
    ends = torch.tensor([0, 64], dtype=torch.int32)

    def kernel(*given: object, **options: object) -> tuple[Tensor, ...]:
        return tuple(torch.empty(size) for size in ((64, 4, 16), (4, 64), (2,), (), (0,)))

    library = Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", kernel)
    private = torch.ops.aten._flash_attention_forward
    ways: dict[str, Callable[[], object]] = {
        "private operator": lambda: private(
            query, key, key, ends, ends, 64, 64, 0.0, True, False, scale=0.25
        ),
        "public function": lambda: varlen_attn(
            query,
            key,
            key,
            ends,
            ends,
            64,
            64,
            return_aux=AuxRequest(lse=True),
            scale=0.25,
            window_size=(-1, 0),
            enable_gqa=True,
        ),
    }
    least = dict.fromkeys(ways, float("inf"))
    with torch.no_grad():
        for _ in range(repeats):
            for name, way in ways.items():
                started = time.process_time()
                for _ in range(calls):
                    way()
                taken = 1e6 * (time.process_time() - started) / calls
                least[name] = min(least[name], taken)
    del library
    return ", ".join(f"{name} {taken:.0f} us" for name, taken in least.items())


if __name__ == "__main__":
    main()
