"""What the loop generates with."""
