"""Data files here or on the Hugging Face hub: hf://datasets/<owner>/<name>[@revision]/<path of a
file in it>.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from oxrl.data.rows import file_hash
from oxrl.errors import DataError

FORM = "hf://datasets/<owner>/<name>[@revision]/<path of a .jsonl or .parquet file>"
NAME = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
SUFFIXES, SCHEME = (".jsonl", ".parquet"), "hf://"


def locate(name: str, commit: str | None = None, *, fetch: bool = True) -> Path:
    """Where the file `name` is, for one on the hub in the local cache; downloaded if it is not
    there yet.

    `commit` is read instead of what the name's revision is by now; without `fetch` it is only asked
    whether the file can be had. The library bounds each wait (HF_HUB_ETAG_TIMEOUT,
    HF_HUB_DOWNLOAD_TIMEOUT) and gives up after a few.

    Raises:
        DataError: not such a name, no such file (lists those there are), or neither in the cache
            nor to be reached.
    """
    if not name.startswith(SCHEME):
        return Path(name)
    parts = NAME.fullmatch(name)
    repo, revision, file = parts.groups() if parts else ("", None, "")
    if Path(file or "").suffix not in SUFFIXES:
        raise DataError(
            f"{name!r}: a data file on the hub is written {FORM}{_files(repo, revision)}"
        )
    # Imported here: a fifth of a second that only names on the hub cost.
    from huggingface_hub import errors, hf_hub_download

    wanted = commit or revision
    try:
        found: Any = hf_hub_download(
            repo, file, repo_type="dataset", revision=wanted, dry_run=not fetch
        )
    except (errors.EntryNotFoundError, errors.HTTPError, OSError, ValueError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            option = f" --revision {wanted}" if wanted else ""
            why = "it is not in the cache (under HF_HOME), and the hub cannot be reached or HF_HUB_OFFLINE is set; where "
            why += f"there is a network: hf download --repo-type dataset {repo} {file}{option}"
        elif isinstance(error, errors.EntryNotFoundError):
            why = f"the dataset has no such file{_files(repo, revision)}"
        else:
            why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}; a private or gated dataset needs "
            why += "`hf auth login`, a slow network longer HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT"
        raise DataError(f"{name!r}: {why}") from error
    return Path(found if fetch else found.local_path)


def identity(name: str, path: Path) -> str:
    """What the bytes at `path` are known by: for `name` on the hub the commit
    (.../snapshots/<it>/...), or sha256.
    """
    return (
        path.parts[path.parts.index("snapshots") + 1]
        if name.startswith(SCHEME)
        else file_hash(path)
    )


def _files(repo: str, revision: str | None) -> str:
    from huggingface_hub import HfApi, errors

    try:
        names = (
            HfApi().list_repo_files(repo, repo_type="dataset", revision=revision) if repo else []
        )
    except (OSError, ValueError, errors.HTTPError):
        return ""  # only an addition to an error that is raised anyway
    listed = [name for name in names if name.endswith(SUFFIXES)]
    return (
        f"; {repo} has {', '.join(listed[:20])}{', ...' if len(listed) > 20 else ''}"
        if listed
        else ""
    )
