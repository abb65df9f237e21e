"""The paper's experiments, run again: cells of settings, lines in a file, tables and pictures of the file alone."""
