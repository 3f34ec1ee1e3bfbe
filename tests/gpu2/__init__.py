"""Do the promises of one GPU hold for two of one host?"""
