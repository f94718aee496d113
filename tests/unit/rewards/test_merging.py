import numpy as np
import pytest
from null_server import NullScorer

from laurel.rewards.batching import (
    ScoreCache,
    Unit,
    keys_of,
    planned,
    units_of,
)
from laurel.rewards.preparing import rendered_group, rendered_rows
from laurel.types import Completion, Group, Message, Score, SentTurn, TokenGroup, group_of


def tree(trunk, *branches, truncated=None):
    return TokenGroup(
        id="",
        trunk_ids=np.asarray(trunk, dtype=np.int32),
        branches_ids_G=tuple(np.asarray(branch, dtype=np.int32) for branch in branches),
        truncated_G=truncated or (False,) * len(branches),
    )


def test_a_sequence_has_one_key_however_it_is_divided():
    (whole,) = keys_of(tree([], [1, 2, 3, 4]))
    assert keys_of(tree([1, 2], [3, 4], [3, 5]))[0] == whole
    assert keys_of(tree([1, 2], [3, 4], [3, 5]))[1] != whole
    assert keys_of(tree([], [1, 2, 3, 4], truncated=(True,))) != (whole,)


def unit(tokens, **kind):
    return Unit.of((tokens, (None,) * len(tokens.branches_ids_G)), **kind)


def test_answers_to_one_prompt_that_come_alone_find_each_other():
    system = list(range(100, 120))
    prompts = [[*system, *range(200 + 50 * i, 240 + 50 * i)] for i in range(3)]
    alone = [unit(tree(prompt, [1, j])) for j in range(4) for prompt in prompts]
    trees = planned(alone, ())
    assert sorted(len(one.keys) for one in trees) == [4, 4, 4]
    assert {key for one in trees for key in one.keys} == {one.keys[0] for one in alone}


def test_the_cache_forgets_what_was_wanted_longest_ago_and_every_failure():
    cache = ScoreCache(2)
    cache.put({b"a": Score(value=1.0), b"b": Score(value=2.0)})
    cache.known([b"a"])
    cache.put({b"c": Score(value=3.0), b"failed": Score(value=None, failure="no")})
    assert list(cache.known([b"a", b"b", b"c", b"failed"])) == [b"a", b"c"]


@pytest.mark.parametrize(
    "row",
    [
        "a text\nof two lines",
        "",
        (0, 5, 2**31 - 1),
        (),
        SentTurn("a\n", "b"),
        SentTurn("", "", True),
    ],
)
def test_a_rendered_row_travels_as_a_group(row):
    assert rendered_rows(rendered_group([row, "x"])) == [row, "x"]


def test_what_is_no_rendered_group():
    said = Completion(messages=(Message("assistant", "a"),))
    (rendered,) = rendered_group(["a"]).completions_G
    assert rendered_rows(group_of((), ("a",), group_id="")) is None
    assert rendered_rows(Group(id="", prompt=(), completions_G=(rendered, said))) is None
    assert rendered_rows(Group(id="", prompt=(), completions_G=())) is None
    for ids in ("1 x", "-1", "1  2", " 1", "9999999999", "١"):
        odd = Completion(messages=(Message("<token ids>", ids),))
        assert rendered_rows(Group(id="", prompt=(), completions_G=(odd,))) == [None]
    for turn in ("", "[1, 2, 3]", '["a"]', "[" * 100_000, '{"a": 1}', "7"):
        odd = Completion(messages=(Message("<sent turn>", turn),))
        assert rendered_rows(Group(id="", prompt=(), completions_G=(odd,))) == [None]


class Picky(NullScorer):
    """Cannot read what says so."""

    def prepare(self, groups):
        if any("!" in m.content for g in groups for c in g.completions_G for m in c.messages):
            raise RuntimeError("what is this")
        return super().prepare(groups)


def test_a_completion_that_cannot_be_read_fails_alone():
    groups = [
        group_of((Message("user", "q"),), ("a", "!", "b"), group_id="1"),
        group_of((Message("user", "q"),), ("c",), group_id="2"),
    ]
    first, second = units_of(Picky(), groups)
    assert first.failures == (None, "it cannot be read: RuntimeError: what is this", None)
    assert len(first.keys) == 2
    assert second.failures == (None,)
