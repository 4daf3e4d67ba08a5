"""mlx_lm.server's ModelProvider, with block drafters bound to the loaded target."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import server as host
from mlx_lm.models.cache import make_prompt_cache

from dspine_mlx.drafters.drafter import Drafter
from dspine_mlx.errors import InputError
from dspine_mlx.load import load_drafter, read_config, resolve
from dspine_mlx.server.call import UnknownModel
from dspine_mlx.server.options import Options
from dspine_mlx.verify_length.schedule import prepare

DEFAULT = "default_model"  # mlx_lm's name for what the command line gave


class Provider(host.ModelProvider):
    """Loads the target once: a request with another drafter, or none, does not touch it."""

    def __init__(self, cli_args: Namespace, options: Options):
        super().__init__(cli_args)
        if self.is_distributed and cli_args.draft_model is not None:
            raise InputError("drafting is for one machine; start without --draft-model")
        self.options = options
        self.model_key: Any  # (model, adapter, drafter)
        self.drafters: dict[str, Drafter] = {}  # of the loaded target, the last one used
        self.context_length: int | None = None
        self.vocab_size: int | None = None
        self.target_caches = 0  # cache objects the target needs
        if cli_args.model and Path(cli_args.model).exists():  # the name that /v1/models gives it
            self._model_map[str(Path(cli_args.model).resolve())] = cli_args.model

    def reset(self) -> None:
        super().reset()
        self.drafters = {}

    def target_key(self) -> tuple[str, str | None]:
        return self.model_key[:2]

    def load(
        self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None
    ) -> tuple[Any, Any]:
        draft = self._draft_model_map.get(draft_model_path, draft_model_path)
        self.draft_model = None
        if self.model_key is not None:  # the base class reloads whatever differs from its key
            self.model_key = (*self.target_key(), None)
        loaded = super().load(model_path, adapter_path, None)
        if draft is not None:
            self.draft_model = self.drafter(draft)
        self.model_key = (*self.target_key(), draft)
        return loaded

    def _load(
        self,
        model_path: str | None,
        adapter_path: str | None = None,
        draft_model_path: str | None = None,
    ) -> None:
        """Load a target. What can't be had is refused before the loaded one is given up."""
        if model_path is None:
            raise UnknownModel("the server was started without --model; name one in the request")
        try:
            config = read_config(resolve(model_path))
        except InputError as error:
            raise UnknownModel(str(error)) from error
        if adapter_path is not None and not Path(adapter_path).exists():
            raise UnknownModel(f"there is no adapter folder {adapter_path}")
        super()._load(model_path, adapter_path, None)
        text = config | config.get("text_config", {})
        self.context_length, self.vocab_size = context_length(text), text.get("vocab_size")
        self.target_caches = len(make_prompt_cache(self.model))

    def drafter(self, path: str) -> Drafter:
        if path not in self.drafters:
            self.drafters = {}
            mx.clear_cache()
            drafter = load_drafter(path, self.model, kernels=self.options.kernels)
            auto = self.options.verify_length == "auto"
            prepare(drafter, profile=self.options.profile and auto)
            self.drafters = {path: drafter}
        return self.drafters[path]

    def draft_for(self, wanted: host.ModelDescription) -> str | None:
        """A request's drafter: its own, or the command line's with the command line's model."""
        if self.is_distributed:
            return None
        if wanted.draft != DEFAULT:
            return wanted.draft
        model = self._model_map.get(wanted.model, wanted.model)
        return self.cli_args.draft_model if self.cli_args.model in (None, model) else None


def context_length(config: dict[str, Any]) -> int | None:
    """Positions a model was made for: max_position_embeddings, or more with scaled rotary ones."""
    limit = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if limit is None or factor is None:
        return limit
    return max(limit, int(factor * (original or limit)))
