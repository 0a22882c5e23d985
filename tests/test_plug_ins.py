"""An installed package offers rewards, environments, losses and features by entry points, and a
configuration names them; nothing else has to know of it.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import oxrl
import oxrl.rewards
from oxrl import entry_points
from oxrl.assembly.assembly import Assembly
from oxrl.cli import app
from oxrl.cli.prepare import preparers
from oxrl.commands.doctor import examine
from oxrl.config import load_config
from oxrl.entry_points import _all_offers, all_offers, is_ours, own_offers
from oxrl.environments.find import find_environment
from oxrl.environments.find_tool import find_tool
from oxrl.errors import ConfigError, OxrlError, RewardDefinitionError, RunDirectoryError
from oxrl.plan.planners import planned_lines
from oxrl.rewards.loaded import find_reward
from oxrl.tables.user_code import ENVIRONMENT, FEATURE, GATE, REWARD, Kind
from oxrl.types import Completion, Prompt
from oxrl.usercode.find import find
from oxrl.usercode.locate import locate, names_of

SHORT = """
from word_games.lengths import letters


def score(prompt, completion):
    return 100.0 - letters(completion)
"""
LENGTHS = """
def letters(text):
    return len(text)
"""
GAME = '''
from oxrl.environments import Step


class Twice:
    """Two turns, and the second ends it."""

    def __init__(self, word="again"):
        self.word = word

    def reset(self, prompt, seed):
        self.turns = 0
        return f"{prompt.answer}?"

    def step(self, text):
        self.turns += 1
        return Step(self.word, reward=1.0, terminated=self.turns == 2)
'''
LOSS = """
def plain(logprobs, old, advantages, mask, loss_weights, *, correction=None, scale=1.0):
    return -(scale * (logprobs - old).exp() * advantages * loss_weights).sum(), {}
"""
FEATURE_SOURCE = """
import dataclasses

from oxrl.recipes.features.base import Feature


class Bonus(Feature):
    def __init__(self, given, *, bonus=0.5):
        self.bonus = bonus

    def on_rollouts(self, batch):
        return dataclasses.replace(batch, rewards=batch.rewards + self.bonus)

    def steer(self, batch, progress):
        return {"reward/bonus": self.bonus}
"""
TOOLS = """
class Dictionary:
    def __init__(self, words=("a", "b")):
        self.words = words
        self.function = self.spell

    def spell(self, word: str) -> str:
        return "right" if word in self.words else "wrong"

    def check(self):
        if not self.words:
            raise ValueError("a dictionary needs words")
"""
ALPHABET = '''
from typing import Annotated

import typer


def alphabet(
    word: Annotated[str, typer.Argument(help="Any.")],
    backwards: Annotated[bool, typer.Option("--backwards")] = False,
) -> None:
    """Sort the letters of a word.

    Twice, to be sure.
    """
    typer.echo("".join(sorted(word, reverse=backwards)))
'''
DATA = """
def words(source, out, *, seed, limit, test, **options):
    out.mkdir()
    (out / "train.jsonl").write_text('{"prompt": "cat"}')
    return {"written": 1, **options}


def examine():
    yield "warn", "dictionaries", "none", "buy one"


def notes():
    return {"letters": 26}


def plan(fields, like):
    yield "words", f"{fields['rollout.n_samples']} of each, like {like}"


PREPARERS = {"words": words}
"""
CONFIG = """
run: {name: games, dir: run, steps: 2, mlflow: false, threads: 1, device: cpu}
model: {name: "builtin:tiny"}
data: {train: rows.jsonl, prompts_per_step: 2}
environment: {name: twice, options: {word: more}, max_turns: 3}
reward: {name: shortness}
rollout: {max_tokens: 4, n_samples: 2}
train:
  alg_name: sgrpo
  loss: plain-ratio
  loss_numbers: {scale: 0.5}
  features:
    bonus: {bonus: 0.25}
