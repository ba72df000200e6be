"""A random case that fails prints a script that runs this case alone.

Random are the tests of hypothesis, and those with an argument ``seed``.
"""

import ast
import inspect
import re

import pytest

_HEAD = "# From the root of the repository: python FILE\nimport sys\n\nsys.path[:0] = ['']\n"


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
    law = f"from {module} import {name} as law\n"
    fixtures = set(inspect.signature(item.obj).parameters) - set(values)
    literal = all(map(_is_literal, values.values()))
    drawn = _drawn(name, error) if is_drawn and literal and not fixtures else None
    if drawn is not None:
        # hypothesis prints values by names of the test's file
        names = f"from {module} import *  # noqa: F403\n"
        more = "".join(f"    {key}={value!r},\n" for key, value in values.items())
        return f"{_HEAD}{names}{law}\nlaw.hypothesis.inner_test(\n{more}{drawn}\n)"
    if not is_drawn and literal and not fixtures:
        call = ", ".join(f"{key}={value!r}" for key, value in values.items())
        return f"{_HEAD}{law}\nlaw({call})"
    return f"{_HEAD}import pytest\n\nsys.exit(pytest.main([{item.nodeid!r}]))"


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _drawn(name: str, error: BaseException) -> str | None:
    """The arguments that hypothesis says it has found, one a line."""
    for note in getattr(error, "__notes__", ()):
        found = re.search(rf"{name}\(\n(.*)\n\)", note, flags=re.S)
        if found is not None:
            return found[1]
    return None
