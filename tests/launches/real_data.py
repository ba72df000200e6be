"""Text and conversations for launches: this repository's pages, and a tokenizer of
their bytes."""

import json
from pathlib import Path

from tests.examples.commands import pages
from tests.examples.launching import ROOT
from tests.launches.launching import CLONE
from tests.processes import python

# A turn is its role and what is said, each on a line.
CHAT = "{% for turn in messages %}{{ turn['role'] + '\n' + turn['content'] + '\n' }}{% endfor %}"


def save_tokenizer(folder: Path) -> None:
    """One token a byte, two special ones and a template of chats, as transformers
    stores them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    stored = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", pad_token="<pad>", chat_template=CHAT
    )
    stored.save_pretrained(folder)


def save_text(folder: Path) -> None:
    """``text_text_document``: paragraphs of the pages, one a document, by Megatron's
    own tool."""
    assert CLONE is not None
    paragraphs = [
        part for page in pages(ROOT) for part in page.read_text().split("\n\n")
    ]
    lines = (json.dumps({"text": part.strip()}) for part in paragraphs if part.strip())
    (folder / "text.jsonl").write_text("\n".join(lines))
    python(
        Path(CLONE) / "tools" / "preprocess_data.py",
        f"--input={folder / 'text.jsonl'}",
        f"--output-prefix={folder / 'text'}",
        "--append-eod",
        "--tokenizer-type=HuggingFaceTokenizer",
        f"--tokenizer-model={folder}",
        "--workers=1",
        cwd=None,
        PYTHONPATH=CLONE,
    )


def save_chats(folder: Path) -> None:
    """``chats.jsonl``: two chats a line, of 44 tokens each, which Megatron packs into
    one."""
    system = {"role": "system", "content": "Plus."}
    chats = [
        [
            system,
            {"role": "user", "content": f"{a:02} and {b:03}?"},
            {"role": "assistant", "content": f"{a + b:03}"},
        ]
        for a in range(12)
        for b in range(0, 900, 45)
    ]
    lines = (chats[i] + chats[i + 1] for i in range(0, len(chats), 2))
    messages = "\n".join(json.dumps({"messages": line}) for line in lines)
    (folder / "chats.jsonl").write_text(messages)
