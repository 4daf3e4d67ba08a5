"""dspine-mlx chat: a conversation in the terminal."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspine_mlx.cli.generate import parse_verify_length
from dspine_mlx.cli.options import (
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
from dspine_mlx.errors import InputError

if TYPE_CHECKING:
    from dspine_mlx.drafters.drafter import Drafter

SAMPLING, CACHE = "Sampling", "Cache"


def chat(
    model: TargetOption = None,
    draft_model: DraftOption = None,
    adapter_path: AdapterOption = None,
    trust_remote_code: TrustOption = False,
    draft_quant: DraftQuantOption = None,
    verify_length: VerifyLengthOption = None,
    kernels: KernelsOption = "auto",
    no_lookup: NoLookupOption = False,
    no_profile: NoProfileOption = False,
    system_prompt: Annotated[str | None, typer.Option(help="System message.")] = None,
    chat_template_args: Annotated[
        str, typer.Option(help="Arguments of the chat template, a JSON object.")
    ] = "{}",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-m", help="Tokens per answer at most; -1: no limit.")
    ] = 256,
    temp: Annotated[
        float, typer.Option(help="Temperature; 0 is greedy.", rich_help_panel=SAMPLING)
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Keep the likeliest tokens up to this mass; 1: all.", rich_help_panel=SAMPLING
        ),
    ] = 1.0,
    xtc_probability: Annotated[
        float,
        typer.Option(
            help="Chance, per token, that XTC leaves out the top choices.", rich_help_panel=SAMPLING
        ),
    ] = 0.0,
    xtc_threshold: Annotated[
        float,
        typer.Option(
            help="Probability from which a token is a top choice for XTC.", rich_help_panel=SAMPLING
        ),
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the draws.", rich_help_panel=SAMPLING)] = 0,
    max_kv_size: Annotated[
        int | None,
        typer.Option(
            help="Keep this many positions only: the first 4 and the newest.", rich_help_panel=CACHE
        ),
    ] = None,
    prefill_step_size: Annotated[
        int, typer.Option(help="Prompt tokens in one forward.", rich_help_panel=CACHE)
    ] = 2048,
    pipeline: PipelineOption = False,
    patience: PatienceOption = PATIENCE,
) -> None:
    """Chat with a model. Drafted tokens are coloured; /help lists the commands.

    Enter sends a message, Alt-Enter or Ctrl-J starts a new line. Ctrl-C ends an answer, Ctrl-D the
    chat. Messages are kept in ~/.cache/dspine-mlx/chat-history, for the arrow keys.
    """
    import mlx.core as mx

    from dspine_mlx.arguments import check_cache_sizes, check_max_tokens, check_seed
    from dspine_mlx.cli.chat_loop import Chat
    from dspine_mlx.cli.conversation import Conversation
    from dspine_mlx.cli.drafter import chosen, say_what_fits
    from dspine_mlx.cli.prompting import chat_text, parse_object
    from dspine_mlx.group.meet import leading, meet
    from dspine_mlx.load import DEMO, load, read_config, resolve
    from dspine_mlx.round.sampler import Sampler
    from dspine_mlx.verify_length.schedule import prepare

    trusting = {"trust_remote_code": trust_remote_code}
    group = meet(pipeline, patience)
    if group is not None and group.follows:
        group.follow(model or str(DEMO / "target"), trusting)
    with leading(group):
        check_max_tokens(max_tokens)
        check_cache_sizes(prefill_step_size, max_kv_size)
        check_seed(seed)
        length = parse_verify_length(verify_length, None)
        arguments = parse_object("--chat-template-args", chat_template_args)
        mx.random.seed(seed)
        draft_model = chosen(model, draft_model)
        if model is None and draft_model is None:
            typer.echo("Using the small pair that ships with dspine-mlx; see --model.", err=True)
            model, draft_model = str(DEMO / "target"), str(DEMO / "drafter")
        pair: tuple[Any, Any, Drafter | None]
        if group is not None:
            assert model is not None
            if adapter_path is not None:
                raise InputError("--adapter-path can't be used on several machines; leave it out")
            pair = group.load(model, draft_model, trusting, kernels, draft_quant)
        else:
            pair = load(
                model,
                draft_model,
                kernels=kernels,
                draft_quant=draft_quant,
                adapter_path=adapter_path,
                tokenizer_config=trusting,
            )
        target, tokenizer, drafter = pair
        if not tokenizer.has_chat_template:
            raise InputError("this tokenizer has no chat template; use dspine-mlx generate")
        if draft_model is None:
            say_what_fits(model)
            length = 0
        elif drafter is not None and length == "auto":
            prepare(drafter, profile=not no_profile)
        special = (*tokenizer.encode("\n"), *tokenizer.eos_token_ids)  # as mlx_lm.chat
        sampler = Sampler(
            temp,
            top_p,
            xtc_probability=xtc_probability,
            xtc_threshold=xtc_threshold,
            xtc_special_tokens=special,
        )
        conversation = Conversation(
            target,
            tokenizer,
            drafter,
            lambda messages: chat_text(tokenizer, messages, arguments),
            {} if model is None else read_config(resolve(model)),
            max_kv_size,
        )
        conversation.system = system_prompt
        options = {
            "max_tokens": max_tokens,
            "prefill_step_size": prefill_step_size,
            "lookup": not no_lookup,
        }
        Chat(conversation, sampler, length, options).run()
