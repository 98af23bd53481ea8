"""prism_ray.engines.transformers_engine: the conformance suite over dense and sparse models and both formats, and what is this engine's own."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from prism_ray.core.errors import ModelError, ResourceError
from prism_ray.engines import sequence_attention
from prism_ray.engines.plane_cache import PlaneCache
from prism_ray.engines.protocol import BASE, EngineStopped, Generation, Sampling, Scoring
from prism_ray.engines.sampling import TokenSampler
from prism_ray.engines.transformers_engine import TransformersEngine, TransformersSettings
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.models.tiny import TINY_VOCAB_SIZE, tiny_llama, tiny_qwen3_moe
from tests.engine_conformance import PROMPTS, TOKENS, Bench, EngineConformance, ExactAnswers, Material, greedy, make_material

SETTINGS = TransformersSettings(dtype="float32", cache_tokens=4096, page_tokens=16, batch_tokens=64, weight_cache_bytes=8 << 20)


@pytest.fixture(scope="module")
def engine_factory():
    return lambda folder: TransformersEngine(folder, SETTINGS)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Material:
    return make_material(tiny_llama(tie=False), "nvfp4", tmp_path_factory.mktemp("dense"))


class TestDense(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def material(cls, dense):
        return dense


class TestSparse(ExactAnswers):
    @pytest.fixture(scope="class")
    @classmethod
    def material(cls, tmp_path_factory):
        return make_material(tiny_qwen3_moe(), "mxfp4", tmp_path_factory.mktemp("sparse"), names=("a", "b"))


def served(folder: Path, settings: TransformersSettings, material: Material, check) -> None:
    """Run `check(bench)` on an engine of its own."""
    with asyncio.Runner() as runner:
        bench = Bench(TransformersEngine(folder, settings), runner, material)
        bench.run(bench.engine.start())
        try:
            bench.run(check(bench))
        finally:
            bench.run(bench.engine.stop())


def generated(folder: Path, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    """transformers' own greedy generation from a checkpoint in the ordinary loader."""
    model = load_quantized_model(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_answers_are_those_of_plain_transformers(dense):
    async def check(bench):
        await bench.attach("a", "c")
        for name, folder in ((BASE, dense.base), ("a", dense.merged["a"]), ("c", dense.merged["c"])):
            for prompt in (PROMPTS[0], PROMPTS[1]):
                assert (await bench.ask(prompt, name)).tokens == generated(folder, prompt)

    served(dense.base, SETTINGS, dense, check)


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_cache_bytes": 0},  # every weight decoded in every step
        {"weight_cache_bytes": 40_000},  # a few weights fit
        {"batch_tokens": 7, "page_tokens": 4},  # prompts in many pieces
        {"cache_tokens": 192, "page_tokens": 8, "max_sequences": 16},  # sequences are put off and begin again
    ],
    ids=lambda changes: "-".join(changes),
)
def test_limits_change_no_answer(dense, changes):
    expected = {name: generated(folder, PROMPTS[0]) for name, folder in ((BASE, dense.base), ("a", dense.merged["a"]))}

    async def check(bench):
        await bench.attach("a", "b")
        answers = await asyncio.gather(*(bench.ask(PROMPTS[0], name) for name in (BASE, "a", "b", BASE, "a", "b")))
        for name, answer in zip((BASE, "a", "b") * 2, answers, strict=True):
            assert name == "b" or answer.tokens == expected[name]
            assert len(answer.tokens) == TOKENS and answer.finish == "length"
        assert (await bench.ask(PROMPTS[0], "b")).tokens == answers[2].tokens == answers[5].tokens

    served(dense.base, SETTINGS.with_overrides(changes), dense, check)


