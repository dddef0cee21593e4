"""The published data of DFT-D3, from the package tad-dftd3."""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

import torch

from nvalchemiops.submodules import installed_by

_TABLE_BOHR = 0.5291772109044924
"""Bohr in angstrom, h/(2 pi m_e c alpha) of CODATA 2018, with which s-dftd3 converts radii.

An error in its eleventh digit would be visible when energies are compared with those of s-dftd3.
"""


def _without_package(package: str, *path: str) -> Any:
    """A module of a package that is not imported itself: it would import the compiler of torch, for over a second."""
    name = ".".join((package, *path))
    found = None if package in sys.modules else importlib.util.find_spec(package)
    if found is not None:
        folders = [os.path.join(folder, *path[:-1]) for folder in found.submodule_search_locations or ()]
        found = importlib.machinery.PathFinder.find_spec(name, folders)
    if found is None or found.loader is None:
        return importlib.import_module(name)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def from_package() -> dict[str, Any]:
    """The entries of `D3Parameters`."""
    try:
        importlib.import_module("tad_mctc")  # threads that first import parts of it, which import each other, fail
        reference = _without_package("tad_dftd3", "reference")
        r4r2 = _without_package("tad_dftd3", "data", "r4r2")
        radii = importlib.import_module("tad_mctc.data.radii")
        read_data, read_r4r2 = reference.Reference, r4r2.R4R2
        read_radii, read_covalent = radii.VDW_PAIRWISE, radii.COV_D3
    except (ImportError, AttributeError) as error:
        is_there = error.name not in ("tad_mctc", "tad_dftd3")
        found = (
            f"of which another release than expected is installed ({error})" if is_there else "which is not installed"
        )
        raise ImportError(
            f"the D3 data are in the package tad-dftd3, {found}: {installed_by('dispersion')}, or give a file to "
            "D3Parameters.load"
        ) from error
    data = read_data(dtype=torch.float64)
    # published in angstrom with four and two decimals; the package converts them with another bohr, or to float32
    r0ab = (read_radii(dtype=torch.float64) * _TABLE_BOHR).round(decimals=4) / _TABLE_BOHR
    covalent = (0.75 * read_covalent(dtype=torch.float64) * _TABLE_BOHR).round(decimals=2) / _TABLE_BOHR
    n = data.cn.shape[0]
    return {
        "rcov": covalent[:n] * (4.0 / 3.0),
        "r4r2": read_r4r2(dtype=torch.float64)[:n],
        "c6ab": data.c6.where((data.cn >= 0)[:, None, :, None] & (data.cn >= 0)[None, :, None, :], 0.0),
        "cn_ref": data.cn,
        "interp_mesh": data.cn.shape[1],
        "r0ab": r0ab[:n, :n],
    }
