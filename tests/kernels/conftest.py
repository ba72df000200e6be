"""Kernels run compiled on a GPU, or in Triton's interpreter where
``TRITON_INTERPRET=1`` is set."""

import inspect
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def _numpy_scalars_as_indices() -> None:
    """Triton 3.6's interpreter calls int() on arrays of one element; numpy >= 2.4
    refuses."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _masks_of_bools() -> None:
    """Triton's interpreter makes int32 of ``block & scalar``; that of 3.9 takes no such
    mask."""
    from triton.runtime import interpreter

    def with_bools(original, place):
        def patched(self, *args):
            mask = interpreter.TensorHandle(
                args[place].data.astype(bool), args[place].dtype
            )
            return original(self, *args[:place], mask, *args[place + 1 :])

        return patched

    builder = interpreter.InterpreterBuilder
    builder.create_masked_load = with_bools(builder.create_masked_load, 1)
    builder.create_masked_store = with_bools(builder.create_masked_store, 2)


def _language_patched_once_a_launch() -> None:
    """Triton's interpreter patches its language at every call of a function, for half
    of its time.

    Functions of one file see the same language, which the end of the launch restores.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            return patch(fn)

    def launch_and_forget(self, *args, **kwargs):
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_and_forget


def _types_made_once() -> None:
    """Triton's interpreter makes the type of each tensor anew, its shape, its text and
    a table of numpy's dtypes, for a third of its time.

    The name of a type says all of it.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_type = core.block_type.__init__
    make_tensor = core.tensor.__init__
    find_dtype = interpreter._get_np_dtype
    types = {}
    tensors = {}
    dtypes = {}

    def type_of(self, element_ty, shape):
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, sizes
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key])

    def tensor_of(self, handle, type):
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name])
        self.handle = handle

    def dtype_of(type):
        if type.name not in dtypes:
            dtypes[type.name] = find_dtype(type)
        return dtypes[type.name]

    core.block_type.__init__ = type_of
    core.tensor.__init__ = tensor_of
    interpreter._get_np_dtype = dtype_of


def _unread_checks_left_out() -> None:
    """Triton's interpreter computes whether an integer overflows, for a fifth of its
    time, and asserts it in debug mode alone."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _masked_lanes_hold_anything() -> None:
    """A load that names no other value for the lanes that its mask hides promises
    nothing of them: Triton's interpreter has zeros there."""
    from triton.runtime import interpreter

    load = interpreter.InterpreterBuilder.create_masked_load

    def load_anything(self, ptrs, mask, other, *args):
        if other is None:
            dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
            is_float = dtype.kind == "f"
            unknown = 1e4 if is_float else np.iinfo(dtype).max
            data = np.full_like(ptrs.data, unknown, dtype=dtype)
            if is_float:
                data.flat[::2] = np.nan  # some kernels skip what is not finite
            other = interpreter.TensorHandle(data, ptrs.get_element_ty())
        return load(self, ptrs, mask, other, *args)

    interpreter.InterpreterBuilder.create_masked_load = load_anything


def _elements_lie_in_their_tensors() -> None:
    """A launch reads and writes elements of its own tensors: Triton's interpreter takes
    any address."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load
    store = builder.create_masked_store
    start_launch = interpreter.GridExecutor._init_args_hst
    bounds = []  # the first byte of each tensor of the launch, and the one after its last

    def note_tensors(self, args, kwargs):
        made = start_launch(self, args, kwargs)
        flat = pytree.tree_leaves(made)
        tensors = [x for x in flat if isinstance(x, torch.Tensor) and x.numel()]
        bounds[:] = {_bytes_of(x) for x in tensors}
        return made

    def require_inside(ptrs, mask):
        reached = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        if not reached.size:
            return
        least = reached.min()
        most = reached.max()
        if any(start <= least and most < end for start, end in bounds):
            return
        inside = np.zeros(reached.shape, bool)
        for start, end in bounds:
            inside |= (start <= reached) & (reached < end)
        assert inside.all(), "an element lies outside the tensors of the launch"

    def load_inside(self, ptrs, mask, *args):
        require_inside(ptrs, mask)
        return load(self, ptrs, mask, *args)

    def store_inside(self, ptrs, value, mask, *args):
        require_inside(ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    builder.create_masked_load = load_inside
    builder.create_masked_store = store_inside
    interpreter.GridExecutor._init_args_hst = note_tensors


def _arithmetic_is_fp32() -> None:
    """A kernel converts what it loads to fp32 before it computes: sums and products of
    bf16 or fp16 would be rounded, and a sum of two dtypes says not which it has.

    fp64 is for fp64 tensors; code of other packages is left alone.
    """
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_type_checking_impl

    def check_dtypes(self, lhs, rhs, *args, **kwargs):
        dtypes = [x.type.scalar for x in (lhs, rhs) if hasattr(x, "type")]
        floats = {str(dtype) for dtype in dtypes if dtype.is_floating()}
        if len(floats) > 1 or not floats <= {"fp32", "fp64"}:
            frame = inspect.currentframe().f_back
            while frame is not None and "triton" in frame.f_globals["__name__"]:
                frame = frame.f_back
            name = "" if frame is None else frame.f_globals["__name__"]
            assert not name.startswith("megatron_gdn."), (
                f"{name} computes with {floats} in line {frame.f_lineno}"
            )
        return check(self, lhs, rhs, *args, **kwargs)

    TritonSemantic.binary_op_type_checking_impl = check_dtypes


def _bytes_of(x: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


if INTERPRETED:
    _language_patched_once_a_launch()
    _unread_checks_left_out()
    _types_made_once()
    _numpy_scalars_as_indices()
    _masked_lanes_hold_anything()
    _elements_lie_in_their_tensors()
    _masks_of_bools()
    _arithmetic_is_fp32()


def pytest_report_header() -> str | None:
    """Said if pytest was started with a path in this folder."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return (
        "kernels: none is collected without a GPU; set TRITON_INTERPRET=1 (make "
        "test-kernels)"
    )


def pytest_itemcollected(item) -> None:
    """Compiled, the tests of this folder belong to those that need a GPU."""
    if not INTERPRETED:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
