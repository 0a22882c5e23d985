"""VllmEngine: RolloutEngine on vLLM, run inside this process and driven step by step.

vLLM takes over its process (threads, random state, torch.distributed), so a trainer must live in
another one: a run hosts this engine in a Ray actor. Everything the constructor takes is plain and
picklable for that reason.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.determinism import VLLM_BATCH_INVARIANT
from oxrl.engines.sample import Finished, Responses, RowLogprobs, ShownImages, TokenRows
from oxrl.engines.sample.parked import check_polled, requests_in, run_of
from oxrl.engines.sample.sampler import Sampler
from oxrl.engines.sample.vllm_columns import RETURNED, head_size, returned_tokens
from oxrl.engines.sample.vllm_images import image_prompt
from oxrl.engines.sample.vllm_worker import payload, sampled_logprobs, vllm_module
from oxrl.engines.train import Buckets, Fingerprints
from oxrl.engines.transport.base import LINE_BROKE, LineError
from oxrl.engines.transport.line import Meeting, Seats
from oxrl.errors import DeadlineError, EngineError, MissingExtraError, WeightSyncError
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.dims import model_dims
from oxrl.modelfiles.folder import vision_family
from oxrl.models.fingerprints import joined_reports
from oxrl.models.image_features import load_image_processor
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.token_mask import banned_tokens
from oxrl.tables.columns import NOTHING_MORE, Columns
from oxrl.types import Entries, FinishReason, Metrics, Request, Sampling, TokenRun
from oxrl.usercode.messages import Json, fields_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from oxrl.data.image_store import ImageStore

ENVIRONMENT = {
    # The engine core in this process: no start-up of a second one, and weights are handed over by
    # reference.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The runner whose sampler `vllm_worker` replaces.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Logging is set up by this module.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Without these, vLLM on CPU compiles its sampler at the first call (10 s) and pins threads to NUMA
# nodes.
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CPU_KV_CACHE_GB = 0.25
# Of models that read images. vLLM's own processor wants a tokenizer, though it is asked for
# nothing; pixels are computed before they come here, are not normalised by the model a second time
# (as vLLM has the Qwen families do), and are not kept twice.
IMAGE_SETTINGS: Mapping[str, object] = {
    "skip_tokenizer_init": False,
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,
    "skip_mm_profiling": True,
}
# How names of the requests that only score begin, and the longest wait for them.
SCORING = "oxrl-score-"
SCORING_S = 120.0
# What vLLM raises over a weight that it cannot load; of workers in other processes it raises one.
LOADING_ERRORS = (
    RuntimeError,
    ValueError,
    KeyError,
    AssertionError,
    AttributeError,
    LineError,
)


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """The options of vLLM.

    log_file: where vLLM's messages go, and what this process prints while vLLM starts.
    dtype: float32 or bfloat16.
    max_rows: requests decoded at the same time.
    tensor_parallel: devices (on CPU: processes) that share one copy of the model.
    gpu_memory_fraction: share of the GPU's memory for weights and keys and values; unused on CPU.
    kv_cache_gb: memory of the keys and values in GB per device, instead of that share; on CPU None
        is 0.25 GB.
    max_model_len: longest prompt plus response, in tokens; None: the model's context.
    revision: of the model on the hub; None: its main branch.
    batch_invariant: on a GPU, compute a row alike whatever is beside it; on CPU it means nothing.
    adapter_scale: of the policy's adapter, which is all that is delivered; it is merged into the
        model's weights here, and a copy of these is kept on the CPU. None: every weight is
        delivered.
    keep_cache: a delivery leaves running requests their keys and values of older weights, and all
        others never find those; nothing proves which weights a log-probability is of then.
    further: arguments of vLLM's EngineArgs, over those that follow from the others.
    """

    log_file: str
    dtype: str = "float32"
    max_rows: int = 128
    tensor_parallel: int = 1
    gpu_memory_fraction: float = 0.5
    kv_cache_gb: float | None = None
    max_model_len: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    batch_invariant: bool = False
    adapter_scale: float | None = None
    keep_cache: bool = False
    further: Mapping[str, object] = field(default_factory=dict)


@dataclass
class _Active:
    """A request in vLLM, with the weight versions and columns of what is known to be sampled since
    it was put there.

    request: with all that was sampled before as its prefix. asked: as it was submitted.

    The tokens themselves stay in vLLM until it ends: to take them over step by step costs up to a
    twentieth of the processor's time with a small model.
    """

    request: Request
    asked: Request
    columns: dict[str, Entries]
    versions: list[int] = field(default_factory=list)


class VllmEngine(Sampler):
    """Samples with vLLM, one request per sample; samples of a prompt share its keys and values.

    Tokens are sampled with the local sampler's noise, a function of (seed, position): the same
    request gives the same sample on both engines up to rounding, alone or in any batch, continued
    or not.

    Args:
        model: a directory with config.json, tokenizer files and initial weights, a hub name or
            `builtin:...`.
        images: where those of the prompts are; None: no prompt has any.
        only: tokens that may be sampled at all and share all probability; empty: all may be, but
            for those that stand for images.
        columns: recorded of every token, of those in RETURNED.

    Raises:
        MissingExtraError: vLLM is not installed.
        EngineError: vLLM does not start, and names the log file; or caches are to be kept of a
            model that reads images.
    """

    TOTALS = (*Sampler.TOTALS, "preemptions", "kv_cache_frac")

    def __init__(
        self,
        model: str,
        options: VllmOptions,
        *,
        images: ImageStore | None = None,
        only: Collection[int] = (),
        columns: Columns = NOTHING_MORE,
    ) -> None:
        if options.keep_cache and images is not None:
            raise EngineError(
                "rollout.swap is keep, and what vLLM keeps of images has no version: set it to "
                "recompute"
            )
        self._on_cpu = not torch.cuda.is_available()
        os.environ.update(ENVIRONMENT)
        if self._on_cpu:
            os.environ.update(CPU_ENVIRONMENT)
        elif options.batch_invariant:
            os.environ.update(VLLM_BATCH_INVARIANT)
        tokenizer = load_tokenizer(
            model, trust_remote_code=options.trust_remote_code, revision=options.revision
        )
        super().__init__(tokenizer, context=0)  # vLLM says below how long it is
        self._several = options.tensor_parallel > 1
        self._keep_cache = options.keep_cache
        # Weights that were loaded so far, one after the other: also perturbed ones, and those of an
        # attempt that failed.
        self._loads = 0
        self._active: dict[str, _Active] = {}
        self._scored: dict[str, list[float]] = {}
        self._scoring = itertools.count()
        self.images = images
        self._columns = columns
        with _noise_to(options.log_file), _folder(model, tokenizer) as folder:
            settings = {"model": folder, **_settings(options, on_cpu=self._on_cpu)}
            if vision_family(model) is not None:
                settings |= IMAGE_SETTINGS
            dims = model_dims(folder)
            if dims is not None and not dims.tied:  # by its files, of which vLLM reads config.json
                settings["hf_overrides"] = {"tie_word_embeddings": False}
            self._engine = self._start(settings, options.log_file)
            if self._on_cpu:
                self._check_heads()
        self._context = int(self._engine.model_config.max_model_len)
        self._rpc("oxrl_install", head_size(columns))
        if options.adapter_scale is not None:
            under = LoadOptions(
                dtype=getattr(torch, options.dtype),
                trust_remote_code=options.trust_remote_code,
                revision=options.revision,
            )
            self._rpc("oxrl_keep_base", model, under, options.adapter_scale)
        self._rpc("oxrl_ban", banned_tokens(self._engine.model_config.hf_config), sorted(only))

    def _start(self, settings: Mapping[str, Any], log_file: str) -> Any:
        """vLLM's engine, which reports every step to `_count`."""
        stat_logger = SimpleNamespace(
            record=self._count,
            log=_ignore,
            log_engine_initialized=_ignore,
            record_sleep_state=_ignore,
        )
        try:
            engine = vllm_module("v1.engine.llm_engine").LLMEngine
            arguments = vllm_module("engine.arg_utils").EngineArgs
        except ImportError as error:
            raise MissingExtraError(
                f"inference_engine.name is vllm and importing vLLM fails ({error}); install it: "
                '`make env-scale` on a CPU machine, `pip install "oxrl[vllm]"` for CUDA'
            ) from error
        try:
            started = engine.from_engine_args(
                arguments(**settings), stat_loggers=[lambda config, index: stat_logger]
            )
        except (RuntimeError, ValueError, OSError, AssertionError) as error:
            # What vLLM calls its limit is no name that can be set here.
            told = str(error).replace("max_model_len", "model.max_length")
            raise EngineError(f"vLLM does not start ({told}); its messages: {log_file}") from error
        # Nobody reads what Prometheus would be told after every step.
        prometheus = vllm_module("v1.metrics.loggers").PrometheusStatLogger
        manager = started.logger_manager
        manager.stat_loggers = [t for t in manager.stat_loggers if not isinstance(t, prometheus)]
        return started

    def _check_heads(self) -> None:
        """Refuse a size of heads that vLLM's CPU attention would refuse late, by a number."""
        attention = vllm_module("v1.attention.backends.cpu_attn").CPUAttentionBackend
        known = attention.get_supported_head_sizes()
        size = self._engine.model_config.get_head_size()
        if size not in known:
            raise EngineError(
                f"vLLM on CPU has no attention for heads of {size} (only {known}): "
                "use another model"
            )

    def _accept(self, request: Request) -> None:
        self._put(request, request.prefix)

    def _put(self, asked: Request, known: TokenRun) -> None:
        """Put a request into vLLM, of which some tokens are known: it goes on behind them."""
        request = replace(asked, prefix=known)
        sampling = request.sampling
        prefix = request.prefix
        cuts = sampling if sampling.temperature > 0 else Sampling()
        count = len(prefix.token_ids)
        self._add(
            request.id,
            [*request.prompt.token_ids, *prefix.token_ids],
            request.prompt.images,
            temperature=sampling.temperature,
            top_p=cuts.top_p,
            top_k=cuts.top_k,
            max_tokens=sampling.max_tokens - count,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=returned_tokens(sampling, self._columns),
            extra_args={"seed": request.seed, "known": count, "min_p": cuts.min_p},
        )
        columns: dict[str, Entries] = dict.fromkeys(self._columns, ())
        self._active[request.id] = _Active(request, asked, columns)

    def _add(
        self, name: str, tokens: list[int], images: Sequence[str] = (), **parameters: Any
    ) -> None:
        sampling: Any = vllm_module("sampling_params")
        params = sampling.SamplingParams(
            # A request's own stop tokens are all that stop it.
            ignore_eos=True,
            output_kind=sampling.RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            flat_logprobs=True,
            **parameters,
        )
        # A part of the hash of every block: what other weights computed is not found.
        salt = {"cache_salt": f"load {self._loads}"} if self._keep_cache else {}
        prompt: Mapping[str, object] = {"prompt_token_ids": tokens, **salt}
        if images:
            if self.images is None:
                raise EngineError("a request has images, and this sampler was given none")
            prompt = image_prompt(tokens, images, self.images)
        self._engine.add_request(name, prompt, params)

    def _stop(self, ids: set[str]) -> Responses:
        stopped: Responses = []
        for name in [name for name in self._active if name in ids]:
            state = self._state(name)
            stopped.append(self._end(name, "abort", *_returned(state)))
        self._engine.abort_request([item.request.id for item in stopped])
        return stopped

    def _state(self, name: str) -> Any:
        """Return vLLM's state of a request that is in it."""
        processor = self._engine.output_processor
        [own_name] = processor.external_req_ids[name]
        return processor.request_states[own_name]

    def _note_versions(self) -> None:
        """Note that all tokens sampled since the last call are of the weights loaded now, and take
        over what is recorded of them: vLLM forgets that where it interrupts a request.
        """
        for name, active in self._active.items():
            self._note(active, *_returned(self._state(name)))

    def _note(self, active: _Active, tokens: Sequence[int], logprobs: Any) -> None:
        """Note the same of one request, of which vLLM has sampled these tokens."""
        new = len(tokens) - len(active.versions)
        active.versions += [self._version] * new
        self._counted["tokens"] += new
        for name, known in active.columns.items():
            column = self._columns[name]
            entries = RETURNED[name](active.request, tokens, logprobs, column)
            active.columns[name] = (*known, *entries[len(known) :])

    def _end(
        self, name: str, reason: FinishReason, tokens: Sequence[int], logprobs: Any
    ) -> Finished:
        """Take a request out with what vLLM has sampled of it, after its own prefix."""
        active = self._active.pop(name)
        self._note(active, tokens, logprobs)
        return self._ended(active.asked, reason, _known(active, tokens, logprobs))

    def state(self) -> Json:
        """See ParkingEngine. What is in vLLM is in the order in which it was put there."""
        check_polled(self._finished)
        self._note_versions()
        rows = [{"id": name, **fields_of(known)} for name, known in self._sampled().items()]
        return {"round": self.round, "rows": [rows], "waiting": [], "kept": self._keep_cache}

    def restore(self, state: Json, requests: Mapping[str, Request]) -> None:
        """See ParkingEngine, but for the bytes: tokens and versions are those of the engine that
        gave the state, log-probabilities differ by rounding.
        """
        own = requests_in(state, requests)
        lines = [line for lane in state["rows"] for line in lane]
        known = {line["id"]: run_of(line, self._columns, self._columns) for line in lines}
        self.abort(tuple(self._here))
        self._finished = []
        for id, request in own.items():
            self._here.add(id)
            self._put(request, known[id])
        self.round = state["round"]

    def _sampled(self) -> dict[str, TokenRun]:
        """Return all that is known to be sampled of the requests in vLLM, in their order."""
        return {
            name: _known(active, *_returned(self._state(name)))
            for name, active in self._active.items()
        }

    def _progress(self) -> str:
        self._note_versions()
        lengths = [
            len(active.request.prefix.token_ids) + len(active.versions)
            for active in self._active.values()
        ]
        longest = max(lengths, default=0)
        return f"{len(self._active)} requests are in vLLM, the longest has {longest} tokens"

    def update_weights(self, buckets: Buckets, version: int) -> Fingerprints:
        """See RolloutEngine. Running requests keep their tokens and compute their keys again.

        Raises:
            WeightSyncError: vLLM cannot load a tensor, some of its weights got none, or its workers
                disagree.
        """
        return self._update(partial(self._load, buckets), version)

    @property
    def devices(self) -> tuple[str, ...]:
        """See Receives: those of vLLM's workers, each of which receives."""
        return tuple(self._rpc("oxrl_device"))

    def join(self, meeting: Meeting, seats: Seats, address: str) -> None:
        """See Receives."""
        self._rpc("oxrl_join", meeting, [list(own) for own in seats], address)

    def receive(self, version: int) -> Fingerprints:
        """See Receives: as `update_weights`, of what the ranks send to the workers."""
        return self._update(self._receive, version)

    def _receive(self) -> Exception | None:
        try:
            self._rpc("oxrl_receive")
        except LOADING_ERRORS as error:
            return error
        return None

    def _update(self, load: Callable[[], Exception | None], version: int) -> Fingerprints:
        """Have the workers load; what they received."""
        self._note_versions()
        self._rpc("oxrl_begin_load")
        try:
            failure = load()
        finally:
            # Also after a failure, of vLLM or of whoever sends: it puts vLLM's model back together.
            reports = self._rpc("oxrl_finish_load")
            self._loads += 1
            self._forget_computed()
        received, unloaded = reports[0]
        if failure is not None and LINE_BROKE in str(failure):
            raise LineError(str(failure)) from failure
        if failure is not None:
            raise WeightSyncError(
                f"vLLM cannot load the weights: {type(failure).__name__}: {failure}"
            ) from failure
        if unloaded:
            raise WeightSyncError(
                f"{len(unloaded)} weights of vLLM's model got nothing, such as {unloaded[0]}"
            )
        if any(report != reports[0] for report in reports):
            raise WeightSyncError("vLLM's tensor-parallel workers received different weights")
        self._version = version
        return received

    def _forget_computed(self) -> None:
        """Drop what the weights before computed, but for what may be kept of it."""
        if self._keep_cache:
            # Those that wait have nothing to keep, and would look for entries of what is gone.
            self._put_back(self._take_out(self._active.keys() - self._running()))
            return
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.engine_core.reset_encoder_cache()

    def held(self) -> Fingerprints:
        """See RolloutEngine. On a CPU, packed weights are read through the layers that use them."""
        return joined_reports(self._rpc("oxrl_held"))

    def _load(self, buckets: Buckets) -> Exception | None:
        """Load until the end, or until vLLM fails; return its error."""
        for bucket in buckets:
            try:
                self._rpc("oxrl_load", payload(bucket, other_processes=self._several))
            except LOADING_ERRORS as error:
                return error
        return None

    def logprobs(
        self,
        rows: TokenRows,
        temperature: float = 1.0,
        shown: ShownImages = (),
    ) -> RowLogprobs:
        """See RolloutEngine. Rows must be at least one token shorter than the context.

        What is being sampled does not go on meanwhile, as it would in vLLM's steps, by weights that
        are perhaps those of a perturbed copy.
        """
        with self._nothing_sampled(rows):
            return self._scores(rows, temperature, shown)

    @contextmanager
    def _nothing_sampled(self, rows: TokenRows) -> Iterator[None]:
        """Take every request out of vLLM, and put it in again in its place, while rows are scored.

        Where caches are kept, one that runs is only hidden from the scheduler: in its blocks are
        keys and values that nothing could compute again. Where these leave the rows no room, it is
        taken out as well, and read again by the weights that are loaded then.
        """
        self._note_versions()
        scheduler = self._scheduler
        running = scheduler.running
        kept = self._running() if self._keep_cache and self._has_room_for(rows) else set[str]()
        out = self._take_out(self._active.keys() - kept)
        hidden = self._active
        self._active = {}
        if kept:
            scheduler.running = []
        try:
            yield
        finally:
            if kept:
                scheduler.running = running
            self._active = hidden
            self._put_back(out)

    def _take_out(self, names: Collection[str]) -> list[tuple[Request, TokenRun]]:
        """Take requests out of vLLM, in their order; each as it was asked, and what is known."""
        taken: list[tuple[Request, TokenRun]] = []
        for name in [name for name in self._active if name in names]:
            known = _known(self._active[name], *_returned(self._state(name)))
            taken.append((self._active.pop(name).asked, known))
        self._engine.abort_request([asked.id for asked, _ in taken])
        return taken

    def _put_back(self, taken: Sequence[tuple[Request, TokenRun]]) -> None:
        for asked, known in taken:
            self._put(asked, known)

    @property
    def _scheduler(self) -> Any:
        """vLLM's scheduler, which is in this process."""
        return self._engine.engine_core.engine_core.scheduler

    def _running(self) -> set[str]:
        """Return the names of requests that have keys and values in vLLM."""
        running = {request.request_id for request in self._scheduler.running}
        own_names = self._engine.output_processor.external_req_ids
        return {name for name in self._active if running.intersection(own_names[name])}

    def _has_room_for(self, rows: TokenRows) -> bool:
        """Return whether vLLM can read every row, one at a time, beside what runs."""
        manager = self._scheduler.kv_cache_manager
        block = self._engine.vllm_config.cache_config.block_size
        blocks = max(map(len, rows), default=0) // block + 2
        groups = len(manager.kv_cache_config.kv_cache_groups)
        return manager.block_pool.get_num_free_blocks() >= blocks * groups

    def _scores(self, rows: TokenRows, temperature: float, shown: ShownImages) -> RowLogprobs:
        self._rpc("oxrl_set_score_temperature", temperature)
        names = [f"{SCORING}{next(self._scoring)}" for _ in rows]
        for name, row, images in zip(names, rows, shown or [()] * len(rows), strict=True):
            self._add(name, list(row), images, temperature=0.0, max_tokens=1, prompt_logprobs=0)
        start = monotonic()
        while not self._scored.keys() >= set(names):
            self._work()
            if monotonic() - start > SCORING_S:
                raise DeadlineError(f"waited {SCORING_S:g} s for vLLM to score {len(rows)} rows")
        return [self._scored.pop(name) for name in names]

    def metrics(self) -> Metrics:
        self._note_versions()
        metrics = super().metrics()
        saved = metrics["rollout/prefill_tokens_saved"]
        read = metrics["rollout/prefill_tokens"]
        metrics["rollout/prefix_hit_frac"] = saved / max(1.0, saved + read)
        return metrics

    def sleep(self) -> None:
        """Give GPU memory back: weights move to the CPU, keys and values are dropped.

        On a CPU there is nothing to give.
        """
        self._engine.reset_prefix_cache(reset_running_requests=True)
        if not self._on_cpu:
            self._engine.sleep(level=1, mode="keep")

    def wake(self) -> None:
        """Take the memory again; running requests recompute their keys and values."""
        if not self._on_cpu:
            self._engine.wake_up()

    def close(self) -> None:
        """Drop every request and end vLLM's workers."""
        self.abort(list(self._active))
        self._engine.engine_core.shutdown()

    def _rpc(self, method: str, *inputs: Any) -> list[Any]:
        """Call a method of `vllm_worker.WorkerExtension` on every worker; their answers."""
        return self._engine.collective_rpc(method, args=inputs)

    def _work(self) -> None:
        """Make one forward pass of vLLM's batch, and take out the requests that it ended."""
        for output in self._engine.step():
            name = output.request_id
            if name.startswith(SCORING):
                self._scored[name] = [0.0, *output.prompt_logprobs.logprobs]
                continue
            sample = output.outputs[0]
            # Whatever else ends a request left it incomplete.
            complete = sample.finish_reason in ("stop", "length")
            reason: FinishReason = sample.finish_reason if complete else "abort"
            ended = self._end(name, reason, sample.token_ids, sample.logprobs)
            self._finished.append(ended)

    def _count(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Add up what vLLM reports after every step, but for steps that only score a probe.

        How often one is scored depends on when a run was resumed, which no metric may.
        """
        if not self._active:
            return
        counted = self._counted
        if scheduler_stats is not None:
            prefix = scheduler_stats.prefix_cache_stats
            counted["decode_steps"] += 1
            counted["active_rows"] += scheduler_stats.num_running_reqs
            counted["kv_cache_frac"] = max(counted["kv_cache_frac"], scheduler_stats.kv_cache_usage)
            counted["prefill_tokens_saved"] += prefix.hits
            counted["prefill_tokens"] += prefix.queries - prefix.hits
        if iteration_stats is not None:
            counted["preemptions"] += iteration_stats.num_preempted_reqs


def _known(active: _Active, tokens: Sequence[int], logprobs: Any) -> TokenRun:
    """Return all that was sampled of a request, of which vLLM has these tokens."""
    sampled = TokenRun(
        token_ids=tuple(tokens),
        logprobs=tuple(sampled_logprobs(logprobs, tokens)),
        versions=tuple(active.versions),
        columns=active.columns,
    )
    return active.request.prefix.then(sampled)


def _returned(state: Any) -> tuple[Sequence[int], Any]:
    """Tokens that vLLM has sampled of a request so far, and its log-probabilities of them."""
    return state.detokenizer.output_token_ids, state.logprobs_processor.logprobs


def _settings(options: VllmOptions, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs, but for the model."""
    kv_cache_gb = options.kv_cache_gb
    if on_cpu and kv_cache_gb is None:
        kv_cache_gb = CPU_KV_CACHE_GB
    return {
        "dtype": options.dtype,
        "max_num_seqs": options.max_rows,
        "tensor_parallel_size": options.tensor_parallel,
        # In a Ray actor vLLM would ask Ray for its workers, which has no room for them (and cannot
        # on CPU).
        "distributed_executor_backend": "mp" if options.tensor_parallel > 1 else None,
        "gpu_memory_utilization": options.gpu_memory_fraction,
        "kv_cache_memory_bytes": None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
        "max_model_len": options.max_model_len,
        "trust_remote_code": options.trust_remote_code,
        "revision": options.revision,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "enable_prefix_caching": True,
        # The smallest that vLLM's CPU attention takes: only whole blocks are shared by samples of
        # one prompt.
        "block_size": 32 if on_cpu else 16,
        "enable_sleep_mode": not on_cpu,
        # A step returns what it sampled, so that a token's weight version is known.
        "async_scheduling": False,
        "enforce_eager": on_cpu,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "oxrl.engines.sample.vllm_plain.WorkerExtension",
        **options.further,
    }


def _ignore(*_: Any) -> None:
    """Drop the other things that vLLM tells a StatLogger."""


@contextmanager
def _folder(model: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the name or folder that vLLM loads; a built-in model is written to a folder for it."""
    if not is_builtin(model):
        yield model
        return
    with TemporaryDirectory(prefix="oxrl-") as folder:
        save_model(load_policy(model), Path(folder))
        if vision_family(model) is not None:
            tokenizer.save_pretrained(folder)
            load_image_processor(model).save_pretrained(folder)
        yield folder


@contextmanager
def _noise_to(log_file: str) -> Iterator[None]:
    """Send vLLM's messages to the file and, inside the block, what this process prints."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(log_file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("vllm")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO)
    # By descriptor, because compiled code prints too.
    with open(log_file, "ab") as target:
        _flush()
        kept = {standard: os.dup(standard) for standard in (1, 2)}
        try:
            for standard in kept:
                os.dup2(target.fileno(), standard)
            yield
        finally:
            _flush()
            for standard, before in kept.items():
                os.dup2(before, standard)
                os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
