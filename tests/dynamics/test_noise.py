"""Random numbers by counters: the generator, distributions, and what a number depends on."""

import numpy as np
import pytest
import scipy.stats
import torch
import warp as wp

from nvalchemiops.kernels.native import native_kernel
from nvalchemiops.kernels.noise import PHILOX
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.noise import chi_square_noise, normal_noise, places_in_systems

# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)


def integers(*values):
    return torch.tensor(values, dtype=torch.int64)


def words(texts):
    values = [[int(word, 16) for word in text.split()] for text in texts]
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.int32))


def philox(counter: list[int], key: list[int]) -> list[int]:
    """The generator in Python, as Salmon et al. define it (2011)."""
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def uniform_pair(seed: int, key: int, step: int, stream: int, atom: int, block: int) -> list[float]:
    """The two uniform numbers of a block."""
    third = (step >> 32) << 16 | stream << 8 | block
    w = philox([atom, step & 0xFFFFFFFF, third, key], [seed & 0xFFFFFFFF, seed >> 32])
    return [((w[n] >> 5) * 2**26 + (w[n + 1] >> 6) + 0.5) / 2**53 for n in (0, 2)]


def test_the_generator_gives_the_published_numbers():
    body = f"""{PHILOX}
        const int *c = counters.data + 6 * thread;
        const auto block = philox(c[0], c[1], c[2], c[3], c[4], c[5]);
        for (int n = 0; n < 4; ++n) blocks.data[4 * thread + n] = block.w[n];
    """

    @native_kernel("philox_blocks", body)
    def kernel(thread: wp.int32, counters: wp.array2d(dtype=wp.int32), blocks: wp.array2d(dtype=wp.int32)):
        """Compute a block."""

    counters, keys, expected = (words(column) for column in zip(*KNOWN))
    found = torch.empty_like(expected)
    launch(kernel, 3, [torch.cat([counters, keys], 1)], [found])
    assert torch.equal(found, expected)


def test_each_part_of_the_counter_is_where_the_documentation_says():
    """Normal numbers by Box and Muller of the blocks that a slow generator gives for these counters."""
    seed, key, step, stream = 0x123456789ABCDEF, 0xFEDCBA98, 0x765432101234, 77
    atoms = torch.tensor([5, 1 << 30], dtype=torch.int32)
    found = normal_noise(
        integers(seed), integers(key), torch.tensor(step), torch.zeros(2, dtype=torch.int32), atoms, stream, 2, 5
    )
    for row, atom in enumerate(atoms.tolist()):
        for block in range(3):
            u, v = uniform_pair(seed, key, step, stream, atom, block)
            expected = np.sqrt(-2 * np.log(u)) * np.array([np.cos(2 * np.pi * v), np.sin(2 * np.pi * v)])
            part = found[row, 2 * block : 2 * block + 2].numpy()
            assert np.abs(part - expected[: len(part)]).max() < 1e-14


def test_normal_numbers_are_normal_and_independent():
    n = 40_000
    values = normal_noise(integers(3), integers(0), torch.tensor(9), None, None, 0, n, 3)
    assert scipy.stats.kstest(values.flatten().numpy(), "norm").pvalue > 1e-3
    others = [
        normal_noise(integers(seed), integers(key), torch.tensor(step), None, None, stream, n, 3)
        for seed, key, step, stream in ((4, 0, 9, 0), (3, 1, 9, 0), (3, 0, 10, 0), (3, 0, 9, 1))
    ]
    columns = torch.cat([values, *others, values[1:].roll(1, 0).repeat(2, 1)[:n]], 1)
    correlations = torch.corrcoef(columns[:, :15].T) - torch.eye(15, dtype=torch.float64)
    assert correlations.abs().max() < 5 / np.sqrt(n)  # five standard errors


@pytest.mark.parametrize("degrees", (1.0, 0.3, 2.0, 5.0, 95.0))
def test_sums_of_squares_follow_the_chi_square_distribution(degrees):
    n = 20_000
    keys = torch.arange(n)
    values = chi_square_noise(
        torch.full((n,), 11), keys, torch.tensor(2), torch.full((n,), degrees, dtype=torch.float64), 3
    )
    assert scipy.stats.kstest(values.numpy(), "chi2", args=(degrees,)).pvalue > 1e-3


def test_sums_of_squares_are_those_of_marsaglia_and_tsang():
    """By their method, of which each attempt has two blocks of its own; some of them are rejected."""
    rejected, n = 0, 100
    for degrees in (0.3, 2.0, 7.0):
        found = chi_square_noise(
            torch.full((n,), 11), torch.arange(n), torch.tensor(2), torch.full((n,), degrees, dtype=torch.float64), 3
        )
        d = degrees / 2 + (degrees < 2) - 1 / 3
        for key, value in enumerate(found.tolist()):
            attempt, accepted = 0, False
            while not accepted:
                attempt += 1
                (u, angle), (v, w) = (uniform_pair(11, key, 2, 3, 0, 2 * attempt + k) for k in (0, 1))
                x = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * angle)
                cube = (1 + x / np.sqrt(9 * d)) ** 3
                accepted = cube > 0 and np.log(v) < x**2 / 2 + d - d * cube + d * np.log(cube)
            rejected += attempt - 1
            assert value == pytest.approx(2 * d * cube * (w ** (2 / degrees) if degrees < 2 else 1), rel=1e-12)
    assert rejected > 3


def test_a_sum_of_no_squares_is_zero():
    found = chi_square_noise(
        integers(1, 1), integers(0, 1), torch.tensor(0), torch.tensor([0.0, -1.0], dtype=torch.float64), 0
    )
    assert found.tolist() == [0.0, 0.0]


def test_noise_depends_on_the_place_of_an_atom_in_its_system_alone():
    batch_idx = torch.tensor([2, 0, 2, 2, 0], dtype=torch.int32)
    places = places_in_systems(batch_idx, 3)
    assert places.tolist() == [0, 0, 1, 2, 1] and places.dtype == torch.int32
    seeds, keys, step = integers(5, 6, 7), integers(10, 20, 30), torch.tensor(4)
    found = normal_noise(seeds, keys, step, batch_idx, places, 0, 5, 3)
    alone = normal_noise(seeds[2:], keys[2:], step, None, None, 0, 3, 3)
    assert torch.equal(found[batch_idx == 2], alone)


def test_an_atom_of_no_system_has_no_noise():
    found = normal_noise(
        integers(5), integers(0), torch.tensor(4), torch.tensor([0, 1, -1], dtype=torch.int32), None, 0, 3, 3
    )
    assert found.isnan().any(1).tolist() == [False, True, True]
