"""The helpers that code outside depends on, one by one, and the errors for bad input."""

import dataclasses
import inspect
import types
from typing import NamedTuple

import pytest
import torch
import warp as wp

from nvalchemiops.torch.autograd import (
    OutputSpec,
    WarpAutogradContextManager,
    attach_for_backward,
    extract_gradients,
    needs_grad,
    retrieve_for_backward,
    standard_backward,
    warp_custom_op,
    warp_from_torch,
    warp_stream_from_torch,
)
from nvalchemiops.torch.autograd.declaration import with_fields
from tests.support.ops import (
    leaf,
    like,
    record_weighted_square,
    square_and_cube,
    times_kernel,
    weighted_square,
    weighted_square_kernel,
)

# -- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, torch_dtype, warp_dtype, elements",
    [
        ((4,), torch.float32, wp.float32, (4,)),
        ((4,), torch.float64, wp.float64, (4,)),
        ((4, 2), torch.float64, wp.float64, (4, 2)),
        ((4,), torch.int32, wp.int32, (4,)),
        ((4,), torch.int64, wp.int64, (4,)),
        ((4,), torch.bool, wp.bool, (4,)),
        ((4, 3), torch.float64, wp.vec3d, (4,)),
        ((3,), torch.float64, wp.vec3d, (1,)),
        ((2, 3, 3), torch.float32, wp.mat33f, (2,)),
        ((3, 3), torch.float32, wp.mat33f, (1,)),
        ((2, 5, 3), torch.int32, wp.vec3i, (2, 5)),
        ((), torch.float64, wp.float64, (1,)),
        ((0, 3), torch.float64, wp.vec3d, (0,)),
    ],
)
def test_a_view_shares_memory(shape, torch_dtype, warp_dtype, elements):
    tensor = torch.ones(shape, dtype=torch_dtype)
    array = warp_from_torch(tensor, warp_dtype)
    assert isinstance(array, wp.array) and array.shape == elements and array.dtype is warp_dtype
    assert tensor.numel() == 0 or array.ptr == tensor.data_ptr()
    if tensor.numel():
        array.fill_(0) if torch_dtype is not torch.bool else array.fill_(False)
        assert not tensor.any()


@pytest.mark.parametrize(
    "view", [lambda t: t[::2], lambda t: t[1:], lambda t: t.flip(0)[::3], lambda t: t[:1].expand(6, 3)]
)
def test_a_strided_view_reads_what_torch_reads(view):
    tensor = view(torch.arange(30.0, dtype=torch.float64).reshape(10, 3))
    torch.testing.assert_close(torch.from_numpy(warp_from_torch(tensor, wp.vec3d).numpy().copy()), tensor.contiguous())


@pytest.mark.parametrize("view", [lambda t: t[::2], lambda t: t[:1].expand(1, 3), lambda t: t[3:4], lambda t: t[:0]])
def test_a_strided_view_has_a_gradient(view):
    tensor = view(torch.ones(10, 3, dtype=torch.float64))
    array = warp_from_torch(tensor, wp.vec3d, requires_grad=True)
    assert array.grad.shape == array.shape and array.grad.strides == array.strides
    assert not array.grad.numpy().any()


def test_one_repeated_element_with_a_gradient():
    w = torch.ones((), dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        torch.autograd.grad(weighted_square(leaf(1), w.expand(1)).sum(), w)[0], leaf(1).pow(2)[0]
    )
    with pytest.raises(ValueError, match="expand"):
        warp_from_torch(torch.ones(1, dtype=torch.float64).expand(4), wp.float64, requires_grad=True)


def test_gradient_tracking_is_inherited_unless_told():
    plain, tracked = torch.ones(3), torch.ones(3, requires_grad=True)
    assert not warp_from_torch(plain, wp.float32).requires_grad
    assert warp_from_torch(tracked, wp.float32).requires_grad
    assert warp_from_torch(plain, wp.float32, requires_grad=True).requires_grad
    assert not warp_from_torch(tracked, wp.float32, requires_grad=False).requires_grad
    assert plain.grad is None and tracked.grad is None and not plain.requires_grad


