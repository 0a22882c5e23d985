"""`environment.name: textarena`: TextArena's games, alone or against an opponent of yours.

    environment:
      name: textarena
      options: {id: GuessTheNumber-v0}

What the game says since the policy's last move is what it reads next.

Source: TextArena's `core.Env`: reset, get_observation, step and close.
"""

from __future__ import annotations

from typing import Any

from oxrl.environments import Message, Step
from oxrl.environments.adapting import MOST_OBSERVATION, need, seed_of, with_text
from oxrl.types import Named, Prompt
from oxrl.usercode.user_code import capped, load_function, place_in_file

# Moves of an opponent in a row, after which the game is stuck.
MOST_OPPONENT_MOVES = 100


class TextArenaEnvironment:
    """One game; its reward comes at the end.

    Args:
        id: of the game.
        settings: further arguments of `textarena.make`.
        player: which player the policy is.
        players: how many there are.
        opponent: "path.py:function", what the other players do: a text in, a text out.

    Raises:
        ValueError: no such game, or players without an opponent.
        Exception: whatever running the opponent's file raises.
    """

    def __init__(
        self,
        id: str = "",
        settings: Named | None = None,
        player: int = 0,
        players: int = 1,
        opponent: str = "",
    ) -> None:
        library = need("textarena", "textarena")
        if not id:
            raise ValueError("environment.options.id is missing, such as id: GuessTheNumber-v0")
        if not 0 <= player < players:
            raise ValueError(f"environment.options.player={player} is none of {players} players")
        try:
            found = place_in_file(opponent)
        except ValueError as error:
            raise ValueError(f"environment.options.opponent={opponent}: {error}") from error
        if found is None and (opponent or players > 1):
            rule = "needs environment.options.opponent: path.py:function"
            raise ValueError(f"a game of several players {rule}, got {opponent!r}")
        # What the user's file raises is the file's, and not about the option.
        self._opponent = load_function(opponent, "opponent") if opponent else None
        try:
            self._game = _unwrapped(library, library.make(id, **(settings or {})))
        except (ValueError, TypeError, LookupError, ImportError) as error:
            raise ValueError(f"textarena.make({id!r}) raised {error}") from error
        self._player = player
        self._players = players

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Import the library and make the game once.

        Args:
            options: of the class.

        Raises:
            MissingExtraError: textarena is not installed.
            ValueError: no such game, or players without an opponent.
        """
        cls(**options)

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The row's messages, and behind them how the game begins.

        Args:
            prompt: the row; its column `seed` goes before `seed`.
            seed: of the game.

        Raises:
            ValueError: the game is over before the policy moves.
        """
        self._game.reset(num_players=self._players, seed=seed_of(prompt, seed))
        if self._others_move():
            raise ValueError("the game is over before the policy moves")
        return with_text(prompt.messages, self._heard(), between="\n")

    def step(self, text: str) -> Step:
        """Make a move; the others answer.

        Args:
            text: the policy's move, as it is.

        Returns:
            What the game said since; at its end the policy's reward, and why it ended.
        """
        over, told = self._game.step(text)
        over = over or self._others_move()
        if not over:
            return Step(self._heard())
        rewards, infos = self._game.close()
        reward = float((rewards or {}).get(self._player, 0.0))
        info = infos.get(self._player, {})
        why = str(info.get("reason") or told.get("reason") or "")
        if info.get("invalid_move"):
            why = f"invalid move. {why}".strip()
        return Step(reward=reward, terminated=True, reason=why)

    def _others_move(self) -> bool:
        """Let the others move until it is the policy's turn.

        Returns:
            Whether the game is over.
        """
        for _ in range(MOST_OPPONENT_MOVES):
            if self._game.state.current_player_id == self._player:
                return False
            assert self._opponent is not None
            over, _ = self._game.step(str(self._opponent(self._heard())))
            if over:
                return True
        raise ValueError(f"the opponent made {MOST_OPPONENT_MOVES} moves and it is its turn again")

    def _heard(self) -> str:
        """The text that the player to move has not read yet, without that player's own moves."""
        player, observations = self._game.get_observation()
        texts = [text for sender, text, _ in observations if sender != player]
        return capped("\n".join(texts), MOST_OBSERVATION)


def _unwrapped(library: Any, game: Any) -> Any:
    """A game that says only what is new, and takes moves as it does with its usual wrappers."""
    formatting = library.wrappers.ActionFormattingWrapper
    formats = hasattr(game, "is_wrapped_with") and game.is_wrapped_with(formatting)
    while isinstance(game, library.core.Wrapper):
        game = game.env
    return formatting(game) if formats else game
