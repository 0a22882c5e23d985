"""The operations of a step by what they went into: learning, or padding, repeats and vain rows.

Counted from what is handed over (samples, rows, micro-batches), never measured, so that two runs
have the same numbers. Nothing is counted twice: padding first, then tokens of prompts that were
read before, then rows without an advantage, then whole passes that could be saved.

    waste/padding         positions of padding that models read
    waste/prompts_again   prompts read by a model again: per response of a group, not per group
    waste/no_signal       rows whose advantages are all 0, in the update, where nothing else of the
                          loss trains them
    waste/old_pass        log-probabilities before the update, where the sampler has the same
                          weights and `train.old_logprobs: bypass` takes those that it recorded
    waste/reference_pass  the reference's, while it still is the policy
    waste/dropped         samples that are not trained on, each taken for the mean of its group
    waste/total           all of that; each as a share of the operations of the step
    work/tflop            the operations of the step, in units of 10^12

The same counts, over what the machine can do at best, are the least time that a phase can take:
`throughput/rollout_over_floor` and its like, and `throughput/mfu` of the whole step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from oxrl.data.batching import to_rollout_batch
from oxrl.engines.train.micro_batches import MicroBatches, group_micro_batches, micro_batches
from oxrl.modelfiles.dims import ModelDims
from oxrl.models.shared_prefix import groups_of, worth_packing
from oxrl.rollouts.sync import RolloutStep
from oxrl.runs.clock import MachineSpeed
from oxrl.types import Metrics, PolicyBatch, RolloutBatch, TokenBatch

# Backward is twice a forward pass: the gradient of the inputs, and that of the weights.
FORWARD_AND_BACKWARD = 3.0
CAUSES = ("padding", "prompts_again", "no_signal", "old_pass", "reference_pass", "dropped")
SIZES = {"float32": 4, "bfloat16": 2}
# Of an optimizer per parameter at least: gradient read, weight and what is kept read and written; 4
# bytes each, moments of 8 bits one.
OPTIMIZER_BYTES = {"adamw": 28.0, "muon": 20.0, "adamw_8bit": 16.0}
# Without masters the weight has two bytes.
WITHOUT_MASTERS = -4.0
# A group, and what a row of it begins with: equal ones need to be read once.
Beginning = tuple[int, ...]


# Among operations by cause: all that was computed.
TOTAL = "total"


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Operations of a forward pass, and bytes of what it reads.

    body: operations per token, of every matrix but the output head.
    head: per token whose successor is predicted.
    attention: per token and token that it sees, itself included.
    weight_bytes: of all weights. kv_bytes: keys and values of one token.
    parameters: as many weights.
    """

    body: float
    head: float = 0.0
    attention: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    parameters: float = 0.0

    def forward(self, lengths: Tensor, predicted: Tensor | float = 0.0) -> Tensor:
        """Operations of a causal forward pass, per row.

        Args:
            lengths: [B] tokens of every row.
            predicted: [B] tokens that the head is asked about.

        Returns:
            [B] float64.
        """
        tokens = lengths.double()
        seen = tokens * (tokens + 1) / 2
        return self.body * tokens + self.head * predicted + self.attention * seen

    def decode_floor(self, prompts: Tensor, responses: Tensor, speed: MachineSpeed) -> float:
        """Least time to sample responses, token by token, all rows side by side.

        Every step reads all weights once, and the keys and values of the rows that go on.

        Args:
            prompts, responses: [B] tokens of every row.
            speed: of the machine.

        Returns:
            Seconds.
        """
        if not len(responses):
            return 0.0
        steps = int(responses.max())
        at = torch.arange(steps, dtype=torch.float64)
        # How many rows, with how many prompt tokens together, still go on at each step.
        ended = torch.zeros(2, steps + 1, dtype=torch.float64)
        ended[0].index_add_(0, responses, torch.ones(len(responses), dtype=torch.float64))
        ended[1].index_add_(0, responses, prompts.double())
        rows, read = ended.sum(1, keepdim=True) - ended.cumsum(1)[:, :steps]
        context = read + rows * at
        computed = rows * (self.body + self.head) + self.attention * context
        moved = self.weight_bytes + self.kv_bytes * context
        return float(torch.maximum(computed / speed.flops, moved / speed.bandwidth).sum())


def model_work(dims: ModelDims | None, *, dtype: str) -> ModelWork | None:
    """Operations and bytes of a model; None where its files do not tell.

    Nor of experts: how many of them read a token is for the router to say.
    """
    if dims is None or dims.routed:
        return None
    size = SIZES[dtype]
    head = dims.vocabulary * dims.hidden
    body = dims.parameters - dims.ends
    return ModelWork(
        body=2.0 * body,
        head=2.0 * head,
        attention=4.0 * dims.layers * dims.queries,
        weight_bytes=float(size * (body + head)),
        kv_bytes=2.0 * size * dims.layers * dims.keys,
        parameters=float(dims.parameters),
    )