@pytest.mark.parametrize(
    "tensor, warp_dtype, error, match",
    [
        (torch.ones(3), wp.float64, TypeError, "torch.float32.*torch.float64"),
        (torch.ones(4, 2), wp.vec3f, ValueError, r"must end in \(3,\)"),
        (torch.ones(3, 4).T, wp.vec3f, ValueError, r"contiguous\(\)"),
        (torch.ones(2, 3, 3).mT, wp.mat33f, ValueError, r"contiguous\(\)"),
        (torch.ones(3), float, TypeError, "`warp_dtype`"),
        ([1.0], wp.float32, TypeError, "`tensor`"),
        (torch.ones(3, device="meta"), wp.float32, ValueError, "on 'meta'"),
    ],
)
def test_impossible_views_are_refused(tensor, warp_dtype, error, match):
    with pytest.raises(error, match=match):
        warp_from_torch(tensor, warp_dtype)


def test_integers_have_no_gradient():
    with pytest.raises(TypeError, match="requires_grad"):
        warp_from_torch(torch.arange(3), wp.int64, requires_grad=True)


def test_needs_grad():
    tracked = torch.ones(3, requires_grad=True)
    assert needs_grad(tracked) and needs_grad(None, 3, "x", torch.ones(3), tracked)
    assert not needs_grad() and not needs_grad(torch.ones(3), None, 1.0)


def test_stream_binding_does_nothing_on_the_cpu():
    with warp_stream_from_torch(torch.ones(3), "cpu", 7, None) as stream:
        assert stream is None


# -- tapes by hand --------------------------------------------------------------------------------


def test_context_manager_yields_a_tape_or_none():
    with WarpAutogradContextManager(True) as tape:
        assert isinstance(tape, wp.Tape)
    with WarpAutogradContextManager(False) as tape:
        assert tape is None


def test_attach_and_retrieve():
    output, array, tape = torch.ones(3), warp_from_torch(torch.ones(3), wp.float32), wp.Tape()
    attach_for_backward(output, tape=tape, x=array)
    assert output._warp_tape is tape and output._wp_x is array
    attach_for_backward(output, y=array)
    assert retrieve_for_backward(output, "x", "y", "absent") == (tape, {"x": array, "y": array})
    bare = torch.ones(3)
    attach_for_backward(bare, x=array)
    assert retrieve_for_backward(bare, "x") == (None, {"x": array})


def recorded(x, w):
    """A forward pass as a hand-written autograd function would do it, with its context."""
    y, z = torch.empty_like(x), torch.empty_like(x)
    arrays = {n: warp_from_torch(t, wp.float64, requires_grad=True) for n, t in zip("xwyz", (x, w, y, z), strict=True)}
    with WarpAutogradContextManager(True) as tape:
        wp.launch(weighted_square_kernel, x.shape[0], [arrays["x"], arrays["w"], 1.0], [arrays["y"]], device="cpu")
        wp.launch(times_kernel, x.shape[0], [arrays["y"], arrays["x"]], [arrays["z"]], device="cpu")
    attach_for_backward(y.detach(), tape=tape, **arrays)
    context = types.SimpleNamespace(x=x, w=w, y=y, z=z)
    attach_for_backward(context.y, tape=tape, **arrays)
    return context, arrays


def test_standard_backward_of_one_output_infers_its_dtype():
    x, w = leaf(4), leaf(4, seed=1)
    c = torch.full((4,), 0.5, dtype=torch.float64)
    expected = (c * 2 * x * w).detach(), (c * x * x).detach()
    context, _ = recorded(x, w)
    for grads in (c, (c,)):
        for _ in range(2):  # and again: equal, and the given gradient untouched
            torch.testing.assert_close(standard_backward(context, grads, "y", ["x", "w", "y"], ["x", "w"]), expected)
    torch.testing.assert_close(standard_backward(context, c, "y", ["x", "w"], ["w"]), expected[1:])
    assert torch.equal(c, torch.full_like(c, 0.5))


def test_standard_backward_of_several_outputs():
    x, w = leaf(4), leaf(4, seed=1)
    c = torch.ones(4, dtype=torch.float64)
    context, _ = recorded(x, w)
    found = standard_backward(context, (c, c), ["y", "z"], ["x", "w", "y", "z"], ["x", "w"], [wp.float64, wp.float64])
    torch.testing.assert_close(found, torch.autograd.grad((x * x * w + x**3 * w).sum(), (x, w)))
    only_z = standard_backward(context, (None, c), ["y", "z"], ["x", "w"], ["x"], [wp.float64, wp.float64])
    torch.testing.assert_close(only_z, (3 * (x * x * w).detach(),))


