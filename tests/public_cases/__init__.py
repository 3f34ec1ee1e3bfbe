"""Does the loader get right what other loaders got wrong in public?

Thirty cases from bug reports; each docstring names its source, as repository#number on
GitHub. What can only be seen on a GPU is marked ``gpu`` and runs in the GPU suite; the
streams' part of such cases is also played through on a fake device, on any machine.
"""
