"""K-vectors for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.k_vectors`."""

from typing import Any

from nvalchemiops.jax.operators import eager, operator
from nvalchemiops.jax.utils import is_traced
from nvalchemiops.torch.interactions.electrostatics import k_vectors

k_vectors_from_miller_indices: Any = operator(k_vectors.k_vectors_from_miller_indices)
generate_k_vectors_pme: Any = operator(k_vectors.generate_k_vectors_pme)
generate_k_squared_pme: Any = operator(k_vectors.generate_k_squared_pme)

_miller_indices_within_bounds: Any = operator(k_vectors.generate_ewald_miller_indices)
_miller_indices: Any = eager(k_vectors.generate_ewald_miller_indices)


def generate_ewald_miller_indices(cell: Any, k_cutoff: Any, miller_bounds: Any = None) -> Any:
    """Miller indices of a box that holds all k-vectors up to ``k_cutoff``, one of each pair k and -k.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) array, length
    k_cutoff : float or (n_systems,) array, 1/length
    miller_bounds : (int, int, int), optional
        Largest index along each axis. By default it follows from ``k_cutoff``. Required under ``jit``, since the number
        of vectors would depend on the cell.

    Returns
    -------
    (n_k, 3) int array

    Raises
    ------
    TypeError
        Under ``jit`` without ``miller_bounds``.
    """
    if miller_bounds is not None and is_traced((cell, k_cutoff)):
        return _miller_indices_within_bounds(cell, k_cutoff, miller_bounds)
    return _miller_indices(cell, k_cutoff, miller_bounds)


def generate_k_vectors_ewald_summation(cell: Any, k_cutoff: Any, miller_bounds: Any = None) -> Any:
    """K-vectors of a box that holds all of them up to ``k_cutoff``, differentiable in the cell; one of each k and -k.

    Parameters and errors are those of `generate_ewald_miller_indices`.

    Returns
    -------
    (n_k, 3) or (n_systems, n_k, 3) array, 1/length
    """
    return k_vectors_from_miller_indices(cell, generate_ewald_miller_indices(cell, k_cutoff, miller_bounds))
