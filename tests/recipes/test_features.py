"""Features of rows beyond their cells: each trains, does its particular thing, and resumes
exactly.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oxrl.assembly.assembly import Assembly
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.recipes.features.adaptive_kl import AdaptiveKL
from oxrl.recipes.features.base import FeatureInputs, Prepared
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.features.token_record import TokenRecord
from oxrl.recipes.objective import Objective
from oxrl.recipes.rl import minibatch
from oxrl.recipes.session import RolloutProgress, Session
from oxrl.types import Output, PolicyBatch, TokenBatch
from support.figures import Learned
from support.rewards_here import CODES, HARMLESS
from support.small_runs import final_files, metric_lines, rl_config

# 0 or 1, and mostly 0 for a random model: some groups teach nothing. Of the first many do not.
SPARSE = (
    "def sparse(prompt, completion):\n    return float(sum(c.isdigit() for c in completion) >= 2)\n"
)
SEEN = "def seen(prompt, completion):\n    return float(any(c.isdigit() for c in completion))\n"
SHARE = "def share(prompt, completion):\n    return sum(c.isdigit() for c in completion) / 6\n"
NEVER = "def never(prompt, completion):\n    return 0.0\n"
# The data decide about half of the groups, whatever the weights: every other one of the 24 prompts
# has an odd answer.
TAUGHT = """
def taught(prompt, completion):
    return sum(map(ord, completion)) / 1000 if int(prompt.answer) % 2 else 0.0
"""
RIGHT = "def right(prompt, completion):\n    return float(int(prompt.answer) % 2)\n"
HARMLESS.update((SPARSE, SEEN, SHARE, NEVER, TAUGHT, RIGHT))


def config(
    folder: Path,
    algorithm: str,
    *,
    reward: str = SPARSE,
    name: str = "run",
    max_tokens: int = 6,
    steps: int = 6,
    checkpoint_every: int | None = None,
    prompts: int = 4,
    **train: Any,
) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.py").write_text(reward)
    function = reward.partition("(")[0].partition("def ")[2]
    return rl_config(
        folder,
        name,
        run={"name": name, "steps": steps, "checkpoint_every": checkpoint_every or steps},
        data={"prompts_per_step": prompts},
        reward={"name": f"{folder / 'scores.py'}:{function}"},
        rollout={"max_tokens": max_tokens, "n_samples": 4},
        train={"alg_name": algorithm, "lr": 1e-3} | train,
    )


def samples_of(run_directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run_directory / "samples.jsonl").read_text().split("\n")
        if line
    ]


# Every row with state or choices of its own, and numbers that make the feature act within a few
# small steps.
RESUMED: dict[str, dict[str, Any]] = {
    "dapo": {},
    "prorl": {"reference_sync_steps": 3, "kl_coeff": 0.1},
    "ppo_rlhf": {"kl_target": 1e-3, "kl_horizon": 50, "critic_lr": 1e-3},
    "remax": {},
    "vapo": {"critic_warmup_steps": 3, "critic_lr": 1e-3},
    "a3po": {"epochs": 3},
    "clip_cov": {"cov_fraction": 0.2, "cov_low": 0.0, "epochs": 2},
    "kl_cov": {"cov_fraction": 0.2, "epochs": 2},
    "opsm": {"drift_max": 0.0, "epochs": 2},
    "m2po": {"second_moment_max": 1e-12, "epochs": 2},
    "simko": {"epochs": 2},
    "dppo_topk_tv": {"epochs": 2},
    "dppo_topk_kl": {"epochs": 2},
}


# One of each kind of state in CI; all of them in the full suite.
IN_CI = ("dapo", "prorl", "ppo_rlhf", "a3po", "opsm")


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.full) for name in RESUMED],
)
def test_a_run_that_dies_between_checkpoints_resumes_exactly(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of three epochs a batch is three steps.
    steps = 6 if RESUMED[algorithm].get("epochs") == 3 else 4
    settings = {"steps": steps, "checkpoint_every": 2, "prompts": 2, "reward": SEEN}
    settings |= RESUMED[algorithm]
    whole = config(tmp_path, algorithm, name="whole", **settings)
    run(whole)
    died = config(tmp_path, algorithm, name="died", **settings)
    original = Session.record

    def die_in_step_4(
        session: Session, step: int, metrics: dict[str, float], *, tokens: float
    ) -> None:
        if step == 4:
            raise OSError("the machine is gone")
        original(session, step, metrics, tokens=tokens)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the machine is gone"):
        patch.setattr(Session, "record", die_in_step_4)
        run(died)
    run(died, resume=True)
    assert metric_lines(died.run.directory) == metric_lines(whole.run.directory)
    assert samples_of(died.run.directory) == samples_of(whole.run.directory)
    assert final_files(died.run.directory) == final_files(whole.run.directory)


@pytest.fixture(scope="module")
def dapo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 6 steps."""
    cfg = config(tmp_path_factory.mktemp("dapo"), "dapo", reward=TAUGHT)
    run(cfg)
    return cfg.run.directory


