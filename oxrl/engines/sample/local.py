"""LocalSampler: RolloutEngine in one process, on the very module that the trainer trains; and the
choice of a sampler of this process for a model: the fast one where it is right for it.

The way of a request: `submit` puts it into the queue. `poll` then works step by step: `_admit`
gives waiting requests free slots, has their prompts read (`Prompts`), and samples their first
tokens; `_decode_step` reads the last token of every active row, over the keys and values in
`RowCache`, and samples the next ones. `_sample_next` has the tokens noted in `Slots` and releases
the rows that they end. `cached.py` is for the models that this cannot sample from.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Cache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from oxrl.engines.sample import Responses
from oxrl.engines.sample.rows import (
    NOTHING,
    Prompts,
    Recorded,
    Slots,
    prompt_of,
    read_rows,
    row_batches,
)
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.errors import EngineError
from oxrl.functional.logprobs import head_logits
from oxrl.modelfiles.folder import family_of
from oxrl.models.shared_prefix import EXACT, SDPA, attention_by
from oxrl.types import Request

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore

UNLIMITED = 2**31
GROUPED = "oxrl_grouped"
# What computes attention in decode steps, by what computes that of whole rows.
DECODING = {SDPA: GROUPED, EXACT: EXACT}
# Attention spans and capacities are multiples of this many tokens.
SPAN = 32
# Rows in flight are read again, for new weights, some at a time: what a model computes of so many
# tokens is the most memory that it takes beside what is kept of all rows.
READ_AGAIN_TOKENS = 1024
# Families that LocalSampler was compared with (tests/models/test_architectures.py): they take
# position ids and a mask, and their keys and values have one shape in all layers. Every other model
# is sampled from over its own cache.
FAST = frozenset(
    {
        "ernie4_5",
        "falcon",
        "gemma",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "hunyuan_v1_dense",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)


class LocalSampler(ModuleSampler):
    """Samples with continuous batching: a finished row's place is taken by the next request.

    Args:
        model, tokenizer, max_rows, recorded: as of ModuleSampler; the model has full attention in
            every layer.

    Raises:
        EngineError: some layer of the model has another attention.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 128,
        recorded: Recorded = NOTHING,
    ) -> None:
        context = _context(model)
        super().__init__(model, tokenizer, context=context, max_rows=max_rows, recorded=recorded)
        self._prompts = Prompts(self.network)
        self._slots = CachedSlots(max_rows, model.device, recorded)

    def _expect(self, request: Request) -> None:
        self._prompts.expect(request)

    def _rows(self) -> Sequence[Slots]:
        return [self._slots]

    def _slots_for(self, count: int) -> Slots:
        return self._slots

    @torch.inference_mode()
    def _work(self) -> None:
        if self._slots.cache is None and self._slots.requests:
            self._recompute_cache()
        self._admit()
        if not self._finished:
            self._decode_step()

    def _admit(self) -> None:
        """Move waiting requests into free slots and sample their first tokens.

        Free slots cost nothing, so they are filled some at a time: a prefill per slot would cost
        more than it gains.
        """
        while self._waiting:
            free = self.max_rows - len(self._slots.requests)
            if free < min(len(self._waiting), max(1, self.max_rows // 16)):
                return
            count = min(free, len(self._waiting))
            admitted = [self._waiting.popleft() for _ in range(count)]
            prompts, read = self._prompts.take(admitted)
            wanted = sum(len(prompt_of(request)) for request in admitted)
            self._counted["prefill_tokens"] += read
            self._counted["prefill_tokens_saved"] += wanted - read
            first = len(self._slots.requests)
            self._slots.occupy(admitted)
            slot = first
            # Samples of one prompt stand side by side.
            for _, same in groupby(prompts, key=id):
                alike = list(same)
                self._slots.fill(slice(slot, slot + len(alike)), alike[0].kv)
                slot += len(alike)
            self._sample_next(first, torch.stack([prompt.logits for prompt in prompts]))

    def _decode_step(self) -> None:
        """Read the last token of every active row and sample the next one."""
        slots = self._slots
        assert slots.cache is not None
        active = len(slots.requests)
        positions = slots.prompt_end[:active] + slots.count[:active]
        longest = int(positions.max()) + 1
        mask = slots.cache.begin_step(active, positions, longest)
        with decoding_attention(self.model.config):
            output: Any = self.network.decoder(
                input_ids=slots.last[:active, None],
                attention_mask=mask,
                position_ids=positions[:, None],
                past_key_values=slots.cache,
                use_cache=True,
            )
        self._counted["decode_steps"] += 1
        self._counted["active_rows"] += active
        self._sample_next(0, head_logits(output.last_hidden_state[:, 0], self.network.head))

    def _sample_next(self, first: int, logits: Tensor) -> None:
        """Sample a token for each of the slots from `first` on, and release the rows it ends."""
        self._counted["tokens"] += len(logits)
        ended = self._slots.sample(first, logits, self._version)
        if ended:
            self._finished += self._release(self._slots, ended)

    def _stop(self, ids: set[str]) -> Responses:
        for request in self._waiting:
            if request.id in ids:
                self._prompts.forget(request)
        return super()._stop(ids)

    def _forget_computed(self) -> None:
        self._prompts.drop_prefilled()
        if self._slots.requests:
            self._slots.cache = None

    def sleep(self) -> None:
        """Free the keys and values; active rows recompute theirs when they go on."""
        self._slots.cache = None
        self._prompts.drop_prefilled()

    def _recompute_cache(self) -> None:
        """Read again what every active row has read so far, all but its last token."""
        contexts = [tokens[:-1] for tokens in self._slots.contexts()]
        slots = iter(range(len(contexts)))
        for batch in row_batches(contexts, READ_AGAIN_TOKENS):
            kvs, _ = read_rows(self.network, batch)
            for kv in kvs:
                slot = next(slots)
                self._slots.fill(slice(slot, slot + 1), kv)
            self._counted["prefill_tokens"] += sum(map(len, batch))

    def _progress(self) -> str:
        active = len(self._slots.requests)
        longest = max(self._slots.count[:active].tolist(), default=0)
        limit = max(self._slots.limit[:active].tolist(), default=0)
        return (
            f"{active} rows are being decoded, the longest has {longest} of at most {limit} "
            f"tokens, and {len(self._waiting)} requests wait"
        )


def _context(model: PreTrainedModel) -> int:
    """Return the longest prompt and response, in tokens, that full attention is right for.

    Raises:
        EngineError: some layer has another attention.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or UNLIMITED
    layers = getattr(config, "layer_types", None)
    if not layers:
        # What fits into the window that all layers of a Mistral have, if any, sees all of itself.
        window = getattr(config, "sliding_window", None) or UNLIMITED
        return min(positions, window)
    if set(layers) != {"full_attention"}:
        raise EngineError(
            "the local sampler needs full attention in every layer; "
            f"{type(model).__name__} has {set(layers)}"
        )
    return positions


def rounded(length: int) -> int:
    """`length` up to a multiple of SPAN."""
    return -(-length // SPAN) * SPAN


class RowCache(Cache):
    """Slots of keys and values, and which of their places hold a token.

    `kv` is [2, rows, heads, capacity, d] of every layer; `mask` [rows, capacity] is added to
    attention scores: 0 where a token lies, -inf elsewhere.

    Args:
        rows: number of slots.
        like: keys and values of one row, [layers, 2, heads, T, d].
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        super().__init__(layers=[])
        layers, two, heads, _, width = like.shape
        self.kv = [like.new_zeros(two, rows, heads, 0, width) for _ in range(layers)]
        self.mask = like.new_zeros(rows, 0)
        self._active = 0
        self._span = 0
        self._places = torch.zeros(0, dtype=torch.int64, device=like.device)

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self.mask.shape[1]

    def reserve(self, length: int) -> None:
        """Make every slot hold at least `length` tokens."""
        if length > self.capacity:
            grown = max(length, self.capacity * 3 // 2)
            extra = rounded(grown) - self.capacity
            # Layer by layer: what is there already is never in memory twice.
            for layer, kept in enumerate(self.kv):
                self.kv[layer] = nn.functional.pad(kept, (0, 0, 0, extra))
            self.mask = nn.functional.pad(self.mask, (0, extra), value=-torch.inf)

    def fill(self, slots: slice, prefilled: Tensor) -> None:
        """Copy the keys and values of one row, [layers, 2, heads, T, d], into each of `slots`."""
        length = prefilled.shape[3]
        self.reserve(length)
        for kept, given in zip(self.kv, prefilled, strict=True):
            kept[:, slots, :, :length] = given[:, None]
        self.mask[slots, :length] = 0.0
        self.mask[slots, length:] = -torch.inf

    def move(self, sources: Tensor, targets: Tensor, longest: int) -> None:
        """Copy slots `sources` [m] over slots `targets` [m], as far as `longest` tokens."""
        for kept in self.kv:
            kept[:, targets, :, :longest] = kept[:, sources, :, :longest]
        self.mask[targets] = self.mask[sources]

    def begin_step(self, active: int, positions: Tensor, longest: int) -> Tensor:
        """Prepare a decode step of slots 0..active-1, whose new tokens go to `positions`.

        Args:
            positions: [active] int64.
            longest: tokens of the longest row, the new one included.

        Returns:
            The attention mask, [active, 1, 1, span].
        """
        self.reserve(longest)
        self._active = active
        self._span = min(rounded(longest), self.capacity)
        heads = self.kv[0].shape[2]
        slots = torch.arange(active * heads, device=self.mask.device)
        self._places = slots * self.capacity + positions.repeat_interleave(heads)
        self.mask[:active].scatter_(1, positions[:, None], 0.0)
        return self.mask[:active, None, None, : self._span]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one new token per active row; returns all that rows attend over, without a copy."""
        keys, values = self.kv[layer_idx]
        width = keys.shape[-1]
        keys.view(-1, width).index_copy_(0, self._places, key_states.reshape(-1, width))
        values.view(-1, width).index_copy_(0, self._places, value_states.reshape(-1, width))
        return keys[: self._active, :, : self._span], values[: self._active, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return a length that nothing depends on, because position ids are always given."""
        return self._span


class CachedSlots(Slots):
    """Slots with the keys and values of their rows.

    `cache` is None while rows are active: asleep, or computed from old weights. The sampler then
    makes it anew.
    """

    cache: RowCache | None = None

    def fill(self, slots: slice, kv: Tensor) -> None:
        """Give each of `slots` the keys and values [layers, 2, heads, T, d] of one row."""
        if self.cache is None:
            self.cache = RowCache(len(self.last), like=kv)
        self.cache.fill(slots, kv)

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        super()._move(sources, targets)
        if self.cache is not None:
            lengths = self.prompt_end[sources] + self.count[sources] + 1
            self.cache.move(sources, targets, int(lengths.max()))


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one new token per row, with query heads that share a key head as its queries.

    That needs no repeated copy of the keys and values, which is what costs time in a decode step.
    """
    rows, heads, _, width = query.shape
    shared = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = nn.functional.scaled_dot_product_attention(
        shared, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling")
    )
    return output.reshape(rows, 1, heads, width), None


AttentionInterface.register(GROUPED, grouped_attention)


def decoding_attention(config: PreTrainedConfig) -> AbstractContextManager[None]:
    """Use `grouped_attention` inside the block, where the model uses transformers' `sdpa`."""
    usual = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    return attention_by(config, DECODING.get(usual or SDPA, usual))


def module_sampler(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int,
    longest: int | None = None,
    images: ImageStore | None = None,
    recorded: Recorded = NOTHING,
) -> ModuleSampler:
    """Build the sampler for a model that lies in this process.

    Args:
        model: a Hugging Face causal LM.
        max_rows: rows decoded at the same time.
        longest: most tokens of a prompt and its response that will be asked for; None: not known.
        images: of the prompts; None: there are none.
        recorded: of every token, beside its log-probability and version.

    Raises:
        EngineError: the model has no separate output head, or keeps no cache.
    """
    reads_images = family_of(model) is not None
    # The fast one decodes with attention of its own, which stands in for these alone.
    fast = getattr(model.config, "_attn_implementation", None) in DECODING and not reads_images
    if fast and attends_to_everything(model.config, longest):
        return LocalSampler(model, tokenizer, max_rows=max_rows, recorded=recorded)
    from oxrl.engines.sample.cached import (  # models that the fast one is wrong for
        CachedSampler,
        VisionSampler,
    )

    if reads_images:
        return VisionSampler(model, tokenizer, max_rows=max_rows, images=images, recorded=recorded)
    return CachedSampler(model, tokenizer, max_rows=max_rows, recorded=recorded)


def attends_to_everything(config: PreTrainedConfig, longest: int | None) -> bool:
    """True if every layer of a known family attends to everything before a token.

    A Mistral's window is no window for rows that fit into it.
    """
    text = config.get_text_config()
    if text.model_type not in FAST:
        return False
    layers = getattr(text, "layer_types", None)
    if layers:
        return set(layers) == {"full_attention"}
    window = getattr(text, "sliding_window", None)
    if not window:
        return True
    reach = longest or text.max_position_embeddings
    return reach <= window
