"""Models and tokenizers by name: `builtin:...`, a local directory, or a hub name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from oxrl.errors import DataError
from oxrl.models.builtin import BUILTIN_DIMS, builtin_policy, builtin_tokenizer, is_builtin
from oxrl.models.linear import speed_up_linears
from oxrl.models.lora import adapter_base, merge_adapter
from oxrl.models.network import ValueModel

if TYPE_CHECKING:
    from collections.abc import Callable

BUILTINS = ", ".join(BUILTIN_DIMS)
Model = TypeVar("Model", bound=nn.Module)
# Beside the backbone's Hugging Face files in a critic's directory.
VALUE_HEAD_FILE = "value_head.safetensors"


def load_tokenizer(
    name: str, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of model `name`.

    Args:
        name: `builtin:...`, a directory, or a hub name.
        chat_template: path of a Jinja file that replaces the tokenizer's own template.
        trust_remote_code: run Python code that the model's authors ship with it.

    Raises:
        DataError: nothing loadable under that name, no end token, or no such template file.
    """
    if is_builtin(name):
        _require_known(name)
        tokenizer: PreTrainedTokenizerBase = builtin_tokenizer()
    else:
        load: Any = AutoTokenizer.from_pretrained
        tokenizer = _from_disk_or_hub(load, "tokenizer", name, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer of {name!r} has no end-of-sequence token; set eos_token in its files"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        path = Path(chat_template)
        if not path.is_file():
            raise DataError(f"model.chat_template: no file {chat_template!r}")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


class Options(TypedDict, total=False):
    """How a model is loaded; `seed` matters for `builtin:` names only: other weights are read."""

    dtype: torch.dtype
    device: torch.device | str
    seed: int
    trust_remote_code: bool


def load_policy(name: str, **options: Unpack[Options]) -> PreTrainedModel:
    """A causal language model in eval mode, in float32 on the CPU unless `options` say otherwise.

    The folder of an adapter gives its base with the adapter merged into it.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
    """
    if (base := adapter_base(name)) is not None:
        return merge_adapter(load_policy(base, **options), name).eval()
    if is_builtin(name):
        _require_known(name)
        model: PreTrainedModel = builtin_policy(name, seed=options.get("seed", 0))
    else:
        model = read_weights(AutoModelForCausalLM, name, **options)
    return _placed(model, options)


def load_critic(name: str, **options: Unpack[Options]) -> ValueModel:
    """A value model: the backbone of policy `name` with a zero head, or a critic that was saved
    before.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
    """
    head_file = Path(name) / VALUE_HEAD_FILE
    if head_file.is_file() and (base := adapter_base(name)) is not None:
        decoder = merge_adapter(load_critic(base, **options).decoder, name)
    elif head_file.is_file():
        decoder = read_weights(AutoModel, name, **options)
    else:
        decoder = cast(PreTrainedModel, load_policy(name, **options).base_model)
    critic = ValueModel(decoder)
    if head_file.is_file():
        with safe_open(head_file, framework="pt") as file:
            critic.kind = (file.metadata() or {}).get("kind", critic.kind)
            critic.value_head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    return _placed(critic, options)


def _placed(model: Model, options: Options) -> Model:
    """In eval mode on its device. Only weights are cast: rounded rotary frequencies would misplace
    every token.
    """
    device, dtype = options.get("device", "cpu"), options.get("dtype", torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    speed_up_linears(model)
    return cast(nn.Module, model).to(device=device).eval()  # pyright: ignore[reportReturnType]


def read_weights(model_class: type[Any], name: str, **options: Any) -> PreTrainedModel:
    """`from_pretrained` that refuses weights it would have to invent; of the `Options`, it takes
    dtype and trust.
    """
    read = {"dtype": torch.float32, "trust_remote_code": False}
    read |= {key: value for key, value in options.items() if key in read}
    model, info = _from_disk_or_hub(
        model_class.from_pretrained, "model", name, output_loading_info=True, **read
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise DataError(
            f"model {name!r} lacks {len(missing)} weights that {type(model).__name__} needs, such as {missing[0]!r}; "
            "they would start random. Is this a checkpoint of another kind of model?"
        )
    return model


def _from_disk_or_hub(load: Callable[..., Any], what: str, name: str, **options: Any) -> Any:
    disable_progress_bar()
    path = Path(name)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if looks_local and not path.is_dir():
        raise DataError(
            f"model.name: no directory {name!r}. Give a directory, a hub name or one of {BUILTINS}"
        )
    try:
        return load(name, **options)
    except (OSError, ValueError) as error:
        where = (
            "in that directory"
            if path.is_dir()
            else "on disk, and the hub has none or cannot be reached"
        )
        raise DataError(
            f"model.name: no {what} {name!r} {where} ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Without a network use a local directory or one of {BUILTINS}"
        ) from error


def _require_known(name: str) -> None:
    if name not in BUILTIN_DIMS:
        raise DataError(f"model.name: no built-in model {name!r}; there are {BUILTINS}")