def test_dynamic_sampling_trains_on_full_batches_of_groups_whose_rewards_differ(
    dapo: Path,
) -> None:
    lines, samples = metric_lines(dapo), samples_of(dapo)
    # Of 24 prompts 12 teach, and 6 steps train on 24.
    assert max(line["sampling/rounds"] for line in lines) > 1
    drawn = 0
    for line in lines:
        mine = [sample for sample in samples if sample["step"] == line["step"]]
        rewards: dict[int, set[float]] = {}
        for sample in mine:
            rewards.setdefault(sample["draw"], set()).add(sample["reward"])
        differ = sorted(draw for draw, values in rewards.items() if len(values) > 1)
        trained = sorted({sample["draw"] for sample in mine if sample["advantage"] is not None})
        # The first four that differ, in the order of the data, which goes on right behind the last
        # of them.
        assert trained == differ[:4]
        assert min(rewards) == drawn
        drawn = trained[-1] + 1
        assert line["reward/mean"] == pytest.approx(
            sum(sample["reward"] for sample in mine) / len(mine)
        )


def test_every_sample_is_trained_on_or_dropped_for_a_reason(dapo: Path) -> None:
    last, samples = metric_lines(dapo)[-1], samples_of(dapo)
    books = {
        key.removeprefix("samples/"): value
        for key, value in last.items()
        if key.startswith("samples/")
    }
    assert books["dispatched"] == len(samples) == sum(books.values()) - books["dispatched"]
    fates = Counter(sample["advantage"] is not None for sample in samples)
    assert books["trained"] == fates[True] == 6 * 16
    assert books["dropped_uninformative"] > 0


def test_sampling_stops_after_its_rounds_and_trains_on_what_it_found(tmp_path: Path) -> None:
    half = config(tmp_path / "half", "dapo", reward=TAUGHT, sampling_rounds=1, steps=4)
    run(half)
    lines, samples = metric_lines(half.run.directory), samples_of(half.run.directory)
    assert {line["sampling/rounds"] for line in lines} == {1.0}
    rows: list[int] = []
    for line in lines:
        mine = [sample for sample in samples if sample["step"] == line["step"]]
        assert len(mine) == 16
        rows.append(sum(int(sample["answer"]) % 2 for sample in mine) or 16)
    assert [line["data/rows"] for line in lines] == rows
    assert {*rows} & {4, 8, 12}
    never = config(tmp_path / "never", "dapo", reward=NEVER, sampling_rounds=2, steps=1)
    run(never)
    for line in metric_lines(never.run.directory):
        assert (line["sampling/rounds"], line["sampling/groups"], line["data/rows"]) == (
            2.0,
            8.0,
            16.0,
        )
        assert line["update/skipped"] == line["reward/mean"] == 0.0


