"""Which benchmark a file is of."""

import pytest

from chat_rows import assistant, user
from laurel.data.benchmarks import benchmark_of

PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
SAID = [user("q"), assistant("a")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**PAIR, "subset": "hep-go"}, "reward-bench"),
        (
            {"prompt": SAID[:1], "chosen": SAID[1:], "rejected": SAID[1:], "subset": "x"},
            "reward-bench",
        ),
        ({**PAIR, "chosen": ["a"], "rejected": ["b"], "subset": "Math"}, "reward-bench-2"),
        ({**PAIR, "chosen": ["a"] * 3, "rejected": ["b"] * 3, "domain": "chat"}, "rm-bench"),
        ({**PAIR, "chosen": ["a"] * 3, "rejected": ["b"] * 3, "subset": "alpacaeval"}, "rm-bench"),
        ({**PAIR, "chosen": ["a"] * 3, "rejected": ["b"] * 3, "subset": "Ties"}, "reward-bench-2"),
        (
            {**PAIR, "chosen": ["a"] * 3, "rejected": ["b"] * 3, "subset": "x", "num_correct": 3},
            "reward-bench-2",
        ),
        ({"question": "q", "response_A": "a", "response_B": "b", "label": "A>B"}, "judge-bench"),
        ({"prompt": "q", "completions": ["a"], "passed": [True]}, "best-of-n"),
        ({**PAIR, "chosen": ["a"], "rejected": ["b"]}, "best-of-n"),
        ({"question": "q", "answer": "420", "responses": ["a"], "correct": [True]}, "best-of-n"),
        ({"question": "q", "answer": "420", "responses": ["a"]}, None),
        (PAIR, "pairs"),
        ({"chosen": SAID, "rejected": SAID}, "pairs"),
        ({"context": SAID[:1], "completions": [{"rank": 0, "completion": SAID[1:]}]}, "pairs"),
        ({"text": "a"}, None),
        ({"prompt": "q", "completions": ["a"], "labels": [True]}, None),
    ],
)
def test_a_row_tells_its_benchmark(row, expected):
    assert benchmark_of(row) == expected
