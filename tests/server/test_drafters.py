"""The server with a drafter of each kind that its other tests don't draft with."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import Shape, save
from tests.support.dflash2 import dflash2_zlab
from tests.support.domino import domino_specforge
from tests.support.serving import ALL, UNICODE, serving

pytestmark = pytest.mark.slow

SHAPE = Shape(H=64, I=64, V=2057, taps=(0, 1), B=5)
DRAFTERS = {"dflash2": dflash2_zlab(SHAPE), "domino": domino_specforge(SHAPE)}


@pytest.mark.parametrize("name", DRAFTERS)
def test_replies_are_the_targets(name: str, scripted: tuple[str, str], tmp_path: Path) -> None:
    """A drafter that knows nothing: every round offers tokens, greedy and sampled."""
    config, weights = DRAFTERS[name]
    config["num_target_layers"] = 2
    drafter = save(tmp_path / "drafter", config, weights)
    flags = ("--model", scripted[0], "--draft-model", str(drafter), *ALL)
    with serving("dspine_mlx.server", tmp_path / "server", *flags) as server:
        for temperature in (0.0, 0.01):
            reply = server.request(
                "/v1/completions",
                {"prompt": "@unicode", "max_tokens": 20, "temperature": temperature},
            )
            assert reply.status == 200, reply
            assert reply.body["choices"][0]["text"] == UNICODE
            assert reply.body["usage"]["dspine"]["drafted"] > 0


def test_lookup_alone_copies_a_reply_that_repeats_itself(
    scripted: tuple[str, str], tmp_path: Path
) -> None:
    flags = ("--model", scripted[0], "--draft-model", "lookup", *ALL)
    with serving("dspine_mlx.server", tmp_path / "server", *flags) as server:

        def reply(prompt: str, temperature: float) -> tuple[str, dict[str, Any]]:
            asked = {"prompt": prompt, "max_tokens": 40, "temperature": temperature}
            answer = server.request("/v1/completions", asked)
            assert answer.status == 200, answer
            return answer.body["choices"][0]["text"], answer.body["usage"]["dspine"]

        for temperature in (0.0, 0.01):
            assert reply("@unicode", temperature)[0] == UNICODE
            done = reply("@long", temperature)[1]
            assert done["path"] == "speculative"
            assert done["lookups"] == done["rounds"] <= 4
            assert done["accepted"] >= 28  # of 40, the first of which repeat nothing


def test_lookup_alone_serves_several_requests_in_one_batch(
    scripted: tuple[str, str], tmp_path: Path
) -> None:
    flags = ("--model", scripted[0], "--draft-model", "lookup", "--no-profile")
    asked = {"prompt": "@long", "max_tokens": 400}
    with serving("dspine_mlx.server", tmp_path / "server", *flags) as server:
        alone = server.request("/v1/completions", asked).body["choices"]
        with ThreadPoolExecutor(3) as clients:
            bodies = [asked] * 3
            replies = list(clients.map(lambda one: server.request("/v1/completions", one), bodies))
    assert [reply.body["choices"] for reply in replies] == [alone] * 3
    told = [reply.body["usage"]["dspine"] for reply in replies]
    assert {usage["path"] for usage in told} == {"batched"}
    assert all(usage["lookups"] > 0 for usage in told)
