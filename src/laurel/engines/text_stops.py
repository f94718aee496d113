"""Where a completion ends because of what it says, watched token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class StopStringWatch:
    """The text of one completion as it grows, until a stop string is in it.

    The text is without special tokens, as in `Generated`. A stop string may begin in one token and
    end in another, and inside of a token.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str]) -> None:
        """Watch from the first token on.

        Args:
            tokenizer: A fast one of transformers.
            stop_strings: None of them empty.
        """
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop_strings = tuple(stop_strings)
        self._longest = max(map(len, stop_strings))
        self._tail = ""

    def ends_with(self, token: int) -> str | None:
        """Add a token.

        Returns:
            What the text says after the stop string that the token completes (the one that ends
            first); None while there is none.
        """
        new = self._stream.step(self._tokenizer, token)
        if not new:  # the token ends inside of a character
            return None
        text = self._tail + new
        ends = [start + len(stop) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        self._tail = text[-self._longest :]
        return text[min(ends) :] if ends else None
