"""transformers' continuous batching with a plane, a sampler and a text stream for each sequence.

transformers schedules, packs and pages; its loop runs in a thread of its own. What is added, at seams that its classes have:

    between steps   commands of the engine (add, remove, attach, detach), then one slice of one scoring job, run in the stepping thread; nothing else changes state
    before a step   the packed sequences' planes are written to `PlaneStep`, in the order in which transformers packed their query tokens
    attention       each sequence over its own keys (`sequence_attention`)
    sampling        one `TokenSampler` a sequence; stop tokens, stop texts and lengths are decided there, and end the sequence in the same step
    prefix cache    blocks named by salt and plane (`prefix_cache`)
    after a step    the step's deltas go to the event loop in one call

Sequences that a failure stops get it as an exception; one whose sampling fails does not disturb the others.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager, ContinuousBatchProcessor, OutputRouter
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from prism_ray.core.errors import PrismError, one_line
from prism_ray.engines.planes_linear import PlaneStep
from prism_ray.engines.prefix_cache import PlanePagedCache
from prism_ray.engines.protocol import Delta, EngineStopped
from prism_ray.engines.sequence_attention import NAME, packed_step
from prism_ray.engines.sequences import Output, ScoreJob, Sequence

STOPPED = "the engine is stopped"


class _SilentRouter(OutputRouter):
    """Deltas are delivered by the batching itself; transformers' own outputs, which copy all tokens each time, are not wanted."""

    def deliver(self, output: GenerationOutput) -> None:
        pass

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        pass


class _SequenceRunner(ModelRunner):
    """transformers' model runner with sampling by sequence."""

    batching: SequenceBatching

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        io: Any = self.inputs_and_outputs
        waiting = [future.state for future in io.requests_in_batch if future.has_new_token]
        tokens = [self.batching.sample(state, scores[0, row]) for row, state in enumerate(waiting)]
        if tokens:
            output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=output_ids.dtype, device=output_ids.device)


class _PlaneScheduler(FIFOScheduler):
    """First come, first served; what was chosen for a step is packed plane by plane, so that a linear finds each plane's rows side by side."""

    identity: Callable[[str], tuple[str, str]]

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        chosen, *rest = super().schedule_batch(token_budget, cache_budget)
        if chosen:
            chosen.sort(key=lambda future: self.identity(future.state.request_id)[1])
        return chosen, *rest


