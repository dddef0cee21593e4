"""Coulomb interactions of torch tensors, within a cutoff and over all distances."""

from nvalchemiops.torch.interactions.electrostatics.automatic import Electrostatics
from nvalchemiops.torch.interactions.electrostatics.coulomb import (
    coulomb_energy,
    coulomb_energy_forces,
    coulomb_forces,
    dsf_coulomb,
)
from nvalchemiops.torch.interactions.electrostatics.ewald import (
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
)
from nvalchemiops.torch.interactions.electrostatics.features import Potentials, electrostatic_potential
from nvalchemiops.torch.interactions.electrostatics.k_vectors import (
    WaveVectors,
    generate_ewald_miller_indices,
    generate_k_squared_pme,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    k_vectors_from_miller_indices,
    prepare_wave_vectors,
)
from nvalchemiops.torch.interactions.electrostatics.modules import EwaldSummation, ParticleMeshEwald
from nvalchemiops.torch.interactions.electrostatics.multipole_parameters import (
    MultipoleEwaldParameters,
    MultipolePMEParameters,
    estimate_multipole_ewald_parameters,
    estimate_multipole_pme_parameters,
)
from nvalchemiops.torch.interactions.electrostatics.multipoles import (
    infer_l_max,
    multipole_electrostatic_energy,
    multipole_electrostatic_features,
    multipole_ewald_summation,
    multipole_particle_mesh_ewald,
    pack_multipole_moments,
    unpack_multipole_moments,
)
from nvalchemiops.torch.interactions.electrostatics.parameters import (
    ErrorEstimate,
    EwaldParameters,
    PMEParameters,
    compute_bspline_moduli_1d,
    estimate_errors,
    estimate_ewald_parameters,
    estimate_pme_mesh_dimensions,
    estimate_pme_parameters,
    mesh_spacing_to_dimensions,
)
from nvalchemiops.torch.interactions.electrostatics.pme import (
    PreparedMesh,
    particle_mesh_ewald,
    pme_reciprocal_space,
    prepare_mesh,
)
from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential, power_law
from nvalchemiops.torch.interactions.electrostatics.response import InducedMoments, born_charges, induced_moments
from nvalchemiops.torch.interactions.electrostatics.slab import compute_slab_correction

__all__ = [
    "Electrostatics",
    "ErrorEstimate",
    "EwaldParameters",
    "EwaldSummation",
    "InducedMoments",
    "LongRangePotential",
    "MultipoleEwaldParameters",
    "MultipolePMEParameters",
    "PMEParameters",
    "ParticleMeshEwald",
    "Potentials",
    "PreparedMesh",
    "WaveVectors",
    "born_charges",
    "compute_bspline_moduli_1d",
    "compute_slab_correction",
    "coulomb_energy",
    "coulomb_energy_forces",
    "coulomb_forces",
    "dsf_coulomb",
    "electrostatic_potential",
    "estimate_errors",
    "estimate_ewald_parameters",
    "estimate_multipole_ewald_parameters",
    "estimate_multipole_pme_parameters",
    "estimate_pme_mesh_dimensions",
    "estimate_pme_parameters",
    "ewald_real_space",
    "ewald_reciprocal_space",
    "ewald_summation",
    "generate_ewald_miller_indices",
    "generate_k_squared_pme",
    "generate_k_vectors_ewald_summation",
    "generate_k_vectors_pme",
    "induced_moments",
    "infer_l_max",
    "k_vectors_from_miller_indices",
    "mesh_spacing_to_dimensions",
    "multipole_electrostatic_energy",
    "multipole_electrostatic_features",
    "multipole_ewald_summation",
    "multipole_particle_mesh_ewald",
    "pack_multipole_moments",
    "particle_mesh_ewald",
    "pme_reciprocal_space",
    "power_law",
    "prepare_mesh",
    "prepare_wave_vectors",
    "unpack_multipole_moments",
]
