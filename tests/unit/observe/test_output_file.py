import gzip
import os
from pathlib import Path

import pytest

from laurel.errors import DataError
from laurel.observe.files import check_output, delete_directory, replace_file


def test_a_file_is_there_when_all_is_written_and_an_error_leaves_what_was_there(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")

    def interrupted():
        with replace_file(path) as text:
            text.write("new\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(DataError, match=r"^rows:3: bad$"), replace_file(path):
        raise DataError("rows:3: bad")
    assert path.read_text() == "old\n"
    with replace_file(path) as text:
        text.write("néw\n")
        text.flush()
        assert path.read_text() == "old\n"
    assert path.read_text(encoding="utf-8") == "néw\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_name_in_gz_is_compressed(tmp_path):
    path = tmp_path / "out.jsonl.gz"
    with replace_file(path) as text:
        text.write("line\n")
    assert gzip.decompress(path.read_bytes()) == b"line\n"


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with replace_file(link) as text:
        text.write("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_and_not_replaced():
    before = os.stat(os.devnull)
    with replace_file(Path(os.devnull)) as text:
        text.write("line\n")
    assert os.stat(os.devnull).st_ino == before.st_ino


def test_a_full_disk_is_told(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with (
        pytest.raises(DataError, match="cannot be written: No space left"),
        replace_file(Path("/dev/full")) as text,
    ):
        text.write("line\n")


def test_outputs_that_cannot_be(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    with pytest.raises(DataError, match="is a directory"):
        check_output(tmp_path, read_from="-")
    with pytest.raises(DataError, match="does not exist"):
        check_output(tmp_path / "absent" / "out", read_from="-")
    with pytest.raises(DataError, match="is the file that is read"):
        check_output(rows, read_from=str(rows))
    check_output(tmp_path / "out", read_from=str(rows))
    check_output(rows, read_from="-")


@pytest.mark.parametrize("is_written", [True, False])
def test_a_directory_that_a_slower_rank_still_changes_is_deleted(
    tmp_path, caplog, monkeypatch, is_written
):
    directory = tmp_path / "of_two_ranks"
    directory.mkdir()
    (directory / "first").touch()
    unlink = os.unlink

    def unlink_beside_another(path, **options):
        """The other rank renames this file, or writes another one, in the same moment."""
        monkeypatch.setattr(os, "unlink", unlink)
        os.rename(directory / "first", directory / "renamed")
        if is_written:
            (directory / "first").touch()
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlink_beside_another)
    delete_directory(directory)
    assert not directory.exists()
    assert not caplog.records
