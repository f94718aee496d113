"""Reward models of OpenRLHF, LLaMA-Factory and TRL, whose heads and rules differ from Laurel's.

What they save, and how they score:

- **OpenRLHF**: a decoder and a linear head without bias, under the name that `config.json` gives
  as `value_head_prefix`. The text loses its last line breaks and ends with EOS, after a blank if
  the template writes no EOS; longer texts are cut on the right and keep EOS.
- **LLaMA-Factory**: a causal language model, and `value_head.safetensors` (or `.bin`) with
  `v_head.summary.weight` and `v_head.summary.bias`. The template alone writes the text.
- **TRL's value heads**: the same two tensors, among the weights of the language model.

All of them read the score from the last token that is not padding, whatever its id.
"""
