"""Actions as tokens and back, their statistics, and rows of demonstrations."""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from oxrl.data.action_heads import FastHead, read_head
from oxrl.data.actions import ActionHead, Quantiles, read_quantiles
from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import ReadOptions
from oxrl.data.fast import FastCode
from oxrl.data.turns import TurnEncoder
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.types import Prompt
from oxrl_datasets.prepare import PREPARERS
from oxrl_robots import lerobot
from oxrl_robots.lerobot import Frame, RobotEpisode, read_episodes, write_episodes
from oxrl_robots.raster_world import LAYOUTS, RasterEnvironment, RasterWorld

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ActionHead(
    token_ids=tuple(range(100, 164)), chunk=2, low=(-1.0, 0.0, 3.0), high=(1.0, 10.0, 3.0)
)
NAMES = ActionHead(token_ids=(7, 8, 9, 10), choices=("up", "down", "left", "right"))


def test_a_number_comes_back_within_half_a_bin_and_is_clipped_outside_of_its_quantiles() -> None:
    chance = np.random.default_rng(0)
    for _ in range(200):
        given = [[chance.uniform(-1, 1), chance.uniform(0, 10), 3.0] for _ in range(2)]
        found = NUMBERS.decode(NUMBERS.encode(given))
        for before, after in zip(given, found, strict=True):
            for number, low, high, back in zip(
                before, NUMBERS.low, NUMBERS.high, after, strict=True
            ):
                assert abs(number - float(back)) <= (high - low) / 128 + 1e-12
    far = NUMBERS.decode(NUMBERS.encode([[-9.0, 99.0, 5.0], [1.0, 10.0, 3.0]]))
    ends = [[-1 + 1 / 64, 10 - 10 / 128, 3.0], [1 - 1 / 64, 10 - 10 / 128, 3.0]]
    assert far == [pytest.approx(end) for end in ends]


def test_every_token_of_the_support_decodes_and_encodes_to_itself() -> None:
    for token in NUMBERS.token_ids:
        ids = (token,) * 2 + (132,) + (token,) * 2 + (132,)
        assert NUMBERS.encode(NUMBERS.decode(ids)) == ids
    assert NAMES.decode((9,)) == ["left"] and NAMES.encode(["left"]) == (9,)
    assert NAMES.decode(NAMES.token_ids) == list(NAMES.choices)
    assert NUMBERS.tokens == 6 and NAMES.tokens == 1


@pytest.mark.parametrize(
    ("head", "actions", "problem"),
    [
        (NAMES, ["jump"], "'jump', there are up, down"),
        (NAMES, [], "0 actions, and a turn has 1"),
        (NUMBERS, [[0.0, 1.0, 3.0]], "1 actions, and a turn has 2"),
        (NUMBERS, [[0.0, 1.0]] * 2, "need 3 finite numbers"),
        (NUMBERS, [[0.0, math.nan, 1.0]] * 2, "need 3 finite numbers"),
    ],
)
def test_what_is_no_action_is_refused(head: ActionHead, actions: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        head.encode(actions)


def test_a_head_with_one_end_too_few_gives_no_shares() -> None:
    uneven = ActionHead(token_ids=(1, 2), low=(0.0, 0.0), high=(1.0,))
    with pytest.raises(ValueError, match="shorter"):
        uneven.shares([0.5, 0.5])


def test_tokens_that_are_no_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="are no actions of 3"):
        NUMBERS.decode((100, 101))
    with pytest.raises(ValueError, match="are no actions"):
        NAMES.decode((11,))


def test_a_head_is_kept_beside_the_weights_and_read_again(tmp_path: Path) -> None:
    assert read_head(tmp_path) is None
    for head in (NUMBERS, NAMES):
        head.write(tmp_path)
        assert read_head(tmp_path) == head
    (tmp_path / "action_head.json").write_text('{"chunk": 1, "colour": []}')
    with pytest.raises(DataError, match="describes no actions"):
        read_head(tmp_path)


def test_quantiles_are_read_as_we_and_as_lerobot_write_them(tmp_path: Path) -> None:
    actions = np.random.default_rng(1).normal(size=(500, 2))
    low, high = np.quantile(actions, [0.01, 0.99], axis=0).tolist()
    fields = {"q01": low, "q99": high}
    for content in (fields, {"action": {**fields, "mean": [0, 0]}, "observation.state": {}}):
        (tmp_path / "stats.json").write_text(json.dumps(content))
        assert read_quantiles(tmp_path / "stats.json") == Quantiles(tuple(low), tuple(high))
    for wrong in ("{}", "[1]", "{", '{"q01": [1, 2], "q99": [0, 3]}', '{"q01": [], "q99": []}'):
        (tmp_path / "stats.json").write_text(wrong)
        with pytest.raises(DataError):
            read_quantiles(tmp_path / "stats.json")


