"""Make openmm_multipoles.json: permanent and induced multipoles by OpenMM's AMOEBA force, another implementation.

Run with OpenMM 8.6.1, in an environment without this library: the tests read the numbers only. Lengths are in angstrom,
charges in e, energies in e²/angstrom. Moments are given in the frame of the laboratory; nothing is damped or excluded.
OpenMM's quadrupoles are half the traceless second moments (`quadrupoles` here); its reference platform is in float64.

Its mesh has splines of order 5. Forces on quadrupoles take their third derivatives, which are straight lines between
mesh points, so that its periodic forces are not those of an infinite sum: for "cubic" they are off by 10, 4, 1.1 and
0.4 % with 48, 96, 128 and 160 points along an axis, though they are the exact gradient of its energy. A mesh sum with
the same splines has the same errors. The stencil of OpenMM begins half a mesh point away from that of
`particle_mesh_ewald` of order 5, which has the same forces at positions shifted by half a point along each axis.
"""

import json
import pathlib

import numpy as np
import openmm
from openmm import unit

COULOMB = 138.93545764  # kJ/mol nm/e², that of OpenMM
ALPHA, CUTOFF, MESH = 0.62, 5.9, 64  # 1/angstrom, angstrom


def systems():
    rng = np.random.default_rng(3)
    for name, skew in (("cubic", 0.0), ("triclinic", 1.0)):
        cell = np.array([[12.4, 0.0, 0.0], [1.1 * skew, 12.6, 0.0], [-0.9 * skew, 1.4 * skew, 12.8]])
        grid = np.stack(np.meshgrid(*[[0, 1]] * 3, indexing="ij"), -1).reshape(-1, 3)
        positions = (0.5 * grid + 0.12 * rng.random((8, 3))) @ cell
        charges = rng.normal(size=8)
        charges -= charges.mean()
        q = rng.normal(size=(8, 3, 3)) * 0.6
        q = 0.5 * (q + q.transpose(0, 2, 1))
        q -= np.eye(3) * np.trace(q, axis1=1, axis2=2)[:, None, None] / 3.0
        yield name, positions, charges, 0.5 * rng.normal(size=(8, 3)), q, 0.5 + rng.random(8), cell


def evaluate(positions, charges, dipoles, quadrupoles, polarizabilities, cell, periodic, induced):
    system = openmm.System()
    system.setDefaultPeriodicBoxVectors(*(0.1 * cell))
    force = openmm.AmoebaMultipoleForce()
    force.setNonbondedMethod(force.PME if periodic else force.NoCutoff)
    force.setCutoffDistance(0.1 * CUTOFF)
    force.setAEwald(10.0 * ALPHA)
    force.setPmeGridDimensions([MESH] * 3)
    force.setPolarizationType(force.Mutual)
    force.setMutualInducedTargetEpsilon(1e-10)
    force.setMutualInducedMaxIterations(200)
    for q, mu, second, a in zip(charges, dipoles, quadrupoles, polarizabilities):
        system.addParticle(1.0)
        moments = (float(q), list(0.1 * mu), list(0.01 * second.ravel() / 2.0))
        force.addMultipole(*moments, force.NoAxisType, -1, -1, -1, 0.0, 0.0, float(1e-3 * a) if induced else 0.0)
    system.addForce(force)
    integrator = openmm.VerletIntegrator(0.001)
    context = openmm.Context(system, integrator, openmm.Platform.getPlatformByName("Reference"))
    context.setPositions(0.1 * positions)
    state = context.getState(getEnergy=True, getForces=True)
    energy = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    forces = np.array(state.getForces().value_in_unit(unit.kilojoule_per_mole / unit.nanometer))
    found = {"energy": energy / (10.0 * COULOMB), "forces": (forces / (100.0 * COULOMB)).tolist()}
    if induced:
        found["dipoles"] = (10.0 * np.array(force.getInducedDipoles(context))).tolist()
    return found


def main():
    values = {"alpha": ALPHA, "cutoff": CUTOFF, "mesh": MESH}
    for name, *arrays in systems():
        names = ("positions", "charges", "dipoles", "quadrupoles", "polarizabilities", "cell")
        entry = {key: np.round(value, 6).tolist() for key, value in zip(names, arrays)}
        given = [np.array(entry[key]) for key in names]
        given[1] -= given[1].mean()
        given[3] -= np.eye(3) * np.trace(given[3], axis1=1, axis2=2)[:, None, None] / 3.0
        for periodic in (True, False):
            for induced in (True, False):
                place = ("periodic" if periodic else "open") + (" induced" if induced else "")
                entry[place] = evaluate(*given, periodic, induced)
        values[name] = entry
    pathlib.Path(__file__).with_name("openmm_multipoles.json").write_text(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
