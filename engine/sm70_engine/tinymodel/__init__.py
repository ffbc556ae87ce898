"""The tiny model: a checkpoint made on the spot whose right answers are known, so that a whole server can be judged."""
