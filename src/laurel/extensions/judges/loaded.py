"""A judge that this process loads: a language model whose verdicts are scores.

The engine is one of generation: transformers' in this process, or vLLM's. A verdict is written and
read by the parser of `judge`, or is the probability of one of two words: Generative Verifiers
(Zhang et al. 2024, arXiv 2408.15240). Comparisons are asked in both positions, whose mean has no
bias of position (Zheng et al. 2023, arXiv 2306.05685).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from laurel.config.environments import JudgeConfig, ScorerSource
from laurel.errors import ConfigError, DataError, ModelError, key_of, setting_of
from laurel.extensions.judges.served import JudgePrompt, NoScoreError, mean_verdict, read_verdict
from laurel.models.chat import ChatFormat
from laurel.models.loading.pretrained import DTYPES, find_tokenizer, num_positions, read_config
from laurel.models.spec import ModelSpec
from laurel.observe.console import format_parameters, quiet_libraries
from laurel.plugins import EngineStart
from laurel.rewards.remote.replica import failed
from laurel.rewards.spec import MAX_LENGTH, Device, Say, check_files, find_model
from laurel.types import (
    Generated,
    GenerationRequest,
    Group,
    Message,
    SamplingParams,
    Score,
    TokenGroup,
)

if TYPE_CHECKING:
    from laurel.types import TokenIds


class VerdictEngine(Protocol):
    """The part of a generation engine that a judge needs."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Yield the completions of one prompt, as `protocols.Generator` does."""

    async def branch_logprobs(
        self, groups: Sequence[TokenGroup], *, batch_tokens: int
    ) -> list[list[float]]:
        """Return the log-probability of each branch after its trunk, for each group [G]."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One question about a completion, or about two of a group."""

    index: int
    other: int | None
    ids_L: TokenIds | None
    failure: str = ""
    """The reason why there are no tokens."""


