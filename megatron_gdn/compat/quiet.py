"""What importing Megatron prints: its notes are hidden, an untested version is warned of."""

import logging
import re
import warnings
from functools import cache

OLDEST, UNTESTED_FROM = (0, 18), (0, 20)  # pyproject.toml lets 0.20 be installed too


def hide_import_notes() -> None:
    """Hide what imports of Megatron and fla print; for scripts, the library never calls it."""
    for module in ("megatron", "fla"):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


@cache
def warn_of_untested(version: str) -> None:
    """Warn if ``version`` of Megatron-Core lies outside the tested range, once."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if OLDEST <= numbers < UNTESTED_FROM:
        return
    oldest, newest = (".".join(map(str, numbers)) for numbers in (OLDEST, UNTESTED_FROM))
    warnings.warn(
        f"megatron_gdn was tested with megatron-core >= {oldest}, < {newest}, and this is "
        f"{version}, which was not tested. Install a tested version, or run this "
        f"package's tests with yours.",
        stacklevel=3,
    )
