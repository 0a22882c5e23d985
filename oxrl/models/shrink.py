"""A model like another one, so small that a step of it takes a moment: what a dry run trains."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from oxrl.modelfiles.builtin import builtin_policy
from oxrl.modelfiles.folder import adapter_base
from oxrl.models.load import load_tokenizer, named_in_errors
from oxrl.models.network import CausalNetwork
from oxrl.models.vision_family import family_of

# Stands in for a model of which nothing is at hand.
STAND_IN = "builtin:tiny"
# The most that a size is left at, by the names that configurations of transformers give it.
MOST: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 256,
    "n_inner": 256,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "num_kv_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "state_size": 8,
    "time_step_rank": 4,
    "n_groups": 1,
    "chunk_size": 16,
    "block_ff_dim": 128,
}
# Lists with an entry per layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")
FEWEST_LAYERS = 2


def write_shrunk(
    name: str,
    folder: Path,
    *,
    seed: int,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """Write a random model of the architecture of `name`, with its tokenizer, into `folder`.

    Args:
        name: a directory or a hub name.
        folder: is made.
        seed: of the random weights.
        trust_remote_code: run Python code that the model's authors ship with it.
        revision: commit, tag or branch on the hub; None: the main branch.

    Returns:
        The model that was written.

    Raises:
        DataError: nothing loadable under that name.
    """
    base = adapter_base(name)
    if base is not None:
        return write_shrunk(base, folder, seed=seed, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, revision=revision)
    with named_in_errors("model", name):
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
        shrink(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for code in Path(name).glob("*.py"):
        shutil.copy(code, folder)
    return model


def write_stand_in(folder: Path, *, seed: int) -> PreTrainedModel:
    """Write the built-in model and its tokenizer into `folder`, which is made."""
    model: PreTrainedModel = builtin_policy(STAND_IN, seed=seed)
    model.save_pretrained(folder)
    load_tokenizer(STAND_IN).save_pretrained(folder)
    return model


def check_small(model: PreTrainedModel) -> None:
    """Check the head of a model whose weights are not there yet, on a small one of its class.

    What its logits are made of depends on its code and on the numbers of its configuration. The
    families that read images are known.

    Raises:
        EngineError: see `CausalNetwork`.
    """
    if family_of(model.base_model) is not None:
        return
    config = deepcopy(model.config)
    shrink(config)
    with torch.random.fork_rng(devices=[]):
        CausalNetwork(type(model)(config).eval())


def shrink(config: PreTrainedConfig) -> None:
    """Lower the sizes of a configuration, in place, to what a moment is enough for.

    Every kind of layer stays, and so do the vocabulary, the context and what the numbers of heads
    are to each other.
    """
    text = config.get_text_config()
    heads: Any = getattr(text, "num_attention_heads", None)
    kv_heads: Any = getattr(text, "num_key_value_heads", None)
    _keep_layers(text, _layers_kept(text))
    for name, most in MOST.items():
        value = _own(text, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            setattr(text, name, most)
    if isinstance(kv_heads, int) and isinstance(heads, int) and kv_heads:
        text.num_key_value_heads = max(1, text.num_attention_heads * kv_heads // heads)
    _fit_inner(text)
    _fit_rotations(text)
    for tower in ("vision_config", "audio_config"):
        other = getattr(config, tower, None)
        if isinstance(other, PreTrainedConfig):
            other.num_hidden_layers = 1  # there, and unused by text


def _own(config: PreTrainedConfig, name: str) -> object:
    """The value of a field that the configuration has; None of properties and of what is not."""
    stored = config.attribute_map.get(name, name)
    return vars(config).get(stored)


def _layers_kept(config: PreTrainedConfig) -> int:
    """Layers from the first on until every kind of layer is there."""
    layers = int(config.num_hidden_layers)
    kept = min(FEWEST_LAYERS, layers)
    for name in PER_LAYER:
        kinds = _own(config, name)
        if isinstance(kinds, list):
            firsts = [kinds.index(kind) + 1 for kind in set(map(str, kinds)) if kind in kinds]
            kept = max([kept, *firsts])
    for name in ("full_attention_interval", "sliding_window_pattern"):
        every = _own(config, name)
        if isinstance(every, int):
            kept = max(kept, min(every, layers))
    return kept


def _keep_layers(config: PreTrainedConfig, count: int) -> None:
    for name in PER_LAYER:
        kinds = _own(config, name)
        if isinstance(kinds, list):
            setattr(config, name, kinds[:count])
    config.num_hidden_layers = count


def _fit_inner(config: PreTrainedConfig) -> None:
    """Sizes of state-space layers that follow from the hidden size."""
    expand = _own(config, "expand")
    if not isinstance(expand, int):
        return
    inner = expand * config.hidden_size
    if _own(config, "head_dim") is not None:
        config.num_heads = inner // config.head_dim
    if _own(config, "intermediate_size") is not None:
        config.intermediate_size = inner


def _fit_rotations(config: PreTrainedConfig) -> None:
    """Factors of rotary embeddings, of which there is one per rotated pair of a head."""
    rotated = _own(config, "qk_rope_head_dim")
    if rotated is not None and _own(config, "head_dim") is not None:
        config.head_dim = rotated
    width = _own(config, "head_dim") or config.hidden_size // max(
        getattr(config, "num_attention_heads", 1), 1
    )
    scaling = getattr(config, "rope_parameters", None)
    if not isinstance(scaling, dict):
        return
    share = scaling.get("partial_rotary_factor") or 1.0
    pairs = int(cast(int, width) * share) // 2
    for name in ("long_factor", "short_factor"):
        factors = scaling.get(name)
        if isinstance(factors, list):
            scaling[name] = factors[:pairs]