class ModelJudge:
    """Scores completions by the verdicts of a language model that an engine holds.

    Without `compares` a score is that of the completion alone. With it, a score is the mean
    probability to win against the other completions of the group, 1/2 against an equal one; a
    completion that is alone has none, and `won_scores` says which comparisons it may lack.
    """

    reads_metadata = True

    def __init__(
        self,
        config: JudgeConfig,
        engine: VerdictEngine,
        chat: ChatFormat,
        *,
        max_length: int,
        batch_tokens: int = 8192,
        where: str = "env.reward_model.judge",
    ) -> None:
        """Take over an engine, which is closed with the scorer.

        Args:
            chat: The chat format of the judge; nothing else may use it.
            max_length: Most tokens of question and verdict.
            batch_tokens: Token budget of one forward pass by log-probability.

        Raises:
            ConfigError: The template cannot be used.
            ModelError: The words of the verdict cannot be distinguished.
        """
        self.config, self.engine = config, engine
        self.judges_groups = config.compares
        if config.compares or config.read_out == "written":
            # Written samples differ by far more than rounding. Comparisons of probabilities do not,
            # but what measures rounding scores each completion alone, too: theirs is not counted.
            self.noise = 0.0
        self._prompt = JudgePrompt(config, where=where)
        self._chat = chat
        self._max_length, self._batch_tokens = max_length, batch_tokens
        self._words = _word_ids(chat, config, where) if config.read_out != "written" else ()
        # Calls may come from several threads, and a tokenizer is not thread-safe.
        self._one_at_a_time = threading.Lock()

    def close(self) -> None:
        """Close the engine. Idempotent."""
        self.engine.close()

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups (`protocols.Scorer`); the questions of a call are asked together.

        Raises:
            EngineError: The engine died.
        """
        # Equal completions are asked about once: asked twice, they would differ in the last digit.
        distinct = [
            replace(group, completions_G=tuple(dict.fromkeys(group.completions_G)))
            for group in groups
        ]
        questions = await asyncio.to_thread(self._questions, distinct)
        with_tokens = [q for of_group in questions for q in of_group if q.ids_L is not None]
        verdicts = iter(await self._verdicts(with_tokens))
        scores: list[tuple[Score, ...]] = []
        for group, single, of_group in zip(groups, distinct, questions, strict=True):
            verdict_of = {
                (q.index, q.other): failed(q.failure) if q.ids_L is None else next(verdicts)
                for q in of_group
            }
            counts = [group.completions_G.count(each) for each in single.completions_G]
            if self.config.compares:
                scores_G = won_scores(verdict_of, counts)
            else:
                scores_G = [verdict_of[index, None] for index in range(len(counts))]
            score_of = dict(zip(single.completions_G, scores_G, strict=True))
            scores.append(tuple(score_of[completion] for completion in group.completions_G))
        return scores

    def _questions(self, groups: Sequence[Group]) -> list[list[_Question]]:
        questions = []
        with self._one_at_a_time:
            for group in groups:
                count = len(group.completions_G)
                indices: list[tuple[int, int | None]] = [(index, None) for index in range(count)]
                if self.config.compares:  # in both positions
                    pairs = ring_pairs(count, self.config.max_opponents)
                    indices = [pair for a, b in pairs for pair in ((a, b), (b, a))]
                questions.append([self._question(group, index, other) for index, other in indices])
        return questions

    def _question(self, group: Group, index: int, other: int | None) -> _Question:
        rendered = self._prompt.question(group, index, other)
        without_tokens = partial(_Question, index=index, other=other, ids_L=None)
        if isinstance(rendered, str):
            return without_tokens(failure=rendered)
        messages = tuple(Message(message["role"], message["content"]) for message in rendered)
        try:
            ids_L = self._chat.prompt_ids(messages)
        except DataError as error:
            return without_tokens(failure=f"error: {error}")
        # One token more than the verdict, which vLLM samples and nobody reads.
        room = self._max_length - max(map(len, self._words), default=0) - 1
        if len(ids_L) > room:
            return without_tokens(
                failure=f"error: the judge's question has {len(ids_L):,} tokens, and room is for "
                f"{room:,} (max_model_len={self._max_length:,} with the verdict)"
            )
        return _Question(index=index, other=other, ids_L=ids_L)

    async def _verdicts(self, questions: Sequence[_Question]) -> list[Score]:
        if self.config.read_out == "written":
            try:
                async with asyncio.TaskGroup() as tasks:
                    begun = [tasks.create_task(self._written(question)) for question in questions]
            except BaseExceptionGroup as group:  # callers expect the error itself
                raise group.exceptions[0] from group
            return [task.result() for task in begun]
        groups = [
            TokenGroup(id=str(index), trunk_ids=question.ids_L, branches_ids_G=self._words)
            for index, question in enumerate(questions)
            if question.ids_L is not None
        ]
        if not groups:
            return []
        logprobs = await self.engine.branch_logprobs(groups, batch_tokens=self._batch_tokens)
        return [
            word_score(first, second, num_tokens=max(group.lengths_G))
            for (first, second), group in zip(logprobs, groups, strict=True)
        ]

    async def _written(self, question: _Question) -> Score:
        config, ids_L = self.config, question.ids_L
        assert ids_L is not None
        assert config.seed is not None
        request = GenerationRequest(
            id="judge",
            prompt_ids=ids_L,
            # With one seed for all, every sample would be the same.
            seeds_G=tuple(config.seed + number for number in range(config.num_samples)),
            sampling=SamplingParams(
                max_new_tokens=min(config.max_tokens, self._max_length - len(ids_L)),
                temperature=config.temperature,
            ),
        )
        async with aclosing(self.engine.generate(request)) as completions:
            replies = [reply async for reply in completions]
        replies.sort(key=lambda reply: reply.index)
        score = mean_verdict([self._read(reply) for reply in replies], config, is_served=False)
        return replace(score, num_tokens=len(ids_L) + max(len(reply.ids_L) for reply in replies))

    def _read(self, reply: Generated) -> float | NoScoreError:
        if reply.finish_reason != "stop":
            return NoScoreError("the reply was cut off: raise max_tokens, or max_model_len")
        try:
            return read_verdict(reply.text, self.config)
        except NoScoreError as error:
            return error


def ring_pairs(count: int, most: int | None) -> list[tuple[int, int]]:
    """Return the pairs of completions that are compared: all, or neighbours in a ring.

    Args:
        most: The most others that each is compared with, an even number; None: all.
    """
    if most is None or most >= count - 1:
        return list(itertools.combinations(range(count), 2))
    return [
        (index, (index + step) % count)
        for index in range(count)
        for step in range(1, most // 2 + 1)
    ]


def word_score(first: float, second: float, *, num_tokens: int = 0) -> Score:
    """Return P(first) / (P(first) + P(second)) from two log-probabilities, computed in float64.

    The part `word_mass` is P(first) + P(second): little of it says that the judge would have
    answered with another word.
    """
    margin = first - second
    # One probability of 0 is a sure verdict; two of 0, or a NaN, say nothing.
    if math.isnan(margin) or math.inf in (first, second):
        return failed("nan: the log-probabilities of the verdicts are not finite")
    # Neither form overflows where it is used.
    low = math.exp(-abs(margin))
    value = 1.0 / (1.0 + low) if margin >= 0 else low / (1.0 + low)
    mass = math.exp(first) + math.exp(second)
    return Score(value=value, values_K=(value,), num_tokens=num_tokens, parts={"word_mass": mass})


def won_scores(verdicts: dict[tuple[int, int | None], Score], counts: Sequence[int]) -> list[Score]:
    """Return the mean probability of each completion to win, from the verdicts on ordered pairs.

    A completion with which no comparison succeeded is unusable, and the others are compared without
    it (`failed_comparisons`). If a comparison of two usable ones failed, both fail: the mean over
    other opponents than the rest has would not be comparable.

    Args:
        verdicts: The verdict on each ordered pair: the probability that the first one shown wins.
        counts: How often each of the different completions is in the group.
    """
    wins: list[list[tuple[float, int]]] = [
        [(0.5, count - 1)] if count > 1 else [] for count in counts
    ]
    parts: list[dict[str, list[float]]] = [{} for _ in counts]
    failures: list[list[tuple[int, str]]] = [[] for _ in counts]
    num_tokens = [0] * len(counts)
    for (first, second), verdict in verdicts.items():
        if second is None or first > second:  # each pair once; the other position is read with it
            continue
        swapped = verdicts[second, first]
        for index in (first, second):
            num_tokens[index] = max(num_tokens[index], verdict.num_tokens, swapped.num_tokens)
        if verdict.value is None or swapped.value is None:
            for index, opponent in ((first, second), (second, first)):
                failures[index].append((opponent, str(verdict.failure or swapped.failure)))
            continue
        chance = (verdict.value + 1.0 - swapped.value) / 2
        wins[first].append((chance, counts[second]))
        wins[second].append((1.0 - chance, counts[first]))
        # A verdict of 1/2 prefers neither, so that no position can turn it.
        flips = (verdict.value - 0.5) * (0.5 - swapped.value) < 0
        for index in (first, second):
            parts[index].setdefault("position_flips", []).append(float(flips))
            for name in verdict.parts.keys() & swapped.parts.keys():
                both = (verdict.parts[name] + swapped.parts[name]) / 2
                parts[index].setdefault(name, []).append(both)
    is_usable = [len(won) > (count > 1) for won, count in zip(wins, counts, strict=True)]
    scores: list[Score] = []
    for usable, won, means, missing, tokens in zip(
        is_usable, wins, parts, failures, num_tokens, strict=True
    ):
        lost = next((why for index, why in missing if is_usable[index] or not usable), None)
        if lost is None and not won:
            lost = (
                "error: a comparison needs another completion of the same prompt (answers of "
                "several turns share none)"
            )
        if lost is not None:
            scores.append(failed(lost))
            continue
        value = math.fsum(chance * count for chance, count in won) / sum(c for _, c in won)
        mean_parts = {
            name: math.fsum(all_of) / len(all_of) for name, all_of in sorted(means.items())
        }
        if missing:
            mean_parts["failed_comparisons"] = float(len(missing))
        scores.append(Score(value=value, values_K=(value,), num_tokens=tokens, parts=mean_parts))
    return scores


def _word_ids(chat: ChatFormat, config: JudgeConfig, where: str) -> tuple[TokenIds, ...]:
    words = config.verdict_words
    first, second = (_taught_ids(chat, config, word, where) for word in words)
    length = min(len(first), len(second))
    if np.array_equal(first[:length], second[:length]):
        raise ModelError(
            f"{where}.words: {words[0]!r} has the tokens {first.tolist()} and {words[1]!r} "
            f"{second.tolist()}, one of which the other begins with, so their log-probabilities do "
            "not distinguish them; choose other words"
        )
    return first, second


def _taught_ids(chat: ChatFormat, config: JudgeConfig, word: str, where: str) -> TokenIds:
    """Return the tokens that fine-tuning on the word teaches after the question, without its end.

    A template may put text before an answer, such as a blank or an empty `<think>` block.
    """
    question: tuple[Message, ...] = (Message("user", "a"),)
    if config.system is not None:
        question = (Message("system", config.system), *question)
    try:
        prompt_ids = chat.prompt_ids(question)
        taught = chat.demonstration((*question, Message("assistant", word)), demonstration_id=word)
    except DataError as error:
        raise ModelError(f"{where}.words: {word!r} cannot be an answer: {error}") from error
    assert taught is not None
    ids_L = np.concatenate([taught.tokens.trunk_ids, taught.tokens.branches_ids_G[0]])
    if not np.array_equal(ids_L[: len(prompt_ids)], prompt_ids):
        raise ModelError(
            f"{where}.words: the chat template renders the answer {word!r} after other tokens than "
            "it prompts for one with, so training would not teach what is read; choose another "
            f"with {key_of('policy.tokenizer.chat_template')}, or set its chat_template_kwargs"
        )
    return ids_L[len(prompt_ids) : -1]


def open_model_judge(source: ScorerSource, *, device: Device, where: str, say: Say) -> ModelJudge:
    """Load a judge into an engine, and check it.

    Raises:
        UserError: The model is no language model, or a setting cannot be used.
        EngineError: vLLM does not start.
    """
    config = source.judge
    assert config is not None
    JudgePrompt(config, where=where)  # reports a wrong template before anything is loaded
    place = find_model(str(source.model_name))
    for note in place.notes:
        say(note)
    check_files(place)
    quiet_libraries()
    spec = ModelSpec(
        name=place.name,
        tokenizer=source.tokenizer,
        precision=source.precision,
        compile=source.compile,
    )
    hf_config = read_config(spec, place.name)
    positions = num_positions(hf_config) or MAX_LENGTH
    max_length = source.max_model_len or min(MAX_LENGTH, positions)
    if max_length > positions:
        raise ModelError(
            f"{setting_of('policy.max_total_sequence_length', max_length)}: {place.name} has "
            f"{positions:,} positions; set it no higher"
        )
    make = _on_transformers if source.engine is None else _on_engine
    engine, chat, facts = make(source, config, spec, max_length, device)
    try:
        judge = ModelJudge(
            config,
            engine,
            chat,
            max_length=max_length,
            batch_tokens=source.batch_tokens,
            where=where,
        )
    except BaseException:
        engine.close()
        raise
    how = " or ".join(config.verdict_words)
    read = f"the probability of {how}" if config.read_out != "written" else "what it writes"
    about = "which of two responses is better" if config.compares else "each response"
    say(f"judge   {facts} from {place.shown}: asked about {about}, read by {read}")
    return judge


def _replies_at_a_time(source: ScorerSource) -> int:
    return source.max_concurrent or 64


def _on_transformers(
    source: ScorerSource, config: JudgeConfig, spec: ModelSpec, max_length: int, device: Device
) -> tuple[VerdictEngine, ChatFormat, str]:
    from laurel.generation.transformers.engine import TransformersEngine
    from laurel.models.loading.policy import check_policy_paths, load_policy
    from laurel.workers.process import choose_device

    # The threads and the random generators of this process stay as they are.
    loaded = load_policy(
        spec,
        seed=0,
        max_length=max_length,
        device=choose_device(device),
        weights_dtype=DTYPES[source.precision],
    )
    model = loaded.model
    model.requires_grad_(requires_grad=False)
    difference = check_policy_paths(model)
    chat = _chat_format(source, loaded.tokenizer, str(spec.name))
    engine = TransformersEngine(
        model, loaded.tokenizer, end_ids=chat.end_ids, max_concurrent=_replies_at_a_time(source)
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        engine,
        chat,
        (
            f"{type(model.causal_lm).__name__}, {format_parameters(parameters)} parameters, "
            f"{source.precision} on {model.device.type}, self-check {difference:.1e},"
        ),
    )


def _on_engine(
    source: ScorerSource, config: JudgeConfig, spec: ModelSpec, max_length: int, device: Device
) -> tuple[VerdictEngine, ChatFormat, str]:
    from laurel.config.grpo import GenerationConfig
    from laurel.generation.load import GeneratorSpec, PluggedMaker
    from laurel.workers.process import choose_device

    assert source.engine is not None
    assert source.generation is not None
    (engine, section), name = source.engine, source.generation.backend
    where = key_of("env.reward_model.generation")
    try:
        own = engine.for_judge(section, config)
    except ValueError as error:
        raise ConfigError(f"{key_of('env.reward_model.judge')}.{error}") from error
    if choose_device(device).type != choose_device("auto").type:
        raise ConfigError(
            f"{where}.backend={name}: it runs on the GPUs where there are any, and the device is "
            f"{device}; set backend=transformers"
        )
    directory = Path(str(spec.name))
    if directory.is_dir() and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{setting_of('policy.model_name', directory)} has no *.safetensors, and no other "
            f"weights are given to {name}, as pickled ones can run code. Save the model again with "
            "save_pretrained of transformers"
        )
    engine.check_installed(f"{where}.backend={name}")
    chat = _chat_format(source, find_tokenizer(spec, pad_may_end=True), str(spec.name))
    settings = GenerationConfig.model_validate(
        {"backend": name, f"{name}_cfg": own, "max_concurrent": _replies_at_a_time(source)}
    )
    start = EngineStart(
        directory=str(spec.name),
        spec=GeneratorSpec(settings=settings, max_length=max_length, end_ids=chat.end_ids),
        precision=source.precision,
    )
    made: Any = PluggedMaker(name=name, start=start)()
    return made, chat, f"a language model in {name}, {source.precision},"


def _chat_format(source: ScorerSource, tokenizer: Any, name: str) -> ChatFormat:
    from transformers import GenerationConfig

    ends = None
    with suppress(OSError):  # a model need not have the file
        ends = GenerationConfig.from_pretrained(name).eos_token_id
    return ChatFormat(tokenizer, source.tokenizer.chat_template_kwargs, generation_end_ids=ends)
