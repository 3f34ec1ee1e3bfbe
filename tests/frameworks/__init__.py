"""Do the frameworks that own the loop get along with the loader?"""
