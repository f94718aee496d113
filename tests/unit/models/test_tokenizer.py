"""Which template, which padding token, and what the template is made to write."""

from datetime import date, datetime

import pytest

import tiny_tokenizers as made
from laurel.config.policy import TokenizerConfig
from laurel.errors import ConfigError, ModelError
from laurel.models.tokenizer import (
    CHATML,
    CONCATENATION,
    PLAIN,
    bind_variables,
    close_ends,
    load_tokenizer,
    pin_date,
    plain_text,
    settle_padding,
    settle_template,
)

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def text_of(tokenizer, **kwargs):
    return tokenizer.apply_chat_template(TALK, tokenize=False, **kwargs)


def test_the_choices_of_a_template(tmp_path):
    tokenizer = made.make_tokenizer(template="{{ messages[0]['content'] }}!")
    settle_template(tokenizer, "default")
    assert text_of(tokenizer) == "a!"
    settle_template(tokenizer, None)
    assert tokenizer.chat_template == CONCATENATION
    assert text_of(tokenizer) == "ab"
    settle_template(tokenizer, "plain")
    assert tokenizer.chat_template == PLAIN
    assert text_of(tokenizer) == "User: a\n\nAssistant: b\n\n"
    settle_template(tokenizer, "chatml")
    assert tokenizer.chat_template == CHATML
    assert (
        text_of(tokenizer) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    )
    settle_template(tokenizer, "{{ messages | length }}")
    assert text_of(tokenizer) == "2"
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[1]['content'] }}é", encoding="utf-8")
    settle_template(tokenizer, str(path))
    assert text_of(tokenizer) == "bé"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("chat-ml", r"chat_template='chat-ml' is neither .* chatml, plain, hermes, null"),
        ("gone.jinja", r"chat_template=gone.jinja: there is no such file"),
    ],
)
def test_a_template_that_is_none_is_an_error(choice, message):
    with pytest.raises(ModelError, match=message):
        settle_template(made.make_tokenizer(), choice)


def test_several_named_templates():
    tokenizer = made.make_tokenizer(template=None)
    tokenizer.chat_template = {"default": "one", "tool_use": "two"}
    settle_template(tokenizer, "default")
    assert tokenizer.chat_template == "one"
    tokenizer.chat_template = {"rag": "one", "tool_use": "two"}
    with pytest.raises(ModelError, match=r"several chat templates \(rag, tool_use\)"):
        settle_template(tokenizer, "default")


def test_padding_with_the_end_of_a_sequence_is_an_error_with_its_remedy():
    tokenizer = made.make_tokenizer(pad="</s>")
    with pytest.raises(ModelError, match=r"pads with .*'</s>'.*policy.tokenizer.pad_token=auto"):
        settle_padding(tokenizer, None)
    with pytest.raises(ModelError, match="one token too early"):
        settle_padding(tokenizer, "</s>")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("<|endoftext|>", "<|finetune_right_pad_id|>"), "<|finetune_right_pad_id|>"),
        (("<unk>",), "<unk>"),
        (
            ("<|reserved_special_token_1|>", "<|reserved_special_token_0|>"),
            "<|reserved_special_token_0|>",
        ),
    ],
)
def test_auto_picks_a_token_that_ends_nothing(more, expected):
    tokenizer = made.make_tokenizer(pad="</s>", more=more)
    settle_padding(tokenizer, "auto")
    assert tokenizer.pad_token == expected
    tokenizer = made.make_tokenizer(pad=None, more=more)
    settle_padding(tokenizer, None)
    assert tokenizer.pad_token == expected


def test_auto_says_what_it_replaces_and_keeps_what_ends_nothing():
    tokenizer = made.make_tokenizer(pad="</s>", more=("<|pad|>",))
    note = settle_padding(tokenizer, "auto")
    assert note is not None
    assert "pads with '</s>'" in note
    assert "'<|pad|>' is the padding token instead" in note
    assert settle_padding(tokenizer, "auto") is None
    tokenizer = made.make_tokenizer(more=("<|pad|>",))
    assert (settle_padding(tokenizer, "auto"), tokenizer.pad_token) == (None, "<pad>")
    tokenizer = made.make_tokenizer(pad="</s>", more=("<|pad|>",))
    assert settle_padding(tokenizer, "auto", may_end=True) is None
    assert tokenizer.pad_token == "</s>"