@pytest.mark.parametrize(
    "grads, names, dtypes, match",
    [
        ((None,), ["y", "z"], None, "output_dtypes"),
        ((None,), ["y", "z"], [wp.float64] * 2, "1 entries for 2"),
        ((None, None), ["y", "z"], [wp.float64], "1 entries for 2"),
        (torch.ones(4), ["y", "z"], [wp.float64] * 2, "must be a tuple"),
        ((None, None), "y", None, "2 entries for 1"),
        (torch.ones(4), ["y"], None, "output_dtypes"),
        ((None, None), ["y", "z"], [wp.float64, wp.float32], "`z` was attached with dtype float64, not float32"),
        (torch.ones(4), "x", None, "`x` holds no tape"),
    ],
)
def test_standard_backward_refuses_what_does_not_match(grads, names, dtypes, match):
    context, _ = recorded(leaf(4), leaf(4, seed=1))
    with pytest.raises(ValueError, match=match):
        standard_backward(context, grads, names, ["x"], ["x"], dtypes)


def test_extract_gradients():
    x, w = leaf(4), leaf(4, seed=1)
    array = warp_from_torch(x, wp.float64)
    array.grad.fill_(3.0)
    context = types.SimpleNamespace(x=x, w=w, fixed=torch.ones(4), scalar=3.0, absent=None)
    found = extract_gradients(context, {"x": array}, ["fixed", "x", "absent", "w", "scalar"])
    assert found[0] is None and found[2] is None and found[4] is None
    torch.testing.assert_close(found[1], torch.full((4,), 3.0, dtype=torch.float64))
    assert torch.equal(found[3], torch.zeros(4, dtype=torch.float64)), "zeros where an array is missing"
    array.grad.zero_()
    assert found[1].sum() == 12.0, "a gradient handed out has memory of its own"


# -- signatures -----------------------------------------------------------------------------------


def test_the_public_function_has_the_signature_of_the_body():
    signature = inspect.signature(weighted_square)
    assert list(signature.parameters) == ["x", "w", "s"] and signature.parameters["s"].default == 1.0
    assert weighted_square.__name__ == record_weighted_square.__name__
    x, w = leaf(3), leaf(3, seed=1)
    for call in (
        weighted_square(x, w, 2.0),
        weighted_square(x, s=2.0, w=w),
        weighted_square(w=w, x=x, s=2),
    ):
        torch.testing.assert_close(call, 2 * x * x * w)
    assert isinstance(square_and_cube(x, w), tuple) and len(square_and_cube(x, w)) == 2
    with pytest.raises(TypeError):
        weighted_square(x)
    with pytest.raises(TypeError):
        weighted_square(x, w, token=3)


class Line(NamedTuple):
    slope: float
    offset: float = 1.0


class Range(NamedTuple):
    low: float
    high: float = 4.0


ABOVE_ZERO = Range(0.0)


def test_fields_of_named_tuples_are_arguments_of_an_op():
    @warp_custom_op("tests::of_fields", outputs=[OutputSpec("y", wp.float64, lambda *i: i[2].shape)], grad_arrays=())
    @with_fields
    def op(line: Line, x: torch.Tensor, within: Range = ABOVE_ZERO) -> torch.Tensor:
        return (line.slope * x + line.offset).clamp(within.low, within.high)

    x = torch.tensor([-2.0, 1.0, 4.0], dtype=torch.float64)
    defaults = {name: parameter.default for name, parameter in inspect.signature(op).parameters.items()}
    assert [*defaults] == ["slope", "offset", "x", "low", "high"] and (defaults["low"], defaults["high"]) == ABOVE_ZERO
    assert defaults["offset"] is inspect.Parameter.empty, "as its tuple"
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        assert call(*Line(2.0), x).tolist() == [0.0, 3.0, 4.0]
        assert call(x=x, offset=0.0, slope=1.0, high=2.0).tolist() == [0.0, 1.0, 2.0]


