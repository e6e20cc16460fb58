"""Sampling engines and the capture of their rounding."""
