"""A judge that this process loads: its probabilities, its comparisons, and what a failure is."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

import tiny
import tiny_tokenizers
from judges import judge_section, named_judge
from laurel.config.environments import JudgeConfig, RewardModelEnvironmentConfig, ScorerSource
from laurel.environments.reward_model_environment import RewardModelEnvironment, scorer_spec_of
from laurel.errors import ConfigError, EngineError, ModelError
from laurel.extensions.judges.loaded import ModelJudge, ring_pairs, won_scores, word_score
from laurel.extensions.judges.served import JudgePrompt, NoScoreError, read_verdict, verdict_rows
from laurel.models.chat import ChatFormat
from laurel.rewards.open import ScorerPlacement, open_scorer
from laurel.rewards.spec import ScorerSpec
from laurel.types import Generated, Message, Score, TokenGroup, group_of
from model_directories import save_model

HERE = "env.reward_model.judge"
PROMPT = (Message("user", "2 + 2?"),)
BARE = "{{ response }}|{{ other_response }}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A random language model as Hugging Face writes it."""
    tokenizer = tiny_tokenizers.chatml()
    policy = tiny.tiny_policy("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048)
    return save_model(tmp_path_factory.mktemp("judge"), policy.causal_lm, tokenizer)


def config_of(**settings):
    return JudgeConfig(**settings)


def opened(directory, **settings):
    """A judge that is loaded as a run loads it."""
    given = {"model_name": str(directory), "precision": "float32"} | settings
    section = RewardModelEnvironmentConfig(**judge_section(**given))
    return open_scorer(scorer_spec_of(section, device="cpu"), say=lambda _: None)


class Table:
    """An engine whose verdicts stand in a table: the chance of the first word, by the question."""

    def __init__(self, chances, replies=()):
        self.chances, self.replies = chances, dict(replies)
        self.tokenizer = tiny_tokenizers.chatml()
        self.asked = []

    def question(self, ids):
        text = self.tokenizer.decode(ids)
        return text.partition("user\n")[2].partition("<|im_end|>")[0]

    async def branch_logprobs(self, groups, *, batch_tokens):
        self.asked += [self.question(group.trunk_ids) for group in groups]
        chances = [self.chances[self.question(group.trunk_ids)] for group in groups]
        return [[math.log(c / 2), math.log((1 - c) / 2)] if c else [math.nan] * 2 for c in chances]

    async def generate(self, request):
        for index, seed in enumerate(request.seeds_G):
            text, reason = self.replies[self.question(request.prompt_ids), seed]
            yield Generated(
                index=index,
                ids_L=request.prompt_ids[:1],
                logprobs_L=None,
                text=text,
                finish_reason=reason,
                weight_version=0,
            )

    def close(self):
        pass


def judged(engine, *groups, max_length=1000, **settings):
    config = config_of(**{"compares": True, "template": BARE} | settings)
    judge = ModelJudge(config, engine, ChatFormat(engine.tokenizer), max_length=max_length)
    return asyncio.run(judge.score([group_of(PROMPT, g, group_id="g") for g in groups]))


def values(scores_G):
    return [score.value for score in scores_G]


def test_the_probability_is_that_of_plain_transformers_for_words_of_several_tokens(directory):
    words = ("Well done", "Nonsense")
    group = group_of(PROMPT, ["4", "It is five, I am sure.", "4"], group_id="g")
    with opened(directory, read_out="log_probability", words=words) as scorer:
        (scores,) = scorer.score_now([group])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = tiny_tokenizers.chatml()
    prompt = JudgePrompt(config_of(read_out="log_probability", words=words), where=HERE)
    for index, score in enumerate(scores):
        text = tokenizer.apply_chat_template(
            prompt.messages(group, index), tokenize=False, add_generation_prompt=True
        )
        sums = []
        for word in words:
            asked, said = (
                tokenizer(t, add_special_tokens=False)["input_ids"] for t in (text, word)
            )
            assert len(said) > 1
            with torch.no_grad():
                logits = model(torch.tensor([asked + said])).logits[0].float()
            logprobs = logits.log_softmax(-1)[len(asked) - 1 : -1]
            sums.append(float(logprobs[range(len(said)), said].sum()))
        assert score.value == pytest.approx(1 / (1 + math.exp(sums[1] - sums[0])), abs=1e-5)
        assert score.parts["word_mass"] == pytest.approx(sum(map(math.exp, sums)), rel=1e-3)
    assert scores[0] == scores[2] != scores[1]


def test_a_comparison_is_asked_in_both_positions_and_two_margins_are_opposite(directory):
    answers = ["4", "It is five, I am sure."]
    group = group_of(PROMPT, answers, group_id="g")
    turned = group_of(PROMPT, answers[::-1], group_id="g")
    with opened(directory, read_out="log_probability", compares=True) as scorer:
        (scores,), (swapped,) = scorer.score_now([group]), scorer.score_now([turned])
    first, second = values(scores)
    assert first - 0.5 == -(second - 0.5) != 0
    assert values(swapped) == pytest.approx([second, first], abs=1e-6)


CHANCES = {"a|b": 0.8, "b|a": 0.4, "a|c": 0.6, "c|a": 0.6, "b|c": 0.9, "c|b": 0.3}
"""a beats b with (0.8 + 0.6) / 2 = 0.7, and c with 0.5; b beats c with 0.8."""


def test_a_group_of_three_has_the_means_worked_by_hand():
    engine = Table(CHANCES)
    (scores,) = judged(engine, ["a", "b", "c"], read_out="log_probability")
    assert values(scores) == pytest.approx([0.6, 0.55, 0.35])
    assert sorted(engine.asked) == sorted(CHANCES)
    assert [score.parts["position_flips"] for score in scores] == [0.5, 0.0, 0.5]
    assert [score.parts["word_mass"] for score in scores] == pytest.approx([0.5] * 3)


def test_equal_completions_draw_and_count_as_often_as_they_are_there():
    engine = Table(CHANCES)
    (scores, same) = judged(engine, ["a", "b", "a"], ["a", "a"], read_out="log_probability")
    assert values(scores) == pytest.approx([(0.5 + 0.7) / 2, 0.3, (0.5 + 0.7) / 2])
    assert values(same) == [0.5, 0.5]
    assert sorted(engine.asked) == ["a|b", "b|a"]


@pytest.mark.parametrize("count", [4, 5, 8])
def test_a_limit_of_opponents_compares_each_completion_equally_often(count):
    pairs = ring_pairs(count, 2)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == count
    each = [sum(place in pair for pair in pairs) for place in range(count)]
    assert each == [2] * count
    assert len(ring_pairs(count, count)) == count * (count - 1) // 2


def test_a_limit_of_opponents_leaves_questions_out():
    names = "abcde"
    chances = {f"{x}|{y}": 0.5 + (x < y) / 4 for x, y in itertools.permutations(names, 2)}
    engine = Table(chances)
    (scores,) = judged(engine, list(names), read_out="log_probability", max_opponents=2)
    assert len(engine.asked) == 10
    # A neighbour later in the alphabet is beaten with (0.75 + 0.5) / 2 = 0.625; e is beside a.
    assert values(scores) == pytest.approx([0.625, 0.5, 0.5, 0.5, 0.375])


@pytest.mark.parametrize(("first", "second"), [(-1e4, -2e4), (-2e4, -1e4), (0.0, -1e4)])
def test_a_sure_verdict_does_not_overflow(first, second):
    assert word_score(first, second).value == (first > second)


def test_a_probability_of_zero_is_a_sure_verdict_and_two_are_none():
    assert word_score(-0.1, -math.inf).value == 1.0
    assert word_score(-math.inf, -0.1).value == 0.0
    assert "not finite" in word_score(-math.inf, -math.inf).failure


def test_a_verdict_of_one_half_is_no_flip():
    found = {(0, 1): Score(value=0.5), (1, 0): Score(value=0.4)}
    assert [one.parts["position_flips"] for one in won_scores(found, [1, 1])] == [0.0, 0.0]
    assert [one.value for one in won_scores(found, [1, 1])] == pytest.approx([0.55, 0.45])


LLAMA = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content }} <|im_end|>{% endif %}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "read"), [(LLAMA, " Yes"), (THINKS, "<think>\n\n</think>\n\nYes")]
)
def test_the_words_have_the_tokens_that_fine_tuning_on_a_verdict_teaches(template, read):
    class Recording(Table):
        async def branch_logprobs(self, groups, *, batch_tokens):
            self.asked += groups
            return [[-1.0, -1.0] for _ in groups]

    engine = Recording({})
    engine.tokenizer.chat_template = template
    settings = {"compares": False, "template": "{{ response }}", "read_out": "log_probability"}
    judged(engine, ["a"], **settings)
    (asked,) = engine.asked
    question = (Message("user", "a"), Message("assistant", "Yes"))
    taught = ChatFormat(engine.tokenizer).demonstration(question, demonstration_id="a").tokens
    assert asked.trunk_ids.tolist() == taught.trunk_ids.tolist()
    assert asked.branches_ids_G[0].tolist() == taught.branches_ids_G[0].tolist()[:-1]
    assert engine.tokenizer.decode(asked.branches_ids_G[0]) == read


