"""The model that is being trained scores as its checkpoint would be scored by."""

import pytest

from laurel.config.policy import BatchLimits, NamedCall
from laurel.data.forest import Batcher
from laurel.rewards.scorer import LocalScorer
from laurel.training.learner import LocalLearner
from laurel.training.reward_model import LearnerScorer
from laurel.types import Message, group_of
from reward_models import small_model

ANSWERS = ("By the western gate.", "By bread and wine.", "No.", "By an old man of the river.")


def groups(count, *, size=2):
    return [
        group_of(
            [Message("user", f"Where does the laurel grow, {i}?")],
            [f"{ANSWERS[(i + k) % 4]} {k}" for k in range(size)],
            group_id=str(i),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def scorers():
    """By the token budget of a forest; batches of the small one are for three ranks."""
    loaded = small_model()
    learner = LocalLearner(
        loaded.model, optimizer=NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0})
    )
    loaded.model.train()
    made = {}
    for budget in (40, 4096):
        limits = BatchLimits(forest_tokens=budget)
        dp_size = 3 if budget == 40 else 1
        batcher = Batcher(loaded.model.path, limits, pad_id=0, dp_size=dp_size)
        made[budget] = LearnerScorer(learner, loaded.contract, batcher)
    return made


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("budget", [40, 4096])
def test_the_scores_are_those_of_the_model_alone(scorers, budget, size):
    loaded = small_model()
    alone = LocalScorer(loaded.model, loaded.contract, batch_tokens=1)
    asked = groups(7, size=size)
    done: list[int] = []
    found = scorers[budget].score_now(asked, lambda count, _: done.append(count))
    expected = [alone.score_now([group])[0] for group in asked]
    for mine, theirs in zip(found, expected, strict=True):
        assert [one.value for one in mine] == pytest.approx([s.value for s in theirs], abs=1e-5)
        assert [one.num_tokens for one in mine] == [one.num_tokens for one in theirs]
    assert sum(done) == 7
    again = scorers[budget].score_now(asked)
    assert again == found


def test_equal_answers_have_equal_scores_and_failures_stay_alone(scorers):
    same = group_of([Message("user", "?")], ["No.", "Yes.", "No."], group_id="same")
    found = scorers[40].score_now([same, *groups(3)])[0]
    assert found[0] == found[2] != found[1]
    assert scorers[40].score_now([]) == []


def test_a_conversation_that_cannot_be_rendered_is_a_failure(scorers, monkeypatch):
    from laurel.errors import DataError
    from laurel.models.tokenizer import PlainContents

    render = PlainContents.render

    def refusing(self, conversation, **options):
        if "forbidden" in conversation[-1].content:
            raise DataError("the template cannot render it")
        return render(self, conversation, **options)

    monkeypatch.setattr(PlainContents, "render", refusing)
    asked = group_of([Message("user", "??")], ["fine", "forbidden"], group_id="one")
    fine, forbidden = scorers[40].score_now([asked])[0]
    assert fine.value is not None
    assert forbidden.value is None
    assert "cannot render" in str(forbidden.failure)
