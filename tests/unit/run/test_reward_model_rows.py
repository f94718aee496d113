"""What `laurel rm` says of its rows: margins that a loss reads, and conversations that are cut."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

import tiny_tokenizers as made
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schemas import SCHEMAS
from laurel.data.report import DataReport
from laurel.errors import DataError
from laurel.models.scoring import ScoringContract, token_group
from laurel.models.tokenizer import CHATML
from laurel.run.reward_model import distinct_answers, load_data, tokenise
from laurel.types import Message, Preference
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
    ("own", "flat", "held"),
    [((0.25, None), 0.0, (2, 0)), ((0.25, 0.5), 0.0, (2, 4)), ((None, 0.0), 0.5, (4, 0))],
)
def test_each_set_holds_out_a_share_of_its_own(tmp_path, own, flat, held):
    blocks = []
    for number, share in enumerate(own):
        rows = pairs(8)
        for row in rows:
            row["prompt"] = f"{number} {row['prompt']}"
        path = write_rows(tmp_path / f"{number}.jsonl", rows)
        said = "" if share is None else f", split_validation_size: {share}"
        blocks.append(f"{{data_path: {path}{said}}}")
    overrides = [f"data.train=[{', '.join(blocks)}]", f"data.split_validation_size={flat}"]
    config = load_config(SCHEMAS["rm"], None, overrides).config
    data = load_data(config)
    found = [one.group.id.partition(":")[0] for one in data.validation["default"]]
    assert (found.count("train-1"), found.count("train-2")) == held
    assert len(data.train) == 16 - sum(held)


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


def contract_of(max_length=32, template=None):
    tokenizer = made.chatml()
    if template is not None:
        tokenizer.chat_template = template
    return ScoringContract.create(
        tokenizer, max_length=max_length, truncation_side="right", append_eos=True
    )


def preference(*answers, question="Where?", ranks=None, source="rows.jsonl:1"):
    return Preference(
        group=solutions(question, *answers, group_id=source),
        ranks_G=tuple(range(len(answers))) if ranks is None else ranks,
        source=source,
    )


def tokenised(preferences, contract, *, on_bad_row="error", overlong="truncate"):
    """The samples, the report and what was printed."""
    stream, report = io.StringIO(), DataReport(name="train", num_read=len(preferences))
    samples = tokenise(
        preferences,
        contract=contract,
        report=report,
        overlong=overlong,
        on_bad_row=on_bad_row,
        console=Console(file=stream, width=300),
    )
    assert report.num_kept == len(samples)
    return samples, report, stream.getvalue()


@pytest.mark.parametrize("num_cut", [3, 2])
def test_most_being_cut_is_a_warning(num_cut):
    answers = [f"{i} " + "a" * (100 if i < num_cut else 1) for i in range(4)]
    rows = [preference(*answers[:2]), preference(*answers[2:], source="rows.jsonl:2")]
    _, report, said = tokenised(rows, contract_of(100))
    assert report.num_truncated == num_cut
    is_told = num_cut > 2
    assert (f"warning: train: {num_cut} of 4 conversations cut to 100 tokens" in said) == is_told
    assert ("policy.max_total_sequence_length" in said) == is_told


TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("answers", "contract", "kind"),
    [
        (("word " * 40 + "Oak.", "word " * 40 + "Table."), contract_of(), "cut to 32 tokens"),
        (("Oak.", " Oak.\n"), contract_of(template=TRIMS), "as the chat template writes them"),
    ],
    ids=["cut", "trimmed"],
)
def test_a_pair_that_becomes_the_same_tokens_is_left_out_and_counted(answers, contract, kind):
    rows = [preference(*answers), preference("Oak.", "Table.", source="rows.jsonl:2")]
    samples, report, _ = tokenised(rows, contract)
    assert [one.preference.source for one in samples] == ["rows.jsonl:2"]
    assert report.to_dict()["rows_left_out"]["same tokens"]["sources"] == [
        {"source": "rows.jsonl:1", "kind": kind}
    ]
    assert (report.num_kept, report.num_pairs) == (1, 1)
    with pytest.raises(
        DataError, match=rf"nothing is left of 1 row.*same tokens.*{kind}"
    ) as problem:
        tokenised(rows[:1], contract)
    assert ("data.truncation_side" in str(problem.value)) == kind.startswith("cut")


def test_answers_of_a_list_that_become_those_of_another_rank_are_left_out():
    contract = contract_of(template=TRIMS)
    answers = ("Oak.", "Elm.", "Elm. ", "Ash.", "Ash. ", "No.")
    (sample,), report, _ = tokenised([preference(*answers, ranks=(0, 1, 2, 3, 3, 4))], contract)
    said = [one.messages[0].content for one in sample.preference.group.completions_G]
    assert said == ["Oak.", "Ash.", "Ash. ", "No."]
    assert sample.preference.ranks_G == (0, 3, 3, 4)
    assert len(sample.tokens.branches_ids_G) == len(sample.tokens.truncated_G) == 4
    assert report.num_completions == {4: 1}
    assert report.notes[-1].startswith("2 answers were left out of rows of several")
    # Without another rank to compare with, nothing is left of a row.
    assert not distinct_answers(preference("a", "b", "c"), token_group("", [([1, 2], False)] * 3))
    assert distinct_answers(
        preference("a", "b"), token_group("", [([1, 2], False), ([1, 3], False)])
    )


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_row_that_the_template_refuses_is_a_bad_row():
    contract = contract_of(template=STRICT)
    good = preference("Oak.", "Table.")
    system = (Message("system", "Be brief."), *good.group.prompt)
    bad = replace(good, group=replace(good.group, prompt=system), source="rows.jsonl:2")
    with pytest.raises(DataError, match=r"^rows\.jsonl:2: .*System role.*data\.on_bad_row=skip"):
        tokenised([good, bad], contract)
    samples, report, _ = tokenised([good, bad], contract, on_bad_row="skip")
    assert [one.preference.source for one in samples] == ["rows.jsonl:1"]
    left_out = report.dropped["malformed"]
    assert left_out.sources == {
        "the chat template refuses it: System role not supported": ["rows.jsonl:2"]
    }
    assert report.num_kept == 1


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
            on_bad_row="error",
            console=Console(file=io.StringIO()),
        )

    # The second row is cut, so it is left out, whatever is found in it.
    (sample,) = tokens_of("a", "b")
    assert sample.tokens.num_reads_G == (2,)
    with pytest.raises(DataError, match=r"rows\.jsonl:7: .* \[3\] steps, and \[2\] are found"):
        tokens_of("a", "=", "b")


FORGETS = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


@pytest.mark.parametrize(("template", "is_said"), [(FORGETS, True), (CHATML, False)])
def test_thoughts_that_the_template_leaves_out_are_told(template, is_said):
    thinking = preference("<think>\nIt is a tree.\n</think>\n\nBy the gate.", "No.")
    _, report, _ = tokenised([preference("Here.", "There."), thinking], contract_of(64, template))
    assert any("leaves out the thoughts" in note for note in report.notes) == is_said
