"""The machine of a run that learns from the rows of a file: what learns, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import PreTrainedModel

from oxrl.assembly.assembly import Assembly, holds_singles, load_rows
from oxrl.config import Config
from oxrl.data.dataset import Dataset
from oxrl.data.order import first_draws, open_rows
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.train.trainer import Trainer
from oxrl.models.network import check_packing
from oxrl.recipes.offline_loop import Learner, OfflineMachine
from oxrl.recipes.session import Session
from oxrl.runs.waiting import Patience
from oxrl.tables.numbers import CENTER_COEFF, KEEP_PER_PROMPT, KEEP_REWARD
from oxrl.tables.preference import METHODS
from oxrl.types import Metrics

if TYPE_CHECKING:
    from oxrl.engines.delivery.sync import WeightSync
    from oxrl.recipes.preference import PreferenceLearner
    from oxrl.recipes.preference_reference import ReferenceCache


def assemble_offline(assembly: Assembly, session: Session) -> OfflineMachine[Any]:
    """Put together everything that the loop over the rows of a file works with.

    Args:
        assembly: has the parts.
        session: of the run.
    """
    cfg = assembly.cfg
    data = cfg.data
    train = data.train
    if cfg.recipe == "rejection":
        train = str(kept_samples(assembly, session))
    learner: Learner[Any]
    load: Callable[..., Dataset[Any]] = partial(load_rows, assembly)
    if cfg.recipe == "preference":
        learner, load = build_preference(assembly, session)
    elif cfg.recipe == "reward_model":
        learner = build_reward_model(assembly, session)
    else:
        learner = build_supervised(assembly, session)
    rows = open_rows(train, partial(load, held_out=False), per_step=data.rows_per_step)
    return OfflineMachine(
        learner=learner,
        rows=rows,
        held_out=None if data.eval is None else load(data.eval, held_out=True),
        seed=cfg.run.seed,
        steps=cfg.run.steps,
        keep_best=cfg.run.keep_best,
    )


# --- Supervised fine-tuning, also on the best of a model's own responses.
def build_supervised(assembly: Assembly, session: Session) -> Learner[Any]:
    """A model that imitates given answers."""
    from oxrl.recipes.supervised import SupervisedLearner  # other recipes do without

    cfg = assembly.cfg
    model = assembly.policy_to_train(later=assembly.cuts_weights())
    engine = assembly.trainer(model, complete=True)
    generates = cfg.recipe == "supervised" and cfg.reward.exists
    if cfg.data.pack_tokens is not None:
        engine.checked(partial(check_packing, model))
    return SupervisedLearner(
        engine=engine,
        session=session,
        pad_id=assembly.pad_id,
        images=assembly.images,
        rows_per_step=cfg.data.rows_per_step,
        best_metric="eval/reward" if generates else "eval/loss",
        lower_is_better=not generates,
        pack_tokens=cfg.data.pack_tokens,
        generated=build_generated(assembly, session, engine) if generates else None,
    )


def kept_samples(assembly: Assembly, session: Session) -> Path:
    """The file of the responses that rejection keeps; sampled where it is not there yet."""
    from oxrl.assembly.answered import sampling_from  # as above
    from oxrl.recipes.rejection import KEPT_FILE, Rejection, sample_and_keep

    cfg = assembly.cfg
    kept = session.run.path / KEPT_FILE
    if kept.is_file():
        return kept
    with sampling_from(
        assembly,
        cfg.data.train_files[0],
        held_out=False,
        samples=cfg.rollout.n_samples,
        temperature=cfg.rollout.temperature,
        seed=cfg.run.seed,
        stop=session.stopping,
    ) as (prompts, answers):
        asked = Rejection(
            prompts=prompts,
            answers=answers,
            prompts_per_step=cfg.data.prompts_per_step,
            max_error_rate=cfg.reward.max_error_rate,
            keep_reward=cfg.train.value(KEEP_REWARD),
            keep_per_prompt=cfg.train.value(KEEP_PER_PROMPT),
        )
        sample_and_keep(asked, session, kept)
    return kept


def build_generated(assembly: Assembly, session: Session, engine: Trainer) -> Callable[[], Metrics]:
    """Evaluations in which the model that is trained answers, and a reward scores.

    Args:
        session: of the run; its end is that of the reward's workers.
        engine: what trains, in this process.
    """
    # Given answers do without.
    from oxrl.assembly.reward_pools import build_rewards
    from oxrl.data.conversations import AnsweredPrompts
    from oxrl.recipes.scored_answers import ScoredSampler, evaluate_generated, evaluation_seed
    from oxrl.rewards.pool_choice import REHEARSED, try_reward

    cfg = assembly.cfg
    model = cast(PreTrainedModel, engine.model)
    pool = build_rewards(assembly)
    session.closing(pool.close)
    deadline_s = cfg.run.waits.seconds["rollout"]
    patience = Patience(session.stopping, deadline_s)
    pool.start(patience)
    limits = assembly.limits(model)
    options = assembly.row_options(held_out=True, max_tokens=limits.longest)
    prompts = AnsweredPrompts.load(cfg.data.eval or "", assembly.tokenizer, options)
    try_reward(pool, next(prompts.batches(REHEARSED), []), patience)
    if cfg.sampling_process:
        from oxrl.assembly.delivery import proved_delivery  # this process can do it as well

        hosted = assembly.hosted_sampler(session.closing)
        sampler = partial(_delivered, proved_delivery(assembly, engine, hosted, limits))
    else:
        # A sampler of its own each time: it holds nothing of earlier weights.
        sampler = lambda: closing(assembly.local_sampler(model))  # noqa: E731
    answers = partial(
        ScoredSampler,
        scorer=pool,
        sampling=assembly.sampling(limits.stop_token_ids, cfg.rollout.eval_temperature),
        samples=cfg.rollout.eval_samples,
        seed=evaluation_seed(cfg.run.seed),
        deadline_s=deadline_s,
        stop=session.stopping,
    )
    return partial(evaluate_generated, prompts, sampler, answers)


@contextmanager
def _delivered(delivery: WeightSync) -> Iterator[RolloutEngine]:
    delivery.deliver(delivery.sampler.version + 1)
    yield delivery.sampler


# --- Reward models.
def build_reward_model(assembly: Assembly, session: Session) -> Learner[Any]:
    """A model that scores completions, or their steps."""
    # Other recipes do without.
    from oxrl.recipes.reward_model import OutcomeLearner, ProcessLearner

    train = assembly.cfg.train
    model = assembly.critic_to_train()
    by_steps = train.alg_name == "process_reward_model"
    model.kind = "process" if by_steps else "outcome"
    make = (
        ProcessLearner
        if by_steps
        else partial(OutcomeLearner, center_coeff=train.value(CENTER_COEFF))
    )
    return make(
        engine=assembly.trainer(model, complete=True),
        session=session,
        pad_id=assembly.pad_id,
        images=assembly.images,
        rows_per_step=assembly.cfg.data.rows_per_step,
    )


# --- Preferences.
def build_preference(
    assembly: Assembly, session: Session
) -> tuple[PreferenceLearner, partial[Dataset[Any]]]:
    """The policy with the reference that it is compared with, and what reads its rows."""
    # Other recipes do without.
    from oxrl.engines.train.trainer import AdapterOff
    from oxrl.recipes.preference import PreferenceLearner
    from oxrl.recipes.preference_objective import PreferenceObjective
    from oxrl.recipes.preference_reference import ReferenceCache

    cfg = assembly.cfg
    train = cfg.train
    method = METHODS[train.alg_name]
    model = assembly.policy_to_train(later=assembly.cuts_weights())
    engine = assembly.trainer(model, complete=True)
    read = (*method.reads, *method.around)
    objective = PreferenceObjective(
        method=method,
        numbers={number.name: train.value(number) for number in read},
        mix=train.mix,
        policy=engine,
        moving_reference=assembly.reference() if method.moves_reference else None,
        pad_id=assembly.pad_id,
        images=assembly.images,
    )
    references: ReferenceCache | None = None
    if method.reference and objective.moving_reference is None:
        # Without an adapter the policy still is its own reference: nothing has been trained or
        # restored yet.
        reference = AdapterOff(engine) if cfg.lora.rank else engine
        references = ReferenceCache(objective, reference, cfg.run.directory, session)
    learner = PreferenceLearner(
        engine=engine,
        session=session,
        pad_id=assembly.pad_id,
        images=assembly.images,
        rows_per_step=cfg.data.rows_per_step,
        objective=objective,
        seed=cfg.run.seed,
        held_out_singles=cfg.data.eval is not None and holds_singles(cfg),
    )
    return learner, partial(load_judged, assembly, references)


def load_judged(
    assembly: Assembly, references: ReferenceCache | None, path: str, *, held_out: bool
) -> Dataset[Any]:
    """Judged completions, with what the reference says of them where it stays.

    Args:
        references: None where it does not, or there is none.
    """
    cfg = assembly.cfg
    data: Any = load_rows(assembly, path, held_out=held_out)
    singles = holds_singles(cfg) if held_out else METHODS[cfg.train.alg_name].unpaired
    if singles and "kl_baseline" in METHODS[cfg.train.alg_name].extras:
        data = data.with_mismatched()
    if cfg.train.alg_name == "sampo":
        data = data.with_equal_lengths()
    if references is None:
        return data
    batches = read_at_once(cfg, path, len(data), held_out=held_out)
    return data.with_reference(*references.logprobs(data, batches))


def read_at_once(cfg: Config, path: str, size: int, *, held_out: bool) -> Iterable[Sequence[int]]:
    """Indices of the rows of a file that the run looks at, as the reference reads them."""
    per_step = cfg.data.rows_per_step
    if held_out:
        everything = range(size)
        return [everything[start : start + per_step] for start in range(0, size, per_step)]
    return first_draws(
        cfg.data.train,
        path,
        size,
        steps=cfg.run.steps,
        per_step=per_step,
        seed=cfg.run.seed,
    )
