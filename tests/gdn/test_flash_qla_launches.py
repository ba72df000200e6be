"""What reaches FlashQLA's kernels on Hopper, by the declarations of flash-qla 0.1.3. On
a CPU, with tensors without memory."""

import inspect
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_gdn.gdn.flash_qla import plan
from megatron_gdn.gdn.flash_qla.hopper import HopperKernels

# What flash-qla 0.1.3 declares for Hopper, by FlashQLA's functions: the factory, its
# arguments, and those of the kernel that it makes, in order. Tensors that a caller
# gives have the names of our methods' arguments. A kernel has those with + only for
# boundaries or raw states, those with - only without.
DECLARED = {
    "chunk_local_cumsum": (
        "tilelang_chunk_local_cumsum",
        "H chunk_size accum_dtype g_dtype seqlen_dtype is_varlen reverse "
        "zero_last_chunk",
        "g +cu_seqlens +chunk_indices sums -num_chunks",
    ),
    "kkt_solve": (
        "tilelang_kkt_solve",
        "H Hg DK chunk_size accum_dtype qkva_dtype b_dtype seqlen_dtype is_varlen",
        "k b +cu_seqlens +chunk_indices a -num_chunks",
    ),
    "get_warmup_chunks_bidi": (
        "tilelang_get_warmup_chunks_bidi",
        "H chunk_size threshold accum_dtype g_dtype mask_dtype seqlen_dtype "
        "force_inter_boundaries",
        "g ht_mask_fwd ht_mask_bwd cu_seqlens seq_map_r2c num_warmup_h num_warmup_bwd "
        "fallback_fwd fallback_bwd",
    ),
    "fused_gdr_h": (
        "tilelang_prepare_h",
        "H Hg DK DV chunk_size accum_dtype qkva_dtype g_dtype b_dtype h0_dtype "
        "ht_dtype h_dtype seqlen_dtype use_initial_state store_final_state store_h "
        "is_varlen is_cp state_v_first",
        "k v a g b initial_state cu_seqlens chunk_offsets num_warmup_chunks h ht mt",
    ),
    "correct_initial_states": (
        "tilelang_correct_h0",
        "H DK DV res_dtype accum_dtype h_buffer_dtype m_buffer_dtype seqlen_dtype "
        "mask_dtype use_raw_h0 state_v_first reverse transpose_m",
        "+states local through passes first_segment cp_h0",
    ),
    "fused_gdr_fwd": (
        "tilelang_fused_chunk_gdr_fwd",
        "H Hg DK DV chunk_size scale accum_dtype qkva_dtype g_dtype b_dtype h0_dtype "
        "ht_dtype h_dtype o_dtype seqlen_dtype use_initial_state store_final_state "
        "store_h store_o is_varlen is_cp state_v_first block_DV",
        "q k v a g b initial_state cu_seqlens chunk_offsets cp_seq_map raw_cu_seqlens "
        "o h ht",
    ),
    "fused_gdr_dh": (
        "tilelang_prepare_dh_ws",
        "H Hg DK DV chunk_size scale accum_dtype qkva_dtype g_dtype b_dtype dht_dtype "
        "dh_dtype o_dtype seqlen_dtype use_dht store_dh0 store_dh is_varlen is_cp "
        "state_v_first",
        "q k a g b do dht cu_seqlens chunk_offsets num_warmup_chunks dh dh0",
    ),
    "fused_gdr_bwd": (
        "tilelang_fused_chunk_gdr_bwd",
        "H Hg DK DV chunk_size scale accum_dtype qkva_dtype g_dtype b_dtype h_dtype "
        "o_dtype seqlen_dtype is_varlen use_dht state_v_first",
        "do dht q k v a g b h cu_seqlens chunk_offsets dq dk dv dg db dh0",
    ),
}
# The kernels' tensors: dtype and shape. B rows of S tokens, C chunks, N sequences, P
# segments (or uncut sequences); each other letter is an argument of the factory.
TENSORS = {
    **dict.fromkeys(("q", "k"), "qkva B S Hg DK"),
    **dict.fromkeys(("v", "dq", "dk", "dv"), "qkva B S H DV"),
    **dict.fromkeys(("o", "do"), "o B S H DV"),
    **dict.fromkeys(("g", "sums", "dg"), "g B S H"),
    **dict.fromkeys(("b", "db"), "b B S H"),
    **dict.fromkeys(("cu_seqlens", "chunk_offsets", "seq_map_r2c"), "seqlen P+1"),
    **dict.fromkeys(("first_segment", "raw_cu_seqlens"), "seqlen N+1"),
    **dict.fromkeys(("ht_mask_fwd", "ht_mask_bwd"), "mask P"),
    **dict.fromkeys(("fallback_fwd", "fallback_bwd", "passes"), "mask P H"),
    **dict.fromkeys(("num_warmup_h", "num_warmup_bwd"), "seqlen P H"),
    "a": "qkva B S H chunk_size",
    "chunk_indices": "seqlen C 2",
    "num_warmup_chunks": "seqlen P H",
    "initial_state": "h0 P H DK DV",
    "h": "h B C H DK DV",
    "ht": "ht N H DK DV",
    "mt": "ht P H DK DK",
    "states": "res N H DK DV",
    "local": "h_buffer P H DK DV",
    "through": "m_buffer P H DK DK",
    "cp_h0": "res P H DK DV",
    "cp_seq_map": "seqlen P",
    "dht": "accum P H DK DV",
    "dh": "dh B 0 H DK DV",
    "dh0": "accum P H DK DV",
}
# What the methods return, and the flag on which it depends.
RETURNED = {
    "chunk_local_cumsum": "sums",
    "kkt_solve": "a",
    "get_warmup_chunks_bidi": "num_warmup_h num_warmup_bwd fallback_fwd fallback_bwd",
    "fused_gdr_h": "h:output_h ht:output_final_state mt:output_final_state",
    "correct_initial_states": "cp_h0",
    "correct_terminal_states": "cp_h0",
    "fused_gdr_fwd": "o h:output_h ht:output_final_state",
    "fused_gdr_dh": "dh:output_dh dh0",
    "fused_gdr_bwd": "dq dk dv dg db dh0",
}
# All values differ where they may, so that nothing passes in another's place.
SIZES = {"H": 6, "Hg": 3, "DK": 32, "DV": 16, "chunk_size": 64}
WHOLE = {"B": 2, "S": 300, "C": 5, "N": 2, "P": 2}
CUT = {"B": 1, "S": 400, "C": 11, "N": 4, "P": 7}
DTYPES = {"qkva": "bfloat16", "g": "float64", "b": "float16", "h": "float8_e4m3fn"}
DTYPES |= {"o": "float8_e5m2", "seqlen": "int64", "mask": "bool", "h0": "float32"}
DTYPES |= {
    "res": "float16",
    "h_buffer": "bfloat16",
    "m_buffer": "float64",
    "accum": "float32",
}
SCALE = 0.3
THRESHOLD = -7.0
# what an argument of a method may be, where its annotation does not say it
VALUES = {"scale": (SCALE,), "threshold": (THRESHOLD,), "output_dh": (False,)}
VALUES |= {"backward": (...,)}
VALUES |= {"final_dtype": (..., torch.float32, torch.float8_e5m2)}


