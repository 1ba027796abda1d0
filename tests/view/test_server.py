"""The server answers its own pages on this machine, exactly, and says no to all else in one sentence of JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
from starlette.testclient import TestClient

import regard as rg
from regard.view import Record, capture
from regard.view.server import BODY, Session, application

HOST = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def session() -> Session:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = rg.models.TextEncoder(rg.models.TextConfig(300, width=16, layers=1, heads=2, hidden=16)).eval()

    def look(text: str) -> Record:
        if text == "fail":
            raise RuntimeError("/secret/path")
        if text == "slow":
            time.sleep(2)
        if text == "bad":
            raise ValueError("the text: has no words; write some")
        with capture(model) as record:
            model(torch.tensor([[ord(letter) % 300 for letter in text[:200]]]))
        return record.tokens(list(text[:200]))

    return Session(look, "first text", longest=5000)


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    with TestClient(application(session), base_url=HOST, raise_server_exceptions=False) as client:
        yield client


def window(**changed: Any) -> dict[str, Any]:
    return {"attention": "0", "head": 1, "rows": [0, 4], "columns": [2, 9], "size": [64, 64]} | changed


def test_the_page_is_live(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert "data-live" in answer.text
    assert '"text": "first text"' in answer.text  # what the text box begins with
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["x-frame-options"] == "DENY"


def test_a_text_is_run_and_windows_are_of_it(client: TestClient, session: Session) -> None:
    answer = client.post("/api/run", json={"text": "another text, 你好"})
    assert answer.status_code == 200
    assert answer.json()["about"]["streams"]["source"]["tokens"][:3] == ["a", "n", "o"]
    assert answer.json()["arrays"]["0-maps"]["dtype"] == "uint16"


def test_a_window_is_exact(client: TestClient, session: Session) -> None:
    client.post("/api/run", json={"text": "a text of some length"})
    answer = client.post("/api/window", json=window())
    assert answer.headers["content-type"] == "application/octet-stream"
    assert np.frombuffer(answer.content[:8], "<i4").tolist() == [4, 7]
    edges = np.frombuffer(answer.content[8 : 8 + 8 * 11], "<i4").reshape(11, 2)
    assert edges.tolist() == [[n, n + 1] for n in (*range(4), *range(2, 9))]
    found = np.frombuffer(answer.content[8 + 8 * 11 :], "<f4").reshape(4, 7)
    expected = session.record.weights(0, 1, rows=slice(0, 4), columns=slice(2, 9))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1:8765", ""])
def test_another_name_is_refused(client: TestClient, host: str) -> None:
    for answer in (
        client.get("/", headers={"Host": host}), client.post("/api/run", json={"text": "a"}, headers={"Host": host}),
    ):  # fmt: skip
        assert answer.status_code == 403
        assert answer.json() == {"error": "this viewer answers at 127.0.0.1 only"}


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:9999"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}],
    ids=str,
)  # fmt: skip
def test_another_origin_is_refused(client: TestClient, headers: dict[str, str]) -> None:
    answer = client.post("/api/run", json={"text": "a"}, headers=headers)
    assert answer.status_code == 403
    assert answer.json() == {"error": "this viewer answers its own pages only"}


def test_its_own_origin_may(client: TestClient) -> None:
    headers = {"Origin": HOST, "Sec-Fetch-Site": "same-origin"}
    assert client.post("/api/run", json={"text": "a"}, headers=headers).status_code == 200
    assert client.get("/", headers={"Host": "localhost:8765"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (window(head=7), 422, "head must be in 0 ... 1, but is 7"),
        (window(head=True), 422, "expected {attention, head"),
        (window(attention="9"), 422, "no attention of layer '9'"),
        (window(rows=[3, 3]), 422, "rows must be from and to"),
        (window(rows=[0, 10**30]), 422, "rows must be from and to"),
        (window(columns=[-4, 2]), 422, "columns must be from and to"),
        (window(size=[0, 4]), 422, "size must be 1 ... 4096"),
        (window(size=[4096, 4096]), 422, "4,194,304 together"),
        (window(rows=[0.5, 2]), 422, "expected {attention"),
        ({}, 422, "expected {attention"),
        ([1], 400, "expected a JSON object"),
    ],
)
def test_a_window_that_cannot_be_is_told(client: TestClient, body: Any, status: int, words: str) -> None:
    client.post("/api/run", json={"text": "some text here"})
    answer = client.post("/api/window", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_texts_have_limits(client: TestClient) -> None:
    for text, words in (("", "at least one word"), (7, "must be a string"), ("a" * 5001, "at most 5,000 letters"),
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


def test_what_takes_too_long_is_given_up(client: TestClient, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "seconds", 0.5)
    answer = client.post("/api/run", json={"text": "slow"})
    assert answer.status_code == 503
    assert "longer than 0.5 seconds" in answer.json()["error"]


def test_a_failure_shows_no_trace(client: TestClient) -> None:
    answer = client.post("/api/run", json={"text": "fail"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "it failed; the terminal of regard serve says why"}


def test_there_is_nothing_else(client: TestClient) -> None:
    for answer in (client.get("/other"), client.get("/api/run"), client.get("/../../etc/passwd"), client.post("/")):
        assert answer.status_code in (404, 405)
        assert answer.json() == {"error": "there is no such page"}
