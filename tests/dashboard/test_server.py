"""The dashboard's server: who is answered, with what, and how updates arrive."""

import http.client
import json
import threading
from contextlib import contextmanager
from urllib.parse import quote

import pytest

from paceline.dashboard import server as module
from paceline.dashboard.runs_folder import RunsFolder
from paceline.dashboard.server import DashboardServer
from tests.report.made_run import make_run, train_record


@contextmanager
def serving(folder, host="127.0.0.1", token=""):
    server = DashboardServer(RunsFolder(folder), host, 0, token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def ask(server, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "runs" / "one", steps=3)
    return tmp_path / "runs"


def test_views_are_answered(runs):
    with serving(runs) as server:
        status, page, headers = ask(server, "/")
        assert status == 200 and b"<title>Paceline</title>" in page
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe-inline" not in headers["Content-Security-Policy"].split("script-src")[1]
        assert [run["name"] for run in json.loads(ask(server, "/api/runs")[1])] == ["one"]
        view = json.loads(ask(server, "/api/view?run=one")[1])
        assert view["title"] == "one" and view["tails"] == [{"run": "one", "steps": [1, 2, 3]}]
        assert len(json.loads(ask(server, "/api/tail?run=one&step=2")[1])["charts"]) == 3
        assert len(json.loads(ask(server, "/api/samples?run=one&step=2")[1])) == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/view?run=" + quote("../x"), 404),
        ("/api/view", 400),
        ("/api/tail?run=one&step=x", 400),
        ("/../../etc/passwd", 404),
        ("/api/samples?run=one&step=..%2f..%2fconfig", 400),
    ],
)
def test_wrong_questions_are_refused(runs, path, status):
    with serving(runs) as server:
        assert ask(server, path)[0] == status


def test_pages_from_elsewhere_cannot_ask_through_the_browser(runs):
    with serving(runs) as server:
        assert ask(server, "/api/runs", Host="evil.example")[0] == 403
        assert ask(server, "/api/runs", Host="localhost:1")[0] == 200


def test_another_address_asks_for_a_token(runs):
    with serving(runs, host="0.0.0.0") as server:
        assert len(server.token) >= 24 and server.url.endswith(f"?token={server.token}")
        assert ask(server, "/api/runs")[0] == 403
        assert ask(server, "/")[0] == 403 and ask(server, "/?token=wrong")[0] == 403
        assert ask(server, f"/api/runs?token={server.token}")[0] == 200
        assert ask(server, "/api/runs", Authorization=f"Bearer {server.token}")[0] == 200


def test_updates_arrive_as_events(runs, monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.02)
    with serving(runs) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
        connection.request("GET", "/events?run=one")
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "text/event-stream"

        def next_view():
            for line in iter(answer.readline, b""):
                if line.startswith(b"data: "):
                    return json.loads(line.removeprefix(b"data: "))

        assert next_view()["tails"][0]["steps"] == [1, 2, 3]
        with (runs / "one" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(train_record(4)) + "\n")
        assert next_view()["tails"][0]["steps"] == [1, 2, 3, 4]
        connection.close()
