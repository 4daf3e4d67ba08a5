"""Every family as parameters of a test: quick ones of each kind, and the others."""

from typing import Any

import pytest

from tests.support.families import FAMILIES

# One of each kind of layer, cache and way back: full and windowed attention, chunks, experts, and
# the recurrences.
KINDS = ("qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "llama4", "qwen3_5", "kimi_linear",
         "nemotron_h", "lfm2", "rwkv7", "recurrent_gemma", "jamba")  # fmt: skip


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


EVERY_FAMILY = [family if family in KINDS else slow(family) for family in FAMILIES]
# In 4 bits families of a kind differ in nothing more.
IN_BITS = [(family, None) if family in KINDS else slow(family, None) for family in FAMILIES] + [
    slow(family, 4) for family in KINDS
]
