"""Characters as tokens."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tracekit.errors import DataError

if TYPE_CHECKING:
    from tracekit.tasks.task import Task

ARITHMETIC = "0123456789+-*/().="
"""Alphabet of tasks whose problems are expressions."""

PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"
"""Alphabet of every other task: the printable ASCII characters."""

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class CharTokenizer:
    """Ids 0 to 3 are pad, bos, eos and unk; then one id a character of `alphabet`, in its order.

    A prompt is bos and its characters; a response is its characters and eos.
    """

    pad_id, bos_id, eos_id, unk_id = range(4)

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise ValueError("the alphabet repeats a character")
        self.alphabet = alphabet
        self._ids = {letter: index for index, letter in enumerate(alphabet, start=4)}

    @classmethod
    def for_task(cls, task: Task) -> CharTokenizer:
        """The smallest of the two fixed alphabets that writes the task's held-out problems. Depends on the task only,
        not on the seed, so that every seed's model has the same shape."""
        used = set().union(*(problem.prompt + problem.answer for problem in task.eval))
        return cls(ARITHMETIC if used <= set(ARITHMETIC) else PRINTABLE)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return 4 + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """One id a character; characters outside the alphabet become unk."""
        return [self._ids.get(letter, self.unk_id) for letter in text]

    def encode_prompt(self, text: str) -> list[int]:
        """bos and the characters."""
        return [self.bos_id, *self.encode(text)]

    def encode_response(self, text: str) -> list[int]:
        """The characters and eos."""
        return [*self.encode(text), self.eos_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text up to the first eos. A pad, bos or unk inside shows as U+FFFD: were it dropped, a response with
        one between its digits would be graded as right."""
        letters = []
        for index in ids:
            if index == self.eos_id:
                break
            if not 0 <= index < self.vocab_size:
                raise ValueError(f"token id {index} is outside the vocabulary of {self.vocab_size}")
            letters.append(UNKNOWN if index < 4 else self.alphabet[index - 4])
        return "".join(letters)

    def decode_batch(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """`decode` of each row."""
        return [self.decode(row) for row in rows]

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON."""
        path.write_text(
            json.dumps({"kind": "char", "special": ["pad", "bos", "eos", "unk"], "alphabet": self.alphabet})
        )

    @classmethod
    def load(cls, path: Path) -> CharTokenizer:
        """Read what `save` wrote. Raises DataError if it is something else."""
        try:
            saved = json.loads(path.read_text())
            if saved["kind"] == "char":
                return cls(saved["alphabet"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        raise DataError(f"{path} is not a saved character tokenizer; start the run over with --clean")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and other.alphabet == self.alphabet

    __hash__ = None