def test_a_tape_op_leaves_the_obvious_name_for_its_backward_free():
    @warp_custom_op("tests::weighted_square_backward", outputs=[like("z")], backward="none")
    def weighted_square_backward(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = leaf(3)
    torch.testing.assert_close(weighted_square_backward(x.detach()), x.detach() + 1)
    torch.testing.assert_close(torch.autograd.grad(weighted_square(x, x.detach()).sum(), x)[0], 2 * x * x)


def test_an_op_whose_grad_arrays_name_no_input_has_no_gradients():
    """Bodies that can record are taken as they are; who asks for a derivative is told that there is none."""

    named = warp_custom_op("tests::only_output", outputs=[like("result")], grad_arrays=["result"])
    op = named(record_weighted_square)
    x, w = leaf(3), leaf(3, seed=1)
    expected = (x * x * w).detach()
    torch.testing.assert_close(op(x.detach(), w.detach()), expected)
    torch.testing.assert_close(torch.compile(op, backend="aot_eager", fullgraph=True)(x.detach(), w.detach()), expected)
    found = op(x, w)
    torch.testing.assert_close(found.detach(), expected)
    with pytest.raises(RuntimeError, match="only_output"):
        torch.autograd.grad(found.sum(), x)


def test_specs_get_all_declared_inputs_with_defaults():
    seen = []

    def shape(*inputs):
        seen.append(inputs)
        return (inputs[0].shape[0], inputs[2])

    @warp_custom_op(
        "tests::spec_inputs",
        outputs=[OutputSpec("y", lambda *inputs: wp.float32 if inputs[3] else wp.float64, shape)],
        grad_arrays=(),
    )
    def op(x: torch.Tensor, index: torch.Tensor | None = None, n: int = 2, single: bool = False) -> torch.Tensor:
        return torch.zeros(x.shape[0], n, dtype=torch.float32 if single else torch.float64)

    x = torch.ones(5)
    assert op(x).shape == (5, 2) and op(x, n=4, single=True).dtype == torch.float32
    assert all(len(inputs) == 4 for inputs in seen)
    compiled = torch.compile(lambda x: op(x * 2, n=3), fullgraph=True, backend="aot_eager")
    assert compiled(x).shape == (5, 3)
    assert all(len(inputs) == 4 for inputs in seen)


def test_all_kinds_of_parameters():
    @warp_custom_op("tests::kinds", outputs=[like("y")], grad_arrays=())
    def op(
        x: torch.Tensor,
        i: int,
        f: float,
        b: bool,
        sizes: tuple[int, ...],
        text: str = "a b",
        optional: torch.Tensor | None = None,
        maybe: float | None = None,
        grid: list[int] | None = None,
        whole: float = 0,
        whole_or_none: float | None = 0,
    ) -> torch.Tensor:
        assert type(whole) is type(whole_or_none) is float, "as in a compiled graph"
        assert text == "a b" and list(sizes) == [1, 2]
        extra = 0.0 if optional is None else optional.sum()
        return x * i + f * b + extra + (maybe or 0.0) + sum(grid or [])

    x = torch.ones(2, dtype=torch.float64)
    assert op(x, 2, 0.5, True, (1, 2)).tolist() == [2.5, 2.5]
    assert op(x, 2, 0.5, False, [1, 2], optional=x, maybe=1.0, grid=[4]).tolist() == [9.0, 9.0]
    compiled = torch.compile(lambda x: op(x, 2, 0.5, True, (1, 2), grid=[4]), fullgraph=True, backend="aot_eager")
    assert compiled(x).tolist() == [6.5, 6.5]


def test_defaults_that_a_schema_cannot_express():
    @warp_custom_op("tests::odd_defaults", outputs=[like("y")], grad_arrays=())
    def op(x: torch.Tensor, top: float = float("inf"), text: str = 'a"b\\c\n', n: int = 2) -> torch.Tensor:
        assert text == 'a"b\\c\n'
        return x.clamp(max=top) * n

    x = torch.ones(2, dtype=torch.float64)
    assert op(x).tolist() == [2.0, 2.0] and op(x, 0.5).tolist() == [1.0, 1.0]
    assert torch.compile(op, fullgraph=True, backend="aot_eager")(x).tolist() == [2.0, 2.0]


def test_the_torch_dtype_of_a_spec_can_be_overridden():
    @warp_custom_op("tests::wide", [OutputSpec("n", wp.int32, lambda x: (1,), torch_dtype=torch.int64)], grad_arrays=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return torch.full((1,), x.numel())

    assert op(torch.ones(3)).dtype == torch.int64


def test_running_a_definition_again_works_and_another_one_is_refused():
    def define():
        @warp_custom_op("tests::again", outputs=[like("y")], grad_arrays=())
        def again(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        return again

    define()
    assert define()(torch.ones(1, dtype=torch.float64)).item() == 2.0  # a notebook cell, run twice
    with pytest.raises(ValueError, match="'tests::again' is taken"):

        @warp_custom_op("tests::again", outputs=[like("y")])
        def other(x: torch.Tensor) -> torch.Tensor:
            return x


# -- bad declarations -----------------------------------------------------------------------------


def f_unannotated(x):
    return x


def f_unsupported(x: torch.Tensor, options: dict) -> torch.Tensor:
    return x


def f_keyword_only(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x


def f_unhashable(x: torch.Tensor, sizes: [int]) -> torch.Tensor:
    return x


def f_unknown(x: "Tensr") -> torch.Tensor:  # noqa: F821
    return x


def f_plain(x: torch.Tensor, n: int = 2) -> torch.Tensor:
    return x * n


def f_default(x: torch.Tensor = None) -> torch.Tensor:
    return x


misnamed = warp_custom_op("tests::misnamed", [like("z")], backward="none")(f_plain)


@pytest.mark.parametrize(
    "body, options, error, match",
    [
        (f_unannotated, {}, TypeError, "`x` needs a type annotation"),
        (f_unsupported, {}, TypeError, "`options`"),
        (f_keyword_only, {}, TypeError, "`n`"),
        (f_unhashable, {}, TypeError, "`sizes`"),
        (f_unknown, {}, TypeError, "Tensr"),
        (f_default, {}, TypeError, "`x`"),
        (f_plain, {"grad_arrays": ["y", "x", "x"]}, ValueError, "'x' twice"),
        (f_plain, {"grad_arrays": ["y", "nothing"]}, ValueError, "'nothing'"),
        (f_plain, {"grad_arrays": ["x", "y"]}, ValueError, "outputs first"),
        (f_plain, {"grad_arrays": ["y", "n"]}, TypeError, "'n'"),
        (f_plain, {"grad_arrays": "y"}, TypeError, "grad_arrays"),
        (f_plain, {"grad_arrays": ["x"]}, ValueError, "no output"),
        (f_plain, {"grad_arrays": ["y"], "backward": lambda x, grad_y: grad_y}, ValueError, "outputs only"),
        (f_plain, {"grad_arrays": ["nothing"]}, ValueError, "'nothing'"),
        (f_plain, {"outputs": [like("x")]}, ValueError, "'x' has the name of an input"),
        (f_plain, {"outputs": [like("y"), like("y")]}, ValueError, "called 'y'"),
        (f_plain, {"outputs": ["y"]}, TypeError, "OutputSpec"),
        (f_plain, {"mutates_args": ("nothing",)}, ValueError, "'nothing'"),
        (f_plain, {"mutates_args": ("n",)}, TypeError, "'n'"),
        (f_plain, {"mutates_args": "x"}, TypeError, "mutates_args"),
        (f_plain, {"mutates_args": ("x",), "grad_arrays": ["y", "x"]}, ValueError, "'x' is mutated"),
        (f_plain, {"backward": "magic"}, TypeError, "backward"),
        (f_plain, {"backward": lambda x, unknown: x}, ValueError, "'unknown'"),
        (f_plain, {"backward": weighted_square}, ValueError, "'w'"),
        (f_plain, {"backward": misnamed}, ValueError, r"outputs \['grad_x'\], it has \['z'\]"),
        (f_plain, {"name": "no_namespace"}, ValueError, "namespace::name"),
        (f_plain, {"name": "a::b c"}, ValueError, "namespace::name"),
    ],
)
def test_bad_declarations(body, options, error, match):
    options = {"name": "tests::bad", "outputs": [like("y")], **options}
    with pytest.raises(error, match=match):
        warp_custom_op(**options)(body)


@pytest.mark.parametrize(
    "arguments, error, match",
    [
        (("not a name", wp.float64, (3,)), ValueError, "name"),
        (("y", torch.float64, (3,)), TypeError, "dtype"),
        (("y", wp.vec3d, (3, 2)), ValueError, "shape"),
    ],
)
def test_bad_output_specs(arguments, error, match):
    with pytest.raises(error, match=match):
        OutputSpec(*arguments)


def test_a_function_of_inputs_that_returns_no_warp_type():
    with pytest.raises(TypeError, match=r"'y': `dtype` returned .*float32, which is not a Warp type"):
        OutputSpec("y", lambda x: x.dtype, (3,)).resolve((torch.ones(3),))


def test_functions_of_inputs_may_be_objects_without_a_hash():
    @dataclasses.dataclass
    class DtypeOf:
        place: int

        def __call__(self, *inputs):
            return wp.dtype_from_torch(inputs[self.place].dtype)

    assert OutputSpec("y", DtypeOf(0), (3,)).resolve((torch.ones(3),)) == ((3,), torch.float32)


# -- bodies that lie, inputs that do not fit ------------------------------------------------------


@pytest.mark.parametrize(
    "result, error, match",
    [
        (lambda x: x.new_empty(4), ValueError, r"output 'y'.*\(4,\).*\(3,\)"),
        (lambda x: x.float(), ValueError, "output 'y'.*float32.*float64"),
        (lambda x: (x + 1, x + 2), ValueError, "returned 2 outputs.*'y'"),
        (lambda x: None, ValueError, "returned 'NoneType' outputs.*'y'"),
        (lambda x: (3.0,), TypeError, "output 'y' is float"),
        (lambda x: x, ValueError, "output 'y' shares memory with 'x'"),
        (lambda x: x.view(3), ValueError, "output 'y' shares memory with 'x'"),
    ],
)
def test_a_body_that_breaks_its_word(result, error, match):
    # defined here, so each case replaces the one before
    @warp_custom_op("tests::liar", outputs=[like("y")], backward="none")
    def liar(x: torch.Tensor) -> torch.Tensor:
        return result(x)

    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(error, match=match):
        liar(x)
    with pytest.raises(error, match=match):
        torch.compile(liar, fullgraph=True, backend="aot_eager")(x)


def test_a_body_without_outputs_that_returns_one():
    @warp_custom_op("tests::talkative", outputs=[], mutates_args=("x",))
    def talkative(x: torch.Tensor) -> None:
        return x.add_(1.0)

    with pytest.raises(ValueError, match="returned Tensor, but no output is declared"):
        talkative(torch.ones(3))


@pytest.mark.parametrize(
    "result, match",
    [
        (lambda g: {"w": g, "y": g}, r"a gradient for 'y', not one of \['x', 'w'\]"),
        (lambda g: g, "returned 1 gradients for 2 inputs"),
        (lambda g: (g, g, g), "returned 3 gradients for 2 inputs"),
    ],
)
def test_a_backward_that_breaks_its_word(result, match):
    @warp_custom_op("tests::odd_backward", outputs=[like("y")], backward=lambda grad_y: result(grad_y))
    def op(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    with pytest.raises(ValueError, match=match):
        op(leaf(3), leaf(3)).sum().backward()


def test_outputs_must_not_share_memory():
    @warp_custom_op("tests::twins", outputs=[like("y"), like("z")], backward="none")
    def twins(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y

    with pytest.raises(ValueError, match="output 'z' shares memory with 'y'"):
        twins(torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("trusted", [False, True])
def test_outputs_may_be_changed_in_place_however_the_body_made_them(trusted):
    """A body that returns another shape of what it filled returns a view, which autograd guards."""

    @warp_custom_op(
        f"tests::folded_{trusted}",
        [OutputSpec("y", wp.float64, lambda x: (x.shape[0] // 2, 2))],
        backward=lambda x, grad_y: 2.0 * x * grad_y.reshape(-1),
        trusted=trusted,
    )
    def folded(x: torch.Tensor) -> torch.Tensor:
        return (x * x).reshape(-1, 2)

    def changed(x):
        y = folded(x)
        y *= 3.0
        y[0] += 1.0
        return y

    for f in (changed, torch.compile(changed, fullgraph=True, backend="aot_eager")):
        x = leaf(6)
        y = f(x)
        torch.testing.assert_close(y.detach(), torch.tensor([[1.0], [0], [0]]) + (3.0 * x * x).detach().reshape(3, 2))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 6.0 * x.detach())


def test_non_contiguous_outputs_are_made_contiguous_as_the_compiler_was_told():
    @warp_custom_op(
        "tests::transposed",
        [OutputSpec("y", wp.float64, lambda x: x.shape[::-1])],
        backward=lambda grad_y: grad_y.T * 1,
    )
    def transposed(x: torch.Tensor) -> torch.Tensor:
        return (x + 0).T

    x = leaf(2, 3)
    assert transposed(x).is_contiguous()
    compiled = torch.compile(lambda x: transposed(x).reshape(-1), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), x.T.reshape(-1))


def test_tensors_on_two_devices_are_refused():
    x = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="`w` is on meta, but `x` is on cpu"):
        weighted_square.op.declared.device_of((x, x.to("meta"), 1.0))


def test_output_dtype_half_maps_to_torch():
    spec = OutputSpec("y", wp.vec3h, (4, 3))
    assert spec.resolve(()) == ((4, 3), torch.float16)