def _beginnings(inputs: TokenBatch, lengths: Tensor, group_ids: Tensor) -> list[Beginning]:
    """List each row's group, and its first `lengths` tokens."""
    rows = zip(group_ids.tolist(), inputs.tokens.tolist(), lengths.tolist(), strict=True)
    return [(group, *row[:length]) for group, row, length in rows]


class Rows:
    """The rows that a model reads in one pass.

    Args:
        inputs: [B, T] of them.
        group_ids: [B], rows of one prompt or episodes from one beginning.
        given: how they are cut, and the operations of the model.
    """

    def __init__(self, inputs: TokenBatch, group_ids: Tensor, given: ComputeAccounting) -> None:
        mask = inputs.response_mask
        lengths = inputs.attention_mask.sum(1)
        prompts = torch.where(mask.any(1), mask.int().argmax(1), lengths)
        self._of_prompts = given.counted.forward(prompts)
        # [B] operations of every row, those of a prompt that another row of its group has read
        # among them; and of its padding.
        self.own = given.counted.forward(lengths, mask.sum(1))
        self.again = torch.zeros_like(self.own)
        padded = lengths.clone()
        begins = _beginnings(inputs, prompts, group_ids)
        cut = group_micro_batches if given.share_prefix else micro_batches
        cuts = cut(inputs, budget=given.budget, ranks=given.ranks, price=given.price)
        shares = list(chain.from_iterable(cuts))
        if given.share_prefix:
            self._read_prompts_once(inputs, begins, shares, padded)
        else:
            self._read_row_by_row(begins, shares, padded)
        self.padding = given.counted.forward(padded) - given.counted.forward(lengths)

    def _read_row_by_row(
        self, begins: list[Beginning], shares: MicroBatches, padded: Tensor
    ) -> None:
        for share in shares:
            padded[share.units] = share.length
        first: dict[Beginning, int] = {}
        places = [first.setdefault(begin, row) for row, begin in enumerate(begins)]
        self.again = self._of_prompts * (torch.tensor(places) != torch.arange(len(places)))

    def _read_prompts_once(
        self, inputs: TokenBatch, begins: list[Beginning], shares: MicroBatches, padded: Tensor
    ) -> None:
        """As `train.share_prefix` reads them: a prompt once in each micro-batch that it is in, and
        no padding; a micro-batch that would save little is read row by row.
        """
        known: set[Beginning] = set()
        for share in shares:
            groups = groups_of(inputs.select(share.units))
            packed = worth_packing(groups, len(share.units) * share.length)
            if not packed:
                padded[share.units] = share.length
            for group in groups:
                rows = share.units[group.rows]
                readers = rows
                if packed:
                    self.own[rows[1:]] -= self._of_prompts[rows[1:]]
                    readers = rows[:1]
                for row in readers.tolist():
                    if begins[row] in known:
                        self.again[row] = self._of_prompts[row]
                    known.add(begins[row])

    def spent(self, cause: str, without: Tensor, *, times: float = 1.0) -> dict[str, float]:
        """The operations of a pass, all of them and those wasted by cause.

        Args:
            cause: why it was of no use to some rows.
            without: [B] bool, these rows.
            times: how often a forward pass it takes.
        """
        return {
            TOTAL: float((self.own + self.padding).sum()) * times,
            "padding": float(self.padding.sum()) * times,
            "prompts_again": float(self.again.sum()) * times,
            cause: float((self.own - self.again)[without].sum()) * times,
        }


