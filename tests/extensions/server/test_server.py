import asyncio
import base64
import contextlib
import socket
import struct
import threading
from dataclasses import replace

import httpx2
import pytest

from laurel.errors import ModelError
from laurel.extensions.server import run as server_run
from laurel.extensions.server.app import RequestLimits
from laurel.extensions.server.foreign import PAIR_KEYS, sigmoid
from laurel.extensions.server.service import AnswerMemory, RefusedRequestError
from laurel.extensions.server.service import ScoringAnswer as Told
from laurel.types import Message, group_of
from reward_servers import wait_until
from scripted_backend import ScriptedBackend, holds, null_scores
from served_scores import Running, described, error, raw_request, served


def values(*answers, prompt="q"):
    group = group_of((Message("user", prompt),), answers, group_id="g")
    return [score.value for score in null_scores(group)]


def of_rows(*rows):
    scores = [score for row in rows for score in null_rendered(row)]
    return [score.value for score in scores]


def null_rendered(row):
    backend = ScriptedBackend()
    return backend.score_tokens([backend.prepare_rendered(row)])[0]


def test_our_own(plain):
    response = plain.score("a", "b", "a", request_id="r", model_version="1")
    assert response.status_code == 200
    reply = response.json()
    (group,) = reply["groups"]
    assert group["id"] == "g"
    assert [score["value"] for score in group["scores"]] == values("a", "b", "a")
    assert not any("parts" in score for score in group["scores"]), "where there are none"
    assert (reply["model"], reply["model_version"], reply["request_id"]) == ("model 1", "1", "r")
    assert response.headers["x-model-version"] == "1"


@pytest.mark.parametrize(
    ("path", "asked", "key"),
    [
        ("/v1/score", {"groups": []}, "groups"),
        ("/classify", {"input": []}, "data"),
        ("/classify", {"text": []}, None),
        ("/classify", {"input_ids": []}, None),
        ("/v1/embeddings", {"input": []}, "data"),
        ("/pooling", {"input": []}, "data"),
        ("/score", {"queries": "q", "documents": []}, "data"),
        ("/get_reward", {"query": [], "prompts": [], "labels": []}, "rewards"),
    ],
)
def test_a_list_of_nothing_is_answered_with_a_list_of_nothing(plain, path, asked, key):
    """As `Scorer` promises: clients that spread a batch over servers have shares of none."""
    response = plain.post(path, asked)
    assert response.status_code == 200
    assert response.headers["x-model-version"] == "1"
    reply = response.json()
    assert (reply if key is None else reply[key]) == []


def test_vllm(plain):
    raw = plain.post("/classify", {"input": ["a text", "another"], "use_activation": False})
    assert [one["probs"][0] for one in raw.json()["data"]] == of_rows("a text", "another")
    (data,) = plain.post("/classify", {"input": [7, 8, 9]}).json()["data"]
    assert data["probs"] == [sigmoid(of_rows([7, 8, 9])[0])]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    said = plain.post("/classify", {"messages": messages, "softmax": False}).json()
    assert said["data"][0]["probs"] == values("a")
    assert said["usage"]["total_tokens"] > 0


def test_sglang(plain):
    one = plain.post("/classify", {"text": "a text"}).json()
    assert one["embedding"] == of_rows("a text")
    many = plain.post("/classify", {"input_ids": [[7, 8], [9]]}).json()
    assert [entry["embedding"][0] for entry in many] == of_rows([7, 8], [9])
    embedded = plain.post("/v1/embeddings", {"model": "m", "input": ["a", "b"]}).json()
    assert [entry["embedding"][0] for entry in embedded["data"]] == of_rows("a", "b")


def test_openai_asks_for_base64(plain):
    """What its client decodes: float32, little-endian."""
    asked = {"model": "m", "input": ["a", "b"], "encoding_format": "base64"}
    data = plain.post("/v1/embeddings", asked).json()["data"]
    found = [struct.unpack("<f", base64.b64decode(one["embedding"]))[0] for one in data]
    assert found == pytest.approx(of_rows("a", "b"), rel=1e-7)
    for odd in ({"encoding_format": "bytes"}, {"dimensions": 8}, {"embed_dtype": "float16"}):
        assert error(plain.post("/v1/embeddings", asked | odd)) == (400, "request")


