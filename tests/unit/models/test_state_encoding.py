import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laurel.models.checkpoint.state import UnencodableError, decode, encode

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.floats(width=32).map(np.float32)
    | st.floats().map(np.float64),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$tuple"), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


def identical(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        return a.hex() == b.hex() if isinstance(a, float) else a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(identical(x, y) for x, y in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(identical, a, b))
    return a == b


@given(plain)
def test_values_come_back_equal_in_value_and_type(value):
    text = json.dumps(encode(value, "value", {}), allow_nan=False)
    assert identical(decode(json.loads(text), {}), value)


def test_tensors_and_arrays_keep_type_and_shape():
    value = {
        "bits": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "none": np.zeros((0, 3)),
        "weights": [torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor(2)],
    }
    tensors = {}
    back = decode(json.loads(json.dumps(encode(value, "v", tensors))), tensors)
    assert set(tensors) == {"v/weights/0", "v/weights/1"}
    for name in ("bits", "none"):
        assert back[name].dtype == value[name].dtype
        assert np.array_equal(back[name], value[name])
        back[name] += 1  # writable
    assert all(map(torch.equal, back["weights"], value["weights"]))


@pytest.mark.parametrize(
    "value", [{1}, b"x", print, object(), np.array([object()]), torch.eye(2).to_sparse()]
)
def test_other_kinds_are_refused_with_their_place(value):
    with pytest.raises(UnencodableError, match=r"^state/1/key is a "):
        encode([0, {"key": value}], "state", {})
