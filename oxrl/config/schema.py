"""The configuration of a run: one frozen class, with a section per class of `sections/`.

What a field is, who reads it and when stands in its line there; `reads.py` asks a whole
configuration which of its fields are read. Checks across sections are in `checks/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from oxrl.config.conditions import (
    answers_prompts,
    has_answering_model,
    uses_deepspeed,
    uses_fsdp,
)
from oxrl.config.field import ANSWERING, COMPARING, EVALUATING, RL, Section, setting
from oxrl.config.sections.data import DataConfig
from oxrl.config.sections.engines import (
    DeepSpeedConfig,
    EngineConfig,
    FsdpConfig,
    ReferenceConfig,
)
from oxrl.config.sections.model import LoraConfig, ModelConfig
from oxrl.config.sections.reward import RewardConfig
from oxrl.config.sections.rollout import ActionConfig, EnvironmentConfig, RolloutConfig
from oxrl.config.sections.run import RunConfig
from oxrl.config.sections.train import TrainConfig, compose_row
from oxrl.tables.engines import SAMPLING_ENGINES
from oxrl.tables.policy import ROWS

SectionClass = type[Section]
# Values by the names of fields, or of sections; the second one is only read.
FieldValues = dict[str, object]
GivenValues = Mapping[str, object]

# Adapters learn best at about ten times the rate of full tuning (Schulman et al., "LoRA Without
# Regret", 2025).
ADAPTER_RATES = {"lr": 1e-5, "critic_lr": 1e-4}


class Config(Section):
    """A whole run. Build it with `load_config`, which also checks across sections."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = setting(RewardConfig(), of=ANSWERING, when=answers_prompts)
    environment: EnvironmentConfig = setting(EnvironmentConfig(), of=RL)
    action: ActionConfig = setting(ActionConfig(), of=EVALUATING)
    rollout: RolloutConfig = setting(RolloutConfig(), of=ANSWERING, when=answers_prompts)
    lora: LoraConfig = LoraConfig()
    train: TrainConfig
    inference_engine: EngineConfig = setting(
        EngineConfig(), of=ANSWERING, when=answers_prompts, resume="reorders"
    )
    fsdp: FsdpConfig = setting(FsdpConfig(), when=uses_fsdp, resume="reorders")
    deepspeed: DeepSpeedConfig = setting(DeepSpeedConfig(), when=uses_deepspeed, resume="reorders")
    deepspeed_ref: ReferenceConfig = setting(
        ReferenceConfig(),
        of=COMPARING,
        when=(uses_deepspeed, has_answering_model),
        resume="reorders",
    )

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, values: object) -> object:
        """Fill in what the algorithm sets."""
        return with_defaults(values) if isinstance(values, dict) else values

    @property
    def recipe(self) -> str:
        """Recipe of the algorithm."""
        return ROWS[self.train.alg_name].recipe

    @property
    def longest_response(self) -> int:
        """Most tokens that the policy samples for one response, or in all turns of an episode."""
        rollout = self.rollout
        if not self.environment.name:
            return rollout.max_tokens
        return rollout.max_episode_tokens or rollout.max_tokens * self.environment.max_turns

    @property
    def sampling_process(self) -> bool:
        """True if processes of their own sample, on this machine and without Ray."""
        engine = self.inference_engine
        wanted = engine.processes > 0 or SAMPLING_ENGINES[engine.name].own_process
        return wanted and not engine.actors

    @property
    def samplers(self) -> int:
        """Samplers with weights of their own; 0: this process samples, with the policy's."""
        engine = self.inference_engine
        copied = self.sampling_process or engine.weights != "trained"
        return engine.actors or engine.processes or int(copied)

    @property
    def scores_nothing(self) -> bool:
        """True if no response is scored: samples are another run's, and nothing is evaluated; or
        there is no reward.
        """
        stored = self.rollout.from_samples is not None and self.data.eval is None
        return stored or self.has_no_reward

    @property
    def has_no_reward(self) -> bool:
        """True if nothing says what a response is worth, as the row does not read it."""
        says = self.reward.exists or bool(self.environment.name)
        return self.recipe == "rl" and not says and not self.train.row.reads_rewards

    @property
    def ahead(self) -> int:
        """Rollout batches that are sampled before the one that trains is done."""
        return self.rollout.max_staleness // self.train.updates


def recipe_of(algorithm: object) -> str:
    """Recipe of an algorithm by its name; where that is in doubt, reinforcement learning."""
    row = ROWS.get(str(algorithm))
    return "rl" if row is None else row.recipe


def with_defaults(values: GivenValues) -> FieldValues:
    """Fill in the fields of `train` that the algorithm and what surrounds it set.

    Numbers come from the cells that were chosen by hand, then from the row, then from its cells;
    what is written down stays.
    """
    train = _fields(values, "train")
    row = ROWS.get(str(train.get("alg_name")))
    if row is None:
        return dict(values)
    found: FieldValues = {}
    composed = compose_row(row, train)
    # Samples of other kernels, or of rounded or earlier weights: a row whose ratio does not know
    # the sampler gets capped weights.
    stale = _fields(values, "rollout").get("max_staleness", 0) not in (0, "0")
    engine = _fields(values, "inference_engine")
    rounded = engine.get("weights", "trained") != "trained"
    elsewhere = stale or rounded or engine.get("name") == "vllm"
    corrected = composed.knows_sampler or train.get("old_logprobs") == "bypass"
    if row.recipe == "rl" and elsewhere and not corrected:
        found["correction"] = "truncate"
        composed = compose_row(composed, found)
    found |= composed.defaults
    if _fields(values, "lora").get("rank"):
        found |= {name: rate for name, rate in ADAPTER_RATES.items() if name in {*found, "lr"}}
    filled = {**values, "train": {**found, **train}}
    turn = _action_tokens(values)
    if turn and (row.recipe == "rl" or _fields(values, "environment")):
        filled["rollout"] = {"max_tokens": turn, **_fields(values, "rollout")}
    return filled


def _action_tokens(values: GivenValues) -> int:
    """Tokens of a turn of actions; 0 where turns are text, or where that is still in doubt."""
    try:
        return ActionConfig.model_validate(dict(_fields(values, "action"))).tokens
    except ValidationError:
        return 0


def _fields(values: GivenValues, section: str) -> GivenValues:
    """Return the values of a section; empty where they are no mapping."""
    found = values.get(section)
    return found if isinstance(found, Mapping) else {}


# Every section by its name, and every field by its dotted path.
SECTIONS: dict[str, SectionClass] = {
    name: cast(SectionClass, field.annotation) for name, field in Config.model_fields.items()
}
FIELDS: dict[str, FieldInfo] = {
    f"{section}.{name}": field
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
}


def defaults_of(algorithm: str) -> FieldValues:
    """The value of every field where nobody sets it, by dotted path; the algorithm's row has some.

    Args:
        algorithm: as `train.alg_name`.
    """
    found: FieldValues = {path: field.default for path, field in FIELDS.items()}
    if algorithm in ROWS:
        found |= {f"train.{name}": value for name, value in ROWS[algorithm].defaults.items()}
    return found


def config_schema() -> FieldValues:
    """JSON schema of the YAML file, with the fields of all recipes, for editors."""
    found = Config.model_json_schema()
    # Not at its line: most runs need no list of all rows.
    found["$defs"]["TrainConfig"]["properties"]["alg_name"]["enum"] = sorted(ROWS)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}
