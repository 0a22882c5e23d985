"""Text that others wrote, made fit to be shown: on a terminal, in run.log, in messages.

A reward, a model, a data file or a file name may hold characters that a terminal obeys: they could
colour, overwrite or hide what stands there. `printable` writes them as escapes. A password or an
access token that stands in a configuration or an address has no place in a log that is passed on:
`masked` puts *** there. Files of JSON keep what was given, in JSON's own escapes.
"""

from __future__ import annotations

import os
import re
import unicodedata

HIDDEN = "***"
# Characters of a secret in an environment variable: a shorter one may stand anywhere.
SHORTEST = 8

# Line feeds and tabs are layout. The two joiners belong to the spelling of languages and of emoji.
_HARMLESS = frozenset("\n\t\u200c\u200d")
# Control, format (such as those that turn the direction of writing), surrogates, and separators
# that end a line for some readers and not for others.
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})

# Names of settings that hold a secret; those of `max_tokens` and the like hold numbers.
SECRET_NAME = re.compile(
    r"(?:.*[._-])?(?:api_?key|key|token|secret|password|passwd|credentials?)",
    re.IGNORECASE | re.DOTALL,
)
# The same in running text, where "token: 5" and `eos_token` are words of this trade: `name=value`,
# `name = 'value'`, and for names that are surely of a secret also `name: value`.
_SURE = (
    r"(?:[\w-]*[_.-])?(?:(?:api|access|secret|private|auth)[_-]?key|passwords?|passwd|secrets?"
    r"|(?:hf|api|access|auth|bearer|refresh|session|github|wandb)[_-]token|credentials?)"
)
_VALUE = r"('[^']*'|\"[^\"]*\"|[^\s,;'\")\]}]+)"
_ASSIGNED = re.compile(
    rf"(?<![\w-])((?:{_SURE}['\"]?(?:\s?=\s?|:\s)|(?:key|token)\s?=\s?)){_VALUE}",
    re.IGNORECASE,
)
# The forms that services give their tokens: Hugging Face, OpenAI and Anthropic, GitHub, GitLab,
# Slack, AWS, Google, and JSON web tokens.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(hf_|api_org_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abp]-|AKIA|AIza"
    r"|eyJ)(?=[\w.-]*[0-9A-Z])[\w-]{16,}(?:\.[\w-]{8,})*"
)
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/?#@'\"]+@")


def printable(text: str) -> str:
    r"""Write control characters as escapes (\x1b, \r, \u202e); line feeds and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character) not in _CATEGORIES:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def masked(text: str) -> str:
    """Put *** where a text holds what looks like a secret.

    That is the value of a name such as `api_key` or `password`, a token in a form of well-known
    services, and name and password in an address.
    """
    return _ASSIGNED.sub(rf"\1{HIDDEN}", without_tokens(text))


def without_settings(text: str) -> str:
    """Put *** where a text holds the value of an environment variable that is named as a secret."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and value in text and SECRET_NAME.fullmatch(name):
            text = text.replace(value, HIDDEN)
    return text


def without_tokens(text: str) -> str:
    """Put *** where a value holds an access token, or name and password of an address."""
    text = _IN_ADDRESS.sub(f"{HIDDEN}@", text)
    return _TOKEN.sub(rf"\1{HIDDEN}", text)


def shown(text: str) -> str:
    """`text` without secrets and without characters that a terminal obeys."""
    return printable(masked(text))
