import json
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.errors import CheckpointError
from laurel.models.checkpoint.manifest import MANIFEST_NAME, verify_directory
from laurel.models.checkpoint.store import (
    CheckpointStore,
    steps_to_keep,
    verify,
)
from saved_steps import save_all, save_step, writer


@pytest.fixture
def root(tmp_path):
    return tmp_path / "results" / "rm"


def test_every_single_byte_of_a_checkpoint_counts(root):
    save_all(root, {3: 0.5})
    directory = root / "step_3"
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for position in range(len(content)):
            flipped = bytearray(content)
            flipped[position] ^= 1 << (position % 8)
            path.write_bytes(flipped)
            with pytest.raises(CheckpointError) as error:
                verify(directory)
            assert path.name in str(error.value)
        path.write_bytes(content)
        verify(directory)


WEIGHTS = "model.safetensors"


def linked(path):
    kept = path.parent.parent / "elsewhere"
    path.rename(kept)
    path.symlink_to(kept)


def piped(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "spoil", "complaint"),
    [
        (
            WEIGHTS,
            lambda p: p.write_bytes(b"x" * 11),
            f"{WEIGHTS} has 11 bytes where MANIFEST.json",
        ),
        (
            WEIGHTS,
            lambda p: p.write_bytes(b"x" * 13),
            f"{WEIGHTS} has 13 bytes where MANIFEST.json",
        ),
        (WEIGHTS, lambda p: p.unlink(), f"{WEIGHTS} is missing"),
        (WEIGHTS, linked, f"{WEIGHTS} is not a regular file"),
        (WEIGHTS, piped, f"{WEIGHTS} is not a regular file"),
        ("policy", linked, "policy is not a regular file"),
        (
            "policy/pytorch_model.bin",
            lambda p: p.write_bytes(pickle.dumps(print)),
            "policy/pytorch_model.bin is not in MANIFEST",
        ),
    ],
    ids=["cut", "grown", "gone", "linked", "a pipe", "a linked folder", "nobody vouches for it"],
)
def test_a_spoilt_file_is_named_even_without_hashes(root, name, spoil, complaint):
    save_all(root, {3: 0.5})
    file = root / "step_3" / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    verify_directory(root / "step_3", hashes=False)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} has been altered"):
        verify(root / "step_3")
    file.write_bytes(content)
    spoil(root / "step_3" / name)
    with pytest.raises(CheckpointError, match=complaint):
        verify_directory(root / "step_3", hashes=False)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe\x00", "damaged or not Laurel's"),
        (b"[]", "damaged or not Laurel's"),
        (b"[" * 100_000, "damaged or not Laurel's"),
        (b'{"format": "zip", "format_version": 1}', "'format' is not 'laurel-checkpoint'"),
        (b'{"format": "laurel-checkpoint", "format_version": 1}', "is damaged"),
        (
            b'{"format": "laurel-checkpoint", "format_version": 2, "created_by": {"laurel": "9"}}',
            "has format version 2, and this version of Laurel reads 1.*'laurel': '9'",
        ),
        ({"metric": 0.1}, r"MANIFEST\.json has been altered"),
        ({"files": 7}, r"MANIFEST\.json (is damaged|has been altered)"),
        ({"created_by": 7}, r"MANIFEST\.json (is damaged|has been altered)"),
    ],
)
def test_a_manifest_that_is_another_is_refused_with_the_reason(root, content, complaint):
    save_all(root, {1: 0.5})
    file = root / "step_1" / MANIFEST_NAME
    if isinstance(content, dict):  # by hand
        content = (json.dumps(json.loads(file.read_text()) | content, indent=2) + "\n").encode()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        verify(root / "step_1")


def test_a_directory_without_a_manifest_is_foreign(root):
    save_all(root, {2: 0.5, 4: 0.5})
    (root / "step_4" / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError) as error:
        verify(root / "step_4")
    assert str(error.value) == (
        f"'{root}/step_4' cannot be used: it has no MANIFEST.json, so it was not written by Laurel "
        f"or never finished. The newest whole checkpoint before it is '{root}/step_2'."
    )


def test_a_manifest_of_another_step_is_refused(root):
    save_all(root, {1: 0.5, 2: 0.5})
    (root / "step_2").rename(root / "step_3")
    with pytest.raises(CheckpointError, match="is of step 2, not of step 3"):
        verify(root / "step_3")
    (root / "step_3").rename(root / "my_favourite")
    assert verify(root / "my_favourite").step == 2


