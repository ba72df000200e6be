"""The table of tested versions. The doctor, the warnings, the documentation's pages and
the tests read it.

``make test-versions`` runs other versions; docs/versions.md has its results.
"""

from __future__ import annotations

import platform
import warnings
from functools import cache
from typing import NamedTuple

from ..ops.obstacles import installed_version, version_tuple


class VersionRange(NamedTuple):
    """The oldest and the newest version of a package that were tested, as
    ``"2.15"``."""

    oldest: str
    newest: str

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return self.oldest
        return f"{self.oldest} to {self.newest}"


TESTED_VERSIONS = {
    "python": VersionRange("3.12", "3.14"),
    "torch": VersionRange("2.8", "2.15"),
    "megatron-core": VersionRange("0.18", "0.19"),
    "transformers": VersionRange("5.16", "5.24"),
    "accelerate": VersionRange("1.15", "1.15"),
    "flash-linear-attention": VersionRange("0.6", "0.6"),
    "transformer-engine": VersionRange("2.20", "2.20"),
}


def why_untested(package: str, installed: str) -> str | None:
    """A phrase that says why version ``installed`` of ``package`` is untested; None if
    it was tested.

    Versions are compared by their first two numbers. A package that is not in
    `TESTED_VERSIONS` counts as tested.
    """
    tested = TESTED_VERSIONS.get(package)
    if tested is None:
        return None
    release = version_tuple(installed)[:2]
    if version_tuple(tested.oldest) <= release <= version_tuple(tested.newest):
        return None
    return f"tested with {package} {tested}, this is {installed}"


@cache
def warn_of_untested(package: str, installed: str | None = None) -> None:
    """Warn once, in one line, if the version of ``package`` was not tested.

    ``installed`` is the version. If it is None, the installed version is looked up. A
    package that is not installed gives no warning.
    """
    if installed is None:
        installed = _installed_version(package)
    if installed is not None and (why := why_untested(package, installed)):
        warnings.warn(
            f"megatron_gdn was {why}. Install a tested version, or run the tests of "
            f"megatron_gdn with {installed}.",
            stacklevel=3,
        )


def _installed_version(package: str) -> str | None:
    """The version of ``package``, which may be "python"; None if it is not
    installed."""
    if package == "python":
        return platform.python_version()
    return installed_version(package)
