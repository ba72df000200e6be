"""Every command of every page is run by what `RUN_BY` says, which has no other rows."""

import ast
import re
from itertools import dropwhile

import pytest

from tests.examples.commands import commands_of, flags_of, pages
from tests.examples.launching import ROOT, TINY, metrics, run
from tests.processes import python

COMMANDS = commands_of(*pages(ROOT))
_ON_GPUS = r"(python|torchrun .*|\S+=\S+ python) benchmarks/"
HERE = "tests/examples/test_page_commands.py::"
IN_ORDER = HERE + "test_the_lines_of_the_example_run_in_the_order_in_which_they_stand"
FRESH = "tests/examples/test_fresh_install.py::"
EXTRAS = FRESH + "test_all_extras_resolve_together"
INSTALLED = FRESH + "test_the_quickstart_runs_from_an_installed_{}_alone"
HF = "tests/hf/test_folders.py::test_the_command_runs_as_a_module"
WAY_ROUND = "tests/examples/test_hf_round_trip.py::way_round"
WARM_UP = "tests/warm_up/test_command.py::test_every_command_of_the_docs_is_understood"
FINETUNE = "torchrun --nproc_per_node=2 examples/finetune_transformers.py"
TRAINER = "torchrun --nproc_per_node=2 examples/finetune_with_trainer.py"
DROP_IN = "tests/hf/drop_in/test_collator.py::test_the_example_trains_over_two_ranks_sharded_or_not"
DOCTOR = "tests/doctor/test_doctor.py::test_the_command_prints_lines_or_json_and_its_status_says_whether_anything_is_wrong"  # noqa: E501
MODELS = (
    "tests/models/test_command.py::test_the_commands_of_the_page_print_what_it_shows"
)
SUITE = "the suite itself"
ENVIRONMENT = "an environment of make test-frameworks"
GPU = "a machine with a GPU"
RELEASE = "the workflow of a release"
EXAMPLE_PY = "examples/pretrain_hybrid.py"
EXAMPLE = "python " + EXAMPLE_PY + " --nproc-per-node {}"

REPORT = "tests/unit/test_benchmarks.py::test_{}"
LAUNCH = "tests/launches/test_page_launches.py::test_a_launch_of_the_pages_trains"

