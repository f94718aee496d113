"""The clients in docs/reward_loop.md, as they stand there, against `laurel serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
requests = pytest.importorskip("requests")

from serve_processes import KEY, Serving, null_values  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "reward_loop.md"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("served")
    with Serving(directory, "--null", "--access-log", "none").ready() as server:
        yield server.url


@pytest.fixture(scope="module")
def clients(url: str) -> dict[str, Any]:
    """What the Python blocks of the page define, with this server's address and key."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    return names | {"URL": url, "KEY": KEY}


def called(clients: dict[str, Any], name: str, *args: Any, **kwargs: Any) -> Any:
    clients[name].__globals__.update(URL=clients["URL"], KEY=clients["KEY"])
    return clients[name](*args, **kwargs)


def test_trl_and_verl_get_the_scores_of_the_server(clients: dict[str, Any]) -> None:
    expected = null_values("Why?", "Because.", "No.")
    assert called(clients, "reward", ["Why?", "Why?"], ["Because.", "No."]) == expected
    found = called(clients, "compute_score", "mine", "No.", None, {"prompt": "Why?"}, more=1)
    assert found == expected[1]


def test_openrlhf_gets_a_number_for_each_query(clients: dict[str, Any]) -> None:
    found = called(clients, "reward_func", ["Why? Because.", "Why? No."], ["Why?"] * 2, ["", ""])
    assert found["rewards"].shape == (2,)
    assert bool(found["rewards"].isfinite().all())
    assert float(found["scores"][0]) != float(found["scores"][1])


CALLS: dict[str, tuple[Any, ...]] = {
    "reward": (["Why?"], ["No."]),
    "reward_func": (["Why? No."], ["Why?"], [""]),
    "compute_score": ("mine", "No.", None, {"prompt": "Why?"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_server_says_of_an_error_is_shown(clients: dict[str, Any], name: str) -> None:
    with pytest.raises(RuntimeError, match=r"answered 401: .*this key is not one of the server's"):
        called(clients | {"KEY": "k" * 40}, name, *CALLS[name])


def test_slime_gets_a_bare_number(url: str) -> None:
    body = {"prompt": [{"role": "user", "content": "Why?"}], "response": "No.", "label": None}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = requests.post(f"{url}/remote_rm", json=body, headers=headers, timeout=60)
    assert reply.json() == null_values("Why?", "No.")[0]
