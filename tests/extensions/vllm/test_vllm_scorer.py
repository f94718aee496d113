"""Reward models in vLLM. It takes seconds to start: tests share the engines of a model each."""

import asyncio
import math
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import tiny_tokenizers
from judges import named_judge
from laurel.config.environments import JudgeConfig, ScorerSource
from laurel.errors import (
    DataError,
    EngineError,
    MissingDependencyError,
    ModelError,
    ScoringContractError,
    install_command,
)
from laurel.extensions.judges.loaded import ModelJudge
from laurel.extensions.vllm import processes
from laurel.extensions.vllm.scorer import VllmScorer, load_vllm_scorer
from laurel.models.spec import ModelSpec
from laurel.rewards.batching import BatchingScorer
from laurel.rewards.open import load_scorer, open_scorer
from laurel.rewards.spec import ModelPlace, ScorerSpec, find_model
from laurel.types import Message, group_of
from model_directories import save_model
from reward_models import small_model
from sandbox_processes import wait_until
from vllm_engines import (
    HAS_VLLM,
    forked_engines,
    random_model,
    require_vllm,
    scheduler_of,
    small_cache,
)
from vllm_reward_models import FAMILIES, MAX_LENGTH, POISON, local, saved, write_raw

pytestmark = pytest.mark.usefixtures("warm_engines")


@pytest.fixture(scope="module")
def warm_engines():
    with small_cache(), forked_engines():
        yield


EXACT = 1e-5
"""Scores of size 1 to 5 of one model in float32, in two orders of sums."""
ATTRIBUTES = ("kind", "true", "short")
SEVERAL = "qwen2"
"""The family of the model with several attributes; the others have one."""


