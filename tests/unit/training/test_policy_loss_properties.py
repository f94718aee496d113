"""What may not change a policy's loss: how it is split, ordered, masked and rounded on the way."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laurel import plugins
from laurel.config.grpo import PolicyLossConfig
from laurel.models.forest.outputs import TokenOutputs
from laurel.training.learner import add_up
from laurel.training.policy_loss import (
    DemonstrationLabels,
    DemonstrationLoss,
    PolicyLabels,
)
from policy_batches import gradient, labels, loss_of, outputs

torch.set_num_threads(1)

CORRECTED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.5}
EVERY_SETTING: dict[str, dict[str, Any]] = {
    "ppo": {"reference_policy_kl_penalty": 0.1, "positive_example_nll_weight": 0.2},
    "dual clip": {"ratio_clip_c": 1.5, "normalizer": "max_length"},
    "cispo": {
        "loss_type": "cispo",
        "use_on_policy_kl_approximation": True,
        "reference_policy_kl_penalty": 0.1,
    },
    "reinforce": {
        "loss_type": "reinforce",
        "token_level_loss": False,
        "positive_example_nll_weight": 0.2,
    },
    "gspo": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "reference_policy_kl_penalty": 0.1,
    },
    "gspo, corrected": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "truncated_importance_sampling_type": "tis",
        **CORRECTED,
    },
    "icepop": {
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio_min": 0.5,
        **CORRECTED,
    },
    "distilled": {"distillation": {"model_name": "teacher", "weight": 0.3, "clamp_value": 1.5}},
    "distilled alone": {
        "loss_type": "reinforce",
        "distillation": {"model_name": "teacher", "rewards": False},
    },
    "gmpo": {"loss_type": "gmpo", "token_level_loss": False},
    "sapo": {"loss_type": "sapo", "token_level_loss": False},
    "dppo": {"loss_type": "dppo"},
    "dppo, kl": {"loss_type": "dppo", "dppo": {"divergence": "kl", "high": 0.05, "low": 0.02}},
    "seq-mask-tis": {"truncated_importance_sampling_type": "seq-mask-tis", **CORRECTED},
    "seq-tis": {"truncated_importance_sampling_type": "seq-tis", **CORRECTED},
}
# Few examples of each: the settings share all of the code but a formula of a few lines.
every_setting = pytest.mark.parametrize("chosen", EVERY_SETTING.values(), ids=EVERY_SETTING.keys())


def test_all_losses_are_among_them():
    """Of Laurel's own: a new one is tried like the others."""
    own = {name for name in plugins.names("losses") if plugins.is_own("losses", name)}
    assert own == {str(chosen.get("loss_type", "ppo")) for chosen in EVERY_SETTING.values()}


LOGPROB = st.floats(-3, -0.0078125, width=32)


@dataclass
class Drawn:
    """A batch, and what the model gives for each of its groups."""

    batch: list[PolicyLabels]
    values: list[Tensor]
    cuts: list[int]


@st.composite
def batches(draw):
    batch, values = [], []
    with_old = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))

        def rows(element, lengths=lengths):
            return [draw(st.lists(element, min_size=n, max_size=n)) for n in lengths]

        size = {"min_size": len(lengths), "max_size": len(lengths)}
        batch.append(
            labels(
                draw(st.lists(st.floats(-2, 2, width=32), **size)),
                rows(LOGPROB),
                masks=rows(st.booleans()),
                used=draw(st.lists(st.booleans(), **size)),
                old=rows(LOGPROB) if with_old else None,
                reference=rows(LOGPROB),
                teacher=rows(LOGPROB),
                rewards=draw(st.lists(st.none() | st.sampled_from([-1.0, 0.0, 1.0]), **size)),
            )
        )
        values.append(torch.tensor([v for row in rows(LOGPROB) for v in row], dtype=torch.float64))
    cuts = draw(st.lists(st.integers(0, len(batch)), max_size=3))
    return Drawn(batch=batch, values=values, cuts=[0, *sorted(cuts), len(batch)])


def flat(values):
    return torch.cat([*values, torch.zeros(0, dtype=torch.float64)])


