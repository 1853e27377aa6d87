"""Fetch a service's own files of a checkpoint from the Hugging Face hub into its cache. Control side, without torch.

First the descriptions, then, by what their indices say, exactly the weight files that hold a needed tensor. Offline
mode, tokens, cache folder and endpoint are huggingface_hub's own settings.
"""

import errno
import shutil
from pathlib import Path

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from shared_runtime.stored import INDEX, Component, component_folder, has_weights, missing_files, needed_weight_files
from shared_schema.errors import DeployError

_DESCRIPTION_TYPES = ("json", "txt", "jinja")
_ERRORS = (OSError, ValueError, *HfHubHTTPError.__bases__)
"""Of the last, one is the base of all errors of its HTTP client, whichever that is: those are no `OSError`."""


def hub_patterns(needs: frozenset[Component]) -> list[str]:
    """Patterns of every file but weights that `needs` calls for: nothing of `FL2VA/` or `Ref2VA/` matches."""
    folders = sorted({component_folder(Path(), component).name for component in needs})
    return [INDEX, *(f"{folder}/*.{suffix}" for folder in folders for suffix in _DESCRIPTION_TYPES)]


def weight_names(path: Path, needs: frozenset[Component]) -> list[str]:
    """Weight files that hold a needed tensor, relative to `path`, by the indices that lie there already."""
    return sorted(
        {
            f"{component_folder(path, component).name}/{file}"
            for component in needs
            if has_weights(component)
            for file in needed_weight_files(path, component)
        }
    )


def fetch(model: str, needs: frozenset[Component], revision: str | None, cache: Path | None) -> Path:
    """The snapshot folder of hub repository `model`, complete for `needs`; its name is the commit.

    What is there already is not asked for again: a pinned commit that is complete needs no request at all, a branch
    needs one, or none where the hub is out of reach.

    Raises:
        DeployError: not found, gated, out of reach, no room on the disk, or offline with a file missing.
    """
    if constants.HF_HUB_OFFLINE:
        return _offline(model, needs, _cached(model, revision, cache))
    commit = _snapshot(model, revision, cache, [INDEX]).name
    return _download(model, needs, commit, cache)


def _cached(model: str, revision: str | None, cache: Path | None) -> Path | None:
    found = try_to_load_from_cache(model, INDEX, cache_dir=cache, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _offline(model: str, needs: frozenset[Component], folder: Path | None) -> Path:
    missing = [INDEX] if folder is None else missing_files(folder, needs)
    if folder is None or missing:
        more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
        raise DeployError(
            f"{missing[0]}{more} of {model} not in the cache, and HF_HUB_OFFLINE is set: run `fetch` once without it, "
            "or give the checkpoint's folder"
        )
    return folder


def _download(model: str, needs: frozenset[Component], commit: str, cache: Path | None) -> Path:
    folder = _snapshot(model, commit, cache, hub_patterns(needs))
    weights = weight_names(folder, needs)
    _check_disk(model, commit, cache, weights)
    folder = _snapshot(model, commit, cache, weights)
    missing = missing_files(folder, needs)
    if missing:
        raise DeployError(
            f"{model} at {commit} has no {missing[0]}: not a MiniMax-H3 checkpoint in the released layout"
        )
    return folder


def _snapshot(model: str, revision: str | None, cache: Path | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=cache, allow_patterns=patterns))
    except _ERRORS as error:
        raise _explained(error, model, revision, cache) from error


def _check_disk(model: str, commit: str, cache: Path | None, patterns: list[str]) -> None:
    try:
        files = snapshot_download(model, revision=commit, cache_dir=cache, allow_patterns=patterns, dry_run=True)
    except _ERRORS as error:
        raise _explained(error, model, commit, cache) from error
    needed = sum(file.file_size or 0 for file in files if file.will_download)
    folder = _cache_folder(cache)
    found = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    if needed > found:
        raise DeployError(
            f"{model} needs {needed / 1e9:.1f} GB more in {folder}, which has {found / 1e9:.1f} GB free: "
            "make room, or set HF_HUB_CACHE to another disk"
        )


def _cache_folder(cache: Path | None) -> Path:
    return Path(constants.HF_HUB_CACHE) if cache is None else cache


def _explained(error: Exception, model: str, revision: str | None, cache: Path | None) -> DeployError:
    """What a failed request means for the person who started the service, in one line."""
    match error:
        case GatedRepoError():
            page = f"{constants.ENDPOINT}/{model}"
            return DeployError(f"{model} is gated: accept its licence at {page} and set HF_TOKEN")
        case RepositoryNotFoundError():
            return DeployError(f"the hub has no {model}, or it is private: check --model, or set HF_TOKEN")
        case RevisionNotFoundError():
            return DeployError(f"{model} has no revision {revision}: correct the revision of the deploy file")
        case LocalEntryNotFoundError():
            return DeployError(f"{constants.ENDPOINT} is out of reach and the cache has not all of {model}: try again")
        case HfHubHTTPError():
            return DeployError(f"the hub answered {error.response.status_code} for {model}: try again later")
        case OSError(errno=errno.ENOSPC):
            return DeployError(f"no space left in {_cache_folder(cache)}: make room, or set HF_HUB_CACHE")
        case _:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            return DeployError(f"{model} cannot be fetched into {_cache_folder(cache)}: {line}")