def asked(number, *, answers=8, words=20):
    """A group whose prompt is long enough to be shared."""
    prompt = f"Question {number}: " + "where does the laurel grow? " * (words // 5)
    said = [f"Answer {i}: " + "by the western gate. " * (1 + i % 3) for i in range(answers)]
    return group_of((Message("user", prompt),), said, group_id=str(number))


GROUPS = [asked(number) for number in range(4)]


def values(scores):
    return np.array([score.value for scores_G in scores for score in scores_G], np.float64)


@pytest.fixture(params=[one for one in FAMILIES if one != SEVERAL], scope="module")
def pair(request, tmp_path_factory):
    """A model in vLLM, the same here, and where it lies; Llama's is from another program."""
    require_vllm()
    directory, said = tmp_path_factory.mktemp(request.param), []
    options = ScorerSpec(max_length=MAX_LENGTH, device="cpu")
    place = ModelPlace(name=str(directory))
    if request.param == "llama":
        write_raw(directory, "llama")
        here = load_scorer(place, options, say=lambda _: None)
    else:
        here = local(saved(directory, request.param))
    scorer = load_vllm_scorer(place, options, say=said.append)
    computed = [line for line in said if "computed with Hugging Face" in line]
    assert bool(computed) == (request.param == "llama")
    assert any("golden scores agree" in line for line in said)
    yield scorer, here, directory
    scorer.close()


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A model of three attributes with a token that makes all of them NaN."""
    require_vllm()
    directory = tmp_path_factory.mktemp("several")
    loaded = saved(directory, SEVERAL, attributes=ATTRIBUTES, max_length=256, poison=POISON)
    scorer = load_vllm_scorer(find_model(str(directory)), ScorerSpec(), say=lambda _: None)
    yield scorer, local(loaded)
    scorer.close()


def test_scores_are_those_of_hugging_face_one_by_one(pair):
    scorer, here, directory = pair
    network = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    contract = scorer.contract
    with torch.inference_mode():
        expected = np.array(
            [
                network.eval()(input_ids=torch.tensor([ids])).logits[0, 0].item()
                for group in GROUPS
                for messages in map(group.conversation, range(8))
                for ids in [contract.tokenizer(contract.render(messages))["input_ids"]]
            ]
        )
    assert np.ptp(expected) > 0.2
    assert len(set(expected.round(4))) > 20
    for found in (scorer.score_now(GROUPS), scorer.score_now(GROUPS), here.score_now(GROUPS)):
        difference = np.abs(values(found) - expected)
        assert (difference / np.maximum(1, np.abs(expected))).max() < EXACT
    assert 0 <= scorer.golden_difference < EXACT


def test_a_group_shares_the_computed_prompt(pair, monkeypatch):
    scorer, *_ = pair
    vllm, cached = scorer._model._llm, []

    async def encode(*arguments):
        async for answer in type(vllm).encode(vllm, *arguments):
            cached.append((answer.num_cached_tokens, len(answer.prompt_token_ids)))
            yield answer

    monkeypatch.setattr(vllm, "encode", encode)
    fresh = asked(int(time.time()), words=60)
    (tokens,) = scorer.encode([fresh])
    scorer.score_tokens([tokens])
    shared = len(tokens.trunk_ids)
    assert shared > 300
    # But for the first, and for the block that begins alike and ends otherwise.
    assert sum(count > shared - 33 for count, _ in cached) == 7


def test_what_is_too_long_is_cut_as_everywhere(pair):
    scorer, here, _ = pair
    long = group_of((Message("user", "Where?"),), ("No.", "by the gate " * 100), group_id="long")
    found, expected = scorer.score_now([long]), here.score_now([long])
    assert [score.truncated for score in found[0]] == [False, True]
    assert found[0][1].num_tokens == MAX_LENGTH
    assert values(found) == pytest.approx(values(expected), rel=EXACT, abs=EXACT)


def test_several_attributes_and_their_scalar(several):
    scorer, here = several
    groups = [asked(number, words=5) for number in range(2)]
    for one, other in zip(scorer.score_now(groups), here.score_now(groups), strict=True):
        for score, expected in zip(one, other, strict=True):
            assert score.values_K == pytest.approx(expected.values_K, rel=EXACT, abs=EXACT)
            assert len(set(score.values_K)) == len(ATTRIBUTES)
            assert score.value == pytest.approx(math.fsum(score.values_K) / 3)


def test_a_completion_without_a_finite_score_fails_alone(several):
    scorer, here = several
    mixed = group_of((Message("user", "Where?"),), ("No.", f"By {POISON}", "Yes."), group_id="m")
    (found,), (expected,) = scorer.score_now([mixed]), here.score_now([mixed])
    assert [score.failure for score in found] == [None, "not finite", None]
    assert found[1].value is None
    for index in (0, 2):
        assert found[index].value == pytest.approx(expected[index].value, rel=EXACT, abs=EXACT)


def test_what_vllm_refuses_is_refused_by_name_and_the_rest_goes_on(several):
    scorer, _ = several
    (tokens,) = scorer.encode([asked(1, answers=2, words=5)])
    strange = replace(tokens, branches_ids_G=(np.array([10**6], np.int32), np.array([5], np.int32)))
    with pytest.raises(DataError, match=r"token 1000000 is not among the \d+ of the model"):
        scorer.score_tokens([tokens, strange])
    endless = replace(tokens, branches_ids_G=(np.full(257, 5, np.int32), np.array([5], np.int32)))
    with pytest.raises(DataError, match="vLLM was started for 1 to 256"):
        scorer.score_tokens([endless])
    assert len(scorer.score_tokens([tokens])[0]) == 2
    assert scorer.score_tokens([]) == []


def test_progress_is_told_and_there_is_no_higher_precision(several):
    scorer, _ = several
    told = []
    scorer.score_now(GROUPS[:3], lambda groups, tokens: told.append(groups))
    assert sum(told) == 3
    with pytest.raises(ModelError, match="one precision"):
        scorer.score_exactly(GROUPS[:1])


def test_scores_that_went_through_a_sigmoid_are_found(pair, monkeypatch):
    """As from a vLLM that has renamed `use_activation` and heeds neither word of it."""
    scorer, *_ = pair
    parameters = scorer._model._vllm.PoolingParams
    monkeypatch.setattr(
        scorer._model, "_parameters", parameters(task="classify", use_activation=True)
    )
    expected = scorer.contract.rules.golden[0].values_K[0]
    squashed = 1 / (1 + math.exp(-expected))
    true_values, returned = scorer._values, []

    def values(*args, **kwargs):
        returned.append(true_values(*args, **kwargs))
        return returned[-1]

    monkeypatch.setattr(scorer, "_values", values)
    with pytest.raises(ScoringContractError, match="sigmoid of the score") as caught:
        scorer._check_golden()
    # vLLM's own score differs from the golden one in the last digits.
    here = float(returned[0][0, 0])
    assert here == pytest.approx(squashed, abs=1e-6)
    assert f"scores {here:.6g} here and scored {expected:.6g}" in str(caught.value)


def test_scores_of_another_position_keep_a_scorer_from_starting(tmp_path, monkeypatch):
    require_vllm()
    saved(tmp_path, "qwen3")
    true_import = processes.import_vllm

    def elsewhere(purpose):
        vllm = true_import(purpose)
        config = vllm.PoolerConfig
        vllm.PoolerConfig = lambda **options: config(**{**options, "seq_pooling_type": "MEAN"})
        return vllm

    here = psutil.Process()
    children, below = set(here.children()), set(here.children(recursive=True))
    monkeypatch.setattr(processes, "import_vllm", elsewhere)
    with pytest.raises(ScoringContractError, match="another position than the last token"):
        load_vllm_scorer(find_model(str(tmp_path)), ScorerSpec(), say=lambda _: None)
    assert set(here.children()) <= children
    # Forks end a moment after what they were forked for.
    wait_until(lambda: set(here.children(recursive=True)) <= below)


def test_without_golden_scores_nothing_is_started(tmp_path):
    with pytest.raises(ScoringContractError, match="no golden scores"):
        VllmScorer(ModelSpec(name=str(tmp_path)), small_model().contract)


def test_a_vllm_of_other_words_does_not_start(tmp_path, monkeypatch):
    loaded = saved(tmp_path, "qwen3")
    threads = set(threading.enumerate())

    def unknown(**arguments):
        raise TypeError(f"unknown: {sorted(arguments)[0]}")

    platform = SimpleNamespace(is_cpu=lambda: True)
    vllm = SimpleNamespace(
        current_platform=platform, PoolingParams=unknown, AsyncEngineArgs=unknown
    )
    monkeypatch.setattr(processes, "import_vllm", lambda purpose: vllm)
    with pytest.raises(EngineError, match=r"did not start the reward model .*: unknown: task"):
        load_vllm_scorer(find_model(str(tmp_path)), ScorerSpec(), say=lambda _: None)
    assert set(threading.enumerate()) <= threads
    assert not loaded.has_new_head


def test_a_dead_engine_ends_what_waits_for_it_and_every_call_after(several):
    """The last test of this engine."""
    scorer, _ = several
    batcher = BatchingScorer(scorer, model_version="1")
    many = [asked(number, words=10) for number in range(1000)]

    async def killed_meanwhile():
        waiting = asyncio.create_task(batcher.score(many))
        while not batcher.stats().batches and not waiting.done():
            await asyncio.sleep(0.01)
        assert not waiting.done()
        scheduler_of(scorer._model._processes).kill()
        return await asyncio.gather(waiting, return_exceptions=True)

    try:
        (found,) = asyncio.run(killed_meanwhile())
        assert isinstance(found, EngineError)
        assert "vLLM died" in str(found)
        with pytest.raises(EngineError, match="vLLM died"):
            scorer.score_now(GROUPS)
        with pytest.raises(EngineError, match="vLLM died"):
            asyncio.run(batcher.score(GROUPS[:1]))
    finally:
        batcher.close()
        scorer.close()
    assert not any(process.is_running() for process in scorer._model._processes)
    with pytest.raises(EngineError, match="closed"):
        scorer.score_now(GROUPS)
    scorer.close()


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it(tmp_path):
    saved(tmp_path, "qwen3")
    said = rf"in vLLM: .*{re.escape(install_command('vllm'))}"
    with pytest.raises(MissingDependencyError, match=said):
        load_vllm_scorer(find_model(str(tmp_path)), ScorerSpec(), say=lambda _: None)


def test_a_judge_in_vllm_gives_the_probabilities_of_transformers(tmp_path):
    """Also its written verdicts, and it fails where a question is too long."""
    require_vllm()
    tokenizer = tiny_tokenizers.chatml()
    save_model(tmp_path, random_model("qwen3", tied=True, seed=0, vocab_size=len(tokenizer)))
    settings = {"model_name": str(tmp_path), "precision": "float32", "max_model_len": MAX_LENGTH}
    template = "{{ prompt }}: {{ response }}{{ other_response }}"
    by_words = {"compares": True, "words": ("one", "two"), "template": template}
    settings["judge"] = {"read_out": "log_probability", **by_words}
    group = group_of((Message("user", "Where?"),), ("a", "by the gate", "c" * 600), group_id="g")
    source = ScorerSource(**settings)
    with open_scorer(ScorerSpec(source=named_judge(source), device="cpu"), say=print) as here:
        (expected,) = here.score_now([group])
    source = ScorerSource(generation={"backend": "vllm"}, **settings)
    with open_scorer(ScorerSpec(source=named_judge(source)), say=print) as scorer:
        (found,) = scorer.score_now([group])
        judge = scorer.scorer
        # The same engine, read otherwise: another one would take seconds to start.
        greedy = JudgeConfig(max_tokens=4, template="{{ response }}")
        writer = ModelJudge(greedy, judge.engine, judge._chat, max_length=MAX_LENGTH)
        ((written, *_),) = asyncio.run(writer.score([group]))
    assert expected[0].value not in (0.0, 0.5, 1.0)
    assert [one.value for one in found] == pytest.approx([one.value for one in expected], abs=EXACT)
    assert found[0].parts["word_mass"] == pytest.approx(expected[0].parts["word_mass"], rel=1e-3)
    assert found[2].value is None
    assert "room is for" in found[2].failure
    assert "0 of 1 replies" in written.failure
