"""Weights from the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from harness.base import bounds
from harness.base.files import cache_folder
from harness.base.text import list_named, redacted
from harness.config import Weights
from harness.models.config_json import PACKING_FILES
from harness.models.fingerprints import digest
from harness.models.locate import INDEX, SINGLE, Ready, WeightsError, local

# Files of the Hugging Face hub: from its cache without a request, else downloaded.
#
# A download shows the library's own progress bar. A broken connection resumes; an interrupted download
# keeps its complete files. Of a checkpoint only safetensors, configuration and tokenizer are downloaded:
# pickles and Python files may run code.


WANTED = (
    *("config.json", "generation_config.json", INDEX, "*.safetensors"),
    *("tokenizer*.json", *PACKING_FILES),
)
UNWANTED = ("*/*", "consolidated*", "adapter*")  # copies in folders, and under other names


class HubError(RuntimeError):
    """The files are unavailable; the message is one sentence."""


class Unreachable(HubError):
    """The hub does not answer; the message is the end of a sentence."""


def cache_of_hub() -> Path:
    """Where downloads of the hub go."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_file(repo: str, file: str, revision: str) -> Path | None:
    """A file in the hub's cache, in the folder of its commit; null if it is not there. Raises HubError."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, file, revision=revision)
    except HFValidationError as mistake:
        raise HubError(f"hub {repo}: {_clause(mistake)}") from mistake
    except OSError as refusal:
        raise _unreadable(repo, refusal) from refusal
    return Path(found) if isinstance(found, str) else None


def cached_match(repo: str, file: str, revision: str) -> Path | None:
    """The one file in the hub's cache whose name a glob matches, in any case; null: none, or several."""
    folder = cached_checkpoint(repo, revision)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")] if folder else []
    found = _matching(names, file)
    return folder / found[0] if folder and len(found) == 1 else None


def _matching(names: Sequence[str], file: str) -> list[str]:
    """The name itself if it is there, else those that it matches as a glob, in any case."""
    depth = file.count("/")
    alike = [name for name in names if name.count("/") == depth and fnmatchcase(name.lower(), file.lower())]
    return [file] if file in names else alike


def cached_checkpoint(repo: str, revision: str) -> Path | None:
    """The cache's folder of a commit, if it has all wanted files known to the cache; null otherwise.

    Raises HubError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[*WANTED],
                ignore_patterns=[*UNWANTED],
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as mistake:
        raise HubError(f"hub {repo}: {_clause(mistake)}") from mistake
    except OSError as refusal:
        raise _unreadable(repo, refusal) from refusal


def download_file(repo: str, file: str, revision: str) -> Path:
    """Raises HubError, Unreachable."""
    from huggingface_hub import hf_hub_download

    names = [*_files(repo, revision)]
    found = _matching(names, file)
    if len(found) > 1:
        raise HubError(f"hub {repo}: {file} matches {len(found)} files: {list_named(found, 3)}")
    if not found:
        others = [name for name in names if name.endswith(".gguf")]
        hint = f"; it has {list_named(others, 8)}" if others else ""
        raise HubError(f"hub {repo}: has no file {file} in revision {revision}{hint}")
    try:
        return Path(hf_hub_download(repo, found[0], revision=revision))
    except Exception as refusal:  # its HTTP library's errors have no common base
        raise HubError(f"hub {repo}/{file}: {_clause(refusal)}") from refusal


def download_checkpoint(repo: str, revision: str) -> Path:
    """The folder of a commit, all wanted files in it. Raises HubError, Unreachable."""
    from huggingface_hub import snapshot_download

    names = [*_files(repo, revision)]
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
            raise HubError(f"hub {repo}: its weights are pickled; only safetensors are supported")
        ggufs = any(name.endswith(".gguf") for name in names)
        hint = f"; name the type of one of its GGUF files, as in {repo}:Q4_K_M" if ggufs else ""
        raise HubError(f"hub {repo}: has no safetensors{hint}")
    if SINGLE not in names and INDEX not in names:
        raise HubError(f"hub {repo}: has no {SINGLE} and no {INDEX}")
    try:
        wanted, unwanted = [*WANTED], [*UNWANTED]
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted)
        )
    except Exception as refusal:  # as above
        raise HubError(f"hub {repo}: {_clause(refusal)}") from refusal


def download_bytes(source: Weights) -> int | None:
    """What a download of these weights takes, in one request; None: the hub does not say. `source`: without
    placeholders."""
    try:
        sizes = _files(str(source.repo), source.revision or "main")
    except HubError:
        return None
    if source.file:
        wanted = _matching([*sizes], source.file)
        wanted = wanted if len(wanted) == 1 and wanted[0] in sizes else []
    else:
        wanted = [name for name in sizes if _matches(name, WANTED) and not _matches(name, UNWANTED)]
    found = [size for name in wanted if (size := sizes[name]) is not None]
    return sum(found) if wanted and len(found) == len(wanted) else None


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _files(repo: str, revision: str) -> dict[str, int | None]:
    """Names of a repository's files, and their bytes, in one request: the library's own downloads retry many
    times."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(repo, revision=revision, timeout=bounds.HUB_S, files_metadata=True)
    except OfflineModeIsEnabled as offline:
        raise Unreachable("HF_HUB_OFFLINE is set") from offline
    except GatedRepoError as gated:
        raise HubError(f"hub {repo}: gated model: accept its terms on the hub and set HF_TOKEN") from gated
    except RevisionNotFoundError as unknown:
        raise HubError(f"hub {repo}: has no revision {revision}") from unknown
    except RepositoryNotFoundError as unknown:
        raise HubError(
            f"hub {repo}: does not exist, or is private: check the name, or set HF_TOKEN"
        ) from unknown
    except Exception as refusal:  # as above: no connection, no answer, an invalid answer
        hint = "connect this machine, or name a file that you copied here"
        raise Unreachable(f"the hub cannot be reached ({_clause(refusal)}): {hint}") from refusal
    return {sibling.rfilename: sibling.size for sibling in info.siblings or []}


