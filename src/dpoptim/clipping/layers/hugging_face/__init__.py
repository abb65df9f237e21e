"""Layer rules for parts of Hugging Face models that own parameters in unusual ways."""