@every_setting
@given(drawn=batches())
@settings(max_examples=10, deadline=None)
def test_splitting_a_batch_changes_neither_loss_nor_gradient_nor_figures(chosen, drawn):
    loss = loss_of(**chosen)
    denominator = max(loss.count(drawn.batch), 1.0)
    whole = outputs(flat(drawn.values))
    expected = loss(whole, drawn.batch, num_groups=denominator)
    expected.loss.backward()  # type: ignore[no-untyped-call]
    assert whole.logprobs_M.grad is not None

    total, slopes, sums = 0.0, list[float](), dict[str, Tensor]()
    for start, end in pairwise(drawn.cuts):
        part = outputs(flat(drawn.values[start:end]))
        found = loss(part, drawn.batch[start:end], num_groups=denominator)
        found.loss.backward()  # type: ignore[no-untyped-call]
        add_up(sums, found.sums)
        total += float(found.loss.detach())
        assert part.logprobs_M.grad is not None
        slopes += part.logprobs_M.grad.tolist()

    parts = [drawn.batch[start:end] for start, end in pairwise(drawn.cuts)]
    assert sum(map(loss.count, parts)) == loss.count(drawn.batch)
    assert total == pytest.approx(float(expected.loss.detach()), rel=1e-12, abs=1e-12)
    assert slopes == pytest.approx(whole.logprobs_M.grad.tolist(), rel=1e-12, abs=1e-12)
    assert loss.metrics(sums) == pytest.approx(loss.metrics(expected.sums), rel=1e-12, abs=1e-12)


@every_setting
@given(drawn=batches(), junk=st.sampled_from([math.nan, math.inf, -math.inf, -1e30]))
@settings(max_examples=10, deadline=None)
def test_what_is_masked_contributes_exactly_nothing(chosen, drawn, junk):
    loss = loss_of(**chosen)
    denominator = max(loss.count(drawn.batch), 1.0)
    given_ = outputs(flat(drawn.values))
    expected = loss(given_, drawn.batch, num_groups=denominator)
    slopes = torch.tensor(gradient(loss, given_, drawn.batch), dtype=torch.float64)

    spoiled_batch, spoiled = [], flat(drawn.values)
    keep = np.concatenate(
        [m & u for row in drawn.batch for m, u in zip(row.masks_GL, row.used_G, strict=True)]
    )
    spoiled[torch.from_numpy(~keep)] = junk
    for row in drawn.batch:
        masks = [m & u for m, u in zip(row.masks_GL, row.used_G, strict=True)]

        def spoil(streams, masks=masks):
            if streams is None:
                return None
            junk_ = np.float32(max(junk, -1e30))
            return tuple(np.where(m, s, junk_) for m, s in zip(masks, streams, strict=True))

        spoiled_batch.append(
            replace(
                row,
                behaviour_GL=spoil(row.behaviour_GL),
                old_GL=spoil(row.old_GL),
                reference_GL=spoil(row.reference_GL),
                advantages_G=tuple(
                    a if used else math.nan
                    for a, used in zip(row.advantages_G, row.used_G, strict=True)
                ),
            )
        )
    given_ = outputs(spoiled)
    found = loss(given_, spoiled_batch, num_groups=denominator)
    assert torch.equal(found.loss, expected.loss)
    assert found.sums == expected.sums
    assert gradient(loss, given_, spoiled_batch) == slopes.tolist()
    assert slopes[torch.from_numpy(~keep)].tolist() == [0.0] * int((~keep).sum())


@every_setting
@given(drawn=batches(), random=st.randoms(use_true_random=False))
@settings(max_examples=6, deadline=None)
def test_the_order_of_completions_does_not_matter(chosen, drawn, random):
    loss = loss_of(**chosen)
    denominator = max(loss.count(drawn.batch), 1.0)
    shuffled, values = [], []
    for row, streams in zip(drawn.batch, drawn.values, strict=True):
        order = list(range(len(row.masks_GL)))
        random.shuffle(order)
        pieces = streams.split([len(mask) for mask in row.masks_GL])
        shuffled.append(row.subset(order))
        values += [pieces[i] for i in order]
    one = loss(outputs(flat(drawn.values)), drawn.batch, num_groups=denominator)
    other = loss(outputs(flat(values)), shuffled, num_groups=denominator)
    torch.testing.assert_close(other.loss, one.loss, rtol=1e-12, atol=1e-12)
    assert loss.metrics(other.sums) == pytest.approx(loss.metrics(one.sums), rel=1e-12, abs=1e-12)


