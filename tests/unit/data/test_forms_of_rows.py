"""Forms of rows that people have: what each becomes for every reader, or why it is refused.

A conversation is written as `role: text` with bars between turns, the answers of a pair after `>`.
The rule behind the table: no text of a row is left out without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from chat_rows import assistant, system, transcript, user
from laurel.config.data import DatasetConfig, TaskSetConfig
from laurel.config.sft import DemonstrationSetConfig
from laurel.data.columns import ColumnNotes
from laurel.data.conversations import load_demonstrations
from laurel.data.preferences import load_preferences
from laurel.data.sources import as_row, is_transcript, parse_transcript
from laurel.data.tasks import load_tasks
from laurel.errors import DataError
from laurel.extensions.score.rows import scoring_row
from laurel.models.chat import ChatFormat
from laurel.types import Conversation
from tiny_tokenizers import make_tokenizer

Q, A, B, S = (
    "Where do the swans sleep?",
    "On quiet water, afloat.",
    "No idea at all.",
    "Be very brief.",
)
THOUGHT = "They are birds of the water."
SEARCH = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
PAIR = f"user: {Q} > {A} > {B}"
CHAT = f"user: {Q} | assistant: {A}"
ASKED = f"user: {Q}"
UNKNOWN = "!"  # no form of the reader's; what is refused for another reason has the words of it


class Form(NamedTuple):
    row: Mapping[str, Any]
    rm: str = UNKNOWN
    sft: str = UNKNOWN
    grpo: str = UNKNOWN
    unread: tuple[str, ...] = ()
    """The columns that the report of the first reader names."""
    config: Mapping[str, str] = {}


def pair(row, *, prompt=ASKED, **more):
    """A pair, whose best answer is imitated and whose prompt is asked."""
    rest = prompt.split(" | ")
    return Form(
        row, f"{prompt} > {A} > {B}", " | ".join((*rest, f"assistant: {A}")), prompt, **more
    )


def chat(row, said=CHAT, **more):
    """A question and its answer: the answer is imitated, and the question asked."""
    return Form(row, UNKNOWN, said, said.rpartition(" | ")[0], **more)


def refused(row, words, **readers):
    return Form(row, **dict.fromkeys(("rm", "sft", "grpo"), f"!{words}") | readers)


def printed(*turns):
    """Print messages as pandas writes a list of them."""
    return str(list(turns))


def array(*turns, named=False):
    """Print messages as NumPy writes an array of them."""
    lines = ("," if named else "").join(f"{turn}\n " for turn in turns).strip()
    return f"array([{lines}], dtype=object)" if named else f"[{lines}]"


WITH_SYSTEM = f"system: {S} | user: {Q}"
THINKS = f"<think>\n{THOUGHT}\n</think>\n\n{A}"
TWO = "Answer in one sentence, please."
ALPACA = f"user: {TWO}\n\n{Q}"
RENDERED = f"<|im_start|>user\n{Q}<|im_end|>\n<|im_start|>assistant\n"

FORMS = {
    # A question in two columns.
    "Alpaca": chat({"instruction": TWO, "input": Q, "output": A}, f"{ALPACA} | assistant: {A}"),
    "Alpaca, empty input": chat({"instruction": Q, "input": "", "output": A}),
    "Alpaca, input alone": chat({"instruction": "", "input": Q, "output": A}),
    "Alpaca with text": chat(
        {"instruction": TWO, "input": Q, "output": A, "text": f"Below is it: {TWO} {Q} {A}"},
        f"{ALPACA} | assistant: {A}",
        unread=("text",),
    ),
    "Alpaca with a rendered prompt": chat(
        {
            "instruction": TWO,
            "input": Q,
            "output": A,
            "prompt": f"Below is it.\n\n### Instruction:\n{TWO}\n\n{Q}\n\n### Output:\n{A}",
        },
        f"{ALPACA} | assistant: {A}",
        unread=("prompt",),
    ),
    "Dolly": chat(
        {"instruction": TWO, "context": Q, "response": A, "category": "closed_qa"},
        f"{ALPACA} | assistant: {A}",
    )._replace(grpo=ALPACA),
    "KTO, a bad answer": Form(
        {"prompt": Q, "completion": A, "label": False}, UNKNOWN, "!which would be imitated", ASKED
    ),
    "KTO, a good answer": chat({"prompt": Q, "completion": A, "label": True}),
    "LLaMA-Factory pairs": pair(
        {"instruction": TWO, "input": Q, "chosen": A, "rejected": B}, prompt=ALPACA
    ),
    "LLaMA-Factory pairs, as was advised": pair(
        {"instruction": TWO, "input": Q, "chosen": A, "rejected": B}, prompt=ALPACA
    )._replace(sft=UNKNOWN, grpo=UNKNOWN, config={"prompt_key": "instruction"}),
    "LLaMA-Factory with a history": chat(
        {"instruction": Q, "input": "", "output": A, "history": [["Hello there.", "Good day."]]},
        f"user: Hello there. | assistant: Good day. | {CHAT}",
    ),
    "a question and a passage": chat(
        {"question": Q, "context": TWO, "answer": A}, f"user: {Q}\n\n{TWO} | assistant: {A}"
    ),
    "a passage that the question repeats": chat(
        {"question": f"{TWO} {Q}", "context": TWO, "answer": A},
        f"user: {TWO} {Q} | assistant: {A}",
    ),
    "columns of several readers": chat({"problem": Q, "prompt": Q, "solution": A}),
    # A system message in a column of its own.
    "Orca pairs": pair(
        {"system": S, "question": Q, "chosen": A, "rejected": B}, prompt=WITH_SYSTEM
    ),
    "Orca": chat(
        {"system_prompt": S, "question": Q, "response": A, "id": "flan.5"},
        f"{WITH_SYSTEM} | assistant: {A}",
    ),
    "system_message": chat(
        {"system_message": S, "input": Q, "output": A}, f"{WITH_SYSTEM} | assistant: {A}"
    ),
    "an empty system message": pair({"system": "", "prompt": Q, "chosen": A, "rejected": B}),
    "a system column beside conversations": pair(
        {"system": S, "chosen": [user(Q), assistant(A)], "rejected": [user(Q), assistant(B)]},
        prompt=WITH_SYSTEM,
    ),
    "two system messages": chat(
        {"system": "Speak like a pirate.", "messages": [system(S), user(Q), assistant(A)]},
        f"{WITH_SYSTEM} | assistant: {A}",
        unread=("system",),
    ),
    "a named system column": pair(
        {"rules": S, "prompt": Q, "chosen": A, "rejected": B},
        prompt=WITH_SYSTEM,
        config={"system_key": "rules"},
    ),
    "no system column": pair(
        {"system": S, "prompt": Q, "chosen": A, "rejected": B},
        unread=("system",),
        config={"system_key": ""},
    ),
    "ShareGPT with a system column": Form(
        {
            "system": S,
            "conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}],
        },
        sft=f"{WITH_SYSTEM} | assistant: {A}",
    ),
    # Keys of messages.
    "thoughts": chat(
        {"messages": [user(Q), {**assistant(A), "reasoning_content": THOUGHT}]},
        f"user: {Q} | assistant: {THINKS}",
    ),
    "thoughts of a pair": Form(
        {
            "chosen": [user(Q), {**assistant(A), "thinking": THOUGHT}],
            "rejected": [user(Q), {**assistant(A), "thinking": "Hm, what was it?"}],
        },
        rm=f"user: {Q} > {THINKS} > <think>\nHm, what was it?\n</think>\n\n{A}",
        sft=f"user: {Q} | assistant: {THINKS}",
        grpo=ASKED,
    ),
    "thoughts that the content repeats": chat(
        {"messages": [user(Q), {**assistant(THINKS), "reasoning_content": THOUGHT}]},
        f"user: {Q} | assistant: {THINKS}",
    ),
    "thoughts of the user": refused(
        {"messages": [{**user(Q), "thinking": THOUGHT}, assistant(A)]},
        "'thinking'",
        rm=UNKNOWN,
    ),
    "a weight of 0": chat(
        {"messages": [user(Q), {**assistant(B), "weight": 0}, user("And?"), assistant(A)]},
        f"user: {Q} | assistant (not learned): {B} | user: And? | assistant: {A}",
    )._replace(grpo=f"user: {Q} | assistant (not learned): {B} | user: And?"),
    "train is false": chat(
        {
            "messages": [
                user(Q),
                {**assistant(B), "train": False},
                user("And?"),
                {**assistant(A), "train": True},
            ]
        },
        f"user: {Q} | assistant (not learned): {B} | user: And? | assistant: {A}",
    )._replace(grpo=f"user: {Q} | assistant (not learned): {B} | user: And?"),
    "half a weight": refused(
        {"messages": [user(Q), {**assistant(A), "weight": 0.5}]}, "a weight of 0.5", rm=UNKNOWN
    ),
    "nothing learned": Form(
        {"messages": [user(Q), {**assistant(A), "weight": 0}]},
        sft="!nothing to learn",
        grpo=ASKED,
    ),
    "a name": refused(
        {"messages": [{**user(Q), "name": "Ann"}, assistant(A)]}, "'name'", rm=UNKNOWN
    ),
    "tools in a message": refused(
        {"messages": [{**system(S), "tools": SEARCH}, user(Q), assistant(A)]}, "'tools'", rm=UNKNOWN
    ),
    "a function call": refused(
        {"messages": [user(Q), {**assistant(A), "function_call": {"name": "search"}}]},
        "'function_call'",
        rm=UNKNOWN,
    ),
    "a column of tools": refused(
        {
            "tools": SEARCH,
            "chosen": [user(Q), assistant(A)],
            "rejected": [user(Q), assistant(B)],
        },
        "functions in 'tools'",
        sft=CHAT,
    ),
    "no tools": pair({"tools": "[]", "prompt": Q, "chosen": A, "rejected": B}),
    "notes of an annotator in a message": chat(
        {"messages": [user(Q), {**assistant(A), "comment": "I like this answer much."}]},
        unread=("messages.comment",),
    ),
    # Messages that are written as text.
    "printed by pandas": pair(
        {
            "prompt": Q,
            "chosen": printed(user(Q), assistant(A)),
            "rejected": printed(user(Q), assistant(B)),
        }
    ),
    "JSON in a text": pair(
        {
            "chosen": json.dumps([user(Q), assistant(A)]),
            "rejected": json.dumps([user(Q), assistant(B)]),
        }
    ),
    "printed by NumPy": chat({"messages": array(user(Q), assistant(A))}),
    "an array of NumPy's": chat({"messages": array(user(Q), assistant(A), named=True)}),
    "a printed prompt": pair({"prompt": printed(user(Q)), "chosen": A, "rejected": B}),
    "a printed message": pair({"prompt": str(user(Q)), "chosen": A, "rejected": B}),
    "printed answers in a list": Form(
        {
            "context": Q,
            "completions": [str({"rank": 0, "completion": A}), str({"rank": 1, "completion": B})],
        },
        PAIR,
        CHAT,
        ASKED,
    ),
    "printed and cut off": refused(
        {"messages": printed(user(Q), assistant(A))[:-20]}, "'messages' holds messages as text"
    ),
    "an honest list in a text": chat(
        {"prompt": Q, "completion": '[{"name": "Ann", "age": 3}]'},
        f'user: {Q} | assistant: [{{"name": "Ann", "age": 3}}]',
    )._replace(grpo=ASKED),
    # Prompts that are conversations or rendered.
    "a transcript for a prompt": pair(
        {"prompt": transcript(Q) + "\n\nAssistant: ", "chosen": A, "rejected": B}
    ),
    "a longer transcript": pair(
        {"prompt": transcript("Hello there.", "Good day.", Q), "chosen": A, "rejected": B},
        prompt=f"user: Hello there. | assistant: Good day. | user: {Q}",
    ),
    "whole transcripts beside their prompt": pair(
        {"prompt": Q, "chosen": transcript(Q, A), "rejected": transcript(Q, B)}
    ),
    "rendered by ChatML": refused(
        {"prompt": RENDERED, "chosen": f"{A}<|im_end|>", "rejected": f"{B}<|im_end|>"},
        "rendered by a chat template",
    ),
    **{
        f"rendered: {begin}": refused(
            {"prompt": f"{begin}{Q}", "chosen": A, "rejected": B}, "rendered by a chat template"
        )
        for begin in (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
            "<bos><start_of_turn>user\n",
            "<s>[INST] ",
            "<|user|>\n",
            "<｜begin▁of▁sentence｜><｜User｜>",
        )
    },
    # Published sets with a form of their own.
    "PKU-SafeRLHF": pair(
        {
            "prompt": Q,
            "response_0": A,
            "response_1": B,
            "better_response_id": 0,
            "safer_response_id": 1,
            "is_response_0_safe": True,
        },
        unread=("is_response_0_safe",),
    ),
    "Nectar": pair(
        {
            "prompt": transcript(Q) + "\n\nAssistant: ",
            "answers": [
                {"answer": A, "model": "a", "rank": 1.0},
                {"answer": B, "model": "b", "rank": 2.0},
            ],
            "num_responses": 2,
            "good_natured": True,
        },
        unread=("good_natured",),
    ),
    "SHP": pair(
        {"history": Q, "human_ref_A": A, "human_ref_B": B, "labels": 1, "score_A": 5},
        unread=("score_A",),
    ),
    "WebGPT": pair(
        {
            "question": {"full_text": Q, "dataset": "eli5", "id": "7"},
            "answer_0": A,
            "answer_1": B,
            "score_0": 0.5,
            "score_1": -0.5,
            "quotes_0": {"title": ["Swans"], "extract": ["They sleep on the water."]},
        },
        unread=("quotes_0.extract",),
    ),
    "HelpSteer2": Form(
        {"prompt": Q, "response": A, "helpfulness": 4, "verbosity": 1},
        "!These two lines of Python",
        CHAT,
        ASKED,
    ),
    "ShareGPT pairs": pair(
        {
            "conversations": [{"from": "human", "value": Q}],
            "chosen": {"from": "gpt", "value": A},
            "rejected": {"from": "gpt", "value": B},
        }
    ),
    "ShareGPT pairs of whole conversations": pair(
        {
            "chosen": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}],
            "rejected": [{"from": "human", "value": Q}, {"from": "gpt", "value": B}],
        }
    ),
    "OASST": refused(
        {"message_id": "1", "parent_id": "0", "text": A, "role": "assistant", "rank": 0},
        "These two lines of Python",
    ),
    # What stands beside a pair.
    "scores beside a pair": pair(
        {"prompt": Q, "chosen": A, "rejected": B, "score_chosen": 9.5, "prompt_id": "7"},
        unread=("score_chosen",),
    ),
    "a note beside a pair": pair(
        {"prompt": Q, "chosen": A, "rejected": B, "why": "The second one is no answer."},
        unread=("why",),
    ),
    "a long source": pair(
        {"prompt": Q, "chosen": A, "rejected": B, "source": "told to me by a friend of swans"},
        unread=("source",),
    ),
    "a margin": pair(
        {"prompt": Q, "chosen": A, "rejected": B, "better_by": 2},
        config={"margin_key": "better_by"},
    )._replace(sft=UNKNOWN, grpo=UNKNOWN),
}
READERS = ("rm", "sft", "grpo")


@pytest.fixture(scope="module")
def render():
    """Renders a conversation and reads its tokens back."""
    tokenizer = make_tokenizer()
    format_of_chats = ChatFormat(tokenizer)

    def run(said: Conversation) -> str:
        ids = format_of_chats.prompt_ids(said)
        return str(tokenizer.decode(ids.tolist()))

    return run


def read(reader: str, path: str, config: Mapping[str, str]) -> tuple[list[Conversation], str, list]:
    """Return what a reader makes of one row: conversations, in words, and the report's notes."""
    if reader == "rm":
        settings = {"name": "d", "ties": "drop", "duplicates": "drop", "on_bad_row": "error"}
        (one,), report = load_preferences(DatasetConfig(data_path=path, **config), **settings)
        group = one.group
        whole = [group.conversation(index) for index in range(len(group.completions_G))]
        answers = [in_words(each.messages) for each in group.completions_G]
        said = " > ".join([in_words(group.prompt), *(a.partition(": ")[2] for a in answers)])
    elif reader == "sft":
        sets = [DemonstrationSetConfig(data_path=path, **config)]
        (talk,), report = load_demonstrations(sets, name="d")
        whole, said = [talk.messages], in_words(talk.messages)
    else:
        sets = [TaskSetConfig(data_path=path, env_name="reward_model", **config)]
        options = {"default_environment": "math", "environments": ["math", "reward_model"]}
        (task,), report = load_tasks(sets, name="d", **options)
        whole, said = [task.prompt], in_words(task.prompt)
        if answer := task.metadata.get("ground_truth"):
            report.notes.append(f"the known answer: {answer}")
    return whole, said, report.notes


