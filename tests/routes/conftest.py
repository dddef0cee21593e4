"""Fixtures of calls that are captured."""

import pytest


@pytest.fixture
def made(monkeypatch, gpu):
    from tests.support.plans import counted_graphs

    with counted_graphs(monkeypatch, gpu) as made:
        yield made


@pytest.fixture
def calls(gpu):
    from tests.support.captures import Calls

    return Calls(gpu.device)
