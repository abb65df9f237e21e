"""Differentially private training with adaptive optimizers for PyTorch."""