def test_a_score_beyond_float32_is_no_base64():
    class Vast(ScriptedBackend):
        def score_tokens(self, tokens):
            return [
                tuple(replace(score, value=1e300) for score in scores_G)
                for scores_G in super().score_tokens(tokens)
            ]

    with Running(Vast()) as running:
        assert running.post("/v1/embeddings", {"input": ["a"]}).status_code == 200
        asked = {"input": ["a"], "encoding_format": "base64"}
        assert error(running.post("/v1/embeddings", asked)) == (422, "failed")


def test_vllm_pooling(plain):
    raw = {"use_activation": False}
    reply = plain.post("/pooling", {"input": ["a text", "another"], "task": "classify", **raw})
    assert [one["data"] for one in reply.json()["data"]] == [
        [value] for value in of_rows("a text", "another")
    ]
    assert reply.json()["data"][0]["object"] == "pooling"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    said = plain.post("/pooling", {"messages": messages, "encoding_format": "base64"}).json()
    (squashed,) = struct.unpack("<f", base64.b64decode(said["data"][0]["data"]))
    assert squashed == pytest.approx(sigmoid(values("a")[0]), rel=1e-6)
    for odd in ({}, {"input": "a", "messages": messages}, {"input": "a", "task": "embed"}):
        assert error(plain.post("/pooling", odd)) == (400, "request")


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("keys", PAIR_KEYS)
def test_vllm_score(plain, path, keys):
    def ask(first, second, **more):
        return plain.post(path, {**dict(zip(keys, (first, second), strict=True)), **more})

    reply = ask("q", ["a", "b"], use_activation=False, model="m").json()
    assert [one["score"] for one in reply["data"]] == values("a", "b")
    assert (reply["object"], reply["data"][1]["index"]) == ("list", 1)
    assert reply["usage"]["total_tokens"] > 0
    reply = ask(["q", "p"], ["a", "b"], use_activation=False).json()
    assert [one["score"] for one in reply["data"]] == values("a") + values("b", prompt="p")
    (one,) = ask("q", "a").json()["data"]
    assert one["score"] == sigmoid(values("a")[0])
    assert error(ask(["q", "p"], ["a"])) == (422, "count")
    assert error(ask("q", [{"content": []}])) == (400, "request")
    assert error(plain.post(path, {keys[0]: "q"})) == (400, "request")
    both = plain.post("/v1/score", {"groups": [], keys[0]: "q", keys[1]: "a"})
    assert error(both) == (400, "request")
    unknown = f"the request has an unknown key {keys[0]!r}; its keys are: groups"
    assert both.json()["error"]["message"].startswith(unknown)


def test_openrlhf(plain):
    asked = {"query": ["a", "b"], "prompts": ["", ""], "labels": ["", ""]}
    reply = plain.post("/get_reward", asked).json()
    assert reply["rewards"] == reply["scores"] == of_rows("a", "b")


def test_slime(plain):
    asked = {"prompt": "q", "response": "a", "label": None}
    assert plain.post("/remote_rm", asked).json() == values("a")[0]
    rendered = plain.post("/remote_rm?rendered=1", asked).json()
    assert rendered == of_rows("qa")[0]


def test_who_looks_after_it_finds_out(plain):
    assert plain.client.get("/health").json() == {}
    ready = plain.client.get("/ready")
    assert ready.json() == {"state": "ready", "model": "model 1", "model_version": "1"}
    assert plain.client.get("/v1/models").json()["data"][0]["version"] == "1"
    plain.score("a")
    metrics = plain.client.get("/metrics")
    assert 'laurel_requests_total{path="/v1/score",status="200"}' in metrics.text
    assert "laurel_scorer_computed_total" in metrics.text
    paths = plain.client.get("/openapi.json").json()["paths"]
    assert {"/v1/score", "/classify", "/admin/load", "/metrics"} <= paths.keys()
    assert error(plain.client.get("/nowhere")) == (404, "path")
    assert error(plain.client.get("/v1/score")) == (405, "method")


