"""Function calls in the text of a policy: what every form reads and writes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny_tokenizers as made
from laurel.errors import ModelError
from laurel.models.tokenizer import HERMES
from laurel.models.tool_calls import FORMS, MalformedCall, ToolCall, fault_of, form_of
from tool_templates import BRACKETS, FORM_OF, TOKENIZERS, chatml_like

WEATHER = ToolCall("weather", {"city": "Oslo", "days": [1, 2]})
TIME = ToolCall("time", {})

each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
each_template = pytest.mark.parametrize("name", TOKENIZERS)
TOKENIZER_OF = {name: make() for name, make in TOKENIZERS.items()}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["</tool_call>", "<tool_call>", "</think>", "}", '"', "; {", "\\"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(
    ToolCall,
    st.from_regex("[a-z_][a-z0-9_é]*", fullmatch=True),
    st.dictionaries(st.text(), values, max_size=3),
)


def rendered(tokenizer, *wanted, content=""):
    """The text that a template writes for an assistant's turn with these calls."""
    functions = [{"name": one.name, "arguments": dict(one.arguments)} for one in wanted]
    turns = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"type": "function", "function": one} for one in functions],
        },
    ]
    before = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert whole.startswith(before)
    return whole.removeprefix(before).rstrip().removesuffix(tokenizer.eos_token)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if FORM_OF[name] == "llama"])
@given(call=calls)
def test_a_rendered_call_is_read_back(name, call):
    tokenizer = TOKENIZER_OF[name]
    assert FORMS["llama"].read(rendered(tokenizer, call)) == [call]


@pytest.mark.parametrize("name", ["hermes", "qwen"])
@given(several=st.lists(calls, min_size=1, max_size=2), said=st.text(alphabet="ab {}\n"))
def test_several_rendered_calls_are_read_in_order(name, several, said):
    text = rendered(TOKENIZER_OF[name], *several, content=said)
    assert FORMS["hermes"].read(text) == several


@each_form
@given(several=st.lists(calls, max_size=2))
def test_what_a_form_writes_it_reads(form, several):
    assert form.read(form.write(several)) == several


@each_form
@given(text=st.text(alphabet='<tol_cal>/{}[]":,name parmters;|python_tag1\n\\'))
def test_any_text_can_be_read(form, text):
    for call in form.read(text):
        assert isinstance(call, ToolCall | MalformedCall)


@each_form
@pytest.mark.parametrize(
    "text",
    ["", "The answer is 4.", r"\boxed{4}", '{"answer": 4}', "{", '{"name": "Oslo"}', "{1, 2}"],
)
def test_an_answer_is_no_call(form, text):
    assert form.read(text) == []


@each_form
def test_thoughts_are_no_calls(form):
    call, other = form.write([WEATHER]), form.write([TIME])
    assert form.read(f"<think>\nI may say {call}\n</think>\n\n{other}") == [TIME]
    assert form.read(f"I think.</think>{other}") == [TIME]
    assert form.read(f"<think>{call}</think>It is 4.") == []


@each_template
def test_thoughts_that_the_prompt_begins_are_no_calls(name):
    tokenizer = TOKENIZERS[name]()
    template = tokenizer.chat_template.rstrip()
    assert template.endswith(("{%- endif %}", "{% endif %}"))
    begin = template[: template.rindex("{%")]
    tokenizer.chat_template = begin + "{{- '<think>\\n' }}{%- endif %}"
    form = form_of(tokenizer)
    call, other = form.write([WEATHER]), form.write([TIME])
    assert form.read(f"In {{braces}} I may say {call} or so.\n</think>\n\n{other}") == [TIME]
    assert form.read(f"I may say {call}</think>It is 4.") == []
    assert form.read(f"I may say {call} and so on") == []


