import io
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from chat_rows import assistant, system, user
from laurel.cli.main import app
from laurel.errors import CheckpointError, ConfigError, DataError, ModelError, ScoringContractError
from laurel.extensions.score.score import CHUNK, RowsFile, run_score
from laurel.rewards.spec import ScorerSpec
from reward_models import small_model, write_foreign_model, write_model, write_run

ROWS = [
    {"id": 7, "prompt": "Where is the laurel?", "completions": ["By the gate.", "No.", "No."]},
    {"messages": [user("Bread?"), assistant("Wine, old man.")]},
]
LONG = {"prompt": "Where?", "completions": ["the old man " * 100, "No."]}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with a contract and golden scores, and without a manifest."""
    directory = tmp_path_factory.mktemp("model")
    write_model(small_model(), directory)
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return write_foreign_model(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
def score(capsys):
    """Runs the command; gives the exit code, the JSON lines, and what was said and printed."""

    def run(
        model,
        rows=ROWS,
        *,
        file="-",
        on_bad_row="error",
        as_json=True,
        output=None,
        settings=(),
        **options,
    ):
        stdin = io.BytesIO(rows if isinstance(rows, bytes) else lines(rows))
        chosen = ScorerSpec(**{"device": "cpu", **options})
        capsys.readouterr()
        code = run_score(
            RowsFile(file=str(file), on_bad_row=on_bad_row, stdin=stdin),
            model=str(model),
            output=output,
            as_json=as_json,
            options=chosen,
            settings=settings,
            cpu_threads=1,
        )
        out, err = capsys.readouterr()
        read = [json.loads(line) for line in out.splitlines()] if as_json else []
        return SimpleNamespace(code=code, lines=read, out=out, err=err)

    return run


def test_json_lines_hold_one_entry_per_completion_in_order(score, checkpoint):
    result = score(checkpoint)
    assert result.code == 0
    first, second = result.lines
    assert list(first) == ["id", "source", "scores", "num_tokens", "truncated", "failures"]
    assert (first["id"], first["source"]) == (7, "stdin:1")
    assert "id" not in second
    assert second["source"] == "stdin:2"
    assert [len(first[key]) for key in list(first)[2:]] == [3, 3, 3, 3]
    assert first["scores"][0] != first["scores"][1] == first["scores"][2]
    assert first["failures"] == [None, None, None]
    assert first["truncated"] == [False, False, False]


def test_scores_are_those_of_hugging_face_to_the_last_bit_that_float32_has(score, checkpoint):
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def own(*texts):
        roles = ("user", "assistant")
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            return model(**ids).logits[0, 0].item()

    first, second = score(checkpoint).lines
    expected = [own("Where is the laurel?", "By the gate."), own("Where is the laurel?", "No.")]
    assert first["scores"][:2] == pytest.approx(expected, abs=2e-6)
    assert second["scores"] == pytest.approx([own("Bread?", "Wine, old man.")], abs=2e-6)
    for value in (*first["scores"], *second["scores"]):
        assert float(np.float32(value)) == value


def test_an_output_file_holds_the_lines_and_nothing_is_printed(score, checkpoint, tmp_path):
    output = tmp_path / "scores.jsonl"
    to_file = score(checkpoint, as_json=False, output=output)
    assert to_file.out == ""
    assert f"wrote the scores to {output}" in to_file.err
    read = [json.loads(line) for line in output.read_text().splitlines()]
    assert read == score(checkpoint).lines
    assert score(checkpoint, output=output).lines == read, "with --json, both"


def test_a_bad_row_leaves_the_old_output_as_it_was(score, checkpoint, tmp_path, capsys):
    output = tmp_path / "scores.jsonl"
    output.write_text("old\n")
    rows = lines(ROWS[1:] * (CHUNK + 10)) + b"{}\n"
    with pytest.raises(DataError, match=f"stdin:{CHUNK + 11}: the row has the keys"):
        score(checkpoint, rows, output=output)
    assert output.read_text() == "old\n"
    assert len(capsys.readouterr().out.splitlines()) == CHUNK, "rows are printed in chunks"
    assert [path.name for path in tmp_path.iterdir()] == ["scores.jsonl"]


BAD = [b"not json\n", b"[1, 2, 3]\n", b"{}\n"]


@pytest.mark.parametrize("is_file", [True, False])
def test_bad_rows_can_be_failures_in_their_places(is_file, score, checkpoint, tmp_path):
    path = tmp_path / "rows.jsonl"
    content = b"".join([BAD[0], lines(ROWS[:1]), *BAD[1:], lines(ROWS[1:]), BAD[0]])
    path.write_bytes(content)
    rows = {"file": path} if is_file else {"rows": content}
    with pytest.raises(DataError, match=r":1: column 1: not JSON.*, or set data\.on_bad_row=skip"):
        score(checkpoint, **rows)
    result = score(checkpoint, **rows, on_bad_row="skip")
    assert result.code == 0
    name = "rows.jsonl" if is_file else "stdin"
    assert [line["source"] for line in result.lines] == [f"{name}:{n}" for n in range(1, 7)]
    assert [line["scores"] == [None] for line in result.lines] == [1, 0, 1, 1, 0, 1]
    (failure,) = result.lines[2]["failures"]
    assert f"{name}:3: the row is a list where an object" in failure
    assert "scored  4 completions in 2 rows" in result.err
    assert "FAILED  4 rows could not be read; the first: " in result.err
    table = score(checkpoint, **rows, on_bad_row="skip", as_json=False)
    assert table.out.count("failed") == 4


def test_where_no_row_can_be_read_to_skip_them_is_no_help(score, checkpoint, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(BAD))
    with pytest.raises(DataError, match=r"none of its 3 rows can be read; the first: .*not JSON"):
        score(checkpoint, file=path, on_bad_row="skip")
    assert score(checkpoint, b"".join(BAD), on_bad_row="skip").code == 1


def test_words_that_name_columns_are_no_file(score, checkpoint, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"Frage": "Where?", "chosen": "Here.", "rejected": "No."}
    path.write_bytes(lines([row]) + BAD[0])
    words = ["data.prompt_key=Frage", "data.on_bad_row=skip"]
    command = ["score", "-m", str(checkpoint), "--device", "cpu", "--json"]
    for more, stdin in ((words, path.read_bytes()), ([words[0], str(path), words[1]], None)):
        done = CliRunner().invoke(app, [*command, *more], input=stdin, catch_exceptions=False)
        assert done.exit_code == 0
        first, second = map(json.loads, done.stdout.splitlines())
        assert len(first["scores"]) == 2
        assert second["scores"] == [None]
    done = CliRunner().invoke(app, [*command, str(path), "data.shuffle=true"])
    assert isinstance(done.exception, ConfigError)
    assert "data.system_key=COLUMN; or set data.on_bad_row=skip" in str(done.exception)
    with pytest.raises(DataError, match=r"keys Frage, .*data\.prompt_key=COLUMN"):
        score(checkpoint, [row])


def test_scores_do_not_depend_on_the_chunk_or_the_batch(score, checkpoint, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([*ROWS, *ROWS[1:] * CHUNK, LONG, *ROWS]))
    many = score(checkpoint, file=path, batch_tokens=300).lines
    few = score(checkpoint, ROWS).lines
    assert len(many) == CHUNK + 5
    for ends in (many[:2], many[-2:]):
        for one, other in zip(ends, few, strict=True):
            assert one["scores"] == pytest.approx(other["scores"], abs=5e-6)


def test_a_score_that_is_not_finite_is_null_and_counted(score, tmp_path):
    loaded = small_model()
    (token,) = loaded.contract.tokenizer("~")["input_ids"]
    with torch.no_grad():
        loaded.model.classifier.get_input_embeddings().weight[token] = math.nan
    write_model(loaded, tmp_path)
    row = {"prompt": "Where?", "completions": ["No.", "By the ~ gate."]}
    result = score(tmp_path, [*ROWS, row])
    assert result.code == 1
    *good, bad = result.lines
    assert [line["failures"] for line in good] == [[None, None, None], [None]]
    assert bad["scores"][0] is not None
    assert bad["scores"][1] is None
    assert bad["failures"] == [None, "not finite"]
    assert "1 completion got no score; the first: stdin:3: not finite" in result.err


def test_weights_that_are_not_those_of_the_golden_scores_are_refused(score, tmp_path):
    write_model(small_model(), tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["score.weight"] *= 1.1
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ScoringContractError, match="golden conversation scores"):
        score(tmp_path)


def test_a_conversation_that_the_template_refuses_fails_alone(score, tmp_path):
    write_foreign_model(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + template.read_text()
    )
    refused = {"messages": [system("Be kind."), *ROWS[1]["messages"]]}
    result = score(tmp_path, [refused, *ROWS])
    assert result.code == 1
    assert result.lines[0]["scores"] == [None]
    assert "roles [system, user, assistant]: no system" in result.lines[0]["failures"][0]
    assert None not in (*result.lines[1]["scores"], *result.lines[2]["scores"])


@pytest.mark.parametrize(("weights", "expected"), [(None, [0.5, 0.5]), ((2.0, -1.0), [2.0, -1.0])])
def test_an_attribute_head_gives_every_rating_and_their_sum(score, tmp_path, weights, expected):
    names = ("helpfulness", "correctness")
    write_model(small_model(attributes=names, attribute_weights=weights), tmp_path)
    result = score(tmp_path)
    assert "values  helpfulness, correctness" in result.err
    for line in result.lines:
        assert len(line["values"]) == len(line["scores"])
        for value, ratings in zip(line["scores"], line["values"], strict=True):
            assert value == pytest.approx(expected[0] * ratings[0] + expected[1] * ratings[1])
    assert result.lines[0]["values"][0][0] != result.lines[0]["values"][0][1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of steps 1 to 3, the second of which is the best."""
    return write_run(tmp_path_factory.mktemp("run"), {1: 0.6, 2: 0.9, 3: 0.7})


