"""Signs that a run does not learn, each with a name: what shows it, and what to do.

Thresholds are where practice or a bound of the algorithm puts them, and loose: a healthy run shows
none of these.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from oxrl.tables.watch import HealthCheck
from oxrl.types import Metrics

REWARD = "reward/mean"
PATIENCE = 3  # optimizer steps
WINDOW = 100  # newest steps that are looked at together
START = 5  # steps that a run is compared with later
HALF = 0.5  # of the responses, groups or rows
MOST = 0.9  # of the groups, or of the pairs of responses
SOLVED = 0.95  # of the best reward
COLLAPSED = 0.05  # of the entropy at the start
LONGER = 2.0  # times the length at the start
CLIPPED = 0.3  # of the tokens
FAR_STEP = 0.1  # nats per token, from one policy to the next
MISMATCH = 0.01  # nats per token; rounding in bfloat16 stays below 0.001
FAR_FROM_REFERENCE = 1.0  # nats per token
DISPLACED = 0.05  # nats per token
STALE = 4.0  # weight versions
SPIKE = 50.0  # times the median gradient norm
LARGE_UPDATE = 0.1  # of the norm of the weights, in one step
NO_GRADIENT = 1e-12
FRUITLESS = 10  # optimizer steps
# Of probes by another grader, see packages/oxrl_features/held_out_grader.py.
GAP = "monitor/gap_low"
RIGHT = "monitor/grader"
# Of teachers, see packages/oxrl_teachers/features.py.
FIRST_GAP = "teacher/gap_first"
LAST_GAP = "teacher/gap_last"
WIDER = 0.1  # of the gap's lower end, since the probe that the grader liked best
PROBES = 3
LOST = 1.0  # nats per token, from the first to the last fifth of responses
CLAMPED = 0.1  # of the tokens
# Why samples were dropped, by the metric that counts them.
DROPPED = {
    "samples/dropped_unscored": "have no reward, because it failed; samples.jsonl has the reasons",
    "samples/dropped_alone": "are alone in their group, as the others have no reward",
    "samples/dropped_uninformative": "are of groups that have one reward",
    "samples/dropped_without_baseline": "have no greedy response to be compared with",
    "samples/dropped_teacher": "have no answer of their teacher, or lack what its template reads",
}
# Nats below the entropy of a uniform distribution: what logits of a standard deviation of 0.1 are.
UNIFORM = 0.005


class History:
    """The newest lines of a run, and what it was like at its start.

    Args:
        vocabulary: tokens of the model; 0 where that is not known.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.lines: deque[Metrics] = deque(maxlen=WINDOW)
        # Those that hold a probe by another grader.
        self.probes: list[Metrics] = []
        self._start: list[Metrics] = []

    @property
    def line(self) -> Metrics:
        """The newest line."""
        return self.lines[-1]

    def add(self, line: Metrics) -> None:
        """Take the line of the next step."""
        self.lines.append(line)
        if GAP in line:
            self.probes.append(line)
        if len(self._start) < START:
            self._start.append(line)

    def at_start(self, name: str) -> float:
        """Return the mean of a metric over the first START steps; NaN before there are so many."""
        known = [line[name] for line in self._start if name in line]
        return statistics.fmean(known) if len(known) == START else math.nan

    def halves(self) -> tuple[list[float], list[float]]:
        """Return the mean rewards in the older and in the newer half of the window."""
        middle = len(self.lines) // 2
        lines = list(self.lines)
        older = [line[REWARD] for line in lines[:middle] if REWARD in line]
        newer = [line[REWARD] for line in lines[middle:] if REWARD in line]
        return older, newer


def unexplained(seen: History) -> str:
    """Say nothing of the cause."""
    return ""


class Sign(NamedTuple):
    """A sign that a run learns nothing.

    holds: whether the newest lines show it. advice: what it means, and what to do. threshold: when
    it is told, in words. reads: the metrics that show it. patience: optimizer steps in a row.
    does: where `run.health` says nothing. why: what the newest lines say of the cause, before the
    advice.
    """

    name: HealthCheck
    holds: Callable[[History], bool]
    advice: str
    threshold: str
    reads: tuple[str, ...]
    patience: int = PATIENCE
    does: str = "warn"
    why: Callable[[History], str] = unexplained


