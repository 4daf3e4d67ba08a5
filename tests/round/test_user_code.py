"""The user's own code fails somewhere in a generation: the prompt cache is still exact."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from dspine_mlx.round.policy import Fixed
from tests.support.tiny import plain_steps, random_prompt, same_steps, scripted, tiny_target

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
    for name in ("start_text", "length", "learn", "probe_due", "plain_token"):
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
        cache, seen = make_prompt_cache(model), list[int]()
        options = {"verify_length": 3, "max_tokens": 12, "prefill_step_size": 9} | hooks(n)[hook]
        try:
            for response in dspine_mlx.stream_generate(
                model, tokenizer, PROMPT, drafter, prompt_cache=cache, **options
            ):
                seen.append(response.token)
        except UsersError:
            failures += 1
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
