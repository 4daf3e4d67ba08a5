"""Two processes serve one model: texts in step, clients that leave, requests that fail, the end."""

import http.client
import json
import signal
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from tests.support.ranks import Ranks, free_ports, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

QUESTION = "Tom buys 4 boxes of 6 pens. He gives away 5 pens. How many pens are left?"
SEEDED = {"seed": 5, "temperature": 0.8}


class Served:
    """A server of two ranks, with the pair that ships."""

    def __init__(self, ranks: Ranks, port: int):
        self.ranks, self.port = ranks, port

    def post(self, **body: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24} | body
        connection.request("POST", "/v1/chat/completions", json.dumps(content), {})
        return connection.getresponse()

    def text(self, **body: Any) -> tuple[str, dict[str, Any]]:
        reply = json.loads(self.post(**body).read())
        return reply["choices"][0]["message"]["content"], reply["usage"]["dspine"]

    @property
    def healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    (port,) = free_ports(1)
    flags = ["--verify-length", "7", "--no-profile", "--patience", "100"]
    arguments = ["-m", "dspine_mlx.cli", "serve", "--port", str(port), *flags]
    served = Served(Ranks([arguments] * 2, tmp_path_factory.mktemp("served")), port)
    try:
        wait_until(lambda: served.healthy, 120)
        yield served
        served.ranks.processes[0].send_signal(signal.SIGTERM)
        ended = served.ranks.end(60)
        assert [one.status for one in ended] == [0, 0], ended[0].err
    finally:
        for process in served.ranks.processes:
            process.kill()


def test_drafted_texts_are_plain_ones(served: Served) -> None:
    """Greedy and seeded, drafted, plain, and in a batch."""
    drafted, figures = served.text()
    assert figures["path"] == "speculative"
    assert figures["acceptance_length"] > 1.5
    plain, figures = served.text(verify_length=0)
    assert figures["path"] == "batched"
    assert plain == drafted
    seeded, figures = served.text(**SEEDED)
    assert figures["path"] == "speculative"
    alone, figures = served.text(**SEEDED, verify_length=0)
    assert figures["path"] == "plain"
    assert alone == seeded != drafted


@pytest.mark.parametrize("length", [0, 7])
def test_a_client_that_leaves_a_seeded_stream(served: Served, length: int) -> None:
    """The others learn where rank 0 stopped: later requests are answered, drafted or batched."""
    before, _ = served.text()
    for _ in range(2):
        stream = served.post(**SEEDED, verify_length=length, stream=True, max_tokens=500)
        assert stream.read(30)
        stream.close()
    assert served.text()[0] == before
    assert served.text(verify_length=0)[0] == before


def test_a_request_that_fails_is_nobody_elses_end(served: Served) -> None:
    assert served.post(draft_model="/nowhere").status == 400
    assert served.post(model="another").status == 404
    before, _ = served.text()
    grammar = {"type": "regex", "pattern": "("}
    assert served.post(response_format=grammar).status == 400
    assert served.text()[0] == before


def test_requests_at_once_are_answered_as_alone(served: Served) -> None:
    """Those that come while one is decoded are decoded plainly together, seeded ones in turn."""
    questions = [QUESTION.replace("4", n) for n in ("2", "3", "5")]
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": q}]} for q in questions
    ]
    bodies += [SEEDED, SEEDED | {"seed": 6}]
    alone = [served.text(**body)[0] for body in bodies]
    together = concurrently(served, bodies)
    assert [text for text, _ in together] == alone
    assert {figures["path"] for _, figures in together[3:]} == {"speculative"}
    assert "batched" in {figures["path"] for _, figures in together[:3]}


def concurrently(served: Served, bodies: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    replies: dict[int, tuple[str, dict[str, Any]]] = {}

    def ask(i: int) -> None:
        replies[i] = served.text(**bodies[i])

    threads = [Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [replies[i] for i in range(len(bodies))]


def test_sampled_batches_after_texts_of_rank_0(served: Served) -> None:
    """All ranks draw alike in a batch, whatever rank 0 has drawn alone before."""
    served.text(temperature=0.9)
    hot = {"temperature": 1.0, "verify_length": 0}
    assert len(concurrently(served, [hot] * 3)) == 3
    assert served.healthy
