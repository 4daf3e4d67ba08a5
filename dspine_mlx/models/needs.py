"""What a command would have to download, found before anything large is imported."""

from pathlib import Path

from dspine_mlx.errors import InputError
from dspine_mlx.models.hub import cached_file, cached_folder, check_reachable, folder_of
from dspine_mlx.models.registry import Entry, fitting, registry

AUTO, LOOKUP = "auto", "lookup"  # what --draft-model takes besides folders and Hub ids
FORMATS = (".safetensors", ".bin", ".pt")


def check_needs(*names: str | Path | None) -> None:
    """`InputError` at once for models that are not here while the Hub can't be reached."""
    missing = [str(name) for name in names if name is not None and not is_here(name)]
    if missing:
        check_reachable(*missing)


def check_pair(model: str | None, draft_model: str | None) -> None:
    """`check_needs` of a target and its drafter, which may be "auto"."""
    if model is None and draft_model not in (None, AUTO, LOOKUP):
        raise InputError(f"the drafter {draft_model} needs its target; name it with --model")
    if draft_model != AUTO:
        check_needs(model, draft_model)
        return
    found = [] if model is None else candidates(model)
    if any(snapshot(entry) for entry in found):
        check_needs(model)
    else:
        check_needs(model, *(entry.id for entry in found[:1]))


def is_here(name: str | Path) -> bool:
    """Whether a model is a folder, or in the Hub's cache with weights of any format; or nothing to
    load at all."""
    if name == LOOKUP:
        return True
    if folder_of(name) is not None:
        return True
    config = cached_file(str(name), "config.json")
    return config is not None and any(
        path.suffix in FORMATS for path in config.parent.iterdir() if path.is_file()
    )


def candidates(model: str) -> list[Entry]:
    """Entries that fit a target and need no conversion first."""
    return [entry for entry in fitting(model, registry()) if entry.automatic]


def snapshot(entry: Entry) -> tuple[str | None, Path] | None:
    """The revision of a drafter that is in the Hub's cache, and its folder; the entry's own
    first."""
    for revision in (entry.revision, None):
        folder = cached_folder(entry.id, revision)
        if folder is not None:
            return revision, folder
    return None
