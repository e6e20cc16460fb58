"""One file a correction of the mismatch between sampler and learner."""
