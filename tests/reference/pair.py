"""Pair potentials straight from textbooks, in torch, float64: slow, and differentiable to any order.

Formulas are functions of the distance. `find_pairs` tries every image; `energies` sums a formula over what it found.
"""

import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import scipy.constants
import torch

SQRT_PI = math.sqrt(math.pi)
BOHR = scipy.constants.value("Bohr radius") * 1e10  # angstrom
COULOMB = scipy.constants.e / (4.0 * math.pi * scipy.constants.epsilon_0) * 1e10  # eV angstrom

# -- formulas -------------------------------------------------------------------------------------


def lennard_jones(r, sigma, epsilon):
    """M. P. Allen and D. J. Tildesley, Computer Simulation of Liquids (2nd ed., Oxford, 2017), eq. (1.6)."""
    attraction = (sigma**2 / r**2) ** 3
    return 4.0 * epsilon * (attraction**2 - attraction)


def mie(r, sigma, epsilon, n, m):
    """G. Mie, Ann. Phys. 316, 657 (1903), from its minimum -epsilon at r0 = sigma (n/m)^(1/(n-m))."""
    r0 = sigma * (n / m) ** (1.0 / (n - m))
    return epsilon / (n - m) * (m * (r0 / r) ** n - n * (r0 / r) ** m)


def lorentz_berthelot(sigma1, sigma2, epsilon1, epsilon2):
    """Allen and Tildesley, eq. (1.35): arithmetic diameters, geometric depths."""
    return 0.5 * (sigma1 + sigma2), epsilon1**0.5 * epsilon2**0.5


def geometric(sigma1, sigma2, epsilon1, epsilon2):
    """W. L. Jorgensen et al., J. Am. Chem. Soc. 118, 11225 (1996): geometric means of both."""
    return sigma1**0.5 * sigma2**0.5, epsilon1**0.5 * epsilon2**0.5


def waldman_hagler(sigma1, sigma2, epsilon1, epsilon2):
    """M. Waldman and A. T. Hagler, J. Comput. Chem. 14, 1077 (1993): epsilon sigma^6 is the geometric mean."""
    sixth = 0.5 * (sigma1**6 + sigma2**6)
    return sixth ** (1.0 / 6.0), (epsilon1 * sigma1**6 * epsilon2 * sigma2**6) ** 0.5 / sixth


def soft_core(r, sigma, epsilon, scale, softness):
    """T. C. Beutler et al., Chem. Phys. Lett. 222, 529 (1994), with n = 1 and unit exponent of 1 - lambda."""
    core = softness * sigma**6 * (1.0 - scale) + r**6
    return 4.0 * epsilon * scale * (sigma**12 / core**2 - sigma**6 / core)


def coulomb(r, q1, q2):
    return q1 * q2 / r


def ewald_real_space(r, q1, q2, alpha):
    """Allen and Tildesley, eq. (6.4), first sum."""
    return q1 * q2 * (1.0 - torch.erf(alpha * r)) / r


def wolf(r, q1, q2, alpha, cutoff):
    """D. Wolf et al., J. Chem. Phys. 110, 8254 (1999), eq. (5.13): the pair term."""
    return q1 * q2 * torch.erfc(alpha * r) / r - q1 * q2 * torch.erfc(alpha * cutoff) / cutoff


def wolf_self(q, alpha, cutoff):
    """The same equation: the term of a single charge."""
    return -(torch.erfc(alpha * cutoff) / (2.0 * cutoff) + alpha / SQRT_PI) * q**2


def damped_shifted_force(r, q1, q2, alpha, cutoff):
    """C. J. Fennell and J. D. Gezelter, J. Chem. Phys. 124, 234104 (2006), eq. (19)."""
    slope = torch.erfc(alpha * cutoff) / cutoff**2
    slope = slope + 2.0 * alpha / SQRT_PI * torch.exp(-((alpha * cutoff) ** 2)) / cutoff
    shifted = torch.erfc(alpha * r) / r - torch.erfc(alpha * cutoff) / cutoff
    return q1 * q2 * (shifted + slope * (r - cutoff))