def of_one_long_step(folder: Path, reward: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The line and the samples of a step whose penalty grows over 50 tokens of 60."""
    long = {"overlong_buffer": 50, "max_tokens": 60, "steps": 1}
    cfg = config(folder, "dapo", reward=reward, sampling_rounds=1, **long)
    run(cfg)
    [line] = metric_lines(cfg.run.directory)
    return line, samples_of(cfg.run.directory)


def test_the_length_penalty_shapes_advantages_and_never_the_choice_of_groups(
    tmp_path: Path,
) -> None:
    line, every_sample = of_one_long_step(tmp_path, TAUGHT)
    samples = [sample for sample in every_sample if sample["advantage"] is not None]
    assert {int(sample["answer"]) % 2 for sample in samples} == {1}
    lengths = [sum(end - start for _, start, end in sample["versions"]) for sample in samples]
    penalties = [max(-1.0, min(0.0, (10 - length) / 50)) for length in lengths]
    assert line["reward/shaping"] == pytest.approx(sum(penalties) / len(samples))
    shaped = [s["reward"] + penalty for s, penalty in zip(samples, penalties, strict=True)]
    for sample, value in zip(samples, shaped, strict=True):
        group = [v for s, v in zip(samples, shaped, strict=True) if s["draw"] == sample["draw"]]
        assert (sample["advantage"] > 0) == (value > sum(group) / len(group) + 1e-9)


def test_groups_that_were_taken_because_none_differs_teach_nothing(tmp_path: Path) -> None:
    """Their lengths differ, which is what the penalty is about; they were not sampled for that."""
    line, samples = of_one_long_step(tmp_path, NEVER)
    assert line["reward/zero_variance_groups"] == 1.0
    assert line["reward/shaping"] == 0.0
    lengths = {sum(end - start for _, start, end in sample["versions"]) for sample in samples}
    assert len(lengths) > 1
    assert {sample["advantage"] for sample in samples} == {0.0}
    assert line["update/grad_norm"] == 0.0


def test_cut_responses_are_baseline_only_where_they_are_masked(tmp_path: Path) -> None:
    cfg = config(tmp_path, "sgrpo", reward=SHARE, max_tokens=60, mask_truncated=True)
    run(cfg.model_copy(update={"run": cfg.run.model_copy(update={"record": "tokens", "steps": 1})}))
    tensors = load_file(min((cfg.run.directory / "rollouts").glob("*.safetensors")))
    samples = samples_of(cfg.run.directory)
    cut = torch.tensor([sample["finish_reason"] == "length" for sample in samples])
    assert cut.any() and not cut.all()
    assert not tensors["response_mask"][cut].any()
    assert tensors["response_mask"][~cut].any(1).all()
    assert not tensors["loss_weights"][cut].any()
    plain = config(tmp_path / "plain", "sgrpo", reward=SHARE, max_tokens=60)
    run(plain.model_copy(update={"run": plain.run.model_copy(update={"steps": 1})}))
    # The advantage of a row that ended is the same: the cut ones are still in its group's mean and
    # deviation.
    for masked, whole in zip(samples, samples_of(plain.run.directory), strict=True):
        assert masked["advantage"] == (
            0.0 if masked["finish_reason"] == "length" else whole["advantage"]
        )


def test_the_kl_coefficient_follows_zieglers_controller(tmp_path: Path) -> None:
    cfg = config(tmp_path, "ppo_rlhf", kl_target=1e-3, kl_horizon=50, kl_coeff=0.5, critic_lr=1e-3)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    coefficient = 0.5
    for line in lines:
        assert line["kl/coeff"] == pytest.approx(coefficient)
        error = max(-0.2, min(0.2, line["kl/steered"] / 1e-3 - 1))
        coefficient *= 1 + error * line["data/rows"] / 50
    # Nothing to hold back at first; a policy too far from the reference is held back more.
    assert lines[1]["kl/coeff"] == pytest.approx(0.5 * (1 - 0.2 * 16 / 50))
    (steered,) = [f for f in objective(cfg).features if isinstance(f, AdaptiveKL)]
    progress = RolloutProgress(kl_coeff=0.5)
    near = torch.full((2, 4), -1 - 1e-3 * 1.1 / 2.5)  # of 3 and 2 tokens
    far = torch.full((2, 4), -2.0)
    for reference, error in ((near, 0.1), (far, 0.2)):
        before = progress.kl_coeff
        batch = policy_batch(torch.zeros(2, dtype=torch.float64), ref_logprobs=reference.double())
        steered.steer(batch, progress)
        assert progress.kl_coeff == pytest.approx(before * (1 + error * 2 / 50), rel=1e-5)


def test_the_reference_and_the_optimizer_start_afresh_on_schedule(
    tmp_path: Path, learned: Learned
) -> None:
    numbers = {"reference_sync_steps": 2, "kl_coeff": 0.1}
    cfg = config(tmp_path, "prorl", reward=CODES, steps=4, checkpoint_every=3, **numbers)
    run(cfg)
    far = [line["kl/ref_k3"] for line in metric_lines(cfg.run.directory)]
    assert far[0] == far[2] == 0.0
    least = min(far[1], far[3])
    learned("log10 of kl/ref_k3", math.log10(least), at_least=-5)
    states = {
        path.name: json.loads((path / "trainer_state.json").read_text())
        for path in (cfg.run.directory / "checkpoints").iterdir()
    }
    assert set(states["step_00000003"]["adam_steps"].values()) == {1}
    assert states["step_00000004"]["adam_steps"] == {} and states["step_00000004"]["step"] == 4
    newest = cfg.run.directory / "checkpoints" / "step_00000004"
    assert (newest / "model.safetensors").read_bytes() == (
        newest / "reference" / "model.safetensors"
    ).read_bytes()


def test_the_greedy_response_is_a_baseline_and_is_never_trained_on(tmp_path: Path) -> None:
    cfg = config(tmp_path, "remax", reward=SHARE, kl_coeff=0.0, steps=2)
    run(cfg)
    samples = [sample for sample in samples_of(cfg.run.directory) if sample["step"] == 2]
    greedy = {sample["draw"]: sample for sample in samples if sample["sample"] == 4}
    assert len(samples) == 20 and len(greedy) == 4
    assert all(sample["advantage"] is None for sample in greedy.values())
    for sample in samples:
        if sample["sample"] < 4:
            assert sample["advantage"] == pytest.approx(
                sample["reward"] - greedy[sample["draw"]]["reward"], abs=1e-6
            )
    line = metric_lines(cfg.run.directory)[-1]
    assert (line["samples/dropped_baseline"], line["samples/trained"], line["data/rows"]) == (
        8.0,
        32.0,
        16.0,
    )


def test_a_critic_is_fitted_before_the_policy_moves(tmp_path: Path) -> None:
    cfg = config(tmp_path, "vapo", reward=RIGHT, critic_warmup_steps=2, critic_lr=1e-2, steps=4)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["update/update_norm_ratio"] > 0 for line in lines] == [False] * 2 + [True] * 2
    assert all(line["value/update_norm_ratio"] > 0 for line in lines)
    # The first is of untrained weights, or no answer was right.
    assert max(line["update/nll"] for line in lines) > 1


def policy_batch(rewards: Tensor, **fields: Any) -> PolicyBatch:
    """Two rows of three and two trained tokens; the sampler's logprobs are -1."""
    mask = torch.tensor([[False, True, True, True], [False, True, True, False]])
    tokens = TokenBatch(tokens=mask.long(), attention_mask=mask | ~mask, response_mask=mask)
    given: dict[str, Any] = {
        "advantages": rewards[:, None].expand(2, 4) * mask,
        "versions": mask.long() * 0,
        "old_logprobs": None,
        "ref_logprobs": None,
    }
    return PolicyBatch(
        inputs=tokens,
        rollout_logprobs=torch.where(mask, -1.0, torch.nan).double(),
        loss_weights=mask.double() / 5,
        group_ids=torch.tensor([0, 0]),
        **(given | fields),
    )


class NoEngine:
    """Stands for engines that a loss never asks."""


def objective(cfg: Config) -> Objective:
    engine: Any = NoEngine()
    given = FeatureInputs(
        row=cfg.train.row,
        train=Assembly(cfg).algorithm,
        max_tokens=cfg.rollout.max_tokens,
        models={"policy": engine, "critic": engine, "reference": engine},
    )
    return Objective(
        Assembly(cfg).algorithm, build_features(given), max_tokens=cfg.rollout.max_tokens
    )


def gradient(cfg: Config, batch: PolicyBatch, logprobs: Tensor) -> Tensor:
    leaf = logprobs.clone().requires_grad_()
    loss, _ = objective(cfg).policy_loss(Output(logprobs=leaf), batch)
    return torch.autograd.grad(loss, leaf)[0]


def test_right_responses_add_their_mean_likelihood(tmp_path: Path) -> None:
    cfg = config(tmp_path, "vapo", nll_coeff=0.3, critic_warmup_steps=0)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.float64) / 3
    batch = policy_batch(rewards * 0, likelihood_weights=weights)
    found = gradient(cfg, batch, torch.full((2, 4), -2.0, dtype=torch.float64))
    torch.testing.assert_close(found, -0.3 * weights)