# Command, as `commands_of` gives it -> the test that runs it, or one of the words
# above.
RUN_BY = {
    "make demo": IN_ORDER,
    "make test-gpu": GPU,
    "python -m tests.golden.write VERSION": (
        "tests/golden/test_golden.py::test_a_version_writes_a_checkpoint_of_every_mixer"
    ),
    "make test-launches MEGATRON_LM=FOLDER": LAUNCH,
    "MEGATRON_LM=CLONES python benchmarks/run.py launches --cases 2x4096": (
        "tests/launches/test_benchmark.py::test_both_layers_train_with_documents_packed"
    ),
    "python benchmarks/certificate.py --heads 16:32 --cp 2 4": (
        "tests/testing/test_harness.py::test_both_schemes_stay_within_rounding_of_one_rank"
    ),
    "python examples/quickstart.py": (
        "tests/examples/test_commands.py::test_the_quickstart_trains_one_layer_on_packed_documents"
    ),
    "python examples/grpo_on_trees.py": (
        "tests/examples/test_commands.py::"
        "test_a_policy_gradient_step_is_the_same_on_trees_and_packed_separately"
    ),
    'python examples/generate.py HF_FOLDER --prompt "Once upon a time"': (
        "tests/hf/test_generation.py"
        "::test_the_example_takes_text_and_prints_text_and_times_tokens_after_a_warm_up"
    ),
    "python examples/generate.py HF_FOLDER --tokens 5 17 3 --count 32": (
        "tests/hf/test_generation.py::test_the_example_generates_from_a_folder"
    ),
    "python " + EXAMPLE_PY + " --help": IN_ORDER,
    EXAMPLE.format(2) + " --data my_texts/ --train-iters 500": IN_ORDER,
    EXAMPLE.format(2) + " --resume --train-iters 800": IN_ORDER,
    EXAMPLE.format(4)
    + " --tensor-model-parallel-size 2 --sequence-parallel --linear-num-key-heads 4": IN_ORDER,
    "python -m megatron_gdn.hf import HF_FOLDER MEGATRON_FOLDER": HF,
    "python -m megatron_gdn.hf flags HF_FOLDER": HF,
    "python -m megatron_gdn.hf export MEGATRON_FOLDER NEW_FOLDER --like HF_FOLDER": HF,
    "python -m megatron_gdn.hf compare HF_FOLDER NEW_FOLDER": HF,
    EXAMPLE.format(2) + " --hf-config HF_FOLDER --context-parallel-size 1 --no-packing "
    "--pretrained-checkpoint MEGATRON_FOLDER --train-iters 3 --output-dir RUN": WAY_ROUND,
    "python -m megatron_gdn.hf export RUN/checkpoints NEW_FOLDER --like HF_FOLDER": (
        WAY_ROUND
    ),
    "python -m megatron_gdn.warm_up --heads 16:32": WARM_UP,
    "python -m megatron_gdn.warm_up --config config.json --tp 2 --cp 2": WARM_UP,
    "python -m megatron_gdn.warm_up --config launch.sh": WARM_UP,
    FINETUNE: DROP_IN,
    FINETUNE + " --fully-shard": DROP_IN,
    TRAINER: "tests/hf/drop_in/test_commands.py"
    "::test_the_example_trains_and_saves_what_transformers_loads",
    "python examples/show_leaks.py docs/leaks.png": (
        "tests/hf/drop_in/test_commands.py"
        "::test_the_picture_shows_the_leak_and_that_a_patched_model_has_none"
    ),
    "python benchmarks/run.py hf --tiny": (
        "tests/hf/drop_in/test_commands.py::test_the_benchmark_runs_tiny_on_the_cpu"
    ),
    "python benchmarks/run.py loss-curves": (
        "tests/examples/test_commands.py"
        "::test_the_three_layers_agree_at_the_start_and_the_picture_is_drawn"
    ),
    "pip install .": INSTALLED.format("clone"),
    "pip wheel --no-deps --wheel-dir dist . && pip install dist/megatron_gdn-*.whl": (
        INSTALLED.format("wheel")
    ),
    'pip install ".[hopper]"': EXTRAS,
    'pip install ".[hf]"': EXTRAS,
    "pip install -c constraints.txt . setuptools": INSTALLED.format("clone"),
    'pip install -c constraints.txt --no-build-isolation ".[hopper]"': EXTRAS,
    'pip install "flash-qla>=0.1.3" tilelang "flash-linear-attention>=0.6,<0.7"': (
        "tests/ops/test_plain_on_a_gpu.py::test_the_line_asks_for_what_the_extra_does"
    ),
    "torchrun --nproc_per_node=8 -m megatron_gdn.launch pretrain_hybrid.py FLAGS": (
        "tests/launches/test_parallel_launches.py"
        "::test_every_arrangement_takes_the_steps_of_one_process"
    ),
    "GDN_TEST_LAYER=upstream TORCHDYNAMO_DISABLE=1 python -m pytest "
    "tests/layer/test_upstream_flaws.py": HERE
    + "test_upstreams_layer_fails_every_law_of_flaws",
    EXAMPLE.format(2) + " --hybrid-layer-pattern M-G-*-": (
        "tests/examples/test_pretrain_hybrid.py::test_a_model_of_all_mixers_is_learned"
    ),
    EXAMPLE.format(2) + " --hybrid-layer-pattern K-G-*-": (
        "tests/examples/test_pretrain_hybrid.py::test_a_model_of_all_mixers_is_learned"
    ),
    "OMP_NUM_THREADS=1 python -m pytest tests/unit/test_sizes.py -k share": SUITE,
    "TRITON_INTERPRET=1 python -m pytest tests/kernels/test_chains.py": SUITE,
    "python benchmarks/report.py": REPORT.format(
        "the_tables_of_the_pages_are_of_the_results"
    ),
    "python -m megatron_gdn.warm_up --heads 16:32 --tp 2 --cp 2": WARM_UP,
    "git clone --branch core_r0.19.0 https://github.com/NVIDIA/Megatron-LM": GPU,
    "python -m megatron_gdn.doctor --heads 16:32": DOCTOR,
    "python -m megatron_gdn.models": MODELS,
    "python -m megatron_gdn.models Qwen3.5-35B-A3B --tp 2 --cp 4 --ep 8 --length 131072": MODELS,
    "python -m megatron_gdn.models Qwen3.5-35B-A3B --tp 2 --ep 8 --flags": MODELS,
    "python -m megatron_gdn.doctor": DOCTOR,
    "python -m build": FRESH
    + "test_a_source_distribution_holds_what_tests_and_pages_need",
    "python -m uv pip compile --all-extras pyproject.toml": EXTRAS,
    "python -m pip install build twine": RELEASE,
    "python -m twine check --strict dist/*": RELEASE,
    "python -m pip install dist/*.whl": RELEASE,
    # An index hands out the wheel.
    "pip install megatron-gdn": INSTALLED.format("wheel"),
    'pip install "megatron-gdn[hf]"': EXTRAS,
    'pip install --no-build-isolation "megatron-gdn[hopper]"': EXTRAS,
    "python -m pip check": RELEASE,
    'python -c "import megatron_gdn"': RELEASE,
    'test "$(python -m megatron_gdn --version)" = "megatron-gdn ${TAG#v}"': RELEASE,
}
OF_THE_SUITE = (
    "test test-all test-kernels test-shapes nightly docs test-versions "
    "test-frameworks lint format"
)
RUN_BY |= {f"make {target}": SUITE for target in OF_THE_SUITE.split()}
# Whole launches for a clone of Megatron-LM, which that test takes from the page itself.
RUN_BY |= {
    command: LAUNCH for command in COMMANDS if "--spec megatron_gdn.specs" in command
}
# What a framework is installed by stands in its environment, in the same version.
_VERSIONS = r"pip install (git\+|\S+==)"
RUN_BY |= {command: ENVIRONMENT for command in COMMANDS if re.match(_VERSIONS, command)}
# Benchmarks that no row names need a GPU.
RUN_BY = {command: GPU for command in COMMANDS if re.match(_ON_GPUS, command)} | RUN_BY