def reaction_field(r, q1, q2, dielectric, cutoff):
    """GROMACS reference manual, "Coulomb interaction with reaction field", eps_r = 1: k_rf and c_rf."""
    k = (dielectric - 1.0) / (2.0 * dielectric + 1.0) / cutoff**3
    c = 3.0 * dielectric / (2.0 * dielectric + 1.0) / cutoff
    return q1 * q2 * (1.0 / r + k * r**2 - c)


def yukawa(r, q1, q2, kappa):
    """H. Yukawa, Proc. Phys.-Math. Soc. Japan 17, 48 (1935)."""
    return q1 * q2 / r * torch.exp(-kappa * r)


def morse(r, depth, steepness, r0):
    """P. M. Morse, Phys. Rev. 34, 57 (1929), zero at infinity."""
    return depth * ((1.0 - torch.exp(-steepness * (r - r0))) ** 2 - 1.0)


def buckingham(r, a, rho, c):
    """R. A. Buckingham, Proc. R. Soc. A 168, 264 (1938)."""
    return a * torch.exp(-r / rho) - c * r**-6


def born_mayer_huggins(r, a, sigma, rho, c, d):
    """M. P. Tosi and F. G. Fumi, J. Phys. Chem. Solids 25, 45 (1964), without charges."""
    return a * torch.exp(sigma / rho) * torch.exp(-r / rho) - c * r**-6 - d * r**-8


def ziegler_biersack_littmark(r, z1, z2):
    """J. F. Ziegler, J. P. Biersack and U. Littmark, The Stopping and Range of Ions in Matter (Pergamon, 1985)."""
    x = r * (z1**0.23 + z2**0.23) / (0.8854 * BOHR)
    weights, rates = (0.18175, 0.50986, 0.28022, 0.02817), (3.1998, 0.94229, 0.4029, 0.20162)
    screening = sum(w * torch.exp(-k * x) for w, k in zip(weights, rates))
    return COULOMB * z1 * z2 / r * screening


def smoothstep(r, r_switch, cutoff):
    """Quintic from 1 at ``r_switch`` to 0 at ``cutoff``: K. Perlin, ACM Trans. Graph. 21, 681 (2002), reversed."""
    x = ((r - r_switch) / (cutoff - r_switch)).clamp(min=0.0)
    return (1.0 - x) ** 3 * (1.0 + 3.0 * x + 6.0 * x**2)


# -- sums -----------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """All pairs (i, j, image), both ways, and of those that are excluded or scaled the factor."""

    i: torch.Tensor
    j: torch.Tensor
    shift: torch.Tensor  # float64
    factor: torch.Tensor
    system: torch.Tensor  # of each atom


class Parameters(NamedTuple):
    """Parameters by what they belong to; tables are (n_species, n_species)."""

    atom: dict = {}  # noqa: RUF012
    system: dict = {}  # noqa: RUF012
    table: dict = {}  # noqa: RUF012
    species: torch.Tensor | None = None

    @property
    def values(self):
        return {**self.atom, **self.system, **self.table}

    def updated(self, values):
        """The same with other values."""
        parts = ({name: values.get(name, old) for name, old in part.items()} for part in self[:3])
        return Parameters(*parts, self.species)


