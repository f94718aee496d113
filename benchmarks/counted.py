"""How many bytes and kernels does a GPU need for the head of a policy, counted without a GPU?

    python benchmarks/counted.py --markdown

Meta tensors, which have shapes and no values, go through the code that runs on a GPU; every
operation counts the bytes of its inputs and outputs and one kernel. A pass over a matrix that stays
in the cache counts as one over memory, and a gather counts its whole input, so that the counts are
upper bounds. Seconds are bytes at an H100's 3.35 TB/s; the products' seconds at its 990 TFLOP/s.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from rounds import table, write_json
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laurel.models.forest.outputs import token_logprobs

BYTES_PER_SECOND, OPERATIONS_PER_SECOND = 3.35e12, 990e12
"""An H100's memory rate, and its rate of products in bfloat16."""
GROUP = 16 * 256
"""The completion tokens of a group of 16 completions."""
HEADS = {
    "the trial's model": (32_768, 2048),
    "Qwen3-0.6B": (151_936, 1024),
    "Qwen3-8B": (151_936, 4096),
    "Llama-3-8B": (128_256, 4096),
    "Gemma-3-4B": (262_144, 2560),
}
"""The vocabulary and the width of each model."""
ONLY_WRITTEN = {"zeros", "zeros_like", "new_zeros", "zero_", "fill_", "ones", "full", "arange"}
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view", "lift_fresh"}


class Counted(TorchDispatchMode):
    """Counts the bytes and the kernels of the operations that run while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.kernels = 0
        self.operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        written = [one for one in tree_leaves(made) if isinstance(one, Tensor)]
        if function.is_view or name in FREE or not written:
            return made
        given = {key: one for key, one in (kwargs or {}).items() if key != "out"}
        read = [one for one in tree_leaves((args, given)) if isinstance(one, Tensor)]
        if name in ONLY_WRITTEN:
            read = []
        if name in ("mm", "addmm"):
            self.operations += 2 * read[-2].numel() * read[-1].shape[-1]
        self.bytes[name] += sum(map(stored, read)) + sum(one.nbytes for one in written)
        self.kernels += 1
        return made


def stored(tensor: Tensor) -> int:
    """Return the bytes of a tensor, in which an expanded dimension is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1
    for size, stride in sizes:
        count *= size if stride else 1
    return count * tensor.element_size()


def head(
    vocabulary: int, width: int, *, chunk_size: int | None, device: str | torch.device = "meta"
) -> Callable[[], None]:
    """Return one forward and backward pass of a policy's head in bfloat16, with entropy."""
    like: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    hidden_MD, weight_VD = (
        torch.randn(rows, width, **like).mul_(0.05).requires_grad_() for rows in (GROUP, vocabulary)
    )
    targets_M = torch.randint(vocabulary, (GROUP,), device=device)
    pull_M = torch.ones(GROUP, device=device)

    def run() -> None:
        hidden_MD.grad = weight_VD.grad = None
        out = token_logprobs(
            hidden_MD, targets_M, weight_VD, chunk_size=chunk_size, with_entropy=True
        )
        out.logprobs_M.backward(pull_M)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunk-size", type=int, help="tokens of a chunk; default: as in a run")
    parser.add_argument("--kinds", action="store_true", help="the bytes of each operation too")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/counted.json"))
    options = parser.parse_args()
    rows = []
    for name, (vocabulary, width) in HEADS.items():
        counted, run = Counted(), head(vocabulary, width, chunk_size=options.chunk_size)
        with counted:
            run()
        total = sum(counted.bytes.values())
        rows.append(
            {
                "head": f"{name}: V {vocabulary:,}, D {width:,}",
                "GB": round(total / 1e9, 1),
                "ms of bytes": round(total / BYTES_PER_SECOND * 1e3, 1),
                "ms of products": round(counted.operations / OPERATIONS_PER_SECOND * 1e3, 1),
                "kernels": counted.kernels,
            }
        )
        if options.kinds:
            kinds = ", ".join(f"{kind} {n / 1e9:.1f}" for kind, n in counted.bytes.most_common())
            print(f"{name}, GB: {kinds}")
    print(f"{GROUP:,} completion tokens, forward and backward, torch {torch.__version__}")
    cells = [[str(value) for value in row.values()] for row in rows]
    print(table(list(rows[0]), cells, as_markdown=options.markdown))
    write_json(options.json, {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