def _unreadable(repo: str, refusal: OSError) -> HubError:
    return HubError(f"hub {repo}: its cache cannot be read ({_clause(refusal)})")


def _clause(refusal: Exception) -> str:
    line = (str(refusal).strip() or type(refusal).__name__).splitlines()[0]
    return redacted(line)[:200].rstrip(".")


# Weights on the Hugging Face hub: from its cache, from a copy in our own (of a fleet), else downloaded.


def from_hub(source: Weights) -> Ready:
    """A GGUF or a checkpoint without placeholders: from a cache if complete there, else downloaded.

    Raises WeightsError.
    """
    repo, revision = str(source.repo), source.revision or "main"
    found = _in_cache(source)
    if isinstance(found, Ready):
        return found
    cached = f"the copy in the cache is unusable ({found})" if found else "is not complete in the cache"
    try:  # an unusable copy is most likely truncated: a download completes it, or fails with the reason
        if source.file is None:
            return _of_commit(download_checkpoint(repo, revision))
        return _of_commit(download_file(repo, source.file, revision), source.file)
    except Unreachable as silence:
        raise WeightsError(f"hub {repo}: {cached}, and {silence}") from silence
    except HubError as refusal:
        raise WeightsError(f"{refusal}; {cached}" if found else str(refusal)) from refusal


def in_hub_cache(source: Weights) -> Ready | None:
    """Complete weights in the hub's cache, or copied, without a request; null if there are none.

    Raises WeightsError if the cache itself is unusable.
    """
    found = _in_cache(source)
    return found if isinstance(found, Ready) else None


def _in_cache(source: Weights) -> Ready | WeightsError | None:
    """Weights, or the error of an unusable copy. Raises WeightsError if the cache is unusable."""
    repo, file, revision = str(source.repo), source.file, source.revision or "main"
    try:
        path = cached_file(repo, file, revision) if file else cached_checkpoint(repo, revision)
        path = path or (cached_match(repo, file, revision) if file else None)
    except HubError as mistake:
        raise WeightsError(str(mistake)) from mistake
    damaged: WeightsError | None = None
    for each in filter(None, (path, _copied(source))):
        try:
            return _of_commit(each, file)
        except WeightsError as damage:
            damaged = damaged or damage
    return damaged


def copies_folder(source: Weights) -> Path:
    """Where copies from another node of a fleet are, in a folder named by their commit."""
    name = digest([source.repo, source.file, source.revision or "main"])
    return cache_folder() / "weights" / name / "hub"


def _copied(source: Weights) -> Path | None:
    commit = next(copies_folder(source).glob("*"), None)
    return commit / (source.file or "") if commit else None


def _of_commit(path: Path, file: str | None = None) -> Ready:
    """Weights of a folder snapshots/COMMIT in the hub's cache, or of a file in one."""
    commit = path if file is None else path.parents[file.count("/")]
    return replace(local(path), revision=commit.name)
