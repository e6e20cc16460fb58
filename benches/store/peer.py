"""What the bench asks of a way to keep records."""

ROWS = 256


class Peer:
    name = ""
    checks = False
    """Whether a flipped bit is noticed."""
    few = False
    """Slow: measured on a quarter of the trajectories."""
