"""dspine-mlx generate: text from a target and a drafter."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.options import PAIR, TargetOption
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from rich.table import Table

    from dspine_mlx.round.statistics import GenerationResponse

SAMPLING, CACHE, OUTPUT = "Sampling", "Cache", "Output"


def generate(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; '-' reads standard input.")
    ] = None,
    model: TargetOption = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Drafter: a folder or Hub id of a checkpoint.",
            rich_help_panel=PAIR,
        ),
    ] = None,
    adapter_path: Annotated[
        str | None, typer.Option(help="Adapter weights for the target.", rich_help_panel=PAIR)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="Let the tokenizer run its own code.", rich_help_panel=PAIR)
    ] = False,
    verify_length: Annotated[
        str,
        typer.Option(
            help="Drafted tokens offered to the target a round: 'auto', or a number; 0 is plain "
            "decoding.",
            rich_help_panel=PAIR,
        ),
    ] = "auto",
    kernels: Annotated[
        str,
        typer.Option(
            help="'auto': the package's Metal kernels, checked at first use; 'off': plain MLX.",
            rich_help_panel=PAIR,
        ),
    ] = "auto",
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            help="For verify length 'auto': guess what a step costs at first, don't measure it.",
            rich_help_panel=PAIR,
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print a line for every round: chances, costs, the length chosen.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens to generate at most; -1: no limit.")
    ] = 256,
    system_prompt: Annotated[str | None, typer.Option(help="System message.")] = None,
    prefill_response: Annotated[
        str | None, typer.Option(help="Beginning of the answer, to be continued.")
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
    extra_eos_token: Annotated[
        list[str] | None, typer.Option(help="A further token that ends the text; repeatable.")
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
            help="Seed of the draws; the text is mlx_lm.generate's with the same seed.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_kv_size: Annotated[
        int | None,
        typer.Option(
            help="Keep this many positions only: the first 4 and the newest.", rich_help_panel=CACHE
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
        int, typer.Option(help="Prompt tokens in one forward.", rich_help_panel=CACHE)
    ] = 2048,
    show_accepted: Annotated[
        bool,
        typer.Option(
            "--show-accepted",
            help="Colour the text by origin: drafted tokens green, the target's own plain.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object only.", rich_help_panel=OUTPUT),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="No summary.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Generate text: the target's own, with a drafter that makes it come faster."""
    import mlx.core as mx

    from dspine_mlx.generate import check_numbers, stream_generate
    from dspine_mlx.load import DEMO, check_context, load, read_config, resolve
    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.verify_length.schedule import prepare

    check_numbers(max_tokens, "auto", prefill_step_size, max_kv_size)
    text = read_prompt(prompt)
    template = parse_object("--chat-template-args", chat_template_args)
    length = parse_verify_length(verify_length)
    sampler = Sampler(temp, top_p, min_p, min_tokens_to_keep, top_k, xtc_probability, xtc_threshold)
    if seed is not None:  # as mlx_lm.generate: before loading, which draws initial weights
        mx.random.seed(seed)
    if model is None and draft_model is None:
        typer.echo("Using the small pair that ships with dspine-mlx; see --model.", err=True)
        model, draft_model = str(DEMO / "target"), str(DEMO / "drafter")
    target, tokenizer, drafter = load(
        model,
        draft_model,
        kernels=kernels,
        adapter_path=adapter_path,
        tokenizer_config={"trust_remote_code": trust_remote_code},
    )
    for token in extra_eos_token or []:
        add_eos_token(tokenizer, token)
    if drafter is not None and length == "auto":
        line = partial(typer.echo, err=True) if explain else None
        prepare(drafter, profile=not no_profile, explain=line)
    special = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)  # as mlx_lm.generate
    sampler = replace(sampler, xtc_special_tokens=special, seeded=seed is not None)
    if not ignore_chat_template and has_template(tokenizer, system_prompt):
        tokens = apply_template(tokenizer, text, system_prompt, prefill_response, template)
    else:
        tokens = tokenizer.encode(text)
    if model is not None:
        check_context(read_config(resolve(model)), len(tokens))
    responses = stream_generate(
        target,
        tokenizer,
        tokens,
        drafter,
        max_tokens=max_tokens,
        sampler=sampler,
        verify_length=length,
        max_kv_size=max_kv_size,
        prefill_step_size=prefill_step_size,
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
    )
    if as_json:
        typer.echo(json.dumps(report(responses)))
    else:
        last = show(responses, show_accepted)
        if not quiet:
            summary(last)