def find_pairs(positions, cell, batch_idx, reach, pbc=(True, True, True), exclusions=(), factors=()):
    """Every pair closer than ``reach``, system by system, image by image."""
    x = positions.detach()
    found, lengths = [], []
    for system in range(int(batch_idx.max()) + 1):
        atoms = (batch_idx == system).nonzero()[:, 0]
        bounds = [0, 0, 0]
        lattice = torch.zeros(3, 3, dtype=x.dtype)
        if cell is not None:
            lattice = cell.detach()[system]
            dual = torch.linalg.inv(lattice)
            # between planes of images there is 1/|dual|; atoms may be stored any number of cells apart
            spread = (x[atoms] @ dual).amax(0) - (x[atoms] @ dual).amin(0)
            most = (reach * dual.norm(dim=0) + spread).ceil().int().tolist()
            bounds = [b if periodic else 0 for b, periodic in zip(most, pbc)]
        images = torch.tensor(list(itertools.product(*(range(-b, b + 1) for b in bounds))))
        apart = x[atoms][None] - x[atoms][:, None]
        farthest = apart.norm(dim=-1).flatten().max() if len(atoms) else 0.0
        images = images[(images.to(x.dtype) @ lattice).norm(dim=-1) < 1.01 * reach + farthest]
        distance = (apart + (images.to(x.dtype) @ lattice)[:, None, None]).norm(dim=-1)
        image, a, b = (distance < reach).nonzero().T
        rows = torch.cat([atoms[a, None], atoms[b, None], images[image]], dim=1)
        others = (a != b) | images[image].any(dim=1)
        found.append(rows[others])
        lengths.append(distance[image, a, b][others])
    table, length = torch.cat(found), torch.cat(lengths)
    i, j = table[:, 0], table[:, 1]
    factor = torch.ones(len(table), dtype=torch.float64)
    for (first, second), scale in zip(exclusions, factors, strict=True):
        images_of_pair = ((i == first) & (j == second)) | ((i == second) & (j == first))
        if first != second and images_of_pair.any():
            factor[images_of_pair & (length < length[images_of_pair].min() + 1e-9)] = scale
    return Pairs(i, j, table[:, 2:].to(torch.float64), factor, batch_idx.long())


def distances_of(positions, cell, pairs):
    displacement = positions[pairs.j] - positions[pairs.i]
    if cell is not None:
        displacement = displacement + torch.einsum("pa,pab->pb", pairs.shift, cell[pairs.system[pairs.i]])
    return displacement.square().sum(-1).sqrt()


def of_pairs(parameters, pairs):
    """Values of all parameters for each pair: ``q1``, ``q2`` of its atoms, ``alpha`` of its system or its species."""
    i, j = pairs.i, pairs.j
    values = {name + "1": value[i] for name, value in parameters.atom.items()}
    values |= {name + "2": value[j] for name, value in parameters.atom.items()}
    values |= {name: value[pairs.system[i]] for name, value in parameters.system.items()}
    for name, table in parameters.table.items():
        a, b = parameters.species[i], parameters.species[j]
        values[name] = 0.5 * (table[a, b] + table[b, a])
    return SimpleNamespace(**values)


def energies(pair, positions, cell, parameters, pairs, cutoff, shifted=False, r_switch=None, alone=None):
    """Energy of each atom: half of ``pair(r, values, cutoff)`` of each of its pairs, and ``alone(values, cutoff)``."""
    r = distances_of(positions, cell, pairs)
    values = of_pairs(parameters, pairs)
    cutoff = torch.as_tensor(cutoff, dtype=torch.float64)
    u = pair(r, values, cutoff)
    if shifted:
        u = u - pair(cutoff.expand(r.shape), values, cutoff)
    if r_switch is not None:
        u = u * smoothstep(r, r_switch, cutoff)
    u = torch.where(r < cutoff, pairs.factor * u, 0.0)
    total = torch.zeros(positions.shape[0], dtype=positions.dtype).index_add(0, pairs.i, 0.5 * u)
    if alone is not None:
        own = {name: value[pairs.system] for name, value in parameters.system.items()}
        total = total + alone(SimpleNamespace(**parameters.atom, **own), cutoff)
    return total


def everything(function, positions, cell, parameters, system, create_graph=False):
    """Energies, forces, gradients by parameters and virial of ``function(positions, cell, parameters)`` by autograd.

    ``parameters`` is a dict. The virial is -dE/dstrain, with positions and cell strained together.
    """
    n_systems = int(system.max()) + 1
    strain = torch.zeros(n_systems, 3, 3, dtype=positions.dtype, requires_grad=True)
    deform = torch.eye(3, dtype=positions.dtype) + strain
    x = positions if positions.requires_grad else positions.clone().requires_grad_()
    values = {k: v if v.requires_grad else v.clone().requires_grad_() for k, v in parameters.items()}
    strained = torch.einsum("ia,iab->ib", x, deform[system.long()])
    found = function(strained, None if cell is None else cell @ deform, values)
    slopes = torch.autograd.grad(found.sum(), (x, strain, *values.values()), create_graph=create_graph)
    return found, -slopes[0], dict(zip(values, slopes[2:])), -slopes[1]
