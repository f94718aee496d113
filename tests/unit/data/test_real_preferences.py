"""The real data sets, whose counts are known from their provenance."""

from collections import Counter

import pytest

from laurel.data.preferences import hold_out


@pytest.mark.slow
def test_ukp_is_read_whole_and_its_longer_arguments_win(load, real_data):
    train, report = load(real_data / "ukp_convarg1/train.jsonl.gz", duplicates="keep")
    assert (len(train), report.num_read, report.num_dropped) == (8589, 8589, 0)
    assert report.longer_wins_share == pytest.approx(0.76, abs=0.01)
    validation, report = load(real_data / "ukp_convarg1/validation.jsonl.gz")
    assert len(validation) == 1435
    assert report.longer_wins_share == pytest.approx(0.81, abs=0.01)

    kept, held_out = hold_out(train, share=0.1, seed=42)
    largest = max(Counter(p.group.prompt for p in train).values())
    assert abs(len(held_out) - 858.9) <= largest / 2  # prompts are held out whole
    assert {p.group.prompt for p in kept}.isdisjoint(p.group.prompt for p in held_out)


def test_hh_transcripts_parse_but_for_the_thirteen_known(load, real_data):
    path = real_data / "hh_rlhf_harmless/raw_verbatim.jsonl.gz"
    preferences, report = load(path, on_bad_row="skip", duplicates="keep")
    assert report.num_read == 2312
    assert len(preferences) == 2312 - 13
    assert report.dropped["empty"].count == 4
    assert dict(report.dropped["malformed"].kinds) == {
        "turns do not alternate": 4,
        "transcripts part too early (2 and 1 turns left)": 4,
        "transcripts part too early (1 and 2 turns left)": 1,
    }
    assert report.longer_wins_share == pytest.approx(0.44, abs=0.01)