def dtype_of(x):
    return getattr(torch, x) if isinstance(x, str) else x


def shape_of(name, sizes):
    sizes = sizes | {"P+1": sizes["P"] + 1, "N+1": sizes["N"] + 1, "0": 0, "2": 2}
    return tuple(sizes[x] for x in TENSORS[name].split()[1:])


def calls_of(method_name):
    """The arguments and the sizes of every kind of call of a method. An argument may
    be given, be None, and, if it has a default, be left out (``...``)."""
    kernels = HopperKernels(SimpleNamespace(build_cp_context=None), {})
    method = getattr(kernels, method_name)
    choices = {}
    for name, parameter in inspect.signature(method).parameters.items():
        values = (False, True) if parameter.annotation == "bool" else (name,)
        if parameter.default is not inspect.Parameter.empty:
            values += (...,)
        elif "None" in parameter.annotation:
            values += (None,)
        choices[name] = VALUES.get(name, values)
    for choice in itertools.product(*choices.values()):
        given = {x: y for x, y in zip(choices, choice, strict=True) if y is not ...}
        has = {name for name, value in given.items() if value not in (None, False)}
        of_segments = has & {"num_warmup_chunks", "cp_seq_map", "raw_cu_seqlens"}
        of_final = has & {"num_warmup_chunks", "final_dtype"}
        is_whole = "cu_seqlens" in choices and "cu_seqlens" not in has
        no_final = "output_final_state" in choices and "output_final_state" not in has
        if is_whole and of_segments or no_final and of_final:
            continue  # such calls have no meaning
        sizes = SIZES | (WHOLE if is_whole else CUT)
        if not has & {"raw_cu_seqlens", "first_segment"}:
            sizes["N"] = sizes["P"]
        for name in {*given} & {*TENSORS} & has:
            dtype = dtype_of(DTYPES[TENSORS[name].split()[0]])
            given[name] = torch.empty(shape_of(name, sizes), dtype=dtype, device="meta")
        yield given, sizes


