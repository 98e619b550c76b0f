"""From a request to the exact token ids its engine will compute, and from those to content keys."""
