"""The server's page: what it shows, who may see it, and how it looks in a browser."""

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspine_mlx.server.call import Call
from dspine_mlx.server.metrics import LAST, Metrics
from dspine_mlx.server.page import HEADERS, PAGE, costs, password
from dspine_mlx.verify_length.costs import Costs, Curve
from tests.support.documentation import ROOT
from tests.support.serving import ALL, Server, serving, usage

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def get(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, dict(reply.getheaders()), reply.read().decode()
    connection.close()
    return found


def basic(key: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()


class Parts(HTMLParser):
    """Every address that a page names, and its ids."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.addresses += [named[k] or "" for k in ("src", "href", "action") if k in named]
        self.ids += [named["id"] or ""] if "id" in named else []


def test_the_page_asks_nobody_else_and_runs_only_its_own_script() -> None:
    page = PAGE.decode()
    parts = Parts()
    parts.feed(page)
    assert parts.addresses == ["data:,"]
    assert re.findall(r"(?:https?:)?//[\w.]+", page) == ["http://www.w3.org"]  # SVG's own name
    assert "innerHTML" not in page
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert not re.search(r"<[^>]+ (style|on[a-z]+)=", page)  # the policy would drop these
    asked = set(re.findall(r'(?:at|say)\("([\w-]+)"', page))
    assert asked == set(parts.ids)


def test_the_last_requests_are_kept_as_figures() -> None:
    metrics = Metrics()
    for n in range(LAST + 3):
        call = Call()
        call.tokens = [7] * n
        metrics.finish(call)
    assert [r["tokens"] for r in metrics.recent] == list(range(LAST + 2, 2, -1))
    assert all(r["status"] == 200 for r in metrics.recent)


def test_costs_are_shown_as_learnt_and_not_touched() -> None:
    curve = Curve((64, 2048), (0.01, 0.01), (0.002, 0.002), ((0.01, 0.012), (0.01, 0.012)))
    known = Costs(curve)
    known.x = np.log(np.array([2.0, 3.0, 4.0, 5.0]))
    drafter: Any = SimpleNamespace(schedule=SimpleNamespace(costs=known))
    depth = known.depth
    shown = costs(drafter)
    assert shown is not None
    assert shown["plain"] == pytest.approx(20)
    assert shown["verify"] == pytest.approx([30, 48])
    assert shown["draft"] == pytest.approx(10)
    assert known.depth == depth
    drafter.schedule = None
    assert costs(drafter) is None
    guessed = Costs(replace(curve, measured=False))
    drafter.schedule = SimpleNamespace(costs=guessed)
    assert costs(drafter) is None
    guessed.observe("plain", 0.5, 64)
    assert costs(drafter) is not None
    assert costs(None) is None


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        (basic("a:b"), b"a:b"),
        ("basic " + base64.b64encode(b"x:k").decode(), b"k"),
        ("Basic ???", None),
        ("Bearer k", None),
        ("", None),
    ],
)
def test_the_password_of_a_browser(header: str, wanted: bytes | None) -> None:
    assert password(header) == wanted


@pytest.mark.slow
def test_the_page_and_its_figures(server: Server) -> None:
    status, headers, page = get(server, "/")
    assert (status, page.encode()) == (200, PAGE)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers.items() >= HEADERS.items()
    secret = "Marzipan im Mai"
    usage(server, verify_length="auto")
    messages = [{"role": "user", "content": secret}]
    server.request("/v1/chat/completions", {"messages": messages, "max_tokens": 5})
    status, headers, text = get(server, "/figures")
    shown = json.loads(text)
    assert status == 200
    assert "Access-Control-Allow-Origin" not in headers
    assert secret not in text
    newest = shown["recent"][0]
    assert newest["path"] == "speculative"
    assert newest["prompt_tokens"] > 0
    assert shown["totals"]["accepted"] <= shown["totals"]["drafted"]
    assert shown["totals"]["tokens_per_round"] >= 1
    assert len(shown["costs"]["verify"]) > 1
    assert not any(isinstance(v, str) and "hm" in v for v in newest.values())


@pytest.mark.slow
def test_behind_a_key_a_browser_asks_for_it(scripted: tuple[str, str], tmp_path: Path) -> None:
    flags = ("--model", scripted[0], "--draft-model", scripted[1])
    with serving("dspine_mlx.server", tmp_path, *flags, "--api-key", "ключ", *ALL) as server:
        for path in ("/", "/figures"):
            status, headers, text = get(server, path)
            assert status == 401
            assert headers["WWW-Authenticate"] == 'Basic realm="dspine-mlx", charset="UTF-8"'
            assert "tokens" not in text
            assert get(server, path, Authorization=basic("wrong"))[0] == 401
            assert get(server, path, Authorization=basic(""))[0] == 401
            assert get(server, path, Authorization=basic("ключ"))[0] == 200
        assert get(server, "/metrics", Authorization=basic("ключ"))[0] == 401


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_figures(server: Server, tmp_path: Path, width: int) -> None:
    usage(server)
    usage(server, verify_length="auto")
    asked = {"messages": [{"role": "user", "content": "5"}], "model": "nobody/nothing"}
    refused = server.request("/v1/chat/completions", asked)
    assert refused.status == 404  # the figures stay those of the last one that was answered
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path}", f"--window-size={width},900"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"http://127.0.0.1:{server.port}/"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r'id="status" class="ok">(ok|busy)<', shown)
    assert re.search(r'id="per-round">\d+\.\d\d<', shown)
    assert re.search(r'id="accepted">\d+ of \d+ drafted tokens accepted<', shown)
    assert re.search(r'id="speed">\d+\.\d<', shown)
    assert re.search(r'id="first">\d+\.\d\d s<', shown)
    assert "<rect" in shown
    assert re.search(r"<tr[^>]*><td>[^<]+</td><td>speculative</td><td>1.0</td><td>200</td>", shown)


BOARD = json.loads((ROOT / "docs" / "grafana.json").read_text())
METRIC = r"dspine_[a-z_]+"


@pytest.mark.slow
def test_the_dashboard_asks_for_metrics_that_the_server_has(server: Server) -> None:
    usage(server)
    text = server.request("/metrics").body
    series = dict(re.findall(rf"^({METRIC})(\{{.*\}})? [-+.\de]+$", text, re.MULTILINE))
    expressions = [t["expr"] for panel in BOARD["panels"] for t in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(METRIC, expression)}
    assert asked <= series.keys()
    labels = set(re.findall(r'kind="(\w+)"', " ".join(expressions)))
    assert labels <= set(re.findall(r'kind="(\w+)"', text))
    counters = set(re.findall(rf"^# TYPE ({METRIC}) counter$", text, re.MULTILINE))
    for expression in expressions:  # a counter is shown as a rate, a gauge as it is
        name = re.findall(METRIC, expression)[0]
        counts = name in counters or name.endswith(("_sum", "_count", "_bucket"))
        assert ("rate(" in expression) == counts, expression


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana needs of a model: a title, panels with ids on a grid, a known source."""
    assert BOARD["title"]
    assert BOARD["schemaVersion"] > 30
    (variable,) = BOARD["templating"]["list"]
    places = set[tuple[int, int]]()
    for panel in BOARD["panels"]:
        assert panel["datasource"] == {"type": variable["query"], "uid": f"${{{variable['name']}}}"}
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places
        assert at["x"] + at["w"] <= 24
        places |= cells
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names) > 0
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
