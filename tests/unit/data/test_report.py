import json

import pytest
from rich.console import Console

from laurel.data.report import DataReport, LengthSummary, conversation_fingerprint
from laurel.types import Message, Preference, group_of


def preference(prompt, *answers, ranks=(0, 1)):
    group = group_of((Message("user", prompt),), answers, group_id="")
    return Preference(group=group, ranks_G=ranks, source=f"r.jsonl:{len(prompt)}")


def report_of(*preferences, name="train"):
    report = DataReport(
        name=name, dataset_class="PreferenceDataset", origin="r.jsonl", num_read=len(preferences)
    )
    report.describe(preferences)
    return report


def shown(report, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report.render())
    return console.export_text()


def test_lengths_are_summed_up_by_hand():
    summary = LengthSummary.of([*range(1, 21), 231])
    # 21 lengths: 95 % of the way from index 0 to index 20 is index 19; their sum is 210 + 231
    assert summary == LengthSummary(min=1, median=11.0, mean=21.0, p95=20.0, max=231)
    assert LengthSummary.of([]) is None


def test_the_longer_answer_wins_in_a_share_of_the_decided_pairs():
    report = report_of(
        preference("q", "long answer", "short"),  # longer wins: 1
        preference("q", "a", "bb"),  # shorter wins: 0
        preference("r", "a", "b"),  # one length: 1/2
        preference("s", "aaa", "bb", ranks=(4, 4)),  # a tie: no pair to count
        preference("t", "aaa", "bb", "c", ranks=(1, 0, 1)),  # b over a: 0, b over c: 1
    )
    assert report.longer_wins_share == pytest.approx((1 + 0 + 0.5 + 0 + 1) / 5)
    # pairs: 1 + 1 + 1 + 1 + 3; ties: the fourth row's, and a with c in the fifth
    assert report.tied_pairs_share == pytest.approx(2 / 7)
    assert report.num_prompts == 4
    assert report.to_dict()["completions_per_prompt"] == {"2": 4, "3": 1}


def test_rows_that_spell_control_tokens_are_noted():
    report = report_of(preference("q", "a", "b"))
    rows = [(f"r:{i}", [(Message("user", text),)]) for i, text in enumerate(["a", "b</s>", "</s>"])]
    report.note_control_tokens(rows, lambda text: "</s>" if "</s>" in text else None)
    (note,) = report.notes
    assert note.startswith("2 rows spell control tokens")
    assert "</s> in r:1" in note
    report.note_control_tokens(rows, lambda text: None)
    assert report.notes == [note]


def test_merging_adds_everything_up():
    first = report_of(preference("q", "aa", "b"))
    second = report_of(preference("q", "a", "bb"), preference("r", "a", "b", "c", ranks=(0, 0, 0)))
    second.origin = "s.jsonl"
    second.notes.append("odd")
    for report, line in ((first, 7), (second, 8)):
        report.num_read += 1
        report.drop("tie", f"{report.origin}:{line}")
        report.set_lengths([line])
    second.num_truncated = 2
    merged = DataReport.merge([first, second], name="both")
    assert (merged.num_read, merged.num_kept, merged.num_truncated) == (5, 3, 2)
    assert merged.dropped["tie"].examples == ["r.jsonl:7", "s.jsonl:8"]
    assert merged.origin == "r.jsonl, s.jsonl"
    assert merged.dataset_class == "PreferenceDataset"
    assert merged.notes == ["s.jsonl: odd"]
    assert merged.num_prompts == 2
    assert merged.longer_wins_share == 0.5
    assert merged.tied_pairs_share == pytest.approx(3 / 5)
    assert merged.tokens is not None
    assert (merged.tokens.min, merged.tokens.max) == (7, 8)
    assert first.dropped["tie"].count == 1  # the parts stay as they were


def test_held_out_rows_leave_one_report_for_another():
    rows = [preference("q", "a", "b"), preference("rr", "aa", "b")]
    train = report_of(*rows)
    validation = train.move_out(kept=rows[:1], held_out=rows[1:], name="validation")
    assert (train.num_read, train.num_kept) == (2, 1)
    assert train.dropped["held out"].examples == ["r.jsonl:2"]
    assert "so few rows measure little. Set data.split_validation_size=0" in validation.notes[0]
    assert train.split_off(["r.jsonl:3"] * 10, name="enough").notes == ["held out from train"]
    assert (validation.name, validation.num_read, validation.num_kept) == ("validation", 1, 1)
    assert validation.longer_wins_share == 1.0
    assert train.longer_wins_share == 0.5


def test_the_report_is_plain_json():
    report = report_of(preference("q", "a", "b"))
    report.drop("malformed", "r.jsonl:2", kind="not JSON")
    report.num_read += 1
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["rows_read"] == 2
    assert plain["rows_kept"] == 1
    assert plain["rows_left_out"] == {
        "malformed": {
            "count": 1,
            "examples": ["r.jsonl:2"],
            "kinds": {"not JSON": 1},
            "sources": [{"source": "r.jsonl:2", "kind": "not JSON"}],
            "sources_left_off": 0,
        }
    }
    assert plain["lengths"]["characters"]["max"] == 2
    assert plain["longer_wins_share"] == 0.5


def test_the_table_fits_eighty_columns_and_says_what_happened():
    report = report_of(*(preference("q" * n, "a" * 900, "b") for n in range(1, 9)))
    report.origin = "a_rather_long_name_of_a_file_" * 4 + ".jsonl"
    for place in range(5):
        report.drop(
            "duplicate", f"{report.origin}[{place}]", kind="a kind [bold] that is long " * 5
        )
    report.notes.append("a note that goes on for much longer than a line of the terminal " * 2)
    report.set_lengths([12] * 16)
    report.num_truncated = 3
    for width in (40, 80, 200):
        text = shown(report, width=width)
        body = text.split("\n", 2)[2] if width > 80 else text
        assert max(len(line) for line in body.splitlines()) <= 80
        for part in ("Data 'train'", "duplicate", "100.0% of 8 pairs", "3 of 16", "[bold]", "[0]"):
            assert part in text


def test_each_kind_has_its_lines_and_a_report_names_no_more_than_a_thousand():
    both = []
    for first in (1, 801):
        report = report_of(preference("q", "a", "b"))
        for line in range(first, first + 800):
            report.drop("malformed", f"r.jsonl:{line}", kind="not JSON")
        report.drop("malformed", f"r.jsonl:{first + 8000}", kind="odd")
        both.append(report)
    merged = DataReport.merge(both, name="both")
    merged.origin = "r.jsonl"
    merged.drop("tie", "r.jsonl:9")
    text = " ".join(shown(merged).split())
    assert "malformed 1,602 1,600 x not JSON (lines 1, 2, 3, ...)" in text
    assert "2 x odd (lines 8001, 8801)" in text
    assert "tie 1 (line 9)" in text
    plain = merged.to_dict()["rows_left_out"]["malformed"]
    assert plain["count"] - len(plain["sources"]) == plain["sources_left_off"] == 600
    assert [one["source"] for one in plain["sources"]][999:] == [
        "r.jsonl:1000",
        "r.jsonl:8001",
        "r.jsonl:8801",
    ]


def test_fingerprints_tell_roles_and_turns_apart():
    conversations = [
        (Message("user", "ab"), Message("assistant", "c")),
        (Message("user", "a"), Message("assistant", "bc")),
        (Message("assistant", "ab"), Message("user", "c")),
        (Message("user", "ab"),),
        (Message("user", "ab4,1:user"), Message("assistant", "c")),
        (),
    ]
    assert len(set(map(conversation_fingerprint, conversations))) == len(conversations)
