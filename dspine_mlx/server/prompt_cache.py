"""mlx_lm's prompt cache, with the drafter's caches in the same entries as the target's."""

from typing import Any

from dspine_mlx.server.provider import Provider
from dspine_mlx.target.prompt_cache import PromptCaches

Key = tuple[str, str | None, str | None]  # model, adapter, drafter


class Entry(list):
    """The target's caches, then those of one drafter, if it has run over these tokens."""

    draft: str | None = None


class PromptCache(PromptCaches):
    """Requests with any drafter or none share entries. A request with another drafter than an
    entry's gets only the target's caches."""

    def __init__(self, provider: Provider, max_size: int, max_bytes: int):
        super().__init__(max_size, max_bytes)
        self.provider = provider

    def insert_cache(
        self, model: Key, tokens: list[int], prompt_cache: list[Any], **options: Any
    ) -> None:
        entry = Entry(prompt_cache)
        if len(entry) > self.provider.target_caches:
            entry.draft = model[2]
        super().insert_cache(model[:2], tokens, entry, **options)

    def fetch_nearest_cache(
        self, model: Key, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        cache, rest = super().fetch_nearest_cache(model[:2], tokens)
        if cache is None:
            return None, rest
        same = isinstance(cache, Entry) and cache.draft == model[2]
        kept = cache if same else cache[: self.provider.target_caches]
        return list(kept), rest