def test_a_wrong_path_and_a_wrong_method_are_told_which_there_are(plain):
    def said(answer):
        return answer.json()["error"]["message"]

    absent = said(plain.client.get("/v1/scores" + "x" * 500))
    assert absent.startswith("there is no /v1/scoresxxx")
    assert len(absent) < 500
    for path in ("POST /v1/score, ", "POST /classify, ", "GET /ready, ", "POST /admin/load"):
        assert path in absent
    assert absent.endswith(". /docs describes them")
    answer = plain.client.get("/v1/score")
    assert said(answer) == "/v1/score takes POST, not GET. /docs describes them"
    assert answer.headers["allow"] == "POST"


def test_the_page_of_the_description_needs_no_key_and_says_what_programs_read(plain):
    page = httpx2.get(f"{plain.url}/docs", trust_env=False)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "/openapi.json" in page.text
    assert "model 1" not in page.text
    description = httpx2.get(f"{plain.url}/openapi.json", trust_env=False).json()
    assert description == described()
    assert "model 1" not in str(description)


def test_each_body_is_described_once_and_by_its_own_model():
    description = described()
    models = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        for method, about in operations.items():
            asks = about.get("requestBody", {}).get("content", {})
            assert asks.keys() == ({"application/json"} if asks else set())
            assert (path == "/health") == ("security" not in about), (method, path)
            for status in {"401", "403"} | ({"400", "413", "503"} if asks else set()):
                told = about["responses"][status]["content"]["application/json"]["schema"]
                assert told == {"$ref": "#/components/schemas/ErrorBody"} or status == "503"
    assert {"ScoreRequest", "ScoreReply", "ClassifyRequest", "PairsRequest"} <= models.keys()
    assert "HTTPBearer" not in str(described(needs_key=False))


def test_a_bad_item_never_fails_its_batch():
    with Running(ScriptedBackend(fails=holds("poison")), limits=RequestLimits(characters=99)) as it:
        response = it.score("a", "poison", "b" * 100, "\ud800", "c")
        scores = response.json()["groups"][0]["scores"]
        assert [score["value"] for score in scores] == [
            values("a")[0],
            None,
            None,
            None,
            values("c")[0],
        ]
        assert [score["failure"] and score["failure"][:9] for score in scores] == [
            None,
            "the model",
            "4xx: 101 ",
            "it contai",
            None,
        ]
        # The others have no place for a failure, so they are told.
        assert error(it.post("/get_reward", {"query": ["a", "poison"]})) == (422, "failed")
        assert error(it.post("/classify", {"input": [""]})) == (422, "failed")
        metrics = it.client.get("/metrics").text
        assert "laurel_completions_failed_total 5.0" in metrics


def test_a_full_queue():
    backend = ScriptedBackend()
    with Running(backend, batcher={"max_waiting": 2}) as it:
        backend.may_go.clear()
        thread, found = it.in_thread(lambda: it.score("a", "b"))
        assert backend.begun.acquire(timeout=20)
        response = it.score("c")
        assert error(response) == (429, "busy")
        assert int(response.headers["retry-after"]) >= 1
        backend.may_go.set()
        thread.join()
        assert found[0].status_code == 200


def test_an_answer_that_does_not_come():
    backend = ScriptedBackend()
    with Running(backend, request_seconds=0.05) as it:
        backend.may_go.clear()
        response = it.score("a")
        assert error(response) == (503, "timeout")
        backend.may_go.set()


