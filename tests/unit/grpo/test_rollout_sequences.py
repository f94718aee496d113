"""Rollouts whose chat template rewrites earlier turns: several sequences with one beginning."""

import asyncio
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from laurel.config.grpo import GRPOConfig, GRPOPolicyConfig, TreeConfig
from laurel.config.policy import NamedCall
from laurel.data.forest import Batcher, global_batches
from laurel.environments.interface import EnvironmentInterface
from laurel.grpo.advantages import Advantages, penalize_turns
from laurel.grpo.branching import num_sampled, tree_segments
from laurel.grpo.loop import policy_logprobs
from laurel.grpo.metrics import environment_batch, rollout_metrics
from laurel.grpo.source import Batch, batch_from_dict, batch_to_dict
from laurel.training.learner import LocalLearner
from laurel.training.policy_loss import PolicyLabels
from laurel.types import EnvironmentSpec, StepReward, messages_of
from policy_batches import loss_of
from policy_fakes import (
    SAMPLING,
    ByteChat,
    Judge,
    Say,
    ScriptedGenerator,
    ids_of,
    rollouts_of,
    task,
)
from tiny import PAD, tiny_policy

torch.set_num_threads(1)


class ForgetfulChat(ByteChat):
    """Opens a thought in the prompt, and forgets those of earlier turns: all up to a `*`."""

    def prompt_ids(self, conversation, /, *, tools=()):
        said = "".join(
            m.content.split("*")[-1] + ";" if m.role == "assistant" else m.content
            for m in conversation
        )
        return ids_of(f"{said}>(")

    def rewritten_ids(self, observation, /, *, history, turn, tools=()):
        if "*" not in turn.content and all("*" not in m.content for m in history):
            return None
        said = tuple(type(turn)(m["role"], m["content"]) for m in messages_of(observation))
        return self.prompt_ids((*history, turn, *said))


def asked_of(request):
    """The index of each completion that is asked for, and the turn."""
    names = request.conversations_G
    turn = request.id.removeprefix(names[0]).removeprefix("-") if len(names) == 1 else "0"
    is_first = not request.id.startswith(names[0])
    return [(int(name.rsplit("-", 1)[1]), 0 if is_first else int(turn)) for name in names]


def answers(*texts):
    """Completion `i` says `texts[i]`, turn by turn."""
    return lambda request: [
        (place, Say(texts[index][turn])) for place, (index, turn) in enumerate(asked_of(request))
    ]


def three_turns(text, given):
    turn = given.get("turn", 1)
    return {
        "over": turn == 3,
        "reward": turn,
        "metadata": {**given, "turn": turn + 1},
        "observation": {"role": "user", "content": f"[{turn}]"},
        "steps": [StepReward(end, 1.0 * turn) for end in sorted({1, len(text)})],
    }


def played(*texts, generator=None, judge=None, **options):
    generator = generator or ScriptedGenerator(answers(*texts))
    judge = judge or Judge(three_turns)
    judge.spec = EnvironmentSpec(noise_floor=0.0, gives_steps=True)
    chosen = {"chat": ForgetfulChat(), "max_turns": 9, "per_step": True} | options
    rollouts = rollouts_of(generator, judge=judge, **chosen)
    try:
        (group,) = asyncio.run(
            rollouts.play(
                [task("q")], num_generations=len(texts), sampling=SAMPLING, batch=(0, 0, 0)
            )
        )
    finally:
        rollouts.close()
    return group, generator, judge


def text_of(ids):
    return bytes(np.asarray(ids).tolist()).decode()


def test_each_turn_is_trained_in_the_context_in_which_it_was_sampled():
    group, generator, judge = played(["a*b", "c*d", "e"], ["f", "g", "h"])
    assert {text_of(request.prompt_ids) for request in generator.requests} == {
        "q>(",
        "qb;[1]>(",
        "qb;[1]d;[2]>(",
        "q>(f[[1]]>",
        "q>(f[[1]]>g[[2]]>",
    }
    forgetful, other = group.rollouts_G
    # All sequences begin with the prompt, as far as later contexts keep it.
    assert text_of(group.prompt_ids) == "q"
    sequences = [
        (text_of(ids), text_of(np.where(mask, ids, ord("."))))
        for ids, mask in zip(
            np.split(forgetful.ids_L, forgetful.begins),
            np.split(forgetful.mask_L, forgetful.begins),
            strict=True,
        )
    ]
    assert sequences == [
        (">(a*b", "..a*b"),
        ("b;[1]>(c*d", "." * 7 + "c*d"),
        ("b;[1]d;[2]>(e", "." * 12 + "e"),
    ]
    assert (forgetful.num_sequences, forgetful.num_turns, forgetful.reward) == (3, 3, 6.0)
    assert (forgetful.logprobs_L == np.where(forgetful.mask_L, np.float32(-0.5), 0)).all()
    assert (text_of(other.ids_L), other.begins) == (">(f[[1]]>g[[2]]>h", ())
    tokens = group.tokens()
    assert tokens.sequences_G == (3, 1)
    assert [text_of(ids) for ids in tokens.branches_ids_G] == [
        *(text for text, _ in sequences),
        text_of(other.ids_L),
    ]
    # Steps end at the tokens that the policy sampled for them.
    ends = [[text_of(r.ids_L[s.end - 1 : s.end]) for s in r.steps] for r in group.rollouts_G]
    assert ends == [list("abcde"), list("fgh")]
    # The prompt is as long as it was, though less of it is shared.
    assert rollout_metrics([group])["mean_prompt_length"] == len("q>(")
    assert environment_batch([group])["prompt_lengths"].tolist() == [len("q>(")] * 2
    # What judges see is the conversation in full.
    assert [m["content"] for m in judge.logs[-2]][1:4] in (["a*b", "[1]", "c*d"], ["f", "[1]", "g"])


