"""The settings of a run, and the rules that fill in what a recipe leaves open."""
