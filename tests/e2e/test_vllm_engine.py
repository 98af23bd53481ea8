"""prism_ray.engines.vllm_engine: the conformance suite in vLLM's own processes, and what is this engine's own.

One engine in float32 over one model that has everything: stacked projections, biases, NVFP4 attention beside MXFP4 feed-forward. The merged checkpoints are
answered by transformers, token by token over the whole sequence: another implementation, no cache. The engine starts twice, once more after its stop.
"""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from prism_ray.adapters.apply import apply_plane
from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.core.errors import ResourceError
from prism_ray.engines.detokenize import TextStream
from prism_ray.engines.loading import plane_of
from prism_ray.engines.protocol import BASE, EngineStopped, RequestRefused, Sampling, Scoring
from prism_ray.engines.vllm_engine import VllmEngine, VllmSettings
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import TINY_VOCAB_SIZE, tiny_tokenizer
from tests.engine_conformance import PROMPTS, TOKENS, Answer, Bench, EngineConformance, Material, greedy, shifted_plane

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SETTINGS = VllmSettings(
    dtype="float32",
    max_planes=4,
    max_sequences=16,
    batch_tokens=256,
    page_tokens=32,
    cache_bytes=64 << 20,
    # The eight stacks of a plane are 1.2 MB: the base and one and a half planes fit, so weights are kept, dropped, and decoded in passing.
    weight_cache_bytes=3 << 20,
    threads=1,
)


def small_qwen() -> Qwen2ForCausalLM:
    """Random; heads of 64, for vLLM's CPU attention has no 16."""
    config = Qwen2Config(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=TINY_VOCAB_SIZE - 3,
        pad_token_id=TINY_VOCAB_SIZE - 5,
    )
    model = Qwen2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 or name.endswith("bias"):
                parameter.normal_(std=0.15, generator=generator)
    return model


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """As `engine_conformance.make_material`, with both formats in one checkpoint."""
    pytest.importorskip("vllm", reason="needs the vllm extra")
    folder = tmp_path_factory.mktemp("vllm")
    quantize_to_folder(small_qwen(), tiny_tokenizer(), QuantPolicy(format="nvfp4", overrides={"*.mlp.*": "mxfp4"}), folder / "base")
    base = BasePlanes.from_checkpoint(folder / "base")
    planes, merged = {}, {}
    for seed, name in enumerate("abc"):
        scales = shifted_plane(base, seed)
        scales = {layer: data for layer, data in scales.items() if name != "c" or ".self_attn." in layer}
        planes[name], merged[name] = plane_of(scales, base, name), folder / name
        shutil.copytree(folder / "base", folder / name)
        apply_plane(folder / name, ScalePlane(scales), adapter_id=name)
    return Material(base=folder / "base", planes=planes, merged=merged)


