"""One file a policy loss."""