def in_words(said: Conversation) -> str:
    return " | ".join(
        f"{turn.role}{'' if turn.learned else ' (not learned)'}: {turn.content}" for turn in said
    )


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the words of each text in a row."""
    if isinstance(value, str):
        turns = parse_transcript(value) if is_transcript(value) else ()
        yield from ((path, turn.content) for turn in turns) if turns else [(path, value)]
    elif isinstance(value, Mapping):
        for key, held in value.items():
            yield from texts(held, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for held in value:
            yield from texts(held, path)


def left_out(row: Mapping[str, Any], seen: str, notes: list[str]) -> list[str]:
    """Return the texts of more than three words that are in neither the tokens nor the notes."""
    told = "\n".join(notes)
    return [
        f"{path}: {words}"
        for path, words in texts(as_row(row))
        if len(words.split()) > 3
        and words.strip() not in seen
        # Of a known answer the report need not speak: it is what answers are checked by.
        and words.strip() not in told
        and f"'{path}'" not in told
    ]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_read_as_the_table_says_or_refused(write_rows, name):
    form = FORMS[name]
    path = str(write_rows([form.row]))
    for reader in READERS:
        expected = getattr(form, reader)
        if expected == UNKNOWN and form.config:
            continue
        if expected.startswith("!"):
            with pytest.raises(DataError) as problem:
                read(reader, path, form.config)
            assert expected[1:] in str(problem.value), (reader, str(problem.value))
        else:
            _, said, notes = read(reader, path, form.config)
            assert said == expected, reader
            for column in form.unread:
                assert any(f"'{column}'" in note for note in notes), (reader, notes)


@pytest.mark.parametrize("name", FORMS)
def test_no_text_of_a_row_is_in_neither_the_tokens_nor_the_report(write_rows, render, name):
    form = FORMS[name]
    more = {"remark": "five words that nobody reads", "beside": {"it": ["and these are in a list"]}}
    row = {**form.row, **more}
    path = str(write_rows([row]))
    num_read = 0
    for reader in READERS:
        if form.config and getattr(form, reader) == UNKNOWN:
            continue
        try:
            whole, _, notes = read(reader, path, form.config)
        except DataError:
            continue
        num_read += 1
        assert left_out(row, "\n".join(map(render, whole)), notes) == [], reader
        assert any("'remark'" in note and "'beside.it'" in note for note in notes)
    assert num_read or form.sft.startswith("!")


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.config])
def test_rows_to_score_lose_no_text_either(render, name):
    row, notes = FORMS[name].row, ColumnNotes()
    try:
        read_row = scoring_row(row, source="rows:1", where="rows:1")
    except DataError:
        return
    group = read_row.group
    whole = [group.conversation(index) for index in range(len(group.completions_G))]
    turns = [turn for one in whole for turn in one]
    notes.look("rows:1", as_row(row), tuple(turns))
    assert left_out(row, "\n".join(map(render, whole)), notes.notes()) == []
    if FORMS[name].rm[0] != "!":
        prompt, *answers = FORMS[name].rm.split(" > ")
        assert in_words(group.prompt) == prompt
        assert [in_words(one.messages) for one in group.completions_G] == [
            f"assistant: {answer}" for answer in answers
        ]
