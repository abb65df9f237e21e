"""The built-in demonstration, on text that is on every machine."""
