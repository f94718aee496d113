"""What the process has imported that ranks are forked from (`parallel_runs.py`)."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from warm_cli import load

get_checkpoint_conversion_mapping("qwen3")  # builds those of all models, which it keeps
load(
    (
        "peft",
        "torch.distributed.checkpoint.hf_storage",
        "transformers.generation.utils",
        *(
            f"transformers.models.{name}.modeling_{name}"
            for name in ("gemma2", "gemma3", "gpt_oss", "llama", "mixtral", "qwen3")
        ),
        "learner_work",
        "parallel_work",
        "parts_work",
        "spread_work",
    )
)
