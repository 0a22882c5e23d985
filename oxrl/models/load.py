"""Models and tokenizers by name: `builtin:...`, a local directory, or a hub name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from oxrl.errors import DataError
from oxrl.models.builtin import BUILTIN_DIMS, builtin_policy, builtin_tokenizer, is_builtin
from oxrl.models.linear import speed_up_linears
from oxrl.models.lora import adapter_base, merge_adapter
from oxrl.models.network import ValueModel

if TYPE_CHECKING:
    from collections.abc import Callable

M = TypeVar("M", bound=nn.Module)
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
        raise DataError(f"the tokenizer of {name!r} has no end-of-sequence token; set eos_token in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        path = Path(chat_template)
        if not path.is_file():
            raise DataError(f"model.chat_template: no file {chat_template!r}")
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def load_policy(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model in eval mode. `seed` matters for `builtin:` names only: other weights are read.

    The folder of an adapter gives its base with the adapter merged into it.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "seed": seed, "trust_remote_code": trust_remote_code}
    if (base := adapter_base(name)) is not None:
        return merge_adapter(load_policy(base, **options), name).eval()
    if is_builtin(name):
        _require_known(name)
        model: PreTrainedModel = builtin_policy(name, seed=seed)
    else:
        model = read_weights(AutoModelForCausalLM, name, dtype=dtype, trust_remote_code=trust_remote_code)
    return _placed(model, device, dtype)


def load_critic(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> ValueModel:
    """A value model: the backbone of policy `name` with a zero head, or a critic that was saved before.

    Raises:
        DataError: nothing loadable under that name, or its files lack some weights.
    """
    head_file = Path(name) / VALUE_HEAD_FILE
    base = adapter_base(name) if head_file.is_file() else None
    if base is not None:
        below = load_critic(base, dtype=dtype, seed=seed, trust_remote_code=trust_remote_code)
        decoder = merge_adapter(below.decoder, name)
    elif head_file.is_file():
        decoder = read_weights(AutoModel, name, dtype=dtype, trust_remote_code=trust_remote_code)
    else:
        policy = load_policy(name, dtype=dtype, device="cpu", seed=seed, trust_remote_code=trust_remote_code)
        decoder = cast(PreTrainedModel, policy.base_model)
    critic = ValueModel(decoder)
    if head_file.is_file():
        with safe_open(head_file, framework="pt") as file:
            critic.kind = (file.metadata() or {}).get("kind", critic.kind)
            critic.value_head.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    return _placed(critic, device, dtype)


def _placed(model: M, device: torch.device | str, dtype: torch.dtype) -> M:
    """In eval mode on its device. Only weights are cast: rounded rotary frequencies would misplace every token."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    speed_up_linears(model)
    cast(nn.Module, model).to(device=device)
    return model.eval()


def read_weights(
    model_class: type[Any], name: str, *, dtype: torch.dtype | str, trust_remote_code: bool = False
) -> PreTrainedModel:
    """`from_pretrained` that refuses weights it would have to invent."""
    model, info = _from_disk_or_hub(
        model_class.from_pretrained,
        "model",
        name,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
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
        raise DataError(f"model.name: no directory {name!r}. Give a directory, a hub name or one of {_builtins()}")
    try:
        return load(name, **options)
    except (OSError, ValueError) as error:
        where = "in that directory" if path.is_dir() else "on disk, and the hub has none or cannot be reached"
        raise DataError(
            f"model.name: no {what} {name!r} {where} ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Without a network use a local directory or one of {_builtins()}"
        ) from error


def _require_known(name: str) -> None:
    if name not in BUILTIN_DIMS:
        raise DataError(f"model.name: no built-in model {name!r}; there are {_builtins()}")


def _builtins() -> str:
    return ", ".join(BUILTIN_DIMS)
