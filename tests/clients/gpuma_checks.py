"""gpuma: the import of its models, which puts our D3 at the path of orb-models 0.6."""

import importlib.util

import pytest

from nvalchemiops.torch.interactions import dispersion

if importlib.util.find_spec("gpuma") is None or importlib.util.find_spec("torch_sim") is None:
    pytest.skip("it cannot be imported here", allow_module_level=True)


def test_imports():
    models = importlib.import_module("gpuma.models")
    module = importlib.import_module("nvalchemiops.interactions.dispersion.dftd3")
    assert module.dftd3 is dispersion.dftd3 and module.D3Parameters is dispersion.D3Parameters
    assert callable(models.load_torchsim_model)
