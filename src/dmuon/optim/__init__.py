"""The optimizer and its parts: orthogonalization, the update rule, and `Muon`."""