@torch.no_grad()
def answer_of(model, prompt: list[int]) -> Answer:
    """Greedy tokens by whole forwards, and their text."""
    ids, stream, text = list(prompt), TextStream(tiny_tokenizer()), ""
    for _ in range(TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        text += stream.push(ids[-1])
    return Answer(ids[len(prompt) :], text, [])


class TestVllmEngine(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def merged(cls, material):
        folders = {BASE: material.base, **material.merged}
        models = {name: load_quantized_model(folder, dtype=torch.float32) for name, folder in folders.items()}
        return {name: [answer_of(model, prompt) for prompt in PROMPTS] for name, model in models.items()}

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, material):
        """The suite's, with a start that may take as long as it takes: three processes import vLLM."""
        with asyncio.Runner() as runner:
            engine = VllmEngine(material.base, SETTINGS)
            runner.run(engine.start())
            yield Bench(engine, runner, material)
            runner.run(engine.stop())

    def test_base_info(self, bench):
        base = bench.engine.base
        planes = BasePlanes.from_checkpoint(bench.material.base)
        assert (base.code_plane, base.scale_plane) == (planes.code_plane, planes.scale_plane)
        assert (base.max_length, base.vocab_size) == (1024, TINY_VOCAB_SIZE)
        assert base.scale_bytes == sum(tensor.scales.numel() for tensor in planes.quantized.values())

    def test_detached_planes_leave_no_bytes_in_the_worker(self, bench):
        async def check() -> None:
            before = (await bench.engine.memory())["scale_bytes"]
            for _ in range(100):
                await bench.attach("a", "c")
                await bench.detach("a", "c")
            await bench.attach("a")
            await bench.ask(PROMPTS[1], "a", greedy(2))
            held = await bench.engine.memory()
            assert held["planes"] == 1 and held["scale_bytes"] == before + bench.material.planes["a"].nbytes
            await bench.detach("a")
            after = await bench.engine.memory()
            assert before == after["scale_bytes"] == 0 and after["planes"] == 0 and after["weight_bytes"] < held["weight_bytes"]
            assert not [name for name in os.listdir("/dev/shm") if name.startswith("prism-plane-")]

        bench.run(check())

    def test_weights_beyond_the_budget_are_decoded_in_passing(self, bench, merged):
        async def check() -> None:
            await bench.attach("a", "b", "c")
            await asyncio.gather(*(bench.ask(PROMPTS[1], name) for name in merged))
            memory = await bench.engine.memory()
            assert memory["weight_refused"] > 0 and 0 < memory["weight_bytes"] <= SETTINGS.weight_cache_bytes

        bench.run(check())

    def test_more_planes_than_slots_are_refused(self, bench):
        async def check() -> None:
            base = BasePlanes.from_checkpoint(bench.material.base)
            planes = [plane_of(shifted_plane(base, seed), base, "more") for seed in range(100, 105)]
            found = await asyncio.gather(*(bench.engine.attach(plane) for plane in planes), return_exceptions=True)
            assert [type(error) for error in found] == [type(None)] * 4 + [ResourceError]
            assert len(bench.engine.stats().planes) == 5

        bench.run(check())

    def test_single_token_scores_use_the_prefix_cache(self, bench):
        async def check() -> None:
            request = Scoring(request_id="one", prompt=PROMPTS[0], choices=[[5], [6], [7]], salt="scores")
            first = await bench.engine.score(request)
            before = bench.engine.stats().cache_hit_tokens
            assert await bench.engine.score(request) == first
            assert bench.engine.stats().cache_hit_tokens > before

        bench.run(check())

    def test_scores_are_those_of_the_forward(self, bench, merged):
        model = load_quantized_model(bench.material.merged["a"], dtype=torch.float32)

        async def check() -> None:
            await bench.attach("a")
            choices = [[5, 6], [7], merged["a"][0].tokens[:4]]
            scores = await bench.engine.score(Scoring(request_id="s", prompt=PROMPTS[0], choices=choices, plane=bench.digest("a")))
            for choice, score in zip(choices, scores, strict=True):
                with torch.no_grad():
                    logits = model(torch.tensor([[*PROMPTS[0], *choice]])).logits[0]
                rows = logits[len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
                wanted = float(sum(rows[i, token] for i, token in enumerate(choice)))
                # float32 with logits of about 10: rounding of 1e-6 of that, over two layers and 70 summed products.
                assert abs(score.logprob - wanted) < 1e-3

        bench.run(check())

    def test_scores_of_mixed_planes_are_those_alone(self, bench):
        """vLLM packs scores with everything else, and a product of more rows may sum in another order: equal to 1e-3, as `..._of_the_forward`."""

        async def check() -> None:
            await bench.attach("a", "b")
            requests = [
                Scoring(request_id=f"q{i}", prompt=PROMPTS[i % len(PROMPTS)], choices=[[5, 6], [7], [8, 9, 10]], plane=bench.digest(name))
                for i, name in enumerate((BASE, "a", "b") * 3)
            ]
            alone = [await bench.engine.score(request) for request in requests]
            busy = asyncio.gather(*(bench.ask(PROMPTS[i], name) for i, name in enumerate((BASE, "a", "b"))))
            together = await asyncio.gather(*(bench.engine.score(request) for request in requests))
            await busy
            for first, second in zip(alone, together, strict=True):
                assert all(abs(a.logprob - b.logprob) < 1e-3 and a.tokens == b.tokens for a, b in zip(first, second, strict=True))
            other = await bench.engine.score(
                Scoring(request_id="b", prompt=PROMPTS[0], choices=[[5, 6], [7], [8, 9, 10]], plane=bench.digest("b"))
            )
            assert all(abs(a.logprob - b.logprob) > 0.01 for a, b in zip(alone[0], other, strict=True))

        bench.run(check())

    def test_a_seed_fixes_the_draws_in_any_company(self, bench):
        async def check() -> None:
            await bench.attach("a")
            sampling = [Sampling(max_tokens=12, temperature=1.5, top_p=0.95, top_k=50, seed=seed, ignore_eos=True) for seed in range(4)]
            alone = [(await bench.ask(PROMPTS[3], "a", each)).tokens for each in sampling]
            noise = [bench.ask(PROMPTS[index], BASE, Sampling(max_tokens=12, temperature=2.0, ignore_eos=True)) for index in range(4)]
            together = await asyncio.gather(*(bench.ask(PROMPTS[3], "a", each) for each in sampling), *noise)
            assert [answer.tokens for answer in together[:4]] == alone
            # vLLM takes temperatures up to 2.
            with pytest.raises(RequestRefused):
                await bench.ask(PROMPTS[3], "a", Sampling(max_tokens=12, temperature=5.0))

        bench.run(check())

    def test_stop_ends_streams_and_refuses_more(self, bench, merged):
        """The last test of the class, on its own engine; a stopped engine starts again."""

        async def check() -> None:
            engine = bench.engine
            streams = [asyncio.create_task(bench.ask(PROMPTS[1], sampling=greedy(300))) for _ in range(3)]
            await bench.until(lambda: engine.stats().running == 3)
            await engine.stop()
            assert {answer.finish for answer in await asyncio.gather(*streams)} == {"abort"}
            await engine.stop()
            for refused in (bench.ask([1, 2]), bench.attach("a"), engine.score(Scoring(request_id="x", prompt=[1], choices=[[1]]))):
                with pytest.raises(EngineStopped):
                    await refused
            assert bench.idle()
            await engine.start()
            assert (await bench.ask(PROMPTS[1])).tokens == merged[BASE][1].tokens

        bench.runner.run(check())
