"""Hadamard rotation of a Linear's input: orthogonal, exact up to rounding, spreads an outlier."""

import pytest
import torch
from scipy.linalg import hadamard as scipy_hadamard
from torch import nn

from prism_ray.calibrate.exposure import round_int
from prism_ray.calibrate.rotation import RotatedLinear, Rotation, hadamard, rotate_linear, rotate_weight, through_rotation
from prism_ray.core.errors import ModelError

WIDTHS = [1, 2, 64, 96, 15, 160]


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_transform_is_sylvesters_matrix(size):
    x = torch.randn(3, size, dtype=torch.float64)
    expected = x @ torch.from_numpy(scipy_hadamard(size)).double() / size**0.5
    torch.testing.assert_close(hadamard(x), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_orthogonal_and_the_inverse_undoes_it(width):
    rotation = Rotation(width, seed=3)
    eye = torch.eye(width, dtype=torch.float64)
    matrix = rotation(eye)
    # Products of `width` entries of size at most 1: 160 * 2^-53 = 2e-14.
    torch.testing.assert_close(matrix @ matrix.T, eye, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotation.inverse(matrix), eye, rtol=0, atol=1e-13)


@pytest.mark.parametrize("width", [64, 96, 160])
@pytest.mark.parametrize("bias", [True, False])
def test_the_output_of_a_linear_is_unchanged(width, bias):
    torch.manual_seed(0)
    linear = nn.Linear(width, 24, bias=bias)
    x = torch.randn(2, 5, width)
    # Two float32 products over 160 columns of |W x| about 0.5: 160 * 2^-24 * 0.5 = 5e-6.
    torch.testing.assert_close(RotatedLinear(linear, Rotation(width))(x), linear(x), rtol=0, atol=1e-5)


def test_a_bfloat16_model_keeps_an_orthogonal_rotation():
    linear = nn.Linear(96, 8).to(torch.bfloat16)
    rotated = RotatedLinear(linear, Rotation(96)).to(torch.bfloat16)
    assert rotated.linear.weight.dtype == torch.bfloat16
    eye = torch.eye(96, dtype=torch.float64)
    torch.testing.assert_close(rotated.rotation(eye) @ rotated.rotation(eye).T, eye, rtol=0, atol=1e-13)
    assert rotated(torch.randn(2, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_it_spreads_an_outlier():
    x = torch.zeros(256, dtype=torch.float64)
    x[17] = 100.0
    torch.testing.assert_close(Rotation(256)(x).abs(), torch.full((256,), 100 / 16, dtype=torch.float64))
    odd = torch.zeros(160, dtype=torch.float64)
    odd[17] = 100.0
    assert float(Rotation(160)(odd).abs().max()) <= 100 / 32**0.5 + 1e-9  # p = 32, |Q| <= 1
    ones = torch.ones(256, dtype=torch.float64)
    assert float(Rotation(256)(ones).abs().max()) < 5.0  # without the signs all of its norm, 16, would be in one column


def test_rounding_an_outlier_column_costs_less_after_rotation():
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    weight[:, 5] *= 50
    plain = (round_int(weight, 4) - weight).norm()
    rotated = (through_rotation(lambda w: round_int(w, 4))(weight) - weight).norm()
    assert float(rotated) < 0.6 * float(plain)


def test_through_rotation_is_what_a_rotated_linear_with_a_quantized_weight_computes():
    torch.manual_seed(0)
    linear = nn.Linear(96, 16, bias=False)
    x = torch.randn(4, 96)
    rotated = RotatedLinear(linear, Rotation(96))
    rotated.linear.weight.data = round_int(rotated.linear.weight.data, 4)
    effective = through_rotation(lambda w: round_int(w, 4))(linear.weight.data)
    torch.testing.assert_close(x @ effective.T, rotated(x), rtol=0, atol=1e-5)


def test_seed_and_width_decide_it():
    weight = torch.randn(4, 96)
    assert torch.equal(rotate_weight(weight, Rotation(96, 1)), rotate_weight(weight, Rotation(96, 1)))
    assert not torch.equal(rotate_weight(weight, Rotation(96, 1)), rotate_weight(weight, Rotation(96, 2)))


def test_it_replaces_a_linear_by_name_and_refuses_anything_else():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(3, 8)
    before = model(x)
    assert model[0] is not rotate_linear(model, "0").linear
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match="1: is ReLU"):
        rotate_linear(model, "1")
    with pytest.raises(ModelError, match="meets a tensor of 4 columns"):
        Rotation(8)(torch.ones(4))
    with pytest.raises(ModelError, match="no power of two"):
        hadamard(torch.ones(6))
