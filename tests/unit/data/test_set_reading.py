"""Where named sets are read from, what is put around their prompts, and processors."""

import pytest

from laurel.config.data import TaskSetConfig
from laurel.data.reading import HubSet, open_set, read_prompt_frame
from laurel.data.report import TaskReport
from laurel.data.sources import UnusableRow
from laurel.data.task_formats import TASK_SETS, TaskParts
from laurel.data.tasks import PROCESSORS, find_processor, register_processor
from laurel.errors import ConfigError, DataError
from laurel.types import Message

HUBS = {name: known.hub for name, known in TASK_SETS.items()}


def opened(**config):
    return open_set(TaskSetConfig(**config), known=HUBS, report=TaskReport(name="train"))


@pytest.mark.parametrize(
    ("config", "path", "parts"),
    [
        ({"dataset_name": "GSM8K", "split": "test"}, "openai/gsm8k", (("main", "test"),)),
        ({"dataset_name": "GSM8K", "subset": "socratic"}, "openai/gsm8k", (("socratic", None),)),
        (
            {"dataset_name": "AIME2025"},
            "opencompass/AIME2025",
            (("AIME2025-I", "test"), ("AIME2025-II", "test")),
        ),
        (
            {"dataset_name": "AIME2025", "subset": "AIME2025-II"},
            "opencompass/AIME2025",
            (("AIME2025-II", "test"),),
        ),
        ({"dataset_name": "GSM8K", "data_path": "train.jsonl"}, "train.jsonl", ((None, None),)),
        ({"data_path": "some/name", "subset": "a", "split": "b"}, "some/name", (("a", "b"),)),
    ],
)
def test_where_a_set_is_read_from(config, path, parts):
    found = opened(**config)
    assert (found.path, found.parts) == (path, parts)


def test_the_parts_of_a_set_keep_their_sources_apart(tmp_path):
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "rows.jsonl").write_text('{"n": 1}\n', encoding="utf-8")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: one/rows.jsonl\n"
        "- config_name: two\n  data_files: two/rows.jsonl\n---\n",
        encoding="utf-8",
    )
    pytest.importorskip("datasets")
    hub = HubSet(name=str(tmp_path), parts=(("one", None), ("two", None)))
    report = TaskReport(name="train")
    found = open_set(TaskSetConfig(dataset_name="X"), known={"X": hub}, report=report)
    sources = found.read(lambda source, row: source, report=report, on_bad_row="error", limit=None)
    assert sources == [f"{part}/{tmp_path.name}[0]" for part in ("one", "two")]


def test_a_processor_is_registered_once():
    def process(row, config):
        return TaskParts(prompt=(Message("user", "?"),))

    register_processor("mine", process)
    try:
        assert find_processor("mine") is process
        with pytest.raises(ConfigError, match="already a processor called 'mine'"):
            register_processor("mine", process)
    finally:
        del PROCESSORS["mine"]


SYSTEM, USER = Message("system", "be kind"), Message("user", "2 + 2 = {x}?")


def test_a_prompt_without_a_user_message_has_no_question(tmp_path):
    (tmp_path / "p.txt").write_text("{}")
    with pytest.raises(UnusableRow, match="no user message"):
        read_prompt_frame(str(tmp_path / "p.txt"), None).around((SYSTEM,))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("no place", "has: none"),
        ("{} and {}", "has: {}, {}"),
        ("{", "Single '{'"),
        ("{:d}", "Unknown format code"),
    ],
)
def test_a_prompt_file_must_have_one_place(tmp_path, text, part):
    path = tmp_path / "p.txt"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        read_prompt_frame(str(path), None)
    assert part in str(caught.value)
    assert str(caught.value).startswith(f"data.prompt_file: {path}")


def test_a_missing_file_is_named_with_its_key(tmp_path):
    with pytest.raises(DataError, match=r"data\.prompt_file: .*p\.txt does not exist"):
        read_prompt_frame(str(tmp_path / "p.txt"), None)
    with pytest.raises(DataError, match=r"data\.system_prompt_file: .* does not exist"):
        read_prompt_frame(None, str(tmp_path / "s.txt"))
    (tmp_path / "s.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        read_prompt_frame(None, str(tmp_path / "s.txt"))
