"""A random case that fails prints a script that runs this case alone.

Random are the tests of hypothesis, and those with an argument ``seed``.
"""

import ast
import inspect
import re
import sys

import pytest

_HEAD = "# From the root of the repository: python FILE\nimport sys\n\nsys.path[:0] = ['']\n"


def pytest_pycollect_makemodule():
    """Before a test file is imported: hypothesis is to say how its case is made
    again."""
    from hypothesis import settings

    settings.register_profile("made again", print_blob=True)
    settings.load_profile("made again")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed and call.excinfo is not None:
        script = script_of(item, call.excinfo.value)
        if script is not None:
            report.sections.append(("this case alone", script))
    return report


def script_of(item, error: BaseException) -> str | None:
    """The script; None if the test of ``item`` is not random."""
    given = getattr(item, "callspec", None)
    values = {} if given is None else dict(given.params)
    is_drawn = hasattr(item.obj, "hypothesis")
    if not is_drawn and "seed" not in values:
        return None
    module = item.module.__name__
    name = item.originalname
    head = _HEAD + _prepared(module)
    law = f"from {module} import {name} as law\n"
    fixtures = set(inspect.signature(item.obj).parameters) - set(values)
    literal = all(map(_is_literal, values.values()))
    if literal and not fixtures:
        call = ", ".join(f"{key}={value!r}" for key, value in values.items())
        if not is_drawn:
            return f"{head}{law}\nlaw({call})"
        drawn = _drawn(name, error)
        if drawn is not None and _is_code(drawn, vars(item.module)):
            # hypothesis prints values by names of the test's file
            names = f"from {module} import *  # noqa: F403\n"
            more = "".join(f"    {key}={value!r},\n" for key, value in values.items())
            of = f"(\n{more}{drawn}\n)"
            return f"{head}{names}{law}\nlaw.hypothesis.inner_test{of}"
        made_again = _made_again(error)
        if made_again is not None:
            names = "from hypothesis import reproduce_failure\n"
            return f"{head}{names}{law}\n{made_again}(law)({call})"
    return f"{_HEAD}import pytest\n\nsys.exit(pytest.main([{item.nodeid!r}]))"


def _prepared(module: str) -> str:
    """Lines that prepare a process as pytest does before it imports this module."""
    packages = module.split(".")[:-1]
    names = [".".join(packages[:n]) + ".conftest" for n in range(1, len(packages) + 1)]
    lines = [f"import {name}\n" for name in names if name in sys.modules]
    if "tests.conftest" in sys.modules:
        lines.append("tests.conftest.pytest_pycollect_makemodule()\n")
    return "".join(lines)


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _is_code(arguments: str, names: dict) -> bool:
    """Whether this Python makes these arguments of a call."""
    try:
        eval(f"dict(\n{arguments}\n)", dict(names))
    except Exception:
        return False
    return "=data(...)" not in arguments


def _made_again(error: BaseException) -> str | None:
    """The decorator by which hypothesis runs the case that it has found."""
    for note in getattr(error, "__notes__", ()):
        found = re.search(r"@(reproduce_failure\(.*\)) as a decorator", note)
        if found is not None:
            return found[1]
    return None


def _drawn(name: str, error: BaseException) -> str | None:
    """The arguments that hypothesis says it has found, one a line."""
    for note in getattr(error, "__notes__", ()):
        found = re.search(rf"{name}\(\n(.*)\n\)", note, flags=re.S)
        if found is not None:
            return found[1]
    return None
