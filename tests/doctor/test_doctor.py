"""The doctor names what is broken, in environments and rules that are broken."""

import importlib.metadata
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_gdn.compat.tested import TESTED_VERSIONS
from megatron_gdn.doctor import checks
from megatron_gdn.doctor.__main__ import main
from megatron_gdn.doctor.checks import (
    _TRAINING_EXTRAS,
    check_kernel_versions,
    check_machine,
    check_packages,
)
from megatron_gdn.gdn.rule import FlaGDN
from megatron_gdn.ops import obstacles
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.rules.fla import _functions_of


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Installs packages that hide the true ones: ``name="version"``, and modules with
    this code."""
    caches = (
        obstacles.why_not_fla_package,
        obstacles.why_not_flash_qla_package,
        obstacles._needs_tilelang,
        _functions_of,
    )

    def install(modules: dict[str, str] | None = None, **versions: str) -> None:
        for name, version in versions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        for name, code in (modules or {}).items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()

    for cache in caches:
        cache.cache_clear()
    yield install
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def said(findings, subject: str) -> tuple[str, str]:
    """State and text of the only finding about ``subject``."""
    (found,) = (each for each in findings if each.subject == subject)
    return found.state, found.text


@pytest.mark.parametrize(
    "name, version, told",
    [
        ("megatron_core", "0.17.0", "0.17.0 is installed, <0.21,>="),
        ("torch", "2.6.0", "2.6.0 is installed, >=2."),
        ("transformer_engine", "2.4.0", "2.4.0 is installed, >=2.8 works"),
        (
            "flash_linear_attention",
            "0.5.0",
            "0.5.0 is installed, <0.7,>=0.6 works; pip install",
        ),
    ],
)
def test_a_version_that_does_not_work_is_named(environment, name, version, told):
    environment(**{name: version})
    state, text = said(check_packages(), name.replace("_", "-"))
    assert state == "wrong" and text.startswith(told)


@pytest.mark.parametrize(
    "name, version, told",
    [
        ("torch", "2.99.1", "tested with torch 2.8 to 2."),
        ("megatron_core", "0.20.0", "tested with megatron-core 0.18 to 0."),
        ("transformers", "5.99.0", "tested with transformers 5.16 to 5."),
    ],
)
def test_a_version_that_was_not_tested_is_a_note(environment, name, version, told):
    environment(**{name: version})
    state, text = said(check_packages(), name.replace("_", "-"))
    assert (
        state == "note"
        and text.startswith(told)
        and text.endswith(f"this is {version}")
    )


def test_a_python_that_was_not_tested_is_a_note(monkeypatch):
    assert said(check_packages(), "python")[0] == "ok"
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    assert said(check_packages(), "python") == (
        "note",
        f"tested with python {TESTED_VERSIONS['python']}, this is 3.99.0",
    )


def test_of_transformers_it_is_a_note_for_no_layer_needs_it(environment):
    environment(transformers="5.12.1")
    state, text = said(check_packages(), "transformers")
    assert state == "note" and text.startswith("5.12.1 is installed, >=5.16")


def test_a_package_that_is_absent_is_wrong_unless_only_an_extra_needs_it(monkeypatch):
    monkeypatch.setattr(checks, "installed_version", lambda name: None)
    found = {each.subject: each for each in check_packages()}
    for name, extra in {
        "torch": None,
        "megatron-core": None,
        "flash-linear-attention": "fla",
        "transformer-engine": "te",
        "transformers": "hf",
    }.items():
        _, state, text = found[name]
        if extra is None:
            assert state == "wrong" and f'not installed; pip install "{name}' in text
        else:
            assert state == "note" and f"'megatron-gdn[{extra}]'" in text


def test_ctrl_c_ends_the_import_of_a_package(environment):
    code = "raise KeyboardInterrupt"
    environment({"transformer_engine": code}, transformer_engine="2.8.0")
    with pytest.raises(KeyboardInterrupt):
        list(check_packages())


def test_a_package_that_was_built_for_another_torch_is_named(environment):
    broken = "raise ImportError('undefined symbol: _ZN3c10')"
    environment({"transformer_engine": broken}, transformer_engine="2.8.0")
    state, text = said(check_packages(), "transformer-engine")
    assert state == "wrong" and "undefined symbol: _ZN3c10; build it for torch" in text


@pytest.mark.parametrize(
    "modules, versions, subject, told",
    [
        (
            ["fla"],
            {"flash_linear_attention": "0.6.0", "fla_core": "0.5.1"},
            "flash-linear-attention",
            "fla-core 0.5.1 is not supported, 0.6 is",
        ),
        (
            ["fla"],
            {"triton": "3.5.0", "flash_linear_attention": "0.6.0", "fla_core": "0.6.0"},
            "flash-linear-attention",
            "Triton 3.5.0 miscompiles fla's backward on Hopper",
        ),
        (
            ["flash_qla"],
            {"flash_qla": "0.1.2"},
            "flash-qla",
            "computes wrong gradients at times",
        ),
        (["flash_qla"], {}, "flash-qla", "flash_qla carries no version"),
        (
            ["flash_qla"],
            {"flash_qla": "0.1.3"},
            "flash-qla",
            "tilelang, which is not installed",
        ),
    ],
)
def test_a_bad_pair_is_named(environment, hopper, modules, versions, subject, told):
    environment(dict.fromkeys(modules, ""), **versions)
    state, text = said(check_kernel_versions(), f"rule of {subject}")
    assert state == "wrong" and told in text


def test_good_pairs_are_well(environment, hopper):
    modules = dict.fromkeys(["flash_qla", "tilelang"], "")
    environment(modules, flash_qla="0.1.3", tilelang="0.1.15", triton="3.7.1")
    found = list(check_kernel_versions())
    assert said(found, "rule of flash-qla") == ("ok", "0.1.3, tilelang 0.1.15")
    fla = importlib.metadata.version("flash-linear-attention")
    assert said(found, "rule of flash-linear-attention") == (
        "ok",
        f"{fla}, tilelang 0.1.15",
    )


def test_a_fla_without_what_the_rule_calls_is_named(environment, hopper, monkeypatch):
    environment(triton="3.7.1")
    functions = {**FlaGDN.fla_functions, "fla.ops.utils no_function": ""}
    monkeypatch.setattr(FlaGDN, "fla_functions", functions)
    state, text = said(check_kernel_versions(), "rule of flash-linear-attention")
    assert state == "wrong" and text.endswith("fla.ops.utils has no no_function")


def test_without_a_gpu_it_is_a_note_about_hopper(environment):
    environment({"flash_qla": ""}, flash_qla="0.1.2")
    state, text = said(check_kernel_versions(), "rule of flash-qla")
    assert state == "note" and text.startswith(
        "on a Hopper GPU: flash-qla 0.1.2 computes wrong"
    )


@pytest.mark.parametrize(
    ("cuda", "named", "why"),
    [
        ("12.8", "12.8", "the driver may be too old"),
        (None, "none", "torch is built without CUDA"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_named(
    tmp_path, monkeypatch, cuda, named, why
):
    assert said(check_machine(), "gpu")[0] == "note"
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    state, text = said(check_machine(), "gpu")
    assert state == "wrong" and f"CUDA {named} sees no GPU: {why}" in text
    assert said(check_machine(), "cuda")[1].startswith(f"{named}, of torch ")


def test_what_is_absent_and_optional_is_a_note_and_the_rest_is_well():
    found = list(check_packages())
    assert {each.subject for each in found} >= {
        "python",
        "torch",
        "megatron-core",
        "psutil",
        "transformers",
    }
    assert all(each.state == "ok" or "not installed" in each.text for each in found)


def test_every_extra_of_training_is_looked_at():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert set(_TRAINING_EXTRAS) <= set(extras)
    of_the_project = {"docs", "dev", "test", "bench", "train", "hf-train"}
    of_others = {"hopper", "gpu"}  # `kernels` looks at flash-qla and tilelang
    assert set(extras) - set(_TRAINING_EXTRAS) == of_the_project | of_others


SMALL = HeadSizes(1, 2, 8, 12)
COMMAND = ["--heads", "1:2", "--head-dim", "8", "--tokens", "70"]


def states(found) -> dict[str, str]:
    return {each.subject: each.state for each in found}


@pytest.mark.parametrize("with_gradients", [True, False])
def test_on_a_cpu_the_plain_rule_runs_exact_and_repeats(with_gradients):
    """Also in a program that has switched gradients off."""
    with torch.set_grad_enabled(with_gradients):
        found = list(checks.check_rules(SMALL, 131))
    assert set(states(found).values()) == {"ok"}
    assert (
        found[0].text.startswith("reference: not flash_qla")
        and "not fla" in found[0].text
    )
    assert "10 repeats equal in 6 tensors" in found[-1].text


def test_a_gradient_that_is_zero_has_no_error():
    """The decay before the only token of a document changes nothing."""
    state, text = said(checks.check_rules(SMALL, 1), "rule, errors")
    assert state == "ok" and float(text.split()[1].rstrip(",")) < 1e-5


def test_random_inputs_have_the_device_and_the_dtypes_of_a_layer():
    inputs = checks._random_inputs(SMALL, 5, torch.device("meta"), torch.bfloat16)
    assert {x.device.type for x in inputs} == {"meta"}
    assert [x.dtype for x in inputs] == [torch.bfloat16] * 3 + [torch.float32] * 2


class Chosen(Exception):
    """Ends a check where it chooses the rule, which a CPU could not run."""


def test_on_a_gpu_the_rules_are_those_of_bf16_layers(hopper, monkeypatch):
    def choose(device, dtype, sizes):
        assert (device.type, dtype, sizes) == ("cuda", torch.bfloat16, SMALL)
        raise Chosen

    monkeypatch.setattr(checks, "resolve_rule", choose)
    with pytest.raises(Chosen):
        list(checks.check_rules(SMALL, 70))


def test_twice_the_error_of_plain_torch_is_the_most():
    plain = dict.fromkeys(checks._RESULT_NAMES, 1e-7)
    for error, state in ((2e-7, "ok"), (2.1e-7, "wrong")):
        found = checks._compare_errors("rule", plain | {"dg": error}, plain)
        assert found.state == state and found.text.startswith(f"dg {error:.1e}")


def test_rules_run_with_norms_over_two_documents_and_the_last_repeat_counts(
    monkeypatch,
):
    run = checks.run_rule
    runs = []

    def run_noted(rule, inputs, documents, **options):
        runs.append((tuple(documents.lengths), options))
        out, state = run(rule, inputs, documents, **options)
        return out * (2 if len(runs) == 12 else 1), state  # after fp64 and plain torch

    monkeypatch.setattr(checks, "run_rule", run_noted)
    state, text = said(checks.check_rules(SMALL, 70), "repeats")
    assert state == "wrong" and text.endswith("differ in repeat 9")
    assert runs == [((23, 47), {"use_qk_l2norm_in_kernel": True})] * 12


def test_an_error_where_plain_torch_has_none_is_wrong():
    none = dict.fromkeys(checks._RESULT_NAMES, 0.0)
    assert checks._compare_errors("rule", none, none).state == "ok"
    found = checks._compare_errors("rule", none | {"dk": 1e-7}, none)
    assert found.state == "wrong" and found.text.startswith("dk 1.0e-07, inf of plain")


class Worse(PlainRule):
    """Rounds its values to bf16, as the plain rule does not."""


def test_a_rule_that_is_less_exact_than_plain_torch_is_wrong(monkeypatch):
    run = checks.run_rule

    def rounded(rule, inputs, documents, **options):
        if isinstance(rule, Worse):
            inputs = inputs._replace(v=inputs.v.bfloat16().float())
        return run(rule, inputs, documents, **options)

    choice = checks.resolve_rule(device="cpu", dtype=torch.float32, sizes=SMALL)
    monkeypatch.setattr(checks, "run_rule", rounded)
    monkeypatch.setattr(
        checks, "resolve_rule", lambda **_: choice._replace(rule=Worse())
    )
    found = {each.subject: each for each in checks.check_rules(SMALL, 70)}
    assert found["rule, errors"].state == "wrong"
    assert (
        "of plain torch's error against fp64: choose another"
        in found["rule, errors"].text
    )


def test_a_rule_that_does_not_repeat_is_wrong(monkeypatch):
    run = checks.run_rule
    calls = []

    def drifting(rule, inputs, documents, **options):
        out, state = run(rule, inputs, documents, **options)
        calls.append(1)
        return out * (1 + torch.finfo(out.dtype).eps * (len(calls) % 2)), state

    monkeypatch.setattr(checks, "run_rule", drifting)
    assert states(checks.check_rules(SMALL, 70))["repeats"] == "wrong"


def test_the_command_prints_lines_or_json_and_its_status_says_whether_anything_is_wrong(
    monkeypatch, capsys
):
    assert main(COMMAND) == 0
    assert "ok     repeats" in capsys.readouterr().out
    wrong = checks.Finding("repeats", "wrong", "")
    monkeypatch.setattr(checks, "_check_repeats", lambda *_: wrong)
    assert main([*COMMAND, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert wrong._asdict() in found


def test_every_subject_is_named_once_and_plain_torch_is_compared_with_fp64_alone(
    capsys,
):
    assert main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    subjects = [each["subject"] for each in found]
    assert len(set(subjects)) == len(subjects)
    errors = [each["text"] for each in found if each["subject"].endswith("errors")]
    assert len(errors) == 1 and "of plain torch, against fp64" in errors[0]


@pytest.mark.parametrize(
    ("version", "state", "told"),
    [("3.9.9", "ok", "3.9.9"), (None, "note", "not installed: conv, gates and norm")],
)
def test_triton_is_named_or_what_runs_without_it(monkeypatch, version, state, told):
    installed = checks.installed_version

    def with_triton(name):
        return version if name == "triton" else installed(name)

    monkeypatch.setattr(checks, "installed_version", with_triton)
    found = said(check_kernel_versions(), "triton")
    assert found[0] == state and found[1].startswith(told)
