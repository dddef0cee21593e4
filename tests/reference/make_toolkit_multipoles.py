"""Make toolkit_multipoles.json: values of nvalchemi-toolkit-ops 0.5.0, whose multipole functions this library has too.

Run with nvalchemi-toolkit-ops 0.5.0 and torch 2.13, in an environment of their own: the tests read the numbers only.
Its kernels of pairs and meshes take some ten minutes to compile, once.

Its sums over k-vectors and its Ewald sums agree, for charged cells as well. Its particle-mesh sum agrees with them in
rectangular cells only: in the skewed cell here it is off by 0.8 % of the energy with a mesh of any size, and depends on
alpha (-5.092 at alpha 0.7 and -5.091 at 1.4 for neutral charges, in the place of -5.134 eV). So it is evaluated in a
rectangular cell.
"""

import itertools
import json
import pathlib

import numpy as np
import torch

from nvalchemiops.torch.interactions import electrostatics as toolkit

SIGMA, ACCURACY = 0.6, 1e-8
SUM = {"sigma": SIGMA, "alpha": 1.4}
MESH = {"mesh_dimensions": (64, 64, 64), "spline_order": 6}


def neighbors(positions, cell, cutoff):
    """All pairs closer than the cutoff as a list by atom: neighbors, first pairs, images."""
    bounds = (cutoff * torch.linalg.inv(cell).norm(dim=0)).ceil().int() + 1
    images = torch.tensor(list(itertools.product(*(range(-int(b), int(b) + 1) for b in bounds))))
    vectors = positions[None, :, None] + images.double() @ cell - positions[:, None, None]
    distances = vectors.norm(dim=-1)
    near = (distances < cutoff) & (distances > 1e-9)
    _, j, image = near.nonzero(as_tuple=True)
    pointers = torch.cat([torch.zeros(1, dtype=torch.int64), near.sum((1, 2)).cumsum(0)])
    return j.int(), pointers.int(), images[image].int()


def main():
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(5)
    cell = np.array([[7.0, 0.0, 0.0], [1.0, 6.8, 0.0], [-0.7, 0.9, 7.2]])
    positions = np.round(rng.random((5, 3)) @ cell, 6)
    charges = np.round(rng.normal(size=5), 6)
    dipoles = np.round(0.5 * rng.normal(size=(5, 3)), 6)
    second = rng.normal(size=(5, 3, 3))
    second = np.round(0.5 * (second + second.transpose(0, 2, 1)), 6)
    values = {"positions": positions, "charges": charges, "dipoles": dipoles, "second": second, "cell": cell}
    values = {name: value.tolist() for name, value in values.items()}
    x, q, mu, Q, h = (torch.tensor(values[name]) for name in values)
    Q = Q - torch.eye(3) * Q.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    wide = {"receiver_sigmas": [0.5, 0.9], "feature_max_l": 2}
    for order, given in enumerate(((q,), (q, mu), (q, mu, Q))):
        moments = toolkit.pack_multipole_moments(*given)
        found = {"packed": moments}
        for own in (False, True):
            options = {"sigma": SIGMA, "k_cutoff": 10.0, "include_self_interaction": own}
            found[f"energy {own}"] = toolkit.multipole_electrostatic_energy(x, moments, h, **options)
            for mode in range(3):
                features = toolkit.multipole_electrostatic_features
                found[f"features {own} {mode}"] = features(x, moments, h, **options, **wide, feature_normalize=mode)
        values[str(order)] = {name: value.tolist() for name, value in found.items()}
    box = torch.diag(h.diagonal())
    for order in range(3):
        for charged in (False, True):
            moments = toolkit.pack_multipole_moments(*(q if charged else q - q.mean(), mu, Q)[: order + 1])
            found = toolkit.multipole_ewald_summation(x, moments, h, *neighbors(x, h, 7.5), **SUM, k_cutoff=10.0)
            by_mesh = toolkit.multipole_particle_mesh_ewald(x, moments, box, *neighbors(x, box, 7.5), **SUM, **MESH)
            name = "charged" if charged else "neutral"
            values[str(order)] |= {f"ewald {name}": found.tolist(), f"mesh {name}": by_mesh.tolist()}
    big = torch.rand(200, 3) * 20.0, 20.0 * torch.eye(3)
    for ratio in (1.0, 8.0):
        ewald = toolkit.estimate_multipole_ewald_parameters(*big, 0.5, accuracy=ACCURACY, cost_ratio=ratio)
        pme = toolkit.estimate_multipole_pme_parameters(*big, 0.5, accuracy=ACCURACY, cost_ratio=ratio)
        numbers = [ewald.alpha, ewald.real_space_cutoff, ewald.reciprocal_space_cutoff, pme.alpha]
        values[f"parameters {ratio}"] = [float(n) for n in numbers] + list(pme.mesh_dimensions)
    path = pathlib.Path(__file__).with_name("toolkit_multipoles.json")
    path.write_text(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