def at_least(name: str, least: float) -> Callable[[History], bool]:
    """Make a sign that one metric shows by itself.

    Args:
        name: of the metric; a line without it shows nothing.
        least: from where on it does.

    Returns:
        Whether the newest line shows it.
    """

    def shown(seen: History) -> bool:
        return seen.line.get(name, 0.0) >= least

    return shown


def all_equal(seen: History) -> bool:
    """True if every reward of the step is the same number, and not 0."""
    return _only_reward(seen.line) not in (None, 0.0)


def all_zero(seen: History) -> bool:
    """True if every reward of the step is 0."""
    return _only_reward(seen.line) == 0.0


def no_gradient(seen: History) -> bool:
    """True if the step was taken with a gradient of 0, though rewards differ or it has none."""
    line = seen.line
    explained = _only_reward(line) is not None
    taken = not line.get("update/skipped") and not line.get("data/empty_steps")
    norm = line.get("update/grad_norm", math.nan)
    return taken and not explained and norm <= NO_GRADIENT


def uniform(seen: History) -> bool:
    """True if the policy gives every token of the vocabulary the same probability."""
    entropy = seen.line.get("policy/entropy", math.nan)
    return seen.vocabulary > 1 and entropy > math.log(seen.vocabulary) - UNIFORM


def _only_reward(line: Metrics) -> float | None:
    """Return the reward of every response of a step; None where they differ, or have none.

    Equal rewards differ where they are sums of parts that do.
    """
    reward = line.get("reward/min", math.nan)
    parts_differ = line.get("reward/zero_variance_groups", 1.0) < 1
    return None if parts_differ or reward != line.get("reward/max", math.nan) else reward


def flat_reward(seen: History) -> bool:
    """True if the mean reward of the window's newer half is not above that of the older half."""
    older, newer = seen.halves()
    if len(older) < WINDOW // 2 or len(newer) < WINDOW // 2:
        return False
    best = seen.line.get("reward/max", math.inf)
    solved = statistics.fmean(newer) >= SOLVED * best
    noise = statistics.stdev(newer) / math.sqrt(len(newer))
    return not solved and statistics.fmean(newer) <= statistics.fmean(older) + noise


def same_groups(seen: History) -> bool:
    """True if nearly all groups have one reward, and most of them not the best one."""
    line = seen.line
    same = line.get("reward/zero_variance_groups", 0.0)
    return MOST <= same and line.get("reward/all_pass_groups", 0.0) < HALF and not all_zero(seen)


def entropy_collapse(seen: History) -> bool:
    """True if the policy has nearly no choice left, and is not right either."""
    start = seen.at_start("policy/entropy")
    line = seen.line
    fallen = line.get("policy/entropy", math.nan) < COLLAPSED * start
    return fallen and line.get("reward/all_pass_groups", 0.0) < HALF


def growing_length(seen: History) -> bool:
    """True if responses are much longer than at the start, and not better."""
    length = seen.line.get("data/length_mean", math.nan)
    longer = length > LONGER * seen.at_start("data/length_mean")
    _, newer = seen.halves()
    enough = len(newer) >= WINDOW // 4
    return longer and enough and statistics.fmean(newer) <= seen.at_start(REWARD)


def repeating(seen: History) -> bool:
    """True if most responses go in circles, or are the same in their group and not right."""
    line = seen.line
    same = line.get("data/duplicate_frac", 0.0) >= MOST
    wrong = line.get("reward/all_pass_groups", 0.0) < HALF
    return line.get("data/looping_frac", 0.0) >= HALF or (same and wrong)


def clipped(seen: History) -> bool:
    """True if a large share of the tokens has left the trust region."""
    line = seen.line
    share = line.get("update/clip_frac_high", 0.0) + line.get("update/clip_frac_low", 0.0)
    return share >= CLIPPED


def displaced(seen: History) -> bool:
    """True if chosen completions become less likely, not only less so than rejected ones."""
    return seen.line.get("preference/displacement", 0.0) > DISPLACED


def dropped(seen: History) -> bool:
    """True if half or more of the sampled rows are not trained on."""
    line = seen.line
    gone = line.get("data/dropped_rows", 0.0)
    return gone > 0 and gone >= line.get("data/rows", 0.0)


def skipped(seen: History) -> bool:
    """True if a tenth or more of the newest steps were refused."""
    refused = [line.get("update/skipped", 0.0) for line in seen.lines]
    return bool(refused[-1]) and len(refused) >= 10 and sum(refused) >= 0.1 * len(refused)


