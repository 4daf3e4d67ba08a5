"""The cache folder that `conftest` gives every test."""

from pathlib import Path

from dspine_mlx.verify_length import store


def cache_folder() -> Path:
    return store.cache_folder()
