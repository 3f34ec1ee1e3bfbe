"""What do frameworks need beyond the loader itself? One file for each that does."""
