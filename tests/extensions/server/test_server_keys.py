"""Who may ask a reward server what: keys, their roles, and what only its own machine may."""

import asyncio
import time

import pytest

from laurel.extensions.server import keys as server_keys
from laurel.extensions.server.keys import private_network
from served_scores import KEY, Running, asked_without_network, described, error

OPEN = ("/health", "/docs", "/openapi.json")
ADMIN_KEY = "another-key-" + "k" * 32
ADMIN_PATHS = [path for path in described()["paths"] if path.startswith("/admin/")]


@pytest.fixture(autouse=True)
def unslowed(monkeypatch):
    """Wrong keys of many tests come from one address."""
    monkeypatch.setattr(server_keys, "_PAUSE", 0.0)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_every_route_but_three_needs_the_key(plain):
    routes = [(path, method) for path, found in described()["paths"].items() for method in found]
    routes += [("/docs", "get"), ("/openapi.json", "get"), ("/nowhere", "get")]
    assert len(routes) > 12
    for path, method in routes:
        for key in (None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer", KEY):
            headers = {"Authorization": key} if key else {}
            plain.client.headers.pop("authorization", None)
            response = plain.client.request(method, f"{path}?api_key={KEY}", headers=headers)
            assert response.status_code == (200 if path in OPEN else 401), (path, key)
            if path not in OPEN:
                assert response.headers["www-authenticate"] == "Bearer"
                assert KEY not in response.text
    plain.client.headers["authorization"] = f"Bearer {KEY}"
    assert plain.client.get("/ready").status_code == 200


def test_addresses_that_need_no_key_are_those_of_the_connection():
    """No header can make one; what tells of a proxy or a page takes it away."""
    score = {"groups": [{"id": "g", "prompt": "q", "completions": ["a"]}]}
    gate = {"allow_from": (private_network("127.0.0.0/8"),)}
    with Running(gate=gate) as running:
        running.client.headers.pop("authorization")
        assert running.post("/v1/score", score).status_code == 200
        assert running.post("/v1/score", score, bearer("EMPTY")).status_code == 200
        assert running.client.get("/ready").status_code == 200
        for name in ("X-Forwarded-For", "X-Real-IP", "Forwarded", "Via", "Origin"):
            forwarded = running.post("/v1/score", score, {name: "127.0.0.1"})
            assert error(forwarded) == (401, "key"), name
            assert running.post("/v1/score", score, {name: "x", **bearer(KEY)}).status_code == 200
        for path in ADMIN_PATHS:
            assert error(running.post(path, {"model": "x"})) == (401, "key")
    with Running(gate={"allow_from": (private_network("10.0.0.0/8"),)}) as running:
        running.client.headers.pop("authorization")
        for headers in ({}, {"X-Forwarded-For": "10.0.0.1"}, {"X-Real-IP": "10.0.0.1"}):
            assert error(running.post("/v1/score", score, headers)) == (401, "key")


@pytest.mark.parametrize(
    ("network", "address", "is_open"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "::ffff:10.1.2.3", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.0/8", "::ffff:11.0.0.1", False),
        ("10.0.0.0/8", "", False),
        ("192.168.7.0/24", "192.168.8.1", False),
        ("192.168.7.9", "192.168.7.9", True),
        ("fd00::/8", "fd12::1", True),
        ("fd00::/8", "10.1.2.3", False),
    ],
)
def test_which_addresses_a_range_has(network, address, is_open):
    opened = server_keys.OpenAddresses([private_network(network)])
    assert opened.opens(address, ()) == is_open


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0/0", "::/0", "8.8.8.8", "10.0.0.0/7", "172.0.0.0/8", "100.64.0.0/10", "2000::/3"],
)
def test_no_public_address_may_do_without_a_key(text):
    with pytest.raises(ValueError, match="only loopback and private addresses"):
        private_network(text)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "a key is needed: Authorization: Bearer KEY"),
        (f"Basic {KEY}", "a key is needed: Authorization: Bearer KEY"),
        ("Bearer wrong", "this key is not one of the server's"),
        (f"Bearer {KEY[:-1]}", "this key is not one of the server's"),
    ],
)
def test_who_is_refused_is_told_where_the_key_is_and_nothing_of_it(plain, said, told):
    response = plain.client.get("/ready", headers={"Authorization": said})
    message = response.json()["error"]["message"]
    assert message.startswith(told)
    assert "printed at its start say where" in message
    assert error(response) == (401, "key")
    assert KEY[:-1] not in message


