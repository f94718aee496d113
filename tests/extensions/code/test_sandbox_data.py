"""Values that travel out of a sandbox, and whether they are the expected ones."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laurel.extensions.code.sandbox.comparison import same_output, same_value
from laurel.extensions.code.sandbox.inside import plain_data
from laurel.extensions.code.sandbox.inside.plain_data import NotPlainDataError, dumps, loads

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
)
hashable = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashable, inner)
        | st.sets(hashable)
        | st.frozensets(hashable)
        | st.lists(inner).map(deque)
    ),
    max_leaves=20,
)


# On a busy machine drawing takes long; that says nothing of what is tested.
at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def exactly_alike(a, b):
    """Types and values, NaN included."""
    return repr(a) == repr(b) or (type(a) is type(b) and a == b)


@pytest.mark.slow
@at_leisure
@given(values)
def test_what_travels_arrives(value):
    assert exactly_alike(loads(dumps(value)), value)


@pytest.mark.slow
@at_leisure
@given(values)
def test_a_value_is_the_same_as_itself(value):
    assert same_value(value, loads(dumps(value)))


@pytest.mark.parametrize(
    "value",
    [
        range(3, 9, 2),
        bytearray(b"x"),
        OrderedDict(a=1),
        Counter("aab"),
        -(2**64),
        2**53,
        "\ud800",
        float("inf"),
        float("nan"),
        -0.0,
        int,
        type(None),
    ],
)
def test_these_travel_too(value):
    assert exactly_alike(loads(dumps(value)), value)


def test_an_integer_of_more_digits_than_python_prints_travels():
    assert loads(dumps(10**5000)) == 10**5000


def test_a_dictionary_with_a_default_arrives_without_it():
    arrived = loads(dumps(defaultdict(list, a=[1])))
    assert type(arrived) is defaultdict
    assert arrived == {"a": [1]}
    assert arrived.default_factory is None


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = None


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [Liar(3), [Liar(3)], {"a": (Liar(3),)}, Point(1, 2), object(), len, type, iter([])],
)
def test_objects_do_not_travel(value):
    with pytest.raises(NotPlainDataError, match="no plain data"):
        dumps(value)


def test_nothing_of_an_object_is_called():
    class Meta(type):
        def __getattribute__(cls, name):
            raise AssertionError(name)

    class Bomb(metaclass=Meta):
        def __reduce__(self):
            raise AssertionError

        __repr__ = __str__ = __reduce__

    with pytest.raises(NotPlainDataError, match="'Bomb'"):
        dumps([Bomb()])


def test_a_value_in_itself_does_not_travel():
    inside: list[object] = []
    inside.append(inside)
    with pytest.raises(NotPlainDataError, match="deeper"):
        dumps(inside)


def test_too_many_values_do_not_travel(monkeypatch):
    monkeypatch.setattr(plain_data, "_MAX_NODES", 10)
    assert loads(dumps([0] * 9)) == [0] * 9
    with pytest.raises(NotPlainDataError, match="more than 10"):
        dumps([0] * 10)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"1.5",
        b"NaN",
        b"[]",
        b'["x"]',
        b"[1]",
        b'["i"]',
        b'["i",1]',
        b'["i","zz"]',
        b'["i","1","2"]',
        b'["f","x"]',
        b'["b","0"]',
        b'["s",["l"]]',
        b'["d",[1]]',
        b'["d",1]',
        b'["q","1","0"]',
        b'["r","0","1","0"]',
        b'["D","x"]',
        b'["f",null]',
        b"[" * 100_000,
        b'["l",' * 200 + b"1" + b"]" * 200,
        b"1" * 5000,
        b"\xff",
        b'["D","sNaN"]',
        b'["D","' + b"1" * 20_000 + b'"]',
        b'{"a":1}',
        b"[[1]]",
        b'["k",[["l"],1]]',
    ],
)
def test_no_plain_data(text):
    with pytest.raises(NotPlainDataError):
        loads(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@at_leisure
@given(json_values)
def test_any_json_is_data_or_refused(read):
    try:
        value = loads(json.dumps(read).encode())
    except NotPlainDataError:
        return
    assert same_value(loads(dumps(value)), value)


def test_keys_of_one_hash_are_refused():
    prime = 2**61 - 1
    alike = ["s", *[["i", format(n * prime, "x")] for n in range(1, 200)]]
    with pytest.raises(NotPlainDataError, match="one hash"):
        loads(json.dumps(alike).encode())


DIFFERENT_TYPES = [
    (1, True),
    (0, False),
    (1, 1.0),
    ([1], (1,)),
    ({1}, frozenset({1})),
    ({1: 2}, {True: 2}),
    ({1}, {True}),
    ([1, 2], [1, 2.0]),
    ({"a": [1]}, {"a": [True]}),
    ({(1, 2)}, {(1, 2.0)}),
    (1, Fraction(1)),
    (b"x", bytearray(b"x")),
    ({"a": 1}, OrderedDict(a=1)),
]


@pytest.mark.parametrize(("expected", "given_"), DIFFERENT_TYPES)
def test_types_count(expected, given_):
    assert expected == given_ or type(expected) is not type(given_)
    assert not same_value(expected, given_)
    assert not same_value(given_, expected)


@pytest.mark.parametrize(
    ("expected", "given_", "same"),
    [
        (1, 1.0, True),
        ([1, 2], (1, 2), True),
        (1, True, False),
        (True, 1, False),
        ([1, [2]], (1.0, (2,)), True),
        ({"a": 1}, {"a": 1.0}, True),
        ("1", 1, False),
        ([1], [1, 1], False),
        ({1: 0}, {1: 0, 2: 0}, False),
        (None, 0, False),
        (1.0, "x", False),
        ([1, 2], {1, 2}, False),
        ({"a": 1}, [("a", 1)], False),
    ],
)
def test_without_strict_types(expected, given_, same):
    assert same_value(expected, given_, strict_types=False) is same


def test_numbers_within_a_tolerance():
    assert not same_value(0.3, 0.1 + 0.2)
    assert same_value(0.3, 0.1 + 0.2, float_tolerance=1e-9)
    assert not same_value(0.3, 0.31, float_tolerance=1e-9)
    assert same_value([1.0, {"a": 2.0}], [1.0 + 1e-12, {"a": 2.0}], float_tolerance=1e-9)
    assert not same_value(3, 4, float_tolerance=10.0)
    assert same_value(math.nan, math.nan)
    assert not same_value(math.nan, 0.0, float_tolerance=1.0)
    assert same_value([complex(1, math.nan)], [complex(1, math.nan)])
    assert same_value(math.inf, math.inf)
    assert not same_value(1.0, 10**400, strict_types=False, float_tolerance=1.0)


@pytest.mark.parametrize(
    ("expected", "given_", "same"),
    [
        ("1 2\n", "1 2", True),
        ("1 2\n", "1 2  \n\n", True),
        ("a\nb", "a\r\nb\n", True),
        ("1 2", "1  2", False),
        ("1\n2", "1\n\n2", False),
        ("", "\n", True),
        ("", "x", False),
        (" 1", "1", False),
        ("1.0", "1", False),
    ],
)
def test_outputs(expected, given_, same):
    assert same_output(expected, given_) is same


def test_outputs_within_a_tolerance():
    assert same_output("x 0.333333\n1", "x 0.3333331\n1.0", float_tolerance=1e-5)
    assert not same_output("x 0.3", "x 0.4", float_tolerance=1e-5)
    assert not same_output("x 0.3", "y 0.3", float_tolerance=1e-5)
    assert not same_output("1", "1 1", float_tolerance=1e-5)
    assert not same_output("1", "1\n1", float_tolerance=1e-5)