def spiking_gradient(seen: History) -> bool:
    """True if the gradient is many times as large as is usual here."""
    norms = [line.get("update/grad_norm", math.nan) for line in seen.lines]
    usual = [norm for norm in norms[:-1] if math.isfinite(norm)]
    return len(usual) >= 10 and norms[-1] > SPIKE * statistics.median(usual) > 0


def nothing_trained(seen: History) -> bool:
    """True if the step had no token to train on, or was taken with a gradient of 0."""
    line = seen.line
    flat = line.get("update/grad_norm", math.nan) <= NO_GRADIENT
    return bool(line.get("data/empty_steps")) or (flat and not line.get("update/skipped"))


def why_nothing_trained(seen: History) -> str:
    """Say what the samples of the newest steps were dropped for, or that their rewards are equal.

    The counts are of the whole run, so they are compared with those before these steps.
    """
    lines = list(seen.lines)
    earlier = lines[-FRUITLESS - 1] if len(lines) > FRUITLESS else {}
    told: list[str] = []
    for name, reason in DROPPED.items():
        count = seen.line.get(name, 0.0) - earlier.get(name, 0.0)
        if count > 0:
            told.append(f"{count:.0f} samples {reason} ({name})")
    if seen.line.get("reward/zero_variance_groups", 0.0) == 1:
        told.append("all rewards of a group are equal (reward/zero_variance_groups)")
    return f"{', '.join(told) or 'the gradient is 0'}. "


def below(name: str, bound: float) -> Callable[[History], bool]:
    """Make a sign that one metric shows by itself, where it is low.

    Args:
        name: of the metric; a line without it shows nothing.
        bound: below which it does.

    Returns:
        Whether the newest line shows it.
    """

    def shown(seen: History) -> bool:
        return seen.line.get(name, bound) < bound

    return shown


def lost_prefix(seen: History) -> bool:
    """True if the teacher finds the ends of responses much less likely than their beginnings."""
    line = seen.line
    return line.get(FIRST_GAP, math.nan) - line.get(LAST_GAP, math.nan) > LOST


def hacked_reward(seen: History) -> bool:
    """True if the reward says more and more that another grader does not, and nothing is gained.

    The lower end of the interval of their difference is above 0, and above where it was when the
    other grader was at its best, in each of the newest probes. A grader that is more lenient than
    the reward finds less to add as a policy learns; that is no flaw of the reward.
    """
    if not seen.probes:
        return False
    best = max(seen.probes, key=itemgetter(RIGHT))
    least = max(best[GAP], 0.0) + WIDER
    return all(probe[GAP] > least for probe in seen.probes[-PROBES:])


