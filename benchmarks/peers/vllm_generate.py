"""vLLM as a worker of benchmarks/generation.py: 8 completions of each prompt, all equally long."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from channel import VLLM_ENVIRONMENT, Channel, Meter


def main() -> None:
    settings = json.loads(sys.argv[1])
    channel = Channel()
    os.environ |= VLLM_ENVIRONMENT
    import torch
    import vllm

    prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in settings["prompts"]]
    engine = vllm.LLM(
        model=settings["model"],
        dtype="float32",
        max_model_len=len(settings["prompts"][0]) + settings["tokens"] + 8,
        max_num_seqs=len(prompts) * settings["completions"],
        enforce_eager=True,
        enable_prefix_caching=True,
        seed=0,
    )
    torch.set_num_threads(settings["threads"])
    sampling = vllm.SamplingParams(
        n=settings["completions"],
        max_tokens=settings["tokens"],
        ignore_eos=True,
        temperature=1.0,
        logprobs=0,
        detokenize=False,
    )
    channel.say(version=vllm.__version__)
    meter = Meter()
    while channel.next_command()["do"] == "generate":
        engine.reset_prefix_cache()
        meter.start()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        cost = meter.read()
        lengths = {len(one.token_ids) for output in outputs for one in output.outputs}
        if lengths != {settings["tokens"]}:
            raise SystemExit(f"vLLM gave completions of {sorted(lengths)} tokens")
        channel.say(**cost)


if __name__ == "__main__":
    main()
