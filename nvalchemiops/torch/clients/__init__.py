"""Names of nvalchemi-toolkit-ops that its clients call and that have no other place here: views of this library.

Their import paths are modules that contain imports only, such as `nvalchemiops.dynamics.integrators`.
"""
