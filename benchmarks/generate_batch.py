"""transformers' continuous batching beside the engine of our own: speed, and what it promises.

    python benchmarks/generate_batch.py [--device cuda] [--model DIRECTORY]

Both draw completions of equal length to several prompts, from the same weights. Then requests are
made of transformers' manager that show whether a policy can be trained with what it draws.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from generation import draw, language_model, laurel_engine
from material import TINY_SHAPE, TRAINING_SHAPE
from rounds import machine, spread, table, write_json
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.policy import PolicyModel
from laurel.models.loading.pretrained import train_tokenizer

COMPLETIONS = 8
LONGEST = 512
"""Tokens of the cache for each running completion."""


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    register()
    model = the_model(options)
    rng = np.random.default_rng(0)
    size = (options.prompts, options.prompt_tokens)
    prompts = rng.integers(3, model.config.vocab_size, size).astype(np.int32)
    engine = our_engine(model, options)
    drawn = options.prompts * COMPLETIONS * options.tokens
    seconds: dict[str, list[float]] = {"Laurel": [], "generate_batch": []}
    with Theirs(model, options) as theirs:
        for index in range(options.rounds + 1):
            for name in seconds:
                start = time.perf_counter()
                if name == "Laurel":
                    draw(engine, prompts, options.tokens)
                else:
                    repeated = prompts.repeat(COMPLETIONS, 0).tolist()
                    found = theirs.drawn(repeated, max_new_tokens=options.tokens)
                    assert all(len(one.generated_tokens) == options.tokens for one in found)
                if index:
                    seconds[name].append(time.perf_counter() - start)
    engine.close()
    promises = tried(model, options, prompts)
    speeds = {name: [drawn / t for t in times] for name, times in seconds.items()}
    rows = [
        [name, spread(values, 0), f"{statistics.median(values) / options.tokens:.1f}"]
        for name, values in speeds.items()
    ]
    header = ["program", "tokens/s: median (range)", "completions/s"]
    print(f"\n{table(header, rows, as_markdown=options.markdown)}\n")
    asked = [[what, answer] for what, answer in promises.items()]
    print(table(["of generate_batch", "found"], asked, as_markdown=options.markdown))
    write_json(
        options.json,
        {"machine": machine(), "options": vars(options), "speeds": speeds, "promises": promises},
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--model", help="a directory of Hugging Face's; default: random weights")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--rounds", type=int, default=3)
    add("--prompts", type=int, default=8)
    add("--prompt-tokens", type=int, default=64)
    add("--tokens", type=int, default=64, help="new tokens of each completion")
    add("--threads", type=int, default=2)
    add("--quick", action="store_true", help="a tiny model, one round: does it run, not how fast")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/generate_batch.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.prompts, options.tokens = 1, 2, 8
    return options


def the_model(options: argparse.Namespace) -> Any:
    if options.model is None:
        found = language_model(TINY_SHAPE if options.quick else TRAINING_SHAPE)
    else:
        found = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return found.to(options.device, getattr(torch, options.dtype)).eval()


def our_engine(model: Any, options: argparse.Namespace) -> TransformersEngine:
    tokenizer = train_tokenizer(["the laurel grows by the western gate"], vocab_size=400)
    if options.device == "cpu" and options.dtype == "float32":
        return laurel_engine(model, tokenizer, fast_matmul=True)
    copied = copy.deepcopy(model)
    copied.set_attn_implementation(FOREST)
    policy = PolicyModel(copied, path="forest", precision=getattr(torch, options.dtype))
    return TransformersEngine(policy, tokenizer, end_ids=[])


class Theirs:
    """A running manager of transformers' continuous batching, with one set of settings."""

    def __init__(self, model: Any, options: argparse.Namespace, **sampling: Any) -> None:
        self.model = copy.deepcopy(model)
        longest = options.prompt_tokens + options.tokens
        pages = -(-max(longest, LONGEST) // 256) * options.prompts * COMPLETIONS
        settings: dict[str, Any] = {"do_sample": True, "eos_token_id": -1, "pad_token_id": 0}
        self._context = self.model.continuous_batching_context_manager(
            generation_config=GenerationConfig(**settings, **sampling),
            continuous_batching_config=ContinuousBatchingConfig(
                return_logprobs=True,
                per_request_processors=True,
                num_blocks=pages if options.device == "cpu" else None,
                max_batch_tokens=1024 if options.device == "cpu" else None,
                seed=0,
            ),
            block=True,
        )

    def __enter__(self) -> Theirs:
        self.manager = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def drawn(self, prompts: list[list[int]], **asked: Any) -> list[Any]:
        """Return the finished requests in the order of the prompts."""
        names = [self.manager.add_request(prompt, **asked) for prompt in prompts]
        found: dict[str, Any] = {}
        while len(found) < len(names):
            one = self.manager.get_result(timeout=60)
            if one is None or one.error is not None:
                raise SystemExit(f"generate_batch failed: {one and one.error}")
            found[one.request_id] = one
        return [found[name] for name in names]

    def logprobs(self, one: Any) -> torch.Tensor:
        """Return the model's own log-probabilities of what was drawn, at temperature 1."""
        ids = torch.tensor([[*one.prompt_ids, *one.generated_tokens]], device=self.model.device)
        plain = self.model.config._attn_implementation
        self.model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            logits = self.model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1].float()
        self.model.set_attn_implementation(plain)
        chosen = ids[0, len(one.prompt_ids) :, None]
        return logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu()


