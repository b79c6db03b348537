"""Distributed Muon for PyTorch."""
