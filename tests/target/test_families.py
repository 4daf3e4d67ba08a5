"""Targets of every family: found, tapped, and documented as they are."""

from itertools import islice
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.target.model import Target, find_body
from dspine_mlx.target.rollback import Rollback, leaves
from tests.bench.families import MODELS, PAGE, rollback_kind
from tests.support.families import FAMILIES, build, scripted_drafter
from tests.support.tiny import plain_steps, same_steps

NORMS = ("norm", "embedding_norm", "norm_f", "final_layernorm", "final_norm")


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=pytest.mark.slow)])
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


SHORT = 12  # tokens in all stay inside the tiny windows, where rows of a block are bit-equal
SAMPLING: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "penalties": ({}, {"repetition_penalty": 1.3, "presence_penalty": 0.4}),
    "top-p, bias": ({"temp": 0.9, "top_p": 0.8}, {"logit_bias": {5: 2.0}}),
    "min-p, frequency": ({"temp": 1.1, "min_p": 0.05}, {"frequency_penalty": 0.6}),
    "xtc, top-k": ({"temp": 1.0, "top_k": 9, "xtc_probability": 0.5, "xtc_threshold": 0.02}, {}),
}


STOCK = ("qwen3", "qwen2", "llama", "qwen3_moe", "gemma3", "gemma4_text", "gpt_oss")
TWO_TURNS = [  # greedy of each, and each kind of sampling with three or four of them
    (family, kind)
    for i, family in enumerate(STOCK)
    for j, kind in enumerate(SAMPLING)
    if j == 0 or (i + j) % 2
]


@pytest.mark.parametrize(("family", "kind"), TWO_TURNS)
def test_two_turns_under_every_kind_of_sampling(
    tokenizer: TokenizerWrapper, family: str, kind: str
) -> None:
    """Seeded text and logprobs are mlx-lm's, in a first turn that is closed early and in a second
    one from its cache."""
    model = build(family)
    endless = TokenizerWrapper(tokenizer._tokenizer)
    endless.eos_token_ids = {-1}
    temperature, penalties = SAMPLING[kind]

    def options(turn: int) -> dict[str, Any]:
        mx.random.seed(turn)
        return {
            "max_tokens": SHORT // 2,
            "sampler": make_sampler(**temperature),
            "logits_processors": make_logits_processors(**penalties),
        }

    prompt, cache = [7, 9, 3], make_prompt_cache(model)
    first = plain_steps(model, endless, prompt, **options(1))[:4]
    said = [token for token, _ in first]
    more = [11, 4]
    plain_cache = make_prompt_cache(model)
    model(mx.array([prompt + said]), cache=plain_cache)
    second = plain_steps(model, endless, more, prompt_cache=plain_cache, **options(2))
    text = prompt + said + more + [token for token, _ in second]
    drafter = scripted_drafter(model, text, "now and then")
    for turn, (asked, wanted) in enumerate(((prompt, first), (more, second)), 1):
        responses = dspine_mlx.stream_generate(
            model, endless, asked, drafter, prompt_cache=cache, verify_length=5, **options(turn)
        )
        ours = [(r.token, r.logprobs) for r in islice(responses, len(wanted))]
        responses.close()
        assert same_steps(ours, wanted)
