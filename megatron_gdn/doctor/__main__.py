"""``python -m megatron_gdn.doctor``: the options, and the findings as they are made."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from itertools import chain

from ..command_line import Parser, heads

_DESCRIPTION = """\
Say what a Gated DeltaNet layer runs with on this machine, which delta rule it takes and why, what
is installed in a version that does not work, and whether the rule is exact and repeats. Seconds.
"""
_EPILOG = """\
States: ok; note, it works, but slower or with less; wrong, it raises or computes something wrong.
The exit status is 1 if anything is wrong, else 0.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("python -m megatron_gdn.doctor", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    help = "heads of one rank, as 16:32 (2:4)"
    add("--heads", type=heads, default=(2, 4), metavar="KEY:VALUE", help=help)
    add("--head-dim", type=int, default=128, help="of keys and values (128)")
    add("--tokens", type=int, default=1000, help="of the checks (1000)")
    add("--json", action="store_true", help="a list of findings, for programs")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")  # of packages that are imported; what matters is a finding
    from ..ops.delta_rule.base import HeadSizes
    from .checks import kernels, machine, packages, rules

    (key, value), findings = options.heads, []
    sizes = HeadSizes(key, value, options.head_dim, options.head_dim)
    for finding in chain(machine(), packages(), kernels(), rules(sizes, options.tokens)):
        findings.append(finding)
        if not options.json:
            print(f"{finding.state:5}  {finding.subject:26}  {finding.text}", flush=True)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    return int(any(finding.state == "wrong" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