def launched(method, given, sizes, blocks=99):
    """What FlashQLA's factory and its kernel get, by name, and what ``method``
    returns."""
    values, arguments = {}, {}

    def factory_of(names, parameters):
        def factory(*args):
            values.update(zip(names.split(), args, strict=True))
            return kernel

        def kernel(*args):
            absent = "-" if values.get("is_varlen", values.get("use_raw_h0")) else "+"
            present = (x.strip("+-") for x in parameters.split() if x[0] != absent)
            arguments.update(zip(present, args, strict=True))

        return factory

    modules = {
        function: SimpleNamespace(TARGET_NUM_CTAS=blocks, **{name: factory_of(*rest)})
        for function, (name, *rest) in DECLARED.items()
    }
    kernels = HopperKernels(SimpleNamespace(build_cp_context=None), modules)
    kernels._chunk_table_module = SimpleNamespace(
        prepare_chunk_offsets=lambda offsets, _: (offsets.short(), sizes["C"]),
        prepare_chunk_indices=lambda offsets, _: offsets.new_empty(sizes["C"], 2),
    )
    return values, arguments, getattr(kernels, method)(**given)


def known_values(method, given, sizes):
    """The values that FlashQLA's factories get, by their names."""
    is_given = {name for name, value in given.items() if value is not None}
    backward = method == "correct_terminal_states"
    dtypes = {f"{name}_dtype": dtype_of(x) for name, x in DTYPES.items()}
    states = dtypes["qkva_dtype" if "num_warmup_chunks" in is_given else "h0_dtype"]
    dtypes |= {
        "o_dtype": dtypes["o_dtype" if "do" in given else "qkva_dtype"],
        "h_dtype": dtypes["h_dtype" if "h" in given else "qkva_dtype"],
        "ht_dtype": given.get("final_dtype", states),
        "res_dtype": dtypes["res_dtype" if "states" in is_given else "accum_dtype"],
        "dht_dtype": torch.float32,
        "dh_dtype": dtypes["qkva_dtype"],
        "seqlen_dtype": dtypes["seqlen_dtype"] if sizes["B"] == 1 else torch.int32,
    }
    flags = {
        "is_varlen": "cu_seqlens" in is_given,
        "is_cp": bool(is_given & {"num_warmup_chunks", "cp_seq_map"}),
        "use_initial_state": "initial_state" in is_given,
        "use_raw_h0": "states" in is_given,
        "use_dht": "dht" in is_given,
        "store_final_state": given.get("output_final_state"),
        "store_h": given.get("output_h"),
        "store_o": True,
        "store_dh0": True,
        "store_dh": False,
        "reverse": given.get("reverse", backward),
        "transpose_m": backward,
        "zero_last_chunk": given.get("zero_last_chunk", False),
        "force_inter_boundaries": False,
        "state_v_first": False,
    }
    numbers = {"scale": SCALE, "threshold": THRESHOLD, "block_DV": 32}
    return sizes | dtypes | flags | numbers


