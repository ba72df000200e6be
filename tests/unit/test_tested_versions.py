"""Versions that were not tested are warned of, once, in one line."""

import warnings

import pytest

from megatron_gdn.compat.tested import (
    TESTED_VERSIONS,
    VersionRange,
    warn_of_untested,
    why_untested,
)


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setitem(TESTED_VERSIONS, "some-package", VersionRange("2.8", "2.15"))
    monkeypatch.setitem(TESTED_VERSIONS, "absent-package", VersionRange("1.0", "1.1"))


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ("2.8", True),
        ("2.8.1", True),
        ("2.15.0+cu130", True),
        ("2.15.3", True),
        ("2.7.1", False),
        ("2.16.0a0+git1234", False),
        ("3.0", False),
        ("1.20", False),
    ],
)
def test_versions_are_compared_by_their_first_two_numbers(pair, version, tested):
    why = why_untested("some-package", version)
    assert why == (
        None if tested else f"tested with some-package 2.8 to 2.15, this is {version}"
    )


def test_a_range_of_one_version_is_named_once():
    assert str(VersionRange("0.6", "0.6")) == "0.6"


def test_a_package_that_is_not_in_the_table_or_not_installed_is_not_warned_of(pair):
    assert why_untested("another-package", "0.1") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested("absent-package")


def test_an_untested_version_is_warned_of_once_in_one_line(pair):
    with pytest.warns(UserWarning) as warned:
        warn_of_untested("some-package", "2.16.1")
        warn_of_untested("some-package", "2.16.1")
    (said,) = (str(one.message) for one in warned)
    assert said.startswith(
        "megatron_gdn was tested with some-package 2.8 to 2.15, this is 2.16.1."
    )
    assert "\n" not in said
