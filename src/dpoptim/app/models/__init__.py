"""Loading models and tokenizers, and preparing records for them."""
