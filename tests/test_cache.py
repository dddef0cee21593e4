"""Results that are kept by value: the same as computed anew."""

import pytest
import torch

from nvalchemiops.torch.runtime import context
from nvalchemiops.torch.runtime.cache import cached_by_value


def negated_by_a_flag():
    """-5, stored as 5."""
    values = torch.complex(torch.ones(3).double(), torch.full((3,), 5.0).double()).conj().imag
    assert values.is_neg()
    return values


def test_lazily_negated_values_are_told_from_those_that_are_not():
    x = negated_by_a_flag()
    for values in (x, -x, x.resolve_neg()):
        (found,) = cached_by_value("test: double", (values,), (), lambda: (2.0 * values,))  # noqa: B023 (called at once)
        assert torch.equal(found, 2.0 * values)


@pytest.mark.parametrize("transformed", [False, True])
def test_lazily_negated_values_on_the_host(transformed):
    x = negated_by_a_flag()
    seen = []
    if transformed:
        torch.func.grad(lambda y: (seen.append(context.on_host(torch._neg_view(y))), y.sum())[1])(-x)
    else:
        seen.append(context.on_host(x))
    assert seen[0].tolist() == [-5.0, -5.0, -5.0]
