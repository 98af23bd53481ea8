"""Feedback exposure: every reading against a value written out, on small looped models; then the decisions."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from prism_ray.calibrate.advice import HARMLESS, Exposure, advise, measure_exposure
from prism_ray.calibrate.exposure import (
    InjectionPoint,
    LoopTap,
    SpectralRadius,
    agreement,
    component_agreement,
    component_linears,
    injection_curve,
    perturbation,
    perturbation_agreement,
    radius_pair,
    real_tokens,
    replaced,
    round_int,
    sensitivities,
    spectral_radius,
    top_tokens,
)
from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import DataError, FormatError, ModelError
from prism_ray.models.looped import looped_lm
from prism_ray.models.loops import find_loop, run_loop
from prism_ray.models.tiny import tiny_llama
from prism_ray.risk.transfer import wilson

H = 32
INT3 = partial(round_int, bits=3)


def build(seed=0, loops=3, std=0.2):
    model = looped_lm(
        seed, std=std, hidden_size=H, intermediate_size=64, num_attention_heads=2, num_loops=loops, max_position_embeddings=64
    )
    return model.requires_grad_(False), find_loop(model)


def batches():
    ids = torch.randint(0, 256, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4], mask[1, 9:] = 0, 0
    return [{"input_ids": ids[:2], "attention_mask": mask}, {"input_ids": ids[2:]}]


def linear_loop(state, radius_seed=0):
    """A model whose core is the identity, so that one step is the linear map A = [state | input part] alone."""
    model, spec = build(radius_seed)
    for block in model.model.core:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    model.model.adapter.weight[:, :H] = state
    return model, spec


# --- rounding ---


def test_rounding_by_hand():
    weight = torch.tensor([[7.0, -3.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0], [14.0, 1.0, 0.1, -14.0]])
    expected = torch.tensor([[7.0, -3.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [14.0, 0.0, 0.0, -14.0]])
    assert torch.equal(round_int(weight, 4), expected)  # scales 1, 0 and 2; 1.0 / 2 is a tie and goes to even
    grouped = round_int(weight, 4, group=2)
    torch.testing.assert_close(grouped[0, 2], torch.tensor(0.6))  # its own group's maximum is kept
    assert round_int(weight.to(torch.bfloat16), 4).dtype == torch.bfloat16
    with pytest.raises(FormatError, match="4 columns do not divide into groups of 3"):
        round_int(weight, 4, group=3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_keeps_half_a_step_and_the_number_of_levels(bits):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    found = round_int(weight, bits)
    step = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((found - weight).abs() <= step / 2 * (1 + 1e-6)).all()
    assert max(len(row.unique()) for row in found) <= 2**bits - 1


def test_weights_come_back_even_after_an_error():
    model, spec = build()
    before = sha256_tensors(model.state_dict().items())
    names = component_linears(model, spec)["both"]
    seen = []

    def fail():
        seen.append(sha256_tensors(model.state_dict().items()))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), replaced(model, names, INT3):
        fail()
    assert seen[0] != before
    assert sha256_tensors(model.state_dict().items()) == before


# --- agreement ---


def test_components():
    model, spec = build()
    linears = component_linears(model, spec)
    assert linears["adapter"] == ["model.adapter"]
    assert len(linears["core"]) == 14 and linears["both"] == linears["adapter"] + linears["core"]
    assert len(linears["prelude"]) == len(linears["coda"]) == 7


def test_agreement_counts_real_tokens_of_a_model_that_holds_the_rounded_weights():
    model, spec = build()
    found = component_agreement(model, spec, batches(), INT3)
    other, _ = build()
    other.model.adapter.weight.copy_(INT3(other.model.adapter.weight))
    equal = n = 0
    for batch in batches():
        real = real_tokens(batch)
        equal += int((model(**batch).logits.argmax(-1) == other(**batch).logits.argmax(-1))[real].sum())
        n += int(real.sum())
    assert n == 2 * 24 - 7
    assert found["adapter"] == wilson(equal, n) and equal < n
    assert set(found) == {"adapter", "core", "prelude", "coda", "both"}


def test_no_change_agrees_everywhere_and_no_batch_is_refused():
    model, spec = build()
    assert all(share.value == 1.0 for share in component_agreement(model, spec, batches(), lambda w: w).values())
    with pytest.raises(DataError, match="no batch"):
        top_tokens(model, spec, [])


def test_agreement_of_two_token_lists():
    assert agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])) == wilson(3, 4)


# --- injection ---


def test_full_injection_is_the_quantized_rollout_and_none_leaves_one_steps_error():
    model, spec = build()
    points = injection_curve(model, spec, batches(), INT3, fractions=(0.0, 1.0))
    with replaced(model, ["model.adapter"], INT3):
        quantized = top_tokens(model, spec, batches())
    assert points[1].agreement == agreement(top_tokens(model, spec, batches()), quantized)

    # λ = 0: the last step runs from the clean s_{T-1}, so only its own error is left.
    error = norm = 0.0
    for batch in batches():
        real = real_tokens(batch)
        with LoopTap(model, spec) as clean:
            run_loop(model, spec, batch)
        with replaced(model, ["model.adapter"], INT3), LoopTap(model, spec, lambda _, found, s=clean.states[-1]: s) as one:
            run_loop(model, spec, batch, steps=1)
        error += float((one.final - clean.final)[real].double().square().sum())
        norm += float(clean.final[real].double().square().sum())
    # One float32 step on equal inputs; the clean state passes through clean + 0 * (…) unchanged.
    assert points[0].relative_error == pytest.approx((error / norm) ** 0.5, rel=1e-5)


def test_in_a_linear_loop_the_injected_error_follows_its_recurrence():
    # s' = A s + c, error d_{t+1} = A d_t λ + E s_t …; with A = a I and all errors along E x it grows like the geometric sum of (a λ)^k.
    model, spec = linear_loop(0.9 * torch.eye(H))
    change = lambda w: w + 0.01 * torch.cat([torch.zeros(H, H), torch.eye(H)], dim=1)  # noqa: E731
    points = injection_curve(model, spec, batches(), change, fractions=(0.0, 0.5, 1.0))
    base = points[0].relative_error
    assert base > 0
    for point in points[1:]:
        expected = sum((0.9 * point.fraction) ** k for k in range(3))
        # float32 differences of states: 1e-7 relative to an error of about 1e-2.
        assert point.relative_error / base == pytest.approx(expected, rel=1e-4)


def test_nothing_quantized_nothing_injected():
    model, spec = build()
    for point in injection_curve(model, spec, batches(), lambda w: w):
        assert point.relative_error < 1e-6 and point.agreement.value == 1.0
    with pytest.raises(ModelError, match="no component 'gate'"):
        injection_curve(model, spec, batches(), INT3, component="gate")


# --- spectral radius ---


@pytest.mark.parametrize("rotated", [False, True])
def test_the_radius_of_a_linear_loop_is_its_matrix(rotated):
    if rotated:  # a complex pair of magnitude 0.8 on top: single growths oscillate, their geometric mean does not
        state = 0.3 * torch.eye(H)
        state[0, 0] = state[1, 1] = 0.48
        state[0, 1], state[1, 0] = -0.64, 0.64
    else:
        state = torch.diag(torch.linspace(0.1, 0.8, H))
        state[-2, -2] = 0.4
    model, spec = linear_loop(state)
    found = spectral_radius(model, spec, batches()[0], iterations=80)
    # The real gap of the diagonal is 0.8 / 0.755; (0.755 / 0.8)^40 = 10 % of a start that may hold little of the top vector.
    assert found.estimate == pytest.approx(0.8, rel=0.02)
    assert len(found.rows) == 2 and found.spread < 0.05


def test_the_radius_is_that_of_the_dense_jacobian_of_the_last_real_token():
    model, spec = build(3)
    batch = batches()[0]
    with LoopTap(model, spec) as tap:
        run_loop(model, spec, batch)
    at = tap.final
    last = [11, 8]  # padded on the left, and on the right from 9
    expected = []
    for row in range(2):
        columns = []
        for unit in torch.eye(H):
            ends = []
            for sign in (1, -1):
                moved = at.clone()
                moved[row, last[row]] += sign * 1e-2 * unit
                with LoopTap(model, spec, lambda _, found, moved=moved: moved) as tap:
                    run_loop(model, spec, batch, steps=1)
                ends.append(tap.final[row, last[row]].double())
            columns.append((ends[0] - ends[1]) / 2e-2)
        expected.append(float(torch.linalg.eigvals(torch.stack(columns, dim=1)).abs().max()))
    found = spectral_radius(model, spec, batch, iterations=60)
    # Central differences are good to (1e-2)^2; what is left is the convergence of the power iteration.
    assert found.rows == pytest.approx(expected, rel=0.05), found.spread
    assert spectral_radius(model, spec, batch, iterations=60, seed=5).estimate == pytest.approx(found.estimate, rel=0.05)


def test_the_quantized_radius_is_taken_at_the_bases_state():
    model, spec = linear_loop(torch.diag(torch.linspace(0.1, 0.5, H)))
    base, changed = radius_pair(model, spec, batches()[1], ["model.adapter"], lambda w: 3 * w, iterations=10)
    assert changed.estimate == pytest.approx(3 * base.estimate, rel=1e-3)


# --- perturbations, sensitivities, proxy ---


@pytest.mark.parametrize("kind", ["rank4", "gaussian"])
def test_random_perturbations_have_the_rounding_errors_norm(kind):
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    noise = perturbation(weight, INT3, kind, torch.Generator().manual_seed(1)) - weight
    assert float(noise.norm()) == pytest.approx(float((INT3(weight) - weight).norm()), rel=1e-5)
    rank = int(torch.linalg.matrix_rank(noise.double(), rtol=1e-4))
    assert rank == (4 if kind == "rank4" else 24)
    assert torch.equal(perturbation(weight, INT3, "rounding", torch.Generator()), INT3(weight))


def test_perturbation_agreement_pools_the_seeds_of_random_kinds():
    model, spec = build()
    found = perturbation_agreement(model, spec, batches(), INT3, seeds=(0, 1))
    assert found["rounding", "adapter"] == component_agreement(model, spec, batches(), INT3)["adapter"]
    assert found["gaussian", "core"].n == 2 * found["rounding", "core"].n == 82
    assert len(found) == 6


def test_the_three_readings_and_the_proxy_of_the_adapter():
    model, spec = build()
    found = {reading.name: reading for reading in sensitivities(model, spec, batches(), INT3)}
    assert len(found) == 15
    adapter = found["model.adapter"]
    weight = model.model.adapter.weight.double()
    error = INT3(weight.float()).double() - weight
    grams = [torch.zeros(2 * H, 2 * H, dtype=torch.float64) for _ in range(3)]
    inputs = []
    handle = model.model.adapter.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
    for batch in batches():
        inputs.clear()
        run_loop(model, spec, batch)
        for gram, x in zip(grams, inputs, strict=True):
            rows = x[real_tokens(batch)].double()
            gram += rows.T @ rows
    handle.remove()
    # float32 products of 64 columns: 64 * 2^-24 = 4e-6.
    assert adapter.trace == pytest.approx(float(sum(gram.trace() for gram in grams)), rel=1e-5)
    assert adapter.proxy == pytest.approx([float((error @ gram @ error.T).trace()) for gram in grams], rel=1e-4)
    assert adapter.reference == pytest.approx([float((weight @ gram @ weight.T).trace()) for gram in grams], rel=1e-4)
    assert adapter.ablation == pytest.approx(1 - component_agreement(model, spec, batches(), INT3)["adapter"].value)
    # E |W d|^2 / |d|^2 = |W|_F^2 / I; the mean of 64 norms lies below the root of the mean square by a few per cent.
    assert adapter.gain == pytest.approx(float(weight.norm()) / (2 * H) ** 0.5, rel=0.1)
    assert adapter.first_share == pytest.approx(adapter.proxy[0] / sum(adapter.proxy))
    assert adapter.proxy_spread == pytest.approx(max(adapter.proxy) / min(adapter.proxy))
    assert not any(module._forward_pre_hooks for module in model.modules())


# --- advice ---


def exposure(adapter, core, rotated, radius=(0.9, 0.9), n=1000):
    share = lambda value: wilson(round(value * n), n)  # noqa: E731
    point = InjectionPoint(fraction=1.0, relative_error=0.1, agreement=share(adapter))
    return Exposure(
        family="prism_looped",
        steps=8,
        agreement={"adapter": share(adapter), "core": share(core), "prelude": share(0.99), "both": share(min(adapter, core))},
        rotated=share(rotated),
        injection=[replace(point, fraction=0.0), point],
        radius_base=SpectralRadius(estimate=radius[0], rows=(radius[0],), spread=0.0),
        radius_quantized=SpectralRadius(estimate=radius[1], rows=(radius[1],), spread=0.0),
        perturbations={},
        sensitivities=[],
    )


LINEARS = {"adapter": ["a"], "core": ["c", "d"], "prelude": ["p"], "both": ["a", "c", "d"]}


@pytest.mark.parametrize(
    ("readings", "action"),
    [
        ({"adapter": 0.105, "core": 0.879, "rotated": 0.12}, "keep-bf16"),  # Huginn at per-channel INT4
        ({"adapter": 0.105, "core": 0.879, "rotated": 0.80}, "rotate"),
        ({"adapter": 0.96, "core": 0.999, "rotated": 0.96}, "trajectory"),  # exposed, and harmless
        ({"adapter": 0.80, "core": 0.79, "rotated": 0.80}, "trajectory"),  # the core costs as much
        ({"adapter": 0.86, "core": 0.88, "rotated": 0.86}, "trajectory"),  # the gap is below EXPOSED_GAP
        ({"adapter": 0.50, "core": 0.70, "rotated": 0.50, "n": 20}, "trajectory"),  # too few tokens to tell
        ({"adapter": 0.86, "core": 0.88, "rotated": 0.86, "radius": (0.95, 1.2)}, "keep-bf16"),
        ({"adapter": 0.86, "core": 0.88, "rotated": 0.94, "radius": (0.95, 1.2)}, "rotate"),
        ({"adapter": 0.86, "core": 0.88, "rotated": 0.86, "radius": (1.1, 1.2)}, "trajectory"),  # was above 1 already
    ],
)
def test_the_decision_about_the_adapter(readings, action):
    found = advise(exposure(**readings), LINEARS)
    assert found.decisions["adapter"].action == action
    assert "a" in found.modules[action]
    assert found.decisions["core"].action == "trajectory" and found.decisions["prelude"].action == "quantize"
    assert "both" not in found.decisions
    assert f"{readings['adapter']:.1%}" in found.text and "Local spectral radius" in found.text
    json.dumps(found.to_dict())


def test_the_whole_measurement_on_an_exposed_adapter():
    # Two input columns 30 times the rest make one scale a row useless for the rest of the adapter, and the core is left alone.
    model, spec = build(std=0.1)
    model.model.adapter.weight[:, [3, 40]] *= 30
    found = measure_exposure(model, batches(), INT3, seeds=(0,), iterations=10)
    assert found.agreement["adapter"].value < HARMLESS
    assert found.rotated.n == found.agreement["adapter"].n == 41
    assert [point.fraction for point in found.injection] == [0.0, 0.25, 0.5, 0.75, 1.0]
    data = json.loads(json.dumps(found.to_dict()))
    assert data["sensitivities"][0]["proxy_spread"] >= 1 and data["perturbations"][0]["kind"] == "rounding"
    assert advise(found, component_linears(model, spec)).modules


def test_a_model_that_does_not_loop_is_refused():
    with pytest.raises(ModelError, match="has no recurrence"):
        measure_exposure(tiny_llama(), batches(), INT3)
