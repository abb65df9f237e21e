"""Synthetic texts: generating them with a private model, and measuring them."""