@dataclass(kw_only=True, eq=False)
class ComputeAccounting:
    """Is shown every batch; changes nothing.

    work: of the policy; None: unknown. speed: of the machine; None: of several, or unknown.
    budget: tokens of a micro-batch. ranks: how many share a batch. share_prefix: as in the config.
    price: of a micro-batch, in tokens; None: each is filled.
    asked_before: the policy is asked about the rows before the update.
    old_known: what it says then is known from the sampler.
    all_learn: a KL or an entropy trains rows without an advantage as well.
    samples: the run samples, it is not given stored samples.
    optimizer_bytes: read and written by a step, per parameter, at least.
    """

    work: ModelWork | None
    speed: MachineSpeed | None
    budget: int
    ranks: int
    share_prefix: bool
    asked_before: bool
    old_known: bool
    all_learn: bool
    samples: bool = True
    price: int | None = None
    optimizer_bytes: float = OPTIMIZER_BYTES["adamw"]

    def __post_init__(self) -> None:
        # Tokens are counted where sizes are unknown, which is enough for shares.
        self.counted = self.work or ModelWork(body=1.0)
        # Operations of the rollout step by cause, until its first minibatch.
        self._step: dict[str, float] = defaultdict(float)
        # Group and operations of every sample, and how many a group has.
        self._sampled: list[tuple[int, float]] = []
        self._group_sizes: Counter[int] = Counter()
        # Of the line: operations that are no padding, and the least seconds of every phase.
        self._useful = 0.0
        self._floors: dict[str, float] = defaultdict(float)

    def count_before_update(
        self, step: RolloutStep, rollouts: RolloutBatch, batch: PolicyBatch
    ) -> None:
        """Count sampling, the passes before the update, and what was sampled in vain.

        Args:
            step: what was sampled.
            rollouts: its rows that are trained on.
            batch: what the update will read.
        """
        if self.samples:
            self.count_sampling(step)
        trained = Counter(rollouts.group_ids.tolist())
        for group, operations in self._sampled:
            lost = 1 - trained[group] / self._group_sizes[group]
            self._step["dropped"] += operations * lost
        if not self.asked_before and batch.ref_logprobs is None:
            return
        inputs, group_ids = rollouts.inputs.read_by_models(rollouts.group_ids)
        rows = Rows(inputs, group_ids, self)
        if self.asked_before:
            self._pass_before(rows, "old_pass", self.old_known)
        if batch.ref_logprobs is not None:
            self._pass_before(rows, "reference_pass", step.step == 0)

    def count_sampling(self, step: RolloutStep) -> None:
        """Count what sampling took: what was written decoded, what was read read once.

        A row ends with its last sampled token: what an environment said after it nobody read.
        """
        batch = to_rollout_batch([*step.rollouts, *step.baselines], pad_id=0)
        inputs, of_rollout = batch.inputs.read_by_models(torch.arange(len(batch)))
        written = inputs.response_mask
        begins = written.int().argmax(1)
        sampled = written.sum(1)
        lengths = (written * torch.arange(1, written.shape[1] + 1)).amax(1)
        heard = int((lengths - begins - sampled).sum())
        different = set(_beginnings(inputs, begins, batch.group_ids[of_rollout]))
        once = torch.tensor([len(begin) - 1 for begin in different])
        after = self.counted.forward(lengths, sampled) - self.counted.forward(begins)
        read_again = step.sampler.get("rollout/prefill_tokens", 0.0) - float(once.sum()) - heard
        again = self.counted.body * max(0.0, read_again)
        prefilled = float(self.counted.forward(once).sum())
        total = prefilled + again + float(after.sum())
        self._step.clear()
        self._step |= {TOTAL: total, "prompts_again": again}
        groups = [rollout.group_id for rollout in step.rollouts]
        self._group_sizes = Counter(groups)
        of_each = after.new_zeros(len(batch)).index_add_(0, of_rollout, after)
        self._sampled = list(zip(groups, of_each.tolist(), strict=False))
        self._useful += total - again
        if self.speed is not None:
            floor = self.counted.decode_floor(begins, sampled, self.speed)
            floor += (prefilled + self.counted.body * heard) / self.speed.flops
            self._floors["time/rollout_s"] += floor

    def _pass_before(self, rows: Rows, cause: str, in_vain: bool) -> None:
        """Count a forward pass over all rows."""
        self._add(rows.spent(cause, torch.full((len(rows.own),), in_vain)))
        self._count_floor("time/logprobs_s", float(rows.own.sum()))

    def count_update(self, batch: PolicyBatch) -> Metrics:
        """Count the update on a minibatch; the first one's line has what came before as well."""
        found = Rows(batch.inputs, batch.group_ids, self)
        mask = batch.inputs.response_mask
        learns = (batch.advantages.masked_fill(~mask, 0.0) != 0).any(1)
        learns |= mask.any(1) & self.all_learn
        self._add(found.spent("no_signal", ~learns, times=FORWARD_AND_BACKWARD))
        self._count_floor("time/update_s", float(found.own.sum()) * FORWARD_AND_BACKWARD)
        if self.speed is not None:
            moved = self.counted.parameters * self.optimizer_bytes
            self._floors["time/update_s"] += moved / self.speed.bandwidth
        total = self._step[TOTAL]
        metrics = {f"waste/{cause}": self._step[cause] / total for cause in CAUSES}
        metrics["waste/total"] = sum(metrics.values())
        if self.work is not None:
            metrics["work/tflop"] = total / 1e12
        self._step.clear()
        return metrics

    def _add(self, spent: dict[str, float]) -> None:
        for what, operations in spent.items():
            self._step[what] += operations

    def _count_floor(self, phase: str, operations: float) -> None:
        self._useful += operations
        if self.speed is not None:
            self._floors[phase] += operations / self.speed.flops

    def against_floor(self, seconds: Metrics) -> Metrics:
        """Measure how far the step is from what the machine could do at best; of `Clock.derive`.

        Args:
            seconds: of the step, by phase.
        """
        speed = self.speed
        found: Metrics = {}
        if speed is not None and self.work is not None and self._useful:
            for phase, floor in self._floors.items():
                if floor and phase in seconds:
                    name = phase.removeprefix("time/").removesuffix("_s")
                    found[f"throughput/{name}_over_floor"] = seconds[phase] / floor
            found["throughput/mfu"] = self._useful / (speed.flops * seconds["time/step_s"])
        self._useful = 0.0
        self._floors.clear()
        return found
