"""One method of the literature per file: arithmetic on arrays first, then the method on a ``ModelView``."""
