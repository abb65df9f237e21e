"""Models and tokenizers, and everything that is made ready for them."""
