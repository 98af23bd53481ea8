"""What every engine must do, as one suite: `class TestX(EngineConformance)` with the fixtures `engine_factory` and `material` runs it.

`ExactAnswers` is the part about answers and caches, for further models and formats.
One engine serves the whole class, on one event loop, as a server has it; every check leaves it as it found it. The answers that count are those of engines
of the same kind over *merged checkpoints*: folders in which the plane's bytes were written into the base (adapters.apply), loaded as any model.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from prism_ray.adapters.apply import apply_plane
from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import FormatError
from prism_ray.engines.loading import plane_of
from prism_ray.engines.protocol import (
    BASE,
    Delta,
    Engine,
    EngineStopped,
    Generation,
    Plane,
    PlaneInUse,
    RequestRefused,
    Sampling,
    Scoring,
    UnknownPlane,
)
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import tiny_tokenizer

EngineFactory = Callable[[Path], Engine]
TOKENS = 12
PROMPTS = tuple([(11 * i + 7 * j + 5) % 250 for j in range(length)] for i, length in enumerate((48, 9, 1, 33)))


@dataclass(frozen=True, kw_only=True)
class Material:
    """A base folder, planes over it by name, and the merged checkpoint of each."""

    base: Path
    planes: dict[str, Plane]
    merged: dict[str, Path]


def shifted_plane(base: BasePlanes, seed: int) -> dict[str, torch.Tensor]:
    """Scales that differ from the base's on a third of the blocks by up to a factor of 4: legal bytes, plainly other outputs."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in base.quantized.items():
        exponent = 8 if tensor.format.name == "nvfp4" else 1
        old = tensor.scales.int()
        steps = torch.randint(-2, 3, old.shape, generator=generator) * exponent
        moved = torch.where(torch.rand(old.shape, generator=generator) < 0.33, (old + steps).clamp(1, 0x7E), old)
        out[name] = torch.where(old == 0, old, moved).to(torch.uint8)
    return out


def make_material(model: Any, format: str, folder: Path, names: Sequence[str] = ("a", "b", "c")) -> Material:
    """Quantize a tiny model, make planes, and merge each into a copy of the base. Plane "c" covers attention only."""
    quantize_to_folder(model, tiny_tokenizer(), QuantPolicy(format=format), folder / "base", source="tiny")
    base = BasePlanes.from_checkpoint(folder / "base")
    planes, merged = {}, {}
    for seed, name in enumerate(names):
        scales = shifted_plane(base, seed)
        if name == "c":
            scales = {layer: data for layer, data in scales.items() if ".self_attn." in layer}
        planes[name], merged[name] = plane_of(scales, base, name), folder / name
        shutil.copytree(folder / "base", folder / name)
        apply_plane(folder / name, ScalePlane(scales), adapter_id=name)
    return Material(base=folder / "base", planes=planes, merged=merged)


def greedy(tokens: int = TOKENS, **fields: Any) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, **fields)


@dataclass
class Answer:
    """What a stream said, all together."""

    tokens: list[int]
    text: str
    deltas: list[Delta]

    @property
    def finish(self) -> str | None:
        return self.deltas[-1].finish

    @property
    def cached(self) -> int:
        return sum(delta.cached_tokens for delta in self.deltas)

    @property
    def logprobs(self) -> list[float]:
        return [logprob.logprob for delta in self.deltas for logprob in delta.logprobs]


