"""The tokenizer beside an exported model is the trainer's own."""

import pytest

from tracekit.tasks.tokenizer import ARITHMETIC, PRINTABLE, CharTokenizer
from tracekit.tasks.tokenizer_hf import save_hf_tokenizer


@pytest.mark.parametrize("alphabet", [ARITHMETIC, PRINTABLE])
def test_hugging_face_reads_the_same_ids(tmp_path, alphabet):
    from transformers import AutoTokenizer

    mine = CharTokenizer(alphabet)
    save_hf_tokenizer(tmp_path, mine, max_len=128)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == mine.vocab_size and theirs.model_max_length == 128
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (0, 1, 2, 3)
    for text in ("12+34=", "", alphabet, alphabet[::-1], "7" + alphabet[-1] * 3 + "8", "1é2", " 1 . 2 \n\n"):
        assert theirs(text)["input_ids"] == mine.encode_prompt(text)
    known = alphabet + alphabet[::-1]
    assert theirs.decode(mine.encode_response(known), skip_special_tokens=True) == known