def rows(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, head: ActionHead = NAMES) -> Any:
    tokenizer: PreTrainedTokenizerBase = builtin_tokenizer()
    return ConversationDataset.load(path, tokenizer, ReadOptions(actions=head)).in_order()


def test_a_row_of_an_episode_has_the_tokens_that_the_episode_would_have(tmp_path: Path) -> None:
    said = ["go", "on <|end|>", "still"]
    done = ["up", "left", "right"]
    talk: list[dict[str, Any]] = [{"role": "system", "content": "brief"}]
    for text, action in zip(said, done, strict=True):
        talk += [{"role": "user", "content": text}, {"role": "assistant", "actions": [action]}]
    [example] = read(rows(tmp_path, {"messages": talk}))
    turns = TurnEncoder(ChatEncoder(builtin_tokenizer()), (1,), open_turns=True)
    expected = [*turns.opening(talk[:2]), *NAMES.encode(["up"])]
    for text, action in zip(said[1:], done[1:], strict=True):
        suffix = turns.suffix([{"role": "user", "content": text}])
        assert suffix.stop_id == 1
        # The policy never samples the token that ends its turn: what answers begins with it.
        expected += [1, *suffix.token_ids, *NAMES.encode([action])]
    assert list(example.token_ids) == expected
    trained = [token for token, on in zip(example.token_ids, example.trained, strict=True) if on]
    assert trained == [*NAMES.encode(["up"]), *NAMES.encode(["left"]), *NAMES.encode(["right"])]


def test_a_row_of_a_turn_is_a_prompt_and_actions(tmp_path: Path) -> None:
    path = rows(tmp_path, {"prompt": "go", "actions": [[0, 5, 3], [1, 0, 3]]})
    [example] = read(path, NUMBERS)
    assert example.token_ids[-6:] == NUMBERS.encode([[0, 5, 3], [1, 0, 3]])
    assert sum(example.trained) == 6 and all(example.trained[-6:])