def test_the_unbiased_kl_of_opsm_weighs_tokens_by_their_ratio_to_the_sampler(
    tmp_path: Path,
) -> None:
    """With d = .3 the derivative of r * k3 by the logprob is r * (k3 + 1 - exp(-d)) = .3 r, r =
    exp(-.8 + 1).
    """
    cfg = config(tmp_path, "opsm", kl_coeff=0.5, epochs=2)
    logprobs, ref = (torch.full((2, 4), x, dtype=torch.float64) for x in (-0.8, -1.1))
    batch = dataclasses.replace(policy_batch(torch.zeros(2, dtype=torch.float64)), ref_logprobs=ref)
    torch.testing.assert_close(
        gradient(cfg, batch, logprobs), 0.5 * batch.loss_weights * math.exp(0.2) * 0.3
    )


def test_an_interpolated_anchor_gives_the_full_ratio_to_the_sampler_whatever_the_age(
    tmp_path: Path,
) -> None:
    cfg = config(tmp_path, "a3po", epochs=3)
    rewards = torch.tensor([1.0, -1.0], dtype=torch.float64)
    logprobs = torch.full((2, 4), -0.95, dtype=torch.float64)
    for age in (0, 1, 2, 7):
        batch = policy_batch(rewards, ages=torch.full((2, 4), age))
        expected = -batch.advantages * batch.loss_weights * math.exp(0.05)
        torch.testing.assert_close(gradient(cfg, batch, logprobs), expected)
    # Around an anchor that follows the policy, a token three times as likely is not clipped; around
    # the sampler it is.
    far = logprobs + 1
    assert gradient(cfg, policy_batch(rewards, ages=torch.full((2, 4), 20)), far)[0].any()
    assert not gradient(cfg, policy_batch(rewards, ages=torch.full((2, 4), 1)), far)[0].any()


