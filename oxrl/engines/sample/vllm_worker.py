"""The methods that oxRL adds to each of vLLM's workers, to load weights, to sample and to score.

vLLM mixes `WorkerExtension` into its own worker class (`worker_extension_cls`); every method is
called on all workers at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys, restrict
from oxrl.engines.sample.vllm_weights import held_pieces
from oxrl.engines.train import Bucket, Fingerprints
from oxrl.engines.transport.base import BASE, LINE_BROKE, MADE, LineError
from oxrl.engines.transport.ends import Receiver, name_of, receiver
from oxrl.engines.transport.line import Meeting, Seat
from oxrl.functional.logprobs import NO_CHANCE
from oxrl.models.fingerprints import HeldPieces, fingerprint
from oxrl.models.load import LoadOptions, load_policy
from oxrl.models.lora import merged_weights
from oxrl.models.weights import buckets, sent_bytes
from oxrl.types import TensorMap, Tensors

# (name, how to get the tensor): its arguments are handles when the tensor lies in another process's
# GPU memory.
Payload = list[tuple[str, Callable[..., Tensor], tuple[Any, ...]]]
RELOAD = "model_executor.model_loader.reload"


def vllm_module(name: str) -> Any:
    """Import a module of vLLM, an extra, where it is used."""
    return import_module(f"vllm.{name}")


class WorkerExtension:
    """Methods of a vLLM worker; names start with `oxrl_` so that they cannot shadow vLLM's."""

    model_runner: Any
    device: torch.device
    rank: int
    oxrl_receiver: Receiver | None = None
    # Of a policy with an adapter: the weights under it, and what its term is multiplied by.
    oxrl_base: TensorMap | None = None
    oxrl_base_prints: Fingerprints
    oxrl_scale: float
    # Whether what is being loaded goes straight to where the model has it.
    oxrl_in_place = False

    def oxrl_install(self, head: int | None) -> None:
        """Sample as the local sampler does, and let prompt log-probabilities have a temperature.

        Args:
            head: see `vllm_columns.head_size`: what is returned of sampled tokens is read there.
        """
        runner = self.model_runner
        runner.sampler.topk_topp_sampler.forward = partial(_sample, runner)
        self.oxrl_score_plainly = runner._get_prompt_logprobs_dict
        runner._get_prompt_logprobs_dict = self.oxrl_score
        self.oxrl_temperature = 1.0
        if head is not None:
            sampler = runner.sampler
            sampler.gather_logprobs = partial(_gathered, sampler.gather_logprobs, head)

    def oxrl_ban(self, tokens: list[int], only: list[int]) -> None:
        """Give tokens no probability, wherever logits are read: the others share all of it.

        Args:
            tokens: that are never sampled.
            only: if there are any, no others than these are.
        """
        model = self.model_runner.get_model()
        if tokens or only:
            model.compute_logits = partial(_allowed, model.compute_logits, tokens, only)

    def oxrl_keep_base(self, model: str, options: LoadOptions, scale: float) -> None:
        """Keep these weights on the CPU, and from now on merge adapters into them."""
        base = load_policy(model, options).named_parameters()
        self.oxrl_base = {name: weight.detach() for name, weight in base}
        prints = {name: fingerprint(weight) for name, weight in self.oxrl_base.items()}
        self.oxrl_base_prints = {BASE + name: found for name, found in prints.items()}
        self.oxrl_scale = scale

    def oxrl_set_score_temperature(self, temperature: float) -> None:
        self.oxrl_temperature = temperature

    def oxrl_score(self, *inputs: Any) -> Any:
        """vLLM's prompt log-probabilities, of logits / temperature; sampling is left as it is."""
        sampler = self.model_runner.sampler
        sampler.compute_logprobs = self.oxrl_tempered_logprobs
        try:
            return self.oxrl_score_plainly(*inputs)
        finally:
            del sampler.compute_logprobs

    def oxrl_tempered_logprobs(self, logits: Tensor) -> Tensor:
        tempered = logits.float() / self.oxrl_temperature
        return tempered.log_softmax(-1)

    def oxrl_begin_load(self) -> None:
        model = self.model_runner.get_model()
        self.oxrl_unloaded = {name for name, _ in model.named_parameters()}
        self.oxrl_received: dict[str, str] = {}
        self.oxrl_adapter: Tensors = {}
        self.oxrl_shapes: dict[str, torch.Size] = {}
        # vLLM's reload builds every layer anew and copies it to where the old one is, which takes
        # twice as long as to load it there.
        self.oxrl_in_place = self.device.type == "cpu" and _is_plain(model)
        if not self.oxrl_in_place:
            vllm_module(RELOAD).initialize_layerwise_reload(model)

    def oxrl_load(self, payload: Payload) -> None:
        """Load a bucket that whoever calls has."""
        self._oxrl_take([(name, make(*handle)) for name, make, handle in payload])

    def oxrl_device(self) -> str:
        """Return the GPU of this worker; empty on a CPU."""
        return name_of(self.device)

    def oxrl_join(self, meeting: Meeting, seats: list[list[Seat]], address: str) -> None:
        """Meet the ranks that train."""
        self.oxrl_receiver = None
        own = seats[self.rank]
        self.oxrl_receiver = receiver(meeting, own, address=address, device=self.device)

    def oxrl_receive(self) -> None:
        """Load everything that the training ranks send."""
        if self.oxrl_receiver is None:
            raise LineError(f"{LINE_BROKE} is not laid")
        with closing(self.oxrl_receiver.buckets()) as buckets:
            for bucket in buckets:
                self._oxrl_take(bucket)

    def _oxrl_take(self, bucket: Bucket) -> None:
        """Load what arrived; of an adapter, put it aside until all of it is here."""
        if self.oxrl_base is None:
            self._oxrl_load(bucket, "")
            return
        for name, given in bucket:
            self.oxrl_adapter[name] = given.to(self.device)
            self.oxrl_received[name] = fingerprint(self.oxrl_adapter[name])

    def _oxrl_merge(self, base: TensorMap) -> None:
        """Load the weights that come of the adapter."""
        self.oxrl_received.update(self.oxrl_base_prints)
        here = ((name, weight.to(self.device)) for name, weight in base.items())
        merged = merged_weights(here, self.oxrl_adapter, self.oxrl_scale)
        for bucket in buckets(merged, limit=sent_bytes(self.device)):
            self._oxrl_load(bucket, MADE)
        self.oxrl_adapter = {}

    def _oxrl_load(self, bucket: Bucket, kind: str) -> None:
        """Load tensors; fingerprints are of what is loaded, cast and on this worker's device."""
        dtype = self.model_runner.model_config.dtype
        tensors: Bucket = []
        for name, given in bucket:
            tensor = given.to(self.device, dtype)
            self.oxrl_received[kind + name] = fingerprint(tensor)
            self.oxrl_shapes[name] = tensor.shape
            tensors.append((name, tensor))
        self.oxrl_unloaded -= self.model_runner.get_model().load_weights(tensors) or set()

    def oxrl_finish_load(self) -> tuple[dict[str, str], list[str]]:
        """Finish; return (fingerprint of every tensor received, own weights without one)."""
        runner = self.model_runner
        if self.oxrl_base is not None and self.oxrl_adapter:
            self._oxrl_merge(self.oxrl_base)
        if not self.oxrl_in_place:
            vllm_module(RELOAD).finalize_layerwise_reload(runner.get_model(), runner.model_config)
        if self.device.type == "cpu":
            _repack(runner.get_model())
        runner.reset_encoder_cache()
        runner.reset_mm_cache()
        return self.oxrl_received, sorted(self.oxrl_unloaded)

    def oxrl_held(self) -> HeldPieces:
        """See `held_pieces`: what this worker computes with now."""
        runner = self.model_runner
        return held_pieces(runner.get_model(), self.oxrl_shapes, runner.model_config.dtype)


