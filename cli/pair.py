"""The pair that a command runs: which drafter it takes, and loading both."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.nn as nn
import typer
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dspine_mlx.arguments import check_top_k, vocabulary_of
from dspine_mlx.cache_folder import present
from dspine_mlx.checkpoints.files import read_config
from dspine_mlx.cli.options import Pair
from dspine_mlx.cli.ranks import leads
from dspine_mlx.cli.screen import working
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import DEMO, load, resolve
from dspine_mlx.models.choose import choose, hint
from dspine_mlx.models.fit import check_configs
from dspine_mlx.models.needs import AUTO, is_here
from dspine_mlx.round.sampler import Sampler, never_excluded
from dspine_mlx.verify_length.schedule import prepare
from dspine_mlx.verify_length.store import costs_path

REFUSED = {"--adapter-path": "adapter_path", "--quantize-activations": "model_config"}  # in a group


@dataclass(frozen=True)
class Loaded:
    """A target, its tokenizer, and its drafter if it has one."""

    name: str
    target: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter | None

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_config(resolve(self.name))

    def prepare(
        self, length: int | str, profile: bool, explain: Callable[[str], None] | None = None
    ) -> None:
        """Read or measure what steps cost, if the verify length needs that. explain: called with a
        line for every round."""
        if self.drafter is not None and not self.drafter.plain and length == AUTO:
            measure_costs(self.drafter, profile, explain)

    def check_sampler(self, sampler: Sampler) -> None:
        """`InputError` for a top-k that is no smaller than the vocabulary."""
        if sampler.temp > 0:
            check_top_k(sampler.top_k, vocabulary_of(self.target) or self.tokenizer.vocab_size)

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """Tokens that XTC never leaves out, as mlx_lm.generate and mlx_lm.chat have them."""
        return never_excluded(self.tokenizer)


def chosen(model: str | None, draft_model: str | None) -> str | None:
    """The drafter's name; for `auto` the folder of the registry's, after saying what it is."""
    if draft_model != AUTO:
        return draft_model
    if model is None:
        return None
    name, revision, entry = choose(model)
    licence = entry.licence or "none found"
    typer.echo(f"Drafter: {name}; licence: {licence}; tested: {entry.tested}.", err=True)
    check_configs(model, name, revision)
    return str(resolve(name, revision))


def loading(*names: str | None) -> AbstractContextManager[Callable[[str], None]]:
    """Say that models are loaded; downloads have bars of their own."""
    here = all(name is None or is_here(name) for name in names)
    return working("Loading the model" if here else "")


def measure_costs(
    drafter: Drafter, profile: bool = True, explain: Callable[[str], None] | None = None
) -> None:
    """Make the drafter's schedule: costs are on file, or measured now, which takes seconds."""
    known = not profile or present(costs_path(drafter))
    with working("" if known else "Measuring what steps cost here, once per pair"):
        prepare(drafter, profile=profile, explain=explain)


def load_here(
    model: str | None, draft_model: str | None, **options: Any
) -> tuple[nn.Module, TokenizerWrapper, Drafter | None]:
    """`dspine_mlx.load`, or this machine's part if it leads several."""
    group = leads.get()
    if group is None:
        return load(model, draft_model, **options)
    for flag, name in REFUSED.items():
        if options.pop(name, None):
            raise InputError(f"{flag} can't be used on several machines; leave it out")
    if model is None:
        model, draft_model = str(DEMO / "target"), draft_model or str(DEMO / "drafter")
    return group.load(model, draft_model, **options)


def load_pair(
    pair: Pair,
    length: int | str,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
) -> Loaded:
    """Load what the options name; say so if there is nothing to draft with."""
    model, draft_model = pair.model, chosen(pair.model, pair.draft_model)
    if model is None and draft_model is None:
        typer.echo("Using the small pair that ships with dspine-mlx; see --model.", err=True)
        model, draft_model = str(DEMO / "target"), str(DEMO / "drafter")
    model = model or str(DEMO / "target")  # to be looked up without a drafter
    with loading(model, draft_model) as say:
        target, tokenizer, drafter = load_here(
            model,
            draft_model,
            kernels=pair.kernels,
            told=say,
            draft_quant=pair.draft_quant,
            adapter_path=pair.adapter_path,
            tokenizer_config=(tokenizer_config or {})
            | {"trust_remote_code": pair.trust_remote_code},
            model_config=model_config or {},
        )
    if draft_model is None and length != 0:
        typer.echo(f"No drafter: plain decoding. {hint(model or '')}.", err=True)
    return Loaded(str(model), target, tokenizer, drafter)
