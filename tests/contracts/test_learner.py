"""What every `Learner` promises, asked of each of them.

Learners start in seconds and are shared, so a test may not rely on weights that nobody has changed.
"""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import learner_work as work
import threads
from laurel.data.forest import to_forest, to_padded
from laurel.models.scoring import FILE_NAME
from laurel.training.learner import NOTHING_TO_LEARN
from local_group import LocalGroup
from process_group import ProcessGroup

pytestmark = pytest.mark.slow_parameters("two ranks")

CUT = [[0], [1, 2], [3]]


one_thread_of_module = threads.one_thread_of_module


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return {kind: work.write(kind, tmp_path_factory.mktemp(kind)) for kind in ("policy", "reward")}


@pytest.fixture(scope="module")
def contract(directories):
    load = work.loader("reward", work.section("reward", directories["reward"]))
    return load(device=torch.device("cpu")).contract


@pytest.fixture(scope="module", params=["local", "in a group", "two ranks"])
def makers(request, directories):
    """Makes learners, each of its kind once."""
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = one(kind, directories[kind])
        return made[kind]

    def one(kind, directory):
        if request.param == "local":
            return work.local(kind, directory)
        if request.param == "in a group":
            return work.grouped(kind, directory, partial(LocalGroup, "policy"), {})
        make_group = partial(ProcessGroup, "policy", 2)
        return work.grouped(kind, directory, make_group, {"dp_shard": 2})

    yield make
    for learner in made.values():
        if hasattr(learner, "shutdown"):
            learner.shutdown()


@pytest.fixture(params=["policy", "reward"])
def kind(request):
    return request.param


@pytest.fixture
def learner(makers, kind):
    return makers(kind)


def test_an_update_moves_the_model_by_its_rate_and_the_schedule_goes_on(learner, kind):
    rate = learner.learning_rate
    before = work.asked(learner, 4)
    update = learner.update(work.micro_batches(kind, CUT), work.loss(kind))
    assert update.failure is None
    assert update.metrics["lr"] == rate
    assert update.metrics["grad_norm"] > 0
    assert {"loss", "num_valid_samples"} <= set(update.metrics)
    assert learner.learning_rate == rate / 2
    assert any(not torch.equal(a, b) for a, b in zip(before, work.asked(learner, 4), strict=True))


def test_what_is_not_finite_moves_nothing(learner, kind):
    before, rate = work.asked(learner, 4), learner.learning_rate
    update = learner.update(work.micro_batches(kind, CUT, spoilt=3), work.loss(kind))
    assert (update.failure, update.metrics) == ("the loss is nan", {})
    assert learner.learning_rate == rate
    assert all(torch.equal(a, b) for a, b in zip(before, work.asked(learner, 4), strict=True))


def test_what_teaches_nothing_moves_nothing(makers):
    learner = makers("reward")
    before, rate = work.asked(learner, 4), learner.learning_rate
    update = learner.update(work.micro_batches("reward", CUT, is_tie=True), work.loss("reward"))
    assert (update.failure, update.metrics) == (NOTHING_TO_LEARN, {})
    assert learner.learning_rate == rate
    assert all(torch.equal(a, b) for a, b in zip(before, work.asked(learner, 4), strict=True))


def test_outputs_come_in_order_and_one_by_one(learner, kind):
    groups = [work.GROUPS[i] for i in (4, 0, 3)]
    sizes = [11, 8, 8] if kind == "policy" else [2, 2, 2]
    outputs = learner.outputs([to_forest([group]) for group in groups])
    first = next(outputs)
    assert torch.is_grad_enabled()
    found = [work.numbers(one) for one in (first, *outputs)]
    assert [len(one) for one in found] == sizes
    assert not any(one.requires_grad for one in found)
    for group, one in zip(groups, found, strict=True):
        (alone,) = learner.outputs([to_forest([group])])
        torch.testing.assert_close(work.numbers(alone), one, rtol=0, atol=0)
    if kind == "policy":
        assert first.entropy_M is None
        assert found[0].max() < 0
    assert list(learner.outputs([])) == []


def test_nobody_has_to_wait_for_the_last_output(learner):
    outputs = learner.outputs([to_forest([group]) for group in work.GROUPS * 5])
    next(outputs)
    outputs.close()
    assert len(work.asked(learner, 1)) == 1


def test_the_temperature_is_asked_for(makers):
    learner = makers("policy")
    (usual,), (hot,) = work.asked(learner, 1), work.asked(learner, 1, temperature=100.0)
    # So hot that all 300 tokens are nearly alike.
    torch.testing.assert_close(hot, torch.full_like(hot, -5.7038), rtol=0, atol=0.05)
    assert not torch.allclose(usual, hot, atol=0.05)
    assert torch.equal(work.asked(learner, 1)[0], usual), "it holds for one call"


def test_the_reference_does_not_learn(makers):
    learner = makers("policy")
    before = work.asked(learner, 3, role="reference")
    learner.update(work.micro_batches("policy", CUT), work.loss("policy"))
    after = work.asked(learner, 3, role="reference")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.equal(work.asked(learner, 1)[0], before[0])


