import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit.errors import DataError
from tracekit.tasks.tokenizer import ARITHMETIC, PRINTABLE, CharTokenizer


@given(st.text(alphabet=PRINTABLE))
def test_text_survives_the_round_trip(text):
    tokenizer = CharTokenizer(PRINTABLE)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_response(text)) == text


def test_the_vocabulary_is_fixed():
    tokenizer = CharTokenizer(ARITHMETIC)
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2, 3)
    assert tokenizer.encode("0+=") == [4, 14, 21]
    assert tokenizer.encode_prompt("1=") == [1, 5, 21]
    assert tokenizer.vocab_size == 22


def test_special_tokens_inside_a_response_cannot_be_graded_away():
    tokenizer = CharTokenizer(ARITHMETIC)
    four, two = tokenizer.encode("42")
    for special in (tokenizer.pad_id, tokenizer.bos_id, tokenizer.unk_id):
        assert tokenizer.decode([four, special, two, tokenizer.eos_id]) == "4\ufffd2"
    assert tokenizer.decode([four, tokenizer.eos_id, two]) == "4"
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode([99])


def test_it_is_saved_and_read_back(tmp_path):
    tokenizer = CharTokenizer(PRINTABLE)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert CharTokenizer.load(tmp_path / "tokenizer.json") == tokenizer
    for text in ("{", "{}", '{"kind": "char", "alphabet": "aa"}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(DataError):
            CharTokenizer.load(tmp_path / "tokenizer.json")
