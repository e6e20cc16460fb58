"""FP4 reinforcement learning of mixture-of-experts language models that does not drift."""

__version__ = "0.1.0"