def test_a_template_that_prompts_with_what_no_answer_begins_with_is_refused():
    engine = Table({})
    engine.tokenizer.chat_template = tiny_tokenizers.chatml().chat_template.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
    )
    assert not ChatFormat(engine.tokenizer).asks_as_it_answers
    with pytest.raises(ModelError, match=r"judge.words: 'A' cannot be an answer"):
        judged(engine, ["a", "b"], read_out="log_probability")


def test_written_comparisons_are_read_in_brackets_and_averaged_over_samples_and_positions():
    end = "stop"
    replies = {
        ("a|b", 3): ("[[B]] no: [[A]]", end),
        ("a|b", 4): ("so [[B]]", end),
        ("b|a", 3): ("[[B]]", end),
        ("b|a", 4): ("[[C]]", end),
    }
    engine = Table({}, replies)
    settings = {"num_samples": 2, "min_samples": 1, "seed": 3, "temperature": 1.0}
    ((first, second),) = judged(engine, ["a", "b"], **settings)
    # a wins in (1 + 0) / 2 of the replies where it comes first, in the one readable reply else.
    assert (first.value, second.value) == (0.75, 0.25)
    assert first.parts["unreadable"] == 0.5
    ((failed, _),) = judged(engine, ["a", "b"], **settings | {"min_samples": 2})
    assert failed.value is None
    assert "1 of 2 replies" in failed.failure


