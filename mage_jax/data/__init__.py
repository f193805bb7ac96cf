"""Records, images to patches, packing, loaders."""
