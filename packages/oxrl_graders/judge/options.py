"""The options of a judge, and the refusal of those that cannot work."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass

from oxrl.errors import RewardDefinitionError
from oxrl_graders.judge.endpoint import key_of

RUBRIC = (
    "How well does the response do what the last message of the user asks for? Correct, complete "
    "and to the point is best; wrong, empty or beside the point is worst."
)
# The last match is the verdict: judges go over what they read before they come to it.
SCORE_PATTERN = r"(?i)\b(?:score|rating|verdict)\b\W{0,5}(-?\d+(?:\.\d+)?)"
WINNER_PATTERN = r"(?i)\b(?:winner|verdict|better)\b\W{0,5}(A|B|tie)\b"
# Upper case, as environment variables are: so that a key put here by mistake is no name.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
# An option that would hold what must not be recorded.
_SECRET = re.compile(r"(?i)key|token|secret|passw|auth|bearer|credential")
_ALLOWED = ("key_env", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """The options of a judge: who is asked, and how.

    Args:
        url: of an endpoint that speaks OpenAI's API, such as http://localhost:8000/v1.
        model: its name there.
        key_env: environment variable that holds the key; empty for an endpoint without.
        rubric: what is good, in words for the judge.
        compare: none: each response gets a score by itself; answer: it is held against the row's
            `answer`; group: against the other responses to the prompt.
        answer: whether the judge of single responses is shown the row's `answer`.
        low, high: of the score, whole numbers; it becomes 0 to 1.
        verdict: json: an object; regex: the last match of `pattern`.
        pattern: its first group is the score, or A, B or tie; empty: one that fits.
        constrained: ask the server to decode nothing but such an object, where it can.
        swap: ask for each pair in both orders, and take the mean.
        opponents: of each response in its group; 0: all others.
        temperature, max_tokens, seed: of the judge.
        retries: times that a request which failed is sent again.

    Raises:
        ValueError: that cannot work. Never shows what may be a key.
    """

    url: str = ""
    model: str = ""
    key_env: str = ""
    rubric: str = RUBRIC
    compare: str = "none"
    answer: bool = True
    low: int = 1
    high: int = 10
    verdict: str = "json"
    pattern: str = ""
    constrained: bool = True
    swap: bool = True
    opponents: int = 0
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int = 0
    retries: int = 4

    def __post_init__(self) -> None:
        check_url(self.url)
        if not self.model:
            raise ValueError("model is required: the name that the endpoint has for its model")
        if self.key_env and not _VARIABLE.fullmatch(self.key_env):
            rule = "an environment variable, in upper case, such as OPENAI_API_KEY"
            raise ValueError(f"key_env is the name of {rule}, and what is given here is none")
        if self.compare not in ("none", "answer", "group"):
            raise ValueError(f"compare must be none, answer or group, got {self.compare!r}")
        if self.verdict not in ("json", "regex"):
            raise ValueError(f"verdict must be json or regex, got {self.verdict!r}")
        if self.low >= self.high:
            raise ValueError(f"need low < high, got {self.low} and {self.high}")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature must be 0 to 2, got {self.temperature:g}")
        limits = {
            "max_tokens": (self.max_tokens, 1, 1 << 20),
            "retries": (self.retries, 0, 100),
            "opponents": (self.opponents, 0, 1024),
        }
        for name, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise ValueError(f"{name} must be {least} to {most}, got {value}")
        _compiled(self.pattern)
        if not self.rubric.strip():
            raise ValueError("rubric is empty: say in words what is good")

    @property
    def pairwise(self) -> bool:
        """True if a verdict names the better of two responses."""
        return self.compare != "none"

    @property
    def expression(self) -> re.Pattern[str]:
        """Finds the verdict in running text."""
        given = WINNER_PATTERN if self.pairwise else SCORE_PATTERN
        return _compiled(self.pattern or given)

    def key(self) -> str:
        """The key, from the environment; empty where none is asked for.

        Raises:
            RewardDefinitionError: the variable is not set.
        """
        try:
            return key_of(self.key_env)
        except ValueError as error:
            raise RewardDefinitionError(f"reward.options.key_env of the judge: {error}") from None


def check_url(url: str) -> None:
    """Refuse what is no endpoint.

    Args:
        url: of the config: a place alone, such as http://localhost:8000/v1.

    Raises:
        ValueError: it is none, or holds a key. Then the URL is not shown.
    """
    example = "such as http://localhost:8000/v1"
    if not url:
        raise ValueError(f"url is required: an endpoint that speaks OpenAI's API, {example}")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url is none, {example}: {type(error).__name__}") from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"url holds more than a place, {example}. What stands in it is recorded: a key belongs "
            "in an environment variable that key_env names"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"url must begin with http:// or https:// and a host, {example}")


def refuse_secrets(names: Iterable[str]) -> None:
    """Refuse options that would hold a key: options are recorded.

    Args:
        names: of options, as the user wrote them.

    Raises:
        ValueError: one is named as a key is; its value is not shown.
    """
    for name in names:
        if _SECRET.search(name) and name not in _ALLOWED:
            raise ValueError(
                f"judge has no option {name!r}, and what is written here is recorded: put a key "
                "into an environment variable, and name that one in key_env"
            )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
    if pattern and not expression.groups:
        raise ValueError(f"pattern {pattern!r} needs a group, (...), around the verdict")
    return expression
