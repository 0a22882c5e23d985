"""A policy loss and features of the user's own, from a file or given to `oxrl.train`: the same run
either way, the same bytes after a resume, and every mistake told before anything is trained.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oxrl
from oxrl.errors import ConfigError, OxrlError, RunDirectoryError
from oxrl.functional.gates import Decision, clean, finish
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.features.base import Feature, FeatureInputs, Planned
from oxrl.recipes.features.own_feature import OwnFeature, tried_features
from oxrl.types import Output, PolicyBatch, RolloutBatch
from oxrl.usercode.gates import OwnGate, try_gate
from oxrl.usercode.given import giving, name_of
from oxrl.usercode.user_code import run_module
from support.command_line import oxrl as command
from support.figures import SEED, THREADS, Learned
from support.rewards_here import CODES

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
GATE = Callable[..., Any]


def soft(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: Tensor | None = None,
    reach: float,
) -> LossAndMetrics:
    tokens = clean(logprobs, old, advantages, mask)
    bent = (tokens.log_ratio / reach).tanh()
    decision = Decision(value=reach * bent * tokens.advantages, weight=1 - bent**2)
    return finish(tokens, decision, loss_weights, correction)


class Counted(Feature):
    """An entropy bonus that grows with the rollout steps, which only a checkpoint knows."""

    def __init__(self, given: FeatureInputs, *, coeff: float = 0.5) -> None:
        self.coeff = coeff
        self.count = 0

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        self.count += 1
        return batch

    def loss(self, output: Output, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]] | None:
        assert output.entropy is not None
        mask = batch.inputs.response_mask
        entropy = torch.where(mask, output.entropy * batch.loss_weights, 0.0).sum()
        term = -self.coeff * self.count * entropy
        return term, {"update/bonus": -term.detach()}

    def save(self, directory: Path) -> None:
        (directory / "count.json").write_text(json.dumps(self.count))

    def load(self, directory: Path) -> None:
        self.count = json.loads((directory / "count.json").read_text())


def config(folder: Path, name: str = "run", steps: int = 2, **sections: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "run": {
            "name": name,
            "dir": folder / name,
            "steps": steps,
            "mlflow": False,
            "threads": THREADS,
            "seed": SEED,
        },
        "model": {"name": "builtin:tiny"},
        "data": {"prompts_per_step": 2},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "train": {"alg_name": "sgrpo", "lr": 1e-3},
    }
    return {
        section: made.get(section, {}) | sections.get(section, {})
        for section in {**made, **sections}
    }


def told(run: oxrl.Run) -> Any:
    untimed = ("time/", "throughput/", "system/")
    return run.metrics[[name for name in run.metrics if not name.startswith(untimed)]]


SOFT = {"alg_name": "sgrpo", "lr": 1e-2, "minibatches": 2, "loss_numbers": {"reach": 0.01}}


def test_given_or_from_a_file_cut_in_two_or_not_it_is_one_run(
    tmp_path: Path, learned: Learned
) -> None:
    (tmp_path / "codes.py").write_text(CODES)

    def run(name: str, steps: int = 4, **given: Any) -> oxrl.Run:
        reward = {"name": f"{tmp_path}/codes.py:codes"}
        sections = {"train": SOFT | given.pop("train", {}), "reward": reward}
        made = config(tmp_path, name, steps, **sections)
        return oxrl.train(made, dataset=ROWS, **given)

    whole = run("whole", gate=soft, feature=Counted)
    assert "update/bonus" in whole.metrics
    first, second, *_ = whole.metrics["update/weight_mean"]
    assert first == pytest.approx(1.0, abs=1e-3)  # the policy that sampled
    learned("update/weight_mean", second, at_most=0.5)
    run("parts", 2, gate=soft, feature=Counted)
    parts = run("parts", gate=soft, feature=[Counted], resume=True)
    assert told(parts).equals(told(whole))

    # The same two in a file, by the same numbers.
    text = Path(__file__).read_text(encoding="utf-8")
    top = re.sub(
        "from (command_line|figures|rewards_here) import .*\n", "", text[: text.index("ROWS = ")]
    )
    code = "\n\n".join(map(inspect.getsource, (soft, Counted)))
    (tmp_path / "mine.py").write_text(top + "\n\n" + code)
    named = {"loss": f"{tmp_path}/mine.py:soft", "features": {f"{tmp_path}/mine.py:Counted": {}}}
    assert told(run("file", train=named)).equals(told(whole))
    bound = partial(Counted, coeff=0.25)
    other = run("bound", 2, feature=bound, gate=soft)
    both = whole.metrics["update/bonus"].iloc[0] / other.metrics["update/bonus"].iloc[0]
    assert both == pytest.approx(2.0, rel=1e-5)

    # Both are pinned by their source; without them nothing goes on, and the way to is named.
    pins = json.loads((whole.path / "inputs.json").read_text())
    assert pins["train.loss"]["where"] == "python:soft"
    assert pins["train.loss"]["files"]
    assert pins["train.features"]["files"]
    refused = command("train", whole.path / "config.yaml", "--resume", folder=tmp_path)
    assert refused.returncode == 2
    assert "oxrl.train(..., gate=soft, resume=True)" in refused.stderr
    assert "oxrl.train(..., feature=Counted, resume=True)" in refused.stderr
    assert "Traceback" not in refused.stderr
    again = oxrl.load_run(whole.path, gate=soft, feature=Counted)
    assert all(finding.equal for finding in again.replay(2))


def test_a_gate_with_another_source_is_refused_unless_that_is_accepted(tmp_path: Path) -> None:
    def made(text: str) -> Any:
        path = tmp_path / "notebook.py"
        path.write_text(text)
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(text, str(path), "exec"), names)
        return names["gate"]

    text = (
        "def gate(logprobs, old, advantages, mask, weights, correction=None, c=1.0):\n"
        "    return -(c * (logprobs - old).exp() * advantages * weights).sum(), {}\n"
    )
    first, second = made(text), made("\n" + text.replace("c * ", "2 * c * "))
    sections: Any = {"train": {"loss_numbers": {"c": 0.5}}, "reward": {"name": "exact"}}
    oxrl.train(config(tmp_path, **sections), dataset=ROWS, gate=first)
    more = config(tmp_path, steps=3, **sections)
    (tmp_path / "notebook.py").write_text("\n" + text.replace("c * ", "2 * c * "))
    with pytest.raises(RunDirectoryError, match=r"train\.loss"):
        oxrl.train(more, gate=second, resume=True)
    accepted = ["train.loss"]
    run = oxrl.train(more, gate=second, resume=True, accept=accepted)
    assert len(run.metrics) == 3


def weighing(weight: object) -> GATE:
    """A reward with a closure."""

    def weighed(prompt: Any, completion: Any) -> float:
        return 0.5 if weight else 0.0

    return weighed


def test_a_reward_whose_closure_changed_is_refused_unless_that_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oxrl.train(config(tmp_path, steps=1), dataset=ROWS, reward=weighing(1))
    oxrl.train(config(tmp_path, steps=2), dataset=ROWS, reward=weighing(1), resume=True)
    more = config(tmp_path, steps=3)
    with pytest.raises(RunDirectoryError, match=r"reward\.name: value of weight in weighed"):
        oxrl.train(more, dataset=ROWS, reward=weighing(2), resume=True)
    with pytest.raises(RunDirectoryError, match=r"reward\.name: value of arguments"):
        bound = partial(weighing(1), completion="x")
        oxrl.train(more, dataset=ROWS, reward=bound, resume=True)
    oxrl.train(more, dataset=ROWS, reward=weighing(2), resume=True, accept=["reward.name"])
    noted = json.loads((tmp_path / "run" / "inputs.json").read_text())["reward.name"]
    assert set(noted) == {"where", "commit", "files"}
    assert any("value of" in name for name in noted["files"])
    caplog.clear()
    more = config(tmp_path, steps=5)
    oxrl.train(more, dataset=ROWS, reward=weighing({3}), resume=True, accept=["reward.name"])
    assert "a resume will not see changes of weight in weighed (set)" in caplog.text


def plain(change: Callable[[Tensor], object]) -> GATE:
    """A gate that is right up to its last step."""

    def gate(logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, w: Tensor, **_: Any) -> Any:
        return change((logprobs - old).exp() * adv * w)

    return gate


class Typo(Feature):
    def on_rollout(self, batch: Any) -> Any:
        return batch


class Idle(Feature):
    def helper(self) -> None: ...


class Apart:
    def loss(self, output: Any, batch: Any) -> None: ...


class Forgets(Feature):
    def on_rollouts(self, batch: Any) -> Any:
        dataclasses.replace(batch)


class Raises(Feature):
    def steer(self, batch: Any, progress: Any) -> Any:
        return {"a": 1 / 0}


class Unmade(Feature):
    greedy_baseline = False

    def __init__(self, given: Any) -> None:
        raise KeyError("coeff")

    def steer(self, batch: Any, progress: Any) -> Any:
        return {}


class Vector(Feature):
    def loss(self, output: Any, batch: Any) -> Any:
        return output.entropy, {}


def raising(logprobs: Any, old: Any, adv: Any, mask: Any, w: Any, *, correction: Any = None) -> Any:
    return logprobs.nonsense


def needy(logprobs: Any, old: Any, a: Any, m: Any, w: Any, *, correction: Any, reach: Any) -> Any:
    return None


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"gate": 3.0}, "float is not a function"),
    "class": ({"gate": dict}, "dict is a class, not a function"),
    "none": ({"gate": lambda: 0.0}, "takes 0 arguments (none) of the 5"),
    "few": ({"gate": lambda a, b, c: 0.0}, "takes 3 arguments (a, b, c) of the 5"),
    "correction": ({"gate": lambda a, b, c, d, e: 0.0}, "takes no correction"),
    "needed": ({"gate": needy}, "has no default for reach: write {reach: VALUE}"),
    "unknown": ({"gate": raising, "train": {"loss_numbers": {"reach": 1}}}, "reach is no number"),
    "raises": ({"gate": raising}, "AttributeError: 'Tensor' object has no attribute 'nonsense'"),
    "loss alone": ({"gate": plain(lambda x: -x.sum())}, "gave Tensor, need two things"),
    "shape": ({"gate": plain(lambda x: (-x, {}))}, "its loss is [2, 4], need a tensor"),
    "float": ({"gate": plain(lambda x: (0.5, {}))}, "its loss is float"),
    "nothing": ({"gate": plain(lambda x: None)}, "gave NoneType"),
    "nan": ({"gate": plain(lambda x: (x.sum() * torch.nan, {}))}, "its loss is nan"),
    "detached": ({"gate": plain(lambda x: (-x.sum().detach(), {}))}, "has no gradient"),
    "mean": ({"gate": plain(lambda x: (-x.mean(), {}))}, "has to be a sum over rows"),
    "metrics": ({"gate": plain(lambda x: (-x.sum(), [1]))}, "its metrics are list"),
    "metric": ({"gate": plain(lambda x: (-x.sum(), {"a": x}))}, "its metric 'a' is a tensor"),
    "text": ({"gate": "mine.py:gate"}, "train.loss"),
    "recipe": ({"gate": plain(lambda x: x), "train": {"alg_name": "sft"}}, "train.loss"),
    "two": ({"gate": soft, "train": {"loss": "ppo_clip"}}, "leave one out"),
    "feature": ({"feature": 3.0}, "float is no class"),
    "lambda": ({"feature": lambda given: 3}, "it made int: a feature is a class"),
    "object": ({"feature": Idle(None)}, "it is an object of Idle: give the class"),  # pyright: ignore
    "base": ({"feature": Apart}, "Apart has not Feature as its base"),
    "typo": ({"feature": Typo}, "on_rollout, which is no hook; did you mean 'on_rollouts'?"),
    "idle": ({"feature": Idle}, "Idle overrides none of on_assembled, on_sampled, on_rollouts"),
    "twice": ({"feature": [Counted, Counted]}, "two things given are called Counted"),
    "namesakes": (
        {"environment": lambda: 0.0, "gate": lambda: 0.0},
        "two things given are called <lambda>",
    ),
    "bound": ({"feature": partial(Counted, cof=1.0)}, "unexpected keyword argument 'cof'"),  # pyright: ignore
    "forgets": ({"feature": Forgets}, "on_rollouts gave NoneType, has to give RolloutBatch"),
    "hook": ({"feature": Raises}, "steer raised ZeroDivisionError"),
    "unmade": ({"feature": Unmade}, "Unmade raised KeyError"),
    "vector": ({"feature": Vector}, "loss has to give a scalar tensor"),
    "of another": ({"feature": Counted, "train": {"alg_name": "sft"}}, "train.features"),
    "file": ({"train": {"features": {"nowhere.py:Mine": {}}}}, "train.features"),
    "list": ({"train": {"features": ["mine.py:Mine"]}}, "train.features"),
    "scalar": ({"train": {"features": {"mine.py:Mine": 3}}}, "train.features"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_field(tmp_path: Path, name: str) -> None:
    arguments, text = dict(MISTAKES[name][0]), MISTAKES[name][1]
    sections = {"train": arguments.pop("train")} if "train" in arguments else {}
    if sections.get("train", {}).get("alg_name") != "sft":
        sections["reward"] = {"name": "exact"}
    made = config(tmp_path, steps=1, **sections)
    with pytest.raises(OxrlError, match=re.escape(text)) as refused:
        oxrl.train(made, dataset=ROWS, **arguments)
    assert refused.value.exit_code == 2
    assert "train." in str(refused.value) or "two things given" in str(refused.value)


def test_a_gate_that_cannot_leave_this_process_learns_in_it_alone(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(*tensors: Tensor, correction: Tensor | None = None) -> Any:
        with lock:
            logprobs, old, advantages, _, weights = tensors
            return -((logprobs - old).exp() * advantages * weights).sum(), {}

    run = oxrl.train(config(tmp_path, steps=1, reward={"name": "exact"}), dataset=ROWS, gate=locked)
    assert len(run.metrics) == 1
    with giving({"python:locked": locked}), pytest.raises(ConfigError, match=r"train\.backend"):
        pickle.dumps(OwnGate("python:locked"))
    with giving({"python:soft": soft}):
        sent = pickle.loads(pickle.dumps(OwnGate("python:soft")))
    try_gate(sent, {"reach": 0.5})


def test_a_gate_is_tried_on_what_a_batch_could_hold() -> None:
    """Log-probabilities are below 0, the policy has moved, and responses differ in advantage."""
    seen: list[list[Tensor]] = []

    def looks(*tensors: Tensor, correction: Tensor | None = None) -> Any:
        seen.append([tensor.detach() for tensor in tensors])
        logprobs, old, advantages, _, weights = tensors
        return -((logprobs - old).exp() * advantages * weights).sum(), {}

    with giving({"python:looks": looks}):
        try_gate(OwnGate("python:looks"), {})
    logprobs, old, advantages, mask, _ = seen[0]
    assert (logprobs[mask] < 0).all() and (old[mask] < 0).all()
    assert set((logprobs - old)[mask].sign().tolist()) == {-1.0, 0.0, 1.0}
    # One advantage for all tokens of a response.
    of_rows = [set(row[kept].tolist()) for row, kept in zip(advantages, mask, strict=True)]
    assert of_rows == [{1.0}, {-0.5}]
    assert mask.sum(1).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("size", "apart", "fine"),
    [
        (1e4, 0.5, True),  # 1 in 20,000 of the loss
        (1e4, 2.0, False),
        (1e-3, 0.8e-4, True),  # of small losses a ten-thousandth in all
        (1e-3, 1.5e-4, False),
    ],
)
def test_a_loss_row_by_row_may_differ_by_a_ten_thousandth(
    size: float, apart: float, fine: bool
) -> None:
    """The loss is `size` for two rows together, and `size + apart` for one after the other."""

    def rounds(logprobs: Tensor, *_: Tensor, correction: Tensor | None = None) -> Any:
        value = size if len(logprobs) == 2 else (size + apart) / 2
        return value + 0.0 * logprobs.sum(), {}

    with giving({"python:rounds": rounds}):
        gate = OwnGate("python:rounds")
        if fine:
            try_gate(gate, {})
        else:
            with pytest.raises(ConfigError, match="has to be a sum over rows"):
                try_gate(gate, {})


def test_padding_that_holds_anything_never_reaches_a_gate() -> None:
    seen: list[Tensor] = []

    def careless(
        logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, w: Tensor, **_: Any
    ) -> Any:
        seen.extend((logprobs, old, adv, w))
        return -((logprobs - old).exp() * adv * w * mask).sum(), {"update/n": 3}

    mask = torch.tensor([[True, False]])
    anything = torch.tensor([[-1.0, torch.nan]])
    leaf = anything.clone().requires_grad_()
    with giving({"python:careless": careless}):
        gate = OwnGate("python:careless")
        loss, metrics = gate(leaf, anything, anything, mask, anything, correction=anything)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.tolist() == [[-1.0, 0.0]]
    assert metrics["update/n"] == 3
    assert all(float(tensor[0, 1].detach()) == 0.0 for tensor in seen)


class Scaled:
    """A gate that is an object with a number of its own."""

    def __init__(self, size: float) -> None:
        self.size = size

    def __call__(
        self, logprobs: Tensor, old: Tensor, adv: Tensor, mask: Tensor, w: Tensor, **_: Any
    ) -> Any:
        return -(self.size * (logprobs - old).exp() * adv * w).sum(), {}


class Locked(Counted):
    def __init__(self, given: FeatureInputs) -> None:
        super().__init__(given)
        self.lock = threading.Lock()


def test_objects_and_partials_are_sent_to_training_ranks() -> None:
    for value in (Scaled(0.5), partial(soft, reach=0.5)):
        name = name_of(value)
        with giving({name: value}):
            message = pickle.dumps(OwnGate(name))
        try_gate(pickle.loads(message), {})

    def made(value: Any) -> OwnFeature:
        given: Any = SimpleNamespace()
        with giving({name_of(value): value}):
            return OwnFeature(name_of(value), given, {})

    for value, coeff in ((Counted, 0.5), (partial(Counted, coeff=0.25), 0.25)):
        sent = pickle.loads(pickle.dumps(made(value)))
        assert sent._name == "python:Counted"
        assert sent._code.value.coeff == coeff
    with pytest.raises(ConfigError, match=r"train\.features=python:Locked.*cannot be sent"):
        pickle.dumps(made(Locked))


class Term(Feature):
    """Answers `loss` with whatever it is given."""

    def __init__(self, given: FeatureInputs, answer: Any = None) -> None:
        self.answer = answer
        self.count = 0

    def loss(self, output: Output, batch: PolicyBatch) -> Any:
        return self.answer


class Kept(Term):
    """Has something to keep over a resume."""

    def save(self, directory: Path) -> None:
        (directory / "count.json").write_text(str(self.count))

    def load(self, directory: Path) -> None:
        self.count = int((directory / "count.json").read_text())


def own(value: Any) -> OwnFeature:
    given: Any = SimpleNamespace()
    with giving({name_of(value): value}):
        return OwnFeature(name_of(value), given, {})


def test_a_term_of_an_own_feature_is_a_scalar_with_metrics_or_none() -> None:
    nothing: Any = SimpleNamespace()
    term = torch.tensor(0.25)
    feature = own(Term)
    assert feature.loss(nothing, nothing) is None
    feature._code.value.answer = (term, {"mine": 1.0})
    assert feature.loss(nothing, nothing) == (term, {"mine": 1.0})
    for wrong in ((0.25, {}), (torch.zeros(2), {}), (term, 1.0), (term, {}, 1.0)):
        feature._code.value.answer = wrong
        with pytest.raises(ConfigError, match="a scalar tensor and a dict of metrics"):
            feature.loss(nothing, nothing)


class Greedy(Term):
    """Says what it needs: as a class, and as it is made."""

    greedy_baseline = True
    old_logprobs = "before"

    def __init__(self, given: FeatureInputs) -> None:
        super().__init__(given)
        self.want_before = frozenset({"entropy"})


def test_what_an_own_feature_says_of_itself_is_known_of_it() -> None:
    feature, silent = own(Greedy), own(Term)
    assert (feature.greedy_baseline, feature.old_logprobs) == (True, "before")
    assert feature.want_before == {"entropy"}
    assert (feature.moves_reference, feature.want) == (False, frozenset())
    assert (silent.greedy_baseline, silent.old_logprobs) == (False, None)


def test_an_own_feature_that_can_be_saved_is_kept_under_its_name(tmp_path: Path) -> None:
    feature = own(Kept)
    assert feature.saved() == {"feature_Kept": feature}
    for count in (7, 8):  # the folder may be there
        feature._code.value.count = count
        feature.save(tmp_path / "deep" / "feature_Kept")
    other = own(Kept)
    other.load(tmp_path / "deep" / "feature_Kept")
    assert other._code.value.count == 8
    assert own(Term).saved() == {}


ASKED_NOTHING: Any = None
PLANNED = Planned(steps=10, updates=1, samples=1, given=ASKED_NOTHING, prompts=len)


class Costs(Kept):
    """Looks at its numbers before a run."""

    @classmethod
    def planned(cls, run: Planned, numbers: Mapping[str, Any]) -> str:
        return f"{run.steps // numbers['every']} walks"


def test_every_own_feature_is_tried() -> None:
    with giving({name_of(Kept): Kept, name_of(dict): dict, name_of(Costs): Costs}):
        assert tried_features({name_of(Kept): {}}, PLANNED) == "python:Kept: made when a run starts"
        told = tried_features({name_of(Kept): {}, name_of(Costs): {"every": 3}}, PLANNED)
        assert told == "python:Kept, python:Costs (3 walks): made when a run starts"
        with pytest.raises(ConfigError, match=r"train\.features=python:dict"):
            tried_features({name_of(Kept): {}, name_of(dict): {}}, PLANNED)
        with pytest.raises(ConfigError, match=r"python:Costs: planned raised KeyError: 'every'"):
            tried_features({name_of(Costs): {}}, PLANNED)


def test_a_file_runs_as_it_stands_there_though_its_size_and_its_second_are_the_same(
    tmp_path: Path,
) -> None:
    file = tmp_path / "changes.py"
    found: list[int] = []
    for number in (1, 2):
        file.write_text(f"NUMBER = {number}\n")
        os.utime(file, (1e9, 1e9))
        found.append(run_module(file, "reward").NUMBER)
    assert found == [1, 2]
