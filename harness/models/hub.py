"""Weights on the Hugging Face hub: from its cache, else downloaded.

The cache is read without a request. A download shows the library's own progress bar. A broken connection
resumes; an interrupted download keeps its complete files. Of a checkpoint only safetensors, configuration and
tokenizer are downloaded: pickles and Python files may run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from harness.base import bounds
from harness.base.text import list_named
from harness.base.variables import redacted
from harness.config import Weights
from harness.models.config_json import PACKING_FILES
from harness.models.locate import INDEX, SINGLE, Ready, WeightsError, local

WANTED = (
    *("config.json", "generation_config.json", INDEX, "*.safetensors"),
    *("tokenizer*.json", *PACKING_FILES),
)
UNWANTED = ("*/*", "consolidated*", "adapter*")  # copies in folders, and under other names


class Unreachable(WeightsError):
    """The hub does not answer; the message is the end of a sentence."""


def cache_of_hub() -> Path:
    """Where downloads of the hub go."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def from_hub(source: Weights) -> Ready:
    """A GGUF or a checkpoint without placeholders: from the cache if complete there, else downloaded.

    Raises WeightsError.
    """
    cached = _in_cache(source)
    if isinstance(cached, Ready):
        return cached
    state = f"the copy in the cache is unusable ({cached})" if cached else "is not complete in the cache"
    try:  # an unusable copy is most likely truncated: a download completes it, or fails with the reason
        return _of_commit(_downloaded(source), source.file)
    except Unreachable as silence:
        raise WeightsError(f"hub {source.repo}: {state}, and {silence}") from silence
    except WeightsError as refusal:
        raise WeightsError(f"{refusal}; {state}" if cached else str(refusal)) from refusal


def in_hub_cache(source: Weights) -> Ready | None:
    """Complete weights in the hub's cache, without a request; None if there are none.

    Raises WeightsError if the cache itself is unusable.
    """
    cached = _in_cache(source)
    return cached if isinstance(cached, Ready) else None


def download_bytes(source: Weights) -> int | None:
    """What a download of these weights takes, in one request; None: the hub does not say. `source`: without
    placeholders."""
    try:
        sizes = _files(source)
    except WeightsError:
        return None
    names = _matching([*sizes], source.file) if source.file else list(filter(_is_wanted, sizes))
    stated = [size for name in names if (size := sizes[name]) is not None]
    is_known = len(stated) == len(names) > 0 and (not source.file or len(names) == 1)
    return sum(stated) if is_known else None


def _in_cache(source: Weights) -> Ready | WeightsError | None:
    """Weights, or the error of an unusable copy. Raises WeightsError if the cache is unusable."""
    path = _cached(source)
    try:
        return _of_commit(path, source.file) if path else None
    except WeightsError as damage:
        return damage


def _cached(source: Weights) -> Path | None:
    """The file in the hub's cache, in any case or by a glob that one name matches, or the folder of a commit
    with all wanted files that are known to the cache. Raises WeightsError."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _snapshot(source, is_local=True)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as mistake:
        raise WeightsError(f"hub {source.repo}: {_clause(mistake)}") from mistake
    except OSError as refusal:
        raise WeightsError(f"hub {source.repo}: its cache cannot be read ({_clause(refusal)})") from refusal
    if not source.file:
        return folder
    names = _matching([path.relative_to(folder).as_posix() for path in folder.rglob("*")], source.file)
    return folder / names[0] if len(names) == 1 else None


def _of_commit(path: Path, file: str | None) -> Ready:
    """Weights of a folder snapshots/COMMIT in the hub's cache, or of a file in one."""
    commit = path if file is None else path.parents[file.count("/")]
    return replace(local(path), revision=commit.name)


def _downloaded(source: Weights) -> Path:
    """The file, or the folder of a commit with all wanted files. Raises WeightsError, Unreachable."""
    from huggingface_hub import hf_hub_download

    repo, file, names = str(source.repo), source.file, [*_files(source)]
    matches = _matching(names, file) if file else []
    if file and not matches:
        others = [name for name in names if name.endswith(".gguf")]
        hint = f"; it has {list_named(others, 8)}" if others else ""
        raise WeightsError(f"hub {repo}: has no file {file} in revision {source.revision or 'main'}{hint}")
    if len(matches) > 1:
        raise WeightsError(f"hub {repo}: {file} matches {len(matches)} files: {list_named(matches, 3)}")
    if not file:
        _check_has_checkpoint(repo, names)
    try:
        if file:
            return Path(hf_hub_download(repo, matches[0], revision=source.revision))
        return _snapshot(source)
    except Exception as refusal:  # its HTTP library's errors have no common base
        name = f"{repo}/{file}" if file else repo
        raise WeightsError(f"hub {name}: {_clause(refusal)}") from refusal


def _check_has_checkpoint(repo: str, names: Sequence[str]) -> None:
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
            raise WeightsError(f"hub {repo}: its weights are pickled; only safetensors are supported")
        ggufs = any(name.endswith(".gguf") for name in names)
        hint = f"; name the type of one of its GGUF files, as in {repo}:Q4_K_M" if ggufs else ""
        raise WeightsError(f"hub {repo}: has no safetensors{hint}")
    if SINGLE not in names and INDEX not in names:
        raise WeightsError(f"hub {repo}: has no {SINGLE} and no {INDEX}")


def _snapshot(source: Weights, is_local: bool = False) -> Path:
    """The folder of a commit, whole as far as is known of the files that are wanted of it."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        str(source.repo),
        revision=source.revision or "main",
        allow_patterns=[source.file] if source.file else [*WANTED],
        ignore_patterns=None if source.file else [*UNWANTED],
        local_files_only=is_local,
    )
    return Path(folder)


def _is_wanted(name: str) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return matches(WANTED) and not matches(UNWANTED)


def _matching(names: Sequence[str], file: str) -> list[str]:
    """The name itself if it is there, else those that it matches as a glob, in any case."""
    depth = file.count("/")
    alike = [name for name in names if name.count("/") == depth and fnmatchcase(name.lower(), file.lower())]
    return [file] if file in names else alike


def _files(source: Weights) -> dict[str, int | None]:
    """Names of a repository's files, and their bytes, in one request: the library's own downloads retry many
    times. Raises WeightsError, Unreachable."""
    from huggingface_hub import HfApi, errors

    repo, revision = str(source.repo), source.revision or "main"
    refused = {  # the more special ones first
        errors.GatedRepoError: "gated model: accept its terms on the hub and set HF_TOKEN",
        errors.RevisionNotFoundError: f"has no revision {revision}",
        errors.RepositoryNotFoundError: "does not exist, or is private: check the name, or set HF_TOKEN",
    }
    try:
        info = HfApi().model_info(repo, revision=revision, timeout=bounds.HUB_S, files_metadata=True)
    except errors.OfflineModeIsEnabled as offline:
        raise Unreachable("HF_HUB_OFFLINE is set") from offline
    except Exception as refusal:  # as above: also no connection, no answer, an invalid answer
        if why := next((why for kind, why in refused.items() if isinstance(refusal, kind)), None):
            raise WeightsError(f"hub {repo}: {why}") from refusal
        hint = "connect this machine, or name a file that you copied here"
        raise Unreachable(f"the hub cannot be reached ({_clause(refusal)}): {hint}") from refusal
    return {sibling.rfilename: sibling.size for sibling in info.siblings or []}


def _clause(refusal: Exception) -> str:
    line = (str(refusal).strip() or type(refusal).__name__).splitlines()[0]
    return redacted(line)[:200].rstrip(".")
