"""Models and tokenizers by name: `builtin:...`, a local directory, or a hub name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from huggingface_hub.utils import enable_progress_bars
from safetensors import safe_open
from torch.nn import Module
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from oxrl.errors import DataError, OxrlError
from oxrl.modelfiles.builtin import (
    BUILTIN_DIMS,
    BUILTIN_VISION,
    builtin_policy,
    builtin_tokenizer,
    is_builtin,
)
from oxrl.modelfiles.builtin_vision import vision_policy, vision_tokenizer
from oxrl.modelfiles.chat_templates import DAY, TEMPLATE_FILE, template_text
from oxrl.modelfiles.folder import (
    VALUE_HEAD_FILE,
    adapter_base,
    adapter_revision,
    check_model_folder,
    has_tokenizer,
    stored_kinds,
    vision_family,
)
from oxrl.modelfiles.hub_status import hub_answers, hub_or_cache, why_silent
from oxrl.models.four_bit import (
    FourBit,
    four_bit_settings,
    keep_readable,
    learned_in_four_bits,
    undo_four_bit,
    whole_weight,
)
from oxrl.models.linear import speed_up_linears
from oxrl.models.meta_init import base_of, build_without_weights, weights_later
from oxrl.models.network import ValueModel
from oxrl.runs.console import on_terminal
from oxrl.runs.os_errors import fault_of

BUILTINS = ", ".join(BUILTIN_DIMS)
Model = TypeVar("Model", bound=Module)


def load_tokenizer(
    name: str,
    *,
    chat_template: str | None = None,
    day: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of model `name`.

    Args:
        name: `builtin:...`, a directory, or a hub name.
        chat_template: what replaces the tokenizer's own template: a Jinja file, or a training
            template of oxRL by its name.
        day: that a template which reads the clock is told; None: today.
        trust_remote_code: run Python code that the model's authors ship with it.
        revision: commit, tag or branch on the hub; None: the main branch.

    Raises:
        DataError: nothing loadable under that name, no end token, or no such template file.
    """
    if is_builtin(name):
        tokenizer = _made_up(name).tokenizer()
    else:
        if Path(name).is_dir() and not has_tokenizer(Path(name)):
            raise DataError(
                f"model.name: {name!r} holds no tokenizer: no tokenizer.json, vocabulary or "
                "sentencepiece model; copy the files of the one that the model was trained with"
            )
        with named_in_errors("tokenizer", name):
            tokenizer = AutoTokenizer.from_pretrained(
                name, trust_remote_code=trust_remote_code, revision=revision or "main"
            )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {name!r} has no end-of-sequence token; set eos_token in its files"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template, tokenizer)
        setattr(tokenizer, TEMPLATE_FILE, chat_template)
    setattr(tokenizer, DAY, day)
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of loading a model.

    Args:
        dtype: weights are cast to it.
        attention: what computes it, as transformers names it; auto: transformers' choice.
        device: where they go.
        seed: of the random weights of `builtin:` names; other weights are read.
        trust_remote_code: run Python code that the model's authors ship with it.
        revision: commit, tag or branch on the hub, of the model or of an adapter's base; None: the
            one that the adapter notes, or the main branch.
        on_meta: leave the weights out where the files allow it, for an engine whose ranks read
            their own pieces; see `oxrl.models.meta_init`.
        four_bit: of its linear layers; see `oxrl.models.four_bit`.
        exact: compute a token alike whatever else is in its batch; see `oxrl.models.exact`. Values
            of a critic are compared with nothing, so it is never exact.
    """

    dtype: torch.dtype = torch.float32
    attention: str = "auto"
    device: torch.device | str = "cpu"
    seed: int = 0
    trust_remote_code: bool = False
    revision: str | None = None
    on_meta: bool = False
    four_bit: FourBit = "no"
    exact: bool = False


DEFAULTS = LoadOptions()


class _MadeUp(NamedTuple):
    """The functions that make a built-in model and its tokenizer."""

    policy: Callable[..., PreTrainedModel]
    tokenizer: Callable[[], PreTrainedTokenizerBase]


def _made_up(name: str) -> _MadeUp:
    if name not in BUILTIN_DIMS:
        raise DataError(f"model.name: no built-in model {name!r}; there are {BUILTINS}")
    if name in BUILTIN_VISION:
        return _MadeUp(vision_policy, vision_tokenizer)
    return _MadeUp(builtin_policy, builtin_tokenizer)


@functools.cache
def config_of_model(name: str, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a model, without its weights; of an adapter that of the model below it.

    Args:
        name: as `model.name`.
        revision: commit, tag or branch on the hub; None: the main branch.
        trust_remote_code: run Python code that the model's authors ship with it.

    Raises:
        DataError: the model's configuration cannot be read.
    """
    base = adapter_base(name)
    if base is not None:
        return config_of_model(base, None, trust_remote_code)
    if is_builtin(name):
        return builtin_policy(name, seed=0).config
    with named_in_errors("model", name):
        return AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )


def load_policy(name: str, options: LoadOptions = DEFAULTS) -> PreTrainedModel:
    """A causal language model in eval mode.

    The folder of an adapter gives its base with the adapter merged into it.

    Args:
        name: `builtin:...`, a directory, or a hub name.
        options: how it is loaded.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
        ConfigError: it is to be exact, and no exact form of some part of it exists.
    """
    base = adapter_base(name)
    if base is not None:
        return _merged(load_policy(base, _of_base(name, options)), name).eval()
    if is_builtin(name):
        model = _made_up(name).policy(name, seed=options.seed)
        if options.attention != "auto":
            model.set_attn_implementation(options.attention)
    else:
        model = _read(
            AutoModelForCausalLM if vision_family(name) is None else AutoModelForImageTextToText,
            name,
            options,
        )
    if options.exact:
        from oxrl.models.exact import make_exact  # most runs are as fast as they can be

        make_exact(model)
    return _placed(model, options)


def load_critic(name: str, options: LoadOptions = DEFAULTS) -> ValueModel:
    """A value model: the backbone of policy `name` with a zero head, or a critic saved before.

    Args:
        name: as of `load_policy`.
        options: how it is loaded.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
    """
    options = replace(options, exact=False)
    head_file = Path(name) / VALUE_HEAD_FILE
    if not head_file.is_file():
        backbone = base_of(load_policy(name, options))
        return _placed(ValueModel(backbone), options)
    base = adapter_base(name)
    if base is None:
        backbone = _read(AutoModel, name, options)
    else:
        backbone = _merged(load_critic(base, _of_base(name, options)).decoder, name)
    critic = ValueModel(backbone)
    with safe_open(head_file, framework="pt") as file:
        critic.kind = (file.metadata() or {}).get("kind", critic.kind)
        critic.value_head.load_state_dict({key: file.get_tensor(key) for key in file.keys()})
    return _placed(critic, options)


