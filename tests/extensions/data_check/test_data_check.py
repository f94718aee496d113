import gzip
import json
import re
import shutil
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from chat_rows import assistant, system, user
from laurel import plugins
from laurel.cli.main import app
from model_directories import save_model
from tiny import tiny_language_model
from tool_templates import BRACKETS

PAIR = {"prompt": "Where is the laurel?", "chosen": "By the gate 🌿.", "rejected": "No."}
CHAT = {
    "messages": [
        system("Be brief."),
        user("user"),  # the template says this word, too
        assistant("Yes."),
    ]
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny language model with ChatML."""
    directory = tmp_path_factory.mktemp("model")
    return str(save_model(directory, tiny_language_model("qwen3")))


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def check(*arguments):
    done = CliRunner().invoke(app, ["data", "check", *arguments])
    return done.exit_code, re.sub(r" +", " ", done.stdout.replace("\n", " ")), done.exception


def test_pairs_fit_three_commands_and_lost_rows_are_named(tmp_path):
    path = write(tmp_path / "rows.jsonl", PAIR, {**PAIR, "chosen": "No."}, {"prompt": "x"}, PAIR)
    code, said, _ = check(path)
    assert code == 0
    assert "format pairs" in said
    assert "rm yes: 1 of 4 rows" in said
    assert "identical sides 1 (line 2)" in said
    assert "malformed 1 1 x missing key 'chosen' (line 3)" in said
    assert "duplicate 1 (line 4)" in said
    assert "stops at rows.jsonl:3 unless you fix the rows or set data.on_bad_row=skip" in said
    assert (
        f"laurel rm data.train_data_path={path} policy.model_name=DIR data.on_bad_row=skip" in said
    )
    assert "sft yes" in said
    assert "grpo yes" in said
    assert "laurel eval pairs" in said
    assert "add --model DIR" in said


def test_the_score_is_read_from_the_last_token_of_each_answer(tmp_path, model):
    path = write(tmp_path / "rows.jsonl", PAIR)
    code, said, _ = check(path, "--for", "rm", "--model", model, "--json")
    assert code == 0
    parts = json.loads(said)["first_row"]["parts"]
    assert [part["title"].partition(",")[0] for part in parts] == [
        "prompt",
        "better answer",
        "worse answer",
    ]
    prompt, better, worse = (part["tokens"] for part in parts)
    assert not any(token["pooled"] for token in prompt)
    for answer in (better, worse):
        assert [token["pooled"] for token in answer] == [False] * (len(answer) - 1) + [True]
    assert "".join(token["text"] for token in better) == PAIR["chosen"] + "<|im_end|>\n"
    leaf = next(token for token in better if token["text"] == "🌿")
    assert len(leaf["ids"]) == 4  # its bytes


def test_the_labels_of_steps_are_shown(tmp_path):
    row = {"prompt": "Count.", "completions": ["1", "2", "4"], "labels": [True, 0.5, None]}
    path = write(tmp_path / "rows.jsonl", row)
    code, said, _ = check(path)
    assert code == 0
    assert "answer, 1 of 1, labels of its steps: 1, 0.5, none" in said


def test_an_answer_in_steps_that_is_too_long_is_left_out_and_not_cut(tmp_path, model):
    row = {"prompt": "Count.", "completions": ["1 2 3 4 " * 20], "labels": [True]}
    path = write(tmp_path / "rows.jsonl", row, {**row, "completions": ["1 2"]})
    process = ("policy.reward_model_cfg.reward_model_type=process", "rm.loss.type=step_bce")
    short = "policy.max_total_sequence_length=32"
    _, said, error = check(path, "--for", "rm", "--model", model, *process, short)
    assert error is None
    assert "over-long 1 (line 1)" in said
    assert "(rows.jsonl:2)" in said
    assert "cut to fit 0 of 1 conversation" in said
    path = write(tmp_path / "pairs.jsonl", {**PAIR, "chosen": "1 2 3 4 " * 20})
    assert " tokens, cut to fit" in check(path, "--for", "rm", "--model", model, short)[1]


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_with_a_model_rows_that_only_its_template_shows_to_be_lost_are_counted(tmp_path, model):
    directory = shutil.copytree(model, tmp_path / "strict")
    (directory / "chat_template.jinja").write_text(STRICT, encoding="utf-8")
    path = write(
        tmp_path / "rows.jsonl",
        {**PAIR, "prompt": [system("Be brief."), user("Where is the laurel?")]},
        PAIR,
        {"prompt": "Name a tree.", "chosen": "Oak.", "rejected": " Oak."},
    )
    facts = json.loads(check(path, "--json")[1])["fits"]
    assert {fit["malformed"] for fit in facts.values()} == {0}
    code, said, _ = check(path, "--model", str(directory), "--json")
    assert code == 0
    facts = json.loads(said)
    kept = {"rm": 1, "sft": 2, "grpo": 2}
    for trainer, fit in facts["fits"].items():
        assert fit["malformed"] == 1
        assert fit["report"]["rows_kept"] == kept[trainer]
        assert fit["report"]["rows_left_out"]["malformed"]["sources"] == [
            {
                "source": "rows.jsonl:1",
                "kind": "the chat template refuses it: System role not supported",
            }
        ]
    lost = facts["fits"]["rm"]["report"]["rows_left_out"]["same tokens"]
    assert lost["examples"] == ["rows.jsonl:3"]
    assert facts["first_row"]["source"] == "rows.jsonl:2"
    assert "stops at rows.jsonl:1 unless" in check(path, "--model", str(directory))[1]
    # A run says the same, row by row.
    options = ("data.split_validation_size=0", f"policy.model_name={directory}")
    for trainer in ("rm", "sft"):
        error = CliRunner().invoke(app, [trainer, f"data.train_data_path={path}", *options])
        assert re.search(r"rows\.jsonl:1: .*System.*data\.on_bad_row=skip", str(error.exception))


def test_what_the_assistant_says_counts_in_the_loss(tmp_path, model):
    path = write(tmp_path / "rows.jsonl", CHAT)
    code, said, _ = check(path, "--for", "sft", "--model", model, "--json")
    (part,) = json.loads(said)["first_row"]["parts"]
    learned = "".join(token["text"] for token in part["tokens"] if token["in_loss"])
    assert code == 0
    assert learned.startswith("Yes.")
    assert "brief" not in learned


@pytest.mark.parametrize("name", ["sums", "both"])
@pytest.mark.parametrize("kind", ["openreward", "verifiers"])
def test_a_template_with_a_form_of_its_own_names_the_section_of_the_tools(
    tmp_path, model, monkeypatch, kind, name
):
    # Only a server, or a taskset, knows its tools.
    known = SimpleNamespace(spec=SimpleNamespace(tools=(tool("add"),)), shutdown=lambda: None)
    monkeypatch.setattr(type(plugins.plugin("environments", kind)), "make", lambda *_: known)
    (tmp_path / "calls.jinja").write_text(BRACKETS)
    path = write(tmp_path / "rows.jsonl", {"prompt": "1 + 1?", "ground_truth": "2"})
    settings = [
        f"policy.tokenizer.chat_template={tmp_path}/calls.jinja",
        f"data.env_name={name}",
        "env.composite={both: {parts: [{env: sums}, {env: math}]}}",
    ]
    asked = (path, "--for", "grpo", "--model", model, *settings)
    where = "url: http://127.0.0.1:9" if kind == "openreward" else "id: sums-v1"
    error = check(*asked, f"env.{kind}={{sums: {{{where}}}}}")[2]
    assert f"env.{kind}.sums: " in str(error)
    assert "hermes, llama" in str(error)
    shows = "policy.tokenizer.chat_template=hermes"
    assert check(*asked, shows, f"env.{kind}={{sums: {{{where}}}}}")[0] == 0


def tool(name):
    parameters = {"type": "object", "properties": {}}
    given = {"name": name, "description": "Add.", "parameters": parameters}
    return {"type": "function", "function": given}


def test_without_colours_the_layout_says_the_same(tmp_path, model):
    path = write(tmp_path / "rows.jsonl", PAIR)
    _, said, _ = check(path, "--for", "rm", "--model", model)
    assert "\x1b" not in said
    assert re.search(r"B.y. .t.h.e", said)
    assert re.search(r" score \\n", said)
    assert "score: the score is read from this one" in said
    chats = write(tmp_path / "chats.jsonl", CHAT)
    assert re.search(r" loss Y.e.s", check(chats, "--for", "sft", "--model", model)[1])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "does not exist"),
        ("empty.jsonl", b"", "is empty"),
        ("bad.jsonl", b"{oops\nnonsense\n", "none of its 2 rows can be read"),
        ("rows.txt", b"x", "cannot tell the format"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n' * 99, mtime=0)[:30], "breaks off"),
        ("bad.parquet", b"PAR", "no Parquet file"),
    ],
)
def test_what_holds_no_rows_is_an_error(name, content, says, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    _, _, error = check(str(path))
    assert says in str(error)
    assert getattr(error, "exit_code", None) == 2


def test_a_file_that_fits_nothing_lists_what_does(tmp_path):
    code, said, _ = check(write(tmp_path / "rows.jsonl", {"foo": 1, "bar": 2}))
    assert code == 2
    assert "rm no: 1 malformed" in said
    assert "sft no:" in said
    assert "grpo no:" in said
    assert "pairs prompt, chosen, rejected (rm, sft, grpo, eval pairs)" in said
    assert "Name your columns: data.prompt_key, data.chosen_key, data.rejected_key" in said
    said = check(write(tmp_path / "odd.jsonl", {"Frage (user)": "Wo?", "gute Antwort": "Da."}))[1]
    assert "'data.input_key=Frage (user)'" in said
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text('{"foo": 1}\n{oops\n[1]\n{"foo": 1}\n', encoding="utf-8")
    assert (
        "rm no: 4 malformed (2 x columns of no known class, e.g. mixed.jsonl:1; 1 x not JSON, e.g. "
        "mixed.jsonl:2; 1 x not an object, e.g. mixed.jsonl:3)"
    ) in check(str(mixed))[1]


def test_a_file_for_another_command_is_told_so(tmp_path):
    code, said, _ = check(write(tmp_path / "rows.jsonl", CHAT), "--for", "rm")
    assert code == 2
    assert "this format is for laurel sft and laurel grpo" in said
    assert "HumanEval" not in said


def test_tests_are_held_against_what_the_run_asks_of_them(tmp_path):
    one = {"prompt": "Add.", "test_list": ["assert add(1) == 1", "assert add(2) == 2"]}
    two = {"prompt": "Or.", "test_list": ["assert add(1) == 1", "assert sub(2) == 2"]}
    code, said, _ = check(write(tmp_path / "both.jsonl", one, two))
    assert code == 0
    assert "grpo yes: 1 of 2 rows" in said
    code, said, _ = check(write(tmp_path / "none.jsonl", two, two))
    assert code == 2
    assert "accepts none of the known answers or tests" in said
    assert "test_list needs the name of a function: entry. Add a column 'entry'" in said
    assert "leave --for out" not in said  # nobody said it


def test_preferences_that_are_to_be_checked_against_are_warned_of(tmp_path):
    row = {"prompt": "Where?", "chosen": "Here.", "rejected": "No."}
    path = write(tmp_path / "pairs.jsonl", row)
    _, said, _ = check(path, "data.env_name=math")
    assert "warning completions are graded against the answers that people preferred" in said
    _, said, _ = check(path)
    assert "warning" not in said


def test_every_row_that_is_left_out_is_named_with_its_reason_in_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(PAIR), "{oops", '{"prompt": "x"}', *["{oops"] * 4]
    path.write_text("\n".join(lines), encoding="utf-8")
    _, said, _ = check(str(path), "--for", "rm")
    assert "5 x not JSON (lines 2, 4, 5, ...)" in said
    assert "1 x missing key 'chosen' (line 3)" in said
    assert "--json names the rows that are left out, up to 1,000 of each kind" in said
    facts = json.loads(check(str(path), "--for", "rm", "--json")[1])
    malformed = facts["fits"]["rm"]["report"]["rows_left_out"]["malformed"]
    not_json = [{"source": f"rows.jsonl:{line}", "kind": "not JSON"} for line in (2, 4, 5, 6, 7)]
    missing = {"source": "rows.jsonl:3", "kind": "missing key 'chosen'"}
    assert malformed["sources"] == [*not_json, missing]
    assert malformed["sources_left_off"] == 0
    assert facts["rows_unreadable"]["sources"] == not_json


def test_keys_that_map_columns_are_taken_and_unknown_ones_refused(tmp_path):
    row = {"question": "Where?", "better": "Here.", "worse": "No."}
    path = write(tmp_path / "rows.jsonl", row)
    keys = ["data.prompt_key=question", "data.chosen_key=better", "data.rejected_key=worse"]
    _, said, _ = check(path)
    assert "it looks like pairs: 'question' the prompt" in said
    assert f"--for rm {' '.join(keys)}" in said
    assert check(path, "data.prompt_key=better")[0] == 2
    code, said, _ = check(path, *keys)
    assert code == 0
    assert "rm yes: 1 of 1 row" in said
    assert f"eval laurel eval pairs --model DIR -d {path} {' '.join(keys)} " in said
    code, said, _ = check(write(tmp_path / "pairs.jsonl", PAIR), "data.chosen_key=choosen")
    assert code == 2
    assert "format pairs: " in said
    assert "rm no: pairs.jsonl:1: the row has no 'choosen'; its keys are: prompt, chosen, r" in said
    assert "Set data.chosen_key to the key that holds it ('chosen'?). 1 malformed" in said
    _, _, error = check(path, "data.prompt_ky=question")
    assert "did you mean 'prompt_key'?" in str(error)


def test_a_model_that_cannot_be_used_is_told_after_what_was_found(tmp_path, model):
    path = write(tmp_path / "rows.jsonl", PAIR)
    _, said, error = check(path, "--model", model, "policy.tokenizer.chat_template=zzz")
    assert "rm yes: 1 of 1 row" in said
    assert "'zzz' is neither a template nor a known name" in str(error)


def test_who_names_an_environment_is_given_no_other_and_told_how_ones_own_is_named(tmp_path):
    path = write(tmp_path / "tasks.jsonl", *({"prompt": f"say {i}"} for i in range(4)))
    _, said, _ = check(path, "--for", "grpo")
    assert "it looks like prompts" in said
    own = ("data.env_name=mine", "+env.custom.mine.name=my_module.Mine")
    code, said, _ = check(path, "--for", "grpo", *own)
    assert code == 0
    assert "it looks like" not in said
    _, _, error = check(path, "--for", "grpo", own[0])
    assert "is named by +env.custom.mine.name=MODULE.CLASS" in str(error)


def test_an_evaluation_that_would_stop_at_a_bad_row_is_not_proposed(tmp_path):
    path = write(tmp_path / "rows.jsonl", PAIR, {"prompt": "x"})
    code, said, _ = check(path, "data.on_bad_row=skip")
    assert code == 0
    assert "leaves out 1 malformed row, the first at rows.jsonl:2" in said
    assert "set data.on_bad_row=skip" not in said
    _, named, _ = check(path, "--for", "rm", "policy.model_name=mine")
    assert f"laurel rm data.train_data_path={path} policy.model_name=mine data.on_bad_row" in named
    assert "eval no: laurel eval pairs reads a file whole, and stops at rows.jsonl:2: fix" in said
    assert "laurel eval pairs --model" not in said


def test_a_reference_that_fails_its_tests_is_named(tmp_path):
    tests = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    adds = "print(sum(map(int, input().split())))"
    row = {"question": "Add.", "input_output": tests}
    right, wrong = row | {"solutions": json.dumps([adds])}, row | {"solutions": ["print(4)"]}
    code, said, _ = check(write(tmp_path / "rows.jsonl", right, wrong, row))
    assert code == 0
    if "not run" in said:
        pytest.skip("nothing can be locked in here")
    assert "2 reference solutions run: 1 fails the tests of its row" in said
    assert "The first: rows.jsonl:2: " in said
    assert "it has tests: stdio_tests, compared as apps" in said
    code, said, _ = check(write(tmp_path / "right.jsonl", right), "--json")
    facts = json.loads(said)["references"]
    assert facts == {"found": 1, "run": 1, "failed": [], "problem": None}
    code, said, _ = check(write(tmp_path / "none.jsonl", row), "--json")
    assert json.loads(said)["references"] is None


def test_references_that_nothing_locks_in_are_not_run(tmp_path):
    row = {"prompt": "Say 1.", "stdio_tests": [{"stdout": "1"}], "reference_solution": "print(1)"}
    path = write(tmp_path / "rows.jsonl", row)
    code, said, _ = check(path, "env.code.sandbox.cgroup=/nowhere")
    assert code == 0
    assert "1 row with a reference solution, not run: sandbox.cgroup=/nowhere" in said
