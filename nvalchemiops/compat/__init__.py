"""Code for the paths, the arguments and the distribution of nvalchemi-toolkit-ops alone, and for older releases.

Front doors at the paths that clients import stand where these paths are; they hold imports alone.
"""