def test_turns_keep_their_own_advantages_in_several_sequences():
    group, _, _ = played(["a*b", "c*d", "e"], ["f", "g", "h"])
    group = replace(
        group,
        rollouts_G=tuple(replace(r, invalid_turns=(1,)) for r in group.rollouts_G),
    )
    given = Advantages(values_BG=[np.array([1.0, 2.0])], metrics={})
    found = penalize_turns(given, [group], GRPOConfig(invalid_tool_call_advantage=-3.0))
    for rollout, values in zip(group.rollouts_G, found.tokens_BGL[0], strict=True):
        said = [text_of(rollout.ids_L[[i]]) for i in np.flatnonzero(values == -3.0)]
        assert said in (list("c*d"), ["g"])


def test_turns_of_several_sequences_are_continued_as_they_were():
    class Copied(Judge):
        close_conversations = EnvironmentInterface.close_conversations

    def script(request):
        draw = random.Random(f"{request.seeds_G} {text_of(request.prompt_ids)}")
        said = ["".join(draw.choices("ab*", k=4)) for _ in request.seeds_G]
        return [(place, Say(text)) for place, text in enumerate(said)]

    generator = ScriptedGenerator(script)
    tree = TreeConfig(branches=3, rounds=2)
    group, _, _ = played(*"abcdefgh", generator=generator, judge=Copied(three_turns), tree=tree)
    contexts = {text_of(request.prompt_ids) for request in generator.requests}
    branched = [one for one in group.rollouts_G if one.branch is not None]
    assert len(branched) == 6
    assert any(0 < begin < one.branch.length for one in branched for begin in one.begins)
    for one in group.rollouts_G:
        assert [one.num_turns, one.failure] == [3, None]
        if one.branch is not None:
            source, length = group.rollouts_G[one.branch.of], one.branch.length
            for shared in ("ids_L", "mask_L", "logprobs_L"):
                ours, theirs = getattr(one, shared)[:length], getattr(source, shared)[:length]
                assert ours.tolist() == theirs.tolist()
            assert [begin for begin in one.begins if begin < length] == [
                begin for begin in source.begins if begin < length
            ]
            assert length in [turn.begin for turn in one.turns]
        # Each turn stands where it was sampled.
        for turn in one.turns:
            begin = max((0, *(begin for begin in one.begins if begin < turn.begin)))
            assert text_of(one.ids_L[turn.begin : turn.end]) == one.messages[turn.message].content
            context = np.concatenate((group.prompt_ids, one.ids_L[begin : turn.begin]))
            assert text_of(context) in contexts
    paths = tree_segments(group.rollouts_G)
    distinct = {segment.id: segment.num_sampled for path in paths for segment in path}
    assert sum(distinct.values()) == sum(map(num_sampled, group.rollouts_G))
    assert sum(distinct.values()) == 4 * sum(len(r.seeds_G) for r in generator.requests)


def test_a_rewritten_context_counts_by_its_own_length():
    """Forgotten thoughts leave room; a context without room ends the conversation."""
    long = "x" * 20 + "*b"
    group, _, _ = played([long, long, "e"], max_length=46)
    assert group.rollouts_G[0].num_turns == 3
    assert not group.rollouts_G[0].truncated
    group, _, _ = played([long, long, "e"], max_length=13)
    assert (group.rollouts_G[0].num_turns, group.rollouts_G[0].truncated) == (2, True)


def test_a_context_with_another_first_token_is_a_failure():
    class Restless(ForgetfulChat):
        def rewritten_ids(self, observation, /, **rest):
            return ids_of("!")

    group, _, _ = played(["a", "b", "c"], chat=Restless(), max_failed_share=1.0)
    assert "begins the conversation with another token" in group.rollouts_G[0].failure


def test_batches_ahead_keep_their_sequences():
    group, _, _ = played(["a*b", "c*d", "e"], ["f", "g", "h"])
    saved = batch_to_dict(Batch(step=1, groups=[group]))
    found = batch_from_dict(saved, {group.task.id: group.task}).groups[0]
    assert [r.begins for r in found.rollouts_G] == [r.begins for r in group.rollouts_G]
    del saved["groups"][0]["rollouts"][1]["begins"]  # as older checkpoints have them
    assert batch_from_dict(saved, {group.task.id: group.task}).groups[0].rollouts_G[1].begins == ()


