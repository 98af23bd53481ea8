"""The engine on transformers: continuous batching with mixed planes on a CPU, and on CUDA.

transformers 5.19's continuous batching schedules, pages and packs (`continuous`); this module is its asyncio side. Every step is one pass of the packed tokens of
all running sequences over the codes, each token under its own plane (`planes_linear`). Greedy output of an attached plane equals that of the merged checkpoint:
the linears compute the same numbers, grouped by plane, and attention runs by sequence (`sequence_attention`), so what shares a step with a sequence
changes its numbers by no more than the number of rows in a matrix product does. (Rows: BLAS may sum one row and eight rows in another order, as in every batch.)

    pins        a sequence or a score holds its plane until the stepping thread has let go of it; a plane that is held cannot be detached
    cancel      closing the iterator, or a cancelled task, removes the sequence between two steps: blocks and pin are free when the close returns
    start       opens the base, then generates two tokens and compares their probabilities with an ordinary forward's; an architecture
                whose continuous batching is wrong is refused before it serves

Refused by request: an empty or too long prompt, token ids outside the vocabulary, parameters out of range, a request id that runs already.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from prism_ray.core.config import Config
from prism_ray.core.errors import ModelError, PrismError, ResourceError, one_line
from prism_ray.engines.continuous import STOPPED, SequenceBatching
from prism_ray.engines.detokenize import StopTexts, TextStream
from prism_ray.engines.loading import LoadedBase, open_base
from prism_ray.engines.planes_linear import PlaneSet, PlaneStep
from prism_ray.engines.protocol import (
    BASE,
    BaseInfo,
    Delta,
    EngineStats,
    EngineStopped,
    Generation,
    Plane,
    PlaneInUse,
    Sampling,
    Score,
    Scoring,
    UnknownPlane,
)
from prism_ray.engines.refusals import require_generation, require_scoring
from prism_ray.engines.sampling import TokenSampler
from prism_ray.engines.scoring import score_slices
from prism_ray.engines.sequences import Output, ScoreJob
from prism_ray.engines.sequences import Sequence as Running

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class TransformersSettings(Config):
    """cache_tokens: of the key-value cache, shared by all sequences, in pages of page_tokens; a prefix is shared by whole pages. batch_tokens: in one step.
    max_length: of one sequence, prompt and answer; at most cache_tokens and the model's own. weight_cache_bytes: decoded weights that are kept, 0 for none."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: str = "cpu"
    cache_tokens: int = Field(default=16384, ge=16)
    page_tokens: int = Field(default=32, ge=4)
    batch_tokens: int = Field(default=512, ge=1)
    max_sequences: int = Field(default=64, ge=1)
    max_length: int | None = Field(default=None, ge=4)
    weight_cache_bytes: int = Field(default=2 << 30, ge=0)


