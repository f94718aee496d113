"""What the process has imported that ranks are forked from (`parallel_runs.py`)."""

import gc

import peft  # noqa: F401
import torch.distributed.checkpoint.hf_storage  # noqa: F401
import transformers.generation.utils
import transformers.models.gemma2.modeling_gemma2
import transformers.models.gemma3.modeling_gemma3
import transformers.models.gpt_oss.modeling_gpt_oss
import transformers.models.llama.modeling_llama
import transformers.models.mixtral.modeling_mixtral
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import learner_work  # noqa: F401
import parallel_work  # noqa: F401
import parts_work  # noqa: F401
import spread_work  # noqa: F401

get_checkpoint_conversion_mapping("qwen3")  # builds those of all models, which it keeps
gc.freeze()