def test_a_reply_that_was_cut_off_is_no_score():
    engine = Table({}, {("a", 0): ("Score: 1", "length")})
    ((score,),) = judged(engine, ["a"], compares=False, template="{{ response }}")
    assert "cut off" in score.failure


def test_an_error_of_the_engine_comes_as_itself_when_verdicts_are_written():
    class Broken(Table):
        async def generate(self, request):
            raise EngineError("vLLM died")
            yield

    with pytest.raises(EngineError, match="vLLM died"):
        judged(Broken({}), ["a", "b"])


def test_a_model_that_writes_no_verdict_gives_a_failure(directory):
    group = group_of(PROMPT, ["4", "5"], group_id="g")
    with opened(directory, max_tokens=3) as scorer:
        (scores,) = scorer.score_now([group])
    assert values(scores) == [None, None]
    assert all("0 of 1 replies have a score" in score.failure for score in scores)
    assert all("judge.read_out=log_probability" in score.failure for score in scores)


def test_the_last_word_in_brackets_wins():
    assert read_verdict("[[A]] [[B]]", config_of(compares=True)) == 0.0
    with pytest.raises(NoScoreError, match=r"neither \[\[A\]\] nor \[\[B\]\]"):
        read_verdict("A", config_of(compares=True))


def test_what_is_too_long_fails_and_the_others_are_compared_without_it():
    engine = Table(CHANCES)
    long = "x" * 100
    (scores, doubled) = judged(
        engine, ["a", "b", long], ["a", long, long], read_out="log_probability", max_length=60
    )
    assert values(scores) == [pytest.approx(0.7), pytest.approx(0.3), None]
    assert "room is for" in scores[2].failure
    assert scores[0].parts["failed_comparisons"] == 1
    # An equal completion is no opponent that could make up for the ones that failed.
    assert values(doubled) == [None, None, None]


def test_one_failed_comparison_fails_both_sides_rather_than_change_their_opponents():
    engine = Table({"a|b": 0.9, "b|a": 0.1, "b|c": 0.6, "c|b": 0.4, "a|c": None, "c|a": 0.9})
    (scores,) = judged(engine, ["a", "b", "c"], read_out="log_probability")
    assert values(scores) == [None, pytest.approx((0.1 + 0.6) / 2), None]
    assert "not finite" in scores[0].failure


def test_a_forward_pass_that_fails_is_an_error_of_its_call_alone(directory):
    group = group_of(PROMPT, ["4"], group_id="g")
    with opened(directory, read_out="log_probability") as scorer:
        engine, outside = scorer.scorer.engine, np.asarray([10**6], dtype=np.int32)
        broken = TokenGroup(id="x", trunk_ids=outside, branches_ids_G=(outside,))
        with pytest.raises(EngineError, match="IndexError"):
            scorer.wait_for(lambda: engine.branch_logprobs([broken], batch_tokens=10))
        ((score,),) = scorer.score_now([group])
    assert score.failure is None


