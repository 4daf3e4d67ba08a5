"""mlx_lm.server's ModelProvider, with block drafters bound to the loaded target."""

import gc
import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import server as host
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from dspine_mlx.batch.generation import why_alone
from dspine_mlx.batch.policies import batch_policy
from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.group.meet import meet
from dspine_mlx.group.no_drafter import NoDrafter
from dspine_mlx.group.shards import check_part, check_rollback, see_whole, why_not_loaded
from dspine_mlx.group.target import LeadTarget, PartOfTarget
from dspine_mlx.group.watchdog import LOADING
from dspine_mlx.load import DEMO, load_drafter, read_config, resolve, same_random_state
from dspine_mlx.models.choose import choose, hint
from dspine_mlx.models.fit import check_configs
from dspine_mlx.models.needs import AUTO, LOOKUP
from dspine_mlx.server.failure import UnknownModel
from dspine_mlx.server.fields import FieldError
from dspine_mlx.server.flags import check_flags
from dspine_mlx.server.group_loading import check_group_flags, follow_loading, loading
from dspine_mlx.server.options import ANY, Options
from dspine_mlx.server.prompts import most_characters
from dspine_mlx.target.model import Target
from dspine_mlx.target.open import check_config
from dspine_mlx.verify_length.schedule import prepare

DEFAULT = "default_model"  # mlx_lm's name for what the command line gave
STOCK: Any = host.ModelProvider  # before that name is rebound


