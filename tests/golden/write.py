"""Writes the checkpoints of this version that every later version must load:

python -m tests.golden.write 0.1.0
"""

import sys
import tarfile
import tempfile
from pathlib import Path

from tests.golden.models import FILES, MODELS, RANKS, train_and_save
from tests.ranks import RankPool


def main(version: str) -> None:
    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for tp in RANKS:
            pool = RankPool(tp)
            for name in MODELS:
                pool.run(train_and_save, name, tp, f"{folder}/{name}-tp{tp}")
            pool.stop()
        with tarfile.open(FILES / f"{version}.tar.xz", "w:xz", preset=9) as archive:
            for each in sorted(Path(folder).iterdir()):
                archive.add(each, each.name)


if __name__ == "__main__":
    main(sys.argv[1])
