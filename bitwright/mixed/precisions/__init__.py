"""What the precision of a group is: candidates, the sites that share one, a simulation at any of them, a user's own requests.

What a choice of precisions costs is in ``choosing``; nothing here measures a model's accuracy.
"""
