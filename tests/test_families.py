"""Targets of every family: found, tapped, and documented as they are."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.rollback import Rollback, leaves
from dspine_mlx.target import Target, find_body
from tests.bench.families import MODELS, PAGE, rollback_kind
from tests.families import FAMILIES, build

NORMS = ("norm", "embedding_norm", "norm_f", "final_layernorm", "final_norm")


@pytest.mark.parametrize("bits", [None, 4], ids=["float32", "4-bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_taps_embedding_and_head(family: str, bits: int | None) -> None:
    """The last layer's tap, through the final norm and the head, says what the model says; caps and
    multipliers of logits, which drafters leave out, keep the order."""
    model = build(family, bits)
    target = Target(model)
    types = [type(m) for m in model.modules()]
    tokens = mx.random.randint(0, 2048, (9,))
    plain = model(tokens[None], cache=make_prompt_cache(model))[0]
    last = len(target.layers) - 1
    logits, features = target.forward(tokens, make_prompt_cache(model), (0, last))
    assert mx.array_equal(logits, plain)
    assert [type(m) for m in model.modules()] == types
    d = target.hidden_size
    assert features.shape == (1, 9, 2 * d)
    assert target.embed(tokens).shape == (9, d)
    _, body = find_body(model)
    norm = next(body[name] for name in NORMS if name in body)
    ours = target.head(norm(features[0, :, d:]))
    assert mx.array_equal(mx.argsort(ours, axis=-1)[:, -3:], mx.argsort(plain, axis=-1)[:, -3:])


def documented() -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    return {row[1]: row for row in rows[1:] if len(row) == 6 and row[1] not in ("models", "---")}


@pytest.mark.parametrize("family", MODELS)
def test_the_documented_rollback_is_the_one_that_happens(family: str) -> None:
    model = build(family)
    cache = make_prompt_cache(model)
    rollback, tokens = Rollback(cache, model), mx.arange(4)
    with rollback.verifying(tokens):
        model(tokens[None], cache=cache)
    names = ", ".join(dict.fromkeys(type(c).__name__ for c in leaves(cache)))
    row = documented()[MODELS[family]]
    assert row[0] == FAMILIES[family].get("model_type", family)
    assert row[2:4] == [names, rollback_kind(rollback)]


def test_every_family_is_documented() -> None:
    assert set(FAMILIES) - set(MODELS) == {"qwen3_tied"}
    assert documented().keys() == set(MODELS.values())
