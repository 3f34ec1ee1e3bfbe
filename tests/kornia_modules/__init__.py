"""Does any Kornia module passed as ``transform`` just work, and as Kornia would?"""
