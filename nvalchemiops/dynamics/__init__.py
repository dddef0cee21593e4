"""Steps of molecular dynamics and relaxation on Warp arrays, under the paths that clients import.

They are views of functions of tensors: `nvalchemiops.torch.clients.dynamics` and `optimizers` say what each does.
"""