@pytest.mark.parametrize("method", RETURNED)
def test_a_launch_has_what_flash_qla_declares(method):
    """Every value and tensor is where FlashQLA's factory and kernel have its name;
    tensors have the declared dtypes and shapes."""
    for given, sizes in calls_of(method):
        values, arguments, returned = launched(method, given, sizes)
        known = known_values(method, given, sizes)
        as_dtypes = {x: dtype_of(y) for x, y in values.items() if x.endswith("dtype")}
        assert values | as_dtypes == {name: known[name] for name in values}
        if values.get("store_h") is False:
            sizes = sizes | {"C": 0}
        for name, x in arguments.items():
            if name == "num_chunks":
                assert x == sizes["B"] * sizes["C"]
            else:
                dtype = known[TENSORS[name].split()[0] + "_dtype"]
                assert (x.dtype, x.shape) == (dtype, shape_of(name, sizes)), name
                assert x.is_contiguous() and x.device.type == "meta", name
                assert given.get(name) is None or x is given[name], name
        check_results(given, arguments, returned, RETURNED[method])


def memory_of(x):
    """Which memory a tensor has, or a view of it; a tensor without memory has no
    address."""
    base = getattr(x, "_base", None)
    return id(x if base is None else base)


def check_results(given, arguments, returned, names):
    """What is returned is what the kernel wrote, in memory of its own; a kernel
    overwrites only what the caller allows."""
    asked = [name.partition(":") for name in names.split()]
    asked = [arguments[x] if not flag or given[flag] else None for x, _, flag in asked]
    returned = returned if isinstance(returned, tuple) else (returned,)
    assert all(x is y for x, y in zip(asked, returned, strict=True))
    written = [x for x in asked if x is not None]
    if "mt" in arguments and not given["output_final_state"]:
        written.append(arguments["mt"])  # the kernel always writes it
    memories = {memory_of(x) for x in written}
    assert len(memories) == len(written)
    overwritten = [name for name, x in given.items() if memory_of(x) in memories]
    may_overwrite = given.get("overwrite_dht") and given["dht"] is not None
    assert overwritten == (["dht"] if may_overwrite else [])
    for name in {"initial_state", "dht", "ht"} & {*arguments}:
        x = arguments[name]
        if x is given.get(name):
            continue
        others = [y for other, y in arguments.items() if other != name]
        same = [y for y in others if (y.dtype, y.shape) == (x.dtype, x.shape)]
        shared = {memory_of(x)} & ({memory_of(y) for y in same} | memories)
        assert shared or not same, "memory that nobody uses"


def test_each_function_of_flash_qla_that_the_package_calls_is_there():
    """That of the cost model is FlashQLA's own."""
    library = SimpleNamespace(build_cp_context=object())
    kernels = HopperKernels(library, {})
    for name in plan._FLASH_QLA_FUNCTIONS:
        assert hasattr(kernels, name)
    assert kernels.build_cp_context is library.build_cp_context


def test_kernels_are_launched_directly_on_hopper_alone(monkeypatch):
    for place in ("chunk.hopper.fused_fwd", "chunk.blackwell.fused_fwd"):
        monkeypatch.setitem(sys.modules, place, SimpleNamespace())
        function = SimpleNamespace(__module__=place)
        chunk = SimpleNamespace(**dict.fromkeys(plan._FLASH_QLA_FUNCTIONS, function))
        monkeypatch.setattr(plan, "flash_qla_module", lambda chunk=chunk: chunk)
        made = plan.kernels.__wrapped__()
        assert isinstance(made, HopperKernels) if "hopper" in place else made is chunk


def test_few_programs_get_few_value_columns_each():
    """As in FlashQLA, so that all multiprocessors have work; here 7 segments of 6
    heads."""
    given, sizes = next(calls_of("fused_gdr_fwd"))
    assert sizes["P"] * sizes["H"] == 42
    for programs, columns in ((42, 128), (43, 64), (84, 64), (85, 32)):
        values, _, _ = launched("fused_gdr_fwd", given, sizes, programs)
        assert values["block_DV"] == columns
