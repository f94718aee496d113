"""Learners of many ranks: the numbers of one process, however the batch is divided."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

import learner_work as work
import threads
from laurel.config.policy import NamedCall
from laurel.errors import WorkerError
from laurel.training.learner_group import divide_micro_batches, imbalance
from local_group import LocalGroup
from process_group import ProcessGroup

pytestmark = pytest.mark.slow_parameters("dp_shard=2 tp=2", "cp=2")
one_thread_of_module = threads.one_thread_of_module

CASES = (
    ("dp_shard=2", "policy"),
    ("dp_shard=2", "reward"),
    ("dp_shard=2 tp=2", "policy"),
    ("cp=2", "policy"),
)
"""Meshes and kinds of model; several ranks at a place are told the same, whatever the model."""


def pytest_generate_tests(metafunc):
    if "sizes" in metafunc.fixturenames:
        ids = ["-".join(case) for case in CASES]
        metafunc.parametrize(("sizes", "kind"), CASES, ids=ids, indirect=True, scope="module")
    elif "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", ["policy", "reward"], indirect=True, scope="module")


def test_a_division_by_hand():
    # Largest first: 9 and 8; the next pair goes the other way round, as the first has more.
    assert divide_micro_batches([5, 9, 8, 7], 2) == [[0, 1], [3, 2]]
    assert divide_micro_batches([5, 9, 8], 2) == [[None, 1], [0, 2]]
    assert divide_micro_batches([4], 3) == [[0], [None], [None]]
    assert divide_micro_batches([3, 1, 2], 1) == [[0, 1, 2]]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40), st.integers(1, 9))
@settings(deadline=None)
def test_any_division_is_complete_and_even(sizes, places):
    shares = divide_micro_batches(sizes, places)
    assert len(shares) == places
    assert {len(share) for share in shares} == {math.ceil(len(sizes) / places)}
    assert sorted(i for share in shares for i in share if i is not None) == list(range(len(sizes)))
    assert shares == divide_micro_batches(list(sizes), places), "it depends on the sizes alone"
    totals = [sum(sizes[i] for i in share if i is not None) for share in shares]
    assert max(totals) - min(totals) <= max(sizes) or places == 1
    # Places wait for each other, so a step takes as long as the largest of each row together.
    rows = list(zip(*shares, strict=True))
    waited = sum(max(sizes[i] for i in row if i is not None) for row in rows)
    assert waited == sum(sorted(sizes, reverse=True)[::places])


def test_imbalance_by_hand():
    sizes = [6, 2, 4]
    assert imbalance(sizes, [[0], [1], [2]]) == pytest.approx(6 / 4 - 1)
    assert imbalance(sizes, [[0, None], [1, 2]]) == 0.0
    assert imbalance([5], [[0], [None]]) == 1.0


@pytest.fixture(scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def sizes(request):
    return {name: int(size) for name, size in (one.split("=") for one in request.param.split())}


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    # Gemma multiplies its embeddings, caps its logits and ties its head.
    name = "gemma2-capped" if kind == "policy" else "qwen3"
    return work.write(kind, tmp_path_factory.mktemp(kind), name)


@pytest.fixture(scope="module")
def alone(kind, directory):
    return work.played(kind, work.local(kind, directory))


@pytest.fixture(scope="module")
def many(sizes, kind, directory):
    """What many ranks were asked for, and the learner."""
    make = partial(ProcessGroup, "policy", math.prod(sizes.values()))
    learner = work.grouped(kind, directory, make, sizes)
    with learner.group:
        yield work.played(kind, learner), learner


def close(found, wanted, tolerance=1e-5):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def test_outputs_are_those_of_one_process_for_any_number_of_batches(many, alone):
    found, _ = many
    for some, wanted in zip(found["outputs"], alone["outputs"], strict=True):
        close(some, wanted)
    assert [len(some) for some in found["outputs"]] == [0, 1, 3, 17]
    close(found["in parts"], alone["outputs"][2])
    for key in ("first reference", "hot"):
        if key in alone:
            close(found[key], alone[key])


def test_updates_are_those_of_one_process(many, alone):
    found, _ = many
    assert found["rates"] == alone["rates"] == [0.5, 0.25, 0.125]
    for update, wanted in zip(found["updates"], alone["updates"], strict=True):
        assert update.failure is None
        assert update.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-5)
        assert list(update.metrics) == list(wanted.metrics)
        assert wanted.metrics["grad_norm"] > work.LIMIT, "clipping has to do something"
    close(found["after"], alone["after"])
    moved = [a - b for a, b in zip(alone["after"], alone["outputs"][2], strict=True)]
    assert max(float(change.abs().max()) for change in moved) > 1e-2


def test_weights_are_those_of_one_process(many, alone):
    """The weights have moved by gradients, so their differences compare those."""
    found, _ = many
    before, after = alone["weights"]
    assert [list(weights) for weights in found["weights"]] == [list(before), list(after)]
    for name, weight in before.items():
        torch.testing.assert_close(found["weights"][0][name], weight, rtol=0, atol=0)
        moved, wanted = found["weights"][1][name] - weight, after[name] - weight
        # A bias of keys moves all logits of a softmax alike: its gradient is rounding.
        assert float((moved - wanted).norm()) <= 1e-5 * max(float(wanted.norm()), 1e-2), name


def test_a_loss_that_is_no_number_on_one_rank_moves_nothing_on_any(many, alone):
    found, _ = many
    for update in (found["spoilt"], alone["spoilt"]):
        assert (update.failure, update.metrics) == ("the loss is nan", {})
    close(found["after spoilt"], found["after"], 0)


def test_the_reference_stays_what_it_was(many, kind):
    if kind == "policy":
        close(many[0]["last reference"], many[0]["first reference"], 0)


def test_how_even_the_work_was_is_told(many):
    found, learner = many
    told = [update.performance["rank_token_imbalance"] for update in found["updates"]]
    places = learner.shape.dp
    # The second update has one micro-batch, so all other places compute nothing that counts.
    assert told[1] == places - 1
    assert all(0 <= value <= places - 1 for value in told)
    assert (told[0] == 0) == (places == 1)


def test_what_is_known_of_the_model(many, alone, kind):
    _, learner = many
    facts = learner.facts
    assert facts.path == "forest"
    assert facts.self_check < 1e-4
    assert facts.num_parameters == facts.num_trained > 10_000
    assert facts.weights_dtype == "float32"
    assert facts.device == "cpu"
    if kind == "policy":
        assert facts.class_name == "Gemma2ForCausalLM"
        assert facts.vocab_size == 300
        assert facts.generation_end_ids == 2
    else:
        assert facts.contract.rules.max_length == 128
    shares = learner.held_bytes()
    # A weight of one row cannot be cut in two.
    assert max(shares) <= 4 * facts.num_parameters / learner.shape.dp_shard + 4 * 32


def test_a_worker_of_one_computes_the_very_same_bits(kind, directory, alone):
    learner = work.grouped(kind, directory, partial(LocalGroup, "policy"), {})
    found = work.played(kind, learner)
    for some, wanted in zip(found["outputs"], alone["outputs"], strict=True):
        close(some, wanted, 0)
    for key in ("after", "first reference", "last reference", "hot"):
        if key in alone:
            close(found[key], alone[key], 0)
    assert [update.metrics for update in found["updates"]] == [
        update.metrics for update in alone["updates"]
    ]
    for weights, wanted in zip(found["weights"], alone["weights"], strict=True):
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_the_ranks_gather_weights_while_the_ones_before_are_read(kind, directory):
    asked = []

    class Listening(LocalGroup):
        def _submit(self, calls):
            asked.append(calls[0].method)
            return super()._submit(calls)

    learner = work.grouped(kind, directory, partial(Listening, "policy"), {})
    asked.clear()
    weights = iter(learner.named_weights())
    next(weights)
    assert asked == ["open_weights", "next_weights", "next_weights"]
    # Who stops reading leaves nothing behind that the next one would find.
    assert len(dict(learner.named_weights())) == 1 + len(list(weights)) > 10


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    return work.write("reward", tmp_path_factory.mktemp("rewards"))


def test_adapters_learn_and_the_reference_leaves_them_out(tmp_path):
    pytest.importorskip("peft")
    changes = {"dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 4}}}
    directory = work.write("policy", tmp_path)
    wanted = work.played("policy", work.local("policy", directory, **changes))
    make = partial(ProcessGroup, "policy", 2)
    learner = work.grouped("policy", directory, make, {"dp_shard": 2}, **changes)
    with learner.group:
        found = work.played("policy", learner)
        weights = learner.weights(7)
        changing = {name: weight.clone() for name, weight in weights.changing()}
    frozen = {"model.embed_tokens", "model.norm", "lm_head"}
    frozen |= {name for name in found["weights"][1] if "layernorm" in name}
    assert changing.keys() == {
        name
        for name in found["weights"][1]
        if name not in frozen and name.removesuffix(".weight") not in frozen
    }
    assert all(torch.equal(changing[name], found["weights"][1][name]) for name in changing)
    assert 0 < learner.facts.num_trained < learner.facts.num_parameters / 2
    for key in ("after", "first reference", "last reference"):
        close(found[key], wanted[key])
    close(found["last reference"], found["first reference"], 0)
    assert (
        max(
            float((a - b).abs().max())
            for a, b in zip(found["after"], found["last reference"], strict=True)
        )
        > 1e-3
    )
    for name, weight in wanted["weights"][1].items():
        torch.testing.assert_close(found["weights"][1][name], weight, rtol=0, atol=1e-6)


@pytest.fixture
def pair(rewards):
    """Makes learners of two ranks."""
    learners = []

    def make(**changes):
        group = partial(ProcessGroup, "policy", 2, blaming=1.0)
        learners.append(work.grouped("reward", rewards, group, {"dp_shard": 2}, **changes))
        return learners[-1]

    yield make
    for learner in learners:
        learner.shutdown()


def test_a_gradient_that_is_no_number_on_one_rank_moves_nothing_on_any(pair):
    learner = pair()
    before = work.asked(learner, 3)
    batch = work.micro_batches("reward", work.CUTS["three micro-batches"])
    update = learner.update(batch, work.Steep(work.loss("reward"), at="1"))
    assert update.failure in ("the norm of the gradient is nan", "the norm of the gradient is inf")
    assert "loss" in update.metrics
    assert not math.isfinite(update.metrics["grad_norm"])
    assert learner.learning_rate == 1.0
    close(work.asked(learner, 3), before, 0)
    assert learner.update(batch, work.loss("reward")).failure is None


def test_a_full_disk_is_no_failure_of_the_group_and_a_rank_that_fails_ends_it(pair, tmp_path):
    """A run goes on after a checkpoint that could not be saved."""
    learner = pair()
    (tmp_path / "file").touch()
    with pytest.raises((OSError, SafetensorError), match=r"os error|Errno"):
        learner.save_state(tmp_path / "file" / "training", {})
    assert len(work.asked(learner, 1)) == 1
    batch = work.micro_batches("reward", work.CUTS["three micro-batches"])
    with pytest.raises(WorkerError, match=r"policy rank [01] of 2 failed in take_step: Value") as e:
        learner.update(batch, work.Broken(work.loss("reward"), at="1"))
    assert "this one is too much" in str(e.value)
    assert not any(learner.group.alive())
    with pytest.raises(WorkerError, match="this one is too much"):
        work.asked(learner, 1)


def test_the_fused_optimizer_is_the_same_over_ranks(pair, rewards):
    optimizer = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 1e-2, "eps": 1e-4})
    learner = pair(optimizer=optimizer)
    alone = work.local("reward", rewards, optimizer=optimizer)
    for cut in work.CUTS.values():
        for one in (learner, alone):
            update = one.update(work.micro_batches("reward", cut), work.loss("reward"))
            assert update.failure is None
    close(work.asked(learner, 3), work.asked(alone, 3))


def test_weights_that_are_gathered_in_bfloat16_are_checked_all_the_same(pair, rewards):
    learner = pair(precision="bfloat16")
    # Nothing but the weights is rounded in the check, so it is as strict as in float32.
    assert learner.facts.self_check < 1e-5
    assert learner.facts.weights_dtype == "bfloat16"
    exact = work.asked(work.local("reward", rewards), 3)
    rounded = work.asked(learner, 3, in_full_precision=True)
    close(rounded, exact, 2e-3)
    assert not all(torch.equal(a, b) for a, b in zip(rounded, exact, strict=True))
    update = learner.update(work.micro_batches("reward", [[0], [1]]), work.loss("reward"))
    assert update.failure is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adafactor", "Rprop"])
def test_optimizers_that_torch_cannot_spread_are_refused(pair, name):
    optimizer = NamedCall(name=f"torch.optim.{name}")
    with pytest.raises(WorkerError, match=r"choose torch\.optim\.AdamW") as caught:
        pair(optimizer=optimizer)
    assert caught.value.exit_code == 2
