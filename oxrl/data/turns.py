"""Conversations that grow turn by turn while they are sampled: only new text is ever encoded.

What the sampler sampled is the truth and stays, id by id. What an environment answers is encoded
once, as the suffix that the chat template itself would put there.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from oxrl.data.chat import MARK, ChatEncoder, TemplateError
from oxrl.data.messages import MessageList, MessageSequence, Tools, message_texts
from oxrl.types import TokenIds

# What a policy may write, for the check at the start of a run.
TRIED = (
    ("plain text", "The answer is 4."),
    ("text between spaces", "  4  "),
    ("nothing", ""),
    ("a think block", "<think>\n2 and 2\n</think>\n\n4"),
)


class RewrittenHistory(TemplateError):
    """The template writes a turn that is over otherwise than it was read and sampled."""


@dataclass(frozen=True)
class Suffix:
    """The tokens that follow a turn of the policy.

    stop_id: the token that ends the turn, which the policy itself samples.
    token_ids: of the new messages, up to where the policy writes again.
    """

    stop_id: int
    token_ids: TokenIds


class TurnEncoder:
    """Encodes the opening of an episode, and what each turn adds to it; `longest` as its encoder's.

    Args:
        encoder: of the policy's tokenizer.
        stop_token_ids: tokens that end a response.
        tool_role: the role under which answers of tools reach the template: `tool` or `user`.
        open_turns: turns end by their length: the policy never samples a token that ends one.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        stop_token_ids: Collection[int],
        *,
        tool_role: str = "tool",
        open_turns: bool = False,
    ) -> None:
        self._encoder = encoder
        self.longest = encoder.longest
        self._open_turns = open_turns
        self._stops = frozenset(stop_token_ids)
        self._tool_role = tool_role

    def opening(self, messages: MessageSequence, tools: Tools = ()) -> TokenIds:
        """Encode what is read up to where the policy writes its first turn.

        Args:
            messages: the conversation so far.
            tools: JSON schemas, for the template.

        Returns:
            Token ids of the whole conversation.

        Raises:
            TemplateError: the template refuses the messages.
        """
        return tuple(self._encoder.encode_prompt(self._with_roles(messages), tools))

    def suffix(self, messages: MessageSequence) -> Suffix:
        """Return the tokens that the template puts after a turn that `messages` answer.

        Args:
            messages: of the environment, after a turn of the policy.

        Returns:
            The token that has to end the turn, and what is read behind it, up to where the
            assistant writes.

        Raises:
            TemplateError: the template refuses the messages, or drops one of them.
            RewrittenHistory: it drops the turn before them, or ends it with another token than
                those that end a response.
        """
        encoder = self._encoder
        given = self._with_roles(messages)
        shown, hidden = encoder.hide(given)
        after = self._after_mark(shown)
        if after is None:
            raise RewrittenHistory(
                "the chat template drops what the assistant wrote in a turn before"
            )
        for message in shown:
            if not all(text.strip() in after for text in message_texts(message)):
                advice = ""
                if message["role"] == "tool":
                    advice = "; environment.tool_role=user sends answers of tools as the user's"
                raise TemplateError(
                    f"the chat template drops or changes a message of role {message['role']!r} "
                    f"that follows a turn of the assistant; rendered: {after[:200]!r}{advice}"
                )
        ids = encoder.encode(after, hidden)
        if not ids or ids[0] not in self._stops:
            raise RewrittenHistory(
                "the chat template does not end a turn with a token that ends a response "
                f"({sorted(self._stops)}), so the policy could not go on after it: after the turn "
                f"stands {after[:80]!r}"
            )
        return Suffix(stop_id=ids[0], token_ids=tuple(ids[1:]))

    def after(self, turn: Sequence[int], suffix: Suffix) -> TokenIds | None:
        """Return the tokens that are read behind a turn of the policy.

        Args:
            turn: what it sampled.
            suffix: of the answer.

        Returns:
            None: it ended with a token after which the template puts nothing.
        """
        if self._open_turns:
            return (suffix.stop_id, *suffix.token_ids)
        return suffix.token_ids if turn[-1] == suffix.stop_id else None

    def check(self, *, tools_answer: bool = False) -> list[str]:
        """Play a conversation of three turns and compare with the template's own rendering.

        Args:
            tools_answer: also with messages of role `tool`.

        Returns:
            What the template changes in what the policy wrote, without harm: the sampled tokens
            stay.

        Raises:
            TemplateError: it drops an answer.
            RewrittenHistory: it rewrites a turn that is over; shows both.
        """
        tried = _tried(tools_answer)
        return [what for what, text, role in tried if not self._same_as_template(text, role)]

    def rewritten(self, *, tools_answer: bool = False) -> list[str]:
        """List the changes for which `check` would refuse the template, without refusing it.

        Args:
            tools_answer: tools are among what answers.

        Returns:
            What is changed, in words; empty: the template keeps everything.

        Raises:
            TemplateError: it drops an answer.
        """
        found: list[str] = []
        for what, text, role in _tried(tools_answer):
            try:
                self._same_as_template(text, role)
            except RewrittenHistory:
                found.append(what)
        return found

    def kept_suffix(
        self, before: MessageSequence, text: str, answer: MessageSequence, tools: Tools = ()
    ) -> Suffix | None:
        """Return the suffix of a turn, if the template writes all before it as it was read.

        Args:
            before: the conversation that the turn answered.
            text: what the policy wrote in it.
            answer: what it was answered.
            tools: as of `opening`.

        Returns:
            None: the template rewrites what is over.

        Raises:
            TemplateError: the template refuses the messages, or drops one of them.
        """
        encoder = self._encoder
        try:
            suffix = self.suffix(answer)
        except RewrittenHistory:
            return None
        said = {"role": "assistant", "content": text}
        shown, _ = encoder.hide(self._with_roles([*before, said, *answer]))
        turn = len(before)
        ours = encoder.render(shown[:turn], generation_prompt=True, tools=tools)
        ours += str(shown[turn]["content"]) + (self._after_mark(shown[turn + 1 :]) or "")
        theirs = encoder.render(shown, generation_prompt=True, tools=tools)
        # White space that the template trims does no harm.
        return suffix if "".join(ours.split()) == "".join(theirs.split()) else None

    def _after_mark(self, shown: MessageSequence) -> str | None:
        """Return the template's text after a turn that `shown` answers; None: it drops the turn."""
        before = ({"role": "user", "content": "x"}, {"role": "assistant", "content": MARK})
        text = self._encoder.render([*before, *shown], generation_prompt=True)
        _, mark, after = text.rpartition(MARK)
        return after if mark else None

    def _same_as_template(self, text: str, role: str) -> bool:
        """True if three turns with `text` read as the template would render them at once.

        Raises:
            TemplateError: not even without the white space around what the policy wrote.
        """
        encoder = self._encoder
        opening = [{"role": "user", "content": "2+2"}]
        answers = [{"role": role, "content": f"answer {k}"} for k in range(2)]
        conversation: MessageList = [*opening]
        ours = encoder.render(opening, generation_prompt=True)
        for answer in answers:
            conversation += [{"role": "assistant", "content": text}, answer]
            self.suffix([answer])  # for its checks
            after = self._after_mark(self._with_roles([answer])) or ""
            ours += text + after
        theirs = encoder.render(self._with_roles(conversation), generation_prompt=True)
        if ours == theirs:
            return True
        if text and "".join(ours.split()) == "".join(theirs.split()):
            return False
        at = len(os.path.commonprefix([ours, theirs]))
        around = slice(max(0, at - 40), at + 80)
        raise RewrittenHistory(
            "the chat template rewrites turns that are over, so what the policy would read in "
            "training is not what it read while it wrote; set model.chat_template to one that "
            "keeps them, or rollout.rewritten_history=split, which begins a row wherever that "
            f"happens\n  - turn by turn: ...{ours[around]!r}\n"
            f"  + rendered at once: ...{theirs[around]!r}"
        )

    def _with_roles(self, messages: MessageSequence) -> MessageList:
        if self._tool_role == "tool":
            return list(messages)
        return [
            {"role": self._tool_role, "content": message["content"]}
            if message["role"] == "tool"
            else message
            for message in messages
        ]


def _tried(tools_answer: bool) -> list[tuple[str, str, str]]:
    """List (what it is, a text of the policy, the role that answers) for the check at the start."""
    roles = ("user", "tool") if tools_answer else ("user",)
    return [
        (f"{name} before a message of role {role!r}", text, role)
        for role in roles
        for name, text in TRIED
    ]
