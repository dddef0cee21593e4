"""Code for the paths, the arguments and the distribution of nvalchemi-toolkit-ops alone, and for older releases.

Modules at import paths of that package and of older releases are where these paths say; they contain imports only.
"""
