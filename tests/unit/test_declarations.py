"""What the package declares once for all its code: records, caches, and the defaults of
public functions."""

import ast
import dataclasses
import enum
import inspect
import pkgutil
import re
from functools import cache
from importlib import import_module
from pathlib import Path

from megatron.core.ssm import gated_delta_net, mamba_mixer

import megatron_gdn
from megatron_gdn.ops.rules.fla_configurations import FIXED_CONFIGURATIONS

# Records that change after they are made; Megatron changes its lists of submodules.
CHANGE = {
    "_Agreement",
    "_DropInState",
    "_RowProgress",
    "DropInOptions",
    "GatedDeltaProductSubmodules",
    "KimiDeltaAttentionSubmodules",
    "Mamba2MixerSubmodules",
    "MixerSubmodules",
    "StaticPackedSeqParams",
}
SIZES = {"GDN2Dims", "GDNDims", "GDPDims", "KDADims", "LinearDims", "Mamba2Dims"}
OPTIONS = {
    "GDN2Options",
    "GDNOptions",
    "GDPOptions",
    "KDAOptions",
    "Mamba2Options",
    "MixerOptions",
}
# Records that are equal if their fields are. The others hold tensors, or are keys of
# what is kept for one object.
EQUAL_BY_VALUE = (
    CHANGE - {"_DropInState", "DropInOptions"}
    | SIZES
    | OPTIONS
    | {
        "Fp32Parameter",
        "HFModelConfig",
        "HFRef",
        "LayerCounts",
        "Layout",
        "Model",
        "PassThroughReadout",
        "PlainReadout",
        "Stack",
        "TritonReadout",
        "UpstreamFault",
    }
)
# Records that take no attribute but their fields, which have names where the records
# are made.
NAMED_FIELDS_ALONE = SIZES | {"HFModelConfig", "LayerCounts", "Stack", "TensorMap"}
BY_KEYWORD = NAMED_FIELDS_ALONE | OPTIONS | {"DropInOptions", "Fp32Parameter"}
WITHOUT_OTHER_ATTRIBUTES = NAMED_FIELDS_ALONE | {"HFRef"}
PUBLIC = (
    "",
    "context_parallel",
    "hf",
    "inference",
    "models",
    "ops",
    "specs",
    "testing",
)
# What is of unequal length: one more offset than documents; arguments that a caller left
# out; fields that only the second has.
UNEQUAL = {
    "context_parallel/gathered.py: offsets.tolist(), pairwise(row_bounds)",
    "hf/drop_in/patching.py: names, args",
    "ops/front/launches.py: table.convolved_sections, summed_heads",
    "ops/front/plain.py: d_parameters, front_parameters",
    "specs/gpt.py: ('vp_stage', 'pp_rank'), stage",
}
MAKERS = {"arange", "empty", "eye", "full", "ones", "randint", "tensor", "zeros"}
DEFAULTS = Path(__file__).with_name("public_defaults.txt")
# by kernel: warps, stages, tiles
CONFIGURATIONS = Path(__file__).with_name("fla_configurations.txt")


@cache
def modules():
    """All modules but those that are run, or that change Megatron when imported."""
    names = [
        x.name for x in pkgutil.walk_packages(megatron_gdn.__path__, "megatron_gdn.")
    ]
    run = ("__main__", "enable")
    return [import_module(x) for x in names if x.rpartition(".")[2] not in run]


@cache
def records():
    found = [
        x
        for module in modules()
        for x in vars(module).values()
        if dataclasses.is_dataclass(x) and "__dataclass_params__" in vars(x)
    ]
    return {x for x in found if x.__module__.startswith("megatron_gdn")}


def named(is_kept):
    return {x.__name__ for x in records() if is_kept(x)}


def test_a_record_does_not_change():
    assert named(lambda x: not x.__dataclass_params__.frozen) == CHANGE


def test_records_are_compared_by_value_or_are_themselves_alone():
    assert named(lambda x: x.__eq__ is not object.__eq__) == EQUAL_BY_VALUE


def test_many_fields_of_one_type_are_given_by_name():
    def by_keyword(record):
        return all(x.kw_only for x in dataclasses.fields(record))

    assert named(by_keyword) == BY_KEYWORD


def test_a_misspelt_field_of_sizes_is_no_new_attribute():
    assert named(lambda x: "__slots__" in vars(x)) == WITHOUT_OTHER_ATTRIBUTES


def own_caches():
    """Each cache of a function or method, by its name."""
    for module in modules():
        for x in vars(module).values():
            inner = vars(x) if isinstance(x, type) else {}
            for function in (x, *inner.values()):
                function = getattr(function, "__func__", function)
                if not hasattr(function, "cache_parameters"):
                    continue
                if function.__module__ == module.__name__:
                    yield f"{module.__name__}.{function.__qualname__}", function


