"""Make the small pretrained model that `dpoptim train` fine-tunes in its demonstration."""