def test_a_run_without_a_best_means_its_newest_whole_checkpoint(score, tmp_path):
    run = write_run(tmp_path / "run", {1: None, 2: None})
    (run / "step_2" / "scoring.json").unlink()
    result = score(run)
    assert "the newest is step_1" in result.err
    assert "warning: skipped a checkpoint" in result.err
    assert "scoring.json is missing" in result.err
    assert result.lines[0]["scores"] == score(run / "step_1").lines[0]["scores"]
    (run / "step_1" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole: .*is miss"):
        score(run)


def test_a_torn_checkpoint_is_named_with_its_bad_file_and_the_one_before(score, tmp_path):
    run = write_run(tmp_path / "run", {1: 0.5, 2: 0.6})
    weights = run / "step_2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    for name in ("step_2", "best", "."):
        with pytest.raises(CheckpointError) as error:
            score(run / name)
        assert "model.safetensors has" in str(error.value)
        assert f"whole checkpoint before it is '{run / 'step_1'}'" in str(error.value)


def test_places_that_hold_no_model(score, tmp_path):
    with pytest.raises(ConfigError, match=r"no reward model is named; add --model"):
        score("")
    with pytest.raises(ConfigError, match=r"^--model http\S+ is an address.*laurel eval pairs"):
        score("http://127.0.0.1:8432")
    file = tmp_path / "weights.bin"
    file.touch()
    with pytest.raises(ModelError, match="is a file; name the directory"):
        score(file)
    with pytest.raises(ModelError, match=r"no such directory; .* holds: weights\.bin"):
        score(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no such directory, nor .*absent"):
        score(tmp_path / "absent" / "model")
    with pytest.raises(ModelError, match=r"neither a model .* nor checkpoints .* weights\.bin"):
        score(tmp_path)


def test_a_model_without_a_contract_says_so_and_takes_a_length(score, foreign):
    plain = score(foreign, [LONG])
    assert "no scoring.json, so no golden scores" in plain.err
    assert "the model has 64 positions" in plain.err
    assert plain.lines[0]["num_tokens"][0] == 64
    shorter = score(foreign, [LONG], max_length=20)
    assert shorter.lines[0]["num_tokens"][0] == 20
    assert shorter.lines[0]["truncated"] == [True, True]


def test_a_contract_settles_the_length(score, checkpoint):
    result = score(checkpoint, [LONG], max_length=20)
    assert "--max-length is not used: scoring.json says 64 tokens" in result.err
    assert result.lines[0]["num_tokens"][0] == 64
    with pytest.raises(ConfigError, match=r"scoring\.json of the model settles that"):
        score(checkpoint, settings=("max_total_sequence_length=20",))


@pytest.mark.parametrize("key", ["tokenizer.pad_token", "policy.tokenizer.pad_token"])
def test_padding_that_ends_sequences_is_mended_by_a_setting(score, tmp_path, key):
    write_foreign_model(tmp_path, pad_is_eos=True)
    with pytest.raises(ModelError, match=r"--set tokenizer\.pad_token=auto"):
        score(tmp_path, settings=(f"{key}=null",))
    found = score(tmp_path)
    assert (found.code, "pads with '<|im_end|>'" in found.err) == (0, True)


def test_settings_that_cannot_be(score, foreign):
    with pytest.raises(ConfigError, match="did you mean 'pad_token'"):
        score(foreign, settings=("tokenizer.pad_tokn=auto",))
    with pytest.raises(ConfigError, match="use the option --model"):
        score(foreign, settings=("model_name=other",))
    with pytest.raises(ConfigError, match="use the option --precision"):
        score(foreign, settings=("policy.precision=bfloat16",))


def test_the_command_ends_with_2_and_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "laurel.cli.main", "score", "rows.jsonl"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no reward model is named; add --model")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_columns_that_are_not_scored_are_named_once(score, checkpoint, tmp_path):
    row = {"system": "Be brief.", "prompt": "Where?", "completion": "Here.", "remark": "a good one"}
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([row, row]))
    for file, rows in ((path, ()), ("-", [row, row])):
        said = " ".join(score(checkpoint, rows, file=file).err.split())
        assert said.count("'remark'") == 1
        assert "the system message is from 'system': 2 rows" in said


def test_thoughts_that_the_template_leaves_out_are_told(score, checkpoint, tmp_path):
    thinking = {"prompt": "Where?", "completion": "<think>\nIt is a tree.\n</think>\n\nHere."}
    assert "leaves out the thoughts" not in score(checkpoint, [*ROWS, thinking]).err
    write_foreign_model(tmp_path)
    template = tmp_path / "chat_template.jinja"
    text = template.read_text()
    template.write_text(
        text.replace("message['content']", "message['content'].split('</think>')[-1]")
    )
    assert template.read_text() != text
    said = " ".join(score(tmp_path, [*ROWS, thinking]).err.split())
    assert "leaves out the thoughts of answers (<think> ... </think>), so that" in said
    assert f":{len(ROWS) + 1})" in said