def test_every_cache_says_how_much_it_keeps():
    """128 is what `lru_cache` keeps by default. Layouts, tables and launches of a run
    are more than some and fewer than many."""
    sizes = {name: x.cache_parameters()["maxsize"] for name, x in own_caches()}
    assert len(sizes) > 50
    assert set(sizes.values()) <= {None, 16, 32, 64, 256, 1024}, sizes


def test_every_cache_can_be_emptied():
    """Tests empty those that they find by this method."""
    assert [name for name, x in own_caches() if not hasattr(x, "cache_clear")] == []


def test_fla_runs_in_the_configurations_that_were_released():
    """Another one adds in another order: bits of deterministic mode would change."""
    written = [
        f"{name} {x.warps} {x.stages} {x.tiles}"
        for name, x in FIXED_CONFIGURATIONS.items()
    ]
    assert written == CONFIGURATIONS.read_text().splitlines()


def default_in_words(x):
    x = x.value if isinstance(x, enum.Enum) else x
    return x.__name__ if isinstance(x, type) else repr(x)


def defaults_of(function):
    """``name=default`` of each argument that may be left out."""
    return ", ".join(
        f"{x.name}={default_in_words(x.default)}"
        for x in inspect.signature(function).parameters.values()
        if x.default is not x.empty
    )


def public_functions():
    for place in PUBLIC:
        module = import_module(f"megatron_gdn.{place}".rstrip("."))
        for name in module.__all__:
            x = getattr(module, name)
            if not callable(x) or isinstance(x, enum.EnumMeta):
                continue
            yield f"{place}.{name}".lstrip("."), x
            for method, y in vars(x).items() if isinstance(x, type) else ():
                y = getattr(y, "__func__", y)
                if callable(y) and method[0] != "_" and not isinstance(y, type):
                    yield f"{place}.{name}.{method}".lstrip("."), y
            if hasattr(x, "options_class"):
                yield f"{name}.options", x.options_class
    for mixer in ("gdn", "gdn2", "gdp", "kda", "mamba2"):
        reference = import_module(f"megatron_gdn.{mixer}.reference")
        for name, x in inspect.getmembers(reference, inspect.isfunction):
            if x.__module__ == reference.__name__:
                yield f"{mixer}.reference.{name}", x


def public_values():
    """The public numbers and texts, and of each public enum its values."""
    for place in PUBLIC:
        module = import_module(f"megatron_gdn.{place}".rstrip("."))
        for name in module.__all__:
            x = getattr(module, name)
            if isinstance(x, enum.EnumMeta):
                yield f"{place}.{name}".lstrip("."), ", ".join(y.value for y in x)
            elif isinstance(x, bool | int | float | str | tuple):
                yield f"{place}.{name}".lstrip("."), repr(x)


def declared():
    """What `DEFAULTS` holds: defaults of functions, and values."""
    defaults = {name: defaults_of(x) for name, x in public_functions()}
    return {name: x for name, x in defaults.items() if x} | dict(public_values())


def test_defaults_of_public_functions_and_public_values_stay():
    """A changed default changes every run that does not name it. ``python -m
    tests.unit.test_declarations`` writes the file."""
    known = dict(line.split(": ", 1) for line in DEFAULTS.read_text().splitlines())
    assert declared() == known


def given_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def overrides():
    """Pairs of a method of the package and the package's or torch's that it replaces."""
    classes = {
        x
        for module in modules()
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__.startswith("megatron_gdn")
    }
    for cls in classes:
        for name, method in vars(cls).items():
            method = getattr(method, "__func__", method)
            if not inspect.isfunction(method) or name == "__init__":
                continue
            for base in cls.__mro__[1:]:
                original = vars(base).get(name)
                original = getattr(original, "__func__", original)
                known = base in classes or base.__module__.startswith("torch.")
                if known and inspect.isfunction(original):
                    yield f"{cls.__name__}.{name}", method, original
                    break


def test_a_method_has_the_defaults_of_the_one_that_it_replaces():
    different = {}
    pairs = 0
    for name, method, original in overrides():
        own = given_defaults(method)
        theirs = given_defaults(original)
        common = own.keys() & theirs.keys()
        pairs += bool(common)
        for key in common:
            if own[key] is not theirs[key] and own[key] != theirs[key]:
                different[f"{name}({key})"] = own[key], theirs[key]
    assert pairs > 15 and different == {}


