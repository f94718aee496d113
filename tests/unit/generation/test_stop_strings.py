"""Stop strings, token by token."""

import pytest

import tiny_tokenizers
from laurel.generation.transformers.batch import StopStringWatch

TOKENIZER = tiny_tokenizers.chatml()  # a token for every byte


def watch(text, *stop_strings):
    """What follows the first stop string, and how many tokens it took."""
    stops = StopStringWatch(TOKENIZER, stop_strings)
    ids = TOKENIZER(text)["input_ids"]
    for count, token in enumerate(ids, 1):
        rest = stops.ends_with(token)
        if rest is not None:
            return rest, count
    return None, len(ids)


@pytest.mark.parametrize(
    ("text", "stops", "found"),
    [
        ("The answer: 42\n\nNext", ["\n\n"], ("", len("The answer: 42\n\n"))),
        ("aab aab", ["b a"], ("", 5)),
        ("nothing", ["no such"], (None, 7)),
        ("aaab", ["aab"], ("", 4)),  # after a false start
        ("xyxyxz", ["xyxz"], ("", 6)),
        ("für Öl", ["Ö"], ("", 7)),  # characters of several bytes
        ("für Öl", ["ü"], ("", 3)),
        ("abc", ["c", "b"], ("", 2)),
        ("a<|im_start|>b", ["ab"], ("", 3)),  # special tokens are not part of the text
        ("a<|im_end|>", ["<|im_end|>"], (None, 2)),
    ],
)
def test_a_stop_string_ends_it_where_the_text_has_it(text, stops, found):
    assert watch(text, *stops) == found


def test_a_token_may_say_more_than_the_stop_string():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "Hi": 1, "! Wh": 2, "at": 3}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    stops = StopStringWatch(PreTrainedTokenizerFast(tokenizer_object=made), ("i!", "W"))
    assert stops.ends_with(1) is None
    assert stops.ends_with(2) == " Wh"