class Provider(host.ModelProvider):
    """Loads the target once; a request with another drafter, or none, leaves it loaded."""

    def __init__(self, cli_args: Namespace, options: Options):
        check_flags(cli_args)
        self.group = meet(False, options.patience)
        follows = self.group is not None and self.group.follows
        if self.group is not None:
            self.group.pipeline = cli_args.pipeline
            check_group_flags(cli_args)
        if cli_args.model is None:
            default_pair(cli_args, quiet=follows)
        elif cli_args.draft_model in (None, AUTO) and not follows:
            automatic_drafter(cli_args)
        super().__init__(cli_args)
        self.options = options
        self.part: PartOfTarget | None = None  # of a group's target
        self.model_key: Any  # (model, adapter, drafter)
        self.model: Any
        self.drafters: dict[str, Drafter] = {}  # of the loaded target, the last one used
        self.context_length: int | None = None
        self.vocab_size: int | None = None
        self.most_characters: int | None = None  # of a prompt
        self.target_caches = 0  # cache objects the target needs
        self.loading = self.replaced = False
        if Path(cli_args.model).exists():  # its name in /v1/models
            self._model_map[str(Path(cli_args.model).resolve())] = cli_args.model

    def reset(self) -> None:
        super().reset()
        self.drafters, self.part = {}, None

    def target_key(self) -> tuple[str, str | None]:
        return self.model_key[:2]

    # ---- in the HTTP threads

    def allowed(self, param: str) -> set[str] | None:
        """Names allowed in a field of a request (model, draft_model or adapters); None: any. A
        group keeps the model that it was started with."""
        named = self.options.allow_models if self.group is None or param != "model" else ()
        if named is None:
            named = () if reachable(self.cli_args.host) else (ANY,)
        if ANY in named:
            return None
        own = {
            "model": (*self._model_map, self.cli_args.model),
            "draft_model": (DEFAULT, self.cli_args.draft_model),
            "adapters": (self.cli_args.adapter_path,),
        }
        return {name for name in (*own[param], *named) if name is not None}

    def check_names(self, wanted: host.ModelDescription) -> None:
        """Raise `UnknownModel` for a name that requests may not use."""
        names = {"model": wanted.model, "draft_model": wanted.draft, "adapters": wanted.adapter}
        for param, name in names.items():
            allowed = self.allowed(param)
            if name is not None and allowed is not None and name not in allowed:
                raise UnknownModel(
                    f"{param} is {name}, which this server does not load for requests; "
                    "--allow-models says what it does",
                    param,
                )
        self.check_adapter(wanted)

    def check_adapter(self, wanted: host.ModelDescription) -> None:
        """mlx_lm loads the command line's model with the command line's adapter, whatever a request
        asks for."""
        own = self._adapter_map.get(wanted.model)
        if wanted.model in self._adapter_map and wanted.adapter not in (None, own):
            loaded = "without adapters" if own is None else f"with the adapters {own}"
            raise UnknownModel(
                f"adapters is {wanted.adapter}, but this server's own model is loaded {loaded}; "
                "name the model, too, to have it loaded with others",
                "adapters",
            )

    def download(self, wanted: host.ModelDescription) -> None:
        """Download a model that is not here yet; `UnknownModel` if it can't be loaded."""
        model = self._model_map.get(wanted.model, wanted.model)
        if self.model_key is None or self.model_key[0] != model:
            folder_of(model)

    def loaded_tokenizer(self, wanted: host.ModelDescription) -> Any:
        """The tokenizer of a model if it is the loaded one, or None."""
        key, tokenizer = self.model_key, self.tokenizer
        model = self._model_map.get(wanted.model, wanted.model)
        adapter = self._adapter_map.get(wanted.model, wanted.adapter)
        return tokenizer if key is not None and key[:2] == (model, adapter) else None

    def takes_images(self, wanted: host.ModelDescription) -> bool:
        return self.loaded_tokenizer(wanted) is not None and self.processor is not None

    def draft_for(self, wanted: host.ModelDescription) -> str | None:
        """A request's drafter: its own, or the command line's with the command line's model."""
        if wanted.draft != DEFAULT:
            return wanted.draft
        model = self._model_map.get(wanted.model, wanted.model)
        return self.cli_args.draft_model if self.cli_args.model in (None, model) else None

    # ---- in the generation thread

    def loaded_drafter(self, wanted: host.ModelDescription) -> Drafter | None:
        """A request's drafter, if it is loaded and so is the request's model."""
        if self.loaded_tokenizer(wanted) is None:
            return None
        return self.drafters.get(self._draft_model_map.get(wanted.draft, wanted.draft))

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        draft = self._draft_model_map.get(draft_model_path, draft_model_path)
        self.draft_model = None
        if self.model_key is not None:  # the base class reloads whatever differs from its key
            self.model_key = (*self.target_key(), None)
        with self.busy():
            loaded = super().load(model_path, adapter_path, None)
            if self.part is not None and self.part.channel.rank > 0:
                follow_loading(self.part, self.tokenizer)
            else:
                with loading(self.part):
                    if draft is not None:
                        self.draft_model = self.drafter(draft)
                    elif isinstance(self.part, LeadTarget):
                        self.draft_model = NoDrafter(self.part)
        self.model_key = (*self.target_key(), draft)
        return loaded

    def _load(
        self,
        model_path: str,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        """Load a target; one that fails to load leaves the current one in place."""
        folder = folder_of(model_path)
        config = read_config(folder)
        if adapter_path is not None and not Path(adapter_path).exists():
            raise UnknownModel(f"there is no adapter folder {adapter_path}", "adapters")
        if self.model is not None:
            check_memory(folder)
        if self.group is not None:
            self.load_part(model_path)
            return
        successor = STOCK(self.cli_args)
        try:
            check_config(config)
            successor._load(model_path, adapter_path, None)
            caches = len(make_prompt_cache(successor.model))
        except Exception as error:  # mlx_lm may raise anything on a bad checkpoint
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UnknownModel(f"{model_path} can't be loaded: {reason}") from error
        self.succeed(successor, config, caches)

    def load_part(self, model_path: str) -> None:
        """This rank's part of a target; `UnknownModel` on every rank if one can't load it."""
        assert self.group is not None
        channel, problem = self.group.channel, ""
        check_part(model_path, channel, self.group.pipeline)
        successor = STOCK(self.cli_args)
        try:
            with same_random_state():
                successor._load(model_path, None, None)
        except Exception as error:  # noqa: BLE001  # mlx_lm may raise anything
            problem = f"{model_path} can't be loaded: {why_not_loaded(error, channel)}"
        channel.agree(problem, LOADING)
        caches = len(make_prompt_cache(successor.model))
        self.succeed(successor, read_config(resolve(model_path)), caches)
        kind = PartOfTarget if self.group.follows else LeadTarget
        self.part = kind(successor.model, channel)
        check_rollback(self.part)
        if not self.group.follows:
            see_whole(self.part, model_path)

    def succeed(self, successor: Any, config: dict[str, Any], caches: int) -> None:
        """Take over what another provider has loaded."""
        text = config | (config.get("text_config") or {})
        limit, vocab_size = context_length(text), vocabulary(successor.model, text)
        most = most_characters(successor.tokenizer, limit)
        self.reset()
        self.model, self.tokenizer = successor.model, successor.tokenizer
        self.processor, self.is_batchable = successor.processor, successor.is_batchable
        self.model_key, self.target_caches = successor.model_key, caches
        self.context_length, self.vocab_size, self.most_characters = limit, vocab_size, most
        self.replaced = True

    def drafter(self, path: str) -> Drafter:
        if path not in self.drafters:
            try:
                target = self.model if self.part is None else self.part
                drafter = load_drafter(
                    path, target, kernels=self.options.kernels, told=logging.info
                )
                auto = self.options.verify_length == "auto"
                prepare(drafter, profile=self.options.profile and auto)
                if self.part is None and why_alone(drafter) is None:
                    batch_policy(self.options.verify_length, drafter)  # it may measure, too
            except InputError as error:
                raise FieldError("draft_model", str(error)) from error
            self.drafters, self.replaced = {path: drafter}, True
        return self.drafters[path]

    def release(self) -> None:
        """Free the memory of replaced models, once nothing refers to them any more."""
        if self.replaced:
            gc.collect()
            mx.clear_cache()
            self.replaced = False

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark the time of loading or measuring, which is not a stall."""
        self.loading = True
        try:
            yield
        finally:
            self.loading = False


def default_pair(cli_args: Namespace, quiet: bool = False) -> None:
    """Use the pair that ships with the package if there is no --model."""
    if cli_args.draft_model == LOOKUP:
        cli_args.model = str(DEMO / "target")
        return
    if cli_args.draft_model not in (None, AUTO):
        raise InputError(
            f"the drafter {cli_args.draft_model} needs its target; add --model with the model it "
            "was trained for"
        )
    cli_args.model, cli_args.draft_model = str(DEMO / "target"), str(DEMO / "drafter")
    if not quiet:
        logging.warning(
            "no --model was given: serving the small demonstration pair that ships with dspine-mlx"
        )


def automatic_drafter(cli_args: Namespace) -> None:
    """--draft-model auto: the registry's; without one, say which would fit."""
    if cli_args.draft_model is None:
        logging.warning(f"no --draft-model, so plain decoding: {hint(cli_args.model)}")
        return
    name, revision, _ = choose(cli_args.model)
    logging.warning(f"--draft-model auto: {name}")
    check_configs(cli_args.model, name, revision)
    cli_args.draft_model = str(resolve(name, revision))


def reachable(address: str) -> bool:
    """Whether other machines may reach a server that listens there."""
    try:
        return not ip_address(address).is_loopback
    except ValueError:
        return address != "localhost"


def folder_of(model: str) -> Path:
    """The folder of a model, downloaded if need be; `UnknownModel` if it has no config.json."""
    try:
        folder = resolve(model, patterns=DEFAULT_ALLOW_PATTERNS)
        read_config(folder)
    except InputError as error:
        raise UnknownModel(str(error)) from error
    return folder


def check_memory(folder: Path) -> None:
    """Refuse a model whose weights don't fit beside the loaded ones, if the machine states its
    limit."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit is None:
        return
    needed = sum(path.stat().st_size for path in folder.glob("model*.safetensors"))
    used = mx.get_active_memory()
    if needed + used > int(limit):
        raise UnknownModel(
            f"{folder.name} has {needed / 1e9:.1f} GB of weights, which don't fit beside the "
            f"{used / 1e9:.1f} GB in use: start the server with it instead"
        )


def vocabulary(model: Any, config: dict[str, Any]) -> int | None:
    """Number of tokens that a model has logits for, if it can be found."""
    try:
        return Target(model).vocab_size
    except InputError:  # a model that can't be drafted for
        return config.get("vocab_size")


def context_length(config: dict[str, Any]) -> int | None:
    """Positions a model was made for: max_position_embeddings, or more with scaled rotary
    embeddings."""
    limit = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if limit is None or factor is None:
        return limit
    return max(limit, int(factor * (original or limit)))
