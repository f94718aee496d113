"""A Bradley-Terry reward model from rows, without a configuration file, a run or a worker."""

from laurel.config.policy import BatchLimits, NamedCall, ScratchConfig
from laurel.config.reward_model import LossConfig
from laurel.data.forest import Batcher
from laurel.models.loading.reward_model import load_reward_model
from laurel.models.spec import ModelSpec
from laurel.training.epochs import StepOrder
from laurel.training.learner import LocalLearner
from laurel.training.losses import RewardLoss
from laurel.types import Completion, Group, Message, Preference
from laurel.workers.process import choose_device

PAIRS = [(f"Is {i} + 1 = {i + 1}?", f"I say {i}: yes.", f"I say {i}: no.") for i in range(128)]
DEVICE = choose_device("auto")


def preference(prompt: str, *best_first: str) -> Preference:
    answers = [Completion(messages=(Message(role="assistant", content=t),)) for t in best_first]
    asked = (Message(role="user", content=prompt),)
    group = Group(id=prompt, prompt=asked, completions_G=tuple(answers))
    return Preference(group=group, ranks_G=tuple(range(len(answers))))


def train(steps: int = 24) -> list[dict[str, float]]:
    spec = ModelSpec(  # name="Qwen/Qwen3-0.6B" instead of scratch trains a real one
        scratch=ScratchConfig(hidden_size=32, vocab_size=320),
        precision="float32",
    )
    texts = [text for pair in PAIRS for text in pair]  # for the tokenizer of the new model
    loaded = load_reward_model(
        spec, seed=0, max_length=64, truncation_side="left", device=DEVICE, texts=texts
    )
    adam = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 3e-3})
    learner = LocalLearner(loaded.model, optimizer=adam, max_grad_norm=1.0)
    batcher = Batcher(loaded.model.path, BatchLimits(forest_tokens=2048), pad_id=0)
    loss = RewardLoss(LossConfig())
    rows = [preference(*pair) for pair in PAIRS]
    tokens = loaded.contract.encode([row.group for row in rows])
    order = StepOrder(len(rows), 16, shuffle=True, seed=0)
    history = []
    for step in range(steps):
        of_step = order.rows(step)
        labels = [rows[i] for i in of_step]
        batch = batcher.cut([tokens[i] for i in of_step], labels)
        history.append(learner.update(batch, loss).metrics)
        print(step, {name: round(history[-1][name], 3) for name in ("loss", "accuracy")})
    return history


if __name__ == "__main__":
    train()
