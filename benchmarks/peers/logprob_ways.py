"""One way to take log-probabilities, behind a channel: run by `logprobs.py`.

Every way gets the same hidden states, head and advantages, and differentiates the loss of a first
GRPO step by both: minus the mean over all tokens of the advantage times the ratio of probabilities,
which is 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from channel import MIB, Channel, Meter

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
channel = Channel()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

ROW = 128
"""Tokens of one sequence, for ways that cut between sequences."""

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of hidden states [M, D], head [V, D], tokens [M] and advantages [M / ROW]."""


def of_logprobs(logprobs_M: Tensor, advantages_N: Tensor) -> Tensor:
    ratio_M = (logprobs_M - logprobs_M.detach()).exp()
    return -(ratio_M * advantages_N.repeat_interleave(ROW)).mean()


def plain() -> tuple[str, Loss]:
    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
        logits = hidden @ weight.T
        chosen = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return of_logprobs(chosen, advantages)

    return f"torch {torch.__version__}", loss


def laurel() -> tuple[str, Loss]:
    import laurel as package
    from laurel.models.forest.outputs import token_logprobs

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
        found = token_logprobs(hidden, tokens, weight, with_entropy=SETTINGS["entropy"])
        return of_logprobs(found.logprobs_M, advantages)

    return f"Laurel {package.__version__}", loss


def trl() -> tuple[str, Loss]:
    import trl as package
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    outputs = ("entropy",) if SETTINGS["entropy"] else ()

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
        chosen, *_ = ChunkedLogProbFunction.apply(
            hidden, weight, None, tokens, 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        return of_logprobs(chosen, advantages)

    return f"TRL {package.__version__}", loss


def liger() -> tuple[str, Loss]:
    from importlib.metadata import version

    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    make = LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, chunk_size=1, loss_type="dapo"
    )

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
        rows = tokens.view(-1, ROW)
        found = make(hidden.view(*rows.shape, -1), weight, rows, torch.ones_like(rows), advantages)
        return found[0] if isinstance(found, tuple) else found

    return f"Liger {version('liger-kernel')}", loss


WAYS = {"plain": plain, "laurel": laurel, "trl": trl, "liger": liger}


def resident() -> float:
    """MiB in use now, where the system says it."""
    status = Path("/proc/self/statm")
    if not status.is_file():
        return 0.0
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def main() -> None:
    torch.set_num_threads(SETTINGS["threads"])
    program, loss = WAYS[SETTINGS["way"]]()
    torch.manual_seed(0)
    num_tokens, vocabulary, width = SETTINGS["tokens"], SETTINGS["vocabulary"], SETTINGS["hidden"]
    hidden = torch.randn(num_tokens, width).requires_grad_()
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    tokens = torch.randint(vocabulary, (num_tokens,))
    advantages = torch.randn(num_tokens // ROW)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before = resident()
    channel.say(program=program, torch=torch.__version__)
    meter = Meter()
    while channel.next_command()["do"] == "steps":
        hidden.grad.zero_()
        weight.grad.zero_()
        meter.start()
        loss(hidden, weight, tokens, advantages).backward()
        cost = meter.read()
        channel.say(
            **cost,
            extra_mib=cost["peak_mib"] - before,
            by_hidden=hidden.grad[:: max(1, num_tokens // 64)].flatten()[:4096].tolist(),
            by_weight=weight.grad[:: max(1, vocabulary // 64)].flatten()[:4096].tolist(),
        )


if __name__ == "__main__":
    main()