"""


def entries_of_page() -> str:
    """The entry points of docs/extend.md, as an installed package has them."""
    page = (Path(__file__).parent.parent / "docs" / "extend.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    lines: list[str] = []
    for group, entries in tomllib.loads(block)["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    return "\n".join(lines)


def offer(site: Path, package: str, entries: str) -> None:
    """Write what `pip install` leaves of a package beside its modules."""
    folder = site / f"{package.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(entries)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages in which one offers something of every kind."""
    site = tmp_path / "site"
    package = site / "word_games"
    package.mkdir(parents=True)
    sources = {
        "__init__": "",
        "short": SHORT,
        "lengths": LENGTHS,
        "game": GAME,
        "loss": LOSS,
        "feature": FEATURE_SOURCE,
        "tools": TOOLS,
        "commands": ALPHABET,
        "data": DATA,
    }
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
    offer(site, "word-games", entries_of_page())
    rows = "".join(f'{{"prompt": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(4))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(site))
    yield site
    for name in [name for name in sys.modules if name.startswith("word_games")]:
        del sys.modules[name]


def test_a_run_names_what_a_package_offers(site: Path) -> None:
    run = oxrl.train("config.yaml")
    assert list(run.metrics["reward/bonus"]) == [0.25, 0.25]
    assert (run.metrics["episode/turns"] >= 4).all()
    assert (run.samples["reward"] == 101 - run.samples["response"].str.len()).all()

    noted = json.loads((run.path / "environment.json").read_text())
    assert noted["words"] == {"letters": 26}
    # Each is pinned with what it imports of its package, and with nothing of other packages.
    pins = json.loads((run.path / "inputs.json").read_text())
    files = {name: sorted(pin["files"]) for name, pin in pins.items() if pin["files"]}
    assert files == {
        "reward.name": ["word_games/__init__.py", "word_games/lengths.py", "word_games/short.py"],
        "environment.name": ["word_games/game.py"],
        "train.loss": ["word_games/loss.py"],
        "train.features": ["word_games/feature.py"],
    }
    (site / "word_games" / "lengths.py").write_text(LENGTHS + "# shorter\n")
    with pytest.raises(RunDirectoryError, match=r"reward\.name.*lengths\.py"):
        oxrl.train("config.yaml", overrides=["run.steps=3"], resume=True)


KINDS = {REWARD: "shortness", ENVIRONMENT: "twice", GATE: "plain-ratio", FEATURE: "bonus"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_a_name_that_nobody_offers_is_refused_with_the_closest(site: Path, kind: Kind) -> None:
    name = KINDS[kind]
    assert not is_ours(kind, name)
    with pytest.raises(kind.error, match=rf"{kind.field}={name}s: must be .*did you mean '{name}'"):
        locate(kind, name + "s")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_a_name_that_two_packages_offer_is_refused(site: Path, kind: Kind) -> None:
    name = KINDS[kind]
    offer(site, "more-games", f"[{kind.group}]\n{name} = more_games:score\n")
    with pytest.raises(kind.error, match="is offered by two packages, more-games and word-games"):
        locate(kind, name)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("gone_games:score", "importing gone_games raised ModuleNotFoundError"),
        ("word_games.gone:score", "importing word_games.gone raised ModuleNotFoundError"),
        ("word_games.short:scores", "short.py defines no scores"),
    ],
)
def test_what_is_not_where_a_package_says_is_told(site: Path, value: str, words: str) -> None:
    offer(site, "lost-games", f"[oxrl.rewards]\nlost = {value}\n")
    with pytest.raises(RewardDefinitionError, match=re.escape(words)):
        find(REWARD, "lost")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_a_package_that_fails_on_import_is_told_with_its_line(site: Path, kind: Kind) -> None:
    (site / "word_games" / "broken.py").write_text("mine = 1\nraise KeyError('colour')\n")
    offer(site, "sad-games", f"[{kind.group}]\nsad = word_games.broken:mine\n")
    told = rf"{kind.field}=sad: importing word_games.broken raised KeyError: 'colour' \(.*py:2\)"
    with pytest.raises(kind.error, match=told):
        find(kind, "sad")


def test_the_numbers_of_a_packages_loss_reach_it(site: Path) -> None:
    cfg = load_config("config.yaml", [])
    assert Assembly(cfg).algorithm.numbers("gate", "plain-ratio") == {"scale": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("reward.name=shortnes", "did you mean 'shortness'?"),
        ("environment.name=twise", "did you mean 'twice'?"),
        ("train.loss=plain_ration", "train.loss"),
        ("train.features={bonis: {}}", "did you mean 'bonus'?"),
        ("train.loss_numbers={size: 2}", "size is no number of plain-ratio, which takes scale"),
    ],
)
def test_a_configuration_is_checked_without_running_a_package(
    site: Path, change: str, words: str
) -> None:
    load_config("config.yaml", [])
    assert "word_games" not in sys.modules
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("config.yaml", [change])