def test_the_time_of_a_comparison_does_not_tell_how_long_the_key_is(plain, monkeypatch):
    def compare(one, other):
        lengths.append((len(one), len(other)))
        return False

    lengths = []
    monkeypatch.setattr(server_keys.hmac, "compare_digest", compare)
    for key in ("x", KEY, 100 * "x"):
        assert plain.client.get("/ready", headers=bearer(key)).status_code == 401
    assert lengths == [(32, 32)] * 3


def test_an_admin_key_is_for_everything_and_the_api_key_then_for_scores_alone():
    assert len(ADMIN_PATHS) == 3
    with Running(gate={"admin_key": ADMIN_KEY}) as it:
        for path in ADMIN_PATHS:
            assert error(it.post(path, {})) == (403, "admin")
            assert error(it.post(path, {}, bearer("x"))) == (401, "key")
        assert it.score("a").status_code == it.client.get("/metrics").status_code == 200
        it.client.headers["authorization"] = f"Bearer {ADMIN_KEY}"
        assert it.score("a").status_code == 200
        assert it.client.post("/admin/sleep").json()["state"] == "asleep"
        assert it.client.post("/admin/wake").json()["state"] == "ready"


def test_an_admin_key_is_needed_where_scores_need_none():
    with Running(gate={"api_key": None, "admin_key": ADMIN_KEY}) as it:
        del it.client.headers["authorization"]
        assert it.score("a").status_code == 200
        assert error(it.client.post("/admin/sleep")) == (403, "admin")
        assert it.client.post("/admin/sleep", headers=bearer(ADMIN_KEY)).status_code == 200


def test_who_keeps_trying_keys_is_slowed_and_nobody_else(monkeypatch):
    now = 0.0
    wrong = server_keys.WrongKeys(lambda: now)
    monkeypatch.setattr(server_keys, "_PAUSE", 1.0)
    assert [wrong.pause("10.0.0.1") for _ in range(12)] == [0.0] * 10 + [1.0] * 2
    assert wrong.pause("10.0.0.2") == 0.0
    now = 59.0
    assert wrong.pause("10.0.0.1") == 1.0
    now = 61.0
    assert wrong.pause("10.0.0.1") == 0.0
    for number in range(3000):
        wrong.pause(f"10.1.{number // 256}.{number % 256}")
    assert len(wrong._tried) <= 1024


def test_only_the_answer_to_a_wrong_key_is_slow_and_still_says_why(monkeypatch):
    monkeypatch.setattr(server_keys, "_PAUSE", 0.2)
    with Running() as it:
        for _ in range(10):
            assert error(it.client.get("/ready", headers=bearer("x"))) == (401, "key")
        began = time.monotonic()
        assert error(it.client.get("/ready", headers=bearer("x"))) == (401, "key")
        assert time.monotonic() - began >= 0.2
        monkeypatch.setattr(server_keys, "_PAUSE", 3600.0)
        assert it.score("a").status_code == 200


def asked_from(client, method, path, *, key=KEY):
    """Status and body of a request that comes from an address, without a network."""

    it = Running()
    try:
        return asyncio.run(asked_without_network(it.app, method, path, client=client, key=key))
    finally:
        it.run._listener.close()


@pytest.mark.parametrize("path", ADMIN_PATHS)
def test_only_this_machine_may_change_anything(path):
    for client in ("10.0.0.1", "not an address", ""):
        assert asked_from(client, "POST", path)[0] == 403
    assert asked_from("127.0.0.1", "POST", path)[0] in (400, 409, 503)  # nothing is loaded
    assert asked_from("::1", "POST", path)[0] in (400, 409, 503)


def test_the_description_is_open_on_this_machine_alone():
    for path in ("/docs", "/openapi.json"):
        assert asked_from("127.0.0.1", "GET", path, key="wrong")[0] == 200
        assert asked_from("10.0.0.1", "GET", path, key="wrong")[0] == 401
        assert asked_from("10.0.0.1", "GET", path)[0] == 200
    assert asked_from("10.0.0.1", "GET", "/health", key="wrong") == (200, b"{}")


def test_a_forwarded_address_is_not_believed(plain):
    forged = {"X-Forwarded-For": "10.9.8.7", "Forwarded": "for=10.9.8.7"}
    assert plain.client.post("/admin/wake", headers=forged).status_code == 200
