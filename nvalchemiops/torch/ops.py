"""Registers every op of the library: import this before loading an exported program.

``torch.export.load`` and packages of compiled graphs call ops by their names, which exist once the modules that define
them have been imported.
"""

from nvalchemiops.torch.interactions.dispersion import coefficients, three_body
from nvalchemiops.torch.interactions.electrostatics import k_vectors
from nvalchemiops.torch.interactions.pair import op as pair
from nvalchemiops.torch.neighbors import pairs as geometry
from nvalchemiops.torch.neighbors import rows, search
from nvalchemiops.torch.operators import fourier, lattice, mesh, mesh_transform, segments

__all__ = [
    "coefficients",
    "fourier",
    "geometry",
    "k_vectors",
    "lattice",
    "mesh",
    "mesh_transform",
    "pair",
    "rows",
    "search",
    "segments",
    "three_body",
]
