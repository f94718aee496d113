import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_rows import system, user
from laurel.config.data import DatasetConfig
from laurel.data.preferences import hold_out, own_validation_preferences
from laurel.errors import DataError
from laurel.types import Message, Preference, group_of


def pair(prompt="q", chosen="yes", rejected="no", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def ranked(*ranks, texts="abcdefgh", context="q"):
    return {
        "context": context,
        "completions": [
            {"rank": rank, "completion": text} for rank, text in zip(ranks, texts, strict=False)
        ],
    }


def counts(report):
    return {reason: left_out.count for reason, left_out in report.dropped.items()}


def test_a_row_becomes_a_preference_with_its_source_and_a_unique_id(load):
    preferences, report = load([pair("p"), pair("q")], dataset_name="BinaryPreferenceDataset")
    first, second = preferences
    assert first.group.prompt == (Message("user", "p"),)
    assert [c.messages[0].content for c in first.group.completions_G] == ["yes", "no"]
    assert first.ranks_G == (0, 1)
    assert first.source == "rows.jsonl:1"
    assert (first.group.id, second.group.id) == ("train:rows.jsonl:1", "train:rows.jsonl:2")
    assert (report.name, report.dataset_class) == ("train", "BinaryPreferenceDataset")
    assert (report.origin, report.num_read, report.num_kept) == ("rows.jsonl", 2, 2)
    assert report.notes == []


def test_a_first_row_that_tells_nothing_stops_the_load_or_is_counted(load, write_rows):
    path = write_rows([{"question": "q"}, pair()])
    with pytest.raises(DataError, match=re.escape(f"{path}:1: nothing names the class")) as told:
        load(path)
    assert str(told.value).endswith(f"laurel data check {path}"), "where columns are suggested"
    with pytest.raises(DataError, match="laurel data check"):
        load(path, dataset_name="BinaryPreferenceDataset", on_bad_row="error")
    preferences, report = load(path, on_bad_row="skip")
    assert len(preferences) == 1
    assert dict(report.dropped["malformed"].kinds) == {"columns of no known class": 1}
    with pytest.raises(DataError) as told:
        load([pair(prompt=[1])], on_bad_row="error")
    assert "laurel data check" not in str(told.value), "the columns are not the trouble"


def test_prompt_files_are_put_around_the_prompt(load, tmp_path):
    (tmp_path / "p.txt").write_text("Q: {} {{A}}")
    (tmp_path / "s.txt").write_text("be brief")
    rows = [pair([system("s"), user("x")]), pair("y")]
    preferences, report = load(
        rows, prompt_file=str(tmp_path / "p.txt"), system_prompt_file=str(tmp_path / "s.txt")
    )
    assert preferences[1].group.prompt == (
        Message("system", "be brief"),
        Message("user", "Q: y {A}"),
    )
    assert [message.content for message in preferences[0].group.prompt] == [
        "be brief",
        "s",
        "Q: x {A}",
    ]
    assert any(note.startswith("1 row begins with a system message") for note in report.notes)


def test_reading_stops_at_the_least_of_the_limits_counted_after_filtering(load):
    rows = [pair("a"), pair("a"), pair("b"), pair("c")]
    preferences, report = load(rows, max_samples=2)
    assert [p.source for p in preferences] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert (report.num_read, report.num_kept) == (3, 2)
    assert len(load(rows, max_samples=5)[0]) == 3
    for limit in (None, 2):
        assert len(load(rows, limit_of_set=1, max_samples=limit)[0]) == 1


def test_every_reason_is_counted_with_its_first_sources(load):
    rows: list[Any] = [
        pair("kept"),
        pair(" \n"),  # 2: empty prompt
        pair("q", "", "no"),  # 3: empty answer
        pair([]),  # 4: no prompt at all
        pair("q", "same", "same"),  # 5: identical
        pair("kept"),  # 6: duplicate
        {"prompt": "q", "chosen": "a"},  # 7: malformed
        ["no", "object"],  # 8: malformed
        pair("q", 7),  # 9: malformed
        pair("q", None),  # 10: malformed
        pair([system("only")]),  # 11: nobody asks
    ]
    preferences, report = load(rows, on_bad_row="skip")
    assert [p.source for p in preferences] == ["rows.jsonl:1"]
    assert counts(report) == {"empty": 4, "identical sides": 1, "duplicate": 1, "malformed": 4}
    assert report.dropped["empty"].examples == [f"rows.jsonl:{line}" for line in (2, 3, 4)]
    assert dict(report.dropped["malformed"].kinds) == {
        "missing key 'rejected'": 1,
        "not an object": 1,
        "'chosen' is not text or messages": 1,
        "'chosen' is null": 1,
    }
    assert (report.num_read, report.num_kept) == (11, 1)


def test_only_a_row_whose_completions_all_share_a_rank_is_a_tie(load):
    rows = [ranked(0, 0), ranked(0, 0, 1), ranked(1, 1, 1), ranked(1, 0)]
    preferences, report = load(rows)
    assert [p.ranks_G for p in preferences] == [(0, 0, 1), (1, 0)]
    assert counts(report) == {"tie": 2}
    kept, report = load(rows, ties="keep")
    assert [p.ranks_G for p in kept] == [(0, 0), (0, 0, 1), (1, 1, 1), (1, 0)]
    assert counts(report) == {}


def test_a_tie_can_be_an_error_that_says_what_to_do(load, write_rows):
    path = write_rows([ranked(0, 1), ranked(2, 2)])
    with pytest.raises(DataError) as caught:
        load(path, ties="error")
    message = str(caught.value)
    assert message.startswith(f"{path}:2: all 2 completions share rank 2 (a tie)")
    assert "data.ties=drop" in message
    assert "davidson or rao_kupper" in message


def test_duplicates_say_exactly_the_same_in_whatever_order(load):
    rows = [
        ranked(0, 1, texts="ab"),
        ranked(0, 1, texts="ab"),  # the same
        ranked(1, 0, texts="ba"),  # the same, told the other way round
        ranked(0, 2, texts="ab"),  # another rank
        ranked(0, 1, texts="ac"),  # another answer
        ranked(0, 1, texts="ab", context="r"),  # another prompt
        {**ranked(0, 1, texts="ab"), "margin": 2},  # another margin
    ]
    preferences, report = load(rows)
    assert [p.source for p in preferences] == [f"rows.jsonl:{line}" for line in (1, 4, 5, 6, 7)]
    assert report.dropped["duplicate"].examples == ["rows.jsonl:2", "rows.jsonl:3"]
    everything, report = load(rows, duplicates="keep")
    assert len(everything) == 7
    assert counts(report) == {}


def test_rows_that_contradict_an_earlier_one_are_kept_and_noted(load):
    rows = [pair("q", "a", "b"), pair("q", "b", "a"), pair("r", "b", "a"), ranked(1, 1, 0)]
    preferences, report = load(rows[:3])
    assert len(preferences) == 3
    assert report.notes[1:] == [
        "1 row prefers what an earlier row with the same prompt and answers did not"
    ]
    _, report = load([ranked(0, 1, 1), ranked(1, 1, 0), ranked(1, 0, 1)], duplicates="keep")
    assert any(note.startswith("2 rows prefer") for note in report.notes)


def test_a_negative_margin_is_noted(load):
    rows = [pair("q", better=1, worse=3), pair("r", better=2, worse=1)]
    preferences, report = load(rows, margin_key="better-worse")
    assert [p.margin for p in preferences] == [-2.0, 1.0]
    assert "1 row has a margin below 0" in report.notes


def test_rows_without_a_wanted_rating_are_left_out(load):
    def rated(text, **ratings):
        return {"context": "q", "completions": [{"completion": text, "attributes": ratings}]}

    rows = [rated("a", helpful=3), rated("b"), rated("c", helpful=None, clear=1)]
    preferences, report = load(rows, attributes=("helpful", "correct"), ties="keep")
    assert [p.source for p in preferences] == ["rows.jsonl:1"]
    assert counts(report) == {"no rating": 2}
    assert "no row rates correct" in report.notes
    dropping, _ = load(rows, attributes=("helpful",), ties="drop")  # one completion is no tie
    assert len(dropping) == 1


def test_nothing_left_is_an_error_with_the_counts(load):
    rows = [pair("q", "a", "a"), pair("q", "b", "b"), {"prompt": "q"}]
    with pytest.raises(DataError) as caught:
        load(rows, on_bad_row="skip", dataset_name="BinaryPreferenceDataset")
    assert str(caught.value) == (
        "data set 'train' (rows.jsonl): nothing is left of 3 rows. Left out: 2 identical sides "
        "(e.g. rows.jsonl:1), 1 malformed (e.g. rows.jsonl:3: missing key 'chosen')"
    )


def test_a_named_column_that_no_row_has_is_said_first(load):
    with pytest.raises(DataError) as caught:
        load([pair(), pair()], on_bad_row="skip", chosen_key="choosen")
    assert (
        "nothing is left of 2 rows. rows.jsonl:1: the row has no 'choosen'; its keys are: prompt, "
        "chosen, rejected. Set data.chosen_key to the key that holds it ('chosen'?). Left out: 2 "
    ) in str(caught.value)


def test_unknown_names_list_the_known_ones_and_the_nearest(load):
    with pytest.raises(DataError) as caught:
        load([pair()], dataset_name="BinaryPreferencesDataset")
    assert "Did you mean BinaryPreferenceDataset?" in str(caught.value)
    assert "HelpSteer3, Tulu3Preference, PreferenceDataset" in str(caught.value)
    with pytest.raises(DataError, match="Did you mean HelpSteer3"):
        load([pair()], dataset_name="helpsteer")


@pytest.mark.parametrize("name", [None, "PreferenceDataset"])
def test_a_class_without_a_data_set_of_its_own_needs_a_path(load, name):
    with pytest.raises(DataError, match=r"data\.train_data_path"):
        load(None, dataset_name=name)


def test_only_helpsteer3_on_the_hub_brings_its_own_validation_set():
    assert own_validation_preferences(DatasetConfig(dataset_name="HelpSteer3")) == DatasetConfig(
        dataset_name="HelpSteer3", split="validation"
    )
    for config in (
        DatasetConfig(dataset_name="HelpSteer3", data_path="here.jsonl"),
        DatasetConfig(dataset_name="Tulu3Preference"),
        DatasetConfig(data_path="here.jsonl"),
    ):
        assert own_validation_preferences(config) is None


def preference(prompt, index):
    asked = (Message("user", prompt),)
    return Preference(
        group=group_of(asked, ["yes", "no"], group_id=f"{index}"), ranks_G=(0, 1), source=f"{index}"
    )


PROMPTS = st.lists(st.sampled_from("abcdefghijkl"), min_size=2, max_size=40).filter(
    lambda prompts: len(set(prompts)) > 1
)
SHARES = st.floats(min_value=0.01, max_value=0.99)


@given(prompts=PROMPTS, share=SHARES, seed=st.integers(-(2**40), 2**40), shuffle=st.randoms())
def test_holding_out_splits_by_prompt_and_depends_on_nothing_else(prompts, share, seed, shuffle):
    preferences = [preference(prompt, index) for index, prompt in enumerate(prompts)]
    train, validation = hold_out(preferences, shares=[share], seed=seed)
    assert train
    assert validation
    assert sorted(train + validation, key=preferences.index) == preferences
    assert train == [p for p in preferences if p not in validation]  # the order is kept
    asked_train, asked_validation = ({p.group.prompt for p in side} for side in (train, validation))
    assert not asked_train & asked_validation

    mixed = list(preferences)
    shuffle.shuffle(mixed)
    again = hold_out(mixed, shares=[share], seed=seed)
    assert {p.source for p in again[1]} == {p.source for p in validation}


def test_a_large_prompt_is_not_held_out_for_a_small_share():
    preferences = [preference("large", index) for index in range(90)]
    preferences += [preference(f"small {index}", index) for index in range(10)]
    for seed in range(20):
        _, validation = hold_out(preferences, shares=[0.05], seed=seed)
        assert len(validation) == 5


def test_one_prompt_cannot_be_split():
    with pytest.raises(DataError, match=r"data\.split_validation_size=0\.1: 3 rows with 1 diff"):
        hold_out([preference("same", index) for index in range(3)], shares=[0.1], seed=0)
