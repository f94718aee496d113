"""What `laurel rm` says of its rows: margins that a loss reads, and conversations that are cut."""

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schemas import SCHEMAS
from laurel.data.report import DataReport
from laurel.errors import DataError
from laurel.run.reward_model import load_data, tokenise
from laurel.types import Preference
from process_models import process_model, solutions
from runs import pairs, write_rows


def configured(tmp_path, *overrides, margin=0.5):
    rows = pairs(8)
    for row in rows:
        if margin is not None:
            row["gap"] = margin
    path = write_rows(tmp_path / "rows.jsonl", rows)
    config = load_config(SCHEMAS["rm"], None, [f"data.train_data_path={path}", *overrides]).config
    assert isinstance(config, RewardTrainingRun)
    return config


@pytest.mark.parametrize(
    ("overrides", "margin"),
    [([], 0.5), (["data.margin_key=gap"], 0.0)],
    ids=["no key", "all are 0"],
)
def test_margins_that_no_row_has_are_refused(tmp_path, overrides, margin):
    config = configured(tmp_path, "rm.loss.use_margin=true", *overrides, margin=margin)
    with pytest.raises(DataError, match=r"no training row has a margin .*data\.margin_key=COLUMN"):
        load_data(config)


def test_margins_that_the_loss_does_not_read_are_noted_and_others_not(tmp_path):
    notes = load_data(configured(tmp_path, "data.margin_key=gap")).reports["train"].notes
    assert notes[-1].startswith("data.margin_key=gap has no effect")
    assert "rm.loss.use_margin=true" in notes[-1]
    data = load_data(configured(tmp_path, "data.margin_key=gap", "rm.loss.use_margin=true"))
    assert {preference.margin for preference in data.train} == {0.5}
    assert not any("margin" in note for note in data.reports["train"].notes)


@pytest.mark.parametrize(("num_cut", "is_told"), [(3, True), (2, False)])
def test_most_being_cut_is_a_warning(num_cut, is_told):
    tokens = [
        SimpleNamespace(truncated_G=(i < num_cut, i + 1 < num_cut), lengths_G=(8, 8))
        for i in (0, 2)
    ]
    contract: Any = SimpleNamespace(
        encode=lambda groups, sources, exact_steps: tokens,
        rules=SimpleNamespace(max_length=8, steps=None),
    )
    preferences: Any = [SimpleNamespace(group=None, source=str(i)) for i in range(2)]
    stream = io.StringIO()
    report = DataReport(name="train")
    tokenise(
        preferences,
        contract=contract,
        report=report,
        overlong="truncate",
        console=Console(file=stream, width=300),
    )
    assert report.num_truncated == num_cut
    said = f"warning: train: {num_cut} of 4 conversations cut to 8 tokens"
    assert (said in stream.getvalue()) == is_told
    assert ("policy.max_total_sequence_length" in stream.getvalue()) == is_told


def test_a_row_whose_steps_are_not_found_again_is_refused_with_its_source():
    def tokens_of(*steps):
        preference = Preference(
            group=solutions("q", "==".join(steps)),
            ranks_G=(0,),
            steps_GS=((1.0,) * len(steps),),
            source="rows.jsonl:7",
        )
        contract = process_model(separator="==", max_length=64).contract
        return tokenise(
            [preference, replace(preference, group=solutions("q", "a==b" * 40))],
            contract=contract,
            report=DataReport(name="train"),
            overlong="drop",
            console=Console(file=io.StringIO()),
        )

    # The second row is cut, so it is left out, whatever is found in it.
    (sample,) = tokens_of("a", "b")
    assert sample.tokens.num_reads_G == (2,)
    with pytest.raises(DataError, match=r"rows\.jsonl:7: .* \[3\] steps, and \[2\] are found"):
        tokens_of("a", "=", "b")
