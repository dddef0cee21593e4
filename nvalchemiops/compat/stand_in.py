"""A wheel without files, called ``nvalchemi-toolkit-ops``: packages that require it by name get this one.

Clients import `nvalchemiops`, but require the distribution of that name, which pip would write over this one.
"""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from nvalchemiops.compat.installation import STAND_IN

RELEASE = "0.5.0"
"""The release whose public names and arguments this package takes."""

_METADATA = """\
Metadata-Version: 2.1
Name: nvalchemi-toolkit-ops
Version: {version}
Summary: Stands in for nvalchemi-toolkit-ops {release}: it has no files, and nvalchemiops is used
Provides-Extra: jax
Provides-Extra: jax-cu12
Provides-Extra: jax-cu13
Provides-Extra: torch
Provides-Extra: torch-cu12
Provides-Extra: torch-cu13
"""

_WHEEL = """\
Wheel-Version: 1.0
Generator: nvalchemiops
Root-Is-Purelib: true
Tag: py3-none-any
"""


def write_stand_in(folder: Path, release: str = RELEASE) -> Path:
    """Write the wheel into ``folder`` and return its path.

    Parameters
    ----------
    folder : Path
        Made if it does not exist.
    release : str, optional
        The release that the wheel claims to be, for clients that require another one, such as 0.3.1 for orb-models;
        digits and points.

    Raises
    ------
    ValueError
        A release that is not a version number.
    """
    if not re.fullmatch(r"\d+(\.\d+)*", release):
        raise ValueError(f"`release` must be numbers with points between them, as {RELEASE}, got {release!r}")
    version = f"{release}{STAND_IN}"
    info = f"nvalchemi_toolkit_ops-{version}.dist-info"
    files = {
        f"{info}/METADATA": _METADATA.format(version=version, release=release),
        f"{info}/WHEEL": _WHEEL,
    }
    record = [f"{name},{_digest(text)},{len(text.encode())}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"nvalchemi_toolkit_ops-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(zipfile.ZipInfo(name), text)  # without the time, so that the same wheel has the same bytes
    return path


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"
