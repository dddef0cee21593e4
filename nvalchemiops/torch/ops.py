"""Register every op of the library. Import this module before loading an exported program.

``torch.export.load`` and packages of compiled graphs call ops by their names, which exist once the modules that define
them have been imported.
"""

# imported only to register their ops
from nvalchemiops.torch.distributed import collectives, transform  # noqa: F401
from nvalchemiops.torch.interactions.dispersion import coefficients, three_body  # noqa: F401
from nvalchemiops.torch.interactions.electrostatics import k_vectors  # noqa: F401
from nvalchemiops.torch.interactions.pair import moments, op  # noqa: F401
from nvalchemiops.torch.neighbors import pairs, rows, search  # noqa: F401
from nvalchemiops.torch.operators import chains, fourier, influence, lattice, mesh, mesh_transform, noise, segments  # noqa: F401
from nvalchemiops.torch.runtime import compiled  # noqa: F401