def prepared(version: int) -> Prepared:
    nothing: Any = None
    return Prepared(rollouts=nothing, before=Output(), returns=None, seed=0, version=version)


def test_tokens_of_the_current_rollout_batch_are_clipped_in_its_last_minibatch(
    tmp_path: Path,
) -> None:
    """Sampled by version 32, trained on by versions 32 to 47: PPO's own clip in all of them."""
    cfg = config(tmp_path, "a3po", epochs=4, minibatches=4, steps=16)
    built = objective(cfg)
    (feature,) = built.features
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    fresh = policy_batch(rewards, versions=torch.full((2, 4), 32))
    fresh = feature.on_prepared(fresh, prepared(32))
    three_times = torch.full((2, 4), -1 + math.log(3), dtype=torch.float64)
    for _ in range(16):
        part = minibatch(built, fresh, torch.tensor([0, 1]))
        assert not gradient(cfg, part, three_times).any()


def test_the_age_of_tokens_is_counted_in_rollout_batches(tmp_path: Path) -> None:
    (feature,) = objective(config(tmp_path, "a3po", epochs=2, minibatches=2, steps=8)).features
    versions = torch.tensor([[0, 4, 8, 12], [16, 20, 20, 12]])
    batch = policy_batch(torch.zeros(2, dtype=torch.float64), versions=versions)
    ages = feature.on_prepared(batch, prepared(20)).ages
    assert ages is not None
    assert ages.tolist() == [[5, 4, 3, 2], [1, 0, 0, 2]]