def test_a_completion_that_is_alone_and_a_probability_that_is_nan_are_failures():
    engine = Table(CHANCES | {"a|b": None})
    (alone, broken) = judged(engine, ["a"], ["a", "b"], read_out="log_probability")
    assert "needs another completion" in alone[0].failure
    assert values(broken) == [None, None]
    assert "not finite" in broken[0].failure


@pytest.mark.parametrize("words", [("Yes", "Yes!"), ("\N{NULL}", "\N{NULL}x")])
def test_words_that_cannot_be_told_apart_are_refused(words):
    with pytest.raises(ModelError, match="one of which the other begins with"):
        judged(
            Table({}), ["a"], compares=False, template=None, read_out="log_probability", words=words
        )


def test_a_tokenizer_without_a_chat_template_is_refused_by_the_key_that_helps(tmp_path):
    tokenizer = tiny_tokenizers.make_tokenizer(template=None)
    policy = tiny.tiny_policy("qwen3", vocab_size=len(tokenizer))
    save_model(tmp_path, policy.causal_lm, tokenizer)
    with pytest.raises(ModelError, match=r"env.reward_model.tokenizer.chat_template"):
        opened(tmp_path)


def test_a_model_of_too_few_positions_and_a_reward_model_are_refused(directory, tmp_path):
    with pytest.raises(ModelError, match=r"model.max_model_len=4096: .* has 2,048 positions"):
        opened(directory, max_model_len=4096)
    save_model(tmp_path, tiny.tiny_classifier("qwen3"))
    with pytest.raises(ModelError, match=r"model.model_name=.* is a reward model or class"):
        opened(tmp_path)


def test_a_cluster_has_no_slot_for_a_judge(directory):
    source = ScorerSource(model_name=str(directory), judge={})
    with pytest.raises(ConfigError, match="Serve it"):
        open_scorer(
            ScorerSpec(source=named_judge(source)),
            say=print,
            placement=ScorerPlacement(is_one_group=True),
        )


URLS = {"urls": ["http://127.0.0.1:1"], "model_name": None, "url_model": "judge"}
VLLM = {"generation": {"backend": "vllm"}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (URLS | {"compares": True}, "compares is for a judge that this process loads"),
        (URLS | {"read_out": "log_probability"}, "read_out is for a judge that this process loads"),
        (URLS | VLLM, "generation is for a judge that this process loads"),
        (URLS | {"precision": "float32"}, "precision is for a judge that this process loads"),
        (URLS | {"model_name": "m"}, "model_name is for a judge that this process loads"),
        (URLS | {"url_model": ""}, "what do the servers call the judge?"),
        ({"model_name": None}, "which model is the judge?"),
        ({"url_model": "m"}, "url_model says how urls are asked"),
        ({"request_timeout": 9.0}, "request_timeout says how urls are asked"),
        ({"hedge": True}, "hedge asks a second server, and there are no urls"),
        ({"extra_body": {"top_p": 1}}, "extra_body says how urls are asked"),
        ({"read_out": "log_probability", "num_samples": 2}, "num_samples is for replies"),
        ({"read_out": "log_probability", "score_range": (0, 5)}, "score_range is for replies"),
        ({"compares": True, "score_key": "x"}, "score_key is for a score"),
        ({"words": ("a", "b")}, "words is for read_out=log_probability or compares"),
        ({"max_opponents": 2}, "max_opponents is for compares"),
        ({"compares": True, "max_opponents": 3}, "must be even"),
        ({"compares": True, "words": ("a", "a")}, "two words that differ"),
        (VLLM | {"compile": False}, "compile is for generation.backend=transformers"),
        (VLLM | {"batch_tokens": 1}, "batch_tokens is for generation.backend=transformers"),
        ({"seed": None}, "seed=null"),
        ({"read_out": "log_probability", "max_concurrent": 2}, "and that writes replies"),
        (URLS | {"max_concurrent": 2}, "max_concurrent is for a function, or for a judge that"),
    ],
)
def test_a_key_without_effect_is_refused_by_name(settings, said):
    with pytest.raises(ValidationError, match=said):
        ScorerSource(**judge_section(**{"model_name": "judge"} | settings))


