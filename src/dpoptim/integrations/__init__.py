"""Training loops of other libraries: Hugging Face, Accelerate and Opacus."""