def test_the_weight_of_an_interpolated_policy_is_capped(tmp_path: Path) -> None:
    """Age 2: half of a log-ratio of 6, exp(3) = 20 against the sampler, counts as 5."""
    cfg = config(tmp_path, "a3po", epochs=2, clip_high=99.0)
    rewards = torch.tensor([1.0, -1.0], dtype=torch.float64)
    batch = policy_batch(rewards, ages=torch.full((2, 4), 2))
    found = gradient(cfg, batch, torch.full((2, 4), 5.0, dtype=torch.float64))
    expected = -batch.advantages * batch.loss_weights * 5 * math.exp(3)
    torch.testing.assert_close(found, expected)


def test_failures_are_dropped_by_the_drift_of_the_policy_being_updated(tmp_path: Path) -> None:
    """Before the update the policy is the sampler; in its second minibatch it has moved by 0.6.
    The clip is wide, so that the drift alone decides.
    """
    cfg = config(tmp_path, "opsm", epochs=2, clip_low=0.99)
    rewards = torch.tensor([1.0, -1.0], dtype=torch.float64)
    start = torch.full((2, 4), -1.0, dtype=torch.float64)
    batch = policy_batch(rewards, old_logprobs=start)
    assert gradient(cfg, batch, start)[1].any()
    moved = gradient(cfg, batch, start - 0.1)
    assert moved[1].any()
    gone = gradient(cfg, batch, start - 0.6)
    assert gone[0].any() and not gone[1].any()


@pytest.mark.parametrize(
    ("algorithm", "train", "key", "shares"),
    [
        ("clip_cov", {"cov_fraction": 0.1, "cov_low": 0.0}, "update/selected_frac", (0.02, 0.2)),
        ("kl_cov", {"cov_fraction": 0.1}, "update/selected_frac", (0.05, 0.15)),
        ("simko", {"explore_quantile": 0.5}, "update/simko_frac", (0.05, 0.6)),
        # Of every four rewards one, two or three are below their mean.
        ("opsm", {"drift_max": -9.0}, "mismatch/reject_frac_row", (0.25, 0.75)),
    ],
)
def test_what_is_decided_over_the_whole_step_does_not_depend_on_micro_batches(
    algorithm: str, train: dict[str, Any], key: str, shares: tuple[float, float], tmp_path: Path
) -> None:
    runs = [
        config(
            tmp_path / str(tokens),
            algorithm,
            reward=CODES,
            micro_batch_tokens=tokens,
            steps=2,
            epochs=2,
            **train,
        )
        for tokens in (40, 16384)
    ]
    for cfg in runs:
        run(cfg)
    small, large = (metric_lines(cfg.run.directory) for cfg in runs)
    assert shares[0] <= small[0][key] <= shares[1]
    for one, other in zip(small, large, strict=True):
        assert one[key] == pytest.approx(other[key], abs=0.02)
        assert one["update/grad_norm"] == pytest.approx(other["update/grad_norm"], rel=5e-2)


@pytest.mark.parametrize(
    ("algorithm", "level"),
    [("sgrpo", "token"), ("tis", "token"), ("mis", "sequence"), ("a3po", "token"), ("geometric_rejection", None),
     ("k3_rejection", None), ("veto", None), ("opsm", None), ("m2po", None)],
)  # fmt: skip
def test_weights_are_compared_with_the_ratios_they_come_from(
    algorithm: str, level: str | None, tmp_path: Path
) -> None:
    assert objective(config(tmp_path, algorithm)).correction_level == level


