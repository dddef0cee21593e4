"""Raises an error with instructions if another distribution has files in the folder of this package.

``nvalchemi-toolkit-ops`` installs a package with the same import name. pip writes its files over ours without a
warning, and removes both when it is uninstalled. In either order of installation the imported files are a mixture.
"""

import os
import sys

_WAY_OUT = (
    "Uninstall both, by `pip uninstall nvalchemi-toolkit-ops nvalchemiops`, then install nvalchemiops again. "
    "What requires nvalchemi-toolkit-ops by name is satisfied by the package that `python -m nvalchemiops stand-in` "
    "makes; see docs/coming_from.md"
)

STAND_IN = "+nvalchemiops"
"""End of the version of our stand-in for that distribution, which has no files and does no harm."""


def refuse_mixture(package: str) -> None:
    """Raise an ImportError if the files in the folder ``package`` are not all of this distribution.

    Looks at the names of distributions next to the folder, which takes about ten microseconds.
    """
    try:
        beside = os.listdir(os.path.dirname(package))
    except OSError:  # a bundle, or a folder that may not be listed
        beside = []
    for name in beside:
        distribution, _, version = name.removesuffix(".dist-info").partition("-")
        theirs = distribution.lower().replace("-", "_") == "nvalchemi_toolkit_ops"
        if theirs and name.endswith(".dist-info") and not version.endswith(STAND_IN):
            raise ImportError(
                f"nvalchemi-toolkit-ops {version} is installed over nvalchemiops, or nvalchemiops over it: "
                f"{package} has files of both. {_WAY_OUT}"
            )
    if getattr(sys.modules.get(__name__.partition(".")[0]), "__file__", None) is None:
        raise ImportError(f"{package} has lost its `__init__.py`, perhaps to pip uninstall. {_WAY_OUT}")


refuse_mixture(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
