"""Trials, mostly on a small model of its kind: of a model's head, and of prompts read once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from oxrl.data.batching import to_token_batch
from oxrl.errors import ConfigError, RunDirectoryError
from oxrl.modelfiles.folder import family_of
from oxrl.models.network import CausalNetwork, unpadded, vocabulary_of
from oxrl.models.shared_prefix import BLOCK_ATTENTION, SharedPrefixNetwork, SharingRefused
from oxrl.runs.files import read_json, write_atomically
from oxrl.types import TokenBatch

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
SEED = 17
VOCABULARY = 64
# Largest difference of the gradients in float32, relative, as Euclidean norms: rounding of sums of
# some hundred terms, where a token that sees one too many or too few makes it 0.01 and more.
MOST_OFF = 1e-5
# In lower precision plain rows are off as well: prompts read once may be off by so much more.
MOST_TIMES = 2.0
# Tokens of each of two texts that must not see each other: longer than convolutions, and than most
# windows of a small model.
APART = 48
# By how much the second may move when the first is changed, in shares of its largest hidden state.
LEAK = 1e-5
LOW_PRECISION_LEAK = 2e-2
# Of a whole model, the largest difference of hidden states, relative to the largest of them.
TOLERANCE = 1e-4
LOW_PRECISION_TOLERANCE = 3e-2


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
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None)
    layers = _layers_kept(text)
    for name in PER_LAYER:
        kinds = _own(text, name)
        if isinstance(kinds, list):
            setattr(text, name, kinds[:layers])
    text.num_hidden_layers = layers
    for name, most in MOST.items():
        value = _own(text, name)
        if isinstance(value, int) and value > most:
            setattr(text, name, most)
    if isinstance(kv_heads, int) and isinstance(heads, int) and kv_heads:
        text.num_key_value_heads = max(1, text.num_attention_heads * kv_heads // heads)
    _fit_inner(text)
    _fit_rotations(text)
    for tower in ("vision_config", "audio_config"):
        other = getattr(config, tower, None)
        if isinstance(other, PreTrainedConfig):
            other.num_hidden_layers = 1  # there, and unused by text


def _own(config: PreTrainedConfig, name: str) -> Any:
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
    pairs = int(width * share) // 2
    for name in ("long_factor", "short_factor"):
        factors = scaling.get(name)
        if isinstance(factors, list):
            scaling[name] = factors[:pairs]


def trial_rows() -> TokenBatch:
    """Groups of several, of one, without a prompt, and of a prompt of one token."""
    groups = [(7, (5, 2, 9)), (3, (4,)), (0, (6, 6)), (1, (3, 8))]
    rows: list[list[int]] = []
    trained: list[list[bool]] = []
    for number, (prompt, responses) in enumerate(groups):
        begin = [2 + (5 * number + 3 * at) % 31 for at in range(prompt)]
        for sample, length in enumerate(responses):
            rest = [2 + (11 * number + 7 * sample + 13 * at) % 59 for at in range(length)]
            rows.append(begin + rest)
            trained.append([False] * prompt + [True] * length)
    return to_token_batch(rows, trained, 0)


def try_sharing(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> float:
    """Compare the gradient of plain rows with that of prompts that are read once.

    In float32 they have to be the same but for `MOST_OFF`; in a lower precision the second may be
    `MOST_TIMES` as far from the gradient in float32 as the first is. On the CPU, always alike.

    Args:
        config: of the model.
        dtype: that it computes in.
        trust_remote_code: run Python code that the model's authors ship with it.

    Returns:
        The difference in float32, relative to the gradient.

    Raises:
        SharingRefused: it is too large, or such a model cannot be read so at all.
    """
    model = small_copy(config, trust_remote_code=trust_remote_code)
    name = type(model).__name__
    by = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    if by not in BLOCK_ATTENTION:
        raise SharingRefused(f"{name} computes attention by {by}, not by sdpa")
    plain = _gradient(model, share=False)
    shared = _gradient(model, share=True)
    difference = float((shared - plain).norm() / plain.norm())
    if not difference <= MOST_OFF:
        raise SharingRefused(
            f"on a tiny {name} gradients differ by {difference:.2g}, above {MOST_OFF:g}"
        )
    if dtype != torch.float32:
        Module.to(model, dtype)
        usual = float((_gradient(model, share=False) - plain).norm())
        found = float((_gradient(model, share=True) - plain).norm())
        if not found <= MOST_TIMES * usual:
            raise SharingRefused(
                f"on a tiny {name} gradients in {dtype} are {found / usual:.2g} times as far from "
                f"those in float32 as without sharing, above {MOST_TIMES:g}"
            )
    return difference


def small_copy(
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool,
    inner: int | None = None,
    vocabulary: int = VOCABULARY,
) -> PreTrainedModel:
    """A random model of the same kind, in float32.

    Args:
        config: of the model.
        trust_remote_code: run Python code that the model's authors ship with it.
        inner: width of its inner layers; None: as `shrink` leaves it.
        vocabulary: tokens that it has.
    """
    small = deepcopy(config)
    shrink(small)
    text: Any = small.get_text_config()
    if inner is not None:
        text.intermediate_size = inner
    text.vocab_size = vocabulary
    text.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(
            small, trust_remote_code=trust_remote_code, dtype=torch.float32
        )
    return model.eval()


def _gradient(model: PreTrainedModel, *, share: bool) -> Tensor:
    """[n], of a sum of hidden states, each with a weight of its own; float32.

    Raises:
        SharingRefused: the model does not hand the layout of a row to its attention.
    """
    network = SharedPrefixNetwork(model) if share else CausalNetwork(model)
    batch = trial_rows()
    try:
        hidden = network.backbone(batch)[batch.attention_mask].float()
    except TypeError as error:
        raise SharingRefused(
            f"{type(model).__name__} does not pass the prefix layout to its attention ({error})"
        ) from error
    weights = torch.linspace(-1.0, 1.0, hidden.numel()).sin().view_as(hidden)
    (hidden * weights).sum().backward()
    found = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)


def remembered_trial(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Return what `try_sharing` finds, and run it only where no earlier difference is kept.

    Args:
        config: of the model, none with code of its own: that would be no part of the key.
        dtype: that it computes in.

    Returns:
        The difference, relative to the gradient. A file that holds none is written anew; where
        none can be written, the next run tries again.

    Raises:
        SharingRefused: as of `try_sharing`; nothing is kept of it.
    """
    settings = config.to_dict()  # transformers' version among them
    settings.pop("_name_or_path", None)
    code = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    attention = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    described = f"{settings} {attention} {dtype} {torch.__version__} {code}"
    key = sha256(described.encode()).hexdigest()
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    file = Path(caches, "oxrl", "sharing_trials", f"{key}.json")
    kept = (read_json(file) or {}).get("difference")
    if isinstance(kept, float) and 0 <= kept <= MOST_OFF:
        return kept
    difference = try_sharing(config, dtype)
    with suppress(OSError, RunDirectoryError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"difference": difference}))
    return difference


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Make sure that packed examples do not see each other: positions alone keep them apart.

    Raises:
        ConfigError: what the model says of an example depends on the one before it in its row.
    """
    network = CausalNetwork(model)
    positions = torch.arange(APART, device=model.device).repeat(2)[None]

    def read(rows: Tensor) -> Tensor:
        packed = replace(unpadded(rows.view(1, -1)), position_ids=positions)
        return network.backbone(packed)[0, APART:]

    taken = signature(model.base_model.forward).parameters
    if "position_ids" in taken and not leak(read, model):
        return
    raise ConfigError(
        f"data.pack_tokens: {type(model).__name__} leaks state from one example of a packed row to "
        "the next, which position ids cannot prevent (a recurrent state, a convolution, or "
        "attention without positions); leave data.pack_tokens out"
    )


@torch.no_grad()
def check_sharing(model: PreTrainedModel) -> None:
    """Make sure that responses whose prompt is read once do not see each other, and are what they
    are one by one.

    Raises:
        SharingRefused: they are not: the model carries something from token to token that is not
            attention, or attends in a way that is not known here.
    """
    name = type(model).__name__
    prompt = APART // 3
    sampled = torch.arange(prompt + APART, device=model.device) >= prompt

    def read(rows: Tensor, network: CausalNetwork) -> Tensor:
        batch = replace(unpadded(rows), response_mask=sampled.expand(2, -1))
        return network.backbone(batch)[1, prompt:].float()

    together = partial(read, network=SharedPrefixNetwork(model))
    try:
        leaked = leak(together, model, shared=prompt)
    except TypeError as error:
        raise SharingRefused(
            f"train.share_prefix: {name} does not pass the prefix layout to its attention "
            f"({error}); set it to false"
        ) from error
    if leaked:
        raise SharingRefused(
            f"train.share_prefix: what {name} computes for a response changes by {leaked:.2g} of "
            "the largest with the response before it, whose prompt it shares; set it to false"
        )
    rows = two_texts(model, prompt)
    difference = apart(together(rows), read(rows, CausalNetwork(model)))
    limit = TOLERANCE if in_float32(model) else LOW_PRECISION_TOLERANCE
    if not difference <= limit:
        raise SharingRefused(
            f"train.share_prefix: hidden states of {name} differ by {difference:.2g} of the "
            f"largest with and without the shared prefix, above {limit:g}; set it to false"
        )


def leak(read: Callable[[Tensor], Tensor], model: PreTrainedModel, *, shared: int = 0) -> float:
    """Tell whether one text changes what a model computes for the next, which may not see it.

    Every token of the first is changed. The texts are long enough for windows and convolutions.

    Args:
        read: [2, shared + APART] tokens to hidden states of the second text, [APART, H].
        model: whose they are.
        shared: tokens that stand before both texts, which both may see.

    Returns:
        How far the second moves, in shares of its largest hidden state; 0 where that is rounding
        alone.
    """
    rows = two_texts(model, shared)
    before = read(rows)
    others = rows.clone()
    others[0, shared:] += 1
    moved = apart(read(others), before)
    if in_float32(model):
        return 0.0 if moved <= LEAK else moved
    own = rows.clone()
    own[1, shared] += 1
    most = min(LOW_PRECISION_LEAK, apart(read(own), before) / 2)
    return 0.0 if moved <= most else moved


def two_texts(model: PreTrainedModel, shared: int) -> Tensor:
    """[2, shared + APART] tokens of two texts with the same beginning."""
    tokens = torch.arange(2 * (shared + APART), device=model.device)
    vocabulary = vocabulary_of(model) or len(tokens)
    rows = (tokens * 7 % (vocabulary - 2)).view(2, -1)
    rows[1, :shared] = rows[0, :shared]
    return rows


def apart(hidden: Tensor, other: Tensor) -> float:
    """The largest difference, in shares of the largest of the others."""
    return float((hidden.float() - other.float()).abs().max() / other.abs().max())


def in_float32(model: PreTrainedModel) -> bool:
    """True if its weights are kept in float32."""
    return next(model.parameters()).dtype == torch.float32