def payload(bucket: Bucket, *, other_processes: bool) -> Payload:
    """Prepare the tensors of `bucket` for workers: as they are, or as CUDA IPC handles.

    Args:
        other_processes: whether workers live in other processes; those share CUDA memory only.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    handed_over: Payload = []
    for name, tensor in bucket:
        if other_processes and tensor.is_cuda:
            make, handle = reduce_tensor(tensor)
            handed_over.append((name, make, handle))
        else:
            handed_over.append((name, _same, (tensor,)))
    return handed_over


def _allowed(
    compute: Callable[..., Tensor | None], tokens: list[int], only: list[int], *inputs: Tensor
) -> Tensor | None:
    """Take the tokens that are never sampled out of the logits of vLLM's model; see `oxrl_ban`."""
    logits = compute(*inputs)
    if logits is None:  # of workers that share a model only the first has them
        return None
    if not only:
        logits[..., tokens] = NO_CHANCE
        return logits
    restricted = torch.full_like(logits, NO_CHANCE)
    restricted[..., only] = logits[..., only]
    return restricted


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _is_plain(model: Any) -> bool:
    """True if all layers multiply by the very weights that they load, and derive no others."""
    layers = "model_executor.layers"
    plain_methods = (
        vllm_module(f"{layers}.linear").UnquantizedLinearMethod,
        vllm_module(f"{layers}.vocab_parallel_embedding").UnquantizedEmbeddingMethod,
    )
    attention = vllm_module(f"{layers}.attention").Attention
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in plain_methods:
            return False
        if getattr(module, "cpu_linear", linear) is not linear:
            return False
        # What attention does after loading is about scales of quantised keys and values.
        if hasattr(module, "process_weights_after_loading") and type(module) is not attention:
            return False
    return True