def test_bfloat16_serves_the_merged_checkpoint(dense):
    """The merged checkpoint and the attached plane go through the same products, so the answers agree in bfloat16 too."""
    settings = SETTINGS.with_overrides({"dtype": "bfloat16"})
    expected = []

    async def merged(bench):
        expected.extend([(await bench.ask(prompt)).tokens for prompt in PROMPTS[:3]])

    async def check(bench):
        await bench.attach("a")
        assert [(await bench.ask(prompt, "a")).tokens for prompt in PROMPTS[:3]] == expected

    served(dense.merged["a"], settings, dense, merged)
    served(dense.base, settings, dense, check)


def test_sliding_windows(tmp_path):
    config = MistralConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=258,
    )
    torch.manual_seed(0)
    material = make_material(MistralForCausalLM(config).eval(), "nvfp4", tmp_path, names=("a",))

    async def check(bench):
        await bench.attach("a")
        answers = await asyncio.gather(*(bench.ask(prompt, name) for prompt in PROMPTS for name in (BASE, "a")))
        for answer, (prompt, folder) in zip(answers, [(p, f) for p in PROMPTS for f in (material.base, material.merged["a"])], strict=True):
            assert answer.tokens == generated(folder, prompt)
            assert answer.cached == 0

    served(material.base, SETTINGS.with_overrides({"batch_tokens": 16}), material, check)


def test_a_fault_in_one_sampler_ends_one_sequence(dense, monkeypatch):
    choose = TokenSampler.choose

    def faulty(self, logits):
        return choose(self, torch.full_like(logits, torch.nan) if self._top == 5 else logits)

    async def check(bench):
        bad = asyncio.create_task(bench.ask(PROMPTS[1], sampling=greedy(8, logprobs=5)))
        good = await bench.ask(PROMPTS[1])
        with pytest.raises(ModelError, match="not finite"):
            await bad
        assert good.tokens == generated(dense.base, PROMPTS[1])
        assert bench.idle()

    monkeypatch.setattr(TokenSampler, "choose", faulty)
    served(dense.base, SETTINGS, dense, check)


def test_a_failed_step_ends_everything_with_an_error(dense):
    async def check(bench):
        streams = [asyncio.create_task(bench.ask(PROMPTS[1], sampling=greedy(300))) for _ in range(3)]
        await bench.until(lambda: bench.engine.stats().running == 3)
        layer = bench.engine.loaded.model.model.layers[0].mlp
        layer.forward = lambda x: 1 / 0
        score = asyncio.create_task(bench.engine.score(Scoring(request_id="s", prompt=[1, 2], choices=[[3]])))
        results = await asyncio.gather(*streams, score, return_exceptions=True)
        assert all(isinstance(result, EngineStopped | ZeroDivisionError) for result in results)
        assert all(isinstance(result, EngineStopped) for result in results[:3])
        with pytest.raises(EngineStopped):
            await bench.ask([1])
        assert bench.idle()

    served(dense.base, SETTINGS, dense, check)


def test_an_architecture_that_batches_wrongly_is_refused(dense, monkeypatch):
    monkeypatch.setattr(sequence_attention, "_visible", lambda queries, keys, window, device: (None, False))
    with asyncio.Runner() as runner:
        engine = TransformersEngine(dense.base, SETTINGS)
        with pytest.raises(ModelError, match="ordinary forward"):
            runner.run(engine.start())
        assert engine.stats().planes == {}


def test_planes_come_and_go_through_the_cache(dense):
    """Three planes and the base in room for two, many requests at once: every answer is its own plane's; 60 cycles leave the starting bytes and tensors."""
    loads = []

    def load(key):
        loads.append(key)
        return dense.planes[key]

    async def check(bench):
        room = dense.planes["a"].nbytes + dense.planes["b"].nbytes
        cache = PlaneCache(bench.engine, load, room, wait_s=60, fair_s=0.05)
        expected = {name: generated(folder, PROMPTS[1]) for name, folder in ({BASE: dense.base} | dense.merged).items()}

        async def use(key):
            if key == BASE:
                return (await bench.ask(PROMPTS[1])).tokens == expected[BASE]
            async with cache.pin(key) as digest:
                assert digest in bench.engine.stats().planes
                return (await bench.ask(PROMPTS[1], key)).tokens == expected[key]

        assert all(await asyncio.gather(*(use(key) for key in ("a", BASE, "b", "c") * 6)))
        assert cache.resident_bytes <= room and cache.stats().evictions > 0
        await cache.close()
        assert set(bench.engine.stats().planes) == {BASE} and cache.resident_bytes == 0
        counts = []
        for index in range(60):
            async with cache.pin("ab"[index % 2]):
                pass
            await cache.unload("ab"[index % 2])
            if index in (9, 59):
                gc.collect()
                counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        assert counts[0] == counts[1] and bench.engine.stats().planes == {BASE: bench.engine.base.scale_bytes}

    served(dense.base, SETTINGS, dense, check)


