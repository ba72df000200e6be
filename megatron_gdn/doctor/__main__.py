"""``python -m megatron_gdn.doctor``: reads the options and prints the findings."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from itertools import chain

from ..command_line import MOST_HEAD_DIM, Parser, parse_heads, parse_whole_number

_DESCRIPTION = """\
Print this machine's GPU and packages, the delta rule that a Gated DeltaNet layer takes and why,
versions that do not work, and whether the rule is exact and repeats its bits, within seconds.
"""
_MOST_TOKENS = 2**20
_EPILOG = """\
States: ok; note: the layer works, but slower or with fewer functions; wrong: the layer raises or
computes wrong values. The exit status is 1 if a finding is wrong, else 0.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print each finding when its check ends; return 1 if a finding is wrong, else 0.

    ``argv`` has the options; None: those of the command line. With ``--json`` all
    findings are printed at the end.
    """
    parser = Parser(
        "python -m megatron_gdn.doctor", description=_DESCRIPTION, epilog=_EPILOG
    )
    add = parser.add_argument
    heads_help = "heads of one rank, as 16:32 (2:4)"
    add(
        "--heads",
        type=parse_heads,
        default=(2, 4),
        metavar="KEY:VALUE",
        help=heads_help,
    )
    head_dim = partial(parse_whole_number, most=MOST_HEAD_DIM)
    add("--head-dim", type=head_dim, default=128, help="of keys and values (128)")
    tokens = partial(parse_whole_number, most=_MOST_TOKENS)
    add("--tokens", type=tokens, default=1000, help="of the checks (1000)")
    add("--json", action="store_true", help="a list of findings, for programs")
    options = parser.parse_args(argv)
    # Hide the warnings of imported packages; the findings report what matters.
    warnings.simplefilter("ignore")
    from ..ops.delta_rule.base import HeadSizes
    from .checks import (
        check_kernel_versions,
        check_machine,
        check_packages,
        check_rules,
    )

    key_heads, value_heads = options.heads
    findings = []
    sizes = HeadSizes(key_heads, value_heads, options.head_dim, options.head_dim)
    for finding in chain(
        check_machine(),
        check_packages(),
        check_kernel_versions(),
        check_rules(sizes, options.tokens),
    ):
        findings.append(finding)
        if not options.json:
            print(
                f"{finding.state:5}  {finding.subject:26}  {finding.text}", flush=True
            )
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
    return int(any(finding.state == "wrong" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
