"""Data files here or on the Hugging Face hub, by names such as hf://datasets/me/sums/train.jsonl."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from oxrl.errors import DataError, UnreachableError
from oxrl.modelfiles.hub_status import NONSENSE, hub_or_cache, why_silent

FORM = "hf://datasets/<owner>/<name>[@revision]/<path of a .jsonl or .parquet file>"
NAME = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
SUFFIXES = (".jsonl", ".parquet")
SCHEME = "hf://"


def locate(name: str, commit: str | None = None, *, fetch: bool = True) -> Path:
    """Find a data file; one on the hub is downloaded into the local cache if it is not there yet.

    A hub that does not answer is not asked again; the library bounds each wait for one that does
    (HF_HUB_ETAG_TIMEOUT, HF_HUB_DOWNLOAD_TIMEOUT).

    Args:
        name: a path, or a name on the hub of the form FORM.
        commit: is read instead of what the name's revision is by now.
        fetch: whether to download; without it, only ask whether the file can be had.

    Returns:
        Where it lies here.

    Raises:
        DataError: not such a name, or no such file (lists those there are).
        UnreachableError: it is not in the cache, and the hub cannot be reached.
    """
    if not name.startswith(SCHEME):
        return Path(name)
    parts = NAME.fullmatch(name)
    repo, revision, file = parts.groups("") if parts else ("", "", "")
    if not file.endswith(SUFFIXES):
        raise DataError(
            f"{name!r}: a data file on the hub is written {FORM}{_files(repo, revision)}"
        )
    # Imported here: a fifth of a second that only names on the hub cost.
    from huggingface_hub import errors, hf_hub_download

    wanted = commit or revision or None
    try:
        with hub_or_cache():
            found: Any = hf_hub_download(
                repo, file, repo_type="dataset", revision=wanted, dry_run=not fetch
            )
    except errors.LocalEntryNotFoundError as error:
        option = f" --revision {wanted}" if wanted else ""
        raise UnreachableError(
            f"{name!r}: it is not in the cache (under HF_HOME), and {why_silent()}; where there is "
            "a network: "
            f"hf download --repo-type dataset {repo} {file}{option}"
        ) from error
    except errors.EntryNotFoundError as error:
        listed = _files(repo, revision)
        raise DataError(f"{name!r}: the dataset has no such file{listed}") from error
    except (errors.HTTPError, OSError, ValueError) as error:
        why, _, _ = str(error).strip().partition("\n")
        raise DataError(
            f"{name!r}: {type(error).__name__}: {why}; a private or gated dataset needs "
            "`hf auth login`, a slow network longer HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT"
        ) from error
    return Path(found if fetch else found.local_path)


def identity(name: str, path: Path) -> str:
    """Return what identifies the bytes of a located file.

    Args:
        name: as the user gave it: of the hub, or a path.
        path: where the file lies here.

    Returns:
        The commit of a file on the hub (`path` is .../snapshots/<it>/...), otherwise its SHA-256.

    Raises:
        OSError: the file cannot be read.
    """
    if not name.startswith(SCHEME):
        return file_hash(path)
    return path.parts[path.parts.index("snapshots") + 1]


def file_hash(path: str | Path) -> str:
    """Hash a file's bytes, which tells whether a dataset changed since a checkpoint.

    Args:
        path: of the file; it is read piece by piece.

    Returns:
        SHA-256 in hexadecimal.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(repo: str, revision: str) -> str:
    """The data files of a dataset on the hub, for an error; nothing if they cannot be listed."""
    from huggingface_hub import HfApi, errors

    if not repo:
        return ""
    try:
        with hub_or_cache():
            names = HfApi().list_repo_files(repo, repo_type="dataset", revision=revision or None)
    except (OSError, errors.HTTPError, *NONSENSE):
        return ""  # only an addition to an error that is raised anyway
    listed = [name for name in names if name.endswith(SUFFIXES)]
    if not listed:
        return ""
    more = ", ..." if len(listed) > 20 else ""
    return f"; {repo} has {', '.join(listed[:20])}{more}"