def _merged(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """A model with the adapter in a folder merged into its weights."""
    from oxrl.models.lora import merge_adapter  # other folders hold whole models

    return merge_adapter(model, adapter)


def _of_base(adapter: str, options: LoadOptions) -> LoadOptions:
    """The options that the base of the adapter in a folder is loaded with: as it learned on it."""
    revision = options.revision or adapter_revision(adapter)
    four_bit: FourBit = "rounded" if learned_in_four_bits(adapter) else "no"
    return replace(options, revision=revision, on_meta=False, four_bit=four_bit)


def _placed(model: Model, options: LoadOptions) -> Model:
    """In eval mode on its device.

    Only weights are cast: rounded rotary frequencies would misplace every token.
    """
    speed_up_linears(model)
    if weights_later(model) is not None:
        return model.eval()
    for parameter in model.parameters():
        if parameter.is_floating_point():  # codes are not
            parameter.data = parameter.data.to(options.dtype)
    return model.to(device=options.device).eval()


def _read(model_class: type[Any], name: str, options: LoadOptions) -> PreTrainedModel:
    """Read a model, or leave its weights for later where that is asked for and can be."""
    if options.on_meta and not options.trust_remote_code and options.four_bit == "no":
        if Path(name).is_dir():
            check_model_folder(Path(name))
        with named_in_errors("model", name):
            model = build_without_weights(
                model_class,
                name,
                dtype=options.dtype,
                attention=options.attention,
                revision=options.revision,
                device=torch.device(options.device),
            )
        if model is not None:
            return _told(model)
    model = read_weights(model_class, name, options)
    if options.four_bit == "rounded":
        undo_four_bit(model)
    return _told(model)


def _told(model: PreTrainedModel) -> PreTrainedModel:
    """Say in the configuration of a model if its output head is not tied after all.

    Transformers leaves it apart where the files hold both. Samplers and what is written go by the
    configuration.
    """
    head: Any = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False
    return model


def read_weights(
    model_class: type[Any], name: str, options: LoadOptions, *, as_stored: bool = False
) -> PreTrainedModel:
    """`from_pretrained` that refuses weights it would have to invent.

    Args:
        model_class: with a `from_pretrained`.
        name: a directory or a hub name.
        options: how it is loaded.
        as_stored: weights have the types that they are stored with, not that of `options`.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
    """
    chosen: dict[str, Any] = {}
    if options.four_bit != "no":
        chosen["quantization_config"] = four_bit_settings(options.dtype)
        chosen["device_map"] = {"": torch.device(options.device)}
    local = Path(name).is_dir()
    if local:
        check_model_folder(Path(name))
    with named_in_errors("model", name):
        if local and not options.trust_remote_code:
            _check_shapes(model_class, Path(name))
        model, info = model_class.from_pretrained(
            name,
            output_loading_info=True,
            dtype="auto" if as_stored else options.dtype,
            attn_implementation=None if options.attention == "auto" else options.attention,
            trust_remote_code=options.trust_remote_code,
            revision=options.revision or "main",
            # The other format is a pickle, which can run code when it is read.
            use_safetensors=True,
            **chosen,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise DataError(
            f"model {name!r} lacks {len(missing)} weights that {type(model).__name__} needs, "
            f"such as {missing[0]!r}; they would start random. "
            "Is this a checkpoint of another kind of model?"
        )
    if options.four_bit != "no":
        keep_readable(model)
    for weight, parameter in model.named_parameters():
        if not whole_weight(parameter).isfinite().all():
            raise not_finite(name, weight)
    return model


def not_finite(name: str | Path, weight: str) -> DataError:
    """The error for a model whose files hold what is no number."""
    return DataError(
        f"model {str(name)!r} has NaN or infinite numbers in {weight!r}: nothing can be learned "
        "from there; take an earlier checkpoint"
    )


def _check_shapes(model_class: type[Any], folder: Path) -> None:
    """Compare the shapes of stored weights with those that config.json says.

    Raises:
        DataError: some differ.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    build = getattr(model_class, "from_config", model_class)  # an Auto class, or a model's own
    with torch.device("meta"):
        model = build(config)
    weights = model.state_dict()
    # Files of a bare model leave the name of it out.
    inner = f"{model.base_model_prefix}."
    expected = {name.removeprefix(inner): weight for name, weight in weights.items()} | weights
    wrong: list[str] = []
    for _, name, shape, _ in stored_kinds(folder):
        if name in expected and tuple(expected[name].shape) != shape:
            wrong.append(f"{name!r}: {shape}, not {tuple(expected[name].shape)}")
    if wrong:
        raise DataError(
            f"model {str(folder)!r} stores {len(wrong)} weights in other shapes than its "
            f"config.json says, such as {wrong[0]}"
        )


@contextmanager
def named_in_errors(what: str, name: str) -> Iterator[None]:
    """Say in errors what cannot be read from a directory or from the hub, and why."""
    # Of what takes a moment; downloads keep theirs in a terminal.
    disable_progress_bar()
    if on_terminal():
        enable_progress_bars()
    path = Path(name)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if looks_local and not path.is_dir():
        raise DataError(
            f"model.name: no directory {name!r}. Give a directory, a hub name or one of {BUILTINS}"
        )
    local = path.is_dir()
    try:
        with nullcontext() if local else hub_or_cache():
            yield
    except OxrlError:
        raise
    # What is no fault of the machine is about the files or the name that a library was given.
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if local:
            problem = f"no {what} can be read from {name!r} ({reason})"
            if "trust_remote_code" in str(error):
                problem += "; model.trust_remote_code: true runs the code that ships with it"
        else:
            where = "the hub has none of that name" if hub_answers() else why_silent()
            problem = f"no {what} {name!r} on disk or in the cache, and {where} ({reason})"
            problem += f". Without a network use a local directory or one of {BUILTINS}"
        raise fault_of(error) or DataError(f"model.name: {problem}") from error
