"""Neighbor lists: kernels that build them, and what goes wrong with them."""


class NeighborOverflowError(RuntimeError):
    """An atom has more neighbors than the caller made room for. Nothing was truncated: no list was returned.

    Parameters
    ----------
    max_neighbors : int
        The room that was given.
    num_neighbors : int
        The room that is needed.
    system_index : int, optional
        The system of the atom with most neighbors.
    """

    def __init__(self, max_neighbors: int, num_neighbors: int, system_index: int | None = None) -> None:
        self.max_neighbors = int(max_neighbors)
        self.num_neighbors = int(num_neighbors)
        self.system_index = None if system_index is None else int(system_index)
        where = "" if system_index is None else f" in system {self.system_index}"
        super().__init__(
            f"`max_neighbors` = {self.max_neighbors} is too small: an atom{where} has {self.num_neighbors} neighbors"
        )

    def __reduce__(self) -> tuple[type, tuple[int, int, int | None]]:
        return type(self), (self.max_neighbors, self.num_neighbors, self.system_index)
