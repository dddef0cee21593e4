"""Cardinal B-splines on periodic meshes: weights, spreading and gathering, both as gather kernels.

Along each axis, a spline of order p (degree p - 1) gives an atom at ``u``, in mesh spacings, the weight
``M_p(x - u + p/2)`` at mesh point x. The weights are non-zero at p points around the atom and add up to one. Mesh point
j has the fractional coordinate j/n. Sources: I. J. Schoenberg, Q. Appl. Math. 4, 45 (1946), doi:10.1090/qam/15914; for
meshes of charges, U. Essmann et al., J. Chem. Phys. 103, 8577 (1995), doi:10.1063/1.470117.

    spread:  field(x) = Σ_i m_i w(x; u_i)          gather:  φ_i = Σ_x field(x) w(x; u_i)

The two are transposes of each other, also with derivatives with respect to u, numbered as in
`nvalchemiops.kernels.moments`. A spline of order p has p - 2 continuous derivatives; derivative p - 1 is piecewise
constant.

**Spreading.** A thread owns points of the mesh and loops over the atoms whose stencils meet them. These are in
neighboring bins of mesh cells, by which atoms are sorted. Only one thread adds to a point, so results are reproducible.
On a CPU, bins are columns along z, and a thread owns rows along z of a plane; weights are computed for `LANES` atoms at
a time in float64, and kept in the precision of the mesh; the points of a stencil along z form a vector, or two if a row
ends among them. On a GPU, bins are tiles (`TILE`), and a warp owns the points of a tile, each lane four. It visits the
atoms of its own tile and of the tiles before it: a stencil of order 5 meets six tiles, in each of which it has a sixth
of the points. Weights are stored by their distance from the first point of the atom's tile, which is the same
for all atoms of a tile.

**Gathering.** On a CPU, a thread owns `LANES` atoms. On a GPU, as many lanes of a warp as the order share an atom
(five atoms of order 6), and each has the points of the stencil with one z. Three of them place the atom, one along each
axis. A lane computes the weights of its point along each axis, in single precision for meshes of single precision: the
recurrence of splines needs those of two neighboring points.

`splines` has the weights and the text that the kernels share, `bins` the columns and tiles by which atoms are sorted,
`stencils` the tables of weights from which atoms are spread; `spread` and `gather` have the two sums, and `influence`
the factors of a mesh in Fourier space.
"""
