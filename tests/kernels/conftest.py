"""Kernels run compiled on a GPU, or in Triton's interpreter where
``TRITON_INTERPRET=1`` is set."""

import os
from dataclasses import replace

import pytest
import torch

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


if INTERPRETED:
    _language_patched_once_a_launch()
    _unread_checks_left_out()
    _types_made_once()
    _numpy_scalars_as_indices()
    _masks_of_bools()


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