SIGNS = (
    Sign(
        "zero-reward",
        all_zero,
        "every reward is 0: there is no learning signal. See samples.jsonl: do responses have the "
        "format that the reward reads, and do they end (data/truncated_frac, rollout.max_tokens)? "
        "Easier prompts, supervised fine-tuning first, or partial credit give a signal",
        "every reward is 0",
        ("reward/min", "reward/max"),
    ),
    Sign(
        "constant-reward",
        all_equal,
        "every reward is the same number: there is no learning signal. If it is the best there is, "
        "the task is solved: take harder prompts. Otherwise the reward does not look at the "
        "response: try it on a right and on a wrong one",
        "every reward is the same number, not 0",
        ("reward/min", "reward/max"),
    ),
    Sign(
        "failing-rewards",
        at_least("reward/failed_frac", HALF),
        "half or more of the responses have no reward, and nothing is learned from those. The "
        "reason of each is in samples.jsonl; reward.timeout_s and reward.workers help where they "
        "are late",
        "reward/failed_frac is 0.5 or more",
        ("reward/failed_frac",),
    ),
    Sign(
        "zero-gradient",
        no_gradient,
        "the gradient is 0, so the weights stay as they are. In reinforcement learning the rewards "
        "within each group are equal (reward/zero_variance_groups): larger rollout.n_samples, "
        "prompts of another difficulty, or train.alg_name: dapo, which samples until they differ. "
        "Otherwise look at the numbers of the loss (train.beta, weights that are 0)",
        "update/grad_norm is 0 in a step that was taken, and rewards differ",
        ("update/grad_norm",),
    ),
    Sign(
        "uniform-entropy",
        uniform,
        "the policy gives every token the same probability, so its responses are noise. Are the "
        "weights of model.name trained ones, and rollout.temperature near 1? If it became so, "
        "lower train.lr and train.entropy_coeff and start from an earlier checkpoint",
        "policy/entropy is within 0.005 nats of a uniform distribution",
        ("policy/entropy",),
    ),
    Sign(
        "flat-reward",
        flat_reward,
        "the reward has not risen for a long time. Is there a difference to learn from "
        "(reward/zero_variance_groups), does the reward see what it should (read samples), is "
        "train.lr large enough? Easier prompts or supervised training first help where right "
        "answers are rare",
        "reward/mean of the newest 50 steps is not above that of the 50 before, and not near its "
        "best",
        (REWARD,),
        1,
    ),
    Sign(
        "same-groups",
        same_groups,
        "nearly every group has zero reward variance, so hardly a prompt gives a gradient. "
        "Prompts of middling difficulty, a larger rollout.n_samples, a finer reward, or "
        "train.alg_name: dapo",
        "reward/zero_variance_groups is 0.9 or more, and most of these groups are not right",
        ("reward/zero_variance_groups",),
        10,
    ),
    Sign(
        "entropy-collapse",
        entropy_collapse,
        "entropy collapse: the policy gives nearly the same response each time, and a wrong one. "
        "Go back to an earlier checkpoint with a lower train.lr, a larger "
        "train.clip_high, some train.entropy_coeff or a KL to the reference",
        "policy/entropy is below 5 % of that of the first 5 steps, and fewer than half of the "
        "groups are right",
        ("policy/entropy",),
    ),
    Sign(
        "growing-length",
        growing_length,
        "responses are twice as long as at the start and earn no more: length itself may be "
        "rewarded. Read samples; weigh tokens by train.weights: fixed_length, or punish length in "
        "the reward",
        "data/length_mean is twice that of the first 5 steps, and reward/mean is not above theirs",
        (
            "data/length_mean",
            REWARD,
        ),
        10,
    ),
    Sign(
        "repeated-responses",
        repeating,
        "responses repeat themselves, or one another: there is nothing to compare. Read samples. "
        "If it was so from the start, the model is used without its chat template or at a "
        "rollout.temperature that is too low; if it became so, go back to an earlier checkpoint "
        "with a lower train.lr, some train.entropy_coeff, or the reward repetition as a part",
        "data/looping_frac is 0.5 or more, or data/duplicate_frac 0.9 or more and most groups are "
        "not right",
        ("data/looping_frac",),
        10,
    ),
    Sign(
        "truncated-responses",
        at_least("data/truncated_frac", HALF),
        "half or more of the responses are cut off by the token limit. Where the reward looks for "
        "an answer at the end, they cannot have one: raise rollout.max_tokens, or leave them out "
        "of the loss with train.mask_truncated. Where it scores what is there, all is well",
        "data/truncated_frac is 0.5 or more",
        ("data/truncated_frac",),
        20,
    ),
    Sign(
        "clipped-tokens",
        clipped,
        "a third of the tokens is clipped: the policy leaves its trust region in one step, and "
        "what is clipped teaches nothing. Lower train.lr, train.epochs or train.minibatches",
        "update/clip_frac_high and update/clip_frac_low are 0.3 or more together",
        ("update/clip_frac_high",),
    ),
    Sign(
        "jumping-policy",
        at_least("kl/old_k3", FAR_STEP),
        "the KL between the policy before and after one update is large. Lower train.lr, or "
        "train.epochs and train.minibatches",
        "kl/old_k3 is 0.1 nats per token or more",
        ("kl/old_k3",),
    ),
    Sign(
        "sampler-mismatch",
        at_least("mismatch/kl_k3", MISMATCH),
        "sampler and trainer give the same tokens different log-probabilities: the data is "
        "off-policy. Make them the same (run.exact, on a CPU), use one dtype for both, weigh the "
        "difference (train.correction: truncate), or take its drift out (train.centering: score; "
        "docs/algorithms.md says what is left); and see whether the sampler's build has a defect",
        "mismatch/kl_k3 is 0.01 nats per token or more",
        ("mismatch/kl_k3",),
    ),
    Sign(
        "far-from-reference",
        at_least("kl/ref_k3", FAR_FROM_REFERENCE),
        "the KL to the reference is large, which may be reward hacking. Read samples; raise "
        "train.kl_coeff",
        "kl/ref_k3 is 1 nat per token or more",
        ("kl/ref_k3",),
    ),
    Sign(
        "displaced-likelihood",
        displaced,
        "chosen completions have become less likely than under the reference (likelihood "
        "displacement). An anchor (irpo, dpop), dpo_shift or a smaller train.lr holds them",
        "preference/displacement is above 0.05 nats per token",
        ("preference/displacement",),
        10,
    ),
    Sign(
        "dropped-rows",
        dropped,
        "half or more of what is sampled is not trained on. samples/dropped_* says why: rewards "
        "that failed, groups of one reward",
        "data/dropped_rows is data/rows or more",
        (
            "data/dropped_rows",
            "data/rows",
        ),
        10,
    ),
    Sign(
        "stale-samples",
        at_least("data/staleness_mean", STALE),
        "samples are several weight versions old when they are trained on. Lower "
        "rollout.max_staleness, or use a correction (train.correction: truncate)",
        "data/staleness_mean is 4 versions or more",
        ("data/staleness_mean",),
    ),
    Sign(
        "skipped-steps",
        skipped,
        "many optimizer steps are skipped because of NaN or infinite values. Their batches are in "
        "dumps/; lower train.lr or train.max_grad_norm, or compute in float32",
        "a tenth or more of the newest steps have update/skipped 1",
        ("update/skipped",),
        1,
    ),
    Sign(
        "gradient-spike",
        spiking_gradient,
        "the gradient norm is many times as large as usual: a bad batch, or a policy that "
        "diverges. Look at this step's samples; a lower train.max_grad_norm bounds what one batch "
        "does",
        "update/grad_norm is 50 times the median of the newest steps",
        ("update/grad_norm",),
        1,
    ),
    Sign(
        "large-updates",
        at_least("update/update_norm_ratio", LARGE_UPDATE),
        "each optimizer step changes the weights by a tenth of their norm, which makes the model "
        "forget. Lower train.lr",
        "update/update_norm_ratio is 0.1 or more",
        ("update/update_norm_ratio",),
    ),
    Sign(
        "nothing-trained",
        nothing_trained,
        "Mend the reward where it fails, take prompts of middling difficulty or a larger "
        "rollout.n_samples where rewards are equal; a task that is solved needs no more training",
        "data/empty_steps is 1, or update/grad_norm is 0 in a step that was taken",
        ("update/grad_norm",),
        FRUITLESS,
        "stop",
        why_nothing_trained,
    ),
    Sign(
        "hacked-reward",
        hacked_reward,
        "the reward rises and another grader of the same answers does not agree: what is learned "
        "may be a flaw of the reward. Read samples that the two judge differently; stop at the "
        "checkpoint that the other grader likes best, and mend the reward",
        "in 3 probes in a row monitor/gap_low is more than 0.1 above 0, and above what it was when "
        "monitor/grader was at its best",
        (GAP, RIGHT),
        1,
    ),
    Sign(
        "unlike-teacher",
        below("teacher/overlap", HALF),
        "policy and teacher find other tokens likely, and then a teacher's advice is mostly noise. "
        "Is it a model that learned, with the policy's chat template? Supervised fine-tuning on "
        "its answers first brings the two together",
        "teacher/overlap is below 0.5",
        ("teacher/overlap",),
    ),
    Sign(
        "unseen-by-teacher",
        below("teacher/mass", HALF),
        "the teacher's candidates have less than half of what the policy says, so most of the "
        "divergence is known from single samples. Raise train.teacher_candidates",
        "teacher/mass is below 0.5",
        ("teacher/mass",),
    ),
    Sign(
        "lost-prefix",
        lost_prefix,
        "the teacher follows responses at their beginning and no longer at their end: what it says "
        "after a prefix that it would not have written is worth little. Lower rollout.max_tokens, "
        "or take train.alg_name: iw_opd; responses that go in circles look like this as well",
        "teacher/gap_last is more than 1 nat below teacher/gap_first",
        (FIRST_GAP, LAST_GAP),
    ),
    Sign(
        "clamped-teacher",
        at_least("teacher/clamped_frac", CLAMPED),
        "many tokens are more than 10 nats less likely for the teacher, and count as 10: what is "
        "learned is biased, though slower. opd_topk has no such bound",
        "teacher/clamped_frac is 0.1 or more",
        ("teacher/clamped_frac",),
    ),
)
