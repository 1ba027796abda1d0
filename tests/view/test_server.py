"""The server answers requests of its own pages with exact numbers and refuses all others with a JSON error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
from starlette.testclient import TestClient

import regard as rg
from regard.view import Record, capture, server, workspace
from regard.view.server import BODY, Session, application

HOST = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def session() -> Session:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = rg.models.TextEncoder(rg.models.TextConfig(300, d_model=16, layers=1, heads=2, d_hidden=16)).eval()

    def look(text: str) -> Record:
        if text == "fail":
            raise RuntimeError("/secret/path")
        if text == "slow":
            time.sleep(2)
        if text == "bad":
            raise ValueError("the text: has no words; write some")
        with capture(model) as record:
            model(torch.tensor([[ord(letter) % 300 for letter in text[:200]]]))
        return record.set_tokens(list(text[:200]))

    return Session(look, "first text", longest=5000)


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    with TestClient(application(session), base_url=HOST, raise_server_exceptions=False) as client:
        yield client


def window(**changed: Any) -> dict[str, Any]:
    return {
        "record": "last", "attention": "0", "head": 1, "rows": [0, 4], "columns": [2, 9], "size": [64, 64],
    } | changed  # fmt: skip


def test_the_page_is_live(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "data-live" in answer.text
    assert '"text": "first text"' in answer.text  # initial text of the text box
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["x-frame-options"] == "DENY"


def test_windows_belong_to_the_captured_text(client: TestClient, session: Session) -> None:
    answer = client.post("/api/run", json={"text": "another text, 你好"})
    assert answer.status_code == 200
    assert answer.json()["about"]["streams"]["source"]["tokens"][:3] == ["a", "n", "o"]
    assert answer.json()["arrays"]["0-maps"]["dtype"] == "uint16"


def test_a_window_is_exact(client: TestClient, session: Session) -> None:
    response = client.post("/api/run", json={"text": "a text of some length"}).json()
    answer = client.post("/api/window", json=window(record=response["about"]["record"]))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(answer.content[:8], "<i4").tolist() == [4, 7]
    edges = np.frombuffer(answer.content[8 : 8 + 8 * 11], "<i4").reshape(11, 2)
    assert edges.tolist() == [[n, n + 1] for n in (*range(4), *range(2, 9))]
    actual = np.frombuffer(answer.content[8 + 8 * 11 :], "<f4").reshape(4, 7)
    expected = session.record.weights(0, 1, rows=slice(0, 4), columns=slice(2, 9))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1:8765", ""])
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    for answer in (
        client.get("/", headers={"Host": host}), client.post("/api/run", json={"text": "a"}, headers={"Host": host}),
    ):  # fmt: skip
        assert answer.status_code == 403
        assert answer.json() == {"error": "this viewer accepts requests to 127.0.0.1 only"}


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:9999"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}],
    ids=str,
)  # fmt: skip
def test_another_origin_is_refused(client: TestClient, headers: dict[str, str]) -> None:
    answer = client.post("/api/run", json={"text": "a"}, headers=headers)
    assert answer.status_code == 403
    assert answer.json() == {"error": "this viewer accepts requests from its own pages only"}


def test_its_own_origin_is_accepted(client: TestClient) -> None:
    headers = {"Origin": HOST, "Sec-Fetch-Site": "same-origin"}
    assert client.post("/api/run", json={"text": "a"}, headers=headers).status_code == 200
    assert client.get("/", headers={"Host": "localhost:8765"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (window(head=7), 422, "head must be in 0 ... 1, but is 7"),
        (window(head=True), 422, "expected {record, attention, head"),
        (window(attention="9"), 422, "layer '9' has no attention"),
        (window(rows=[3, 3]), 422, "rows must be (start, stop)"),
        (window(rows=[0, 10**30]), 422, "rows must be (start, stop)"),
        (window(columns=[-4, 2]), 422, "columns must be (start, stop)"),
        (window(size=[0, 4]), 422, "size must be 1 ... 4096"),
        (window(size=[4096, 4096]), 422, "at most 4,194,304 cells"),
        (window(rows=[0.5, 2]), 422, "expected {record, attention"),
        ({}, 422, "expected {record, attention"),
        ([1], 400, "expected a JSON object"),
    ],
)
def test_an_invalid_window_is_refused(client: TestClient, body: Any, status: int, words: str) -> None:
    response = client.post("/api/run", json={"text": "some text here"}).json()
    if isinstance(body, dict) and body.get("record") == "last":
        body = body | {"record": response["about"]["record"]}
    answer = client.post("/api/window", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


LAST = {"record": "last"}


@pytest.mark.parametrize(
    ("kind", "body", "status", "words"),
    [
        ("experiment", {}, 410, "no longer holds"),
        ("experiment", LAST | {"changes": "off"}, 422, "expected {record, changes"),
        ("experiment", LAST | {"changes": [{"factor": 0.0}] * 257}, 422, "expected {record, changes"),
        ("experiment", LAST | {"changes": [{"layer": 0, "factor": 0}]}, 422, "a change must be an object of attention"),
        ("experiment", LAST | {"changes": [{"attention": 0, "factor": 0}]}, 422, "must be an id"),
        ("experiment", LAST | {"changes": [{"attention": "9", "factor": 0}]}, 422, "applies to no attention"),
        ("experiment", LAST | {"changes": [{"heads": [2], "factor": 0}]}, 422, "head must be in 0 ... 1"),
        ("experiment", LAST | {"changes": [{"factor": "0"}]}, 422, "factor must be a number"),
        ("experiment", LAST | {"changes": [{"factor": 10**400}]}, 422, "factor must be a finite number"),
        ("experiment", LAST | {"changes": [{"temperature": -1}]}, 422, "temperature must be a positive number"),
        ("experiment", LAST | {"changes": [{"forbid": [[0, 99]]}]}, 422, "the pair (0, 99) is outside"),
        ("experiment", LAST | {"changes": [{"force": [[0]]}]}, 422, "force must be (query, key) pairs"),
        ("experiment", LAST | {"tokens": {"source": {"-1": "a"}}}, 422, "expected {record, changes"),
        ("experiment", LAST | {"tokens": {"source": {"1": 5}}}, 422, "expected {record, changes"),
        ("experiment", LAST | {"tokens": {"other": {}}}, 422, "expected {record, changes"),
        ("experiment", LAST | {"tokens": {"source": {"1": "a"}}}, 422, "has no tokenizer"),
        (
            "why",
            LAST | {"attention": "0", "head": 0, "query": 0},
            422,
            "expected {record, attention, head, query, key}",
        ),
        ("why", LAST | {"attention": "0", "head": 0, "query": 0, "key": 10**12}, 422, "key must be in"),
        ("why", LAST | {"attention": "0", "head": -1, "query": 0, "key": 0}, 422, "head must be in 0 ... 1"),
        ("prediction", LAST | {"against": "none"}, 410, "no longer holds"),
        ("generate", LAST | {"tokens": 4}, 422, "expected {record, tokens, beams}"),
        ("generate", LAST | {"tokens": 4000, "beams": 1}, 422, "tokens must be 1 ... 64"),
        ("generate", LAST | {"tokens": 4, "beams": 1}, 422, "only a language model or a translator"),
        ("open", LAST | {"row": 1}, 422, "row must be in 0 ... 0"),
        ("open", LAST | {"row": "0"}, 422, "row must be a whole number"),
        ("compare", {"text": "a", "second": True}, 422, "there is no second model"),
        ("compare", {"text": "a", "second": 1}, 422, "second must be true or false"),
        ("compare", {"text": ""}, 422, "at least one word"),
        ("other", LAST, 404, "page not found"),
    ],
)
def test_an_invalid_request_is_refused(client: TestClient, kind: str, body: Any, status: int, words: str) -> None:
    response = client.post("/api/run", json={"text": "some text here"}).json()
    if body.get("record") == "last":
        body = body | {"record": response["about"]["record"]}
    answer = client.post(f"/api/{kind}", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_experiments_have_records_of_their_own(client: TestClient) -> None:
    record = client.post("/api/run", json={"text": "a text of some length"}).json()["about"]["record"]
    change = {"attention": "0", "heads": [1], "forbid": [[3, 2]]}
    for _ in range(20):  # more than are kept: they never displace the text itself
        changed = client.post("/api/experiment", json={"record": record, "changes": [change]}).json()["record"]
    weights = {}
    for name in (record, changed):
        answer = client.post("/api/window", json=window(record=name, rows=[3, 4], columns=[2, 3]))
        weights[name] = np.frombuffer(answer.content[-4:], "<f4")[0]
    assert weights[record] > 0
    assert weights[changed] == 0
    result = client.post("/api/prediction", json={"record": record, "against": changed}).json()
    assert result["kind"] == "vectors"
    assert 0 < result["similarity"] < 1
    assert client.post("/api/window", json=window(record=record, scaled=1)).status_code == 422


def test_large_results_are_dropped_early(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    held, record = workspace.Workspace(), session.record
    captured = record.attentions[0]
    query = captured.calls[0].query
    size = 3 * query.nbytes + sum(each.nbytes for each in captured._maps.values())
    if record.output is not None:
        size += record.output.values.nbytes
    monkeypatch.setattr(workspace, "MAX_BYTES", 3 * size)
    names = [held.add(record, "", derived=True).id for _ in range(3)]
    held.find(names[0])  # used again, so it is not the first to be dropped
    last = held.add(record, "", derived=True).id
    assert list(held.derived) == [names[2], names[0], last]
    monkeypatch.setattr(workspace, "MAX_BYTES", 1)
    newest = held.add(record, "", derived=True).id
    assert list(held.derived) == [last, newest]


def test_texts_have_limits(client: TestClient) -> None:
    for text, words in (("", "at least one word"), (7, "must be a string"), ("a" * 5001, "at most 5,000 characters"),
                        ("bad", "the text: has no words; write some")):  # fmt: skip
        answer = client.post("/api/run", json={"text": text})
        assert answer.status_code == 422
        assert words in answer.json()["error"]


def test_requests_have_limits(client: TestClient) -> None:
    kind = {"Content-Type": "application/json"}
    assert client.post("/api/run", content=b"{" * (BODY + 1), headers=kind).status_code == 413
    assert client.post("/api/run", content=b"{", headers=kind).status_code == 400
    assert client.post("/api/run", content=b"[" * 100_000, headers=kind).status_code == 400
    assert client.post("/api/run", content=b'{"text": "a"}', headers={"Content-Type": "text/plain"}).status_code == 415


def test_a_slow_computation_times_out(client: TestClient, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "seconds", 0.5)
    answer = client.post("/api/run", json={"text": "slow"})
    assert answer.status_code == 503
    assert "longer than 0.5 seconds" in answer.json()["error"]


def test_a_failure_shows_no_trace(client: TestClient) -> None:
    answer = client.post("/api/run", json={"text": "fail"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error; see the terminal of regard serve for details"}


def test_other_paths_are_not_found(client: TestClient) -> None:
    for answer in (client.get("/other"), client.get("/api/run"), client.get("/../../etc/passwd"), client.post("/")):
        assert answer.status_code in (404, 405)
        assert answer.json() == {"error": "page not found"}


def test_two_tabs_get_windows_of_their_own_texts(client: TestClient) -> None:
    texts = {"the first of two texts": None, "another one": None}
    for text in texts:
        texts[text] = client.post("/api/run", json={"text": text}).json()["about"]["record"]
    for text, record in texts.items():
        size = [0, len(text)]
        answer = client.post("/api/window", json=window(record=record, rows=size, columns=size))
        assert np.frombuffer(answer.content[:8], "<i4").tolist() == [len(text)] * 2
    for n in range(4):
        client.post("/api/run", json={"text": f"text {n}"})
    answer = client.post("/api/window", json=window(record=record))
    assert answer.status_code == 410
    assert answer.json() == {"error": "the server no longer holds this text; send it again"}


def test_a_lone_surrogate_is_no_error(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    kind = {"Content-Type": "application/json"}
    answer = client.post("/api/run", content=b'{"text": "a \\ud83d b \\ud83d\\ude00"}', headers=kind)
    assert answer.status_code == 200
    assert answer.json()["about"]["streams"]["source"]["tokens"] == list("a \ufffd b \U0001f600")
    answer = client.post(
        "/api/window", content=b'{"record": "\\ud800", "attention": "\\ud800", "head": 0}', headers=kind
    )
    assert answer.status_code == 422
    assert caplog.records == []


def test_a_request_that_ends_early_is_no_error(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    import anyio

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:8765"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": "/api/run", "headers": headers, "query_string": b"", "root_path": "",
        "raw_path": b"/api/run", "scheme": "http", "server": ("127.0.0.1", 8765), "http_version": "1.1",
    }  # fmt: skip
    with ThreadPoolExecutor(1) as pool:  # this thread may have a loop that the browser's driver runs
        pool.submit(anyio.run, application(session), scope, receive, send).result()
    assert caplog.records == []
    assert sent[0]["status"] == 400


@pytest.mark.parametrize("part", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b"])
def test_an_idle_connection_is_closed(session: Session, monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    import asyncio
    import socket
    import threading

    uvicorn = pytest.importorskip("uvicorn")
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.3)
    running = uvicorn.Server(server.server_config(application(session), 0))
    thread = threading.Thread(target=lambda: asyncio.run(running.serve()), daemon=True)
    thread.start()
    while not running.started:
        thread.join(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as slow:
        if part:
            slow.sendall(part)
        assert slow.recv(100) == b""  # closed; a server that waits would let this time out
    with socket.create_connection(("127.0.0.1", port), timeout=5) as whole:
        whole.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert whole.recv(15) == b"HTTP/1.1 200 OK"
    running.should_exit = True
    thread.join(10)
