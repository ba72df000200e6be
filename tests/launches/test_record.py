"""The page of launches shows what was recorded of them."""

from benchmarks.lib.pages import filled
from tests.launches.record import BRANCHES, PAGE, read, table


def test_the_table_of_launches_is_of_what_was_recorded():
    assert filled(PAGE.read_text(), {"launches": table()}) == PAGE.read_text()


def test_every_recorded_launch_ended_well():
    """A launch of a branch that the table has no column for would be left out in silence."""
    failed = [line for line in read() if line["result"] == "fails"]
    assert not failed
    assert {line["branch"] for line in read()} <= set(BRANCHES)