def test_a_reward_of_a_package_scores_here(site: Path) -> None:
    reward = find_reward("shortness")
    completion = Completion(segments=(), text="four", finish_reason="stop")
    prompt = Prompt(uid="p", messages=(), token_ids=())
    assert [score.value for score in reward(prompt, [completion])] == [96.0]


def test_a_package_has_tools_datasets_and_a_word_for_the_doctor(site: Path, tmp_path: Path) -> None:
    assert find_tool({"name": "dictionary", "words": ["c"]}).function("c") == "right"
    with pytest.raises(ValueError, match="takes words, not 'word'.*did you mean 'words'"):
        find_tool({"name": "dictionary", "word": []})
    assert preparers()["words"](None, tmp_path / "out", seed=0, limit=None, test=None) == {
        "written": 1
    }
    assert "arithmetic" in preparers()
    found = {finding.subject: finding.fix for finding in examine(tmp_path)}
    assert found["dictionaries"] == "buy one"


def test_a_package_has_further_lines_of_a_plan(site: Path) -> None:
    cfg = load_config("config.yaml", [])
    assert [*planned_lines(cfg, None)] == ["words       2 of each, like None"]
    (site / "word_games" / "bad.py").write_text("def plan(fields, like):\n    yield 1")
    offer(site, "bad-games", "[oxrl.planners]\nbad = word_games.bad:plan\n")
    _all_offers.cache_clear()
    first, second = sorted(planned_lines(cfg, None))
    assert first.startswith("unknown     'bad', which the installed package bad-games offers")
    assert "raised TypeError" in first and second.startswith("words ")


def told(*words: str) -> str:
    """What a command prints, or the error of ours that it ends with."""
    _all_offers.cache_clear()
    done = CliRunner().invoke(app, [*words])
    if isinstance(done.exception, OxrlError):
        assert done.exception.exit_code == 2
        return f"error: {done.exception}"
    return done.output


def test_a_command_of_a_package_is_listed_without_being_read_and_then_run(site: Path) -> None:
    listed = told("--help")
    assert re.search(r"\n  alphabet +Sort the letters of a word\.\n", listed)
    assert listed.index("  train ") < listed.index("  compare ") < listed.index("  alphabet ")
    assert not any(name.startswith("word_games") for name in sys.modules)
    assert told("alphabet", "cab", "--backwards") == "cba\n"
    helped = told("alphabet", "--help")
    assert "Twice, to be sure." in helped and "--backwards" in helped
    assert "No such option" in told("alphabet", "cab", "--sideways")


@pytest.mark.parametrize("name", ["train", "plan", "config", "score"])
def test_a_command_of_a_package_with_a_name_of_oxrls_is_refused(site: Path, name: str) -> None:
    for words in (["--help"], [name, "--help"], [name, "run.yaml"]):
        assert "more-games" not in told(*words)
    offer(site, "more-games", f"[oxrl.commands]\n{name} = more_games.commands:mine\n")
    for words in (["--help"], [name, "--help"], [name, "run.yaml"]):
        assert told(*words) == (
            f"error: '{name}', which the installed package more-games offers "
            "(more_games.commands:mine), has a name that is oxRL's own: uninstall that package, or "
            "have it offer another name under [oxrl.commands]"
        )
    # Whoever asks for another command goes on.
    assert told("alphabet", "cab") == "abc\n" and "ppo" in told("algorithms")


def test_a_command_that_two_packages_offer_is_refused(site: Path) -> None:
    offer(site, "more-games", "[oxrl.commands]\nalphabet = more_games.commands:mine\n")
    assert "alphabet" in told("--help")
    refused = told("alphabet", "cab")
    assert "several installed packages offer a command 'alphabet': " in refused
    assert "more-games" in refused and "word-games" in refused and "uninstall all but" in refused


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise KeyError('colour')", "raised KeyError: 'colour'"),
        ("import sys; sys.exit(0)", "raised SystemExit: 0"),
        ("def other(): pass", "raised AttributeError"),
        ("def (", "raised SyntaxError"),
    ],
)
def test_a_command_of_a_package_that_cannot_be_read_is_told_when_it_is_asked_for(
    site: Path, source: str, said: str
) -> None:
    (site / "word_games" / "bad.py").write_text(source)
    offer(site, "bad-games", "[oxrl.commands]\nbad = word_games.bad:mine\n")
    assert re.search(r"\n  bad +Of the package bad-games\.", told("--help"))
    refused = told("bad", "x")
    assert "'bad', which the installed package bad-games offers (word_games.bad:mine)" in refused
    assert said in refused


