"""Commands that measure a model: one module per benchmark. None has landed yet."""
