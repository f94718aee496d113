"""Stop strings, token by token."""

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


def test_a_stop_string_spans_tokens():
    assert watch("The answer: 42\n\nNext", "\n\n") == ("", len("The answer: 42\n\n"))
    assert watch("aab aab", "b a") == ("", 5)
    assert watch("nothing", "no such") == (None, 7)


def test_it_is_found_after_a_false_start():
    assert watch("aaab", "aab") == ("", 4)
    assert watch("xyxyxz", "xyxz") == ("", 6)


def test_characters_of_several_bytes():
    assert watch("für Öl", "Ö") == ("", 7)
    assert watch("für Öl", "ü") == ("", 3)


def test_the_first_of_several_ends_it():
    assert watch("abc", "c", "b") == ("", 2)


def test_special_tokens_are_not_part_of_the_text():
    assert watch("a<|im_start|>b", "ab") == ("", 3)
    assert watch("a<|im_end|>", "<|im_end|>")[0] is None


def test_a_token_may_say_more_than_the_stop_string():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "Hi": 1, "! Wh": 2, "at": 3}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    stops = StopStringWatch(PreTrainedTokenizerFast(tokenizer_object=made), ("i!", "W"))
    assert stops.ends_with(1) is None
    assert stops.ends_with(2) == " Wh"
