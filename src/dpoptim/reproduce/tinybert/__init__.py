"""BERT-Tiny fine-tuned privately on abstracts: the paper's table, tuned and run again, and what lies beyond it."""
