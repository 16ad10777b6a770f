"""Draw what the lanes of one warp touch."""