def read_prompt(prompt: str | None) -> str:
    if prompt is None:
        raise InputError("there is no prompt; give one with -p TEXT, or '-p -' for standard input")
    if prompt == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8: {error}") from error
    else:
        text = prompt.replace("\\n", "\n").replace("\\t", "\t")
    if not text:
        raise InputError("the prompt is empty; give at least one token")
    return text


def add_eos_token(tokenizer: "TokenizerWrapper", token: str) -> None:
    try:
        tokenizer.add_eos_token(token)
    except ValueError as error:
        raise InputError(f"--extra-eos-token {token!r} is no token of this model") from error


def parse_object(flag: str, value: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise InputError(f"{flag} is {value!r}; it must be a JSON object")
    own = parsed.keys() & {"add_generation_prompt", "continue_final_message"}
    if own:
        raise InputError(f"{flag} sets {', '.join(own)}, which --prefill-response decides")
    return parsed


def parse_verify_length(value: str) -> int | str:
    if value == "auto":
        return value
    if not value.isdecimal():
        raise InputError(f"--verify-length is {value!r}; it must be 'auto' or a number from 0 on")
    return int(value)


def has_template(tokenizer: "TokenizerWrapper", system_prompt: str | None) -> bool:
    if not tokenizer.has_chat_template:
        if system_prompt is not None:
            raise InputError(
                "this tokenizer has no chat template, so --system-prompt can't be used"
            )
        typer.echo("This tokenizer has no chat template; the prompt is used as it is.", err=True)
    return tokenizer.has_chat_template


def apply_template(
    tokenizer: "TokenizerWrapper",
    prompt: str,
    system_prompt: str | None,
    prefill_response: str | None,
    arguments: dict[str, Any],
) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    prefilled = prefill_response is not None
    if prefill_response is not None:
        messages.append({"role": "assistant", "content": prefill_response})
    return tokenizer.apply_chat_template(
        messages,
        continue_final_message=prefilled,
        add_generation_prompt=not prefilled,
        **arguments,
    )


def show(responses: "Iterator[GenerationResponse]", by_origin: bool) -> "GenerationResponse":
    """Print the text as it comes; by_origin colours what was drafted (on a terminal)."""
    for response in responses:
        drafted = by_origin and response.from_draft
        typer.echo(typer.style(response.text, fg="green") if drafted else response.text, nl=False)
    typer.echo()
    return response


def report(responses: "Iterator[GenerationResponse]") -> dict[str, Any]:
    """The object that --json prints."""
    text, tokens = "", []
    for last in responses:
        text += last.text
        tokens.append(last.token)
    statistics = last.statistics
    return {
        "text": text,
        "tokens": tokens,
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "rounds": statistics.rounds,
        "acceptance_length": statistics.acceptance_length,
        "accepted_histogram": histogram(statistics.accepted_histogram),
        "verify_lengths": histogram(statistics.verify_lengths),
        "peak_memory_gb": last.peak_memory,
        "finish_reason": last.finish_reason,
    }


def histogram(counts: dict[int, int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts)}


def summary(last: "GenerationResponse") -> None:
    """Speed and acceptance on standard error."""
    from rich.console import Console
    from rich.table import Table

    statistics = last.statistics
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("prompt", f"{last.prompt_tokens} tokens", f"{last.prompt_tps:.1f} tokens/s")
    table.add_row(
        "generation", f"{last.generation_tokens} tokens", f"{last.generation_tps:.1f} tokens/s"
    )
    if statistics.rounds:
        table.add_row(
            "acceptance",
            f"{statistics.acceptance_length:.2f} tokens a round",
            f"{statistics.rounds} rounds, {statistics.accepted} of {statistics.drafted} drafted "
            "tokens accepted",
        )
    table.add_row("peak memory", f"{last.peak_memory:.2f} GB", "")
    console = Console(stderr=True, highlight=False)
    console.print(table)
    if statistics.verdict:
        console.print(f"  {statistics.verdict}", soft_wrap=True)
    if statistics.rounds:
        console.print(histogram_table(statistics.accepted_histogram))


def histogram_table(counts: "Counter[int]") -> "Table":
    from rich.table import Table

    table = Table("accepted", "rounds", "", box=None, padding=(0, 2))
    for n in range(max(counts) + 1):
        bar = "█" * round(40 * counts[n] / max(counts.values()))
        table.add_row(str(n), str(counts[n]), bar)
    return table
