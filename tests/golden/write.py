"""Writes the files of this version that every later version must load, checkpoints of
its mixers and Hugging Face folders with what is imported from them:

python -m tests.golden.write 0.2.0
"""

import sys
import tarfile
import tempfile
from pathlib import Path

from tests.golden.folders import write_folders
from tests.golden.models import FILES, RANKS, models_of, train_and_save
from tests.ranks import RankPool


def main(version: str) -> None:
    FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for tp in RANKS:
            pool = RankPool(tp)
            for name in models_of(version):
                pool.run(train_and_save, version, name, tp, f"{folder}/{name}-tp{tp}")
            pool.stop()
        _keep(Path(folder), f"{version}.tar.xz")
    with tempfile.TemporaryDirectory() as folder:
        write_folders(Path(folder))
        _keep(Path(folder), f"{version}-hf.tar.xz")


def _keep(folder: Path, name: str) -> None:
    with tarfile.open(FILES / name, "w:xz", preset=9) as archive:
        for each in sorted(folder.iterdir()):
            archive.add(each, each.name)


if __name__ == "__main__":
    main(sys.argv[1])