def test_auto_never_picks_bos_or_eos():
    tokenizer = made.make_tokenizer(bos="<|endoftext|>", eos="<unk>", pad=None)
    with pytest.raises(ModelError, match=r"no token that could pad.*policy.tokenizer.pad_token="):
        settle_padding(tokenizer, "auto")


def test_a_padding_token_that_is_there_is_kept_and_a_named_one_is_used():
    tokenizer = made.make_tokenizer(more=("<|pad|>",))
    settle_padding(tokenizer, None)
    assert tokenizer.pad_token == "<pad>"
    settle_padding(tokenizer, "<|pad|>")
    assert tokenizer.pad_token == "<|pad|>"
    with pytest.raises(ModelError, match=r"pad_token='<nothing>' is not in the vocabulary"):
        settle_padding(tokenizer, "<nothing>")


def test_several_formats_and_single_quotes():
    template = "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now( \"%e of %B\" ) }}|\n"
    pinned, shown = pin_date(template, date(2023, 2, 3))
    tokenizer = made.make_tokenizer(template=pinned)
    assert text_of(tokenizer) == "2023-02-03  3 of February|"
    assert shown == "2023-02-03"


def test_a_loaded_template_prints_the_chosen_day_and_one_that_is_pinned_keeps_its_own(tmp_path):
    made.llama_31().save_pretrained(tmp_path)
    days = [date(2024, 7, 26), date(2031, 12, 1)]
    first, other = (load(TokenizerConfig(date=day), tmp_path) for day in days)
    assert "Today Date: 26 Jul 2024" in text_of(first)
    assert "Today Date: 01 Dec 2031" in text_of(other)
    first.save_pretrained(tmp_path)
    again = load(TokenizerConfig(date=days[1]), tmp_path)
    assert text_of(again) == text_of(first)
    for template, shown in ((first.chat_template, "26 Jul 2024"), (other.chat_template, "01 Dec")):
        pinned, day = pin_date(template, date.today())
        assert pinned == template
        assert day is not None
        assert day.startswith(shown)


def test_a_template_without_a_clock_is_left_alone():
    assert pin_date(CHATML, date(2023, 2, 3)) == (CHATML, None)
    mentions = "{% if strftime_now is defined %}x{% endif %}"
    assert pin_date(mentions, date(2023, 2, 3)) == (mentions, None)


def test_a_clock_that_cannot_be_pinned_is_refused():
    with pytest.raises(ModelError, match="cannot be pinned"):
        pin_date("{% set f = '%Y' %}{{ strftime_now(f) }}", date(2023, 2, 3))


@pytest.mark.parametrize("leading", ["\nx{{ 1 }}", "  {% if true %}x{% endif %}", " y"])
def test_what_is_put_in_front_of_a_template_changes_none_of_its_own_text(leading):
    """White space at the start of a template has a meaning to Jinja: it must keep it."""
    plain = text_of(made.make_tokenizer(template=leading))
    dated = text_of(made.make_tokenizer(template=leading + "{{ strftime_now('%Y') }}"))
    assert dated == plain + datetime.now().strftime("%Y")
    pinned, _ = pin_date(leading + "{{ strftime_now('%Y') }}", date(1999, 1, 1))
    assert text_of(made.make_tokenizer(template=pinned)) == plain + "1999"
    bound = bind_variables(leading, {"depth": 3})
    assert text_of(made.make_tokenizer(template=bound)) == plain
    tokenizer = made.make_tokenizer(template=leading)
    close_ends(tokenizer, append_eos=True)
    assert text_of(tokenizer) == f"<s>{plain}</s>"


def test_variables_are_written_into_the_template():
    template = (
        "{% macro think() %}{{ '/think' if thinks else '/no_think' }}{% endmacro %}"
        "{{ think() }} {{ words | join('-') }} {{ name }}"
    )
    values = {"thinks": False, "words": ["a", 2], "name": "it's {{ fun }}"}
    tokenizer = made.make_tokenizer(template=template)
    expected = text_of(tokenizer, **values)
    assert expected == "/no_think a-2 it's {{ fun }}"
    tokenizer.chat_template = bind_variables(template, values)
    assert text_of(tokenizer) == expected
    assert text_of(tokenizer, **values) == expected
    assert text_of(tokenizer, thinks=True).startswith("/think a-2")


