"""How fast is the loader, against what, and where does it lose? See README.md."""