def _repack(model: Any) -> None:
    """Renew the packed copies that vLLM's CPU layers compute with: its reload leaves those of fused
    experts as they are.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


def _sample(
    runner: Any, logits: Tensor, generators: Any, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Replace vLLM's random sampler, with the samples that LocalSampler would give.

    vLLM's own samples depend on how often a generator was used; a continued prefix would not go on
    where it stopped. Here noise is a function of (seed, position).

    Args:
        runner: vLLM's model runner; row i of `logits` belongs to its request i.
        logits: [n, V] float32, divided by the temperature already.
        top_k: [n]; None: off.
        top_p: [n]; None: off.

    Returns:
        (token ids [n], logprobs [n, V] of the distribution sampled from).
    """
    seeds: list[int] = []
    positions: list[int] = []
    shares: list[float] = []
    for name in runner.input_batch.req_ids[: len(logits)]:
        request = runner.requests[name]
        extra = request.sampling_params.extra_args or {"seed": 0, "known": 0, "min_p": 0.0}
        shares.append(extra["min_p"])
        seeds.append(extra["seed"])
        positions.append(extra["known"] + len(request.output_token_ids))
    device = logits.device
    keys = noise_keys(torch.tensor(seeds, device=device), torch.tensor(positions, device=device))
    if top_k is not None or top_p is not None or any(shares):
        ones = logits.new_ones(len(logits))
        if top_k is None:
            top_k = logits.new_zeros(len(logits))  # keeps all
        if top_p is None:
            top_p = ones
        min_p = torch.tensor(shares, device=device)
        logits = restrict(logits, temperature=ones, top_k=top_k, top_p=top_p, min_p=min_p)
    noise = gumbel_noise(keys, logits.shape[1], logits.dtype)
    tokens = noise.add_(logits).argmax(1)
    return tokens, logits.log_softmax(-1, dtype=torch.float32)


def _gathered(
    gather: Callable[..., Any], head: int, logprobs: Tensor, count: int, token_ids: Tensor
) -> Any:
    """Gather tokens of a distribution, and between the sampled one and the likeliest the rest.

    Args:
        gather: vLLM's own.
        head: the rest is all but so many of the likeliest.
        logprobs: [n, V].
        count: of what is asked for beside the sampled token: the rest, and the likeliest.
        token_ids: [n], the sampled ones.

    Returns:
        vLLM's LogprobsTensors, [n, 1 + count]; an id of the rest means nothing.
    """
    if not count:
        return gather(logprobs, 0, token_ids)
    found = gather(logprobs, count - 1, token_ids)
    ids = found.logprob_token_ids
    # From the log-probabilities of the others: 1 minus the sum is rounding where little is left.
    others = logprobs.scatter(1, ids[:, 1 : 1 + head].long(), -torch.inf)
    rest = torch.logsumexp(others, 1, keepdim=True)
    return found._replace(
        logprob_token_ids=torch.cat([ids[:, :1], ids[:, :1], ids[:, 1:]], 1),
        logprobs=torch.cat([found.logprobs[:, :1], rest, found.logprobs[:, 1:]], 1),
    )


def sampled_logprobs(flat: Any, tokens: Sequence[int]) -> list[float]:
    """Return each sampled token's logprob, which is the first of its position in FlatLogprobs."""
    return [flat.logprobs[start] for start in flat.start_indices[: len(tokens)]]
