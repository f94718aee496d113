import json
from pathlib import Path

import pytest

from chat_rows import assistant, user
from laurel.extensions.data_check.check import examine_data
from laurel.extensions.data_check.formats import FORMATS, suggestions

DOCS = Path(__file__).parents[3] / "docs" / "data_formats.md"


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_the_docs_show_every_example():
    written = DOCS.read_text(encoding="utf-8")
    shown = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    for known in FORMATS:
        assert known.example in shown, known.name
        assert f"| {known.columns} |" in written, known.name


@pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.name)
def test_the_commands_of_a_format_read_its_example(known, tmp_path):
    findings = examine_data(write(tmp_path / "rows.jsonl", known.example), None)
    reading = {one.trainer: one for one in findings.readings}
    assert findings.known is known
    for trainer in known.trainers:
        assert reading[trainer].report is not None, reading[trainer].problem
        assert reading[trainer].report.num_kept == 1
        assert set(known.trainers[trainer]) <= set(reading[trainer].settings)
    if "rm" not in known.trainers:
        assert reading["rm"].report is None
    if "grpo" in known.trainers:
        asked = next(one for one in reading["grpo"].settings if one.startswith("data.env_name"))
        assert asked.partition("=")[2] in reading["grpo"].environments
    assert findings.evaluation == known.evaluation


@pytest.mark.parametrize(
    ("row", "trainer", "settings"),
    [
        (
            {"question": "Where?", "better_answer": "Here.", "worseAnswer": "No."},
            "rm",
            (
                "data.prompt_key=question",
                "data.chosen_key=better_answer",
                "data.rejected_key=worseAnswer",
            ),
        ),
        (
            {"prompt": "Where?", "choosen": "Here.", "rejected": "No."},
            "rm",
            ("data.chosen_key=choosen",),
        ),
        ({"dialog": [user("Where?"), assistant("Here.")]}, "sft", ("data.chat_key=dialog",)),
        (
            {"id": "7", "Frage": "Wo ist er?", "good_answer": "Hier.", "bad_answer": "Nein."},
            "rm",
            (
                "data.prompt_key=Frage",
                "data.chosen_key=good_answer",
                "data.rejected_key=bad_answer",
            ),
        ),
        ({"q": "Where?", "a": "Here."}, "sft", ("data.input_key=q", "data.output_key=a")),
        ({"user": "Where?"}, "grpo", ("data.input_key=user", "data.env_name=reward_model")),
    ],
)
def test_a_near_miss_is_mapped_by_keys_that_then_read_the_file(row, trainer, settings, tmp_path):
    first = suggestions(row)[0]
    assert (first.trainer, first.settings) == (trainer, settings)
    path = write(tmp_path / "rows.jsonl", row)
    assert not examine_data(path, trainer).is_usable
    assert examine_data(path, trainer, settings).is_usable


def test_columns_that_no_key_maps_are_to_be_renamed():
    row = {"context": "Where?", "response_1": "Here.", "response_2": "No.", "overall_preference": 1}
    (found,) = suggestions(row)
    assert found.trainer is None
    assert found.says.startswith("HelpSteer3, if you rename 'response_1' to 'response1'")


def test_what_could_not_be_read_is_not_suggested():
    assert suggestions({"foo": 1, "bar": 2}) == []
    assert suggestions({"chosen": 5, "rejected": 6, "question": 7}) == []
    same = [user("Where?")]
    assert suggestions({"dialog": same}) == []  # nobody answers