def test_the_weights_are_those_that_hugging_face_loads(learner, kind, directories):
    factory = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    network = factory.from_pretrained(directories[kind], attn_implementation="eager").eval()
    network.load_state_dict(work.weights_of(learner))
    assert_same_answers(network, learner, kind)


def test_a_generator_is_told_that_training_can_change_all_weights(learner):
    weights = learner.weights(3)
    assert weights.version == 3
    assert weights.changing is None
    found = work.weights_of(learner)
    assert {name: weight.shape for name, weight in weights.tensors()} == {
        name: weight.shape for name, weight in found.items()
    }


def assert_same_answers(network, learner, kind):
    """A model of Hugging Face's says what the learner says."""
    rows = to_padded([work.GROUPS[1]], pad_id=network.config.pad_token_id)
    (found,) = [work.numbers(one) for one in learner.outputs([to_forest([work.GROUPS[1]])])]
    mask = torch.arange(rows.ids_NL.shape[1])[None] < rows.lengths_N[:, None]
    with torch.no_grad():
        logits = network(input_ids=rows.ids_NL, attention_mask=mask.long()).logits
    if kind == "reward":
        torch.testing.assert_close(logits, found, rtol=0, atol=1e-5)
        return
    logprobs = logits.log_softmax(-1)[:, :-1].gather(2, rows.ids_NL[:, 1:, None])[..., 0]
    start = int(rows.starts_N[0])
    wanted = [row[start - 1 : int(n) - 1] for row, n in zip(logprobs, rows.lengths_N, strict=True)]
    torch.testing.assert_close(torch.cat(wanted), found, rtol=0, atol=1e-5)


def test_what_is_exported_is_a_model_of_hugging_face(learner, kind, contract, tmp_path):
    learner.export(tmp_path, "What it is.", contract=contract if kind == "reward" else None)
    assert (tmp_path / "README.md").read_text() == "What it is."
    assert (tmp_path / "tokenizer.json").is_file()
    assert (tmp_path / FILE_NAME).is_file() == (kind == "reward")
    factory = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    network = factory.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert_same_answers(network, learner, kind)


def test_a_state_that_was_saved_is_gone_on_from(learner, kind, tmp_path):
    batch = work.micro_batches(kind, CUT)
    rate = learner.learning_rate
    extra = {"step": 3, "more": {"ids": torch.arange(3)}}
    learner.save_state(tmp_path, extra)
    assert json.loads((tmp_path / "training_state.json").read_text())
    learner.update(batch, work.loss(kind))
    assert learner.learning_rate == rate / 2
    found = learner.load_state(tmp_path)
    assert learner.learning_rate == rate
    assert found["step"] == 3
    assert torch.equal(found["more"]["ids"], torch.arange(3))
    assert learner.update(batch, work.loss(kind)).metrics["lr"] == rate


def files_in(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_what_is_written_in_the_background_is_of_the_moment_it_was_asked_for(
    learner, kind, contract, tmp_path
):
    contract = contract if kind == "reward" else None

    def save(directory, **options):
        (directory / "training").mkdir(parents=True)
        learner.export(directory, "What it is.", contract=contract, **options)
        learner.save_state(directory / "training", {"step": 3, "ids": torch.arange(3)}, **options)

    learner.update(work.micro_batches(kind, CUT), work.loss(kind))  # there is a momentum
    save(tmp_path / "here")
    assert learner.written() == 0
    wanted = files_in(tmp_path / "here")
    gates = work.hold(learner, tmp_path)
    save(tmp_path / "behind", in_background=True)
    assert learner.written() is None
    assert not set(files_in(tmp_path / "behind")) & {n for n in wanted if "training" in n}
    learner.update(work.micro_batches(kind, CUT), work.loss(kind))
    with learner.resting():
        pass
    assert learner.written() is None
    work.let_go(gates)
    assert learner.written(is_awaited=True) > 0
    assert learner.written() > 0
    assert files_in(tmp_path / "behind") == wanted
    save(tmp_path / "later")
    later = files_in(tmp_path / "later")
    assert later["model.safetensors"] != wanted["model.safetensors"]


def test_a_disk_that_refuses_in_the_background_costs_that_save_alone(learner, kind, tmp_path):
    gates = work.hold(learner, tmp_path)
    (tmp_path / "training").mkdir()
    learner.save_state(tmp_path / "training", {}, in_background=True)
    shutil.rmtree(tmp_path / "training")
    assert learner.written() is None
    work.let_go(gates)
    for _ in range(2):
        with pytest.raises((OSError, SafetensorError), match=r"os error 2|Errno 2"):
            learner.written(is_awaited=True)
    assert len(work.asked(learner, 1)) == 1
    (tmp_path / "training").mkdir()
    learner.save_state(tmp_path / "training", {"step": 4}, in_background=True)
    assert learner.written(is_awaited=True) > 0
    assert learner.load_state(tmp_path / "training") == {"step": 4}


def test_a_learner_that_rested_goes_on(learner, kind):
    before = work.asked(learner, 2)
    with learner.resting():
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, work.asked(learner, 2), strict=True))
    with pytest.raises(KeyError), learner.resting():
        raise KeyError
    assert learner.update(work.micro_batches(kind, CUT), work.loss(kind)).failure is None
