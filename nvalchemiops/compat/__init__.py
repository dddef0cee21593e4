"""Code for compatibility only: with paths, arguments and distribution of nvalchemi-toolkit-ops, and older releases.

Modules at import paths of that package and of older releases are at these paths, not here; they contain imports only.
"""
