"""Do the promises that only a GPU can test hold? See ``run.py`` for the whole run."""
