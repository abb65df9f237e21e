"""The demonstration's vocabulary: the same in every process, and complete."""

from __future__ import annotations

from experiments.demo.make_model import vocabulary


def test_vocabulary_is_counted_in_a_fixed_order():
    texts = ["return the value of the argument", "the arguments of a function are values", "Compute 2*x + 1"]
    tokenizer = vocabulary(texts)
    assert tokenizer.get_vocab() == vocabulary(texts).get_vocab()
    assert tokenizer.tokenize("The value") == ["the", "value"]
    assert "[UNK]" not in tokenizer.tokenize("zebra: x_1 <= 7")
    assert tokenizer.convert_ids_to_tokens(tokenizer("the")["input_ids"]) == ["[CLS]", "the", "[SEP]"]
