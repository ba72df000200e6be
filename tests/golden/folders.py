"""The Hugging Face folders that are kept, beside what a version imported from them."""

from pathlib import Path

from megatron_gdn.hf import import_folder
from tests.hf.tiny_models import make_folder

# Name of the folder in `tests.hf.tiny_models` -> the models that it is imported as.
KEPT = {
    "next": ("hybrid", "gpt"),
    "dense tied": ("hybrid",),
    "moe packed": ("gpt",),
    "kimi": ("hybrid",),
}
# What earlier versions could not import.
LATER = {"0.1.0-hf": ("kimi",)}


def kept_of(archive: str) -> dict[str, tuple[str, ...]]:
    later = LATER.get(archive, ())
    return {name: kinds for name, kinds in KEPT.items() if name not in later}


def folder_of(name: str) -> str:
    return name.replace(" ", "_")


def write_folders(where: Path) -> None:
    """Write each folder of `KEPT`, and import it, below ``where``."""
    for name, kinds in KEPT.items():
        source = where / folder_of(name)
        make_folder(name, source)
        for kind in kinds:
            import_folder(source, where / f"{folder_of(name)}-{kind}", kind)
