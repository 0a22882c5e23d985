"""The spelling of addresses and metrics for MLflow."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from urllib.parse import unquote, urlsplit, urlunsplit


def hide_password(variables: MutableMapping[str, str]) -> str:
    """MLFLOW_TRACKING_URI without a name and password in it, which go where MLflow looks for them.

    MLflow's messages show its address, and end up in logs.

    Args:
        variables: of the process, changed in place.

    Returns:
        The address; empty where none is set.
    """
    address = variables.get("MLFLOW_TRACKING_URI", "")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or parts.username is None:
        return address
    variables.setdefault("MLFLOW_TRACKING_USERNAME", unquote(parts.username))
    variables.setdefault("MLFLOW_TRACKING_PASSWORD", unquote(parts.password or ""))
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    variables["MLFLOW_TRACKING_URI"] = plain
    return plain


def mlflow_name(key: str) -> str:
    """Spell a metric in the letters that MLflow allows: eval/pass@1 becomes eval/pass_at_1."""
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"))