@pytest.mark.parametrize("name", ["add_generation_prompt", "tokenize", "not a name"])
def test_a_name_that_is_no_variable_is_refused(name):
    with pytest.raises(ConfigError, match=f"chat_template_kwargs.{name} is not a variable"):
        bind_variables(CHATML, {name: True})


TALK_OF_BARE = "[user] a [assistant] b "


WITH_BOS = "{{ bos_token }}" + made.BARE


@pytest.mark.parametrize(
    ("tokenizer", "append_eos", "expected"),
    [
        # BOS comes once, whoever adds it; a model from elsewhere that has none gets none.
        (made.make_tokenizer(template=made.BARE, adds_bos=True), False, "<s>" + TALK_OF_BARE),
        (made.make_tokenizer(template=WITH_BOS), False, "<s>" + TALK_OF_BARE),
        (made.make_tokenizer(template=WITH_BOS, adds_bos=True), False, "<s>" + TALK_OF_BARE),
        (made.make_tokenizer(template=made.BARE, adds_bos=False), False, TALK_OF_BARE),
        # So does EOS, where there is one.
        (made.make_tokenizer(template=made.BARE), True, f"<s>{TALK_OF_BARE}</s>"),
        (
            made.make_tokenizer(template=made.BARE + "{{ eos_token }}"),
            True,
            f"<s>{TALK_OF_BARE}</s>",
        ),
        (made.make_tokenizer(bos=None, eos=None, template=made.BARE), True, TALK_OF_BARE),
        # A line break at the end of a template's file does not come before it.
        (made.make_tokenizer(template="{{ messages[1]['content'] }}\n"), True, "<s>b</s>"),
        (
            made.gemma(),
            True,
            "<bos><start_of_turn>user\na<end_of_turn>\n"
            "<start_of_turn>assistant\nb<end_of_turn>\n<eos>",
        ),
    ],
)
def test_bos_and_eos_come_once(tokenizer, append_eos, expected):
    for _ in range(2):
        close_ends(tokenizer, append_eos=append_eos)
        assert text_of(tokenizer) == expected
    if append_eos and "start_of_turn" in expected:  # an answer is still to come
        asked = text_of(tokenizer, add_generation_prompt=True)
        assert asked.endswith("<start_of_turn>model\n")


@pytest.mark.parametrize("template", ["{% for %}", "{{ raise_exception('no') }}", "{{ a.b.c }}"])
def test_a_template_that_cannot_render_at_all_is_an_error_of_the_model(template):
    with pytest.raises(ModelError, match=r"cannot render a question and its answer.*chatml"):
        close_ends(made.make_tokenizer(template=template), append_eos=True)


def load(config, name):
    return load_tokenizer(config, model_name=str(name), trust_remote_code=False)


def test_a_saved_tokenizer_is_loaded_and_settled(tmp_path):
    made.make_tokenizer(pad="</s>", more=("<|pad|>",)).save_pretrained(tmp_path)
    config = TokenizerConfig(chat_template="plain", pad_token="auto")
    tokenizer = load(config, tmp_path)
    assert (tokenizer.pad_token, tokenizer.chat_template) == ("<|pad|>", PLAIN)
    elsewhere = TokenizerConfig(name=str(tmp_path), pad_token="<|pad|>")
    assert load(elsewhere, "not/there").chat_template == CHATML


def test_a_directory_without_a_tokenizer_is_an_error_that_names_the_key(tmp_path):
    with pytest.raises(ModelError, match=r"^policy.model_name=.*no tokenizer could be loaded"):
        load(TokenizerConfig(), tmp_path)
    with pytest.raises(ModelError, match=r"^policy.tokenizer.name=.*holds tokenizer.json"):
        load(TokenizerConfig(name=str(tmp_path)), "whatever")


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing_with_what_is(tmp_path):
    (tmp_path / "saves" / "step_30").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"no such directory; .*saves holds: step_30$"):
        load(TokenizerConfig(), tmp_path / "saves" / "step_250")
    with pytest.raises(ModelError, match="no such directory, nor demo/saves; a relative path"):
        load(TokenizerConfig(), "demo/saves/step_250")


def test_the_text_of_tokens_leaves_out_special_ones_and_moves_no_blank():
    tokenizer = made.chatml()
    ids = tokenizer("So , yes .", add_special_tokens=False)["input_ids"]
    assert plain_text(tokenizer, [*ids, tokenizer.eos_token_id]) == "So , yes ."