def tried(model: Any, options: argparse.Namespace, prompts: np.ndarray) -> dict[str, str]:
    """Return for each promise that our engines keep what was found of generate_batch."""
    prompt = prompts[0].tolist()
    ours = {"max_new_tokens": options.tokens}
    found = {}
    with Theirs(model, options) as theirs:
        (one,) = theirs.drawn([prompt], **ours)
        end = one.generated_tokens[2]
        ended = theirs.drawn([prompt] * 8, eos_token_id=end, **ours)
    found["log-probabilities: largest difference from a forward pass"] = difference(theirs, one)
    found["end tokens of a request"] = yes(all(end not in o.generated_tokens[:-1] for o in ended))
    with Theirs(model, options) as theirs:
        (again,) = theirs.drawn([prompt], **ours)
    found["the same run gives the same tokens"] = yes(
        again.generated_tokens == one.generated_tokens
    )
    with Theirs(model, options) as theirs:
        _, beside = theirs.drawn([prompts[1].tolist(), prompt], **ours)
    is_same = beside.generated_tokens == one.generated_tokens
    found["a request's tokens depend on its seed, not on others beside it"] = yes(is_same)
    with Theirs(model, options, temperature=0.5, top_k=3) as theirs:
        (cold,) = theirs.drawn([prompt], temperature=1e-3, **ours)
        (cut,) = theirs.drawn([prompt], temperature=1.0, **ours)
        name = theirs.manager.add_request(prompt, max_new_tokens=LONGEST // 2)
        theirs.manager.cancel_request(name)
        left = theirs.drawn([prompt], max_new_tokens=4)
    found["temperature of a request"] = yes(float(np.exp(cold.logprobs).min()) > 0.99)
    found["log-probabilities from before top-k: largest difference"] = difference(theirs, cut)
    found["a request can be cancelled"] = yes(len(left) == 1)
    with Theirs(model, options) as theirs:
        shared = (prompt * LONGEST)[:300]  # longer than a page of the cache
        theirs.drawn([shared], max_new_tokens=2)
        with theirs.manager.pause(), torch.no_grad():
            for parameter in theirs.model.parameters():
                parameter.mul_(1.1)
        (after,) = theirs.drawn([shared], max_new_tokens=4)
    what = "a prompt again after new weights: largest difference (old keys are read)"
    found[what] = difference(theirs, after)
    try:
        with Theirs(model, options, stop_strings=["a"]) as theirs:
            theirs.drawn([prompt], max_new_tokens=2)
        found["stop strings"] = "ignored without a word"
    except ValueError as error:
        found["stop strings"] = f"refused: {error}"
    return found


def difference(theirs: Theirs, one: Any) -> str:
    return f"{float((theirs.logprobs(one) - torch.tensor(one.logprobs)).abs().max()):.1e}"


def yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


if __name__ == "__main__":
    main()
