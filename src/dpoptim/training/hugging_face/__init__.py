"""Private training in Hugging Face's own loops: Trainer and Accelerate."""
