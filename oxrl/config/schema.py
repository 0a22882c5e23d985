"""The configuration: one frozen class per YAML section, every field with its default, bound and
meaning; and one root class per recipe, which has only the fields that this recipe can read.

The sections are in `sections/`. The numbers of an algorithm are declared in `oxrl.tables.numbers`,
and become fields of `train` here. Which of its recipe's fields a run reads depends on its row
(`reads.py`); checks across sections are in `checks/`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, cast

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from oxrl.config.field import (
    ALL,
    ANSWERING,
    EVALUATING,
    RL,
    Section,
    readers,
    setting,
)
from oxrl.config.sections.action import ActionConfig
from oxrl.config.sections.data import DataConfig
from oxrl.config.sections.deepspeed import DeepSpeedConfig, ReferenceConfig
from oxrl.config.sections.environment import EnvironmentConfig
from oxrl.config.sections.fsdp import FsdpConfig
from oxrl.config.sections.model import LoraConfig, ModelConfig
from oxrl.config.sections.reward import RewardConfig
from oxrl.config.sections.rollout import EngineConfig, RolloutConfig
from oxrl.config.sections.run import RunConfig
from oxrl.config.sections.train import TrainConfig, compose_row
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.cells import FEATURES
from oxrl.tables.engines import SAMPLING_ENGINES
from oxrl.tables.numbers import NUMBERS, AnyNumber
from oxrl.tables.policy import ROWS

Magnitude = Annotated[float, AfterValidator(abs)]  # `load_config` warns where it drops a sign

SectionClass = type[Section]
# Values by the names of fields, or of sections; the second one is only read.
FieldValues = dict[str, object]
GivenValues = Mapping[str, object]
# Type and default, or `Field`, of a field that is made here.
Definition = tuple[object, object]

# Sections that an evaluation may set whatever the training algorithm reads.
EVALUATED = (
    "run",
    "model",
    "data",
    "reward",
    "environment",
    "action",
    "rollout",
    "inference_engine",
)
# Adapters learn best at about ten times the rate of full tuning (Schulman et al., "LoRA Without
# Regret", 2025).
ADAPTER_RATES = {"lr": 1e-5, "critic_lr": 1e-4}


class Config(Section):
    """A whole run. Build it with `load_config`, which also checks across sections.

    Validating gives an instance of a subclass: the root class of the recipe of `train.alg_name`,
    which has only the fields that this recipe can read. Fields of other recipes cannot be set, are
    not dumped, and have their default where code that recipes share looks at them.
    """

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = setting(RewardConfig(), "", of=ANSWERING)
    environment: EnvironmentConfig = setting(EnvironmentConfig(), "", of=RL)
    action: ActionConfig = setting(ActionConfig(), "", of=EVALUATING)
    rollout: RolloutConfig = setting(RolloutConfig(), "", of=ANSWERING)
    lora: LoraConfig = LoraConfig()
    train: TrainConfig
    inference_engine: EngineConfig = setting(EngineConfig(), "", of=ANSWERING)
    fsdp: FsdpConfig = FsdpConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    deepspeed_ref: ReferenceConfig = setting(ReferenceConfig(), "", of=("rl", "preference"))

    @model_validator(mode="wrap")
    @classmethod
    def _of_recipe(cls, values: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Choose the root class, and fill in what the algorithm sets."""
        if not isinstance(values, dict):
            return validate(values)
        given = cast(FieldValues, values)
        if cls is Config:
            return cast(Self, root_class(recipe_of(given)).model_validate(given))
        return validate(with_defaults(given))

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
        """Whether a process of its own samples, on this machine and without Ray."""
        engine = self.inference_engine
        return SAMPLING_ENGINES[engine.name].own_process and not engine.actors

    @property
    def samplers(self) -> int:
        """Samplers with weights of their own; 0: this process samples, with the policy's."""
        return self.inference_engine.actors or int(self.sampling_process)

    @property
    def scores_nothing(self) -> bool:
        """Whether no response is scored: samples are those of another run, evaluations are none."""
        return self.rollout.from_samples is not None and self.data.eval is None

    @property
    def sampling_block(self) -> int:
        """Rollout batches sampled by the same weights while earlier ones train; 0: none."""
        return (self.rollout.max_staleness // self.train.updates + 1) // 2


def recipe_of(values: GivenValues) -> str:
    """Recipe of the algorithm that `values` name; where it is in doubt, reinforcement learning."""
    row = ROWS.get(str(_fields(values, "train").get("alg_name")))
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
    # Samples of other kernels or earlier weights: a row whose ratio does not know the sampler gets
    # capped weights.
    stale = _fields(values, "rollout").get("max_staleness", 0) not in (0, "0")
    elsewhere = stale or _fields(values, "inference_engine").get("name") == "vllm"
    corrected = composed.knows_sampler or train.get("old_logprobs") == "bypass"
    if row.recipe == "rl" and elsewhere and not corrected:
        found["correction"] = "truncate"
        composed = compose_row(composed, found)
    found |= composed.defaults
    if _fields(values, "lora").get("rank"):
        rates = {name: rate for name, rate in ADAPTER_RATES.items() if name in {*found, "lr"}}
        found |= rates
    filled = {**values, "train": {**found, **train}}
    turn = _action_tokens(values)
    if turn and (row.recipe == "rl" or _fields(values, "environment")):
        filled["rollout"] = {"max_tokens": turn, **_fields(values, "rollout")}
    return filled


def _action_tokens(values: GivenValues) -> int:
    """Tokens of a turn of actions; 0 where turns are text, or where that is still in doubt."""
    given = _fields(values, "action")
    if not given:
        return 0
    try:
        return ActionConfig.model_validate(dict(given)).tokens
    except ValidationError:
        return 0


def _fields(values: GivenValues, section: str) -> GivenValues:
    """What `values` say of a section; nothing where that is no mapping."""
    found = values.get(section)
    return cast(GivenValues, found) if isinstance(found, Mapping) else {}


def _number_field(number: AnyNumber) -> Definition:
    """Type and field of a number of the tables."""
    kind = Magnitude if number.magnitude else number.type
    field = Field(
        number.default,
        description=number.meaning,
        ge=number.ge,
        gt=number.gt,
        le=number.le,
        lt=number.lt,
    )
    return kind, field


def _subclass(parent: SectionClass, name: str, fields: Mapping[str, Definition]) -> SectionClass:
    """A class like `parent` with other or further fields; of type ClassVar, a field is none."""
    namespace: FieldValues = {
        field: default for field, (_, default) in fields.items() if default is not ...
    }
    namespace["__annotations__"] = {field: kind for field, (kind, _) in fields.items()}
    namespace |= {"__module__": __name__, "__doc__": parent.__doc__}
    return types.new_class(name, (parent,), exec_body=lambda body: body.update(namespace))


def _numbers_of(recipe: str) -> dict[str, Definition]:
    """Fields of the numbers that a recipe can read."""
    read = {name for row in ROWS.values() if row.recipe == recipe for name in row.defaults}
    if recipe == "rl":
        parts = (*TABLE.values(), *FEATURES.values())
        read |= {number.key for part in parts for number in part.numbers}
    return {name: _number_field(number) for name, number in NUMBERS.items() if name in read}


@cache
def _section_class(section: SectionClass, recipe: str) -> SectionClass:
    """The section as `recipe` reads it."""
    fields: dict[str, Definition] = {}
    for name, field in section.model_fields.items():
        if recipe not in readers(field):
            fields[name] = (ClassVar[object], field.default)
    if section is TrainConfig:
        fields |= _numbers_of(recipe)
    if not fields:
        return section
    return _publish(_subclass(section, _title(recipe) + section.__name__, fields))


def root_class(recipe: str, *, evaluates: bool = False) -> type[Config]:
    """The root class of a recipe, the same one whenever it is asked for.

    Args:
        recipe: of the algorithm.
        evaluates: with everything that an evaluation may set, whatever the recipe reads.
    """
    return _root_class(recipe, evaluates)


# The cache tells calls with and without a keyword apart, and would make two classes of one name.
@cache
def _root_class(recipe: str, evaluates: bool) -> type[Config]:
    fields: dict[str, Definition] = {}
    for name, field in Config.model_fields.items():
        section = cast(SectionClass, field.annotation)
        whole = evaluates and name in EVALUATED
        if not whole and recipe not in readers(field):
            fields[name] = (ClassVar[object], field.default)
            continue
        kind = section if whole else _section_class(section, recipe)
        fields[name] = (kind, ... if field.is_required() else kind())
    name = f"{_title(recipe)}{'Evaluation' if evaluates else ''}Config"
    return cast(type[Config], _publish(_subclass(Config, name, fields)))


def _title(recipe: str) -> str:
    """What the names of a recipe's classes begin with."""
    return recipe.title().replace("_", "")


def _publish(made: SectionClass) -> SectionClass:
    """Put a class of a recipe under its name into this module, where pickles look for it."""
    globals()[made.__name__] = made
    return made


def _made_class(name: str) -> SectionClass:
    """Module attributes that do not exist yet: a recipe's classes, which are made when first used.

    A process that unpickles a configuration asks for them by name before anything here has.
    """
    for recipe in ALL:
        if name.startswith(_title(recipe)) and name.endswith("Config"):
            root_class(recipe)
            root_class(recipe, evaluates=True)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


if not TYPE_CHECKING:
    __getattr__ = _made_class


@cache
def fields_of(recipe: str, *, evaluates: bool = False) -> tuple[str, ...]:
    """Dotted paths of every field of a recipe's root class."""
    root = root_class(recipe, evaluates=evaluates)
    found: list[str] = []
    for section, field in root.model_fields.items():
        model = cast(SectionClass, field.annotation)
        found.extend(f"{section}.{name}" for name in model.model_fields)
    return tuple(found)


# Every section with the fields of all recipes.
SECTIONS: dict[str, SectionClass] = {
    name: cast(SectionClass, field.annotation) for name, field in Config.model_fields.items()
}
SECTIONS["train"] = _subclass(
    TrainConfig,
    "TrainConfig",
    {name: _number_field(number) for name, number in NUMBERS.items()},
)
FIELDS = tuple(
    f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields
)


def config_schema() -> FieldValues:
    """JSON schema of the YAML file, with the fields of all recipes, for editors."""
    fields: dict[str, Definition] = {}
    for name, field in Config.model_fields.items():
        section = SECTIONS[name]
        fields[name] = (section, ... if field.is_required() else section())
    whole = _subclass(Section, "Config", fields)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole.model_json_schema()}
