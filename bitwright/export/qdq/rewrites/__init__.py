"""Changes of a graph that runtimes ask for, and that compute the same."""
