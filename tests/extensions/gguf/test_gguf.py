"""GGUF files as models: what is made of them, once, and what is refused."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_files import gguf, write_tiny
from laurel.config.load import load_config
from laurel.config.sft import SFTRun
from laurel.errors import ConfigError, MissingDependencyError, ModelError
from laurel.extensions.gguf.reading import CACHE_VARIABLE, read_gguf
from laurel.models.checkpoint.card import CardFacts
from laurel.models.files import is_model_file, local_files
from laurel.models.spec import hub_name
from laurel.rewards.spec import find_model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


def same_model(one, other):
    read, wanted = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (one, other))
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[key].float(), wanted[key].float()) for key in read)
    ours, theirs = (AutoTokenizer.from_pretrained(d) for d in (one, other))
    text = "<|im_start|>user\nWhat is 12 + 3?<|im_end|>"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    assert (ours.pad_token, ours.eos_token) == (theirs.pad_token, theirs.eos_token)
    return next(iter(read.values())).dtype


def test_weights_tokens_and_template_are_those_of_the_model(made):
    found = read_gguf(str(made.file))
    assert same_model(found.directory, made.directory) == torch.float32
    assert "quantised as Q8_0; they were dequantised to float32" in found.notes[0]
    assert str(found.directory) in found.notes[0]
    facts = CardFacts.load(found.directory)
    assert facts is not None
    assert facts.base_model == found.about == "tiny.Q8_0.gguf (llama, Q8_0, dequantised to float32)"
    assert not any(str(found.directory) in note for note in facts.notes), "cards are published"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_1", "BF16", "F16"])
def test_other_types_of_weights(kind, tmp_path):
    tiny = write_tiny(tmp_path, kind=kind)
    found = read_gguf(str(tiny.file))
    wanted = {"BF16": torch.bfloat16, "F16": torch.float16}.get(kind, torch.float32)
    assert same_model(found.directory, tiny.directory) == wanted
    assert kind in found.notes[0]


def test_it_is_read_once_by_its_contents(made, cache, tmp_path, monkeypatch):
    first = read_gguf(str(made.file)).directory
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    copy = shutil.copy(made.file, tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)  # what is in the cache needs no reader
    assert read_gguf(str(copy)).directory == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written
    with (tmp_path / "tiny.Q8_0.gguf").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(MissingDependencyError, match=r"'gguf'.*pip install.*\[gguf\]"):
        read_gguf(str(copy))


def test_two_that_read_at_once(made, cache, capsys):
    """As the ranks of a node do; the lock is of the file system, and of processes as of threads."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(local_files, 2 * [str(made.file)])
    assert first == second
    assert capsys.readouterr().err.count("once") == 1, "the other one waits"
    assert same_model(first, made.directory) == torch.float32
    assert not [name for name in (cache / "gguf").iterdir() if name.name.startswith(".tmp")]


def test_what_a_killed_process_left_is_deleted(made, cache):
    directory = read_gguf(str(made.file)).directory
    left = directory.with_name(f".tmp-{directory.name}-0")
    shutil.move(directory, left)
    (left / "config.json").unlink()
    assert read_gguf(str(made.file)).directory == directory
    assert not left.exists()


@pytest.mark.parametrize("share", [0.01, 0.4, 0.95])
def test_a_file_that_was_cut_short(made, tmp_path, share):
    whole = made.file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelError, match=r"cut\.gguf is broken or was cut short: [\d,]+ bytes"):
        read_gguf(str(cut))


def test_what_is_no_model_is_refused(made, tmp_path, cache):
    other = tmp_path / "page.gguf"
    other.write_bytes(b"<html>Not found</html>")
    with pytest.raises(ModelError, match=r"page\.gguf is no GGUF file: it begins with b'<htm'"):
        find_model(str(other))
    with pytest.raises(ModelError, match=r"no such file; .* holds: page\.gguf"):
        find_model(str(tmp_path / "pag.gguf"))
    with pytest.raises(ModelError, match=r"no such file, nor the folder"):
        find_model(str(tmp_path / "none" / "page.gguf"))
    with pytest.raises(ModelError, match=r"is named itself: .*page\.gguf"):
        find_model(str(tmp_path))
    (tmp_path / "dir.gguf").mkdir()
    with pytest.raises(ModelError, match=r"neither a model"):
        find_model(str(tmp_path / "dir.gguf"))
    assert not [*cache.iterdir()]


def test_architectures_and_parts_are_refused_by_name(tmp_path):
    strange = write_tiny(tmp_path, architecture="mamba9")
    with pytest.raises(ModelError, match=r"mamba9.*not supported"):
        read_gguf(str(strange.file))
    part = write_tiny(tmp_path, name="part", more={"split.count": 3})
    with pytest.raises(ModelError, match=r"is one of 3 parts.*--merge"):
        read_gguf(str(part.file))


def test_types_of_weights_are_refused_by_name(made, tmp_path):
    file = tmp_path / "odd.gguf"
    known, unknown = (n.to_bytes(4, "little") for n in (gguf.GGMLQuantizationType.Q8_0, 99))
    name = b"blk.0.ffn_up.weight"
    head = name + (2).to_bytes(4, "little") + 2 * (64).to_bytes(8, "little")
    whole = made.file.read_bytes()
    assert whole.count(head + known) == 1
    file.write_bytes(whole.replace(head + known, head + unknown))
    with pytest.raises(ModelError, match=r"the type 99 of ggml"):
        read_gguf(str(file))
    whole_numbers = gguf.GGMLQuantizationType.I8.to_bytes(4, "little")
    file.write_bytes(whole.replace(head + known, head + whole_numbers))
    with pytest.raises(ModelError, match=r"quantised as I8, which cannot be dequantised"):
        read_gguf(str(file))


def test_a_cache_that_cannot_be_written(made, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=rf"{CACHE_VARIABLE}=DIR"):
        read_gguf(str(made.file))


def test_a_file_on_the_hub(made, tmp_path, monkeypatch):
    """As huggingface_hub keeps what it has fetched; it is asked for nothing else."""
    from huggingface_hub import constants

    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    # The file is there under its hash, and its name is a link.
    (snapshot / "m.gguf").symlink_to(shutil.copy(made.file, tmp_path / "0123abcd"))
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    found = local_files("owner/name/m.gguf")
    assert local_files(str(snapshot / "m.gguf")) == found, "by its path, too"
    assert local_files("owner/name:m.gguf") == found
    assert Path(found).name.startswith("m-")
    with pytest.raises(ModelError, match=r"owner/name/n\.gguf cannot be fetched from the hub"):
        local_files("owner/name/n.gguf")
    with pytest.raises(ModelError, match=r"policy\.model_name=owner/other: .* cannot be fetched"):
        find_model("owner/other/n.gguf")
    assert hub_name("name/m.gguf") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.gguf", True), ("A.GGUF", True), ("b.c/a.gguf", True), ("gguf", False), ("a/gguf", False)],
)
def test_a_file_is_known_by_its_ending(name, expected):
    assert is_model_file(name) == expected


def test_a_revision_is_refused(made):
    with pytest.raises(ConfigError, match=r"policy\.revision has no effect on a GGUF file"):
        load_config(SFTRun, None, ["policy.model_name=m.gguf", "policy.revision=main"])


def test_no_template_is_said_as_for_every_model(tmp_path):
    bare = write_tiny(tmp_path, template=False)
    directory = Path(local_files(str(bare.file)))
    said = json.loads((directory / "tokenizer_config.json").read_text())
    assert "chat_template" not in said
    assert not (directory / "chat_template.jinja").exists()