def test_an_engine_starts_again(dense):
    with asyncio.Runner() as runner:
        bench = Bench(TransformersEngine(dense.base, SETTINGS), runner, dense)
        for _ in range(2):
            bench.run(bench.engine.start())
            bench.run(bench.engine.start())  # a second call does nothing
            bench.run(bench.attach("a"))
            assert bench.run(bench.ask(PROMPTS[1], "a")).tokens == generated(dense.merged["a"], PROMPTS[1])
            bench.run(bench.engine.stop())


def test_a_folder_that_is_no_base_is_refused(tmp_path):
    with asyncio.Runner() as runner:
        engine = TransformersEngine(tmp_path, SETTINGS)
        with pytest.raises(ModelError):
            runner.run(engine.start())
        with pytest.raises(EngineStopped):
            _ = engine.base


def test_a_cache_that_does_not_fit_is_refused(dense, monkeypatch):
    monkeypatch.setattr("transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown", lambda: ("cpu", 1000, 0, 0))
    with asyncio.Runner() as runner, pytest.raises(ResourceError, match="cache_tokens"):
        runner.run(TransformersEngine(dense.base, SETTINGS).start())


def test_the_longest_sequence_fits_the_cache(dense):
    settings = SETTINGS.with_overrides({"cache_tokens": 64, "page_tokens": 16, "batch_tokens": 16})

    async def check(bench):
        assert bench.engine.base.max_length == 64
        prompt = PROMPTS[0][:40]
        answers = await asyncio.gather(*(bench.ask(prompt, sampling=greedy(24)) for _ in range(3)))
        assert all(answer.tokens == generated(dense.base, prompt, 24) for answer in answers)

    served(dense.base, settings, dense, check)


def test_salts_and_planes_are_kept_apart_in_the_root():
    from prism_ray.engines.prefix_cache import block_hash, root_hash

    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("a", "b"), ("b", "a")]
    assert len({root_hash(*pair) for pair in pairs}) == len(pairs)
    root = root_hash("t", "d")
    assert block_hash(root, [1, 2]) != block_hash(root, [2, 1]) != block_hash(block_hash(root, [1]), [2])
    assert 0 <= root < 2**128


def test_what_a_request_says_about_end_of_sequence(dense):
    async def check(bench):
        first = generated(dense.base, PROMPTS[0])[3]
        bench.engine._loaded = type(bench.engine.loaded)(**{**vars(bench.engine.loaded), "eos": frozenset({first})})
        ends = Sampling(max_tokens=TOKENS, temperature=0.0)
        answer = await bench.ask(PROMPTS[0], sampling=ends)
        assert answer.finish == "stop" and answer.tokens[-1] == first
        on = await bench.ask(PROMPTS[0], sampling=greedy(stop_token_ids=(first,)))
        assert on.finish == "length" and len(on.tokens) == TOKENS

    served(dense.base, SETTINGS, dense, check)


def test_an_iterator_that_is_never_started_holds_nothing(dense):
    async def check(bench):
        request = Generation(request_id="x", prompt=[1], sampling=greedy())
        stream = bench.engine.generate(request)
        await stream.aclose()
        assert bench.idle()

    served(dense.base, SETTINGS, dense, check)
