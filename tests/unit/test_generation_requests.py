"""Requests that no engine can serve."""

import pytest

from generators import request
from laurel.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ({"prompt": [3, 10]}, DataError, r"token ids \[10\], but .* 0 to 9"),
        ({"prompt": [-3]}, DataError, r"\[-3\]"),
        ({"seeds": (4, -2)}, ConfigError, "seeds must not be negative, but there is -2"),
        ({"temperature": float("nan")}, ConfigError, "temperature"),
        ({"temperature": float("inf")}, ConfigError, "temperature"),
        ({"top_p": 1.01}, ConfigError, "top_p must be above 0 and at most 1"),
        ({"top_k": -1}, ConfigError, "top_k must be at least 1"),
        ({"stop_strings": ("a", "")}, ConfigError, "empty string"),
        ({"stop_token_ids": (3, 10)}, ConfigError, r"stop_token_ids \[10\]"),
    ],
)
def test_bad_requests(bad, error, says):
    with pytest.raises(error, match=says):
        request(**{"prompt": [1, 2], **bad}).check(10)
    good = request([0, 9], seeds=(), temperature=0.0, top_k=1, top_p=1.0)
    good.check(10)
