"""Fourier sums over atoms at the k-vectors of a lattice, as gather kernels.

With fractional coordinates s, a k-vector with Miller indices n has the phase ``2π n.s``, and

    spread:  S(n) = Σ_i m_i exp(2πi n.s_i)                                        real and imaginary part
    gather:  φ_i = Σ_n Re F(n) cos(2π n.s_i) + Im F(n) sin(2π n.s_i)

are transposes of each other, also with derivatives with respect to s, numbered as in `nvalchemiops.kernels.moments`.
Only one of k and -k is needed, so the first index is not negative. A *point* is a triple (|n_x|, |n_y|, |n_z|) with the
four k-vectors ``(n_x, ±n_y, ±n_z)``, in the order ++, +-, -+, --.

The phases factorise. The eight products of a cosine or sine for each axis give all four k-vectors of a point by
additions. So a pair of an atom and a point needs 8 multiplications, half as many as complex arithmetic.

On a CPU, these sums are matrix products over blocks of points and atoms that fit into registers and caches. Cosines and
sines of all multiples of the phases are tabulated, and products with those that are always one or zero are left out.
Derivatives are taken axis after axis: with respect to z for each point, to y for all points with equal n_x and n_y, and
to x for all points with equal n_x.

On a GPU a thread has one point or one atom, and if these are few, a part of its sum. Threads of a warp do the same at
the same time: those of points read the phases of one atom from a table, those of atoms the values of one point, and
phases of consecutive points come from one product. A pair of an atom and a point takes 14 operations in float64 to
spread, and 13 to gather, instead of a hundred with three sines and cosines.

The points of a system must be consecutive. Points with equal n_x and n_y should be consecutive, because they share
products.

`phases` has the tables of phases and the text that both kernels share; `spread` and `gather` have the two kernels.
"""
