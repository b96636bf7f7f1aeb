"""What quantizers cost the model's result: metrics, and the measurement of targets.

Values inside of the model are in ``values``.
"""