@each_form
@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ('{"name": "f", KEY: {"x": }}', "it is not valid JSON: Expecting value"),
        ('{"name": "f", KEY: {"x": 1}', "it is not valid JSON"),
        ('{"name": "f", KEY: {"x": NaN}}', "NaN is no JSON"),
        ('{"name": "f", KEY: {"x": -1e999}}', "a number that is no JSON"),
        ('{"name": "f", KEY: [1]}', "must be a JSON object"),
        ('{"name": 3, KEY: {}}', 'it has no "name" of a function'),
        ('{"name": "f", KEY: ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"name": "f", KEY: {"x": ' + "[" * 64 + "]" * 64 + "}}", "nested more than 64 deep"),
        ('{"name": "f", KEY: {"x": ["\\udcff"]}}', "half of a surrogate pair"),
        ('{"name": "f", KEY: {"\\udcff": 1}}', "half of a surrogate pair"),
        ('{"name": "\\ud83d", KEY: {}}', "half of a surrogate pair"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(form, written, problem):
    key = "arguments" if form.name == "hermes" else "parameters"
    (text,) = [written.replace("KEY", f'"{key}"')]
    if form.name == "hermes":
        text = f"<tool_call>{text}</tool_call>"
    (call,) = form.read(text)
    assert isinstance(call, MalformedCall)
    assert problem in call.problem


def test_no_server_is_sent_numbers_that_are_no_json():
    for constant in ("NaN", "Infinity", "-Infinity", "1e999"):
        fault = fault_of(json.loads('{"x": [{"y": ' + constant + "}]}"))
        assert fault == "it has a number that is no JSON (NaN or infinite)"
    assert fault_of({"x": 1e308, "y": 10**400}) is None


def test_arguments_may_be_nested_and_have_surrogate_pairs():
    written = '{"x": ' + "[" * 63 + "]" * 63 + ', "y": "\\ud83d\\ude00"}'
    (call,) = FORMS["hermes"].read(f'<tool_call>{{"name": "f", "arguments": {written}}}')
    assert call == ToolCall("f", json.loads(written))


def test_hermes_goes_on_after_a_malformed_call():
    good = FORMS["hermes"].write([TIME])
    text = f"<tool_call>time()</tool_call> {good} and <tool_call></tool_call><tool_call>[1]"
    first, second, third, fourth = FORMS["hermes"].read(text)
    assert isinstance(first, MalformedCall)
    assert second == TIME
    assert third == MalformedCall("it is empty")
    assert fourth == MalformedCall("it is not a JSON object with name and arguments")


def test_hermes_reads_a_call_that_is_not_closed():
    assert FORMS["hermes"].read(f"<tool_call>{json.dumps({'name': 'time'})}") == [TIME]


def test_llama_reads_several_calls_a_tag_and_arguments():
    one, two = '{"name": "time", "arguments": {}}', '{"name": "time", "parameters": {}}'
    for text in (f"{one}; {two}", f"{one}\n{two}", f"<|python_tag|>{one};{two} and so on"):
        assert FORMS["llama"].read(text) == [TIME, TIME]
    (call,) = FORMS["llama"].read('<|python_tag|>search.call(query="x")')
    assert call == MalformedCall("no JSON object comes after <|python_tag|>")
    (call,) = FORMS["llama"].read('<|python_tag|>{"answer": 4}')
    assert call == MalformedCall('it has no "name" of a function')


@each_template
def test_the_form_is_what_the_template_writes(name):
    assert form_of(TOKENIZERS[name]()).name == FORM_OF[name]


def test_a_template_that_hides_tools_is_refused():
    with pytest.raises(ModelError, match=r"leaves out the tools.*chat_template=hermes"):
        form_of(made.chatml())


def test_a_template_with_a_form_of_its_own_is_refused():
    with pytest.raises(ModelError, match=r"env.tools: .*no form that is known.*hermes, llama"):
        form_of(chatml_like(BRACKETS))


def test_a_template_that_fails_on_calls_is_refused():
    broken = HERMES.replace("message['tool_calls'] %}", "1 // 0 %}")
    with pytest.raises(ModelError, match="cannot render a conversation with tools"):
        form_of(chatml_like(broken))


def test_arguments_under_another_key_are_not_taken_for_none():
    """A real chat model wrote "parameters" after Hermes, and read that all were missing."""
    written = '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>'
    assert FORMS["hermes"].read(written) == [
        MalformedCall('it has no "arguments", but "parameters"')
    ]
    assert FORMS["hermes"].read('<tool_call>{"name": "f"}</tool_call>') == [ToolCall("f", {})]
