import pytest

from laurel.data.reading import read_prompt_frame
from laurel.data.sources import UnusableRow
from laurel.errors import DataError
from laurel.types import Message

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
