"""Commands around checkpoints; each runs as ``python convert/NAME.py`` from any folder."""