def test_every_command_is_in_the_table_and_every_row_on_a_page():
    there = set(COMMANDS)
    assert sorted(there - set(RUN_BY)) == [], "say in RUN_BY which test runs these"
    assert sorted(set(RUN_BY) - there) == [], "no page has these any more"


def test_commands_name_the_interpreter_of_an_activated_environment():
    assert [
        c for c in COMMANDS if ".venv/bin" in c or re.search(r"\bpython3\b", c)
    ] == []
    assert "source .venv/bin/activate" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", RUN_BY)
def test_what_runs_a_command_exists(command):
    by = RUN_BY[command]
    if by == SUITE:
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
        )
        test = next((word for word in command.split() if word.startswith("tests/")), "")
        assert command.removeprefix("make ") in targets or (
            test and (ROOT / test).exists()
        )
    elif by == RELEASE:
        assert (
            f"run: {command}\n" in (ROOT / ".github/workflows/release.yml").read_text()
        )
    elif by == ENVIRONMENT:
        files = (ROOT / "tests/frameworks/environments").glob("*.txt")
        required = "\n".join(file.read_text() for file in files).splitlines()
        assert set(command.split()[2:]) <= set(required)
    elif by == GPU and ".py" in command:
        script = next(ROOT / word for word in command.split() if word.endswith(".py"))
        for flag in re.findall(r"--[\w-]+", command.partition(".py ")[2]):
            assert f'"{flag}"' in script.read_text()
    elif by != GPU:
        path, _, name = by.partition("::")
        defined = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in {
            node.name for node in defined if isinstance(node, ast.FunctionDef)
        }


@pytest.mark.slow
def test_the_lines_of_the_example_run_in_the_order_in_which_they_stand(text, tmp_path):
    """From `make demo` on, one after the other in one folder, as they stand but
    tiny."""
    (tmp_path / "my_texts").symlink_to(text)
    lines = [
        c for c in commands_of(*pages(ROOT)[:2]) if c == "make demo" or EXAMPLE_PY in c
    ]
    lines = list(dropwhile(lambda command: command != "make demo", lines))
    assert len(set(lines)) == 5
    for command in dict.fromkeys(lines):
        size, flags = (2, []) if command == "make demo" else flags_of(command)
        flags = [_a_hundredth(flag) for flag in flags]
        if "--resume" not in flags:  # its settings come from the checkpoint
            flags = [*_without(TINY, flags), *flags]
        if "--data" not in flags and "--resume" not in flags:
            flags += ["--data", "my_texts"]  # the standard library is long to read
        printed = run(*flags, cwd=tmp_path, size=size)
        assert ("usage: python" in printed) == ("--help" in flags)
    # 5 steps of --data my_texts/, and with --resume on to 8; each run in a folder of
    # its own.
    runs = [tmp_path / "runs" / f"pretrain_hybrid{n}" for n in ("", "-2", "-3")]
    assert [metrics(folder)[-1]["iteration"] for folder in runs] == [12, 8, 12]
    assert len(list((tmp_path / "runs").iterdir())) == 3


@pytest.mark.nightly
def test_upstreams_layer_fails_every_law_of_flaws():
    done = python(
        "-m",
        "pytest",
        "tests/layer/test_upstream_flaws.py",
        timeout=None,
        ends=1,
        GDN_TEST_LAYER="upstream",
        TORCHDYNAMO_DISABLE="1",
    )
    summary = done.stdout.splitlines()[-1]
    assert "failed" in summary and "passed" not in summary and "error" not in summary


def _a_hundredth(flag: str) -> str:
    return str(int(flag) // 100) if flag.isdigit() and int(flag) >= 100 else flag


def _without(defaults: list[str], flags: list[str]) -> list[str]:
    return [default for default in defaults if default.partition("=")[0] not in flags]
