"""What is assumed about private parts of Warp, and what happens where a release does not have them."""

import ctypes
import struct

import pytest
import torch
import warp as wp

from nvalchemiops import _warp_internals as internals
from nvalchemiops import launch as core
from nvalchemiops import threads
from nvalchemiops.torch import launch as of_tensors
from tests.routes.test_launch import row_sum, scatter


@pytest.fixture
def fresh():
    """Nothing that was found out about Warp before is known, now and afterwards."""

    def forget():
        internals.descriptor_type.cache_clear()
        internals._switched_off.cache_clear()
        of_tensors._parameters.cache_clear()
        threads.commands().clear()

    forget()
    yield
    forget()


def sums_of_rows(kernel=row_sum):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(50, 7, generator=generator)
    y, where = torch.empty(50, dtype=torch.float64), torch.empty(50, dtype=torch.int32)
    for _ in range(3):
        of_tensors.launch(kernel, 50, [x], [y, where])
    return y


def commands_of(kernel):
    return [command for (key, *_), command in threads.commands().items() if key is kernel]


# -- what is assumed ------------------------------------------------------------------------------


def test_parameters_of_a_kernel():
    found = internals.parameters(row_sum)
    assert [p.label for p in found] == ["offset", "x", "y", "where"]
    assert found[0].type is wp.int32
    assert (found[1].type.dtype, found[1].type.ndim) == (wp.float32, 2)


def test_adjoints_of_a_kernel():
    assert internals.has_adjoint(scatter) and not internals.has_adjoint(row_sum)


def test_what_types_are_made_of():
    @wp.struct
    class Pair:
        first: wp.float64
        second: wp.int32

    assert internals.component_type(wp.mat33d) is wp.float64 and internals.component_shape(wp.mat33d) == (3, 3)
    assert internals.component_type(wp.float32) is None and internals.component_shape(wp.float32) == ()
    assert internals.struct_size(Pair) == 16 and internals.struct_size(wp.vec3f) is None


def test_a_descriptor_begins_with_addresses():
    array = wp.zeros(4, dtype=wp.float64, device="cpu", requires_grad=True)
    assert struct.unpack_from("QQ", bytes(array.__ctype__())) == (array.ptr, array.grad.ptr)
    assert internals.descriptor((4,), (8,))[16:] == bytes(array.__ctype__())[16:]


def test_small_launches_on_a_cpu_write_all_arguments_at_once(fresh):
    sums_of_rows()
    assert [command.pack is not None for command in commands_of(row_sum)] == [True]


def test_modules_tell_where_they_are_kept():
    core.load(row_sum, wp.get_device("cpu"))
    assert internals.compiled_folder(row_sum, 1).is_dir()
    assert not internals.failed_to_build(row_sum)


def test_tapes_get_the_launches_of_their_thread():
    with core.record() as tape:
        x = wp.zeros(2, dtype=wp.float64, device="cpu", requires_grad=True)
        total = wp.zeros(1, dtype=wp.float64, device="cpu", requires_grad=True)
        wp.launch(scatter, 2, [x, wp.zeros(2, dtype=wp.int32, device="cpu"), total], device="cpu")
        tape.record_func(lambda: None, [x])
    assert len(tape.launches) == 2


# -- where it does not hold -----------------------------------------------------------------------


def without_fields(monkeypatch):
    monkeypatch.setattr(internals.Command, "_prepare", lambda self: self.recorded.no_such_name)


def in_another_form(monkeypatch):
    prepare = internals._packer

    def packer(structure, types):
        pack = prepare(structure, types)
        return pack and (lambda to, at, *values: pack(to, at, values[0] + 1, *values[1:]))

    monkeypatch.setattr(internals, "_packer", packer)


@pytest.mark.parametrize("change", [without_fields, in_another_form])
def test_launches_that_cannot_be_prepared_are_warps(change, fresh, monkeypatch, caplog):
    expected = sums_of_rows()
    threads.commands().clear()
    change(monkeypatch)
    assert torch.equal(sums_of_rows(), expected)
    assert [command.pack for command in commands_of(row_sum)] == [None]
    assert [record.name for record in caplog.records] == ["nvalchemiops"]
    assert "launches that write all arguments at once" in caplog.text


def test_tensors_become_arrays_where_descriptors_are_others(fresh, monkeypatch, caplog):
    expected = sums_of_rows()
    of_tensors._parameters.cache_clear()
    threads.commands().clear()
    monkeypatch.setattr(of_tensors, "descriptor_type", lambda: None)
    monkeypatch.setattr(internals, "descriptor_type", lambda: None)
    assert torch.equal(sums_of_rows(), expected)
    x, index = torch.rand(30, dtype=torch.float64), torch.zeros(30, dtype=torch.int32)
    total, gradient = torch.zeros(1, dtype=torch.float64), torch.zeros(30, dtype=torch.float64)
    of_tensors.launch(scatter, 30, [x, index], [total])
    torch.testing.assert_close(total[0], x.square().sum())
    one = torch.ones(1, dtype=torch.float64)
    of_tensors.launch_adjoint(scatter, 30, [x, index, total], [gradient, None, one])
    torch.testing.assert_close(gradient, 2.0 * x)
    with pytest.raises(TypeError, match="float64"):
        of_tensors.launch(scatter, 30, [x.float(), index], [total])
    with pytest.raises(ValueError, match="expected 1 array dimensions"):
        of_tensors.launch(scatter, 30, [x.reshape(5, 6), index], [total])


def test_descriptors_of_another_layout_are_not_used(fresh, monkeypatch, caplog):
    monkeypatch.setattr(wp.array, "__ctype__", lambda self: ctypes.c_double(0.0))
    assert internals.descriptor_type() is None
    assert "array descriptors as bytes" in caplog.text
