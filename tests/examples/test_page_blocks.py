"""Every block of code of every page says what it is, and what can run is run.

| language | what it is | who runs it |
| --- | --- | --- |
| `python` | code | `test_page_python.py`, as printed; of docs/frameworks/X.md X_laws.py |
| `bash` | commands alone, or the flags that a launch changes | `RUN_BY`; `test_page_launches.py` |
| `text` | an equation, a drawing, output: neither commands nor Python | - |
| `{...}` | what Sphinx puts in its place | `make docs` |
"""

import ast

import pytest

from tests.examples.commands import Block, blocks_of, lines_of, pages
from tests.examples.launching import ROOT
from tests.examples.test_page_commands import RUN_BY
from tests.examples.test_page_python import BLOCKS, FRAMEWORKS


def not_run(block: Block) -> str | None:
    """Why no test runs the block; None if one does, or if there is nothing to run."""
    match block.language:
        case "python" if block.page.parent == FRAMEWORKS:
            laws = ROOT / "tests/frameworks" / f"{block.page.stem}_laws.py"
            named = laws.is_file() and f"docs/frameworks/{block.page.name}" in laws.read_text()
            return None if named else f"{laws.name} does not read the page"
        case "python":
            held = [line for line in BLOCKS.values() if line in block.code]
            return None if len(held) == 1 else "give it a row in BLOCKS of test_page_python.py"
        case "bash":
            lines = lines_of(block.code)
            if lines[0].startswith("--spec"):
                return None
            missing = [line for line in lines if line not in RUN_BY]
            return f"RUN_BY of test_page_commands.py lacks {missing}" if missing else None
        case "text":
            if any(line in RUN_BY or line.startswith("$ ") for line in lines_of(block.code)):
                return "it has commands: call it bash"
            return "it is Python: call it python" if is_python(block.code) else None
        case language if language and language.startswith("{"):
            return None
    return "say what it is after the fence: python, bash or text"


def is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except SyntaxError:
        return False


def test_every_block_of_every_page_is_run_or_has_nothing_to_run():
    blocks = blocks_of(*pages(ROOT))
    assert len(blocks) > 50
    faults = [f"{b.page.relative_to(ROOT)}: {why}\n{b.code}" for b in blocks if (why := not_run(b))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "block",
    [
        "```\nx\n```", "    x = 1\n", "```sh\nmake test\n```", "```text\nmake test\n```",
        "```text\nlayer = new(x)\n```", "```python\nlayer = new(x)\n```",
        "```bash\nmake what_is_not_there\n```", "- in a list\n\n  ```bash\n  cd elsewhere\n  ```",
    ],
)  # fmt: skip
def test_a_block_that_no_test_runs_would_be_seen(tmp_path, block):
    (tmp_path / "page.md").write_text(f"A page.\n\n{block}\n")
    (found,) = blocks_of(tmp_path / "page.md")
    assert not_run(found)