class Bench:
    """An engine with its loop."""

    def __init__(self, engine: Engine, runner: asyncio.Runner, material: Material):
        self.engine, self.runner, self.material = engine, runner, material
        self._count = 0

    def run(self, work: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(bounded())

    async def ask(
        self, prompt: Sequence[int], plane: str = BASE, sampling: Sampling | None = None, salt: str = "", name: str = ""
    ) -> Answer:
        self._count += 1
        request = Generation(
            request_id=name or f"r{self._count}",
            prompt=prompt,
            sampling=sampling or greedy(),
            plane=self.digest(plane),
            # A salt of its own, unless the test is about the cache.
            salt=salt or f"salt{self._count}",
        )
        deltas = [delta async for delta in self.engine.generate(request)]
        return Answer([token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas), deltas)

    def digest(self, plane: str) -> str:
        return self.material.planes[plane].digest if plane in self.material.planes else plane

    async def attach(self, *names: str) -> None:
        for name in names:
            await self.engine.attach(self.material.planes[name])

    async def detach(self, *names: str) -> None:
        for name in names:
            await self.engine.detach(self.digest(name))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    def idle(self) -> bool:
        stats = self.engine.stats()
        return stats.running == 0 and stats.waiting == 0 and not any(stats.in_use.values())


class ExactAnswers:
    """Subclasses give a module- or class-scoped `material` (Material) and `engine_factory` (folder -> Engine that is not started)."""

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, engine_factory: EngineFactory, material: Material) -> Iterator[Bench]:
        with asyncio.Runner() as runner:
            engine = engine_factory(material.base)
            bench = Bench(engine, runner, material)
            bench.run(engine.start())
            yield bench
            bench.run(engine.stop())

    @pytest.fixture(scope="class")
    @classmethod
    def merged(cls, engine_factory: EngineFactory, material: Material) -> dict[str, list[Answer]]:
        """Answers to PROMPTS of engines over the base and over each merged checkpoint, one prompt at a time."""
        out: dict[str, list[Answer]] = {}
        for name, folder in {BASE: material.base, **material.merged}.items():
            with asyncio.Runner() as runner:
                bench = Bench(engine_factory(folder), runner, Material(base=folder, planes={}, merged={}))
                bench.run(bench.engine.start())
                out[name] = [bench.run(bench.ask(prompt)) for prompt in PROMPTS]
                bench.run(bench.engine.stop())
        return out

    @pytest.fixture(autouse=True)
    def _clean(self, bench: Bench) -> Iterator[None]:
        """Every test leaves no sequence, no pin and no plane."""
        yield
        bench.run(bench.until(bench.idle))
        for digest in set(bench.engine.stats().planes) - {BASE}:
            bench.run(bench.engine.detach(digest))
        assert set(bench.engine.stats().planes) == {BASE}

    # --- exactness -----------------------------------------------------------------------------------------------------------------

    def test_the_merged_checkpoints_differ(self, merged: dict[str, list[Answer]]) -> None:
        """Else the rest proves nothing."""
        apart = [len({tuple(answers[index].tokens) for answers in merged.values()}) == len(merged) for index in range(len(PROMPTS))]
        assert apart[0] and apart[1] and sum(apart) > len(apart) // 2

    def test_attach_then_generate_is_the_merged_checkpoint(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            await bench.attach(*bench.material.planes)
            for name, expected in merged.items():
                for prompt, answer in zip(PROMPTS, expected, strict=True):
                    found = await bench.ask(prompt, name)
                    assert found.tokens == answer.tokens and found.text == answer.text and found.finish == "length"

        bench.run(check())

    def test_mixed_planes_in_one_batch_answer_as_alone(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            await bench.attach(*bench.material.planes)
            asked = [(name, index) for index in range(len(PROMPTS)) for name in merged]
            found = await asyncio.gather(*(bench.ask(PROMPTS[index], name) for name, index in asked))
            for (name, index), answer in zip(asked, found, strict=True):
                assert answer.tokens == merged[name][index].tokens, (name, index)

        bench.run(check())

    def test_streams_do_not_notice_attach_and_detach_of_others(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            await bench.attach("a")
            streams = [asyncio.create_task(bench.ask(PROMPTS[index % len(PROMPTS)], "a")) for index in range(8)]
            swaps = 0
            while not all(stream.done() for stream in streams) or swaps < 3:
                await bench.attach("b")
                other = await bench.ask(PROMPTS[1], "b", greedy(2))
                assert other.tokens == merged["b"][1].tokens[:2]
                await bench.detach("b")
                swaps += 1
            for index, stream in enumerate(streams):
                assert stream.result().tokens == merged["a"][index % len(PROMPTS)].tokens

        bench.run(check())

    # --- caches (SRV-01 to SRV-03) ---------------------------------------------------------------------------------------------------

    def test_no_prefix_is_shared_between_planes_and_a_repeat_hits(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            await bench.attach("a", "b")
            for name, hits in ((BASE, False), ("a", False), ("b", False), ("a", True), (BASE, True), ("b", True)):
                answer = await bench.ask(PROMPTS[0], name, salt="one tenant")
                assert answer.tokens == merged[name][0].tokens
                assert (answer.cached > 0) == hits, name

        bench.run(check())

    def test_no_prefix_is_shared_between_salts(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a")
            hits = [(await bench.ask(PROMPTS[0], "a", salt=salt)).cached > 0 for salt in ("t1", "t2", "t1", "t2", "t")]
            assert hits == [False, False, True, True, False]

        bench.run(check())

    def test_a_plane_that_comes_back_has_an_empty_cache(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            for _ in range(2):
                await bench.attach("a")
                answer = await bench.ask(PROMPTS[0], "a", salt="again")
                assert answer.tokens == merged["a"][0].tokens and answer.cached == 0
                await bench.detach("a")

        bench.run(check())

    def test_logprobs_and_scores_agree(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a")
            for plane in (BASE, "a"):
                answer = await bench.ask(PROMPTS[0], plane, greedy(6, logprobs=3))
                for delta in answer.deltas:
                    for logprob in delta.logprobs:
                        best = [value for _, value in logprob.top]
                        assert len(best) == 3 and best == sorted(best, reverse=True)
                        assert logprob.top[0] == (logprob.token_id, logprob.logprob)
                bare = await bench.ask(PROMPTS[0], plane, greedy(6, logprobs=0))
                assert all(not logprob.top for delta in bare.deltas for logprob in delta.logprobs)
                choices = [answer.tokens, answer.tokens[:2], [3, 1, 4, 1]]
                scores = await bench.engine.score(
                    Scoring(request_id="score", prompt=PROMPTS[0], choices=choices, plane=bench.digest(plane))
                )
                assert [score.tokens for score in scores] == [6, 2, 4]
                # Two summations of the same float32 terms; 1e-3 leaves room for another order of the matrix products.
                assert abs(scores[0].logprob - sum(answer.logprobs)) < 1e-3 and abs(scores[1].logprob - sum(answer.logprobs[:2])) < 1e-3
                assert scores[2].logprob < scores[0].logprob

        bench.run(check())


class EngineConformance(ExactAnswers):
    """Everything."""

    # --- refusals (SRV-04, SRV-07) -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("prompt", "plane", "fields", "error"),
        [
            ([1, 2], "f" * 64, {}, UnknownPlane),
            ([1, 2], "", {}, UnknownPlane),
            ([1, 2], "../../etc/passwd", {}, UnknownPlane),
            ([], BASE, {}, RequestRefused),
            ([1] * 100_000, BASE, {}, RequestRefused),
            ([1, 2], BASE, {"max_tokens": 1_000_000}, RequestRefused),
            ([1, 2], BASE, {"max_tokens": 0}, RequestRefused),
            ([-1], BASE, {}, RequestRefused),
            ([1_000_000], BASE, {}, RequestRefused),
            ([1, 2], BASE, {"temperature": float("nan")}, RequestRefused),
            ([1, 2], BASE, {"temperature": -1.0}, RequestRefused),
            ([1, 2], BASE, {"temperature": float("inf")}, RequestRefused),
            ([1, 2], BASE, {"top_p": 0.0}, RequestRefused),
            ([1, 2], BASE, {"top_p": float("nan")}, RequestRefused),
            ([1, 2], BASE, {"top_k": -5}, RequestRefused),
            ([1, 2], BASE, {"logprobs": -1}, RequestRefused),
        ],
        ids=lambda value: str(value)[:24],
    )
    def test_refused_before_the_first_delta(self, bench: Bench, prompt: list[int], plane: str, fields: dict[str, Any], error: type) -> None:
        sampling = Sampling(**({"max_tokens": 4} | fields))
        with pytest.raises(error):
            bench.run(bench.ask(prompt, plane, sampling))
        assert bench.idle()

    def test_a_request_id_that_runs_is_refused(self, bench: Bench) -> None:
        async def check() -> None:
            first = asyncio.create_task(bench.ask(PROMPTS[1], name="same"))
            await bench.until(lambda: bench.engine.stats().running > 0)
            with pytest.raises(RequestRefused):
                await bench.ask(PROMPTS[1], name="same")
            assert len((await first).tokens) == TOKENS
            assert len((await bench.ask(PROMPTS[1], name="same")).tokens) == TOKENS

        bench.run(check())

    @pytest.mark.parametrize("fault", ["shape", "dtype", "surplus", "illegal", "digest", "empty"])
    def test_a_bad_plane_changes_nothing(self, bench: Bench, merged: dict[str, list[Answer]], fault: str) -> None:
        good = bench.material.planes["a"]
        name = min(good.scales)
        scales = dict(good.scales)
        scales[name] = {
            "shape": scales[name][:, :-1].contiguous(),
            "dtype": scales[name].float(),
            "illegal": torch.full_like(scales[name], 255),
        }.get(fault, scales[name])
        scales |= {"model.layers.99.mlp.up_proj": scales[name]} if fault == "surplus" else {}
        scales = {} if fault == "empty" else scales
        plane = Plane(digest="0" * 64 if fault == "digest" else ScalePlane(scales).digest(), scales=scales)

        async def check() -> None:
            running = asyncio.create_task(bench.ask(PROMPTS[0]))
            with pytest.raises(FormatError):
                await bench.engine.attach(plane)
            assert set(bench.engine.stats().planes) == {BASE}
            with pytest.raises(UnknownPlane):
                await bench.ask([1], plane.digest)
            assert (await running).tokens == merged[BASE][0].tokens
            await bench.attach("a")
            assert (await bench.ask(PROMPTS[0], "a")).tokens == merged["a"][0].tokens

        bench.run(check())

    # --- attach and detach (SRV-05, SRV-06, SRV-08) ---------------------------------------------------------------------------------------

    def test_a_plane_in_use_stays(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a")
            stream = self.stream(bench, PROMPTS[1], "a", greedy(40))
            await anext(stream)
            with pytest.raises(PlaneInUse):
                await bench.detach("a")
            assert bench.engine.stats().in_use == {bench.digest("a"): 1}
            await stream.aclose()
            await bench.detach("a")
            with pytest.raises(UnknownPlane):
                await bench.ask([1], "a")
            with pytest.raises(UnknownPlane):
                await bench.detach("a")

        bench.run(check())

    def test_the_base_stays(self, bench: Bench) -> None:
        with pytest.raises(PlaneInUse):
            bench.run(bench.engine.detach(BASE))

    def test_attach_twice_is_attach_once(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            await asyncio.gather(*(bench.attach("a") for _ in range(20)))
            await bench.attach("a")
            assert set(bench.engine.stats().planes) == {BASE, bench.digest("a")}
            assert (await bench.ask(PROMPTS[1], "a")).tokens == merged["a"][1].tokens

        bench.run(check())

    def test_residency_is_counted_in_bytes(self, bench: Bench) -> None:
        async def check() -> None:
            before = bench.engine.stats().planes
            for _ in range(20):
                await bench.attach("a", "b", "c")
                planes = bench.engine.stats().planes
                assert all(planes[bench.digest(name)] == bench.material.planes[name].nbytes for name in "abc")
                await bench.detach("b", "a", "c")
            assert bench.engine.stats().planes == before == {BASE: bench.engine.base.scale_bytes}

        bench.run(check())

    # --- ends (SRV-10) ----------------------------------------------------------------------------------------------------------------------

    @staticmethod
    def stream(bench: Bench, prompt: Sequence[int], plane: str, sampling: Sampling) -> Any:
        bench._count += 1
        request = Generation(
            request_id=f"s{bench._count}", prompt=prompt, sampling=sampling, plane=bench.digest(plane), salt=f"s{bench._count}"
        )
        return bench.engine.generate(request)

    def test_a_closed_stream_leaves_nothing(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a")
            before = bench.engine.stats().aborted
            for index in range(10):
                stream = self.stream(bench, PROMPTS[index % 3], ("a", BASE)[index % 2], greedy(200))
                for _ in range(1 + index % 3):
                    await anext(stream)
                await stream.aclose()
                assert bench.idle()
            assert bench.engine.stats().aborted == before + 10

        bench.run(check())

    def test_a_hundred_cancelled_requests_leave_nothing(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a")
            tasks = [asyncio.create_task(bench.ask(PROMPTS[index % 4], ("a", BASE)[index % 2], greedy(100))) for index in range(100)]
            for index, task in enumerate(tasks):
                if index % 10 == 0:
                    await asyncio.sleep(0.01)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await bench.until(bench.idle)
            await bench.detach("a")

        bench.run(check())

    def test_abort_ends_the_stream_with_a_last_delta(self, bench: Bench) -> None:
        async def check() -> None:
            task = asyncio.create_task(bench.ask(PROMPTS[1], sampling=greedy(300), name="to abort"))
            await bench.until(lambda: bench.engine.stats().running > 0)
            assert await bench.engine.abort("to abort")
            answer = await task
            assert answer.finish == "abort" and len(answer.tokens) < 300
            assert not await bench.engine.abort("to abort") and not await bench.engine.abort("never was")

        bench.run(check())

    def test_ends_by_token_and_by_length(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        expected = merged[BASE][0].tokens
        stop = expected[4]

        async def check() -> None:
            answer = await bench.ask(PROMPTS[0], sampling=greedy(TOKENS, stop_token_ids=(stop,)))
            assert answer.finish == "stop" and answer.tokens == expected[: expected.index(stop) + 1]
            for length in (1, 2, 7):
                answer = await bench.ask(PROMPTS[0], sampling=greedy(length))
                assert answer.finish == "length" and answer.tokens == expected[:length]

        bench.run(check())

    def test_stop_texts_are_cut_wherever_they_lie(self, bench: Bench) -> None:
        async def check() -> None:
            text = (await bench.ask(PROMPTS[0], sampling=greedy(32))).text
            assert len(text) > 8
            for start in range(1, 8):
                stop = text[start : start + 2]
                answer = await bench.ask(PROMPTS[0], sampling=greedy(32, stop=(stop, "never in the text")))
                assert answer.text == text[: text.index(stop)] and answer.finish == "stop"

        bench.run(check())

    def test_the_streamed_text_is_the_decoded_text(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        for answers in merged.values():
            for answer in answers:
                whole = tiny_tokenizer().decode(answer.tokens, skip_special_tokens=True)
                # A character that the last tokens left unfinished is not shown.
                assert answer.text.rstrip("\ufffd") == whole.rstrip("\ufffd") and whole.startswith(answer.text)

    # --- sampling and probabilities -----------------------------------------------------------------------------------------------------------

    def test_a_seed_fixes_the_draws_in_any_company(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a")
            sampling = [Sampling(max_tokens=12, temperature=1.5, top_p=0.95, top_k=50, seed=seed, ignore_eos=True) for seed in range(4)]
            alone = [(await bench.ask(PROMPTS[3], "a", each)).tokens for each in sampling]
            noise = [bench.ask(PROMPTS[index], BASE, Sampling(max_tokens=12, temperature=2.0, ignore_eos=True)) for index in range(4)]
            together = await asyncio.gather(*(bench.ask(PROMPTS[3], "a", each) for each in sampling), *noise)
            assert [answer.tokens for answer in together[:4]] == alone
            assert len({tuple(tokens) for tokens in alone}) == 4
            # Without a seed two draws of 12 tokens at this temperature agree with a probability far below 1e-6.
            free = Sampling(max_tokens=12, temperature=5.0, ignore_eos=True)
            assert (await bench.ask(PROMPTS[3], "a", free)).tokens != (await bench.ask(PROMPTS[3], "a", free)).tokens

        bench.run(check())

    def test_top_k_one_and_a_tiny_top_p_are_greedy(self, bench: Bench, merged: dict[str, list[Answer]]) -> None:
        async def check() -> None:
            for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
                answer = await bench.ask(
                    PROMPTS[3], sampling=Sampling(**({"max_tokens": 8, "ignore_eos": True, "temperature": 1.0} | fields))
                )
                assert answer.tokens == merged[BASE][3].tokens[:8]

        bench.run(check())

    def test_scores_of_mixed_planes_are_those_alone(self, bench: Bench) -> None:
        async def check() -> None:
            await bench.attach("a", "b")
            requests = [
                Scoring(request_id=f"q{index}", prompt=PROMPTS[index % 4], choices=[[5, 6], [7], [8, 9, 10]], plane=bench.digest(name))
                for index, name in enumerate((BASE, "a", "b") * 3)
            ]
            alone = [await bench.engine.score(request) for request in requests]
            busy = asyncio.gather(*(bench.ask(PROMPTS[index], name) for index, name in enumerate((BASE, "a", "b"))))
            together = await asyncio.gather(*(bench.engine.score(request) for request in requests))
            await busy
            assert together == alone
            assert alone[0] != alone[1]

        bench.run(check())

    @pytest.mark.parametrize(
        ("prompt", "choices", "plane", "error"),
        [
            ([1], [[2]], "f" * 64, UnknownPlane),
            ([], [[2]], BASE, RequestRefused),
            ([1], [], BASE, RequestRefused),
            ([1], [[2], []], BASE, RequestRefused),
            ([1], [[1_000_000]], BASE, RequestRefused),
            ([1], [[1] * 100_000], BASE, RequestRefused),
        ],
        ids=lambda value: str(value)[:24],
    )
    def test_scores_refused(self, bench: Bench, prompt: list[int], choices: list[list[int]], plane: str, error: type) -> None:
        with pytest.raises(error):
            bench.run(bench.engine.score(Scoring(request_id="score", prompt=prompt, choices=choices, plane=plane)))

    def test_counters(self, bench: Bench) -> None:
        async def check() -> None:
            before = bench.engine.stats()
            await bench.ask(PROMPTS[0], sampling=greedy(5), salt="counted")
            answer = await bench.ask(PROMPTS[0], sampling=greedy(5), salt="counted")
            after = bench.engine.stats()
            assert after.generated_tokens - before.generated_tokens == 10
            assert after.prompt_tokens - before.prompt_tokens == 2 * len(PROMPTS[0])
            assert after.cache_hit_tokens - before.cache_hit_tokens == answer.cached > 0

        bench.run(check())

    # --- the end -----------------------------------------------------------------------------------------------------------------------------

    def test_stop_ends_streams_and_refuses_more(self, engine_factory: EngineFactory, material: Material) -> None:
        async def check(bench: Bench) -> None:
            with pytest.raises(EngineStopped):
                await bench.ask([1, 2])
            await bench.engine.start()
            streams = [asyncio.create_task(bench.ask(PROMPTS[1], sampling=greedy(300))) for _ in range(3)]
            await bench.until(lambda: bench.engine.stats().running == 3)
            await bench.engine.stop()
            assert {answer.finish for answer in await asyncio.gather(*streams)} == {"abort"}
            await bench.engine.stop()
            for refused in (bench.ask([1, 2]), bench.attach("a"), bench.engine.score(Scoring(request_id="x", prompt=[1], choices=[[1]]))):
                with pytest.raises(EngineStopped):
                    await refused
            assert bench.engine.stats().running == 0

        with asyncio.Runner() as runner:
            bench = Bench(engine_factory(material.base), runner, material)
            bench.run(check(bench))
