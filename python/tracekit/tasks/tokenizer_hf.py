"""The character tokenizer in the files that Hugging Face's tokenizers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tracekit.tasks.tokenizer import CharTokenizer

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Names of ids 0 to 3."""


def save_hf_tokenizer(folder: Path, tokenizer: CharTokenizer, *, max_len: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` to `folder`, beside a model of context `max_len`.

    A text becomes bos and its characters there, as by `encode_prompt`.
    """
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_len, **names}
    # Without this the library would drop the space before a punctuation mark.
    config["clean_up_tokenization_spaces"] = False
    for name, values in (("tokenizer.json", _tokenizer(tokenizer)), ("tokenizer_config.json", config)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")


def _tokenizer(tokenizer: CharTokenizer) -> dict[str, Any]:
    """A word-level model whose words are single characters, joined again without a space between them."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos, first, second = (
        {"SpecialToken": {"id": "<bos>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}},
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for i, name in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [tokenizer.bos_id], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate([*SPECIAL, *tokenizer.alphabet])},
            "unk_token": "<unk>",
        },
    }
