"""The state-space controls: filters whose transition is rounded become unstable, Mamba's state diverges where the transition or the input is rounded."""

import numpy as np
import pytest
import torch
from scipy import signal
from transformers import MambaConfig, MambaForCausalLM

from prism_ray.calibrate.controls import (
    BITS,
    DESIGNS,
    MAMBA_PARTS,
    MATRICES,
    filter_table,
    fixed_point,
    identity_sweep,
    mamba_divergence,
    mamba_inputs,
    mamba_states,
    perturbed,
    pole_radius,
    quantized_system,
)
from prism_ray.core.errors import ConfigError, UnknownName


@pytest.fixture(scope="module")
def layer():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2, initializer_range=0.1)
        model = MambaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(0))
    return mamba_inputs(model, ids, 1)


# --- filters ---


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.name)
def test_the_state_space_is_the_designed_filter(design):
    system = quantized_system(design, None, 0)
    numerator, denominator = getattr(signal, design.kind)(*design.arguments)
    impulse = np.zeros(60)
    impulse[0] = 1.0
    state, outputs = np.zeros((len(system["A"]), 1)), []
    for u in impulse:
        outputs.append((system["C"] @ state + system["D"] * u).item())
        state = system["A"] @ state + system["B"] * u
    np.testing.assert_allclose(outputs, signal.lfilter(numerator, denominator, impulse), rtol=1e-9, atol=1e-12)
    # The roots of an order-6 polynomial with poles 0.1 apart move by about eps^(1/2) at most.
    assert pole_radius(system) == pytest.approx(np.abs(np.roots(denominator)).max(), abs=1e-7)
    assert pole_radius(system) < 1


def test_fixed_point_has_one_step_for_the_matrix():
    matrix = np.array([[7.0, -3.4], [0.6, 0.0]])
    np.testing.assert_array_equal(fixed_point(matrix, 4), [[7.0, -3.0], [1.0, 0.0]])
    np.testing.assert_array_equal(fixed_point(np.zeros((2, 2)), 4), np.zeros((2, 2)))
    with pytest.raises(ConfigError, match="bits is 1"):
        fixed_point(matrix, 1)


def test_the_papers_pattern():
    rows = filter_table(DESIGNS)
    assert len(rows) == len(DESIGNS) * (1 + len(MATRICES) * len(BITS))
    designed = {row.design: row.radius for row in rows if row.matrix is None}
    for row in rows:
        if row.matrix == "A" and row.bits <= 10:
            assert not row.stable, row
        if row.matrix in ("B", "C", "D"):
            assert row.radius == designed[row.design], row
    stable = {(row.design.split()[0], row.bits): row.stable for row in rows if row.matrix == "A"}
    assert stable["butterworth-5", 12] and not stable["chebyshev1-6", 16]
    assert [design for design, bits in stable if bits == 16 and not stable[design, bits]] == ["chebyshev1-6"]


@pytest.mark.parametrize("matrix", MATRICES)
def test_only_a_rounded_transition_makes_the_response_grow(matrix):
    for design in DESIGNS:
        a, b, c, d = quantized_system(design, matrix, 8).values()
        response = np.abs(signal.dimpulse((a, b, c, d, 1), n=1000)[1][0]).ravel()
        # Over 800 samples radius 0.981 and below shrinks to 2e-7, radius 1.0418 and above grows to 1e14, and the largest, 1.46, to 1e165 over all.
        late = response[900:].max() / response[:100].max()
        assert late > 1e6 if matrix == "A" else late < 1e-6, design.name


# --- Mamba ---


@torch.no_grad()
def test_the_recurrence_written_out_gives_the_modules_output(layer):
    mixer, x = layer
    states, output = mamba_states(mixer, x)
    assert states.shape == (40, 2, 64, 8)
    # 40 float32 steps on values of size about 1.
    torch.testing.assert_close(output, mixer(x), rtol=1e-4, atol=1e-5)


def test_the_output_projection_leaves_the_states_and_the_transition_starts_at_zero(layer):
    found = {(row.part, row.kind): row for row in mamba_divergence(*layer)}
    assert set(found) == {(part, kind) for part in MAMBA_PARTS for kind in ("int4", "gaussian")}
    for kind in ("int4", "gaussian"):
        assert torch.count_nonzero(found["out_proj", kind].absolute) == 0
        assert np.isnan(found["out_proj", kind].growth)
        transition = found["A_log", kind].absolute
        assert transition[0] == 0 and (transition[1:] > 0).all()
        assert found["A_log", kind].growth > 1
        for part in ("in_proj", "x_proj", "dt_proj"):
            assert found[part, kind].absolute[0] > 0


def test_the_parameters_come_back(layer):
    mixer, _ = layer
    before = {name: value.clone() for name, value in mixer.state_dict().items()}
    mamba_divergence(*layer)
    with pytest.raises(RuntimeError), perturbed(mixer, "A_log", torch.zeros_like):
        raise RuntimeError
    assert all(torch.equal(value, before[name]) for name, value in mixer.state_dict().items())
    with pytest.raises(UnknownName, match="no part 'D'"), perturbed(mixer, "D", torch.zeros_like):
        pass


def test_gaussian_noise_has_the_median_norm_of_the_rounding_errors(layer, monkeypatch):
    from prism_ray.calibrate import controls

    mixer, x = layer
    seen = {}
    plain = controls.perturbed

    def spy(mixer, part, change):
        values = controls.mamba_parameter(mixer, part).data
        seen.setdefault(part, []).append(float((change(values) - values).norm()))
        return plain(mixer, part, change)

    monkeypatch.setattr(controls, "perturbed", spy)
    mamba_divergence(mixer, x, seeds=(0, 1))
    median = sorted(norms[0] for norms in seen.values())[len(seen) // 2]
    # A difference of float32 values of size up to 2, over 2^12 entries.
    assert all(norm == pytest.approx(median, rel=1e-3) for norms in seen.values() for norm in norms[1:])


def test_an_identity_path_lowers_the_relative_sensitivity_of_the_transition(layer):
    rows = identity_sweep(*layer)
    relative = [row[2] for row in rows]
    assert [row[0] for row in rows] == [0.0, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5]
    assert relative == sorted(relative, reverse=True) and relative[-1] < 0.97 * relative[0]


@torch.no_grad()
def test_a_full_identity_path_forgets_the_transition(layer):
    mixer, x = layer
    base, _ = mamba_states(mixer, x, alpha=1.0)
    with perturbed(mixer, "A_log", torch.zeros_like):
        assert torch.equal(mamba_states(mixer, x, alpha=1.0)[0], base)
