"""A policy as a plain Hugging Face directory, and the test of what was written."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.config.schema import PolicyConfig
from laurel.distributed.process import choose_device
from laurel.errors import ModelError
from laurel.models.export_policy import save_policy
from laurel.models.load_policy import SHAPES, check_policy_paths, load_policy
from laurel.models.model_card import HERE, CardFacts, hub_name, policy_card
from laurel.models.plain_check import largest_difference, plain_logprobs
from laurel.models.pretrained import DTYPES
from laurel.models.probe import draw_probe
from laurel.rewards.load import ModelPlace, Say
from laurel.rewards.local import GOLDEN_TOLERANCE, LOW_PRECISION_TOLERANCE

if TYPE_CHECKING:
    from laurel.cli.export import ExportOptions


def write_policy(
    directory: Path, place: ModelPlace, policy: PolicyConfig, options: ExportOptions, say: Say
) -> None:
    """Write it, load it anew without Laurel, and compare log-probabilities.

    Args:
        directory: Exists and is empty.
        place: What is written.
        policy: Its section, from `--set`.
        options: What the command line says.
        say: Told what was found.

    Raises:
        UserError: It writes no text, or what was written says other words.
    """
    config = policy.model_copy(update={"model_name": place.name, "precision": options.dtype})
    device = choose_device(options.device)
    loaded = load_policy(
        config, seed=0, max_length=1, device=device, weights_dtype=DTYPES[options.dtype]
    )
    model = loaded.model
    found = check_policy_paths(model)
    say(
        f"model   {type(model.network).__name__} from {place.name}: "
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {options.dtype} on "
        f"{device.type} (self-check: {found:.1e})"
    )
    for note in loaded.notes:
        say(f"note    {note}")
    facts = CardFacts.load(Path(place.name)) if Path(place.name).is_dir() else None
    if facts is None:
        on_hub = hub_name(place.name)
        facts = CardFacts(base_model=on_hub or "", hub_base=on_hub)
    probe = draw_probe(model, SHAPES, seed=0)
    model.eval()
    with model.without_gradients(), model.in_full_precision():
        expected_M = model(probe.batch(model.path)).logprobs_M.float().cpu().numpy()
    card = policy_card(facts, place=options.push_to_hub or HERE)
    save_policy(directory, model, loaded.tokenizer, card=card)
    facts.save(directory)
    del model, loaded  # one model at a time
    gc.collect()
    found_M = plain_logprobs(
        directory, probe.sequences_N, probe.rows.starts_N.tolist(), device=device
    )
    worst = largest_difference(found_M, expected_M)
    tolerance = GOLDEN_TOLERANCE.get(options.dtype, LOW_PRECISION_TOLERANCE)
    if not worst <= tolerance:
        raise ModelError(
            f"plain transformers gives other log-probabilities from what was written (largest "
            f"difference {worst:.3g}, allowed {tolerance:.0e}). It was not kept; please report the "
            "model"
        )
    say(
        f"tested  plain transformers gives the same log-probabilities of {len(found_M)} tokens in "
        f"a padded batch (max difference {worst:.1e}, allowed {tolerance:.0e})"
    )
