"""The built-in demonstration: a small BERT is fine-tuned on private text in several ways."""
