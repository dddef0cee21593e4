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


def test_what_may_be_read_behind_a_graph_break():
    """Functions that Python calls there are compiled by themselves; a question must not be answered for the caller."""

    def doubled(x):
        if not (context.may_read(x) and context.is_eager(x) and context.may_keep(x)):
            raise ValueError("this is taken for compiled code")
        return 2.0 * x

    def broken(x):
        y = x + 1.0
        torch._dynamo.graph_break()
        return doubled(y)

    torch.compiler.reset()
    assert torch.equal(torch.compile(broken, backend="eager")(torch.ones(3)), torch.full((3,), 4.0))

    def asked(x):
        return torch.zeros_like(x) if context.may_read(x) or context.is_eager(x) or context.may_keep(x) else 2.0 * x

    found = torch.compile(asked, backend="eager", fullgraph=True)(torch.ones(3))
    assert torch.equal(found, torch.full((3,), 2.0))