def test_a_mixer_has_the_defaults_of_megatrons():
    """Scripts that build and call either leave the same arguments out."""
    pairs = 0
    for ours, theirs in (
        (megatron_gdn.GatedDeltaNet, gated_delta_net.GatedDeltaNet),
        (megatron_gdn.Mamba2Mixer, mamba_mixer.MambaMixer),
    ):
        for name, original in inspect.getmembers(theirs, inspect.isfunction):
            method = getattr(ours, name, original)
            own = given_defaults(method)
            common = own.keys() & given_defaults(original).keys()
            pairs += method is not original and len(common)
            expected = given_defaults(original)
            assert {x: own[x] for x in common} == {x: expected[x] for x in common}, name
    assert pairs > 30


def test_a_kernels_launch_and_its_plain_twin_have_the_same_arguments():
    pairs = 0
    by_name = {module.__name__: module for module in modules()}
    for name, twins in by_name.items():
        launches = by_name.get(name.removesuffix("_torch"))
        if launches is None or launches is twins:
            continue
        for function, twin in inspect.getmembers(twins, inspect.isfunction):
            launch = getattr(launches, function, None)
            if inspect.isfunction(launch) and launch is not twin:
                pairs += 1
                assert given_defaults(launch) == given_defaults(twin), function
    assert pairs > 3


def calls(*folders):
    """Each call in files of these folders, with its file, the names of its keywords and
    the call around it."""
    root = Path(megatron_gdn.__file__).parent
    for path in sorted(x for folder in folders for x in root.glob(folder)):
        around = {}
        for node in ast.walk(ast.parse(path.read_text())):
            for child in ast.iter_child_nodes(node):
                around[child] = node
            if isinstance(node, ast.Call):
                keywords = {x.arg: ast.unparse(x.value) for x in node.keywords}
                yield path.relative_to(root).as_posix(), node, keywords, around[node]


def test_zip_is_given_as_many_of_each():
    """Of lists of unequal length it would leave elements out."""
    pairs = 0
    others = set()
    for path, call, keywords, _ in calls("**/*.py", "specs/*.py"):
        if ast.unparse(call.func) == "zip":
            pairs += keywords.get("strict") == "True"
            if keywords.get("strict") != "True":
                others.add(f"{path}: {', '.join(map(ast.unparse, call.args))}")
    assert pairs > 60 and others == UNEQUAL


def test_a_checkpoint_of_torch_is_not_reentrant():
    """torch's default is; it warns, and its backward refuses `autograd.grad`."""
    checkpoints = {
        path: keywords.get("use_reentrant")
        for path, call, keywords, _ in calls("**/*.py", "specs/*.py")
        if ast.unparse(call.func) == "checkpoint"
    }
    megatrons_own = {"mixers/base.py": None}
    assert checkpoints == megatrons_own | {"ops/mixer.py": "False"}


def test_a_table_says_its_device_and_its_dtype():
    """Else both follow torch's defaults, and an empty list makes a table in fp32.

    Parameters and buffers of a module follow the default device, as torch's own do.
    """
    made = 0
    silent = []
    for path, call, keywords, around in calls("**/*.py", "specs/*.py"):
        home, _, name = ast.unparse(call.func).rpartition(".")
        wanted = {"device"} if name in ("arange", "randint") else {"device", "dtype"}
        if home == "torch" and name in MAKERS:
            made += 1
            if re.match(r"nn\.Parameter|self\.register_buffer", ast.unparse(around)):
                wanted -= {"device"}
            if not wanted <= keywords.keys():
                silent.append(f"{path}:{call.lineno}")
    assert made > 90
    assert silent == []


COLLECTIVES = re.compile(
    "P2POp|all_(gather|reduce)|all_to_all|broadcast$|broadcast_|reduce_scatter"
    r"|(copy|gather|reduce|scatter)_(to|from)_\w+_region"
)


def test_a_collective_names_its_ranks():
    """Else they are all ranks in torch, and in Megatron those of the process's groups,
    which a model with groups of its own does not use."""
    made = 0
    silent = []
    for path, call, keywords, _ in calls("**/*.py", "specs/*.py"):
        home, _, name = ast.unparse(call.func).rpartition(".")
        if COLLECTIVES.match(name) and home in ("", "dist", "torch.distributed"):
            made += 1
            given = [*map(ast.unparse, call.args), *keywords.values()]
            if not any(re.search(r"(group|\.WORLD)$", x) for x in given):
                silent.append(f"{path}:{call.lineno}")
    assert made > 20 and silent == []


if __name__ == "__main__":
    DEFAULTS.write_text(
        "".join(f"{name}: {x}\n" for name, x in sorted(declared().items()))
    )
