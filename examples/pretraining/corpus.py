"""Text files as one stream of byte tokens.

A document is the bytes (0..255) of one file. An end-of-document token is before,
between and after documents:

    EOD d0 d0 d0 EOD d1 d1 EOD ... EOD

Every position but the last is an input, and its label is the next token: each byte and
each end is predicted exactly once.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257

_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, and the files that were left out."""

    documents: tuple[bytes, ...]
    skipped: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.documents))

    def fingerprint(self) -> str:
        """Changes when any byte or boundary changes: a resumed run compares it."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(len(document).to_bytes(8, "little"))
            digest.update(document)
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class TokenStream:
    """All documents in the order of the corpus.

    Attributes:
        tokens: int16 ``[number of labels + 1]``.
        starts: positions of the end-of-document tokens before the documents, ascending.
    """

    tokens: Tensor
    starts: tuple[int, ...]

    @property
    def num_labels(self) -> int:
        return self.tokens.numel() - 1


def standard_library() -> Corpus:
    """The source of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not _NOT_LIBRARY & set(path.relative_to(root).parts)
    )
    return _read(files)


def read_paths(paths: Sequence[str]) -> Corpus:
    """The named files, and in sorted order every file below the named folders.

    Inside folders, files that are not UTF-8 text are listed in ``skipped``.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: there is not one byte of text.
    """
    named = []
    found = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"--data {path}: no such file or folder.")
        if path.is_dir():
            found += sorted(p for p in path.rglob("*") if p.is_file())
        else:
            named.append(path)
    below_folders = _read(found)
    corpus = Corpus(
        tuple(p.read_bytes() for p in named) + below_folders.documents,
        below_folders.skipped,
    )
    if not corpus.num_bytes:
        raise ValueError(
            f"--data {' '.join(map(str, paths))}: no text in there "
            f"({len(corpus.documents)} files are empty, {len(corpus.skipped)} are not "
            "UTF-8); name text files or folders of them."
        )
    return corpus


def _read(files: Sequence[Path]) -> Corpus:
    documents = []
    skipped = []
    for path in files:
        content = path.read_bytes()
        if _is_text(content):
            documents.append(content)
        else:
            skipped.append(str(path))
    return Corpus(tuple(documents), tuple(skipped))


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def token_stream(corpus: Corpus) -> TokenStream:
    """Lay the documents out one after the other, end-of-document tokens around each."""
    tokens = torch.full(
        (corpus.num_bytes + len(corpus.documents) + 1,),
        END_OF_DOCUMENT,
        dtype=torch.int16,
    )
    starts = []
    position = 0
    for document in corpus.documents:
        starts.append(position)
        if document:
            # frombuffer wants a writable buffer; the copy is short-lived.
            tokens[position + 1 : position + 1 + len(document)] = torch.frombuffer(
                bytearray(document), dtype=torch.uint8
            ).to(torch.int16)
        position += len(document) + 1
    return TokenStream(tokens, tuple(starts))
