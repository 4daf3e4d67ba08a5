"""A short soak; `python -m tests.bench.soak --minutes N` runs a long one."""

import random
from pathlib import Path

import pytest

from tests.bench.soak import grown, soak

pytestmark = pytest.mark.slow


def test_mixed_and_hostile_requests_get_plain_decodings_replies(tmp_path: Path) -> None:
    seed = random.randrange(1 << 16)
    result = soak(tmp_path, seed, seconds=4, requests=20, clients=4)
    print(result)  # the seed, where this fails
    assert result["wrong"] == []
    assert grown(result) == []
    assert result["exit_status"] == 0
    assert result["done"]["compared"] > 0