def test_a_name_of_oxrls_stays_oxrls_and_costs_no_look_at_other_packages(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(site, "more-maths", "[oxrl.rewards]\nmath = more_maths:score\n")
    monkeypatch.setattr(entry_points, "_all_offers", None)
    assert is_ours(REWARD, "math") and locate(REWARD, "math").module == "oxrl_graders.math"


def test_where_nothing_says_what_is_installed_the_core_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {group: own_offers(group) for group in ("oxrl.rewards", "oxrl.environments")}
    own_offers.cache_clear()
    try:
        monkeypatch.setattr(entry_points, "PROJECT", tmp_path / "pyproject.toml")
        monkeypatch.setattr(entry_points, "OURS", "nothing-of-that-name")
        for group, offers in stated.items():
            of_core = {name: place for name, place in offers.items() if place.startswith("oxrl.")}
            assert own_offers(group) == of_core
        assert own_offers("oxrl.tools") == {}
        assert find_reward("exact").per_sample
        assert hasattr(oxrl.rewards, "exact_reward") and not hasattr(oxrl.rewards, "math_reward")
    finally:
        own_offers.cache_clear()


@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [(REWARD, "math", "oxrl_graders"), (ENVIRONMENT, "agent", "oxrl_envs")],
    ids=["reward", "environment"],
)
def test_where_a_package_beside_the_core_is_not_there_what_to_install_is_told(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, name: str, package: str
) -> None:
    for loaded in [loaded for loaded in sys.modules if loaded.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    look = find_reward if kind is REWARD else find_environment
    with pytest.raises(kind.error, match=rf"{kind.field}={name}: .*{package}.*: install oxRL"):
        look(name)


def test_what_is_installed_says_what_oxrl_offers_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_offers.cache_clear()
    try:
        monkeypatch.setattr(entry_points, "PROJECT", tmp_path / "pyproject.toml")
        offer(tmp_path, "oxrl", "[oxrl.rewards]\nmine = oxrl_graders.math:MATH\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert own_offers("oxrl.rewards") == {"mine": "oxrl_graders.math:MATH"}
    finally:
        own_offers.cache_clear()


# What is installed may be anything, and a run that names none of it goes on as without.

GROUPS = (
    "rewards",
    "environments",
    "tools",
    "datasets",
    "doctor",
    "machine_notes",
    "planners",
    "trackers",
    "new",
)
METADATA = {
    "names no reference": b"[oxrl.{group}]\nodd = \n",
    "names none either": b"[oxrl.{group}]\nodd = a b:c-d\n",
    "not UTF-8": b"[oxrl.{group}]\nodd\xff = odd_games:thing\n",
    "no sections": b"odd = odd_games:thing\n",
    "nothing": b"",
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("text", METADATA.values(), ids=METADATA)
def test_metadata_of_others_may_be_anything(site: Path, text: bytes, group: str) -> None:
    offer(site, "odd-games", "")
    entries = site / "odd_games-1.0.dist-info" / "entry_points.txt"
    entries.write_bytes(text.replace(b"{group}", group.encode()))
    offered = {offer.name for offer in all_offers(f"oxrl.{group}")}
    # The other package's are there as before.
    assert group in ("trackers", "new") or len(offered) > len(own_offers(f"oxrl.{group}"))
    if group == "rewards":
        with pytest.raises(RewardDefinitionError, match="reward.name=odd: ") as refused:
            locate(REWARD, "odd")
        assert "odd-games" in str(refused.value) or "must be" in str(refused.value)


def test_a_package_whose_metadata_say_nothing_offers_all_the_same(site: Path) -> None:
    offer(site, "odd-games", "[oxrl.rewards]\nodd = word_games.short:score\n")
    for text in ("", "\0", "Name: x\nName: y\n\n"):
        (site / "odd_games-1.0.dist-info" / "METADATA").write_text(text)
        _all_offers.cache_clear()
        assert locate(REWARD, "odd").module == "word_games.short"


@pytest.mark.parametrize("place", ["word_games.short:no-name", "1word.short:score", "word_games:"])
def test_a_place_that_is_none_is_told(site: Path, place: str) -> None:
    offer(site, "odd-games", f"[oxrl.rewards]\nodd = {place}\n")
    with pytest.raises(RewardDefinitionError, match="is no module:attribute"):
        locate(REWARD, "odd")


def test_thousands_of_names_are_a_short_sentence_at_once(site: Path) -> None:
    names = "".join(f"name{number} = word_games.short:score\n" for number in range(60_000))
    offer(site, "many-games", f"[oxrl.rewards]\n{'long' * 20_000} = x:y\n{names}")
    with pytest.raises(RewardDefinitionError) as refused:
        locate(REWARD, "nobody")
    assert len(str(refused.value)) < 10_000
    assert len(names_of(REWARD)) == len(own_offers("oxrl.rewards")) + 100
    assert locate(REWARD, "name59999").module == "word_games.short"


HOSTILE = {
    "raises": "raise KeyError('\x1b[2Jcolour')",
    "exits": "import sys; sys.exit(0)",
    "exits deeper": "def thing(*args, **named):\n    raise SystemExit(0)",
    "garbage": "thing = 7",
    "yields garbage": "def thing(*args, **named):\n    yield 1, 2",
    "what JSON cannot hold": "def thing(*args, **named):\n    return {'a': {1, 2}, 'b': '\\ud800'}",
    "half a character": "def thing(*args, **named):\n    return '\\ud800'",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_whatever_a_package_does_it_is_told_and_nothing_else_breaks(
    site: Path, source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "word_games" / "bad.py").write_text(source)
    entries = [f"[oxrl.{group}]\n{name} = word_games.bad:thing" for group, name in BAD.items()]
    offer(site, "bad-games", "\n".join(entries))
    offered = preparers()
    assert {"arithmetic", "words"} <= offered.keys() and "bad-games" in caplog.text
    assert "\x1b" not in caplog.text
    told = [finding for finding in examine(tmp_path) if "bad-games" in "".join(finding[1:3])]
    assert [finding.state for finding in told] == ["warn"] and "\x1b" not in told[0].text
    # Nothing of it is named, so a run does not ask it, nor does who prepares what oxRL has.
    sys.modules.pop("word_games.bad", None)
    preparers("arithmetic")
    oxrl.train("config.yaml", overrides=["run.steps=1"])
    assert "word_games.bad" not in sys.modules
    noted = json.loads(Path("run/environment.json").read_text())
    assert noted["words"] == {"letters": 26} and isinstance(noted["python"], str)


BAD = {"datasets": "bad", "doctor": "bad", "machine_notes": "python"}


@pytest.mark.parametrize("source", [*HOSTILE.values()][3:], ids=[*HOSTILE][3:])
def test_what_a_named_package_notes_badly_is_told_where_it_would_stand(
    site: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "word_games" / "bad.py").write_text(source)
    offer(site, "word-games-2", "")
    entries = site / "word_games-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + "\nbad = word_games.bad:thing\n")
    oxrl.train("config.yaml", overrides=["run.steps=1"])
    noted = json.loads(Path("run/environment.json").read_text())
    assert "word-games" in noted["bad"] and noted["words"] == {"letters": 26}
    assert "'bad', which the installed package word-games offers" in caplog.text


def test_a_preparer_of_a_package_that_fails_is_told_with_its_name(site: Path) -> None:
    (site / "word_games" / "bad.py").write_text("thing = {'broken': lambda *args, **named: 1 / 0}")
    offer(site, "bad-games", "[oxrl.datasets]\nbad = word_games.bad:thing\n")
    with pytest.raises(ConfigError, match="bad-games offers.*raised ZeroDivisionError"):
        preparers()["broken"](None, Path("out"), seed=0, limit=None, test=None)


def test_a_project_file_that_is_no_toml_is_told_and_what_is_installed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own_offers.cache_clear()
    try:
        for text in (b"[", b"\xff", b"project = 3", b"[project]\nname = 'oxrl'\n"):
            (tmp_path / "pyproject.toml").write_bytes(text)
            monkeypatch.setattr(entry_points, "PROJECT", tmp_path / "pyproject.toml")
            own_offers.cache_clear()
            caplog.clear()
            assert "exact" in own_offers("oxrl.rewards")
            assert "pyproject.toml cannot be read" in caplog.text
    finally:
        own_offers.cache_clear()
