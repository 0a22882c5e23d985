"""LocalSampler: RolloutEngine in one process, on the very module that the trainer trains."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from oxrl.engines.sample.base import Finished
from oxrl.engines.sample.cache import RowCache, decoding_attention
from oxrl.engines.sample.gumbel import draw, noise_keys, restrict
from oxrl.engines.sample.sampler import Sampler
from oxrl.engines.train.base import Bucket
from oxrl.engines.train.trainer import read_tokens
from oxrl.errors import EngineError, WeightSyncError
from oxrl.functional.logprobs import head_logits
from oxrl.models.network import CausalNetwork
from oxrl.models.weights import fingerprint
from oxrl.types import FinishReason, Prefix, Request, TokenBatch

# Prompts are prefilled, and rows scored, at most this many tokens at a time, padding included.
PREFILL_TOKENS = 16384

# Columns of the integer state of a row; the stop tokens follow.
LAST, LENGTH, COUNT, LIMIT, SEED, TOP_K, STOPS = range(7)
# Columns of its float state. TEMPERATURE is 1 and STOCHASTIC 0 for greedy rows.
TEMPERATURE, STOCHASTIC, TOP_P = range(3)

PrefillKey = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _Slots:
    """State of the active rows, row i in slot i. `versions`: weight versions, as far as the last
    change of weights.
    """

    integers: Tensor
    floats: Tensor
    tokens: Tensor
    logprobs: Tensor
    requests: list[Request] = field(default_factory=list[Request])
    versions: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def reserve(self, response: int, stops: int) -> None:
        """Make room for responses of `response` tokens and `stops` stop tokens."""
        if response > self.tokens.shape[1]:
            extra = (0, response - self.tokens.shape[1])
            self.tokens, self.logprobs = pad(self.tokens, extra), pad(self.logprobs, extra)
        if STOPS + stops > self.integers.shape[1]:
            self.integers = pad(
                self.integers, (0, STOPS + stops - self.integers.shape[1]), value=-1
            )


class LocalSampler(Sampler):
    """Samples with continuous batching: prompts prefilled once for all their samples, finished rows
    replaced at once.

    Args:
        model: a Hugging Face causal LM with full attention in every layer. The trainer's own module
            is fine: its weights are then always current, and `update_weights` only drops what was
            computed from the old ones.
        max_rows: rows decoded at the same time.
        version: weight version that the model holds now.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 128,
        version: int = 0,
    ) -> None:
        config = model.config.get_text_config()
        layers = getattr(config, "layer_types", None)
        if layers and set(layers) != {"full_attention"}:
            raise EngineError(
                f"the local sampler needs full attention in every layer; {type(model).__name__} has {set(layers)}"
            )
        # What fits into the window that all layers of a Mistral have, if any, sees all of itself.
        window = None if layers else getattr(config, "sliding_window", None)
        context = min(getattr(config, "max_position_embeddings", None) or 2**31, window or 2**31)
        super().__init__(tokenizer, context=context, version=version)
        self.model = model
        self.network = CausalNetwork(model)
        self.max_rows = max_rows
        self._waiting: deque[Request] = deque()
        self._waiting_keys: Counter[PrefillKey] = Counter()
        # Keys and values [layers, 2, 1, heads, T, d] of a prompt and the logits [V] after it.
        self._prefilled: dict[PrefillKey, tuple[Tensor, Tensor]] = {}
        self._cache: RowCache | None = None
        self._stale = False
        # Whether any active row is greedy, or draws from a part of the vocabulary only.
        self._greedy = False
        self._restricted = False
        self._slots = _Slots(
            integers=torch.full((max_rows, STOPS), -1, dtype=torch.int64, device=model.device),
            floats=torch.zeros(max_rows, 3, device=model.device),
            tokens=torch.zeros(max_rows, 0, dtype=torch.int64, device=model.device),
            logprobs=torch.zeros(max_rows, 0, dtype=torch.float32, device=model.device),
        )

    def _accept(self, request: Request) -> None:
        self._waiting.append(request)
        self._waiting_keys[_key(request)] += 1

    @torch.inference_mode()
    def _work(self) -> None:
        if self._stale:
            self._recompute_cache()
        self._admit()
        if not self._finished:
            self._decode_step()

    @torch.inference_mode()
    def _stop(self, ids: set[str]) -> list[Finished]:
        stopped = [
            self._ended(request, "abort", request.prefix)
            for request in self._waiting
            if request.id in ids
        ]
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        for item in stopped:
            self._forget_prefill(_key(item.request))
        return stopped + self._release(
            [i for i, r in enumerate(self._slots.requests) if r.id in ids], "abort"
        )

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        """See RolloutEngine. Tensors that already are this model's memory are not copied, and get
        no fingerprint.

        Raises:
            WeightSyncError: a tensor is unknown, of another shape, or missing.
        """
        missing = dict(self.model.named_parameters())
        fingerprints: dict[str, str] = {}
        for name, tensor in (named for bucket in buckets for named in bucket):
            parameter = missing.pop(name, None)
            if parameter is None or parameter.shape != tensor.shape:
                has = "no such tensor" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise WeightSyncError(
                    f"got {name!r} of shape {tuple(tensor.shape)}; the sampler has {has}"
                )
            if parameter.data_ptr() != tensor.data_ptr():
                parameter.copy_(tensor)
                fingerprints[name] = fingerprint(parameter)
        if missing:
            raise WeightSyncError(f"{len(missing)} tensors were not sent, such as {min(missing)!r}")
        counts = self._slots.integers[:, COUNT].tolist()
        self._slots.versions = [
            self._versions(slot, counts[slot]) for slot in range(len(self._slots.requests))
        ]
        self._version = version
        self._prefilled.clear()
        self._stale = bool(self._slots.requests)
        return fingerprints

    @torch.inference_mode()
    def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        results: list[list[float]] = []
        for batch in _token_batches(rows):
            tokens, lengths = self._padded(batch)
            real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            inputs = TokenBatch(tokens=tokens, attention_mask=real, response_mask=real)
            scored = read_tokens(
                self.network, inputs, frozenset({"logprobs"}), temperature=temperature
            )
            aligned = cast(Tensor, scored.logprobs).tolist()
            results += [row[: len(ids)] for row, ids in zip(aligned, batch, strict=True)]
        return results

    def sleep(self) -> None:
        """Free the keys and values; active rows recompute theirs when they go on."""
        self._cache = None
        self._prefilled.clear()
        self._stale = bool(self._slots.requests)

    def wake(self) -> None:
        """Nothing to do: memory is taken when it is needed."""

    def close(self) -> None:
        """Drop every request and free the keys and values."""
        slots = self._slots
        for held in (
            self._waiting,
            self._waiting_keys,
            slots.requests,
            slots.versions,
            self._finished,
            self._here,
        ):
            held.clear()
        self.sleep()

    def _admit(self) -> None:
        """Move waiting requests into free slots and draw their first tokens.

        Free slots cost nothing, so they are filled some at a time: a prefill per slot would cost
            more than it gains.
        """
        while self._waiting:
            free = self.max_rows - len(self._slots.requests)
            if free < min(len(self._waiting), max(1, self.max_rows // 16)):
                return
            requests = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
            self._prefill(requests)
            first = len(self._slots.requests)
            self._advance(first, self._occupy(requests))
            for request in requests:
                self._forget_prefill(_key(request))

    def _prefill(self, requests: list[Request]) -> None:
        """Run every prompt that has not been run yet, once for all the requests that share it."""
        keys = [_key(request) for request in requests]
        missing = [key for key in dict.fromkeys(keys) if key not in self._prefilled]
        new = iter(missing)
        for batch in _token_batches([prompt + prefix for prompt, prefix in missing]):
            kvs, hidden = self._run_prompts(batch)
            for kv, logits in zip(kvs, head_logits(hidden, self.network.head), strict=True):
                self._prefilled[next(new)] = kv, logits
        prefilled = sum(len(prompt) + len(prefix) for prompt, prefix in missing)
        self._counted["prefill_tokens"] += prefilled
        self._counted["prefill_tokens_saved"] += (
            sum(len(prompt) + len(prefix) for prompt, prefix in keys) - prefilled
        )

    def _run_prompts(self, batch: Sequence[Sequence[int]]) -> tuple[list[Tensor], Tensor]:
        """Keys and values [layers, 2, 1, heads, T, d] of every row, and hidden states [P, H] at the
        rows' ends.
        """
        tokens, lengths = self._padded(batch)
        cache = DynamicCache()
        # Causal attention over right-padded rows needs no mask: what padding computes is never
        # attended to.
        output: Any = self.network.decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
        layers = cast(list[Any], cache.layers)
        kv = torch.stack([torch.stack((layer.keys, layer.values)) for layer in layers])
        ends = output.last_hidden_state[torch.arange(len(batch), device=tokens.device), lengths - 1]
        return [kv[:, :, row : row + 1, :, : len(ids)] for row, ids in enumerate(batch)], ends

    def _forget_prefill(self, key: PrefillKey) -> None:
        """One request less waits for this prompt; after the last one its keys and values are
        dropped.
        """
        self._waiting_keys[key] -= 1
        if self._waiting_keys[key] == 0:
            del self._waiting_keys[key]
            self._prefilled.pop(key, None)

    def _occupy(self, requests: list[Request]) -> Tensor:
        """Fill the next free slots with `requests` and return the logits [m, V] that their first
        tokens come from.
        """
        slots, first, device = self._slots, len(self._slots.requests), self.model.device
        longest = max(request.sampling.max_tokens for request in requests)
        slots.reserve(longest, max(len(request.sampling.stop_token_ids) for request in requests))
        new, width = slice(first, first + len(requests)), slots.integers.shape[1]
        slots.integers[new] = torch.tensor(
            [_integers(request, width) for request in requests], device=device
        )
        slots.floats[new] = torch.tensor([_floats(request) for request in requests], device=device)
        for slot, request in enumerate(requests, first):
            self._greedy |= request.sampling.temperature == 0
            self._restricted |= request.sampling.top_k > 0 or request.sampling.top_p < 1
            slots.requests.append(request)
            slots.versions.append(request.prefix.versions)
            if request.prefix.token_ids:
                known = len(request.prefix.token_ids)
                slots.tokens[slot, :known] = torch.tensor(request.prefix.token_ids, device=device)
                slots.logprobs[slot, :known] = torch.tensor(request.prefix.logprobs, device=device)
        members: dict[PrefillKey, list[int]] = {}
        for slot, request in enumerate(requests, first):
            members.setdefault(_key(request), []).append(slot)
        for key, sharing in members.items():
            self._fill(sharing, self._prefilled[key][0])
        return torch.stack([self._prefilled[_key(request)][1] for request in requests])

    def _decode_step(self) -> None:
        """Run the last token of every active row and draw the next one."""
        assert self._cache is not None
        active = len(self._slots.requests)
        integers = self._slots.integers[:active]
        positions = integers[:, LENGTH] - 1
        longest = int(positions.max()) + 1
        self._cache.reserve(longest)
        mask = self._cache.begin_step(active, positions, longest)
        with decoding_attention(self.model.config):
            output: Any = self.network.decoder(
                input_ids=integers[:, LAST, None],
                attention_mask=mask,
                position_ids=positions[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
        self._counted["decode_steps"] += 1
        self._counted["active_rows"] += active
        self._advance(0, head_logits(output.last_hidden_state[:, 0], self.network.head))

    def _advance(self, first: int, logits: Tensor) -> None:
        """Draw a token for the slots from `first` on, record it, and release the rows that it
        finishes.
        """
        slots = self._slots
        integers = slots.integers[first : first + len(logits)]
        temperature, stochastic, top_p = slots.floats[first : first + len(logits)].unbind(1)
        if self._restricted:
            logits = restrict(
                logits, temperature=temperature, top_k=integers[:, TOP_K], top_p=top_p
            )
        keys = noise_keys(integers[:, SEED], integers[:, COUNT])
        tokens, logprobs = draw(
            logits, keys, temperature=temperature, stochastic=stochastic if self._greedy else None
        )
        at = integers[:, COUNT, None]
        slots.tokens[first : first + len(logits)].scatter_(1, at, tokens[:, None])
        slots.logprobs[first : first + len(logits)].scatter_(1, at, logprobs[:, None])
        integers[:, LAST] = tokens
        integers[:, LENGTH : COUNT + 1] += 1
        done = (tokens[:, None] == integers[:, STOPS:]).any(1) | (
            integers[:, COUNT] >= integers[:, LIMIT]
        )
        self._counted["tokens"] += len(logits)
        if done.any():
            self._finished += self._release((done.nonzero().squeeze(1) + first).tolist(), None)

    def _release(self, ended: list[int], reason: FinishReason | None) -> list[Finished]:
        """Turn slots into completions and close the gaps they leave. `reason` None means stop or
        length.
        """
        if not ended:
            return []
        slots, device = self._slots, self.model.device
        picked = torch.tensor(ended, device=device)
        counts = slots.integers[picked, COUNT].tolist()
        tokens, logprobs = slots.tokens[picked].tolist(), slots.logprobs[picked].tolist()
        finished: list[Finished] = []
        for slot, count, ids, values in zip(ended, counts, tokens, logprobs, strict=True):
            request = slots.requests[slot]
            why: FinishReason = reason or (
                "stop" if ids[count - 1] in request.sampling.stop_token_ids else "length"
            )
            # A prefix has the log-probabilities it came with: float32 state would round them.
            known = request.prefix.logprobs
            sampled = Prefix(
                token_ids=tuple(ids[:count]),
                logprobs=(*known, *values[len(known) : count]),
                versions=self._versions(slot, count),
            )
            finished.append(self._ended(request, why, sampled))
        left = len(slots.requests) - len(ended)
        gone = set(ended)
        targets = [slot for slot in ended if slot < left]
        sources = [slot for slot in range(left, len(slots.requests)) if slot not in gone]
        if targets:
            source, target = (
                torch.tensor(sources, device=device),
                torch.tensor(targets, device=device),
            )
            for tensor in (slots.integers, slots.floats, slots.tokens, slots.logprobs):
                tensor[target] = tensor[source]
            if self._cache is not None:  # asleep, it is gone, and made anew from the slots
                self._cache.move(source, target, int(slots.integers[source, LENGTH].max()))
            for source, target in zip(sources, targets, strict=True):
                slots.requests[target], slots.versions[target] = (
                    slots.requests[source],
                    slots.versions[source],
                )
        del slots.requests[left:], slots.versions[left:]
        if not slots.requests:
            self._greedy = self._restricted = False
        return finished

    def _versions(self, slot: int, count: int) -> tuple[int, ...]:
        """Weight version of each of the first `count` response tokens."""
        known = self._slots.versions[slot]
        return known + (self._version,) * (count - len(known))

    def _recompute_cache(self) -> None:
        """After a change of weights: run what every active row has read so far once more."""
        slots, self._cache = self._slots, None
        active = len(slots.requests)
        state = zip(
            slots.requests,
            slots.integers[:active, COUNT].tolist(),
            slots.tokens[:active].tolist(),
            strict=True,
        )
        # The last token is not among them: the next decode step runs it.
        read = [(*request.prompt.token_ids, *ids[: count - 1]) for request, count, ids in state]
        slot = itertools.count()
        for batch in _token_batches(read):
            for kv in self._run_prompts(batch)[0]:
                self._fill([next(slot)], kv)
            self._counted["prefill_tokens"] += sum(map(len, batch))
        self._stale = False

    def _fill(self, slots: list[int], prefilled: Tensor) -> None:
        if self._cache is None:
            self._cache = RowCache(self.max_rows, prefilled)
        self._cache.fill(torch.tensor(slots, device=prefilled.device), prefilled)

    def _padded(self, batch: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(right-padded tokens [P, T], lengths [P])."""
        width = max(map(len, batch))
        device = self.model.device
        tokens = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in batch], device=device)
        return tokens, torch.tensor([len(ids) for ids in batch], device=device)

    def _progress(self) -> str:
        active = len(self._slots.requests)
        longest, limit = (
            self._slots.integers[:active, [COUNT, LIMIT]].amax(0).tolist() if active else (0, 0)
        )
        return (
            f"{active} rows are being decoded, the longest has {longest} of at most {limit} tokens, and "
            f"{len(self._waiting)} requests wait"
        )


def _key(request: Request) -> PrefillKey:
    return request.prompt.token_ids, request.prefix.token_ids


def _integers(request: Request, width: int) -> list[int]:
    sampling = request.sampling
    known = len(request.prefix.token_ids)
    top_k = sampling.top_k if sampling.temperature > 0 else 0
    state = [
        0,
        len(request.prompt.token_ids) + known,
        known,
        sampling.max_tokens,
        request.seed,
        top_k,
    ]
    state += sampling.stop_token_ids
    return state + [-1] * (width - len(state))


def _floats(request: Request) -> list[float]:
    sampling = request.sampling
    return (
        [sampling.temperature, 1.0, sampling.top_p] if sampling.temperature > 0 else [1.0, 0.0, 1.0]
    )


def _token_batches(rows: Sequence[Sequence[int]]) -> Iterator[Sequence[Sequence[int]]]:
    """Consecutive rows whose padded size stays within PREFILL_TOKENS; a longer row goes alone."""
    start = 0
    longest = 0
    for index, row in enumerate(rows):
        longest = max(longest, len(row))
        if index > start and longest * (index + 1 - start) > PREFILL_TOKENS:
            yield rows[start:index]
            start, longest = index, len(row)
    if rows:
        yield rows[start:]