class SequenceBatching(ContinuousBatchingManager):
    """The stepping thread of one model. deliver: called in that thread with the outputs of a step."""

    def __init__(self, model: Any, config: ContinuousBatchingConfig, step: PlaneStep, deliver: Callable[[list[Output]], None]):
        super().__init__(model, GenerationConfig(do_sample=False, eos_token_id=-1), config)
        self.output_router = _SilentRouter()
        self.planes, self._deliver = step, deliver
        self.sequences: dict[str, Sequence] = {}
        self._leaving: dict[str, Sequence] = {}
        self._outputs: list[Output] = []
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._jobs: deque[ScoreJob] = deque()
        self._closing = threading.Lock()
        self._closed = False
        self.stopping = False
        self.prompt_tokens = self.generated_tokens = self.cache_hit_tokens = self.aborted = 0

    def start(self) -> None:
        """Start the stepping thread. It does not keep a process alive that forgot to stop it."""
        self.background_thread_status.clear()
        thread = threading.Thread(target=self._run_generation_loop, name="prism-steps", daemon=True)
        self._generation_thread = thread  # type: ignore[assignment]
        thread.start()

    def prepare(self) -> None:
        """Allocate the cache. Raises MemoryError and ValueError, which would otherwise end the thread."""
        self.batch_processor = self._create_batch_processor()

    # --- called by the engine -------------------------------------------------------------------------------------------------

    def submit(self, command: Callable[[], Any]) -> Future[Any]:
        """Run a command in the stepping thread before its next step. Raises EngineStopped where there is none any more."""
        result: Future[Any] = Future()
        with self._closing:
            if self._closed:
                raise EngineStopped(STOPPED, remedy="start it again")
            self._commands.put((command, result))
        self._wake_up_loop.set()
        return result

    @property
    def running(self) -> int:
        """Sequences that have a place in the cache."""
        processor = self.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    # --- commands: in the stepping thread, between steps ------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        request = sequence.request
        self.sequences[request.request_id] = sequence
        self.prompt_tokens += len(request.prompt)
        assert self.batch_processor is not None
        state = RequestState(request_id=request.request_id, initial_tokens=list(request.prompt), max_new_tokens=None, eos_token_id=-1)
        self.batch_processor.scheduler.add_waiting_request(state)

    def remove(self, request_id: str) -> bool:
        """End a sequence now: its blocks are free when this returns, and its consumer gets a last delta. False where it is not there."""
        sequence = self.sequences.pop(request_id, None)
        if sequence is None:
            return False
        assert self.batch_processor is not None
        self.batch_processor.scheduler.set_request_cancellation(request_id)
        self.batch_processor.scheduler.clear_cancelled_requests()
        self.aborted += 1
        sequence.ended = True
        text = sequence.stop_texts.flush()
        self._outputs.append((sequence, Delta(token_ids=(), text=text, finish="abort", cached_tokens=sequence.cached_tokens)))
        return True

    def remove_all(self) -> None:
        """End every sequence and refuse scoring: the engine stops."""
        self.stopping = True
        for request_id in list(self.sequences):
            self.remove(request_id)

    def add_job(self, job: ScoreJob) -> None:
        """Queue a scoring request."""
        self._jobs.append(job)

    def drop_plane(self, digest: str) -> int:
        """Free what the prefix cache holds of a plane."""
        assert self.batch_processor is not None
        cache: Any = self.batch_processor.cache
        return int(cache.drop_plane(digest))

    # --- the stepping thread ------------------------------------------------------------------------------------------------------

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Attention by sequence in the place of transformers' choice."""
        if model.config._attn_implementation != NAME:
            self._original_attn_impl = model.config._attn_implementation
            model.set_attn_implementation(NAME)

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        self._run_commands()
        self._run_slice()
        again = super()._generation_loop_body(batch_processor, bootstrapping)
        self._flush()
        return again

    def _generation_step(self) -> None:
        assert self.batch_processor is not None
        io: Any = self.batch_processor.inputs_and_outputs
        batch = [(self.sequences[future.state.request_id].request.plane, future.query_length) for future in io.requests_in_batch]
        heads = (
            io.logits_indices[: io.num_request_in_batch] if self.batch_processor.model_runner.supports_logits_to_keep(self.model) else None
        )
        self.planes.mixed(batch, heads, self.model.device)
        with packed_step():
            super()._generation_step()

    def sample(self, state: RequestState, logits: torch.Tensor) -> int:
        """Choose a sequence's next token and note what it adds; an end is told to transformers as an end-of-sequence token."""
        sequence = self.sequences[state.request_id]
        try:
            token, delta = sequence.advance(logits)
        except Exception as error:  # noqa: BLE001 - one sequence's fault must not end the step of the others
            token, sequence.ended = 0, True
            known = isinstance(error, PrismError)
            self._outputs.append((sequence, error if known else EngineStopped(f"sampling failed ({one_line(error)})")))
        else:
            self.generated_tokens += 1
            sequence.ended = delta.finish is not None
            self._outputs.append((sequence, delta))
        if sequence.ended:
            state._eos_token_ids.add(token)
            del self.sequences[state.request_id]
            self._leaving[state.request_id] = sequence
        return token

    def _run_commands(self) -> None:
        while True:
            try:
                command, result = self._commands.get_nowait()
            except queue.Empty:
                return
            if not result.set_running_or_notify_cancel():
                continue
            try:
                value = command()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever sent the command
                result.set_exception(error)
            else:
                self._flush()  # first what it put out, then that it is done: who waits for an end finds it delivered
                result.set_result(value)

    def _run_slice(self) -> None:
        """One forward of the first scoring job, which then goes to the end of the line."""
        if not self._jobs:
            return
        job = self._jobs.popleft()
        if job.cancelled:
            job.slices.close()
            job.result.cancel()
        else:
            try:
                with torch.no_grad():
                    next(job.slices)
                self._jobs.append(job)
            except StopIteration as end:
                job.result.set_result(end.value)
            except Exception as error:  # noqa: BLE001 - it belongs to whoever asked for the score
                job.result.set_exception(error)
        if self._jobs:
            self._wake_up_loop.set()

    def _flush(self) -> None:
        self._leaving.clear()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._deliver(outputs)

    def _run_generation_loop(self) -> None:
        super()._run_generation_loop()
        with self._closing:
            self._closed = True
        cause = self.background_thread_status.fatal_error
        failure = EngineStopped(STOPPED if cause is None else f"a step failed ({one_line(cause)})", remedy="start it again")
        self._outputs += [(sequence, failure) for sequence in (*self.sequences.values(), *self._leaving.values())]
        self.sequences.clear()
        self._flush()
        for job in self._jobs:
            job.result.set_exception(failure)
        while not self._commands.empty():
            _, result = self._commands.get_nowait()
            if result.set_running_or_notify_cancel():
                result.set_exception(failure)

    def _identity(self, request_id: str) -> tuple[str, str]:
        request = (self.sequences.get(request_id) or self._leaving[request_id]).request
        return request.salt, request.plane

    def _matched(self, request_id: str, tokens: int) -> None:
        sequence = self.sequences[request_id]
        if not sequence.generated:
            sequence.cached_tokens = tokens
            self.cache_hit_tokens += tokens

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """As transformers does it, with our cache and runner, and without what needs an accelerator."""
        if self.batch_processor is not None:
            return self.batch_processor
        config = self.continuous_batching_config
        supports = getattr(self.model, "_supports_logits_to_keep", None)
        cache = PlanePagedCache(
            config=self.model.config.get_text_config(),
            continuous_batching_config=config,
            device=self.model.device,
            distributed_helper=self.distributed_helper,
            dtype=self.model.dtype,
            model_supports_logits_to_keep=callable(supports) and supports(),
        )
        cache.identity, cache.on_match = self._identity, self._matched
        scheduler = _PlaneScheduler(
            cache, 0.15 if config.safety_margin is None else config.safety_margin, config.max_requests_per_batch or 1
        )
        scheduler.identity = self._identity
        update_cb_config_after_cache_creation(config, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens)
        processor = ContinuousBatchProcessor(
            cache=cache,
            config=self.model.config.get_text_config(),
            generation_config=self.generation_config,
            continuous_batching_config=config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        runner = _SequenceRunner(
            logit_processor=self.logit_processor,
            cb_config=config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=cache,
            do_sample=False,
            return_logprobs=False,
        )
        runner.batching = self
        processor.model_runner = runner
        return processor
