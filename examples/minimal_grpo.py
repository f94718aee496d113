"""GRPO from prompts and a reward function, without a configuration file, a run or a worker."""

import asyncio

import numpy as np

from laurel.config.grpo import GRPOConfig, PolicyLossConfig
from laurel.config.policy import BatchLimits, NamedCall, ScratchConfig
from laurel.data.forest import Batcher
from laurel.generation.transformers.engine import TransformersEngine
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.models.chat import ChatFormat
from laurel.models.loading.policy import load_policy
from laurel.models.spec import ModelSpec
from laurel.training.learner import LocalLearner
from laurel.training.policy_loss import PolicyLabels, PolicyLoss
from laurel.types import GenerationRequest, Message, SamplingParams, TokenGroup
from laurel.workers.process import choose_device

PROMPTS = [f"Write the number {i}." for i in range(4)]
DEVICE = choose_device("auto")


def reward(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


async def train(steps: int = 24, group_size: int = 8) -> list[float]:
    scratch = ScratchConfig(hidden_size=32, vocab_size=320)  # name="Qwen/..." for a real model
    spec = ModelSpec(scratch=scratch, precision="float32")
    loaded = load_policy(spec, seed=0, max_length=64, device=DEVICE, texts=PROMPTS)
    chat = ChatFormat(loaded.tokenizer)
    engine = TransformersEngine(loaded.model, chat.tokenizer, end_ids=chat.end_ids)
    adam = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 2e-2})
    learner = LocalLearner(loaded.model, optimizer=adam, max_grad_norm=1.0)
    batcher = Batcher(loaded.model.path, BatchLimits(forest_tokens=4096), pad_id=0)
    loss = PolicyLoss(PolicyLossConfig(reference_policy_kl_penalty=0.0), max_length=64)
    estimator, sampling = resolve(GRPOConfig()), SamplingParams(max_new_tokens=8)
    history = []
    for step in range(steps):
        tokens, rewards, samples = [], [], []
        for i, text in enumerate(PROMPTS):
            ids = chat.prompt_ids((Message(role="user", content=text),))
            seeds = range((step * len(PROMPTS) + i) * group_size, 1 << 30)[:group_size]
            request = GenerationRequest(
                id=f"{step}/{i}", prompt_ids=ids, seeds_G=tuple(seeds), sampling=sampling
            )
            group = [one async for one in engine.generate(request)]
            rewards.append([reward(one.text) for one in group])
            samples.append(group)
            branches = tuple(one.ids_L for one in group)
            tokens.append(TokenGroup(id=request.id, trunk_ids=ids, branches_ids_G=branches))
        labels = [
            PolicyLabels(
                masks_GL=tuple(np.ones(len(one.ids_L), bool) for one in group),
                advantages_G=tuple(advantages_G),
                used_G=(True,) * len(group),
                behaviour_GL=tuple(one.logprobs_L for one in group),
                rewards_G=tuple(rewards_G),
            )
            for group, rewards_G, advantages_G in zip(
                samples, rewards, compute_advantages(rewards, estimator).values_BG, strict=True
            )
        ]
        learner.update(batcher.cut(tokens, labels), loss)
        await engine.update_weights(learner.weights(step + 1))
        history.append(float(np.mean(rewards)))
        print(step, round(history[-1], 3))
    return history


if __name__ == "__main__":
    asyncio.run(train())