# Against training one sequence per turn by hand.

LAYOUTS = {
    "forest": {},
    "divided": {"sequence_packing": {"train_mb_tokens": 20}},
    "in parts": {"sequence_packing": {"train_mb_tokens": 20}},
    "deep": {},
    "deep in parts": {"sequence_packing": {"train_mb_tokens": 20}},
    "alone": {},
    "padded": {"sequence_packing": {"enabled": False}, "train_micro_batch_size": 3},
}


def model_of(path):
    return tiny_policy("qwen3", dtype=torch.float64, precision=torch.float64, path=path)


def policy(layout):
    path = "padded" if layout == "padded" else "forest"
    model = model_of(path)
    section = GRPOPolicyConfig(max_total_sequence_length=64, **LAYOUTS[layout])
    learner = LocalLearner(model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0}))
    limits = section.batch_limits
    if "deep" in layout:
        limits = replace(limits, least_shared=2)
    if layout == "alone":
        limits = replace(limits, share_prompts=False)
    dp_size = 2 if layout == "divided" else 1
    return learner, Batcher(path, limits, pad_id=PAD, dp_size=dp_size)


def gradient(model):
    named = model.named_parameters()
    return torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])


@pytest.mark.parametrize(
    ("layout", "by_token"), [(layout, i % 2 == 0) for i, layout in enumerate(LAYOUTS)]
)
def test_losses_and_gradients_are_those_of_a_sequence_per_turn(layout, by_token):
    draw = random.Random(f"{layout} {by_token}")
    texts = [
        ["".join(draw.choices("ab*", k=draw.randint(1, 4))) for _ in range(3)] for _ in range(3)
    ]
    texts[2][:2] = texts[0][:2]  # whole sequences are alike, as where one branches off another
    group, generator, _ = played(*texts)
    group = replace(
        group,
        prompt_ids=group.prompt_ids % 60 + 1,
        rollouts_G=tuple(replace(r, ids_L=r.ids_L % 60 + 1) for r in group.rollouts_G),
    )
    learner, batcher = policy(layout)
    (old_GL,) = policy_logprobs(learner.outputs, [group.tokens()], batcher)
    rng = np.random.default_rng(0)
    reference_GL = [(old_L + rng.normal(size=len(old_L))).astype(np.float32) for old_L in old_GL]
    labels = PolicyLabels(
        masks_GL=tuple(r.mask_L for r in group.rollouts_G),
        advantages_G=tuple(rng.normal(size=len(texts)).tolist()),
        used_G=(True,) * len(texts),
        behaviour_GL=tuple(r.logprobs_L for r in group.rollouts_G),
        old_GL=tuple(old_GL),
        reference_GL=tuple(reference_GL),
        rewards_G=tuple(r.reward for r in group.rollouts_G),
    )
    loss = loss_of(token_level_loss=by_token, reference_policy_kl_penalty=0.1)
    ((tokens, of_tokens),) = global_batches(
        [group.tokens()], [labels], PolicyLabels.subset, size=len(texts)
    )
    micro_batches = batcher.cut(*batcher.divide(tokens, of_tokens, PolicyLabels.subset))
    micro_batches = pickle.loads(pickle.dumps(micro_batches))  # as they travel to ranks
    update = learner.update(micro_batches, loss)
    found = gradient(learner.model)
    assert update.metrics["global_valid_seqs"] == len(texts)
    assert update.metrics["global_valid_toks"] == sum(len(t) for turns in texts for t in turns)

    # By hand: the requests say what each turn's context was.
    contexts = {
        key: request.prompt_ids % 60 + 1
        for request in generator.requests
        for key in asked_of(request)
    }
    model, total = model_of("padded"), 0.0
    drawn = [np.flatnonzero(r.mask_L) for r in group.rollouts_G]
    counts = [len(places) for places in drawn]
    for g, turns in enumerate(texts):
        places = iter(np.split(drawn[g], np.cumsum([len(text) for text in turns])[:-1]))
        for turn, text in enumerate(turns):
            own, context = next(places), contexts[g, turn]
            said = ids_of(text) % 60 + 1
            row = torch.from_numpy(np.concatenate((context, said)).astype(np.int64))
            logits = model.causal_lm(row[None]).logits[0, len(context) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(1, row[len(context) :, None])[:, 0]
            lead = torch.from_numpy(reference_GL[g][own]).double() - logprobs
            kl = (lead.exp() - 1 - lead) * (logprobs - logprobs.detach()).exp()
            ratio = (logprobs - torch.from_numpy(old_GL[g][own]).double()).exp()
            actor = -labels.advantages_G[g] * ratio
            of_turn = (actor + 0.1 * kl).sum()
            share = sum(counts) if by_token else counts[g] * len(texts)
            (of_turn / share).backward()
            total += float(of_turn.detach()) / share
    expected = gradient(model)
    assert update.metrics["loss"] == pytest.approx(total, rel=1e-6)
    assert (found - expected).norm() < 1e-6 * expected.norm()
