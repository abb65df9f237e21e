"""What is predicted, and the loss of each example."""
