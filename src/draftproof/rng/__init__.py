"""Counter-based randomness: Philox4x32-10 and the named streams. A draw is a pure function of (seed, offset, name)."""
