"""What runs between `dedicate_params` and the optimizer: gathers, reductions, exchanges and publishes."""
