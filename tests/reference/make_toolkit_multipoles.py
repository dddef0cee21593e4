"""Make toolkit_multipoles.json: values of nvalchemi-toolkit-ops 0.5.0, whose multipole functions this library has too.

Run with nvalchemi-toolkit-ops 0.5.0 and torch 2.13, in an environment of their own: the tests read the numbers only.
Only sums over k-vectors alone: its kernels of pairs take long to compile.
"""

import json
import pathlib

import numpy as np
import torch

from nvalchemiops.torch.interactions import electrostatics as toolkit

SIGMA, ACCURACY = 0.6, 1e-8


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
