"""The server with a drafter of each kind that its other tests don't draft with."""

from pathlib import Path

import pytest

from tests.support.checkpoints import Shape, save
from tests.support.dflash2 import dflash2_zlab
from tests.support.domino import domino_specforge
from tests.support.serving import ALL, UNICODE, serving

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
