"""Methods of the literature: arithmetic on arrays first, then the method on a model of either front end.

Nothing here knows which front end the model comes from. Methods that learn (``rounding``) are written in torch.
"""
