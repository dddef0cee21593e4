"""Sphinx configuration: MyST pages, numpydoc docstrings, warnings are errors (`make docs`)."""

import sys
from pathlib import Path

import nvalchemiops

sys.path.insert(0, str(Path(__file__).parent))
import gallery

gallery.build()

project = "nvalchemiops"
author = "The nvalchemiops authors"
copyright = f"2026, {author}"
version = release = nvalchemiops.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"nvalchemiops {release}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_typehints = "none"  # the numpydoc sections state types, with shapes and units
autodoc_member_order = "bysource"

numpydoc_show_class_members = False
numpydoc_xref_param_type = False
