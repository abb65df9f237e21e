"""Other people's training loops: Hugging Face, Accelerate and Opacus."""