def test_the_second_moment_is_bounded_over_the_whole_step_not_per_row(tmp_path: Path) -> None:
    cfg = config(tmp_path, "m2po", second_moment_max=0.02)
    (feature,) = objective(cfg).features
    batch = policy_batch(torch.tensor([1.0, -1.0], dtype=torch.float64))
    shift = torch.tensor([[0, 0.01, 0.02, 0.4], [0, 0.3, 0.3, 0]], dtype=torch.float64)
    looked = Output(logprobs=batch.rollout_logprobs.nan_to_num() + shift)
    ahead = feature.on_prepared(batch, prepared(0)._replace(before=looked))
    # Squares 0.0001, 0.0004, 0.09, 0.09, 0.16: the mean of the first three is above 0.02. Row 1
    # alone would keep one.
    assert ahead.correction is not None
    assert ahead.correction.tolist() == [[0, 1, 1, 0], [0, 0, 0, 0]]
    whole = gradient(cfg, ahead, torch.full((2, 4), -1.0, dtype=torch.float64))
    assert (whole != 0).tolist() == [[False, True, True, False], [False] * 4]
    second = gradient(
        cfg, ahead.select(torch.tensor([1])), torch.full((1, 4), -1.0, dtype=torch.float64)
    )
    torch.testing.assert_close(second, whole[1:])


def test_a_failed_response_the_policy_still_gives_is_kept(tmp_path: Path) -> None:
    cfg = config(tmp_path, "opsm", reward=CODES, epochs=2, steps=4, drift_max=99.0)
    run(cfg)
    assert min(sample["advantage"] for sample in samples_of(cfg.run.directory)) < 0
    assert {line["mismatch/reject_frac_row"] for line in metric_lines(cfg.run.directory)} == {0.0}


@pytest.mark.parametrize("algorithm", ["dppo_topk_tv", "dppo_topk_kl"])
def test_the_divergence_over_top_tokens_is_zero_before_the_update_and_bounds_it_after(
    algorithm: str, tmp_path: Path, learned: Learned
) -> None:
    cfg = config(
        tmp_path, algorithm, reward=SHARE, steps=2, dppo_low=1e-4, dppo_high=1e-4, epochs=2, lr=1e-2
    )
    run(cfg)
    first, second = metric_lines(cfg.run.directory)
    assert first["update/weight_zero_frac"] == 0.0
    learned("update/weight_zero_frac", second["update/weight_zero_frac"], at_least=0.05)


def test_a_record_of_tokens_takes_what_is_said_without_gradient_and_with_entropy(
    tmp_path: Path,
) -> None:
    mask = torch.tensor([[False, True, True]])
    inputs = TokenBatch(
        tokens=torch.ones(1, 3, dtype=torch.int64), attention_mask=mask | True, response_mask=mask
    )
    zeros = torch.zeros(1, 3)
    batch = PolicyBatch(
        inputs=inputs,
        old_logprobs=zeros - 1,
        rollout_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros,
        loss_weights=zeros,
        versions=zeros,
        group_ids=zeros[:, 0],
    )
    record = TokenRecord(tmp_path)
    prepared: Any = None
    record.on_prepared(batch, prepared)
    record.on_minibatch(batch)
    logprobs = torch.tensor([[-9.0, -1.5, -1.0]])
    record.loss(Output(logprobs=logprobs, entropy=logprobs), batch)
    with torch.no_grad():
        record.loss(Output(logprobs=logprobs), batch)
    rows = torch.tensor([0])
    record.add_gradients(rows, batch)
    record.after_updates(0, 1)
    file = tmp_path / "step_00000000.update.safetensors"
    assert not any(values.any() for values in load_file(file).values())
    with torch.no_grad():
        record.loss(Output(logprobs=logprobs, entropy=-2 * logprobs), batch)
    record.add_gradients(rows, batch)
    record.after_updates(1, 2)
    found = load_file(tmp_path / "step_00000001.update.safetensors")
    assert found["logprobs"].tolist() == [[0.0, -1.5, -1.0]]
    assert found["entropy"].tolist() == [[0.0, 3.0, 2.0]]
    assert found["ratio"][0].tolist() == pytest.approx([0.0, math.exp(-0.5), 1.0])
