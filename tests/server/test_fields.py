"""Fields of a request: whatever passes the checks can be sampled with, also in half precision."""

import json
import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import server as host
from mlx_lm.tool_parsers import qwen3_coder

from dspine_mlx.server.call import LEAST_LOGPROB, sayable
from dspine_mlx.server.fields import COLDEST, FIELDS, TEMPLATE_OPTIONS, FieldError
from dspine_mlx.server.validation import checked, parse_body

V = 64
HUGE = st.integers(300, 4000).flatmap(lambda n: st.sampled_from([10**n, -(10**n)]))  # no floats
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.floats(-3, 3) | HUGE
CLOSE = st.floats(0, 1).map(lambda x: x**40)  # down to what no float32 holds
SAMPLING: dict[str, Any] = dict.fromkeys(
    (
        "temperature",
        "top_p",
        "min_p",
        "xtc_probability",
        "xtc_threshold",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    NUMBERS | CLOSE,
)
SAMPLING |= {f"{kind}_context_size": st.integers() for kind in ("repetition", "presence")}
SAMPLING |= {"frequency_context_size": st.integers(0, 2**33), "top_k": st.integers(0, V - 1)}
SAMPLING |= {"logit_bias": st.dictionaries(st.sampled_from(["0", "5", "63"]), NUMBERS)}
DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "logit_bias": None,
    "repetition_penalty": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_context_size": 20,
    "presence_context_size": 20,
    "frequency_context_size": 20,
}


def arguments(body: dict[str, Any]) -> Any:
    values = DEFAULTS | body
    bias = values["logit_bias"]
    values["logit_bias"] = bias and {int(k): float(v) for k, v in bias.items()}
    everything = SimpleNamespace(**values)
    return SimpleNamespace(sampling=everything, logits=everything)


@given(st.fixed_dictionaries({}, optional=SAMPLING), st.sampled_from([mx.float16, mx.float32]))
@settings(max_examples=150, deadline=None)
def test_what_passes_can_be_sampled_with(fields: dict[str, Any], dtype: mx.Dtype) -> None:
    body: dict[str, Any] = {"prompt": "a"} | fields
    refused = None
    try:
        body = checked(parse_body(json.dumps(body).encode()), "/v1/completions")
    except FieldError as error:
        refused = error
    if refused is not None:
        assert refused.param in fields
        assert str(refused).startswith(refused.param)
        return
    args = arguments({name: body[name] for name in fields})
    logits = (mx.random.normal((1, V)) * 5).astype(dtype)
    for processor in host._make_logits_processors(args):
        logits = processor(mx.array([5, 6, 5, 63]), logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert not mx.isnan(logprobs).any().item()
    tokenizer: Any = SimpleNamespace(encode=lambda text: [1], eos_token_ids=[2])
    sampler = host._make_sampler(args, tokenizer)
    for _ in range(3):
        token = sampler(logprobs).item()
        assert 0 <= token < V
        assert logprobs[0, token].item() > -math.inf


@given(
    st.sampled_from([n for n in SAMPLING if n != "logit_bias"]),
    st.sampled_from(["1", True, [], {}, "nan", "inf", 1e308, -1e308, 2**40 + 0.5, 10**400]),
)
@settings(deadline=None)
def test_other_types_and_sizes_are_named(name: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^{name} is .*; it must be ") as refused:
        checked({"prompt": "a", name: value}, "/v1/completions")
    assert refused.value.param == name


INNER = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["string", "object", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "type", "properties", "anyOf"]), inner, max_size=3)
    ),
    max_leaves=5,
)
CALL = "<function=f>\n<parameter=a>\n{'b': 5}\n</parameter>\n</function>"


@given(parameters=INNER | st.fixed_dictionaries({"properties": INNER}))
@settings(deadline=None)
def test_calls_of_tools_that_pass_can_be_read(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    try:
        checked({"prompt": "a", "tools": tools}, "/v1/completions")
    except FieldError as refused:
        assert refused.param == "tools"  # noqa: PT017
        return
    assert qwen3_coder.parse_tool_call(CALL, tools)["name"] == "f"


@given(st.dictionaries(st.text(max_size=4), st.none() | st.booleans() | st.text() | NUMBERS))
@settings(deadline=None)
def test_logit_bias_names_tokens_and_numbers(bias: dict[str, Any]) -> None:
    fine = all(
        key.isascii() and key.isdigit() and type(value) in (int, float) and abs(value) <= 100
        for key, value in bias.items()
    )
    assert FIELDS["logit_bias"][0](bias) == fine


OPTIONS = ["chat_template", "documents", "padding", "max_length", "truncation", "tokenize"]
OPTIONS += ["tokenizer_kwargs", "return_tensors", "return_dict", "return_assistant_tokens_mask"]
OPTIONS += ["add_generation_prompt", "continue_final_message", "tools", "messages", "conversation"]


@given(
    st.dictionaries(
        st.sampled_from([*OPTIONS, *TEMPLATE_OPTIONS]) | st.text(max_size=9),
        st.booleans() | st.text(max_size=9) | st.lists(st.integers()) | NUMBERS,
        max_size=3,
    )
)
@settings(deadline=None)
def test_only_plain_values_by_known_names_reach_templates(options: dict[str, Any]) -> None:
    plain = all(
        name in TEMPLATE_OPTIONS and (isinstance(value, bool | str) or abs_fits(value))
        for name, value in options.items()
    )
    assert FIELDS["chat_template_kwargs"][0](options) == plain
    assert not set(OPTIONS) & set(TEMPLATE_OPTIONS)


def abs_fits(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**31


@pytest.mark.parametrize("calls", [
    3, [3], [{}], [{"function": 3}], [{"function": {"name": "f", "arguments": "{"}}],
    [{"function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}],
    [{"function": {"name": "f", "arguments": "NaN"}}], [{"function": {"arguments": "{}"}}],
])  # fmt: skip
def test_tool_calls_of_earlier_turns(calls: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "assistant", "content": None}]}
    good = [{"function": {"name": "f", "arguments": '{"a": [1]}'}}]
    body["messages"][0]["tool_calls"] = good
    checked(body, "/v1/chat/completions")
    body["messages"][0]["tool_calls"] = calls
    with pytest.raises(FieldError, match="^messages is"):
        checked(body, "/v1/chat/completions")


@given(st.sampled_from([name for name in FIELDS if name != "draft_model"]))
@settings(deadline=None)
def test_null_is_the_default(name: str) -> None:
    assert checked({"prompt": "a", name: None}, "/v1/completions") == {"prompt": "a"}


def test_null_for_a_drafter_is_none() -> None:
    body = {"prompt": "a", "draft_model": None}
    assert checked(body, "/v1/completions") == body


def test_a_very_low_temperature_is_greedy() -> None:
    for temperature in (1e-8, 1e-300, COLDEST / 2):
        body = checked({"prompt": "a", "temperature": temperature}, "/v1/completions")
        assert body["temperature"] == 0


@given(st.floats())
@settings(deadline=None)
def test_logprobs_can_be_said_in_json(value: float) -> None:
    said = sayable(value)
    assert said >= LEAST_LOGPROB
    assert said == value or value < LEAST_LOGPROB or math.isnan(value)