def test_a_judge_that_compares_subtracts_no_reference():
    judge = judge_section(model_name="judge", compares=True)
    parts = [{"name": name, "normalize": "none", **judge} for name in "ab"]
    for source in (judge, {"models": parts}):
        with pytest.raises(ValidationError, match=r"take transform.subtract_reference out"):
            RewardModelEnvironmentConfig(**source, transform={"subtract_reference": True})


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_path": "c"},
        {"reward_model_cfg": {"attributes": ["a"]}},
        {"model_version": "1"},
        {"trust_remote_code": True},
        {"dtensor_cfg": {"tensor_parallel_size": 2}},
    ],
)
def test_a_key_of_a_reward_model_is_refused_beside_a_judge(settings):
    with pytest.raises(ValidationError, match=f"{next(iter(settings))} is for a reward model"):
        RewardModelEnvironmentConfig(model_name="judge", judge={}, **settings)


def test_words_that_yaml_reads_as_booleans_are_refused_with_the_cause():
    with pytest.raises(ValidationError, match="put the words in quotes"):
        config_of(read_out="log_probability", words=[True, False])


def test_vllm_is_given_no_pickled_weights(directory, tmp_path):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"reward_model\.model_name=.* has no \*\.safetensors"):
        opened(tmp_path, **VLLM)


def test_a_temperature_that_vllm_does_not_take_is_refused_before_it_starts(directory):
    with pytest.raises(ConfigError, match=r"judge.temperature=3: vLLM takes 0 and 0.01 to 2"):
        opened(directory, temperature=3.0, **VLLM)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compares": True, "template": "{{ response }}"}, "other_response"),
        ({"template": BARE}, "with compares=true"),
    ],
)
def test_a_template_shows_what_is_judged(settings, said):
    with pytest.raises(ConfigError, match=said):
        JudgePrompt(config_of(**settings), where=HERE)


def test_verdicts_to_learn_from_are_asked_as_the_judge_asks_and_balanced():
    config = config_of(compares=True, read_out="log_probability")
    prompt, group = JudgePrompt(config, where=HERE), group_of(PROMPT, ["4", "5", "6"], group_id="g")
    rows = [row["messages"] for row in verdict_rows(prompt, config, group, (0, 1, 1))]
    assert [row[-1]["content"] for row in rows] == ["A", "B"] * 2
    assert rows[0][:-1] == prompt.messages(group, 0, 1)
    assert rows[1][:-1] == prompt.messages(group, 1, 0)
    single = config_of(read_out="log_probability", words=("good", "bad"))
    prompt = JudgePrompt(single, where=HERE)
    rows = [row["messages"] for row in verdict_rows(prompt, single, group, (1, 0, 1))]
    assert [row[-1]["content"] for row in rows] == ["bad", "good", "bad"]
    assert rows[1][:-1] == prompt.messages(group, 1)
    rows = list(verdict_rows(prompt, single, group, (1, 2, 0)))
    assert [row["messages"][-1]["content"] for row in rows] == ["bad", "good"]
    assert not list(verdict_rows(prompt, single, group, (1, 1, 1)))
    written = config_of(compares=True)
    rows = list(verdict_rows(JudgePrompt(written, where=HERE), written, group, (0, 1, 1)))
    assert rows[0]["messages"][-1]["content"] == "[[A]]"
    with pytest.raises(ConfigError, match="read_out=log_probability, or compares=true"):
        list(verdict_rows(JudgePrompt(config_of(), where=HERE), config_of(), group, (0, 1, 1)))


def test_completions_are_one_group_whatever_the_keys_of_reward_models_say():
    engine = Table(CHANCES)
    config = config_of(compares=True, template=BARE, read_out="log_probability")
    judge = ModelJudge(config, engine, ChatFormat(engine.tokenizer), max_length=1000)
    logs = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": a}] for a in "ab"]
    settings = {"model_name": "unused", "sequence_packing": {"share_prompts": False}}
    with RewardModelEnvironment(settings, scorer=judge) as environment:
        rewards = environment.step(logs, [{}] * 2).rewards.tolist()
    assert rewards == pytest.approx([0.7, 0.3])


def test_the_environment_rewards_with_a_judge_that_compares(directory):
    section = {
        "model_name": str(directory),
        "precision": "float32",
        "judge": {"compares": True, "read_out": "log_probability"},
    }
    logs = [
        [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
        for answer in ("4", "five", "4")
    ]
    with RewardModelEnvironment(section, device="cpu") as environment:
        assert environment.spec.judges == "group"
        rewards = environment.step(logs, [{}] * 3).rewards.tolist()
        lonely = environment.step(logs[:1], [{}])
    assert rewards[0] == rewards[2]
    assert sum(rewards) == pytest.approx(1.5)
    assert "needs another completion" in lonely.failures[0]
