"""The values that travel between the packages of Laurel. Read this file first.

Everything is a prompt and its completions: a preference pair is a prompt with two ranked
completions, a ranked list one with K, a GRPO group one with G, a scoring request one with one or
many. So one value, the *group*, is what data sets yield, scorers score and learners train on, and
one model batch, the *token forest*, carries any of them.

Every stage wraps the value of the stage before it; none fills in a hole left by another::

    Group -> Preference -> PreferenceSample -> TokenForest -> scores -> loss
    Group -> TokenGroup  ------------------->  TokenForest -> scores -> Score
    Task  -> GenerationRequest -> Generated -> EnvironmentReturn -> Rollout
    Task  +  its Rollouts = RolloutGroup -> TokenGroup -> TokenForest -> log-probs -> loss

Shape legend. Tensors and sequences carry these suffixes, slowest dimension first::

    T  distinct tokens of a micro-batch, all trees in one row
    M  completion tokens of a micro-batch: those of all completions, one after the other
    N  completions of a micro-batch, in the order of its groups
    G  completions of one group
    B  groups of a batch
    P  pairs of completions
    K  outputs of the reward head (1 for a scalar reward, one per attribute for regression)
    L  tokens of one sequence
    V  entries of the vocabulary
    H  attention heads
    D  size of one head, or of the hidden state where no head is in sight
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from laurel.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    TokenIds = npt.NDArray[np.int32]
    Column = Tensor | npt.NDArray[Any] | Sequence[float]
    LogProbs = npt.NDArray[np.float32]
    Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation: a role (`system`, `user`, `assistant`, ...) and its content."""

    role: str
    content: str
    learned: bool = field(default=True, compare=False, repr=False)
    """Whether a turn that is imitated counts in the loss; rows may say that it does not."""


USUAL_ROLES = (
    "system",
    "user",
    "assistant",
    "tool",
    "developer",
    "function",
    "ipython",
    "environment",
    "observation",
)
"""The message roles that common chat templates know."""
PROMPT_MESSAGES = "laurel_prompt_messages"
"""The metadata key of the number of messages of a rollout's prompt, which come first in it."""
IS_VALIDATION = "laurel_is_validation"
"""The metadata key that tells whether a rollout only measures the policy."""