@given(drawn=batches())
@settings(max_examples=25, deadline=None)
def test_the_first_update_has_the_gradient_of_reinforce(drawn):
    batch = [replace(row, old_GL=None) for row in drawn.batch]
    for normalizer in ("tokens", "sequences", "max_length"):
        ppo = gradient(loss_of(normalizer=normalizer), outputs(flat(drawn.values)), batch)
        plain = gradient(
            loss_of(normalizer=normalizer, loss_type="reinforce"),
            outputs(flat(drawn.values)),
            batch,
        )
        assert ppo == pytest.approx(plain, rel=1e-15)


@every_setting
def test_autocast_and_lower_precision_change_nothing(chosen):
    loss = loss_of(**chosen)
    row = [[-0.5, -1.25], [-2.0]]
    other = [[-1.0, -1.0], [-1.0]]
    batch = [labels([1.5, -0.5], row, old=row, reference=other, teacher=other)]
    half = torch.tensor([-0.75, -1.5, -1.75], dtype=torch.bfloat16)
    expected = loss(TokenOutputs(half.float(), None), batch, num_groups=3.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(TokenOutputs(half, half), batch, num_groups=3.0)
    assert found.loss.dtype == torch.float32
    assert torch.equal(found.loss, expected.loss)
    assert {name: found.sums[name] for name in expected.sums} == expected.sums
    assert float(found.sums["entropy"]) == -4.0


def test_a_subset_of_labels():
    row = labels(
        [1.0, 2.0, 3.0],
        [[-1.0], [-2.0, -2.5], [-3.0]],
        reference=[[0.0]] * 3,
        used=[True, True, False],
        rewards=[None, 1.0, 2.0],
    )
    assert (row.num_tokens, row.num_samples) == (3, 2)
    part = row.subset([2, 1])
    assert part.advantages_G == (3.0, 2.0)
    assert part.used_G == (False, True)
    assert part.rewards_G == (2.0, 1.0)
    assert part.old_GL is None
    assert [values.tolist() for values in part.behaviour_GL] == [[-3.0], [-2.0, -2.5]]
    assert (part.num_tokens, part.num_samples) == (2, 1)
    shown = DemonstrationLabels(masks_GL=(np.array([True, False]), np.array([True, True])))
    assert [shown.subset([i]).num_tokens for i in (0, 1)] == [1, 2]


@given(cut=st.integers(0, 4), masks=st.lists(st.booleans(), min_size=8, max_size=8))
def test_demonstrations_may_be_split_too(cut, masks):
    loss = DemonstrationLoss()
    values = torch.linspace(-4.0, -0.1, 8, dtype=torch.float64)
    batch = [DemonstrationLabels(masks_GL=(np.array(masks[i : i + 2]),)) for i in range(0, 8, 2)]
    denominator = max(loss.count(batch), 1.0)
    sums = dict[str, Tensor]()
    parts = []
    for start, end in ((0, cut), (cut, 4)):
        one = loss(outputs(values[2 * start : 2 * end]), batch[start:end], num_groups=denominator)
        parts.append(float(one.loss.detach()))
        add_up(sums, one.sums)
    whole = loss(outputs(values), batch, num_groups=denominator)
    assert sum(parts) == pytest.approx(float(whole.loss.detach()), rel=1e-12)
    assert loss.metrics(sums) == pytest.approx(loss.metrics(whole.sums), rel=1e-12)


def slowly(loss, c, drawn):
    """The loss once more, token by token, with nothing but `math`."""
    total, place = 0.0, 0
    values = flat(drawn.values).tolist()
    for row in drawn.batch:
        for i, mask in enumerate(row.masks_GL):
            mine = [t for t in range(len(mask)) if mask[t] and row.used_G[i]]
            now = {t: values[place + t] for t in mine}
            place += len(mask)
            if not mine:
                continue
            old = now if row.old_GL is None else {t: float(row.old_GL[i][t]) for t in mine}
            drew = {t: float(row.behaviour_GL[i][t]) for t in mine}
            losses = [
                token_slowly(c, row, i, t, mine=mine, now=now, old=old, drew=drew) for t in mine
            ]
            total += sum(losses) / (len(mine) if loss.normalizer == "sequences" else 1)
    return total / max(loss.count(drawn.batch), 1.0)


def token_slowly(c, row, i, t, *, mine, now, old, drew):
    is_whole = c.sequence_level_importance_ratios
    a, n = row.advantages_G[i], len(mine)
    if c.distillation.model_name is not None:
        most = c.distillation.clamp_value or math.inf
        gap = min(max(float(row.teacher_GL[i][t]) - old[t], -most), most)
        a = (a if c.distillation.rewards else 0.0) + c.distillation.weight * gap
    log_ratio = sum(now[s] - old[s] for s in mine) / n if is_whole else now[t] - old[t]
    ratio = math.exp(log_ratio)
    cut = min(max(ratio, 1 - c.ratio_clip_min), 1 + c.ratio_clip_max)
    if c.loss_type == "reinforce":
        actor = -a * now[t]
    elif c.loss_type == "gmpo":
        logs = [now[s] - old[s] for s in mine]
        cut = [min(max(x, -0.4), 0.4) for x in logs]
        choose = min if a > 0 else max
        actor = -a * math.exp(sum(map(choose, logs, cut)) / n)
    elif c.loss_type == "sapo":
        tau = 1.0 if a > 0 else 1.05
        actor = -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))
    elif c.loss_type == "dppo":
        p, q = math.exp(old[t]), math.exp(now[t])
        apart, low, high = abs(q - p), 0.15, 0.15
        if "dppo" in (c.model_extra or {}):
            apart = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
            low, high = 0.02, 0.05
        is_out = apart > high and q > p if a > 0 else apart > low and q < p
        actor = 0.0 if is_out else -a * min(ratio, 20.0) * now[t]
    elif c.loss_type == "cispo":
        actor = -a * cut * now[t]
    else:
        actor = -min(a * ratio, a * cut)
        if c.ratio_clip_c and a < 0:
            actor = min(actor, -a * c.ratio_clip_c)
    if c.use_importance_sampling_correction:
        kind = c.truncated_importance_sampling_type
        low = c.truncated_importance_sampling_ratio_min or 0.0
        high = c.truncated_importance_sampling_ratio or math.inf
        product = math.exp(sum(old[s] - drew[s] for s in mine))
        weight = product if is_whole or kind == "seq-tis" else math.exp(old[t] - drew[t])
        if kind in ("tis", "seq-tis"):
            weight = min(max(weight, low), high)
        elif not low <= (product ** (1 / n) if kind == "seq-mask-tis" else weight) <= high:
            weight = 0.0
        actor *= weight
    if c.reference_policy_kl_penalty:
        assert row.reference_GL is not None
        lead = float(row.reference_GL[i][t]) - now[t]
        kl = min(math.exp(lead) - 1 - lead, c.kl_output_clamp_value or math.inf)
        if c.use_on_policy_kl_approximation:
            kl *= math.exp(now[t] - drew[t])
        actor += c.reference_policy_kl_penalty * kl
    if (row.rewards_G[i] or 0.0) > 0:
        actor -= c.positive_example_nll_weight * now[t]
    return actor


@every_setting
@given(drawn=batches())
@settings(max_examples=30, deadline=None)
def test_the_loss_is_what_its_formulas_say(chosen, drawn):
    loss = loss_of(**chosen)
    options = PolicyLossConfig(**{"reference_policy_kl_penalty": 0.0, **chosen})
    denominator = max(loss.count(drawn.batch), 1.0)
    found = loss(outputs(flat(drawn.values)), drawn.batch, num_groups=denominator)
    expected = slowly(loss, options, drawn)
    assert float(found.loss.detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
