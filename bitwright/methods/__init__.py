"""Post-training methods: one file per method, arithmetic on arrays first, then the method on a model of either front end."""
