"""What is in the Hub's cache, and whether the Hub can be reached, without waiting for it."""

import os
import socket
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from dspine_mlx.checkpoints.files import read_config, read_json
from dspine_mlx.errors import InputError

WAIT = 1.0  # seconds for the Hub to answer
DOWNLOAD_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """The snapshot of a model in the Hub's cache, if it has weights; the folder, if it is one."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        found = cached_file(name, "config.json", revision)
        if found is None:
            return None
        folder = found.parent
    return folder if any(folder.glob("*.safetensors")) else None


def cached_file(name: str, file: str, revision: str | None = None) -> Path | None:
    try:
        found = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def online() -> bool:
    """Whether the Hub's machine takes a connection within a second, unless a proxy does that."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in PROXIES):
        return True
    place = urlsplit(constants.ENDPOINT)
    answered: list[bool] = []

    def connect() -> None:
        port = place.port or (443 if place.scheme == "https" else 80)
        try:
            socket.create_connection((place.hostname or "", port), WAIT).close()
        except OSError:
            return
        answered.append(True)

    waiting = Thread(target=connect, daemon=True)  # a name server may not answer at all
    waiting.start()
    waiting.join(WAIT)
    return bool(answered)


def folder_of(path: str | Path) -> Path | None:
    """The folder that a path names, or None for a Hub id; `InputError` for what is neither."""
    if not isinstance(path, str | Path):
        raise InputError(f"{path!r} is no model; give a folder or a Hub id owner/name")
    shown = str(path).encode(errors="backslashreplace").decode()
    try:
        folder = Path(path).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (RuntimeError, OSError, ValueError) as error:  # ~somebody; a name that none can have
        raise InputError(f"{shown} can't be found: {error}") from error
    if is_folder:
        return folder
    if exists:
        raise InputError(f"{path} is a file; give the folder that holds config.json")
    if isinstance(path, Path) or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise InputError(f"there is no folder {shown}; give a model folder or a Hub id owner/name")
    return None


def config_of(name: str | Path, revision: str | None = None) -> dict[str, Any]:
    """A model's config.json: of a folder, of the cache, or downloaded alone, before anything
    large."""
    folder = folder_of(name)
    if folder is not None:
        return read_config(folder)
    found = cached_file(str(name), "config.json", revision)
    if found is not None:
        return read_json(found)
    check_reachable(str(name))
    try:
        return read_json(Path(hf_hub_download(str(name), "config.json", revision=revision)))
    except DOWNLOAD_ERRORS as error:
        raise not_downloaded(name, error) from error


def not_downloaded(name: str | Path, error: Exception) -> InputError:
    reason = str(error).splitlines()[0]
    return InputError(
        f"{name} is no folder here and could not be downloaded from the Hub: {reason}"
    )


def check_reachable(*names: str) -> None:
    """`InputError` at once, where a download would only fail after a long wait."""
    if not online():
        verb = "is" if len(names) == 1 else "are"
        raise InputError(
            f"{' and '.join(names)} {verb} not in the Hub's cache here, and {constants.ENDPOINT} "
            "can't be reached; connect to the network, or give a model folder"
        )