@pytest.mark.parametrize("padded", [1, 1.0])
def test_actions_that_nobody_did_are_not_learned_however_their_number_is_written(
    tmp_path: Path, padded: float
) -> None:
    row = {"prompt": "go", "actions": [[0, 5, 3], [0, 5, 3]], "padded": padded}
    [example] = read(rows(tmp_path, row), NUMBERS)
    assert example.trained[-6:] == (True, True, True, False, False, False)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "go", "actions": ["jump"]}, "turn 1 has the action 'jump'"),
        ({"prompt": "go"}, "no actions"),
        ({"prompt": "go", "completion": "up"}, "no actions"),
        ({"messages": [{"role": "assistant", "actions": ["up"]}]}, "without actions"),
        ({"prompt": "go", "actions": []}, "turn 1 has 0 actions, and a turn has 1"),
        ({"prompt": "go", "actions": ["up"], "padded": 1}, "padded is 1 of 1 actions"),
        ({"prompt": "go", "actions": ["up"], "padded": 0.5}, "padded is 0.5 of 1 actions"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "up"},
                ]
            },
            "reply without actions",
        ),
    ],
)
def test_a_row_without_usable_actions_is_refused_by_its_place(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*{problem}"):
        read(rows(tmp_path, row))


def test_the_raster_worlds_expert_succeeds_and_a_state_goes_on_alike() -> None:
    prompt = Prompt(uid="p", messages=(), token_ids=())
    assert {len(LAYOUTS["held_out"]), len(LAYOUTS["train"])} == {24, 72}
    assert not set(LAYOUTS["held_out"]) & set(LAYOUTS["train"])
    for control in ("steps", "velocity"):
        for seed in range(30):
            made = RasterEnvironment(control)
            first = made.reset(prompt, seed)
            again = RasterEnvironment(control)
            np.testing.assert_equal(again.reset(prompt, seed), first)
            step = made.act([made.expert()])
            state = made.state()
            restored = RasterEnvironment(control)
            restored.restore(state)
            last = made.act([made.expert()])
            np.testing.assert_equal(vars(restored.act([made.expert()])), vars(last))
            assert not step.terminated and last.terminated and last.success and last.reward == 1
    chunked = RasterEnvironment()
    chunked.reset(prompt, 0)
    assert chunked.act([chunked.expert()] * 3).executed == 2  # the third is never done
    away = RasterWorld(LAYOUTS["train"][0])
    assert [away.move(1.0, 0.0), away.move(0.0, 1.0), away.place] == [None, None, (3.0, 2.0)]


def test_demonstrations_have_rows_to_imitate_and_statistics_of_numbers(tmp_path: Path) -> None:
    make = PREPARERS["demonstrations"]
    report = make(None, tmp_path / "steps", limit=5, eval_columns='{"split": "held_out"}')
    assert report["expert_steps"] == 10 and not (tmp_path / "steps" / "statistics.json").exists()
    make(None, tmp_path / "again", limit=5, eval_columns='{"split": "held_out"}')
    for name in ("sft", "rl", "eval"):
        text = (tmp_path / "steps" / f"{name}.jsonl").read_bytes()
        assert text == (tmp_path / "again" / f"{name}.jsonl").read_bytes()
    options = '{"control": "velocity"}'
    make(None, tmp_path / "speed", limit=40, options=options, chunk=3, rows="episodes")
    found = read_quantiles(tmp_path / "speed" / "statistics.json")
    assert found.low == (-1.0, -1.0) and found.high == (1.0, 1.0)
    line = (tmp_path / "speed" / "sft.jsonl").read_text().splitlines()[0]
    replies = [m for m in json.loads(line)["messages"] if m["role"] == "assistant"]
    assert [len(reply["actions"]) for reply in replies] == [3]
    with pytest.raises(DataError, match="no method expert"):
        make(None, tmp_path / "none", environment="agent", options='{"command": ["x"]}')
    with pytest.raises(DataError, match="no JSON"):
        make(None, tmp_path / "none", options="{")
    # Columns of rows that are not made are not read.
    make(None, tmp_path / "unread", limit=1, eval_rows=0, eval_columns="{")


COUNTED = """
from pathlib import Path

from oxrl.environments import Step


class Once:
    reusable = True

    def __init__(self, log):
        self.log = Path(log)
        self._note("made")

    def reset(self, prompt, seed):
        return "Begin."

    def act(self, actions):
        return Step(reward=1.0, terminated=True)

    def expert(self):
        return "go"

    def close(self):
        self._note("closed")

    def _note(self, what):
        with self.log.open("a") as file:
            file.write(what + " ")


class Anew(Once):
    reusable = False
"""


@pytest.mark.parametrize(("name", "count"), [("Once", 1), ("Anew", 3)])
def test_a_reusable_environment_is_made_once_for_all_demonstrations(
    tmp_path: Path, name: str, count: int
) -> None:
    file = tmp_path / "counted.py"
    file.write_text(COUNTED)
    log = tmp_path / "log"
    options = json.dumps({"log": str(log)})
    make = PREPARERS["demonstrations"]
    report = make(None, tmp_path / "out", environment=f"{file}:{name}", options=options, limit=3)
    assert report["written"]["sft.jsonl"] == 3
    assert log.read_text() == "made closed " * count


def test_episodes_of_robots_are_written_and_read_again(tmp_path: Path) -> None:
    make = PREPARERS["demonstrations"]
    told = {"options": '{"control": "velocity"}', "lerobot": True, "limit": 4}
    report = make(None, tmp_path / "played", **told)
    place = tmp_path / "played" / "lerobot"
    info = json.loads((place / "meta" / "info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"]) == ("v2.1", 4)
    assert info["total_frames"] == report["expert_steps"] == 8
    assert info["features"]["observation.images.image"]["shape"] == [40, 40, 3]
    read = list(read_episodes(place))
    assert [len(episode.frames) for episode in read] == [2] * 4
    assert all(episode.success and episode.task.startswith("go to ") for episode in read)
    again = tmp_path / "again"
    write_episodes(again, read, robot="raster-world")
    assert list(read_episodes(again)) == read
    # The rows made from the dataset are those that were made from the episodes.
    PREPARERS["lerobot"](place, tmp_path / "rows")
    rows_of = [
        [json.loads(line) for line in (tmp_path / name / "sft.jsonl").read_text().splitlines()]
        for name in ("played", "rows")
    ]
    assert rows_of[0] == rows_of[1]
    quantiles = [read_quantiles(tmp_path / n / "statistics.json") for n in ("played", "rows")]
    assert quantiles[0] == quantiles[1] == read_quantiles(place / "meta" / "stats.json")


def test_a_folder_of_a_robots_dataset_is_counted_once_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two episodes to a folder: one and two need one, three need two."""
    monkeypatch.setattr(lerobot, "CHUNK", 2)
    episode = RobotEpisode(task="wait", frames=[Frame(images={}, action=[0.5])])
    for count, folders in ((1, 1), (2, 1), (3, 2)):
        place = tmp_path / str(count)
        write_episodes(place, [episode] * count, robot="none")
        info = json.loads((place / "meta" / "info.json").read_text())
        assert info["total_chunks"] == len(list(place.glob("data/chunk-*"))) == folders


WALK = """
from oxrl.environments import Step


class Walk:
    def reset(self, prompt, seed):
        self.steps = 0
        return "Begin."

    def act(self, actions):
        self.steps += len(actions)
        return Step("Go on.", reward=1.0, terminated=self.steps == 2)

    def expert(self):
        return [0.5, self.steps - 0.5]
"""


def test_rows_of_a_robots_dataset_say_which_actions_are_padded(tmp_path: Path) -> None:
    options = {"options": '{"control": "velocity"}', "limit": 3}
    PREPARERS["demonstrations"](None, tmp_path / "played", lerobot=True, **options)
    place = tmp_path / "played" / "lerobot"
    report = PREPARERS["lerobot"](place, tmp_path / "rows", chunk=3)
    text = (tmp_path / "rows" / "sft.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    # Three episodes of two steps: from the first on one is missing, from the second on two.
    assert [row["padded"] for row in found] == [1, 2] * 3
    assert all(len(row["actions"]) == 3 for row in found)
    assert all(row["actions"][-1] == row["actions"][-2] for row in found)
    assert report["padded_actions"] == 9
    single = PREPARERS["lerobot"](place, tmp_path / "single")
    assert single["padded_actions"] == 0
    assert "padded" not in (tmp_path / "single" / "sft.jsonl").read_text()


@pytest.mark.parametrize("rows", ["turns", "episodes"])
def test_actions_that_nobody_did_fill_a_chunk_are_counted_and_not_learned(
    tmp_path: Path, rows: str
) -> None:
    (tmp_path / "walk.py").write_text(WALK)
    report = PREPARERS["demonstrations"](
        None,
        tmp_path / "played",
        environment=f"{tmp_path / 'walk.py'}:Walk",
        chunk=3,
        rows=rows,
        limit=4,
    )
    lines = (tmp_path / "played" / "sft.jsonl").read_text().splitlines()
    head = ActionHead(token_ids=tuple(range(20, 28)), chunk=3, low=(-1.0,) * 2, high=(1.0,) * 2)
    assert report["expert_steps"] == 8  # four episodes of two steps
    examples = read(tmp_path / "played" / "sft.jsonl", head)
    if rows == "episodes":
        # One chunk each, of which the third action is none.
        assert report["padded_actions"] == 4 and len(lines) == 4
        wanted = [[True] * 4 + [False] * 2] * 4
    else:
        # From the first step on one is missing, from the second on two.
        assert report["padded_actions"] == 4 * (1 + 2)
        wanted = [[True] * 4 + [False] * 2, [True] * 2 + [False] * 4] * 4
    assert [list(example.trained[-6:]) for example in examples] == wanted
    assert not any(any(example.trained[:-6]) for example in examples)
    # The tokens are there: what is read later stands where it would.
    first = json.loads(lines[0])
    talk = first["messages"][-1] if rows == "episodes" else first
    assert talk["actions"][1] == talk["actions"][2] and talk["padded"] == 1


def test_a_chunk_of_which_a_part_was_not_done_is_learned_where_tokens_stand_for_all_of_it(
    tmp_path: Path,
) -> None:
    code = FastCode(chunk=2, size=1, scale=10.0, least=-14, most=14)
    ids = tuple(range(30, 30 + len(code.pieces)))
    head = FastHead(token_ids=ids, chunk=2, low=(0.0,), high=(4.0,), code=code, end=1)
    whole = {"prompt": "go", "actions": [[4.0], [0.0]]}
    cut = {"prompt": "go", "actions": [[4.0], [4.0]], "padded": 1}
    examples = read(rows(tmp_path, whole, cut), head)
    assert [sum(example.trained) for example in examples] == [3, 3]


@pytest.mark.parametrize("padded", [2, -1, "1", 0.5])
def test_a_wrong_number_of_padded_actions_is_refused(tmp_path: Path, padded: object) -> None:
    line = {"prompt": "go", "actions": ["up", "up"], "padded": padded}
    head = dataclasses.replace(NAMES, chunk=2)
    with pytest.raises(DataError, match=r"padded is .* of 2 actions"):
        read(rows(tmp_path, line), head)


PUSH = """
from oxrl.environments import Step


class Push:
    '''Push a number above 1; 0.1 is not the same in 32 bits.'''

    reusable = True

    def __init__(self, step=0.1):
        self.step = step

    def said(self):
        import numpy as np
        frame = np.full((8, 8, 3), int(self.at * 100), np.uint8)
        return [{"role": "user", "content": [{"type": "image", "image": frame}]}]

    def reset(self, prompt, seed):
        self.at = seed % 7 / 10 + prompt.metadata.get("more", 0)
        return self.said()

    def act(self, actions):
        self.at += actions[0][0]
        return Step(self.said(), reward=float(self.at > 1), terminated=self.at > 1)

    def robot_state(self):
        return [self.at]

    def expert(self):
        import numpy as np
        return [float(np.float32(self.step))]
"""


def test_demonstrations_are_done_again_from_what_was_recorded(tmp_path: Path) -> None:
    """By seed and actions alone: frames, states and the end; other options are seen."""
    (tmp_path / "push.py").write_text(PUSH)
    world = f"{tmp_path / 'push.py'}:Push"
    told: dict[str, Any] = {"environment": world, "columns": '{"more": 0.05}', "lerobot": True}
    PREPARERS["demonstrations"](None, tmp_path / "data", episodes=3, eval_rows=1, **told)
    place = tmp_path / "data" / "lerobot"
    episodes = list(read_episodes(place))
    assert len({episode.seed for episode in episodes}) == 3
    assert [episode.frames[-1].reward for episode in episodes] == [1.0] * 3
    assert all(frame.state is not None for episode in episodes for frame in episode.frames)
    script = ROOT / "experiments" / "simulators" / "replay.py"
    replayed = runpy.run_path(str(script))["replayed"]
    for episode in episodes:
        found = replayed(episode, world, {}, {"more": 0.05})
        steps = len(episode.frames)
        assert tuple(found) == (steps, steps, steps, True) and found.same
        # Begun elsewhere.
        other = replayed(episode, world, {}, {})
        assert other.frames < steps and other.states == 0 and not other.same
    (place / "meta" / "episodes.jsonl").write_text('{"seed": 3}\n')
    with pytest.raises(DataError, match="episodes.jsonl line 1 is no episode"):
        list(read_episodes(place))


def test_an_environment_that_can_be_used_again_is_made_once_for_all_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulator takes seconds to be made; one that may not be used again is closed first."""
    closing = "    def close(self):\n        print('closed')\n\n    def said(self):"
    text = PUSH.replace("self.step = step", "self.step = step; print('made')")
    text = text.replace("    def said(self):", closing)
    for times, reusable in ((1, True), (3, False)):
        (tmp_path / "push.py").write_text(text.replace("= True", f"= {reusable}"))
        world = f"{tmp_path / 'push.py'}:Push"
        PREPARERS["demonstrations"](None, tmp_path / "data", environment=world, limit=3)
        assert capsys.readouterr().out.split() == ["made", "closed"] * times


def test_datasets_that_cannot_be_read_are_refused_with_the_reason(tmp_path: Path) -> None:
    make = PREPARERS["lerobot"]
    (tmp_path / "meta").mkdir()

    def refused(info: dict[str, Any], problem: str) -> None:
        (tmp_path / "meta" / "info.json").write_text(json.dumps(info))
        with pytest.raises(DataError, match=problem):
            make(tmp_path, tmp_path / "rows")

    refused({"codebase_version": "v1.6"}, "version v1.6; read are v2.0")
    refused({"codebase_version": "v2.1"}, "no feature action")
    action = {"dtype": "float32"}
    film = {"action": action, "observation.images.top": {"dtype": "video"}}
    refused({"codebase_version": "v2.1", "features": film}, "are videos")
    refused({"codebase_version": "v3.0", "features": {"action": action}}, "no data/chunk")
    refused({"codebase_version": "v2.1", "features": ["action"]}, "features are list")
    refused({"codebase_version": "v2.1", "features": {"action": "float32"}}, "feature action is")
    (tmp_path / "meta" / "tasks.jsonl").write_text('{"task_index": 0}\n')
    refused({"codebase_version": "v2.1", "features": {"action": action}}, "line 1 is no task")
    with pytest.raises(DataError, match="a LeRobot dataset"):
        make(tmp_path / "nowhere", tmp_path / "rows")
    with pytest.raises(DataError, match="names: leave out lerobot"):
        PREPARERS["demonstrations"](None, tmp_path / "names", limit=1, lerobot=True)