def test_a_model_that_fails_at_everything():
    with Running() as it:
        assert it.score("what it could score").status_code == 200
        it.backend.fails = lambda _: True
        assert error(it.score(*map(str, range(100)))) == (503, "broken")
        ready = it.client.get("/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "broken")
        it.backend.fails = lambda _: False
        assert it.score("a").status_code == 200
        assert it.client.get("/ready").status_code == 200


def test_a_client_that_leaves_takes_its_request_along():
    backend = ScriptedBackend()
    with Running(backend) as it:
        backend.may_go.clear()
        thread, found = it.in_thread(lambda: it.score("first"))
        assert backend.begun.acquire(timeout=20)
        body = b'{"groups":[{"id":"g","prompt":"q","completions":["leaves"]}]}'
        with socket.create_connection(("127.0.0.1", it.port)) as connection:
            connection.sendall(raw_request("/v1/score", body))
            scorer = it.service.served.scorer
            wait_until(lambda: scorer.stats().requests == 2)
        wait_until(lambda: scorer.stats().cancelled == 1)
        backend.may_go.set()
        thread.join()
        assert found[0].status_code == 200
        wait_until(lambda: 'status="499"' in it.client.get("/metrics").text)
    assert not any(holds("leaves")(batch) for batch in backend.batches)


def test_a_request_that_is_repeated_is_computed_once():
    with Running(batcher={"cache_entries": 0}) as it:
        first = it.score("a", "b", request_id="1")
        again = it.score("a", "b", request_id="1")
        assert first.content == again.content
        assert again.headers["x-model-version"] == "1"
        assert it.backend.computed == 2
        assert error(it.score("a", "c", request_id="1")) == (422, "request_id")
        named = {"X-Request-Id": "2"}
        one = it.post("/get_reward", {"query": ["a"]}, headers=named)
        assert one.headers["x-request-id"] == "2"
        assert it.post("/get_reward", {"query": ["a"]}, headers=named).content == one.content
        assert it.backend.computed == 3
        assert error(it.post("/classify", {"text": ["a"]}, headers=named)) == (422, "request_id")


def test_a_request_that_is_repeated_while_it_is_computed_waits_for_the_same():
    backend = ScriptedBackend()
    with Running(backend) as it:
        backend.may_go.clear()
        asking = [it.in_thread(lambda: it.score("a", request_id="1")) for _ in range(3)]
        assert backend.begun.acquire(timeout=20)
        wait_until(lambda: len(it.client.get("/metrics").text) > 0)
        backend.may_go.set()
        for thread, _ in asking:
            thread.join()
        assert len({found[0].content for _, found in asking}) == 1
        assert backend.computed == 1


def test_what_failed_is_not_remembered():
    async def check():
        memory = AnswerMemory(max_entries=2)
        calls = []

        async def make(body=b"x"):
            calls.append(body)
            if len(calls) == 1:
                raise RefusedRequestError(503, "busy", "later")
            return Told(body)

        with pytest.raises(RefusedRequestError):
            await memory.once("1", b"d", make)
        assert (await memory.once("1", b"d", make)).body == b"x"
        await memory.once("2", b"d", make)
        await memory.once("3", b"d", make)
        await memory.once("1", b"d", make)
        assert len(calls) == 5  # the first had been forgotten

        started = asyncio.Event()

        async def slow():
            started.set()
            await asyncio.Event().wait()

        waiting = asyncio.create_task(memory.once("4", b"d", slow))
        await started.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (await memory.once("4", b"d", make)).body == b"x"

    asyncio.run(check())


def test_it_refuses_until_the_model_is_there():
    loads = threading.Event()
    with Running(loads=loads) as it:
        wait_until(lambda: it.client.get("/health").status_code == 200)
        assert error(it.score("a")) == (503, "loading")
        ready = it.client.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"state": "loading"})
        assert it.client.get("/v1/models").json()["data"] == []
        assert error(it.client.post("/admin/sleep")) == (503, "loading")
        loads.set()
        wait_until(lambda: it.client.get("/ready").status_code == 200)
        assert it.score("a").status_code == 200


def test_sleep_finishes_what_was_accepted_and_refuses_the_rest():
    backend = ScriptedBackend()
    with Running(backend) as it:
        backend.may_go.clear()
        asking, scored = it.in_thread(lambda: it.score("a"))
        assert backend.begun.acquire(timeout=20)
        sleeping, slept = it.in_thread(lambda: it.client.post("/admin/sleep"))
        wait_until(lambda: it.client.get("/ready").json()["state"] == "asleep")
        response = it.score("b")
        assert error(response) == (503, "asleep")
        assert response.headers["retry-after"]
        assert error(it.client.post("/admin/wake")) == (409, "changing")
        assert backend.said == []
        backend.may_go.set()
        asking.join()
        sleeping.join()
        assert scored[0].status_code == 200
        assert slept[0].json()["state"] == "asleep"
        assert backend.said == ["sleep"]
        assert it.client.post("/admin/sleep").json()["state"] == "asleep"
        assert error(it.post("/admin/load", {"model": "x"}))[0] == 409
        assert it.client.post("/admin/wake").json()["state"] == "ready"
        assert it.score("b").status_code == 200
    assert backend.said == ["sleep", "wake", "close"]


