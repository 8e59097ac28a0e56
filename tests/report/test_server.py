"""The served report of a live run: who is answered, with what, and when there is something new."""

import http.client
import json
import threading
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import ConfigError
from paceline.report.server import ReportServer
from tests.page_data import page_data
from tests.report.made_run import make_run, train_record


@contextmanager
def serving(*runs):
    with ReportServer(runs, 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=120)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_report_server_serves_the_report_and_its_new_data(tmp_path):
    runs = [make_run(tmp_path / name, steps=3) for name in ("one", "two")]
    with serving(*runs) as server:
        status, page = ask(server)
        assert status == 200 and "connect-src &#x27;self&#x27;" in page
        data = page_data(page)
        assert data["title"] == "one and two" and data["tails"][0]["steps"] == [1, 2, 3]
        seen = {"If-None-Match": data["live"]}
        assert ask(server, "/data", **seen) == (304, "")
        with (runs[1] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(train_record(4)) + '\n{"step": 5, "kind": "tra')
        status, newer = ask(server, "/data", **seen)
        reward = json.loads(newer)["sections"][0]["charts"][1]
        assert status == 200 and reward["id"] == "reward" and reward["xs"] == [1, 2, 3, 4]
        (runs[0] / "config.yaml").unlink()
        (runs[0] / "metrics.jsonl").unlink()
        status, said = ask(server, "/data", **seen)
        assert status == 500 and "is not a run directory" in said and "Traceback" not in said


@pytest.mark.parametrize("path", ["/data/x", "/../../etc/passwd", "/?run=x", "/metrics.jsonl"])
def test_report_server_answers_404_to_other_paths(tmp_path, path):
    with serving(make_run(tmp_path / "run", steps=1)) as server:
        status, said = ask(server, path)
        assert status == 404 and f"there is one page: {server.url}" in said
        assert ask(server, method="HEAD") == (200, "")


def test_report_server_refuses_pages_of_other_hosts(tmp_path):
    with serving(make_run(tmp_path / "run", steps=1)) as server:
        assert ask(server, Host="evil.example")[0] == 403
        assert ask(server, "/data", Host="localhost:1")[0] == 200


def test_report_command_names_why_it_cannot_serve(tmp_path):
    run = str(make_run(tmp_path / "run", steps=1))

    def refused(*options):
        CliRunner().invoke(app, ["report", run, *options], catch_exceptions=False)

    with serving(run) as server, pytest.raises(ConfigError, match="--serve .*choose another port"):
        refused("--serve", str(server.server_address[1]))
    with pytest.raises(ConfigError, match="writes no file; leave out --out"):
        refused("--serve", "0", "--out", "x.html")
    with pytest.raises(ValueError, match="--step 9: "):
        refused("--serve", "0", "--step", "9")
