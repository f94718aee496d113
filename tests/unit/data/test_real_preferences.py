"""The real data sets, whose counts are known from their provenance."""

import pytest


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