def test_the_link_to_the_best_can_be_verified(root):
    save_all(root, {1: 0.5, 2: 0.9})
    assert verify(root / "best").step == 1
    (root / "step_1/model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="step_1' cannot be used: model"):
        verify(root / "best")


def test_places_that_are_no_checkpoints_are_refused(root, tmp_path):
    with pytest.raises(CheckpointError, match="No such file or directory"):
        verify(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        verify(tmp_path / "file")
    with pytest.raises(CheckpointError, match="Not a directory"):
        CheckpointStore(tmp_path / "file").newest_whole()
    with pytest.raises(CheckpointError, match="cannot write checkpoints to"):
        CheckpointStore(tmp_path / "file" / "below").__enter__()
    save_all(root, {1: 0.5, 20: 0.5})
    with pytest.raises(
        CheckpointError, match=r"no MANIFEST.*name one of them, e\.g\. '.*/step_20'"
    ):
        verify(root)


def test_steps_are_numbers_and_odd_names_are_ignored(root):
    save_all(root, {2: None, 10: None, 9: None})
    for name in ("step_011", "step_x", "step_12.bak", "step_", "step_-1", "step_١٢", "Step_13"):
        (root / name).mkdir()
    (root / "step_14").touch()
    (root / "step_15").symlink_to("step_2")
    store = CheckpointStore(root)
    assert store.steps() == [2, 9, 10]
    newest = store.newest_whole()
    assert (newest.path, newest.skipped) == (root / "step_10", ())


def test_what_is_skipped_on_the_way_to_a_whole_one_is_said(root):
    save_all(root, {1: None, 2: None, 3: None, 4: None, 5: None})
    (root / "step_5" / MANIFEST_NAME).unlink()
    (root / "step_4/model.safetensors").write_bytes(b"weights of 5")
    (root / "step_3/model.safetensors").write_bytes(b"")
    newest = CheckpointStore(root).newest_whole()
    assert newest.path == root / "step_2"
    assert [text.split("'")[1] for text in newest.skipped] == [
        str(root / f"step_{step}") for step in (5, 4, 3)
    ]
    for text, reason in zip(newest.skipped, ("no MANIFEST", "altered", "0 bytes"), strict=True):
        assert reason in text


def test_a_root_without_whole_checkpoints_has_no_newest(root):
    assert CheckpointStore(root).newest_whole().path is None
    (root / "step_1").mkdir(parents=True)
    newest = CheckpointStore(root).newest_whole()
    assert (newest.path, len(newest.skipped)) == (None, 1)


def test_nothing_depends_on_the_clock(root):
    save_all(root, {1: 0.1, 2: 0.2, 3: 0.3})
    for step in (1, 2, 3):  # the later the step, the older its files
        for path in [*(root / f"step_{step}").rglob("*"), root / f"step_{step}"]:
            os.utime(path, (10**9 - step * 1000, 10**9 - step * 1000))
    with CheckpointStore(root, keep_top_k=1) as store:
        assert store.newest_whole().path == root / "step_3"
        save_step(store, 4, writer(4), metric=0.4)
        assert store.steps() == [1, 4]
        assert store.newest_whole().path == root / "step_4"


@given(
    metrics=st.dictionaries(
        st.integers(0, 99), st.none() | st.sampled_from([0.1, 0.2, 0.3]), min_size=1
    ),
    keep_top_k=st.integers(1, 5),
    higher_is_better=st.booleans(),
    data=st.data(),
)
def test_keeping_is_safe_and_lean(metrics, keep_top_k, higher_is_better, data):
    just_saved = data.draw(st.sampled_from(sorted(metrics)))
    kept = steps_to_keep(
        metrics, keep_top_k=keep_top_k, higher_is_better=higher_is_better, just_saved=just_saved
    )
    assert kept <= metrics.keys()
    assert {max(metrics), just_saved} <= kept
    assert min(2, len(metrics)) <= len(kept) <= keep_top_k + 2
    if just_saved == max(metrics):
        assert len(kept) <= keep_top_k + 1
    sign = 1 if higher_is_better else -1
    for lost in metrics.keys() - kept:  # at least k others beat it
        better = [
            step
            for step, value in metrics.items()
            if (value is not None, sign * (value or 0), step)
            > (metrics[lost] is not None, sign * (metrics[lost] or 0), lost)
        ]
        assert len(better) >= keep_top_k
