"""A drafter that does not fit is warned about once, where its texts are decoded."""

import logging

import mlx.nn as nn
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

import dspine_mlx
from tests.support.tiny import plain_steps, random_prompt, scripted

TOKENS = 60


@pytest.mark.parametrize(("script", "warnings"), [("wrong", 1), ("right", 0), ("now and then", 0)])
def test_a_drafter_is_warned_about_if_its_texts_are_no_better_than_chance(
    script: str,
    warnings: int,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Over six texts of 60 rounds each where nothing is accepted, with the text that is right."""
    prompt = random_prompt(6)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=TOKENS + 20)]
    drafter = scripted(model, prompt + plain, script)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            responses = dspine_mlx.stream_generate(
                model, tokenizer, prompt, drafter, max_tokens=TOKENS, verify_length=3
            )
            assert [r.token for r in responses] == plain[:TOKENS]
    said = [r.getMessage() for r in caplog.records if "does not seem to fit" in r.getMessage()]
    assert len(said) == warnings
    if said:
        assert "accepted, got 0 of " in said[0]


def test_plain_decoding_says_nothing_about_a_drafter(
    model: nn.Module, tokenizer: TokenizerWrapper, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = random_prompt(6)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=TOKENS)]
    drafter = scripted(model, prompt + plain, "wrong")
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            dspine_mlx.generate(
                model, tokenizer, prompt, drafter, max_tokens=TOKENS, verify_length=0
            )
    assert not caplog.records
    assert drafter.misfit.rounds == 0


@pytest.mark.parametrize("verify_length", [3, "auto"])
def test_copies_of_the_text_do_not_speak_for_the_drafter(
    model: nn.Module, tokenizer: TokenizerWrapper, verify_length: int | str
) -> None:
    """A text in a loop is copied, while the drafter is wrong each time it drafts or is watched."""
    prompt = random_prompt(6)
    plain = [token for token, _ in plain_steps(model, tokenizer, prompt, max_tokens=140)]
    drafter = scripted(model, prompt + plain, "wrong")
    drafter.whole_context = False
    responses = list(
        dspine_mlx.stream_generate(
            model, tokenizer, prompt, drafter, max_tokens=120, verify_length=verify_length
        )
    )
    statistics = responses[-1].statistics
    assert statistics.lookups == 0 or statistics.accepted > 0
    assert (statistics.lookups > 0) == (verify_length == "auto")
    assert drafter.misfit.accepted == 0
    assert 0 < drafter.misfit.rounds <= statistics.rounds - statistics.lookups + statistics.probes