class TransformersEngine:
    """An `engines.protocol.Engine`. folder: a compressed-tensors model folder. One event loop uses it, from `start` to `stop`."""

    def __init__(self, folder: Path | str, settings: TransformersSettings | None = None):
        self._folder = Path(folder)
        self.settings = settings or TransformersSettings()
        self._step = PlaneStep(self.settings.weight_cache_bytes)
        self._loaded: LoadedBase | None = None
        self._planes: PlaneSet | None = None
        self._batching: SequenceBatching | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attached: dict[str, int] = {}
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._in_use: Counter[str] = Counter()
        self._running: dict[str, Running] = {}

    # --- the base ---------------------------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> LoadedBase:
        """The opened base: model, tokenizer, planes. Raises EngineStopped before `start`."""
        if self._loaded is None:
            raise EngineStopped(STOPPED, remedy="start it first")
        return self._loaded

    @property
    def base(self) -> BaseInfo:
        """The base."""
        return self.loaded.info

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer, None where its folder has none."""
        return self.loaded.tokenizer

    async def start(self) -> None:
        """Open the base, start the stepping thread, and check it against an ordinary forward."""
        if self._batching is not None:
            return
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._open)
            self._attached = {BASE: self.base.scale_bytes}
            await self._probe()
        except BaseException:
            await self.stop()
            self._loaded = self._planes = None
            raise

    def _open(self) -> None:
        settings = self.settings
        limit = min(settings.max_length or settings.cache_tokens, settings.cache_tokens)
        self._loaded = open_base(self._folder, self._step, dtype=getattr(torch, settings.dtype), device=settings.device, max_length=limit)
        self._planes = PlaneSet(self._loaded.model, self._loaded.planes, self._step)
        config = ContinuousBatchingConfig(
            page_size=settings.page_tokens,
            num_blocks=math.ceil(settings.cache_tokens / settings.page_tokens),
            max_batch_tokens=settings.batch_tokens,
            max_requests_per_batch=min(settings.max_sequences, settings.batch_tokens),
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        batching = SequenceBatching(self._loaded.model, config, self._step, self._deliver_soon)
        try:
            batching.prepare()
        except (MemoryError, ValueError) as error:
            raise ResourceError(
                f"no key-value cache of {settings.cache_tokens} tokens ({one_line(error)})", remedy="lower cache_tokens"
            ) from None
        batching.start()
        self._batching = batching

    async def _probe(self) -> None:
        """Two tokens by continuous batching against the ordinary forward: the second reads the paged cache."""
        vocabulary = self.base.vocab_size
        prompt = [(7 * position + 3) % vocabulary for position in range(min(6, self.base.max_length - 2))]
        sampling = Sampling(max_tokens=2, temperature=0.0, logprobs=0, ignore_eos=True)
        found = [delta async for delta in self.generate(Generation(request_id="probe", prompt=prompt, sampling=sampling))]
        tokens = [token for delta in found for token in delta.token_ids]
        expected = await self.score(Scoring(request_id="probe", prompt=prompt, choices=[tokens[:1], tokens]))
        logprobs = [logprob.logprob for delta in found for logprob in delta.logprobs]
        wanted = [expected[0].logprob, expected[1].logprob - expected[0].logprob]
        tolerance = PROBE_TOLERANCE[getattr(torch, self.settings.dtype)]
        if any(abs(a - b) > tolerance for a, b in zip(logprobs, wanted, strict=True)):
            raise ModelError(
                f"continuous batching gives log-probabilities {logprobs}, an ordinary forward {wanted}",
                where=str(self._folder),
                remedy="transformers does not batch this architecture rightly: use the vLLM engine",
            )
        batching = self._require()
        await asyncio.wrap_future(batching.submit(lambda: batching.drop_plane(BASE)))
        batching.prompt_tokens = batching.generated_tokens = 0

    async def stop(self) -> None:
        """End all sequences with "abort", stop the thread, let the base go. A second call does nothing."""
        batching, self._batching = self._batching, None
        if batching is None:
            return
        with suppress(EngineStopped):
            await asyncio.wrap_future(batching.submit(batching.remove_all))
        await asyncio.to_thread(batching.stop, hard_stop=True)
        await asyncio.sleep(0)  # the last deltas are on the loop already
        self._loaded, self._planes = None, None
        self._attached.clear()
        self._step.cache.clear()

    # --- planes -----------------------------------------------------------------------------------------------------------------

    async def attach(self, plane: Plane) -> None:
        """Make a plane resident between two steps; see the protocol."""
        self._require()
        if plane.digest in self._attached:
            return
        task = self._attaching.get(plane.digest)
        if task is None:
            # A task of its own: a caller that gives up must not leave a half-attached plane behind.
            task = self._attaching[plane.digest] = asyncio.create_task(self._attach(plane))
            task.add_done_callback(lambda _: self._attaching.pop(plane.digest, None))
        await asyncio.shield(task)

    async def _attach(self, plane: Plane) -> None:
        planes, batching = self._planes, self._require()
        assert planes is not None
        scales = await asyncio.to_thread(planes.fitted, plane)
        await asyncio.wrap_future(batching.submit(lambda: planes.attach(plane.digest, scales)))
        self._attached[plane.digest] = planes.resident[plane.digest]

    async def detach(self, digest: str) -> None:
        """Drop a plane between two steps; see the protocol."""
        planes, batching = self._planes, self._require()
        assert planes is not None
        if digest not in self._attached:
            raise UnknownPlane("is not attached", where=digest[:12])
        if digest == BASE or self._in_use[digest]:
            what = "the base's scales stay" if digest == BASE else f"{self._in_use[digest]} sequence(s) run on it"
            raise PlaneInUse(what, where=digest[:12], remedy="detach it when they have ended")
        del self._attached[digest]

        def drop() -> None:
            planes.detach(digest)
            batching.drop_plane(digest)

        await asyncio.shield(asyncio.wrap_future(batching.submit(drop)))

    # --- generating ---------------------------------------------------------------------------------------------------------------

    async def generate(self, request: Generation) -> AsyncIterator[Delta]:
        """Deltas of one sequence; see the protocol."""
        batching = self._require()
        self._require_plane(request.plane)
        require_generation(request, self.base, tokenizer=self.tokenizer is not None, running=request.request_id in self._running)
        running = self._sequence(request)
        self._running[request.request_id] = running
        self._in_use[request.plane] += 1
        try:
            batching.submit(lambda: batching.add(running)).add_done_callback(lambda added: self._require_added(running, added))
            while True:
                output = await running.outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish is not None:
                    return
        finally:
            if not running.done:
                try:
                    await asyncio.shield(self._remove(running))
                except EngineStopped as error:
                    self._deliver([(running, error)])

    async def abort(self, request_id: str) -> bool:
        """End a sequence; its consumer gets a last delta with finish "abort"."""
        running = self._running.get(request_id)
        if running is None or running.done:
            return False
        return await asyncio.shield(self._remove(running))

    def _require_added(self, running: Running, added: Future[None]) -> None:
        if (error := added.exception()) is not None:
            self._deliver_soon([(running, error if isinstance(error, PrismError) else EngineStopped(one_line(error)))])

    def _remove(self, running: Running) -> asyncio.Future[bool]:
        batching = self._batching
        if batching is None:
            raise EngineStopped(STOPPED)
        return asyncio.wrap_future(batching.submit(lambda: batching.remove(running.request.request_id)))

    def _sequence(self, request: Generation) -> Running:
        sampling, loaded = request.sampling, self.loaded
        stops = frozenset(sampling.stop_token_ids)
        return Running(
            request=request,
            stops=stops - loaded.eos if sampling.ignore_eos else stops | loaded.eos,
            sampler=TokenSampler(sampling),
            text=None if loaded.tokenizer is None else TextStream(loaded.tokenizer),
            stop_texts=StopTexts(sampling.stop),
        )

    def _deliver_soon(self, outputs: list[Output]) -> None:
        """From the stepping thread to the event loop."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        for running, output in outputs:
            if running.done:
                continue
            running.outputs.put_nowait(output)
            if isinstance(output, Exception) or output.finish is not None:
                running.done = True
                del self._running[running.request.request_id]
                self._release(running.request.plane)

    def _release(self, digest: str) -> None:
        self._in_use[digest] -= 1
        if not self._in_use[digest]:
            del self._in_use[digest]

    # --- scoring ------------------------------------------------------------------------------------------------------------------

    async def score(self, request: Scoring) -> list[Score]:
        """One score a choice, in order; computed between the steps of the running sequences."""
        batching = self._require()
        self._require_plane(request.plane)
        require_scoring(request, self.base)
        job = ScoreJob(score_slices(self.loaded.model, self._step, request, self.settings.batch_tokens))
        self._in_use[request.plane] += 1
        job.result.add_done_callback(lambda _: self._release_soon(request.plane))
        try:
            batching.submit(lambda: batching.add_job(job)).add_done_callback(job.require_added)
        except EngineStopped as error:
            job.result.set_exception(error)
        try:
            return await asyncio.shield(asyncio.wrap_future(job.result))
        except asyncio.CancelledError:
            job.cancelled = True
            raise

    def _release_soon(self, digest: str) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release, digest)

    # --- state --------------------------------------------------------------------------------------------------------------------

    def _require(self) -> SequenceBatching:
        if self._batching is None or not self._batching.is_running():
            raise EngineStopped(STOPPED, remedy="start it")
        return self._batching

    def _require_plane(self, digest: str) -> None:
        if digest not in self._attached:
            raise UnknownPlane("is not attached", where=digest[:12], remedy="attach it first")

    def stats(self) -> EngineStats:
        """As of now."""
        batching = self._batching
        if batching is None:
            return EngineStats(running=0, waiting=0)
        running = min(batching.running, len(self._running))
        return EngineStats(
            running=running,
            waiting=len(self._running) - running,
            planes=dict(self._attached),
            in_use=dict(self._in_use),
            cache_hit_tokens=batching.cache_hit_tokens,
            prompt_tokens=batching.prompt_tokens,
            generated_tokens=batching.generated_tokens,
            aborted=batching.aborted,
        )
