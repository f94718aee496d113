"""vLLM as a worker of benchmarks/rm_scoring.py: scores of every completion with its prompt."""

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
    from vllm.config import PoolerConfig

    ids_NL = json.loads(Path(settings["rows"]).read_text())
    rows = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in ids_NL]
    engine = vllm.LLM(
        model=settings["model"],
        runner="pooling",
        convert="classify",
        dtype="float32",
        max_model_len=max(map(len, ids_NL)) + 8,
        max_num_seqs=len(rows),
        enforce_eager=True,
        enable_prefix_caching=True,
        pooler_config=PoolerConfig(seq_pooling_type="LAST", use_activation=False),
    )
    torch.set_num_threads(settings["threads"])
    asked = vllm.PoolingParams(task="classify", use_activation=False)
    channel.say(version=vllm.__version__)
    meter = Meter()
    while channel.next_command()["do"] == "score":
        engine.reset_prefix_cache()
        meter.start()
        outputs = engine.encode(rows, asked, pooling_task="classify", use_tqdm=False)
        cost = meter.read()
        channel.say(**cost, scores=[float(output.outputs.data.flatten()[0]) for output in outputs])


if __name__ == "__main__":
    main()
