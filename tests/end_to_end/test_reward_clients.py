"""The clients in docs/serve.md, as they stand there, against `laurel serve`."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
requests = pytest.importorskip("requests")
httpx2 = pytest.importorskip("httpx2")

import tiny_tokenizers as made  # noqa: E402
from laurel.models.scoring import ScoringContract  # noqa: E402
from laurel.models.tokenizer import render  # noqa: E402
from laurel.types import Message  # noqa: E402
from reward_models import small_model, write_model  # noqa: E402
from serve_processes import KEY, Serving, null_values  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    allowed = ("--allow-from", "127.0.0.2")
    with Serving(directory, "--null", "--access-log", "none", *allowed).ready() as server:
        assert "open    127.0.0.2: programs on these addresses get scores" in server.said()
        yield server.url


@pytest.fixture(scope="module")
def clients(url):
    """What the Python blocks of the page define, with this server's address and key."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    return names | {"URL": url, "KEY": KEY}


def called(clients, name, *args, **kwargs):
    clients[name].__globals__.update(URL=clients["URL"], KEY=clients["KEY"])
    return clients[name](*args, **kwargs)


def test_trl_and_verl_get_the_scores_of_the_server(clients):
    expected = null_values("Why?", "Because.", "No.")
    assert called(clients, "reward", ["Why?", "Why?"], ["Because.", "No."]) == expected
    found = called(clients, "compute_score", "mine", "No.", None, {"prompt": "Why?"}, more=1)
    assert found == expected[1]


def test_openrlhf_gets_the_scores_of_the_messages(clients):
    found = called(clients, "reward_func", ["Why? Because.", "Why? No."], ["Why?"] * 2, ["", ""])
    assert found["rewards"].tolist() == pytest.approx(null_values("Why?", " Because.", " No."))
    assert found["scores"].tolist() == found["rewards"].tolist()


@pytest.mark.slow  # tests/unit/rewards/test_rendered_text.py walks all templates and paths
def test_openrlhf_gets_the_scores_of_the_messages_from_a_real_model(clients, tmp_path):
    """Its text ends with the token that the policy sampled, and lacks Qwen 3's empty thought."""
    loaded = small_model()
    tokenizer = loaded.contract.tokenizer
    tokenizer.chat_template = made.QWEN_3
    rules = loaded.contract.rules
    contract = ScoringContract.create(
        tokenizer,
        max_length=rules.max_length,
        truncation_side=rules.truncation_side,
        append_eos=True,
    )
    write_model(replace(loaded, contract=contract), tmp_path)
    asked, answers = Message("user", "Where?"), ["By the western gate.", "In bread and wine."]
    prompt = render(tokenizer, (asked,), {}, prompt=True)
    queries = [f"{prompt}{answer}{tokenizer.eos_token}" for answer in answers]
    with Serving(tmp_path, "--model", str(tmp_path), "--access-log", "none").ready() as server:
        served = clients | {"URL": server.url}
        expected = called(served, "reward", ["Where?"] * 2, answers)
        assert expected[0] != expected[1]
        for prompts in ([prompt] * 2, ["Where?"] * 2, ["", ""]):
            found = called(served, "reward_func", queries, prompts, ["", ""])
            assert found["rewards"].tolist() == pytest.approx(expected, abs=1e-6)


CALLS: dict[str, tuple[Any, ...]] = {
    "reward": (["Why?"], ["No."]),
    "reward_func": (["Why? No."], ["Why?"], [""]),
    "compute_score": ("mine", "No.", None, {"prompt": "Why?"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_server_says_of_an_error_is_shown(clients, name):
    with pytest.raises(RuntimeError, match=r"answered 401: .*this key is not one of the server's"):
        called(clients | {"KEY": "k" * 40}, name, *CALLS[name])


def test_slime_gets_a_bare_number(url):
    body = {"prompt": [{"role": "user", "content": "Why?"}], "response": "No.", "label": None}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = requests.post(f"{url}/remote_rm", json=body, headers=headers, timeout=60)
    assert reply.json() == null_values("Why?", "No.")[0]


def test_clients_without_a_key_get_scores_from_the_addresses_that_are_allowed(url):
    """As those of OpenRLHF, verl and slime ask: with no key, or with any."""
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]
    slime = {"prompt": messages[:1], "response": "No.", "label": None}
    verl = {"model": "rm", "messages": messages, "use_activation": False}
    openrlhf = {"query": ["Why? No."], "prompts": ["Why?"], "labels": [""]}
    first = null_values("Why?", "No.")[0]
    for address, status in (("127.0.0.2", 200), ("127.0.0.1", 401), ("127.0.0.3", 401)):
        transport = httpx2.HTTPTransport(local_address=address)
        with httpx2.Client(base_url=url, transport=transport, timeout=60) as client:
            asked = [client.post("/remote_rm", json=slime), client.post("/classify", json=verl)]
            asked.append(client.post("/get_reward", json=openrlhf))
            asked.append(client.post("/remote_rm", json=slime, headers=bearer("EMPTY")))
            assert [one.status_code for one in asked] == [status] * 4
            assert status == 401 or asked[0].json() == asked[3].json() == first
            assert client.post("/admin/sleep").status_code == 401


def bearer(key):
    return {"Authorization": f"Bearer {key}"}