Conversation = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer to a prompt, as raw messages (never templated text)."""

    messages: Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A prompt and its completions.

    The id is explicit, so two rows with the same prompt stay two groups.
    """

    id: str
    prompt: Conversation
    completions_G: tuple[Completion, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Data of the task besides its messages, e.g. `{"ground_truth": "42"}`, for scorers that are
    not models; see `protocols.Scorer`.
    """

    def conversation(self, index: int) -> Conversation:
        """Return the whole conversation of completion `index`."""
        return self.prompt + self.completions_G[index].messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A group with preferences between its completions.

    Example: a pair whose first completion won is `ranks_G=(0, 1)`; a tie is `(0, 0)`.
    """

    group: Group
    ranks_G: tuple[int, ...]
    """Lower is better; equal ranks are a tie."""
    margin: float = 0.0
    """How much better the best is than the worst, in units of the score (0: unknown)."""
    target: float = 1.0
    """Probability that the lower rank is really preferred (soft label; 1: certain)."""
    attributes_GK: tuple[tuple[float, ...], ...] | None = None
    """Ratings of each completion for attribute regression; NaN where it was not rated."""
    steps_GS: tuple[tuple[float, ...], ...] | None = None
    """Probability that each step of each completion is right, for process supervision; NaN where
    the step was not labelled.
    """
    source: str = ""
    """Origin of the row, as `file:line` or `name[index]`."""

    @property
    def num_outputs_G(self) -> tuple[int, ...]:
        """Number of outputs of the head for each completion: one, or one for each step."""
        if self.steps_GS is None:
            return (1,) * len(self.ranks_G)
        return tuple(map(len, self.steps_GS))

    def select(self, indices: Sequence[int]) -> Preference:
        """Return the preference between only the completions at these indices."""

        def some(values_G: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values_G[i] for i in indices)

        return replace(
            self,
            group=replace(self.group, completions_G=some(self.group.completions_G)),
            ranks_G=some(self.ranks_G),
            attributes_GK=None if self.attributes_GK is None else some(self.attributes_GK),
            steps_GS=None if self.steps_GS is None else some(self.steps_GS),
        )


class SentTurn(NamedTuple):
    """A prompt and its response as a trainer sends them."""

    prompt: str | Conversation
    """A text, which a chat template may have rendered, or messages."""
    response: str
    """The answer; the token that ended its sampling may still be behind it."""
    is_rendered: bool | None = None
    """Whether the prompt is rendered; None: the model's scoring contract decides by the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenGroup:
    """A group as tokens: the trunk that all completions share, then the branch of each.

    Sequence `i` is `trunk_ids + branches_ids_G[i]`. Every branch has at least one token. The head
    is read at its last token, or at the tokens in `reads_G`. A completion is one sequence, or
    several where `sequences_G` says so.
    """

    id: str
    trunk_ids: TokenIds
    branches_ids_G: tuple[TokenIds, ...]
    truncated_G: tuple[bool, ...] = ()
    """Sequences that were cut to the maximum length of the scoring contract."""
    reads_G: tuple[tuple[int, ...], ...] = ()
    """Positions in each whole sequence at which the head is read: the ends of its steps. Without
    any entry, it is read at the last token of each sequence.
    """
    sequences_G: tuple[int, ...] = ()
    """Number of adjacent branches of each completion, which are never divided over micro-batches.
    Without any entry, each completion has one.
    """

    @property
    def branches_of_G(self) -> tuple[range, ...]:
        """Indices of the branches of each completion."""
        if not self.sequences_G:
            return tuple(range(i, i + 1) for i in range(len(self.branches_ids_G)))
        ends = itertools.accumulate(self.sequences_G)
        return tuple(
            range(end - count, end) for end, count in zip(ends, self.sequences_G, strict=True)
        )

    @property
    def num_own_tokens_G(self) -> tuple[int, ...]:
        """Number of tokens of each completion after the trunk, over all its branches."""
        if not self.sequences_G:
            return tuple(map(len, self.branches_ids_G))
        return tuple(sum(len(self.branches_ids_G[b]) for b in own) for own in self.branches_of_G)

    @property
    def num_reads_G(self) -> tuple[int, ...]:
        """Number of tokens of each sequence at which the head is read."""
        return tuple(map(len, self.reads_G)) or (1,) * len(self.branches_ids_G)

    def select(self, indices: Sequence[int]) -> TokenGroup:
        """Return the group with only the completions at these indices."""
        branches = indices
        if self.sequences_G:
            branches = [branch for i in indices for branch in self.branches_of_G[i]]
        return TokenGroup(
            id=self.id,
            trunk_ids=self.trunk_ids,
            branches_ids_G=tuple(self.branches_ids_G[b] for b in branches),
            truncated_G=tuple(self.truncated_G[b] for b in branches) if self.truncated_G else (),
            reads_G=tuple(self.reads_G[b] for b in branches) if self.reads_G else (),
            sequences_G=tuple(self.sequences_G[i] for i in indices) if self.sequences_G else (),
        )

    @property
    def num_tokens(self) -> int:
        """Count distinct tokens: those that the forest computes."""
        return len(self.trunk_ids) + sum(len(ids) for ids in self.branches_ids_G)

    @property
    def lengths_G(self) -> tuple[int, ...]:
        """Length of each whole sequence: the tokens of a padded batch, before padding."""
        return tuple(len(self.trunk_ids) + len(ids) for ids in self.branches_ids_G)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreferenceSample:
    """A group with preferences as tokens: a row of reward-model training."""

    preference: Preference
    tokens: TokenGroup


class Span(NamedTuple):
    """A half-open range of positions in the row of a forest."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.end - self.start


class Tree(NamedTuple):
    """Sequences of a forest that begin alike, as a tree of runs of tokens.

    A node is a run of adjacent tokens that continues its parent's. The nodes stand in depth-first
    order without a gap, so all descendants of a node directly follow it. Only the root may be
    empty. A prompt with its completions is the tree of two levels: the prompt (trunk) is the root,
    the completions (branches) are its children.
    """

    nodes: tuple[Span, ...]
    parents: tuple[int, ...]
    """Index of the parent of each node; -1 for the root, which is the first."""

    @classmethod
    def of(cls, trunk: Span, branches_G: Sequence[Span]) -> Tree:
        """Return the tree of a prompt and its completions."""
        return cls((trunk, *branches_G), (-1, *(0 for _ in branches_G)))

    @property
    def has_two_levels(self) -> bool:
        """Whether every node but the root is a child of the root."""
        return not any(self.parents[1:])

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of ancestors of each node."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def starts(self) -> tuple[int, ...]:
        """Position of the first token of each node in the sequences that hold it."""
        starts: list[int] = []
        for parent in self.parents:
            starts.append(0 if parent < 0 else starts[parent] + self.nodes[parent].length)
        return tuple(starts)

    @property
    def exits(self) -> tuple[int, ...]:
        """Index of the first later node that is no descendant of each node."""
        exits = list(range(1, len(self.nodes) + 1))
        for node in range(len(self.nodes) - 1, 0, -1):
            parent = self.parents[node]
            exits[parent] = max(exits[parent], exits[node])
        return tuple(exits)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to `node`, including both."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]


class SequenceEnd(NamedTuple):
    """Where a sequence of a forest ends, and where in it its completion begins."""

    tree: int
    node: int
    """The node whose last token is the last of the sequence."""
    start: int
    """Position of the first token of its completion: the length of its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenForest:
    """Every distinct token of a micro-batch once, in one row, without padding.

    A token attends to its ancestors, the tokens before it in its own node and all tokens of the
    nodes above. Positions count from the root.
    """

    ids_T: Tensor
    """int32 [T]"""
    trees: tuple[Tree, ...]
    reads: tuple[int, ...] | None = None
    """Index in the row of every token at which the head is read, completion after completion; None:
    the last token of each.
    """
    ends: tuple[SequenceEnd, ...] | None = None
    """End of each sequence, in the order of the completions; None: every node but the roots ends
    one, which is the completion of its tree's prompt.
    """
    part_tokens: int | None = None
    """Most tokens of one pass through a model; a larger forest is computed in parts. None: it is
    computed in one pass, whatever its size."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Numbers travel several times as fast as the spans that they are read back into.
        edges = [[tree.nodes[0].start, *(node.end for node in tree.nodes)] for tree in self.trees]
        parents = [None if tree.has_two_levels else tree.parents for tree in self.trees]
        ends = None if self.ends is None else [tuple(end) for end in self.ends]
        return _forest_of, (self.ids_T, edges, self.reads, parents, ends, self.part_tokens)

    @property
    def is_in_parts(self) -> bool:
        """Whether the forest has more tokens than one pass may have."""
        return self.part_tokens is not None and len(self.ids_T) > self.part_tokens

    @property
    def positions_T(self) -> Tensor:
        """int64 [T]: position of each token in its own sequence."""
        import torch

        return torch.cat(
            [
                torch.arange(start, start + node.length)
                for tree in self.trees
                for start, node in zip(tree.starts, tree.nodes, strict=True)
            ]
        )

    @property
    def ends_N(self) -> tuple[SequenceEnd, ...]:
        """End of each sequence, in the order of the completions."""
        if self.ends is not None:
            return self.ends
        return tuple(
            SequenceEnd(index, node, tree.nodes[0].length)
            for index, tree in enumerate(self.trees)
            for node in range(1, len(tree.nodes))
        )

    @property
    def num_completions(self) -> int:
        """N: number of completions over all trees."""
        if self.ends is not None:
            return len(self.ends)
        return sum(len(tree.nodes) - 1 for tree in self.trees)

    @property
    def last_N(self) -> list[int]:
        """Index in the row of the last token of each completion, where the reward is read.

        Where one sequence is the beginning of another, or its equal, so may their nodes be.
        """
        return [self.trees[end.tree].nodes[end.node].end - 1 for end in self.ends_N]


def _forest_of(
    ids_T: Tensor,
    edges: Sequence[Sequence[int]],
    reads: tuple[int, ...] | None,
    parents: Sequence[tuple[int, ...] | None],
    ends: Sequence[tuple[int, int, int]] | None,
    part_tokens: int | None,
) -> TokenForest:
    trees = []
    for (start, *after), above in zip(edges, parents, strict=True):
        trunk, *others = map(Span, (start, *after), after)
        two_levels = Tree.of(trunk, others)
        trees.append(two_levels if above is None else two_levels._replace(parents=above))
    return TokenForest(
        ids_T=ids_T,
        trees=tuple(trees),
        reads=reads,
        ends=None if ends is None else tuple(SequenceEnd(*end) for end in ends),
        part_tokens=part_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedRows:
    """Whole sequences as the rows of a rectangle, padded on the right.

    For models that a forest cannot serve (encoders, state-space layers), and to measure against.
    """

    ids_NL: Tensor
    """int64 [N, L]"""
    lengths_N: Tensor
    """int64 [N]: tokens of each row before its padding."""
    starts_N: Tensor
    """int64 [N]: first token of each row's completion: the length of its trunk."""
    reads: tuple[tuple[int, int], ...] | None = None
    """Row and column of every token at which the head is read, row after row; None: the last token
    of each row.
    """

    @property
    def num_completions(self) -> int:
        """N: number of completions."""
        return self.ids_NL.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion: a number, or the reason why there is none."""

    value: float | None
    """The scalar reward; None exactly when `failure` is set. A failure never becomes a number."""
    values_K: tuple[float, ...] = ()
    """Every output of the head (one for a scalar reward model); of a process reward model, the
    value of each step.
    """
    num_tokens: int = 0
    truncated: bool = False
    failure: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Named parts of the score: those of the members of an ensemble, or further results of a
    function.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt to be answered, and the data for scoring an answer."""

    id: str
    """Unique id in the data set."""
    prompt: Conversation
    environment: str
    """Name of the environment that scores the answers."""
    name: str = ""
    """Name of the data set, under which metrics of its tasks are reported."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Data that the environment gets with each answer, e.g. `{"ground_truth": "42"}`."""
    source: str = ""
    """Origin of the row, as `file:line` or `name[index]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters for sampling completions."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()
    """A completion ends after the first of them; it is kept in the completion."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends after the first of them; it is kept in the completion."""

    def problem(self, vocab_size: int) -> str | None:
        """Return which parameter no engine could sample with, and why; None if there is none."""
        if self.max_new_tokens < 1:
            return f"max_new_tokens must be at least 1, not {self.max_new_tokens}"
        if not 0 <= self.temperature < float("inf"):
            return f"temperature must be 0 or more, not {self.temperature}"
        if not 0 < self.top_p <= 1:
            return f"top_p must be above 0 and at most 1, not {self.top_p}"
        if self.top_k is not None and self.top_k < 1:
            return f"top_k must be at least 1, or None for all tokens, not {self.top_k}"
        if "" in self.stop_strings:
            return "stop_strings must not contain an empty string"
        if odd := [token for token in self.stop_token_ids if not 0 <= token < vocab_size]:
            return f"stop_token_ids {odd} are not in the model's vocabulary of {vocab_size} tokens"
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """A prompt, and a seed for each requested completion."""

    id: str
    prompt_ids: TokenIds
    """int32 [L], at least one."""
    seeds_G: tuple[int, ...]
    """Seed of each completion, which never depends on other requests."""
    sampling: SamplingParams
    conversations_G: tuple[str, ...] = ()
    """Name of the conversation that each completion belongs to, where it may have several turns. An
    engine may keep the keys and values of a conversation for its next turn, until
    `Generator.end_conversations`."""
    branch_of: str = ""
    """Name of another conversation that begins with the same tokens, or with many of them: the
    engine may use what it keeps of it."""

    def check(self, vocab_size: int) -> None:
        """Raise an error if no engine could sample this request.

        Raises:
            DataError: The prompt has no tokens, or tokens outside the model's vocabulary.
            ConfigError: The sampling parameters or seeds are out of range.
        """
        ids_L = self.prompt_ids
        where = f"request {self.id!r}"
        if len(ids_L) == 0:
            raise DataError(f"{where}: the prompt has no token, so there is nothing to continue")
        if int(ids_L.min()) < 0 or int(ids_L.max()) >= vocab_size:
            odd = sorted({int(token) for token in ids_L if not 0 <= token < vocab_size})
            raise DataError(
                f"{where}: the prompt has token ids {odd[:5]}, but the model's vocabulary is "
                f"0 to {vocab_size - 1}; was it made by another model's tokenizer?"
            )
        negative = [seed for seed in self.seeds_G if seed < 0]
        if negative:
            raise ConfigError(f"{where}: seeds must not be negative, but there is {negative[0]}")
        if (wrong := self.sampling.problem(vocab_size)) is not None:
            raise ConfigError(f"{where}: {wrong}")


FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """One completion of a request, as the policy sampled it."""

    index: int
    """Index among the requested completions."""
    ids_L: TokenIds
    """int32 [L], including the token that ended it."""
    logprobs_L: LogProbs
    """float32 [L]: log-probability of each token when it was sampled, under `softmax(logits /
    temperature)`; temperature 1 where it is 0; before top-p and top-k.
    """
    text: str
    """Text without special tokens."""
    finish_reason: FinishReason
    """`length`: the limit came before a stop string or a stop token."""
    weight_version: int
    """Oldest version of the weights that any of its tokens was sampled with."""
    num_cached: int = 0
    """Tokens of the prompt that the engine did not compute, because it had their keys and
    values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A version of the policy's weights for a generator."""

    version: int
    """Number of training steps taken."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Names and values as Hugging Face's `from_pretrained` knows them, adapters merged."""
    changing: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
    """The subset that training can change: enough for a generator that has all weights of an
    earlier version. None: training can change any.
    """
    same_as: int | None = None
    """An earlier version with the very same values: a generator that has it takes the number and
    reads no tensor. None: there is none.
    """


ToolSchemas = Sequence[Mapping[str, Any]]
"""JSON schemas of functions, each as `{"type": "function", "function": {...}}`."""

JudgingUnit = Literal["completion", "part", "group", "batch"]
"""Unit of completions that an environment scores in one call; the call starts once the last of them
has ended.

- `completion`: each alone.
- `part`: parts of a group. The division does not depend on the order of completion, and short parts
wait for each other.
- `group`: all completions of a prompt.
- `batch`: all completions of all prompts of a step, for their first turns.

Later turns are scored one by one. Equal completions of a group that are scored in separate calls
get the reward of the first of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """The properties of an environment that its callers need."""

    judges: JudgingUnit = "group"
    """Unit of completions in one call."""
    stop_strings: tuple[str, ...] = ()
    """Ends of the policy's first turn."""
    noise_floor: float | None = 0.0
    """Standard deviation of the rewards' own noise. None: `Environment.noise_floor` measures it."""
    has_state: bool = False
    """Rewards depend on more than the conversation. Then checkpoints hold its `state_dict`, and
    `end_batch` is called."""
    tools: ToolSchemas = ()
    """Functions that the policy may call, which its chat template shows in every prompt."""
    gives_steps: bool = False
    """Whether `EnvironmentReturn.steps` has the rewards of steps."""
    components: tuple[str, ...] | None = None
    """Names of the components of its rewards; empty: it gives one number. None: its first rewards
    tell."""
    rests: bool = False
    """Whether models that it asks have the policy's devices, and free them (`Environment.resting`)
    while it does not score."""

    def __post_init__(self) -> None:
        if self.judges not in get_args(JudgingUnit):
            known = ", ".join(get_args(JudgingUnit))
            raise ValueError(f"EnvironmentSpec: judges={self.judges!r} must be one of {known}")


class StepReward(NamedTuple):
    """The reward of a step of an answer, for advantages per step."""

    end: int
    """Where the step ends: in `EnvironmentReturn` the number of characters of the conversation's
    last message up to there, in `Rollout` the number of tokens of `ids_L`."""
    value: float


Observation = Mapping[str, str] | Sequence[Mapping[str, str]]
"""The environment's next message as `{"role", "content"}`, or several of them."""


def _tensor(column: Any) -> Any:
    """Convert a column to a tensor; what is no column of numbers stays, and is refused by name."""
    import torch

    # Torch would round Python's own floats to float32.
    is_plain = isinstance(column, list | tuple) and all(type(one) in (int, float) for one in column)
    try:
        return torch.as_tensor(column, dtype=torch.float64 if is_plain else None)
    except (TypeError, ValueError, RuntimeError):
        return column


class _SixFields(NamedTuple):
    """The fields of an unpacked `EnvironmentReturn`."""

    observations: Sequence[Observation]
    """Next message of the environment, or several, such as the answers to several calls."""
    metadata: list[dict[str, Any] | None]
    """Data that the environment gets back with the next turn of the same conversation."""
    next_stop_strings: list[list[str] | None]
    """Stop strings of the policy's next turn; None leaves them as they are."""
    rewards: Tensor | dict[str, Tensor]
    """float64 or float32 [B], or several named components of it, each [B]. Sums are in float64."""
    terminateds: Tensor
    """bool [B]: whether the conversation is over."""
    answers: list[str | None] | None = None
    """Answers that the environment parsed, where it parses any."""


class EnvironmentReturn(_SixFields):
    """The results of an environment for a batch of conversations, in order.

    It unpacks into the six fields that environments of NeMo RL return; `failures`, `notes`,
    `steps`, `components` and `invalid_calls` are attributes beside them.
    """

    failures: list[str | None] | None = None
    """Why a conversation has no reward. Its entry in `rewards` is not read, and the sample takes no
    part in any metric, baseline or loss.
    """
    notes: Sequence[Any] | None = None
    """Findings about each conversation that the environment gets back with the finished batch, as
    JSON values. Those of a conversation's last turn count.
    """
    steps: Sequence[Sequence[StepReward] | None] | None = None
    """Rewards of the steps of each conversation's last message, in the order of their ends, where
    the environment has any (`EnvironmentSpec.gives_steps`). They are no part of `rewards`. A step
    that ends with the text ends with the turn: with the token that ends it.
    """
    components: Sequence[Mapping[str, float]] | None = None
    """Named components of each reward, which GDPO compares, where `rewards` is not their sum."""
    invalid_calls: Sequence[bool] | None = None
    """Whether the last message of each conversation has a call of a tool that cannot be read, or
    names no tool or wrong arguments (`grpo.invalid_tool_call_advantage`)."""

    def __new__(
        cls,
        observations: Sequence[Observation],
        metadata: list[dict[str, Any] | None],
        next_stop_strings: list[list[str] | None],
        rewards: Column | Mapping[str, Column],
        terminateds: Column,
        answers: list[str | None] | None = None,
        failures: list[str | None] | None = None,
        notes: Sequence[Any] | None = None,
        steps: Sequence[Sequence[StepReward] | None] | None = None,
        components: Sequence[Mapping[str, float]] | None = None,
        invalid_calls: Sequence[bool] | None = None,
    ) -> EnvironmentReturn:
        """Make the six fields, and the attributes beside them. Columns become tensors."""
        made = super().__new__(
            cls,
            observations,
            metadata,
            next_stop_strings,
            {name: _tensor(values) for name, values in rewards.items()}
            if isinstance(rewards, Mapping)
            else _tensor(rewards),
            _tensor(terminateds),
            answers,
        )
        made.failures, made.notes, made.steps = failures, notes, steps
        made.components, made.invalid_calls = components, invalid_calls
        return made

    @property
    def _beside(self) -> dict[str, Any]:
        return {
            "failures": self.failures,
            "notes": self.notes,
            "steps": self.steps,
            "components": self.components,
            "invalid_calls": self.invalid_calls,
        }

    def _replace(self, **changes: Any) -> EnvironmentReturn:
        """Return a copy with fields replaced, or with attributes beside them replaced."""
        fields = {**self._asdict(), **self._beside}
        return EnvironmentReturn(**(fields | changes))

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={value!r}" for name, value in self._beside.items())
        return f"{super().__repr__()[:-1]}, {named})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedTask:
    """A task that its environment cannot score fairly, and the reason."""

    task: Task
    reason: str


class Branch(NamedTuple):
    """Where a completion left another one of its group (`grpo.tree`)."""

    of: int
    """Index of the completion whose beginning it continues; it comes earlier in the group."""
    length: int
    """Number of tokens of `ids_L` that it took over from there, as they were sampled."""


class Turn(NamedTuple):
    """A message of a rollout that the policy wrote; others may have its role."""

    message: int
    """Its index in the rollout's messages."""
    begin: int
    end: int
    """Its tokens among those of the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """A finished rollout: one completion with its reward."""

    messages: Conversation
    """Messages after the prompt: of the policy, and of the environment in between."""
    ids_L: TokenIds
    """int32 [L]: all tokens after the prompt; of several sequences, one after the other."""
    mask_L: Mask
    """bool [L]: the tokens that the policy sampled."""
    logprobs_L: LogProbs
    """float32 [L]: log-probabilities as in `Generated`; 0 at tokens that the policy did not
    sample."""
    reward: float | None
    """Reward of the environment; None exactly when `failure` is set."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, where the environment names any."""
    failure: str | None = None
    truncated: bool = False
    """Whether it was cut off by `max_new_tokens`, the context or the number of turns."""
    num_turns: int = 1
    turns: tuple[Turn, ...] = ()
    """The policy's turns; without any, of an older checkpoint, they are taken as one."""
    weight_version: int = 0
    answer: str | None = None
    note: Any = None
    """Finding of the environment, as in `EnvironmentReturn.notes`."""
    steps: tuple[StepReward, ...] | None = None
    """Rewards of its steps; None where the environment gives none."""
    invalid_turns: tuple[int, ...] = ()
    """The policy's turns, from 0, whose calls of tools were invalid."""
    branch: Branch | None = None
    """Which completion's beginning it continues; None: it was sampled from the prompt on."""
    begins: tuple[int, ...] = ()
    """Where in `ids_L` each further sequence begins. It goes on from the prompt, too: with the
    earlier turns as a chat template rewrites them for a later one, then that turn."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences: each turn is trained in the context in which it was sampled."""
        return 1 + len(self.begins)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutGroup:
    """A task with the rollouts of its completions."""

    id: str
    """Unique id in the run: the same task sampled twice makes two groups."""
    task: Task
    prompt_ids: TokenIds
    """The prompt, up to where a later turn's context has other tokens."""
    rollouts_G: tuple[Rollout, ...]
    greedy: Rollout | None = None
    """The greedy completion, where an estimator of advantages compares with it; it is not learned
    from."""

    @property
    def all_rollouts(self) -> tuple[Rollout, ...]:
        """All rollouts that were sampled and scored, the greedy one last."""
        return self.rollouts_G if self.greedy is None else (*self.rollouts_G, self.greedy)

    def tokens(self) -> TokenGroup:
        """Convert the group to tokens for the learner: the prompt is the trunk."""
        counts = tuple(rollout.num_sequences for rollout in self.rollouts_G)
        return TokenGroup(
            id=self.id,
            trunk_ids=self.prompt_ids,
            branches_ids_G=tuple(ids for rollout in self.rollouts_G for ids in _sequences(rollout)),
            sequences_G=counts if max(counts, default=1) > 1 else (),
        )


def _sequences(rollout: Rollout) -> list[TokenIds]:
    edges = [0, *rollout.begins, len(rollout.ids_L)]
    return [rollout.ids_L[start:end] for start, end in itertools.pairwise(edges)]


def messages_of(observation: Observation) -> Sequence[Mapping[str, str]]:
    """Return the messages of an observation, which may be a single one."""
    return [observation] if isinstance(observation, Mapping) else observation


def group_of(prompt: Sequence[Message], answers: Sequence[str], *, group_id: str) -> Group:
    """Make a group whose completions are single assistant messages."""
    completions_G = tuple(Completion(messages=(Message("assistant", text),)) for text in answers)
    return Group(id=group_id, prompt=tuple(prompt), completions_G=completions_G)
