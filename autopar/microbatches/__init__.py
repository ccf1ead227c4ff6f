"""A step cut into microbatches that run one after another."""
