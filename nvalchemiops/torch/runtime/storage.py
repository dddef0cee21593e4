"""Where tensors are in memory: what is recorded is known by the addresses of what it reads and writes."""

import torch


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A flat view of a tensor's whole storage, which may be written outside of inference mode, too."""
    with torch.inference_mode(False):
        return tensor.new_empty(0).set_(tensor.untyped_storage())


def memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor with elements, and the end of its last element."""
    low = tensor.data_ptr()
    reach = sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape))
    return low, low + (reach + 1) * tensor.element_size()


def holds(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether comparing ``tensor`` is enough to notice a change of ``other``, in its storage, or a new gradient."""
    if other.is_leaf and other.requires_grad:
        return other is tensor
    low, high = memory_range(tensor)
    other_low, other_high = memory_range(other)
    is_within = low <= other_low and other_high <= high
    return is_within and (_has_no_gaps(tensor) or (tensor.shape, tensor.stride()) == (other.shape, other.stride()))


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether the elements, with axes in any order, are all of those from the first to the last in memory."""
    length = 1
    for step, n in sorted((step, n) for step, n in zip(tensor.stride(), tensor.shape) if n > 1):
        if step != length:
            return False
        length *= n
    return True