def test_another_model_answers_once_it_has_proven_itself():
    proven = threading.Event()
    new = ScriptedBackend()

    async def open_model(name):
        await asyncio.to_thread(proven.wait, 20)
        if name == "bad":
            raise ModelError("a golden conversation scores 1 here and scored 2 when it was saved")
        return served(new, version="2")

    old = ScriptedBackend()
    with Running(old, open_model=open_model) as it:
        old.may_go.clear()
        asking, scored = it.in_thread(lambda: it.score("under way"))
        assert old.begun.acquire(timeout=20)
        loading, loaded = it.in_thread(lambda: it.post("/admin/load", {"model": "good"}))
        old.may_go.set()
        asking.join()
        assert it.score("meanwhile").json()["model_version"] == "1"
        proven.set()
        loading.join()
        assert loaded[0].json() == {"state": "ready", "model": "model 2", "model_version": "2"}
        assert scored[0].json()["model_version"] == "1"
        assert it.score("a").json()["model_version"] == "2"
        assert old.said == ["close"]
        assert error(it.score("a", model_version="1")) == (409, "version")
        response = it.post("/admin/load", {"model": "bad"})
        assert error(response) == (422, "model")
        assert "golden" in response.json()["error"]["message"]
        assert it.score("b").json()["model_version"] == "2"
        assert error(it.post("/admin/load", {})) == (400, "request")


def test_it_finishes_what_was_accepted_when_it_is_told_to_end():
    backend = ScriptedBackend()
    with Running(backend) as it:
        backend.may_go.clear()
        asking, scored = it.in_thread(lambda: it.score("a"))
        assert backend.begun.acquire(timeout=20)
        assert it.client.get("/ready").status_code == 200
        it.run.stop()
        wait_until(lambda: it.client.get("/ready").json()["state"] == "draining")
        assert error(it.score("b")) == (503, "draining")
        backend.may_go.set()
        asking.join()
        assert scored[0].status_code == 200
        it._thread.join(20)
        assert it.run.unanswered == 0
        it.run.stop = lambda: None


def once(running):
    """Have it end. When it is left it is told again, which would end this process."""
    running.run.stop()
    running.run.stop = lambda: None


def all_of(connection):
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def test_what_comes_on_connections_that_were_open_at_the_end_is_answered(monkeypatch):
    """They were reset, and the server said that everything that was accepted was answered."""
    monkeypatch.setattr(server_run, "_SILENT_SECONDS", 1.0)
    body = b'{"groups": [{"id": "g", "prompt": "q", "completions": ["a"]}]}'
    with Running() as it, contextlib.ExitStack() as opened:
        connections = [
            opened.enter_context(socket.create_connection(("127.0.0.1", it.port), timeout=20))
            for _ in range(200)
        ]
        early, late, silent = connections[:50], connections[50:190], connections[190:]
        begun, late = late[0], late[1:]
        begun.sendall(b"POST /v1/sc")
        for one in early:
            one.sendall(raw_request("/v1/score", body))
        once(it)
        wait_until(lambda: it.service.state == "draining")
        for one in late:
            one.sendall(raw_request("/v1/score", body))
        begun.sendall(b"ore HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        told = [all_of(one) for one in (*early, *late)]
        assert {one.split(b"\r\n")[0] for one in told} <= {
            b"HTTP/1.1 200 OK",
            b"HTTP/1.1 503 Service Unavailable",
        }
        assert told[-1].startswith(b"HTTP/1.1 503")
        assert b"connection: close" in told[-1]
        assert all_of(begun).startswith(b"HTTP/1.1 401")
        assert [all_of(one) for one in silent] == [b""] * 10
    assert (it.run.unanswered, it.run.silent) == (0, 10)


def test_what_does_not_come_whole_before_the_end_is_counted():
    with Running(drain_seconds=0.3) as it:
        connection = socket.create_connection(("127.0.0.1", it.port), timeout=20)
        with connection:
            connection.sendall(b"POST /v1/sc")
            assert it.client.get("/health").status_code == 200
            once(it)
            assert connection.recv(100) == b""
    assert (it.run.unanswered, it.run.silent) == (1, 0)
