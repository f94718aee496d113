"""Rows whose speakers are probably misspelt are noted, in whatever form they are read."""

import pytest

from laurel.config.data import DatasetConfig, TaskSetConfig
from laurel.config.sft import DemonstrationSetConfig
from laurel.data.conversations import load_demonstrations
from laurel.data.preferences import load_preferences
from laurel.data.reading import UnusualRoles
from laurel.data.tasks import load_tasks
from laurel.types import USUAL_ROLES, Message

WRITTEN = "1 row has a role that is none of system, user, assistant, "
NAMED = ": 'usr' (first in rows.jsonl:2; did you mean 'user'?)"


def asked(text, role="user"):
    return [{"role": role, "content": text}]


def preferences(rows):
    path = rows(
        [
            {"prompt": asked(role, role), "chosen": "a", "rejected": "b"}
            for role in ("user", "usr", "user")
        ]
    )
    _, report = load_preferences(
        DatasetConfig(data_path=path), name="x", ties="drop", duplicates="drop", on_bad_row="error"
    )
    return report.notes


def demonstrations(rows):
    path = rows(
        [{"messages": asked(role, role) + asked("a", "assistant")} for role in ("user", "usr")]
    )
    _, report = load_demonstrations([DemonstrationSetConfig(data_path=path)], name="x")
    return report.notes


def tasks(rows):
    path = rows(
        [{"messages": asked(role, role) + asked("4", "assistant")} for role in ("user", "usr")]
    )
    config = TaskSetConfig(data_path=path)
    _, report = load_tasks(
        [config], name="x", default_environment="math", environments=("math",), on_bad_row="error"
    )
    return report.notes


@pytest.mark.parametrize("notes_of", [preferences, demonstrations, tasks])
def test_a_misspelt_role_is_noted_with_what_it_was_meant_to_be(notes_of, write_rows):
    notes = notes_of(lambda rows: str(write_rows(rows, name="rows.jsonl")))
    (note,) = [one for one in notes if "a role" in one]
    assert note.startswith(WRITTEN)
    assert note.endswith(NAMED)


def test_usual_roles_are_not_noted_and_many_unusual_ones_are_cut():
    roles = UnusualRoles()
    roles.look("a:1", [Message(role, "x") for role in USUAL_ROLES])
    assert roles.notes() == []
    for number in range(5):
        roles.look(f"a:{number}", [Message(f"{number}{number}", "x")])
    (note,) = roles.notes()
    assert note.startswith("5 rows have a role")
    assert note.endswith(
        ": '00' (first in a:0), '11' (first in a:1), '22' (first in a:2) and 2 more"
    )
