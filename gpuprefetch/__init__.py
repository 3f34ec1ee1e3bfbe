"""Copies and augments the next batch on a side stream while the model trains."""
