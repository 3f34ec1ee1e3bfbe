"""Augmentation on the device: Kornia's modules, run the way a loader needs them."""
