"""dspine-mlx generate: text from a target and a drafter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.options import (
    PAIR,
    PATIENCE,
    AdapterOption,
    DraftOption,
    DraftQuantOption,
    KernelsOption,
    NoLookupOption,
    NoProfileOption,
    PatienceOption,
    PipelineOption,
    TargetOption,
    TrustOption,
    VerifyLengthOption,
)
from dspine_mlx.cli.prompting import (
    apply_template,
    has_template,
    messages_of,
    parse_object,
    read_prompt,
    readable,
)
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from dspine_mlx.drafters.drafter import Drafter

SAMPLING, CACHE, OUTPUT = "Sampling", "Cache", "Output"


def generate(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")
    ] = None,
    model: TargetOption = None,
    draft_model: DraftOption = None,
    adapter_path: AdapterOption = None,
    trust_remote_code: TrustOption = False,
    draft_quant: DraftQuantOption = None,
    verify_length: VerifyLengthOption = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(help="mlx-lm's name for --verify-length N.", rich_help_panel=PAIR),
    ] = None,
    quantize_activations: Annotated[
        bool,
        typer.Option(
            "--quantize-activations",
            "-qa",
            help="Quantise the target's activations like its weights.",
            rich_help_panel=PAIR,
        ),
    ] = False,
    kernels: KernelsOption = "auto",
    no_lookup: NoLookupOption = False,
    no_profile: NoProfileOption = False,
    pipeline: PipelineOption = False,
    patience: PatienceOption = PATIENCE,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print a table of all rounds after the text: chances, costs, the length chosen.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens to generate at most; -1: no limit.")
    ] = 256,
    system_prompt: Annotated[str | None, typer.Option(help="System message.")] = None,
    prefill_response: Annotated[
        str | None, typer.Option(help="Beginning of the answer, which the model continues.")
    ] = None,
    chat_template_args: Annotated[
        str,
        typer.Option(
            "--chat-template-args",
            "--chat-template-config",
            help="Arguments of the chat template, a JSON object.",
        ),
    ] = "{}",
    ignore_chat_template: Annotated[
        bool, typer.Option("--ignore-chat-template", help="Use the prompt as it is.")
    ] = False,
    use_default_chat_template: Annotated[
        bool,
        typer.Option(
            "--use-default-chat-template",
            help="As in mlx_lm.generate, which always uses the tokenizer's chat template.",
        ),
    ] = False,
    extra_eos_token: Annotated[
        list[str] | None, typer.Option(help="Further tokens that end the text.")
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="Refused: drafters read text only.", hidden=True)
    ] = None,
    temp: Annotated[
        float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the likeliest tokens up to this mass; 1: all.", rich_help_panel=SAMPLING
        ),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the top one's probability; 0: none.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    min_tokens_to_keep: Annotated[
        int, typer.Option(help="Tokens min-p keeps at least.", rich_help_panel=SAMPLING)
    ] = 1,
    top_k: Annotated[
        int,
        typer.Option(
            help="Keep this many of the likeliest tokens; 0: all.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    xtc_probability: Annotated[
        float,
        typer.Option(
            help="Chance, per token, that XTC leaves out the top choices.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    xtc_threshold: Annotated[
        float,
        typer.Option(
            help="Probability from which a token is a top choice for XTC.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.1,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Random seed; the text is mlx_lm.generate's with the same seed.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_kv_size: Annotated[
        int | None,
        typer.Option(
            help="Keep only this many positions: the first 4 and the newest.", rich_help_panel=CACHE
        ),
    ] = None,
    kv_bits: Annotated[
        int | None, typer.Option(help="Quantise the cache to so many bits.", rich_help_panel=CACHE)
    ] = None,
    kv_group_size: Annotated[
        int, typer.Option(help="Group size of a quantised cache.", rich_help_panel=CACHE)
    ] = 64,
    quantized_kv_start: Annotated[
        int, typer.Option(help="Position to quantise the cache from.", rich_help_panel=CACHE)
    ] = 5000,
    prefill_step_size: Annotated[
        int, typer.Option(help="Prompt tokens per forward.", rich_help_panel=CACHE)
    ] = 2048,
    prompt_cache_file: Annotated[
        Path | None,
        typer.Option(
            help="Caches of a prompt, from mlx_lm.cache_prompt; the new prompt follows it.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    show_accepted: Annotated[
        bool,
        typer.Option(
            "--show-accepted",
            help="Colour the text by origin: drafted tokens green, the target's own plain.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    stats: Annotated[
        bool,
        typer.Option(
            "--stats",
            help="Also print how many rounds offered and accepted how many tokens.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    verbose: Annotated[
        str,
        typer.Option(help="As in mlx_lm.generate: False or F is --quiet.", rich_help_panel=OUTPUT),
    ] = "True",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object only.", rich_help_panel=OUTPUT),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No summary.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Generate text: the target's own, made faster by a drafter."""
    import mlx.core as mx

    from dspine_mlx.arguments import (
        check_cache_sizes,
        check_kv_quantization,
        check_max_tokens,
        check_seed,
        check_top_k,
        vocabulary_of,
    )
    from dspine_mlx.cli import summary
    from dspine_mlx.cli.drafter import chosen, say_what_fits
    from dspine_mlx.cli.prompt_cache import read_saved_prompt
    from dspine_mlx.generate import stream_generate
    from dspine_mlx.group.meet import leading, meet
    from dspine_mlx.load import DEMO, check_context, load, read_config, resolve
    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.verify_length.schedule import prepare

    group = meet(pipeline, patience)
    if group is not None and group.follows:
        group.follow(model or str(DEMO / "target"), {"trust_remote_code": trust_remote_code})
    with leading(group):
        if image:
            raise InputError("--image can't be used: drafters read text; see mlx_lm.generate")
        check_max_tokens(max_tokens)
        check_cache_sizes(prefill_step_size, max_kv_size)
        check_kv_quantization(kv_bits, kv_group_size, quantized_kv_start)
        length = parse_verify_length(verify_length, num_draft_tokens)
        text = read_prompt(prompt)
        template = parse_object("--chat-template-args", chat_template_args)
        sampler = Sampler(
            temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold
        )
        if seed is not None:  # as mlx_lm.generate: before loading, which draws initial weights
            check_seed(seed)
            mx.random.seed(seed)
        saved = None
        if prompt_cache_file is not None:
            saved = read_saved_prompt(prompt_cache_file, model, kv_bits, kv_group_size)
            model = saved.model
        if group is not None:
            refuse_in_group(adapter_path, prompt_cache_file, quantize_activations)
        tokenizer_config = {} if saved is None else saved.tokenizer_config
        tokenizer_config |= {"trust_remote_code": trust_remote_code}
        draft_model = chosen(model, draft_model)
        if model is None and draft_model is None:
            typer.echo("Using the small pair that ships with dspine-mlx; see --model.", err=True)
            model, draft_model = str(DEMO / "target"), str(DEMO / "drafter")
        pair: tuple[Any, Any, Drafter | None]
        if group is not None:
            assert model is not None
            pair = group.load(model, draft_model, tokenizer_config, kernels, draft_quant)
        else:
            pair = load(
                model,
                draft_model,
                kernels=kernels,
                draft_quant=draft_quant,
                adapter_path=adapter_path,
                tokenizer_config=tokenizer_config,
                model_config={"quantize_activations": True} if quantize_activations else {},
            )
        target, tokenizer, drafter = pair
        if draft_model is None and length != 0:
            say_what_fits(model)
            length = 0
        for token in extra_eos_token or []:
            add_eos_token(tokenizer, readable("--extra-eos-token", token))
        if sampler.temp > 0:
            check_top_k(top_k, vocabulary_of(target) or tokenizer.vocab_size)
        rounds: list[str] = []
        if drafter is not None and length == "auto":
            prepare(drafter, profile=not no_profile, explain=rounds.append if explain else None)
        special = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)  # as mlx_lm.generate
        sampler = replace(sampler, xtc_special_tokens=special, seeded=seed is not None)
        if not ignore_chat_template and has_template(tokenizer, system_prompt):
            messages = messages_of(text, system_prompt, prefill_response)
            tokens = apply_template(tokenizer, messages, template, as_suffix=saved is not None)
        else:
            tokens = tokenizer.encode(text)
        if saved is not None:
            saved.check_target(target)
        if model is not None:
            before = 0 if saved is None else saved.tokens
            check_context(read_config(resolve(model)), before + len(tokens))
        responses = stream_generate(
            target,
            tokenizer,
            tokens,
            drafter,
            max_tokens=max_tokens,
            sampler=sampler,
            prompt_cache=None if saved is None else saved.caches,
            verify_length=length,
            lookup=not no_lookup,
            max_kv_size=max_kv_size,
            prefill_step_size=prefill_step_size,
            kv_bits=kv_bits,
            kv_group_size=kv_group_size,
            quantized_kv_start=quantized_kv_start,
        )
        if as_json:
            typer.echo(json.dumps(summary.report(responses, group.size if group else 1)))
            return
        last = summary.show(responses, show_accepted)
        if rounds:
            summary.show_rounds(rounds)
        if stats:
            summary.show_statistics(last)
        if not quiet and verbose.lower() not in ("false", "f"):
            summary.summary(last)


def refuse_in_group(
    adapter_path: str | None, prompt_cache_file: Path | None, quantize_activations: bool
) -> None:
    """What a target on several machines can't have."""
    for flag, given in (
        ("--adapter-path", adapter_path),
        ("--prompt-cache-file", prompt_cache_file),
        ("--quantize-activations", quantize_activations),
    ):
        if given:
            raise InputError(f"{flag} can't be used on several machines; leave it out")


def add_eos_token(tokenizer: "TokenizerWrapper", token: str) -> None:
    try:
        tokenizer.add_eos_token(token)
    except ValueError as error:
        raise InputError(f"--extra-eos-token {token!r} is no token of this model") from error


def parse_verify_length(value: str | None, num_draft_tokens: int | None) -> int | str:
    if num_draft_tokens is not None:
        if value is not None:
            raise InputError("--num-draft-tokens is --verify-length under another name; give one")
        if num_draft_tokens < 0:
            raise InputError(f"--num-draft-tokens is {num_draft_tokens}; it must be at least 0")
        return num_draft_tokens
    if value is None or value == "auto":
        return "auto"
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise InputError(f"--verify-length is {value!r}; it must be 'auto' or a number from 0 on")
    return int(value)
