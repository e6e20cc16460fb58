"""Sizes of the tests' engine."""

CHUNK = 16
"""Tokens of a prefill chunk."""
CACHE = 1024
"""Tokens of the whole KV cache."""
CONTEXT = 160
VOCABULARY = 64
EOS = 1
LAYERS = 2
