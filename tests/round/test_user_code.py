"""The user's own code fails somewhere in a generation: the prompt cache is still exact."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

import dspine_mlx
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO
from dspine_mlx.round.policy import Fixed
from dspine_mlx.round.sampler import never_excluded
from tests.support.tiny import (
    VOCABULARY,
    plain_steps,
    random_prompt,
    same_steps,
    scripted,
    tiny_dspine,
    tiny_target,
)

PROMPT = random_prompt(25)


class UsersError(Exception):
    pass


class FailsAt:
    """A call that passes the first n times and then raises."""

    def __init__(self, n: int, call: Callable[..., Any]):
        self.left, self.call = n, call

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left == 0:
            raise UsersError
        self.left -= 1
        return self.call(*args, **options)


class FailingPolicy(Fixed):
    """Parks for its first 4 tokens; the method `name` fails at its nth call."""

    def __init__(self, name: str, n: int):
        super().__init__(3, parked=True)
        setattr(self, name, FailsAt(n, getattr(self, name)))

    def start_text(self, *args: Any) -> None:
        self.tokens_left = 4

    def plain_token(self, *args: Any) -> None:
        self.tokens_left -= 1
        self.parked = self.tokens_left > 0


def hooks(n: int) -> dict[str, dict[str, Any]]:
    """Options of `stream_generate` whose own code fails at its nth call."""
    options: dict[str, dict[str, Any]] = {
        "progress": {"prompt_progress_callback": FailsAt(n, lambda *_: None)},
        "processor": {"logits_processors": [FailsAt(n, lambda _, logits: logits)]},
        "sampler": {"sampler": FailsAt(n, greedy_sampler)},
        "filter": {"draft_filter": FailsAt(n, lambda _, draft: len(draft))},
        "checkpoint": {"prompt_checkpoints": {7: FailsAt(n, lambda _: None)}},
    }
    for name in ("start_text", "choose", "learn", "probe_due", "plain_token"):
        options[f"policy.{name}"] = {"verify_length": FailingPolicy(name, n)}
    return options


@pytest.mark.parametrize("hook", hooks(0))
def test_a_prompt_cache_holds_the_prompt_and_the_yielded_tokens(
    model: nn.Module, tokenizer: TokenizerWrapper, hook: str
) -> None:
    text = [token for token, _ in plain_steps(model, tokenizer, PROMPT, max_tokens=30)]
    failures = 0
    for n in range(12):
        drafter = scripted(model, PROMPT + text, "now and then")
        cache, seen, failed = make_prompt_cache(model), list[int](), False
        options = {"verify_length": 3, "max_tokens": 12, "prefill_step_size": 9} | hooks(n)[hook]
        try:
            for response in dspine_mlx.stream_generate(
                model, tokenizer, PROMPT, drafter, prompt_cache=cache, **options
            ):
                seen.append(response.token)
        except UsersError:
            failed = True
        assert seen == text[: len(seen)]
        (rows,) = {c.offset for c in cache}
        fed = (PROMPT + text)[:rows]
        assert rows == len(PROMPT) + len(seen) or (not seen and rows < len(PROMPT))
        going_on = (PROMPT + text)[rows : rows + 1]
        wanted = plain_steps(model, tokenizer, fed + going_on, max_tokens=3)
        own = cache[: len(make_prompt_cache(model))]
        assert same_steps(
            plain_steps(model, tokenizer, going_on, max_tokens=3, prompt_cache=own), wanted
        )
        failures += failed
        if failures and not failed:  # it is not called that often
            break
    assert failures > 0


@pytest.mark.parametrize("verify_length", [3, "auto"])
@pytest.mark.parametrize(("rows", "start"), [(0, 0), (0, 1), (0, 3), (16, 8), (16, 16), (16, 18)])
def test_kv_bits_quantises_at_mlx_lms_step(
    tokenizer: TokenizerWrapper, verify_length: int | str, rows: int, start: int
) -> None:
    """A turn of one token, on empty caches and on plain ones that may be past the start."""
    target = tiny_target(head_dim=32)  # the smallest group of a quantised cache
    caches = [make_prompt_cache(target) for _ in range(2)]
    for cache in caches if rows else ():
        target(mx.array([random_prompt(rows)]), cache=cache)
    options: dict[str, Any] = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    plain = plain_steps(target, tokenizer, [30], max_tokens=9, prompt_cache=caches[0], **options)
    # The drafter has not seen the cached tokens: its text begins here.
    drafter = scripted(target, [30] + [token for token, _ in plain], "right")
    options["verify_length"] = verify_length
    responses = dspine_mlx.stream_generate(
        target, tokenizer, [30], drafter, max_tokens=9, prompt_cache=caches[1], **options
    )
    assert same_steps([(r.token, r.logprobs) for r in responses], plain)


class ReturnsFrom:
    """A call whose results are another one from the nth on."""

    def __init__(self, n: int, call: Callable[..., Any], result: Any):
        self.left, self.call, self.result = n, call, result

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        return self.result if self.left < 0 else self.call(*args)


WRONG: dict[str, tuple[str, Callable[..., Any], Any, str]] = {
    "an int": ("sampler", greedy_sampler, 5, "the sampler returned 5; it must return an mx.array"),
    "a float": ("sampler", greedy_sampler, mx.array([5.0]), "returned a mlx.core.float32 array"),
    "two tokens": ("sampler", greedy_sampler, mx.array([5, 6]), r"of shape \(2,\)"),
    "no axis": ("sampler", greedy_sampler, mx.array(5), r"shape \(\); it must .* \(1,\)"),
    "None": ("processor", lambda _, logits: logits, None, "a logits processor returned None"),
    "one row": ("processor", lambda _, logits: logits, mx.zeros((VOCABULARY,)), "of shape"),
    "token ids": (
        "processor",
        lambda _, logits: logits,
        mx.zeros((1, VOCABULARY), mx.int32),
        "a logits processor returned a mlx.core.int32 array",
    ),
    "too many": ("filter", lambda _, draft: len(draft), 9, "draft_filter returned 9 for a draft"),
    "a share": ("filter", lambda _, draft: len(draft), 0.5, "draft_filter returned 0.5"),
    "a yes": ("filter", lambda _, draft: len(draft), True, "draft_filter returned True"),
}


def option(hook: str, call: Any) -> dict[str, Any]:
    return {
        "sampler": {"sampler": call},
        "processor": {"logits_processors": [call]},
        "filter": {"draft_filter": call},
    }[hook]


@pytest.mark.parametrize("how", ["plain", 0, 3, "batch"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_users_code_returns_is_checked(
    model: nn.Module, tokenizer: TokenizerWrapper, wrong: str, how: str | int
) -> None:
    hook, right, result, words = WRONG[wrong]
    if hook == "filter" and how in ("plain", 0):
        pytest.skip("nothing is drafted")
    text = [token for token, _ in plain_steps(model, tokenizer, PROMPT, max_tokens=12)]
    drafter = scripted(model, PROMPT + text, "now and then")
    options: dict[str, Any] = {"max_tokens": 12} | option(hook, ReturnsFrom(2, right, result))
    if how == "batch":
        options["verify_length"] = 3
        with pytest.raises(InputError, match=words):
            dspine_mlx.batch_generate(model, tokenizer, [PROMPT], tiny_dspine(model), **options)
        return
    bound, seen = None if how == "plain" else drafter, list[int]()
    cache = make_prompt_cache(model)
    if bound is not None:
        options["verify_length"] = how
    responses = dspine_mlx.stream_generate(
        model, tokenizer, PROMPT, bound, prompt_cache=cache, **options
    )
    with pytest.raises(InputError, match=words):
        seen.extend(r.token for r in responses)
    assert seen == text[: len(seen)]
    if bound is not None:
        assert {c.offset for c in cache} == {len(PROMPT) + len(seen)}


OUTSIDE = st.one_of(st.integers(VOCABULARY, (1 << 31) - 1), st.integers(-(1 << 31), -1))


@settings(max_examples=20, deadline=None)
@given(
    token=OUTSIDE, at=st.integers(0, 6), how=st.sampled_from(["plain", 0, 3, "batch", "batch 0"])
)
def test_a_samplers_token_outside_the_vocabulary_is_named(
    token: int, at: int, how: str | int
) -> None:
    """It is never fed: MLX would read outside the embedding, which can crash the interpreter."""
    model, tokenizer = tiny_target(), load_tokenizer(DEMO / "target")
    wrong = ReturnsFrom(at, greedy_sampler, mx.array([token]))
    options: dict[str, Any] = {"max_tokens": 12, "sampler": wrong}
    words = f"the sampler returned the token id {token}; the target has ids from 0 to 2047"
    if how not in ("plain", "batch"):
        options["verify_length"] = 0 if how == "batch 0" else how
    drafter, seen = None if how == "plain" else tiny_dspine(model), list[int]()
    if str(how).startswith("batch"):
        with pytest.raises(InputError, match=words):
            dspine_mlx.batch_generate(model, tokenizer, [PROMPT, PROMPT[:4]], drafter, **options)
        return
    responses = dspine_mlx.stream_generate(model, tokenizer, PROMPT, drafter, **options)
    with pytest.raises(InputError, match=words):
        seen.extend(r.token for r in responses)
    plain = plain_steps(model, tokenizer, PROMPT, max_tokens=12)
    assert seen == [wanted for wanted, _ in plain][: len(seen)]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sampled", [False, True])
def test_logits_that_are_no_numbers_give_plain_decodings_text(
    model: nn.Module, tokenizer: TokenizerWrapper, number: float, sampled: bool
) -> None:
    """From a processor, in all rows from the fourth token on."""

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + number if len(tokens) > len(PROMPT) + 3 else logits

    def options() -> dict[str, Any]:
        mx.random.seed(4)
        sampler = dspine_mlx.Sampler(temp=0.9, top_p=0.9, seeded=True) if sampled else None
        return {"max_tokens": 12, "sampler": sampler, "logits_processors": [spoil]}

    plain = [token for token, _ in plain_steps(model, tokenizer, PROMPT, **options())]
    for verify_length in (0, 3):
        drafter = tiny_dspine(model)
        responses = dspine_mlx.stream_generate(
            model, tokenizer, PROMPT, drafter, verify_length=verify_length, **options()
        )
        assert [r.token for r in responses] == plain


def test_tokens_that_end_a_text_are_no_ids_in_some_configs() -> None:
    tokenizer = load_tokenizer(DEMO / "target")
    tokenizer.eos_token_ids = {-1, 7, 1 << 40}
    special = never_excluded(tokenizer)
    assert set(special) == {*tokenizer.encode("\n"), 7}
    dspine_mlx.Sampler(temp=1.0, xtc_probability=0.5, xtc_special_tokens=special)
