"""Per-sample augmentation of image batches: one plan, three appliers."""
